"""Mainline vLLM: what a worker asks for, what is left for the KV cache, and the byte suggestions it prints.

Read in source over thirty releases (facts on vLLM, sections 1 and 2); the CPU worker's rules from 0.28 and later.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import msgspec

from pytest_kvbudget.budget.model import BudgetInputError, Plan, Reach, Refusal, gives, takes
from pytest_kvbudget.budget.utilization import requested_bytes
from pytest_kvbudget.units import MIB, format_size
from pytest_kvbudget.verdict import Provenance

SOURCE: Final = "vLLM, GPU worker"
CPU_SOURCE: Final = "vLLM, CPU worker (0.28 and later)"
REDUNDANCY_BYTES: Final = 150 * MIB
"""Subtracted from both suggestions, against a profile that counts too little."""


def default_utilization(version: str) -> float:
    """Utilization where nothing sets it: 0.9, and 0.92 from 0.20.2 (facts, section 3).

    Raises:
        BudgetInputError: the version cannot be read, so that the default is not known.
    """
    return 0.92 if _release(version) >= (0, 20, 2) else 0.9


def peak_has_graphs(version: str) -> bool:
    """The printed peak activation already contains the estimate of the graphs: from 0.27 (facts, section 3).

    Raises:
        BudgetInputError: the version cannot be read.
    """
    return _release(version) >= (0, 27, 0)


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    if match is None:
        raise BudgetInputError(f"vLLM version {version!r} cannot be read; expected as '0.32.0'")
    return tuple(int(part or 0) for part in match.groups())


def kv_plan(
    *,
    total_bytes: int,
    utilization: float,
    consumed_bytes: int,
    peak_activation_bytes: int | None,
    graph_bytes: int | None = 0,
    kv_cache_memory_bytes: int | None = None,
    provenance: Provenance = Provenance.MEASURED,
) -> Plan:
    """What is left for the KV cache of one rank: ``ceil(total * util) - consumed - peak activation - graphs``.

    Args:
        total_bytes: the device.
        utilization: in (0, 1].
        consumed_bytes: weights and non-torch memory.
        peak_activation_bytes: from 0.27 on it already contains the applied graph estimate; then ``graph_bytes`` is 0.
            ``None``: not known, so that the plan is an upper bound.
        graph_bytes: graph estimate that the engine applies; ``None`` as before.
        kv_cache_memory_bytes: a pinned pool; it replaces utilization and profiling altogether.
        provenance: of the consumed and peak figures.

    Raises:
        BudgetInputError: a utilization outside (0, 1].
    """
    if not 0 < utilization <= 1:
        raise BudgetInputError(f"--gpu-memory-utilization is {utilization}; expected above 0 and at most 1")
    if kv_cache_memory_bytes is not None:
        configured = Provenance.CONFIGURED
        how = "--kv-cache-memory-bytes"
        pinned = gives("pinned pool", kv_cache_memory_bytes, Reach.FLAG, how, law=SOURCE, provenance=configured)
        warning = "a pinned pool ignores utilization and skips profiling: whether it fits shows at allocation"
        return Plan(policy="vllm", variant="pinned", result="KV cache", terms=(pinned,), warnings=(warning,))
    activation_how, graphs_how = "--max-num-batched-tokens, --max-num-seqs", "--enforce-eager, capture sizes"
    steps = (
        ("peak activation", peak_activation_bytes, activation_how),
        ("CUDA graphs", graph_bytes, graphs_how),
    )
    terms = (
        gives(
            "requested", requested_bytes(total_bytes, utilization), Reach.FLAG, "--gpu-memory-utilization", law=SOURCE
        ),
        takes(
            "weights and non-torch",
            consumed_bytes,
            Reach.FIXED,
            "checkpoint, --tensor-parallel-size",
            law=SOURCE,
            provenance=provenance,
        ),
        *(
            takes(name, size_bytes, Reach.FLAG, how, law=SOURCE, provenance=provenance)
            for name, size_bytes, how in steps
            if size_bytes is not None
        ),
    )
    unknown = tuple(name for name, size_bytes, _ in steps if size_bytes is None)
    return Plan(policy="vllm", variant="profiled", result="KV cache", terms=terms, unknown=unknown)


class Suggestions(msgspec.Struct, frozen=True):
    """The two values that the engine prints for ``--kv-cache-memory-bytes``, per rank."""

    fit_bytes: int
    """To fit into the requested memory."""
    full_bytes: int
    """To use all that was free on startup."""


def suggestions(
    *, requested: int, free_at_init_bytes: int, consumed_bytes: int, peak_activation_bytes: int, graph_bytes: int
) -> Suggestions:
    """The suggestion arithmetic (facts, section 1, line 34).

    ``requested - consumed - peak - captured graphs - 150 MiB``, and the same from what was free. From 0.27 on the peak
    already contains the graph estimate, so that graphs are charged twice.

    Args:
        requested: ``ceil(total * util)``.
        free_at_init_bytes: free on startup.
        consumed_bytes: weights and non-torch.
        peak_activation_bytes: as printed.
        graph_bytes: captured graphs, as printed.
    """
    taken_bytes = consumed_bytes + peak_activation_bytes + graph_bytes + REDUNDANCY_BYTES
    return Suggestions(requested - taken_bytes, free_at_init_bytes - taken_bytes)


def concurrency(blocks: int, blocks_per_request: int) -> float:
    """Requests of full length that fit at once: blocks over the blocks of one request, in all groups."""
    return blocks / blocks_per_request


def printed_tokens(max_concurrency: float, max_model_len: int) -> int:
    """The token line from 0.20.2 on: ``int(concurrency * max_model_len)`` (facts, section 1, line 26)."""
    return int(max_concurrency * max_model_len)


def printed_tokens_by_group(blocks: int, groups: int, block_tokens: int) -> int:
    """The token line to 0.19: ``blocks // groups * block``; wrong on hybrids (facts, section 1, line 26)."""
    return blocks // groups * block_tokens


