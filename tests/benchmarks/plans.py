"""How long plans take: 10,000 shapes of each policy, planned in one process.

Run as ``python -m tests.benchmarks.plans [SHAPES]``: prints a table, exits 1 when any policy took a second or more
for 10,000 of the laws alone (which is also well under a millisecond for one).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final

from pytest_kvbudget.budget.answers import Ask, answer
from pytest_kvbudget.budget.graphs import GraphCharge
from pytest_kvbudget.budget.neuron import compute_kv_budget, minimum_refusal
from pytest_kvbudget.budget.pool import KvPrice
from pytest_kvbudget.budget.rdna4 import OverheadMode, arena_plan, overhead_bytes
from pytest_kvbudget.budget.vllm import kv_plan
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import GIB, MIB

TOTAL: Final = 34_208_743_424
LIMIT_S: Final = 1.0


def neuron_law(index: int) -> int:
    """Headroom and default policy in turn, with the guard."""
    headroom_bytes = index * MIB if index % 2 else None
    budget = compute_kv_budget(
        stack_bytes=36 * GIB, weights_bytes=8 * GIB + index, cores_per_stack=1, utilization=0.9,
        headroom_bytes=headroom_bytes,
    )  # fmt: skip
    minimum_refusal(budget)
    return budget.available_bytes


def rdna4_law(index: int) -> int:
    """The expert plan over windows."""
    plan = arena_plan(
        total_bytes=TOTAL,
        utilization=0.982,
        non_expert_bytes=6 * GIB,
        kv_reserve_bytes=KvPrice().reserve_bytes(32_768 + 16 * index),
        graph_bytes=GraphCharge(base_mib=0, per_graph_mib=12).charged_bytes(6),
        overhead=overhead_bytes(OverheadMode.PRECISE, 4096),
    )
    return plan.slots


def vllm_law(index: int) -> int:
    """What is left of the request."""
    plan = kv_plan(
        total_bytes=TOTAL, utilization=0.92, consumed_bytes=20 * GIB + index * MIB // 4, peak_activation_bytes=GIB
    )
    return plan.left_bytes


def neuron_answer(index: int) -> int:
    """A complete answer: environment, gate, both policies."""
    shape = Shape(lnc=2, gpu_memory_utilization=0.9, reserved_headroom=index * MIB)
    return answer(Ask(policy="neuron", shape=shape, platform="trn3", weights_bytes=8 * GIB)).figures["available_bytes"]  # type: ignore[no-any-return]


def rdna4_answer(index: int) -> int:
    """A complete answer: price, charge, gate."""
    shape = Shape(gpu_memory_utilization=0.982, max_model_len=32_768 + 16 * index)
    return answer(Ask(policy="rdna4", shape=shape, weights_bytes=6 * GIB, graphs=6)).figures["slots"]  # type: ignore[no-any-return]


MEASURED: Final[tuple[tuple[str, bool, Callable[[int], int]], ...]] = (
    ("neuron law", True, neuron_law),
    ("rdna4 law", True, rdna4_law),
    ("vllm law", True, vllm_law),
    ("neuron answer", False, neuron_answer),
    ("rdna4 answer", False, rdna4_answer),
)


def main(shapes: int = 10_000) -> int:
    """Print the table; the exit status."""
    print(f"{'':16}{'shapes':>8}{'s':>8}{'us each':>9}{'distinct':>10}")
    slow = False
    for name, judged, law in MEASURED:
        start = time.perf_counter()
        results = [law(index) for index in range(shapes)]
        elapsed_s = time.perf_counter() - start
        slow |= judged and elapsed_s * 10_000 >= LIMIT_S * shapes
        print(f"{name:16}{shapes:8}{elapsed_s:8.3f}{elapsed_s / shapes * 1e6:9.1f}{len(set(results)):10}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main(*(int(argument) for argument in sys.argv[1:])))
