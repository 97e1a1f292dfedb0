"""A log as somebody pasted it, and what an expert would answer."""

from __future__ import annotations

from typing import NamedTuple

from pytest_kvbudget.ledger.model import Outcome
from pytest_kvbudget.verdict import Phase
from tests.ledger.support import GIB, lever_effects, read

Facts = dict[str, int | float | str | bool]

A = "(APIServer pid=1) INFO 09-30 10:00:00 [api_server.py:1896] vLLM API server version 0.23.0"
E = "(EngineCore pid=5) ERROR 09-30 10:00:09 [core.py:770] "
EI = "(EngineCore pid=5) INFO 09-30 10:00:09 [core.py:770] "
W = "(Worker_TP0 pid=7) INFO 09-30 10:00:00 [gpu_worker.py:1] "
W1 = "(Worker_TP1 pid=8) INFO 09-30 10:00:00 [gpu_worker.py:1] "
WE = "(Worker_TP0 pid=7) ERROR 09-30 10:00:00 [multiproc_executor.py:1] "
N = "(Worker_TP0 pid=77) 2026-09-01 10:00:00,123 - INFO - neuron_worker.py:500 - "
N1 = "(Worker_TP1 pid=78) 2026-09-01 10:00:00,123 - INFO - neuron_worker.py:500 - "
R = "2026-Oct-01 10:00:00.000001 77:77 ERROR  "
S = "[2026-01-02 03:04:05 TP0] "
READY = "INFO:     Application startup complete."
WRAPPER = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
MAMBA = (
    "ValueError: max_num_seqs (256) exceeds available Mamba cache blocks (161). Each decode request needs one Mamba "
    "cache block, so CUDA graph capture cannot proceed. Please lower max_num_seqs to at most 161 or increase "
    "gpu_memory_utilization."
)
IDLE = (
    "(APIServer pid=1) INFO 09-30 10:01:00 [loggers.py:1] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg "
    "generation "
    "throughput: 0.0 tokens/s, Running: 0 reqs, Waiting: 1 reqs, GPU KV cache usage: 0.0%, Prefix cache hit rate: 0.0%"
)
OOM = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 76.00 MiB. GPU 0 has a total capacity of 31.86 GiB "
    "of which 0 bytes is free. Of the allocated memory 30.43 GiB is allocated by PyTorch, with 120.00 MiB allocated in "
    "private pools (e.g., HIP Graphs), and 310.00 MiB is reserved by PyTorch but unallocated."
)


def gib(number: float) -> int:
    return round(number * GIB)


class Variant(NamedTuple):
    """Lines, verdict, figures, and levers that must or must not be said to help."""

    name: str
    lines: tuple[str, ...]
    outcome: Outcome
    phase: Phase
    failure_class: str | None
    facts: Facts
    turn: tuple[tuple[str, str], ...] = ()
    leave: tuple[tuple[str, str], ...] = ()


def check(variant: Variant) -> None:
    """The lines are read as the expert reads them, and every figure names its line."""
    ledger = read(*variant.lines)
    assert (ledger.outcome, ledger.phase, ledger.failure_class) == (
        variant.outcome,
        variant.phase,
        variant.failure_class,
    )
    assert {name: ledger.get(name) for name in variant.facts} == variant.facts
    effects = lever_effects(ledger) if ledger.cause is not None else {}
    for lever in variant.turn:
        assert effects.get(lever) == "helps"
    for lever in variant.leave:
        assert effects.get(lever) != "helps"
    lines = "\n".join(variant.lines).split("\n")
    for value in ledger.facts.values():
        shown = lines[value.evidence.line - 1]
        assert value.evidence.text.strip()[:20] in shown or shown.startswith("{")
