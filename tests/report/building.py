"""Records built by hand with figures of real boots: the bf16 ceilings of section 6 of the RDNA4 budget document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytest_kvbudget.archive import RunArchive
from pytest_kvbudget.device.model import DeviceMemory
from pytest_kvbudget.ledger.model import BootLedger, Cause, Evidence, Lever, Milestone, Unit, Value
from pytest_kvbudget.records import (
    AttemptRecord,
    FindingRecord,
    MemoryReading,
    PhaseTiming,
    RunInfo,
    TargetInfo,
    Timings,
)
from pytest_kvbudget.search.model import Axis, Finding, Hint, Limit
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import GIB, MIB
from pytest_kvbudget.verdict import FindingKind, Phase, Provenance, Verdict

TEST = "tests/test_window.py::test_window"
TOTAL_BYTES = 34_208_743_424
"""One R9700, 31.86 GiB."""
HALF_DIGIT = 0.005 * GIB

RUN = RunInfo(
    run="20261005T021500Z-4f1c22",
    host="bench-2",
    plugin_version="0.1.0",
    python_version="3.12.7",
    pytest_version="9.2.0",
)
AXIS = Axis(name="max_model_len", floor=131_072, ceiling=262_144, quantum=4_096)
LOG = [
    "(APIServer pid=242) INFO 10-05 02:15:04 [api_server.py:1977] vLLM API server version 0.29.1",
    "(EngineCore pid=301) INFO 10-05 02:15:19 [core.py:93] Initializing a V1 LLM engine (v0.29.1)",
    "(Worker_TP0 pid=310) INFO 10-05 02:15:31 [model_runner.py:412] Starting to load model qwen-flash-next...",
    "(Worker_TP0 pid=310) INFO 10-05 02:17:02 [model_runner.py:45] Model loading took 24.57 GiB and 91.204511 seconds",
    "(Worker_TP1 pid=311) INFO 10-05 02:17:02 [model_runner.py:45] Model loading took 24.55 GiB and 91.318020 seconds",
    "(Worker_TP0 pid=310) INFO 10-05 02:17:40 [gpu_worker.py:610] Estimated CUDA graph memory: 0.31 GiB total",
    "(Worker_TP0 pid=310) INFO 10-05 02:17:41 [gpu_worker.py:642] Available KV cache memory: 4.87 GiB",
    "(EngineCore pid=301) INFO 10-05 02:17:41 [kv_cache_utils.py:1229] GPU KV cache size: {tokens} tokens, "
    "Maximum concurrency for {tokens} tokens per request: 1.00x",
    "Capturing CUDA graphs (PIECEWISE):  33%|###     | 6/18\rCapturing CUDA graphs (PIECEWISE):  66%|#####   | 12/18",
    "(Worker_TP0 pid=310) ERROR 10-05 02:17:58 torch.OutOfMemoryError: HIP out of memory. "
    "Tried to allocate 76.00 MiB. "
    "GPU 0 has a total capacity of 31.86 GiB of which 0 bytes is free. Of the allocated memory 30.43 GiB is allocated "
    "by PyTorch, with 0.19 GiB allocated in private pools (e.g., CUDA Graphs), and 312.50 MiB is reserved by PyTorch "
    "but unallocated.",
]


def value(number: int | float | str, unit: Unit, line: int, rank: str | None = None, **extra: Any) -> Value:
    """A fact of line ``line``."""
    precision = HALF_DIGIT if unit == "bytes" else 0
    fields = {"precision": precision, **extra}
    return Value(value=number, unit=unit, evidence=Evidence(line, f"line {line}"), rank=rank, **fields)


def gib(number: float, line: int, rank: str | None = None, **extra: Any) -> Value:
    """A size printed in GiB with two decimals."""
    return value(round(number * GIB), "bytes", line, rank, **extra)


def target(*, simulated: bool = False) -> TargetInfo:
    """Two R9700 cards, or a simulated pair."""
    if simulated:
        return TargetInfo(name="mock-r9700", backend="mock", launcher="process", simulated=True, origin="built-in")
    return TargetInfo(
        name="r9700-qwen", backend="rdna4", launcher="systemd", simulated=False,
        origin="kvbudget.toml [target.r9700-qwen]", devices=("0", "1"),
    )  # fmt: skip


def shape(length: int) -> Shape:
    """The bf16 shape of the document's section 6."""
    return Shape(
        model="qwen-flash-next", max_model_len=length, max_num_seqs=3, kv_cache_dtype="bfloat16",
        tensor_parallel_size=2, gpu_memory_utilization=0.98, env={"VLLM_CUDAGRAPH_MEM_PER_GRAPH_MB": "12"},
    )  # fmt: skip


