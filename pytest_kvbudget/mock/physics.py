"""What a shape takes on the simulated device: pure arithmetic, the simulator's own.

It shares nothing with the arithmetic that predicts and explains boots: two sides of one check may not copy each other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Final

import msgspec

from pytest_kvbudget.mock.arguments import Arguments
from pytest_kvbudget.mock.conditions import Conditions, digest, shape_key, shape_noise
from pytest_kvbudget.mock.spec import Arena, MockDevice
from pytest_kvbudget.units import GIB, MIB

IMPRECISE_OVERHEAD_BYTES: Final = int(2.35 * GIB)
"""Compile and capture headroom of the fork's default plan (RDNA4 document, section 4)."""
OVERHEAD_PER_1024_TOKENS: Final = int(0.22 * GIB)
"""Of ``max_num_batched_tokens`` above 4096 (the same, section 3)."""
GRAPH_CHARGE_MB: Final = (256, 52)
"""The fork's default charge: base and per graph (the same, section 2)."""
HOST_KEPT_BYTES: Final = (7 * GIB, 5 * GIB)
"""What the fork leaves to the host, beside 5 % of what is available: for each rank, and once (facts, section 3)."""
ABSURD: Final = 10**9
"""Factor of an estimate that is ``huge``."""
PHASES: Final = {
    "gpu": (
        ("worker_init", "start"), ("weights_load", "load"), ("compile", "compile"), ("profile", "profile"),
        ("kv_alloc", "kv_alloc"), ("graph_capture", "capture"), ("warmup", "warm_up"),
    ),
    "neuron": (
        ("worker_init", "start"), ("weights_load", "load"), ("profile", "profile"), ("kv_alloc", "kv_alloc"),
        ("compile", "build"), ("model_load", "load_programs"), ("warmup", "warm_up"),
    ),
}  # fmt: skip
"""Phases of a boot in order, and the method of a rank that runs each."""


class ArenaPlan(msgspec.Struct, frozen=True):
    """The fork's plan for one rank, bytes."""

    budget_bytes: int
    non_expert_bytes: int
    kv_reserve_bytes: int
    graph_bytes: int
    overhead_bytes: int
    room_bytes: int
    slots: int
    host_experts_bytes: int
    """Experts of one rank that are not in the arena."""
    host_usable_bytes: int | None
    """What the host gives all ranks, ``None`` where nothing is said of the host."""

    def arena_bytes(self, arena: Arena) -> int:
        """Bytes of all slots."""
        return self.slots * arena.slot_bytes


