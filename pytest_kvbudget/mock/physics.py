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
from pytest_kvbudget.mock.spec import Arena, MockDevice
from pytest_kvbudget.units import GIB, MIB

IMPRECISE_OVERHEAD_BYTES: Final = int(2.35 * GIB)
"""Compile and capture headroom of the fork's default plan (RDNA4 document, section 4)."""
OVERHEAD_PER_1024_TOKENS: Final = int(0.22 * GIB)
"""Of ``max_num_batched_tokens`` above 4096 (the same, section 3)."""
GRAPH_CHARGE_MB: Final = (256, 52)
"""The fork's default charge: base and per graph (the same, section 2)."""


class ArenaPlan(msgspec.Struct, frozen=True):
    """The fork's plan for one rank, bytes."""

    budget_bytes: int
    non_expert_bytes: int
    kv_reserve_bytes: int
    graph_bytes: int
    overhead_bytes: int
    room_bytes: int
    slots: int

    def arena_bytes(self, arena: Arena) -> int:
        """Bytes of all slots."""
        return self.slots * arena.slot_bytes


class Physics:
    """One shape on one device; sizes are bytes per rank."""

    def __init__(self, spec: MockDevice, arguments: Arguments, environ: Mapping[str, str] = os.environ) -> None:
        self.spec = spec
        self.arguments = arguments
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
        self.activation_bytes = (
            spec.activation_base + spec.activation_per_batched_token * arguments.max_num_batched_tokens
        )
        self.block_tokens = self._block_tokens()
        self.block_bytes = self.block_tokens * self.kv_bytes_per_token
        self.graph_sizes = () if arguments.enforce_eager else graph_sizes(arguments)
        self.graph_bytes = spec.graph_base + spec.graph_per_size * len(self.graph_sizes) if self.graph_sizes else 0
        self.graph_estimate_bytes = self._graph_estimate(environ)
        self.arena_plan = self._plan(spec.arena) if spec.arena else None

    def _shared(self, size_bytes: int) -> int:
        return -(-size_bytes * self.spec.ranks // self.ranks)

    def _block_tokens(self) -> int:
        """VLLM's rule for hybrids: the smallest multiple of the block size whose page holds one state."""
        size = self.spec.block_size
        if not self.state_bytes:
            return size
        return size * max(1, -(-self.state_bytes // (size * self.kv_bytes_per_token)))

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a request of so many tokens needs, the one of its state included."""
        return -(-tokens // self.block_tokens) + (1 if self.state_bytes else 0)

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

    def request_peak_bytes(self, tokens: int) -> int:
        """What a real request takes beyond warm-up."""
        return self.spec.request_peak_base + self.spec.request_peak_per_token * tokens

    def _graph_estimate(self, environ: Mapping[str, str]) -> int:
        """Exact, unless the fork is told a charge."""
        if not self.graph_sizes:
            return 0
        names = ("VLLM_CUDAGRAPH_MEM_BASE_MB", "VLLM_CUDAGRAPH_MEM_PER_GRAPH_MB", "VLLM_CUDAGRAPH_MEM_ESTIMATE_MB")
        base, per_graph, total = (environ.get(name) for name in names)
        if self.spec.dialect != "rdna4" or not (base or per_graph or total):
            return self.graph_bytes
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
        overhead += OVERHEAD_PER_1024_TOKENS * max(0, self.arguments.max_num_batched_tokens - 4096) // 1024
        room = budget - self.weights_bytes - reserve - self.graph_estimate_bytes - overhead
        return ArenaPlan(
            budget, self.weights_bytes, reserve, self.graph_estimate_bytes, overhead, room,
            max(0, room) // arena.slot_bytes,
        )  # fmt: skip


def graph_sizes(arguments: Arguments) -> tuple[int, ...]:
    """Batch sizes that vLLM 0.32 captures, ascending (``VllmConfig._set_cudagraph_sizes``)."""
    largest = min(2 * arguments.max_num_seqs, 512, arguments.max_num_batched_tokens)
    candidates = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return tuple(size for size in candidates if size <= largest)


def decode_sizes(sizes: tuple[int, ...], max_num_seqs: int) -> tuple[int, ...]:
    """The sizes of which full decode graphs are captured."""
    return tuple(size for size in sizes if size <= max_num_seqs)