def base_ledger(tokens: int) -> BootLedger:
    """What both a passing and a failing boot state."""
    loads = {"Worker_TP0": gib(24.57, 4, "Worker_TP0"), "Worker_TP1": gib(24.55, 5, "Worker_TP1")}
    return BootLedger(
        family="vllm",
        engine_version="0.29.1",
        facts={
            "model_load_bytes": loads["Worker_TP0"],
            "graph_estimated_bytes": gib(0.31, 6, "Worker_TP0"),
            "available_kv_bytes": gib(4.87, 7, "Worker_TP0"),
            "kv_tokens": value(tokens, "tokens", 8),
            "max_concurrency": value(1.0, "ratio", 8, precision=0.005),
        },
        ranks={"model_load_bytes": loads, "available_kv_bytes": {"Worker_TP0": gib(4.87, 7, "Worker_TP0")}},
        states={"peak_activation_bytes": "absent"},
        milestones=(Milestone(Phase.WEIGHTS_LOAD, Evidence(3, LOG[2])),),
        lines=len(LOG),
    )


def memory(ready_used_bytes: int | None) -> tuple[MemoryReading, ...]:
    """Readings of both cards: idle, when ready (if it got there) and after."""
    moments = [("idle", 27_856_896), ("ready", ready_used_bytes), ("released", 27_856_896)]
    return tuple(
        MemoryReading(
            moment=moment,
            devices=tuple(
                DeviceMemory(device=name, total_bytes=TOTAL_BYTES, used_bytes=used, source="sysfs")
                for name in ("0", "1")
            ),
        )
        for moment, used in moments
        if used is not None
    )


PHASES = (
    PhaseTiming(phase=Phase.ARGUMENT, start_s=0.4),
    PhaseTiming(phase=Phase.WORKER_INIT, start_s=15.2),
    PhaseTiming(phase=Phase.WEIGHTS_LOAD, start_s=27.1),
    PhaseTiming(phase=Phase.PROFILE, start_s=118.3),
    PhaseTiming(phase=Phase.KV_ALLOC, start_s=157.0),
    PhaseTiming(phase=Phase.GRAPH_CAPTURE, start_s=158.8),
)


def capture_oom() -> Cause:
    """The graph capture of 245,760 tokens, which missed 76 MiB."""
    return Cause(
        phase=Phase.GRAPH_CAPTURE,
        failure_class="graph_capture_oom",
        sentence="Graph capture asked for 76.00 MiB with 0 B free on Worker_TP0.",
        evidence=(Evidence(10, "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 76.00 MiB."),),
        levers=(
            Lever("max_model_len", "lower", "helps", "a margin of this size is gone within one step of the ladder"),
            Lever("gpu_memory_utilization", "lower", "helps", "+0.01 is 0.32 GiB on a card of 31.86 GiB"),
            Lever("max_num_seqs", "lower", "useless", "the reserve is for one request of max_model_len"),
            Lever("gpu_memory_utilization", "raise", "harms", "the phase that allocates last gets even less"),
        ),
        rank="Worker_TP0",
    )


