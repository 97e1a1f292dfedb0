"""The record of one boot while it is written: never behind the truth for long, whatever happens to the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from pytest_kvbudget.archive import RunArchive, timestamp
from pytest_kvbudget.config import LoadedTarget
from pytest_kvbudget.device.model import DeviceMemory
from pytest_kvbudget.engine.model import Backend
from pytest_kvbudget.ledger.model import BootLedger, Cause
from pytest_kvbudget.records import AttemptRecord, MemoryReading, TargetInfo, Timings, UseRecord
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
        self.lost: str | None = None
        """Why the record on disk is behind the truth: the disk took no more. What is there is older, and whole."""
        self.path = archive.write_attempt(self.folder, self.record)

    def decide(self, verdict: Verdict, cause: Cause | None, message: str, *, at: float | None = None) -> None:
        """The verdict is known, since ``at`` on the monotonic clock; the record on disk says so at once."""
        if at is not None:
            self.timed(verdict_s=time.monotonic() - at)
        self.record.verdict, self.record.cause, self.record.message = verdict, cause, message
        if self.record.rung is not None:
            for use in self.record.uses:  # a rung is one test: what it asked is what was booted for
                use.verdict, use.cause, use.message = verdict, cause, message
        self.finish()

    def begin_use(self, test: str) -> UseRecord:
        """A test has the engine from now on; so far its verdict is the boot's."""
        record = self.record
        use = UseRecord(test=test, verdict=record.verdict, cause=record.cause, message=record.message)
        record.uses += (use,)
        self.save()
        return use

    def decide_use(self, use: UseRecord, verdict: Verdict, cause: Cause | None, message: str) -> None:
        """What a test asked of the engine has its verdict; of a rung it is that of the whole attempt."""
        if self.record.rung is not None:
            self.decide(verdict, cause, message)
            return
        use.verdict, use.cause, use.message = verdict, cause, message
        self.finish()

    def finish(self) -> None:
        """Save with everything that the log has said so far."""
        self.record.ledger = self._ledger()
        self.save()

    def save(self) -> None:
        """Save as it stands. A disk that is full must not keep anybody from ending the engine: see `lost`."""
        try:
            self._archive.write_attempt(self.folder, self.record)
        except OSError as error:
            self.lost = f"{self.path}: the record of a boot cannot be written: {error.strerror or error}"
        else:
            self.lost = None

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
