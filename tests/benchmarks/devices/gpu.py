"""GPUs and a CPU host under vLLM: plain, hybrid state, expert offload with an arena, a pinned pool."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pytest_kvbudget.shape import Shape
from pytest_kvbudget.verdict import Phase
from tests.benchmarks.devices.model import GIB, MIB, Printed, Shown, allocator, exact, gib, probe


@dataclass(frozen=True)
class Gpu:
    """The KV cache gets what utilization, weights, activation and the charge for graphs leave of the device."""

    family: str
    total: float
    util: float
    resident: float
    """Weights and everything outside torch."""
    activation: float
    per_window_token: float
    """Activation that grows with the window: no chunked prefill."""
    rate: float
    """KV bytes of one token."""
    block: int
    state_blocks: int
    """Blocks that hold the state of one sequence of a hybrid model."""
    seqs: int
    graphs: float
    charged: float
    """What the engine believes the graphs take."""
    pinned: float | None = None
    """Bytes of a pinned pool; the rest of the device then decides nothing."""
    minutes: tuple[float, float] = (2.5, 4.0)
    """Until the KV check, and until ready."""

    def shape(self, value: int) -> Shape:
        """Nothing but the window, and the pin where there is one."""
        return Shape(
            max_model_len=value,
            max_num_seqs=self.seqs,
            kv_cache_memory_bytes=None if self.pinned is None else int(self.pinned),
        )

    def available(self, window: int, extra_bytes: float) -> float:
        """Bytes for the KV cache."""
        if self.pinned is not None:
            return self.pinned - self.block * self.rate
        budget = self.total * self.util - self.resident - self.activation - self.per_window_token * window
        return budget - self.charged - extra_bytes

    def boot(self, value: int, extra_bytes: float = 0.0) -> Shown:
        """KV check, then capture."""
        block_bytes = self.block * self.rate
        available = self.available(value, extra_bytes)
        need = (math.ceil(value / self.block) + self.state_blocks) * block_bytes
        blocks = math.floor(available / block_bytes)
        if blocks <= 0:
            return Shown("kv_budget_nonpositive", Phase.KV_CHECK, minutes=self.minutes[0])
        if self.state_blocks and blocks < self.seqs:
            facts = {"state_blocks": exact(blocks), "max_num_seqs": exact(self.seqs)}
            return Shown("max_num_seqs_exceeds_state", Phase.KV_CHECK, facts, minutes=self.minutes[0])
        shown = self.pinned if self.pinned is not None else available
        if need > available:
            longest = (blocks - self.state_blocks) * self.block
            facts = {"kv_needed_bytes": gib(need), "available_kv_bytes": gib(shown)}
            if longest > 0:
                facts["estimated_max_model_len"] = exact(longest)
            return Shown("kv_check_short", Phase.KV_CHECK, facts, minutes=self.minutes[0])
        # torch's own reserve and the driver are outside the share that utilization gives
        left = self.total * (1 - self.util) + self.charged - self.graphs - extra_bytes - 0.2 * GIB
        if self.pinned is None and left < 0:
            facts = {"tried_alloc_bytes": allocator(76 * MIB), "free_bytes": allocator(0)}
            return Shown("graph_capture_oom", Phase.GRAPH_CAPTURE, facts, minutes=self.minutes[1])
        concurrency = available / need
        facts = {
            "kv_tokens": exact(int(concurrency * value)),
            "max_concurrency": Printed(round(concurrency, 2), 0.005),
        }
        if self.pinned is None:
            facts["available_kv_bytes"] = gib(available)
        free = None if self.pinned is not None else probe(left)
        return Shown(facts=facts, free_bytes=free, minutes=self.minutes[1])


@dataclass(frozen=True)
class Offload:
    """The RDNA4 fork: the plan's rest becomes an arena of expert slots, and the pool is pinned and scaled."""

    family: str
    total: float
    util: float
    non_expert: float
    registry_rate: float
    """KV bytes of a token in the registry, for the plan."""
    rate: float
    """What a token really takes."""
    windows: int
    slot: float
    slots_min: int
    graphs: float
    charged: float
    overhead: float
    planned: float
    minutes: tuple[float, float] = (6.0, 8.0)

    def shape(self, value: int) -> Shape:
        """The pool grows with the window."""
        return Shape(
            max_model_len=value,
            max_num_seqs=self.windows,
            kv_cache_memory_bytes=int(self.rate * self.windows * value * 1.002),
        )

    def boot(self, value: int, extra_bytes: float = 0.0) -> Shown:
        """Plan, pool, capture."""
        reserve = 1.08 * self.registry_rate * value
        room = self.total * self.util - self.non_expert - reserve - self.charged - self.planned
        slots = math.floor(room / self.slot)
        facts = {"plan_registry_b_per_token": exact(int(self.registry_rate))}
        if slots < self.slots_min:
            return Shown("plan_refused", Phase.ARGUMENT, minutes=0.3)
        # the planner wants somewhat more than the resident layers that its table names
        facts["plan_expert_cache_bytes"] = gib(slots * self.slot)
        facts["plan_resident_layers_bytes"] = gib((self.slots_min - 48) * self.slot)
        pool = self.shape(value).kv_cache_memory_bytes or 0
        before = self.total - self.non_expert - slots * self.slot - self.overhead - extra_bytes
        if pool > before:
            facts |= {"tried_alloc_bytes": allocator(pool), "free_bytes": allocator(max(before, 0.0))}
            return Shown("kv_alloc_oom", Phase.KV_ALLOC, facts, minutes=self.minutes[0])
        left = before - pool - self.graphs
        if left < 0:
            facts |= {"tried_alloc_bytes": allocator(76 * MIB), "free_bytes": allocator(0)}
            return Shown("graph_capture_oom", Phase.GRAPH_CAPTURE, facts, minutes=self.minutes[1])
        facts["kv_tokens"] = exact(int(pool / self.rate))
        return Shown(facts=facts, free_bytes=probe(left), minutes=self.minutes[1])