def attempt(length: int, verdict: Verdict = Verdict.PASS, *, simulated: bool = False, **changes: Any) -> AttemptRecord:
    """One boot of the ladder: a PASS, or a FAIL at graph capture."""
    ledger = base_ledger(length)
    passed = verdict in {Verdict.PASS, Verdict.MARGINAL}
    cause = None if passed else capture_oom()
    if verdict is Verdict.FAIL:
        ledger.facts.update(
            tried_alloc_bytes=value(76 * MIB, "bytes", 10, precision=0.005 * MIB),
            free_bytes=value(0, "bytes", 10, precision=0),
            total_bytes=gib(31.86, 10),
            torch_allocated_bytes=gib(30.43, 10),
            private_pool_bytes=gib(0.19, 10),
            reserved_unallocated_bytes=value(int(312.5 * MIB), "bytes", 10, precision=0.005 * MIB),
        )
    fields: dict[str, Any] = {
        "run": RUN,
        "test": TEST,
        "rung": f"max_model_len={length}",
        "target": target(simulated=simulated),
        "shape": shape(length),
        "command": ("vllm", "serve", "qwen-flash-next", "--max-model-len", str(length), "--tensor-parallel-size", "2"),
        "environment": {"HIP_VISIBLE_DEVICES": "0,1", "HF_TOKEN": "<removed>"},
        "started": "2026-10-05T02:15:03.120+00:00",
        "verdict": verdict,
        "cause": cause,
        "message": "Booted and held its window." if cause is None else cause.sentence,
        "ledger": ledger,
        "hint": Hint(limits=(Limit(name="graph_capture", margin_bytes=58 * MIB if passed else -76 * MIB),)),
        "memory": memory(TOTAL_BYTES - 58 * MIB if passed else None),
        "timings": Timings(
            boot_s=412.3 if passed else None, verdict_s=0.04, phases=PHASES, teardown_s=6.1, release_s=1.2
        ),
    }
    if simulated:
        mark_simulated(ledger)
    return AttemptRecord(**{**fields, **changes})


def mark_simulated(ledger: BootLedger) -> None:
    """Give every fact the provenance of a simulated device."""
    for name, fact in ledger.facts.items():
        ledger.facts[name] = Value(
            value=fact.value, unit=fact.unit, evidence=fact.evidence, provenance=Provenance.SIMULATED,
            precision=fact.precision, rank=fact.rank,
        )  # fmt: skip


def finding_record(names: tuple[str, ...], *, simulated: bool = False, **changes: Any) -> FindingRecord:
    """The ladder's finding over these attempt records."""
    fields: dict[str, Any] = {
        "kind": FindingKind.PROVEN,
        "axis": AXIS,
        "value": 241_664,
        "failed_at": 245_760,
        "bounded_by": capture_oom(),
        "boots": len(names),
        "sentence": "The largest window that serves is 241,664 tokens; 245,760 tokens failed in graph capture, "
        "76.00 MiB short.",
    }
    return FindingRecord(
        run=RUN, test=TEST, target=target(simulated=simulated), shape=shape(AXIS.ceiling), strategy="predict",
        pool="fixed", windows=1, finding=Finding(**{**fields, **changes}), attempts=names,
        started="2026-10-05T02:15:03.120+00:00", finished="2026-10-05T02:37:41.880+00:00",
    )  # fmt: skip


def write_attempt(root: Path, record: AttemptRecord, log: list[str] | None = None) -> Path:
    """Put a record and its log where a run would; returns the record's path."""
    archive = RunArchive(root, record.run)
    folder = archive.attempt_folder(record.test, record.rung, record.number)
    text = "\n".join(LOG if log is None else log).replace("{tokens}", f"{record.shape.max_model_len or 0:,}")
    (folder / "engine.log").write_text(text + "\n", encoding="utf-8", newline="")
    return archive.write_attempt(folder, record)


def write_ladder(root: Path, attempts: list[AttemptRecord], *, simulated: bool = False, **finding: Any) -> Path:
    """Put attempts and their finding where a run would; returns the finding's path."""
    paths = [write_attempt(root, record) for record in attempts]
    archive = RunArchive(root, RUN)
    record = finding_record(tuple(map(str, paths)), simulated=simulated, **finding)
    return archive.write_finding(record, attempts=paths)
