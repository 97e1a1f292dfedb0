"""Sweeps as runs write them: the search itself, told by a device of which both edges are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from pytest_kvbudget.archive import RunArchive
from pytest_kvbudget.ledger.model import BootLedger, Cause, Evidence, Lever
from pytest_kvbudget.records import AttemptRecord, SweepRecord, TargetInfo, Timings
from pytest_kvbudget.search.knobs import KNOBS, Knob
from pytest_kvbudget.search.model import Hint, Limit, SweepFinding, SweepKey, Trial
from pytest_kvbudget.search.sweep import Sweep
from pytest_kvbudget.search.turn import label, turn
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import GIB
from pytest_kvbudget.verdict import Phase, Verdict
from tests.report.building import RUN, gib, write_attempt

TEST = "tests/test_headroom.py::test_headroom"
HEADROOM = KNOBS["reserved_headroom"]
CORE = TargetInfo(
    name="trn3-gpt-oss", backend="neuron", launcher="process", simulated=False,
    origin="kvbudget.toml [target.trn3-gpt-oss]", devices=("0", "1", "2", "3"),
)  # fmt: skip
KEY = SweepKey(
    model="gpt-oss-120b", weights_format="mxfp4", tensor_parallel_size=4, backend="neuron", lnc=2, hardware="trn3"
)
SHAPE = Shape(model="gpt-oss-120b", max_model_len=131_072, max_num_seqs=8, tensor_parallel_size=4, lnc=2)
ALLOCATION = Cause(
    phase=Phase.COMPILE,
    failure_class="compile_hbm_exceeded",
    sentence="The program needs 23.41 GiB of HBM and the limit is 22.80 GiB.",
    evidence=(Evidence(7, "[NCC_EOOM001] HBM usage 23.41 GiB exceeds the limit 22.80 GiB"),),
    levers=(
        Lever("VLLM_NEURON_RESERVED_HEADROOM_GIB", "raise", "helps", "leaves more for the program"),
        Lever("tensor_parallel_size", "raise", "helps", "where weights alone are over the limit"),
        Lever("gpu_memory_utilization", "raise", "harms", "a larger KV cache makes the program larger"),
    ),
)
MINIMUM = Cause(
    phase=Phase.KV_CHECK,
    failure_class="min_kv_budget",
    sentence="The KV budget of 0.84 GiB is below the minimum of 1.00 GiB.",
    evidence=(Evidence(5, "KV cache budget 0.84 GiB is below the minimum 1.00 GiB"),),
    levers=(
        Lever("VLLM_NEURON_RESERVED_HEADROOM_GIB", "lower", "helps", "the headroom is taken from the same share"),
        Lever("VLLM_NEURON_RESERVED_HEADROOM_GIB", "raise", "harms", "leaves still less for the KV cache"),
    ),
)
CORE_BYTES = 24 * GIB
WEIGHTS_BYTES = 15 * GIB

Device = Callable[[int], Cause | None]


def device(low: float, high: float, knob: Knob = HEADROOM) -> Device:
    """What passes from ``low`` to ``high``, in the knob's whole numbers."""
    below, above = (ALLOCATION, MINIMUM) if (knob.goal == "least") == (knob.ends_at == "allocation") else (
        MINIMUM, ALLOCATION,
    )  # fmt: skip
    return lambda value: below if value < low else above if value > high else None


def sweep_attempt(knob: Knob, value: int, cause: Cause | None = None, **changes: Any) -> AttemptRecord:
    """One boot of a sweep: a PASS, or a FAIL for the cause."""
    setting = knob.setting(value)
    ledger = BootLedger(family="neuron", engine_version="0.5.0", facts={"model_load_bytes": gib(15.0, 3)}, lines=9)
    message = "Booted and served." if cause is None else cause.sentence
    fields: dict[str, Any] = {
        "run": RUN,
        "test": TEST,
        "rung": label(knob.name, setting),
        "target": CORE,
        "shape": turn(SHAPE, knob.name, setting),
        "started": "2026-10-05T02:15:03.120+00:00",
        "verdict": Verdict.PASS if cause is None else Verdict.FAIL,
        "cause": cause,
        "message": message,
        "ledger": ledger,
        "hint": Hint(limits=(Limit(name="compile", margin_bytes=0.6 * GIB if cause is None else -0.6 * GIB),)),
        "timings": Timings(boot_s=1_871.0) if cause is None else Timings(ended_s=912.0),
    }
    return AttemptRecord(**{**fields, **changes})


def swept(search: Sweep, boots: Device, **changes: Any) -> tuple[SweepFinding, list[AttemptRecord]]:
    """Run a search to its end on a device; ``changes`` are those of every attempt."""
    attempts: list[AttemptRecord] = []
    numbers: dict[int, int] = {}
    while (ask := search.next()) is not None:
        number = numbers[ask.value] = numbers.get(ask.value, 0) + 1
        record = sweep_attempt(search.knob, ask.value, boots(ask.value), number=number, **changes)
        record.rung = f"{record.rung}#{number}" if number > 1 else record.rung
        attempts.append(record)
        search.tell(
            Trial(
                value=ask.value, verdict=record.verdict, hint=record.hint, cause=record.cause, warm=record.warm,
                reused=record.run != RUN,
            )
        )  # fmt: skip
    return search.finding(), attempts


def sweep_record(finding: SweepFinding, names: tuple[str, ...] = (), **changes: Any) -> SweepRecord:
    """The record of a sweep's finding over these attempt records."""
    fields: dict[str, Any] = {"target": CORE, "strategy": "predict", "windows": 1}
    return SweepRecord(
        run=RUN, test=TEST, shape=SHAPE, finding=finding, attempts=names, started="2026-10-05T02:15:03.120+00:00",
        finished="2026-10-05T04:37:41.880+00:00", **{**fields, **changes},
    )  # fmt: skip


def write_sweep(root: Path, finding: SweepFinding, attempts: list[AttemptRecord], **changes: Any) -> Path:
    """Put attempts and their finding where a run would; returns the finding's path."""
    log = ["INFO Neuron worker", "INFO loading", "Model loading took 15.0 GiB", "", "", "", "", "", ""]
    paths = [write_attempt(root, record, log) for record in attempts]
    archive = RunArchive(root, RUN)
    return archive.write_finding(sweep_record(finding, tuple(map(str, paths)), **changes), attempts=paths)


def changed(finding: SweepFinding, **changes: Any) -> SweepFinding:
    """The finding with some fields set."""
    return msgspec.structs.replace(finding, **changes)
