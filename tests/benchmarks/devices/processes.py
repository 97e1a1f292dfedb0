"""A rehearsed boot once more as real processes of the simulated engine, through the product's own attempt."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final
from unittest.mock import patch

import msgspec

from pytest_kvbudget.archive import RunArchive
from pytest_kvbudget.config import Limits
from pytest_kvbudget.mock.spec import MockDevice, PhaseSeconds
from pytest_kvbudget.pool import EnginePool
from tests.benchmarks.devices.rehearsed import INFO

if TYPE_CHECKING:
    from pytest_kvbudget.config import LoadedTarget
    from pytest_kvbudget.records import AttemptRecord
    from tests.benchmarks.devices.rehearsed import Booted

_LIMITS: Final = Limits(boot_seconds=120, settle_seconds=10, release_seconds=20, lease_seconds=60)
_QUICK: Final = PhaseSeconds(linger=0.0)


def in_processes(loaded: LoadedTarget, booted: Booted) -> AttemptRecord:
    """Boot the same request on a device tree of its own, on which as many boots were made before."""
    with tempfile.TemporaryDirectory(prefix="kvb") as name, patch.dict(os.environ, KVBUDGET_LEASE_DIR=f"{name}/leases"):
        spec = msgspec.structs.replace(loaded.target.mock or MockDevice(), sysfs=f"{name}/tree", seconds=_QUICK)
        target = msgspec.structs.replace(loaded.target, mock=spec, limits=_LIMITS)
        attempts = Path(name, "tree", "mock", "attempts")
        attempts.parent.mkdir(parents=True)
        attempts.write_text("earlier\n" * (booted.boot - 1), encoding="ascii")
        pool = EnginePool(
            msgspec.structs.replace(loaded, target=target, folder=name), RunArchive(Path(name, "archive"), INFO)
        )
        try:
            return pool.boot(booted.request, reuse=False).record
        finally:
            pool.close()


def difference(rehearsed: AttemptRecord, real: AttemptRecord) -> str | None:
    """What processes did otherwise than the rehearsal; ``None`` where verdict, cause and hint are the same."""
    if _told(rehearsed) == _told(real):
        return None
    return f"{real.rung}: rehearsed {_told(rehearsed)}, as processes {_told(real)} ({real.message})"


def _told(record: AttemptRecord) -> tuple[object, ...]:
    """What the search is told of a boot."""
    cause = record.cause
    return record.verdict, cause and (cause.failure_class, cause.phase), record.hint, record.pool_short