def tokens_agree(tokens: int, max_concurrency: float, max_model_len: int) -> bool:
    """Tokens and concurrency agree within the two printed decimals of the latter."""
    return abs(tokens - max_concurrency * max_model_len) <= 0.005 * max_model_len + 1


def estimated_max_model_len(
    available_bytes: int, need_bytes: Callable[[int], int], ceiling: int, *, reserved_bytes: int = 0
) -> int:
    """Largest window whose need is available: the engine's binary search; 0 when not even one token fits.

    Args:
        available_bytes: per rank.
        need_bytes: need of one request by window, non-decreasing.
        ceiling: the window asked for.
        reserved_bytes: what the engine keeps of it; one block from the releases that hold back the null block.
    """
    low, high = 0, ceiling
    while low < high:
        middle = (low + high + 1) // 2
        if need_bytes(middle) <= available_bytes - reserved_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def cpu_kv_bytes(*, total_bytes: int, utilization: float, consumed_bytes: int, pinned_bytes: int | None = None) -> int:
    """The KV cache of a CPU worker: pinned, or ``ceil(total * util)`` minus what the process uses.

    May be zero or negative: then `cpu_refusal` says so.
    """
    if pinned_bytes is not None:
        return pinned_bytes
    return requested_bytes(total_bytes, utilization) - consumed_bytes


def cpu_refusal(
    *,
    total_bytes: int,
    available_bytes: int,
    utilization: float,
    consumed_bytes: int | None = None,
    pinned_bytes: int | None = None,
) -> Refusal | None:
    """Why a CPU worker refuses, ``None`` where its rules do not forbid it.

    A pinned pool must be available when it is allocated; else the request must be available at startup, and what the
    process leaves of it positive and available.

    Args:
        total_bytes: of the memory node.
        available_bytes: of the node.
        utilization: fraction of the node (the flag says GPU and means this).
        consumed_bytes: resident memory of the worker; ``None`` before it has loaded.
        pinned_bytes: ``--kv-cache-memory-bytes``.
    """
    if pinned_bytes is not None:
        asked_bytes, what = pinned_bytes, "a pinned pool of"
        advice = "lower --kv-cache-memory-bytes or VLLM_CPU_KVCACHE_SPACE, or free host memory"
        refused = asked_bytes > available_bytes
    else:
        asked_bytes, what = requested_bytes(total_bytes, utilization), f"utilization {utilization} asks for"
        advice = "lower --gpu-memory-utilization (host memory on this backend), or free host memory"
        refused = asked_bytes > available_bytes
        if consumed_bytes is not None and not refused:
            asked_bytes -= consumed_bytes
            what = f"utilization {utilization} leaves for the KV cache"
            refused = asked_bytes <= 0 or asked_bytes > available_bytes
            if asked_bytes <= 0:
                advice = "raise --gpu-memory-utilization: the worker itself uses more than it asks for"
    if not refused:
        return None
    return Refusal(
        law="cpu_memory",
        sentence=f"{what} {format_size(asked_bytes)}, and {format_size(available_bytes)} are available",
        advice=advice,
        source=CPU_SOURCE,
        numbers={"asked_bytes": asked_bytes, "available_bytes": available_bytes, "total_bytes": total_bytes},
    )
