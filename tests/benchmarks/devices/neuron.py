"""A NeuronCore: the KV budget is fixed before anything is compiled, and every new shape compiles again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pytest_kvbudget.shape import Shape
from pytest_kvbudget.verdict import Phase
from tests.benchmarks.devices.model import GIB, Printed, Shown, allocator, exact, gib, probe


@dataclass(frozen=True)
class Neuron:
    """One logical core in headroom mode; the axis is the window."""

    family: str
    core: float
    limit: float
    """Of one program, for the compiler: the stack that the core is on."""
    weights: float
    headroom: float
    minimum: float
    rate: float
    """KV bytes of one token."""
    scratch_base: float
    scratch_per_token: float
    scratch_per_kv: float
    """Of a program, per byte of KV cache that it reads."""
    load_extra: float
    """Code, rings and collectives that loading takes beside the program's tensors."""
    allocatable: float
    """What the runtime can really give of the core."""
    prints_numbers: bool
    window: int = 4096
    """Of a headroom sweep."""
    minutes: tuple[float, float, float] = (3.0, 20.0, 4.0)
    """Until the KV check, compiling, loading."""

    def shape(self, value: int) -> Shape:
        """A window; the headroom stays."""
        return Shape(max_model_len=value, reserved_headroom=int(self.headroom))

    def boot(self, value: int, extra_bytes: float = 0.0) -> Shown:
        """KV check, compile, load."""
        check, compiling, loading = self.minutes
        kv = max(self.core - self.weights - self.headroom, 0.0)
        # the startup log states the core, the weights, the headroom and what is left
        start = {"total_bytes": gib(self.core), "weights_bytes": gib(self.weights)}
        budget = {"effective_kv_bytes": gib(kv), "min_kv_bytes": gib(self.minimum), **start}
        if kv < self.minimum:
            return Shown("min_kv_budget", Phase.KV_CHECK, budget, minutes=check)
        need = value * self.rate
        if need > kv:
            facts = {"kv_needed_bytes": gib(need), "available_kv_bytes": gib(kv)}
            if kv >= self.rate:
                facts["estimated_max_model_len"] = exact(int(kv / self.rate))
            return Shown("kv_check_short", Phase.KV_CHECK, facts, minutes=check)
        scratch = self.scratch_base + self.scratch_per_token * value + self.scratch_per_kv * kv
        peak = self.weights + kv + scratch + extra_bytes
        if peak > self.limit:
            facts = dict(start)
            if self.prints_numbers:
                facts |= {
                    "peak_hbm_bytes": gib(peak),
                    "hbm_limit_bytes": gib(self.limit),
                    "scratchpad_bytes": gib(scratch),
                }
            return Shown("compile_hbm_exceeded", Phase.COMPILE, facts, minutes=check + compiling / 2)
        left = self.allocatable - peak - self.load_extra
        if left < 0:
            # one of many pieces: the log names its size and not what is left
            facts = start | ({"tried_alloc_bytes": allocator(0.25 * GIB)} if self.prints_numbers else {})
            return Shown("runtime_hbm_oom", Phase.MODEL_LOAD, facts, minutes=check + compiling + loading)
        facts = {"kv_tokens": exact(int(kv / self.rate)), "max_concurrency": Printed(round(kv / need, 2), 0.005)}
        facts |= {"available_kv_bytes": gib(kv), **budget}
        return Shown(facts=facts, free_bytes=probe(left), minutes=check + compiling + loading)


@dataclass(frozen=True)
class NeuronHeadroom:
    """The same core with the headroom as what is turned."""

    core: Neuron
    family: str = "sweep"

    def shape(self, value: int) -> Shape:
        """A headroom; the window stays."""
        return Shape(max_model_len=self.core.window, reserved_headroom=value)

    def boot(self, value: int, extra_bytes: float = 0.0) -> Shown:
        """One boot with this headroom."""
        return replace(self.core, headroom=float(value)).boot(self.core.window, extra_bytes)
