"""Archives of earlier runs, written by the code that writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from pytest_kvbudget.archive import RunArchive
from pytest_kvbudget.device.model import DeviceMemory
from pytest_kvbudget.ledger.model import BootLedger, Evidence, Value
from pytest_kvbudget.records import (
    SCHEMA_VERSION,
    AttemptRecord,
    BootIdentity,
    FindingRecord,
    MemoryReading,
    RunInfo,
    TargetInfo,
    Timings,
)
from pytest_kvbudget.search.model import Axis, Finding
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.verdict import FindingKind, Verdict

IDENTITY: Final = BootIdentity(
    schema_version=SCHEMA_VERSION,
    plugin_version="0.1.0",
    host="h",
    devices=("gpu-0 34208743424",),
    driver="amdgpu 6.12.12",
    engine="vllm 0.32.0, files f, environment e",
    target="t",
    shape="4096",
    asked="a",
)
BASE: Final = Shape(model="moe")
AXIS: Final = Axis(name="max_model_len", floor=4096, ceiling=65_536, quantum=4096)
TARGET: Final = TargetInfo(name="card", backend="rdna4", launcher="process", simulated=False, origin="o")
TEST: Final = "test_a.py::test_window"


def identity(**changes: Any) -> BootIdentity:
    """A boot's identity with some parts changed."""
    return msgspec.structs.replace(IDENTITY, **changes)


class Archive:
    """An archive that runs write to, one after the other."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._clock = 0

    def boot(
        self, *, run: str = "20260101T000000Z-aaaaaa", length: int = 4096, free_bytes: int | None = None,
        available_bytes: int | None = None, **changes: Any
    ) -> Path:  # fmt: skip
        """A finished boot of a rung, a PASS unless said otherwise; returns its record's path."""
        self._clock += 1
        facts = {}
        if available_bytes is not None:
            said = Evidence(1, "Available KV cache memory: ...")
            facts["available_kv_bytes"] = Value(value=available_bytes, unit="bytes", evidence=said, precision=1024)
        memory: tuple[MemoryReading, ...] = ()
        if free_bytes is not None:
            free = DeviceMemory(device="0", total_bytes=2 * free_bytes, used_bytes=free_bytes, source="sysfs")
            memory = (MemoryReading(moment="ready", devices=(free,)),)
        archive = RunArchive(self.root, info(run))
        record = AttemptRecord(
            run=archive.info,
            test=TEST,
            rung=f"max_model_len={length}",
            target=TARGET,
            shape=changes.pop("shape", BASE.merged(max_model_len=length)),
            started=f"2026-01-01T00:{self._clock // 60:02}:{self._clock % 60:02}.000+00:00",
            verdict=changes.pop("verdict", Verdict.PASS),
            message="m",
            identity=changes.pop("identity", identity(shape=str(length))),
            ledger=BootLedger(family="vllm", facts=facts),
            memory=memory,
            settled=changes.pop("settled", True),
            timings=changes.pop("timings", Timings(boot_s=1.0)),
        )
        for name, value in changes.items():
            setattr(record, name, value)
        return archive.write_attempt(archive.attempt_folder(TEST, record.rung, 1), record)

    def finding(
        self, *boots: Path, run: str = "20260101T000000Z-aaaaaa", value: int | None = 16_384,
        failed_at: int | None = 20_480, kind: FindingKind = FindingKind.PROVEN, axis: Axis = AXIS, **changes: Any
    ) -> Path:  # fmt: skip
        """What a ladder over these boots established."""
        archive = RunArchive(self.root, info(run))
        found = Finding(kind=kind, axis=axis, value=value, failed_at=failed_at, boots=len(boots), sentence="s")
        record = FindingRecord(
            run=archive.info,
            test=TEST,
            target=TARGET,
            shape=changes.pop("shape", BASE),
            strategy="predict",
            pool=changes.pop("pool", "fixed"),
            windows=changes.pop("windows", 1),
            finding=found,
            attempts=(),
            started="2026-01-01T00:00:00.000+00:00",
            finished="2026-01-01T01:00:00.000+00:00",
        )
        assert not changes, f"no such fields: {changes}"
        return archive.write_finding(record, attempts=boots)


def info(run: str) -> RunInfo:
    """The run of that name."""
    return RunInfo(run=run, host="h", plugin_version="0.1.0", python_version="3.11")
