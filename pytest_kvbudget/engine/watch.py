"""Log, liveness and health watched together until the engine is ready, dead or late."""

from __future__ import annotations

import re
import select
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

import msgspec

from pytest_kvbudget.config import Limits
from pytest_kvbudget.engine.health import Health, probe
from pytest_kvbudget.engine.kernel import KernelKill, KernelLog
from pytest_kvbudget.engine.model import EngineProcess
from pytest_kvbudget.engine.processes import alive, start_ticks, title
from pytest_kvbudget.ledger.reader import LedgerReader
from pytest_kvbudget.records import PhaseTiming
from pytest_kvbudget.redact import Scrubber
from pytest_kvbudget.verdict import STARTING, Phase

TICK_S: Final = 0.025
"""Longest pause between two looks at log and health. Death does not wait for it: the keeper's event wakes the watch."""
_READ_BYTES: Final = 1 << 20


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How the wait for an engine ended."""

    kind: Literal["ready", "dead", "late", "foreign", "not_started"]
    at: float
    """`time.monotonic` of the event itself, as the keeper or the health probe saw it."""
    status: int | None = None
    message: str = ""
    phase: Phase | None = None
    """Which one had no end, of an engine that is late."""


class LogTail:
    """Feeds what is new in a growing log to a reader."""

    def __init__(self, path: Path, reader: LedgerReader, scrubber: Scrubber) -> None:
        self._file = path.open("rb", buffering=0)
        self._reader = reader
        self._scrubber = scrubber

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def pump(self, *, to_end: bool = False) -> None:
        """Read a piece of what is new, or all of it."""
        while data := self._file.read(_READ_BYTES):
            self._reader.feed(self._scrubber.feed(data))
            if not to_end:
                return

    def close(self) -> None:
        """Read what was kept back, and close the file."""
        self._reader.feed(self._scrubber.flush())
        self._file.close()


class Watch:
    """One engine from launch to ready or dead, and its liveness afterwards."""

    def __init__(
        self,
        process: EngineProcess,
        reader: LedgerReader,
        *,
        host: str,
        port: int,
        limits: Limits,
        owns_port: Callable[[], bool],
        tick: Callable[[Phase, float, str], None],
        critical: str,
        kernel: KernelLog,
        scrubber: Scrubber | None = None,
        launched: float | None = None,
    ) -> None:
        """``launched``: when it was started, on the monotonic clock; now where nobody says."""
        self._process = process
        self._reader = reader
        self._tail = LogTail(process.log_path, reader, scrubber or Scrubber(()))
        self._host, self._port = host, port
        self._limits = limits
        self._settle_s = limits.settle_seconds
        self._kernel = kernel
        self._owns_port = owns_port
        self._tick = tick
        self.launched = time.monotonic() if launched is None else launched
        self._phase_since = self.launched
        self._critical = re.compile(critical)
        self._core: dict[int, int] = {}
        """Start ticks by id of the critical processes that were there when the engine got ready."""
        self._core_died_at: float | None = None
        self._core_title = ""
        self.phases: list[PhaseTiming] = []
        self.gone: dict[int, str] = {}
        """Title by process id of the root and of every critical process that is gone."""
        self.dead: Outcome | None = None
        """Set as soon as the root process is gone, whenever that is."""

    def until_ready(self) -> Outcome:
        """Wait for the boot to end, one way or the other. Returns at the first that happens."""
        while True:
            outcome = self._step()
            if outcome is not None:
                self._tail.pump(to_end=True)
                return outcome

    def _step(self) -> Outcome | None:
        self._tail.pump()
        self._note_phase()
        outcome = self.look() or self._health() or self._late()
        if outcome is None:
            select.select([self._process], [], [], TICK_S)
        return outcome

    def look(self) -> Outcome | None:
        """What the keeper reported since the last look; the engine's death, if it is dead."""
        for event in self._process.events():
            if event.kind in {"exited", "critical_exited"}:
                self.gone[event.pid] = event.title
            if event.kind == "failed":
                self.dead = Outcome(kind="not_started", at=event.at, message=event.message)
            elif event.kind in {"exited", "gone"} and self.dead is None:
                self.dead = Outcome(kind="dead", at=event.at, status=event.status)
            elif event.kind == "critical_exited" and self._core_died_at is None:
                self._core_died_at, self._core_title = event.at, event.title
        # The server usually leaves a few seconds after its core, and finishes the log meanwhile.
        settled = self._core_died_at is not None and time.monotonic() > self._core_died_at + self._settle_s
        if self.dead is None and self._core_died_at is not None and settled:
            self.dead = Outcome(kind="dead", at=self._core_died_at, message=f"lost {self._core_title} and then stayed")
        return self.dead

    @property
    def living(self) -> bool:
        """Neither the engine nor its core has died."""
        return self.look() is None and self._core_lives()

    def until_dead(self) -> Outcome | None:
        """Wait for an engine that is probably dying, at most ``settle_seconds``; ``None`` when it stays alive.

        They count from the death of its core, where that is reported only now.
        """
        begun = time.monotonic()
        while self.look() is None and time.monotonic() <= max(begun, self._core_died_at or begun) + self._settle_s:
            if self._core_lives() and probe(self._host, self._port) is Health.READY:
                break
            select.select([self._process], [], [], TICK_S)
        self._tail.pump(to_end=True)
        return self.look()

    def _core_lives(self) -> bool:
        """No critical process is gone, by the keeper's word or by a look of our own: its word may be on the way."""
        return self._core_died_at is None and all(alive(pid, ticks) for pid, ticks in self._core.items())

    def _know_core(self) -> None:
        for pid in self._process.pids():
            ticks = start_ticks(pid)
            if ticks is not None and self._critical.search(title(pid)):
                self._core[pid] = ticks

    def kernel_kills(self) -> tuple[KernelKill, ...]:
        """Which of the processes that are gone the kernel killed for memory, as far as it can be asked."""
        return self._kernel.killed_for_memory(self.gone)

    def read_to_end(self) -> None:
        """Read whatever is new in the log."""
        self._tail.pump(to_end=True)

    def close(self) -> None:
        """Read the rest of the log and close it."""
        self._tail.pump(to_end=True)
        self._tail.close()
        self._kernel.close()
        self._reader.close()

    def _health(self) -> Outcome | None:
        # The core is gone: a 200 in its last moment is not readiness.
        if self._core_died_at is not None or probe(self._host, self._port) is not Health.READY:
            return None
        now = time.monotonic()
        if self._owns_port():
            self._know_core()
            return Outcome(kind="ready", at=now)
        return Outcome(kind="foreign", at=now, message=f"port {self._port} on {self._host} answers, but is not ours")

    def _note_phase(self) -> None:
        now = time.monotonic()
        phase = self._reader.phase
        if phase is not Phase.UNKNOWN and (not self.phases or self.phases[-1].phase is not phase):
            self.phases.append(PhaseTiming(phase=phase, start_s=round(now - self.launched, 3)))
            self._phase_since = now
        self._tick(phase, now - self.launched, self._reader.last_line)

    def _late(self) -> Outcome | None:
        now = time.monotonic()
        phase = self._reader.phase
        own_s = self._limits.phase_seconds.get(phase)
        in_phase_s = self._limits.phase_default_seconds if own_s is None else own_s
        if now - self._phase_since > in_phase_s:
            limit = "limits.phase_default_seconds" if own_s is None else f"limits.phase_seconds.{phase}"
            what = STARTING if phase is Phase.UNKNOWN else f"phase {phase}"
            said = f"no end of {what} within {in_phase_s:g} s ({limit})"
        elif now - self.launched > self._limits.boot_seconds:
            where = STARTING if phase is Phase.UNKNOWN else str(phase)
            said = f"not ready within {self._limits.boot_seconds:g} s (limits.boot_seconds), in {where}"
        else:
            return None
        last = f"{said}; last line: {self._reader.last_line[-200:]!r}"
        return Outcome(kind="late", at=now, phase=phase, message=last)
