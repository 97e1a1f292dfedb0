"""The record of one boot while it is written: never behind the truth for long, whatever happens to the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from pytest_kvbudget.archive import RunArchive, timestamp
from pytest_kvbudget.config import LoadedTarget
from pytest_kvbudget.device.model import DeviceMemory
from pytest_kvbudget.engine.model import Backend
from pytest_kvbudget.ledger.model import BootLedger, Cause
from pytest_kvbudget.records import AttemptRecord, MemoryReading, TargetInfo, Timings
from pytest_kvbudget.redact import command_without_secrets, without_secrets
from pytest_kvbudget.request import BootRequest
from pytest_kvbudget.verdict import Verdict

INTERRUPTED: Final = "interrupted: the run ended before this boot had a verdict"
CALLED_OFF: Final = "interrupted: this boot was called off before it had a verdict"


class Recording:
    """A record, its folder, and the ways in which an attempt changes it."""

    def __init__(
        self,
        archive: RunArchive,
        request: BootRequest,
        target: TargetInfo,
        *,
        ledger: Callable[[], BootLedger],
        lease_wait_s: float,
    ) -> None:
        self._archive, self._ledger = archive, ledger
        self.folder = archive.attempt_folder(request.test, request.rung, request.number)
        self.record = AttemptRecord(
            run=archive.info,
            test=request.test,
            rung=request.rung,
            number=request.number,
            target=target,
            shape=request.shape.redacted(),
            started=timestamp(),
            verdict=Verdict.UNKNOWN,
            message=INTERRUPTED,
            timings=Timings(lease_wait_s=lease_wait_s),
        )
        self.path = self.save()

    def decide(self, verdict: Verdict, cause: Cause | None, message: str, *, at: float | None = None) -> None:
        """The verdict is known, since ``at`` on the monotonic clock; the record on disk says so at once."""
        if at is not None:
            self.timed(verdict_s=time.monotonic() - at)
        self.record.verdict, self.record.cause, self.record.message = verdict, cause, message
        self.finish()

    def finish(self) -> None:
        """Save with everything that the log has said so far."""
        self.record.ledger = self._ledger()
        self.save()

    def save(self) -> Path:
        """Save as it stands; returns the record's path."""
        return self._archive.write_attempt(self.folder, self.record)

    def timed(self, **changes: Any) -> None:  # noqa: ANN401 - fields of Timings
        """Set fields of the timings."""
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in changes.items()}
        self.record.timings = msgspec.structs.replace(self.record.timings, **rounded)

    def note(self, text: str) -> None:
        """Something worth knowing that changes no verdict."""
        self.record.notes += (text,)

    def memory(self, moment: str, devices: Sequence[DeviceMemory]) -> None:
        """Device memory at a named moment; nothing is kept where nobody could read any."""
        if devices:
            self.record.memory += (MemoryReading(moment=moment, devices=tuple(devices)),)


def target_info(loaded: LoadedTarget, backend: Backend, devices: tuple[str, ...]) -> TargetInfo:
    """What records say about the target."""
    target = loaded.target
    shown = msgspec.structs.replace(
        target,
        env=without_secrets(target.env),
        command=None if target.command is None else command_without_secrets(target.command),
        shape=target.shape.redacted(),
    )
    return TargetInfo(
        name=loaded.name,
        backend=loaded.target.backend,
        launcher=loaded.target.launcher,
        simulated=backend.simulated,
        origin=loaded.origin,
        devices=devices,
        config=msgspec.to_builtins(shown),
    )