class Physics:
    """One shape on one device; sizes are bytes per rank.

    Args:
        spec: the device.
        arguments: the shape, as the command line gave it.
        environ: the engine's environment.
        conditions: what this boot meets.
    """

    def __init__(
        self,
        spec: MockDevice,
        arguments: Arguments,
        environ: Mapping[str, str] = os.environ,
        conditions: Conditions = Conditions(),  # noqa: B008 - frozen
    ) -> None:
        self.spec = spec
        self.arguments = arguments
        self.environ = dict(environ)
        self.conditions = conditions
        self.cold = False
        """Nothing of this compile key was in the cache."""
        self.ranks = arguments.tensor_parallel_size or spec.ranks
        self.max_model_len = arguments.max_model_len or spec.native_max_model_len
        self.auto_fit = self.max_model_len == -1
        if self.auto_fit:
            self.max_model_len = spec.native_max_model_len
        self.requested_bytes = math.ceil(spec.device_total * arguments.gpu_memory_utilization)
        # another number of ranks shares the same whole
        self.weights_bytes = self._shared(spec.weights)
        self.kv_bytes_per_token = max(1, self._shared(spec.kv_bytes_per_token))
        self.state_bytes = self._shared(spec.state_bytes_per_seq)
        self.chunked = chunks(spec.chunked_prefill, self.max_model_len)
        self.batched_tokens = arguments.max_num_batched_tokens
        if not self.chunked:
            self.batched_tokens = max(self.batched_tokens, self.max_model_len)
        self.shape_noise_bytes = shape_noise(spec, shape_key(arguments, self.environ))
        self._step_bytes = (
            spec.activation_base
            + spec.activation_per_batched_token * self.batched_tokens
            + spec.activation_per_window_token * self.max_model_len
        )
        self.block_tokens = self._block_tokens()
        self.block_bytes = self.block_tokens * self.kv_bytes_per_token
        self.state_blocks = -(-self.state_bytes // self.block_bytes)
        self.graph_sizes = () if arguments.enforce_eager or self.neuron else graph_sizes(arguments)
        self.graph_bytes = spec.graph_base + spec.graph_per_size * len(self.graph_sizes) if self.graph_sizes else 0
        self.graph_estimate_bytes = self._graph_estimate()
        self.arena_plan = self._plan(spec.arena) if spec.arena else None

    @property
    def neuron(self) -> bool:
        """It runs on NeuronCores."""
        return self.spec.dialect == "neuron"

    @property
    def phases(self) -> tuple[tuple[str, str], ...]:
        """See `PHASES`."""
        return PHASES["neuron" if self.neuron else "gpu"]

    @property
    def compiles_only(self) -> bool:
        """Neuron programs are compiled on a host without devices."""
        return self.neuron and self.environ.get("VLLM_NEURON_CPU_COMPILE") == "1"

    @property
    def boot_bytes(self) -> int:
        """What this boot takes more than its shape does; an eager engine compiles nothing, and is never cold."""
        cold = self.cold and (self.neuron or not self.arguments.enforce_eager)
        return self.conditions.noise_bytes + (self.spec.cold_extra if cold else 0)

    @property
    def activation_bytes(self) -> int:
        """Peak of one step; programs of Neuron take their noise themselves."""
        noise_bytes = 0 if self.neuron else self.shape_noise_bytes + self.boot_bytes
        return max(0, self._step_bytes + noise_bytes)

    def non_torch_bytes(self, rank: int) -> int:
        """What a rank takes outside torch."""
        arena, base_bytes = self.spec.arena, self.spec.non_torch
        if arena is not None and arena.overhead_real is not None:
            base_bytes = max(0, arena.overhead_real - self.activation_bytes)
        return base_bytes + rank * self.spec.rank_skew

    def pause_s(self, phase: str) -> float:
        """How long a phase of this boot takes."""
        cold_s = getattr(self.spec.seconds.cold, phase, None) if self.cold else None
        return float(getattr(self.spec.seconds, phase) if cold_s is None else cold_s)

    def compile_key(self, blocks: int = 0) -> str:
        """Key of what is compiled: on Neuron the KV cache is a part of every program, elsewhere only steps are."""
        shared = (self.arguments.model, self.ranks, self.arguments.kv_cache_dtype)
        if self.neuron:
            # the core's size and both lists of buckets are in the arguments
            given = sorted(self.arguments.given.items(), key=str)
            keyed = [item for item in given if item[0] not in {"host", "port", "gpu_memory_utilization"}]
            return digest(*shared, blocks, self.block_tokens, keyed, self.environ.get("NEURON_LOGICAL_NC_CONFIG"))
        return digest(*shared, self.batched_tokens, self.arguments.enforce_eager)

    def _shared(self, size_bytes: int) -> int:
        return -(-size_bytes * self.spec.ranks // self.ranks)

    def _block_tokens(self) -> int:
        """VLLM's rule for hybrids: the smallest multiple of the block size whose page holds one state."""
        size = self.spec.kv_page_tokens or self.arguments.block_size or self.spec.block_size
        if not self.state_bytes or self.spec.kv_page_tokens:
            return size
        return size * max(1, -(-self.state_bytes // (size * self.kv_bytes_per_token)))

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a request of so many tokens needs, those of its state included."""
        if self.spec.kv_window_tokens:
            # vLLM's rule for sliding windows: the window before the step, the step, a block for their misalignment
            tokens = min(tokens, self.spec.kv_window_tokens - 1 + self.batched_tokens)
            return -(-tokens // self.block_tokens) + 1 + self.state_blocks
        return -(-tokens // self.block_tokens) + self.state_blocks

    def need_bytes(self, tokens: int) -> int:
        """Pool that one request of so many tokens needs."""
        return self.blocks_for(tokens) * self.block_bytes

    def estimated_len(self, available_bytes: int) -> int:
        """VLLM's own binary search for the longest window that fits; 0 when not even one token does."""
        low, high, found = 1, self.max_model_len, 0
        while low <= high:
            middle = (low + high) // 2
            if self.need_bytes(middle) <= available_bytes:
                found, low = middle, middle + 1
            else:
                high = middle - 1
        return found

    def said_len(self, available_bytes: int) -> int:
        """What the engine says of the longest window that fits; 0 where it says nothing."""
        exact, said = self.estimated_len(available_bytes), self.spec.estimate
        if isinstance(said, float):
            return int(exact * said)
        if said == "proportional":
            return int(self.max_model_len * available_bytes / self.need_bytes(self.max_model_len))
        factors = {"exact": 1.0, "absent": 0.0, "huge": float(ABSURD), "negative": -1.0,
                   "alternating": 2.0 if self.conditions.boot % 2 else 0.5}  # fmt: skip
        return int(exact * (factors[said] if said in factors else float(said.removeprefix("factor "))))

    def request_peak_bytes(self, tokens: int) -> int:
        """What a real request takes beyond warm-up."""
        return self.spec.request_peak_base + self.spec.request_peak_per_token * tokens

    def _graph_estimate(self) -> int:
        """What graphs are charged: by the fork's variables, by its rule, or as the device says."""
        if not self.graph_sizes:
            return 0
        names = ("VLLM_CUDAGRAPH_MEM_BASE_MB", "VLLM_CUDAGRAPH_MEM_PER_GRAPH_MB", "VLLM_CUDAGRAPH_MEM_ESTIMATE_MB")
        base, per_graph, total = (self.environ.get(name) for name in names)
        by_rule = self.spec.arena is not None and self.spec.arena.charged_by_rule
        if self.spec.dialect != "rdna4" or not (base or per_graph or total or by_rule):
            return int(self.graph_bytes * self.spec.graph_estimate)
        if total:
            return int(float(total) * MIB)
        return int((float(base or GRAPH_CHARGE_MB[0]) + float(per_graph or GRAPH_CHARGE_MB[1])
                    * len(self.graph_sizes)) * MIB)  # fmt: skip

    def _plan(self, arena: Arena) -> ArenaPlan:
        """Section 1 of the RDNA4 document."""
        budget = int(self.spec.device_total * self.arguments.gpu_memory_utilization)
        exact = arena.registry_bytes_per_token * self.max_model_len + self.state_bytes
        reserve = int(arena.reserve_factor * exact)
        overhead = arena.overhead_planned + (0 if self.arguments.expert_precise_memory else IMPRECISE_OVERHEAD_BYTES)
        overhead += OVERHEAD_PER_1024_TOKENS * max(0, self.batched_tokens - 4096) // 1024
        room = budget - self.weights_bytes - reserve - self.graph_estimate_bytes - overhead
        slots = max(0, room) // arena.slot_bytes
        return ArenaPlan(
            budget, self.weights_bytes, reserve, self.graph_estimate_bytes, overhead, room, slots,
            max(0, arena.experts - slots) * arena.slot_bytes, self._host_usable(arena),
        )  # fmt: skip

    def _host_usable(self, arena: Arena) -> int | None:
        if arena.host_bytes is None:
            return None
        if self.arguments.expert_offload_mem is not None:
            return int(self.arguments.expert_offload_mem * GIB)
        per_rank, once = HOST_KEPT_BYTES
        return int(arena.host_bytes * 0.95) - arena.ple_bytes - per_rank * self.ranks - once


def chunks(setting: bool | int | str, window: int) -> bool:
    """Whether prefill is chunked at this window (`MockDevice.chunked_prefill`)."""
    if isinstance(setting, bool):
        return setting
    if isinstance(setting, int):
        return window <= setting
    state, _, above = setting.partition(" above ")
    return (state == "on") is (not above or window > int(above))


def graph_sizes(arguments: Arguments) -> tuple[int, ...]:
    """Batch sizes that vLLM 0.32 captures, ascending (``VllmConfig._set_cudagraph_sizes``)."""
    largest = min(2 * arguments.max_num_seqs, 512, arguments.max_num_batched_tokens)
    candidates = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return tuple(size for size in candidates if size <= largest)


def decode_sizes(sizes: tuple[int, ...], max_num_seqs: int) -> tuple[int, ...]:
    """The sizes of which full decode graphs are captured."""
    return tuple(size for size in sizes if size <= max_num_seqs)
