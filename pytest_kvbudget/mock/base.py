"""What ranks of every kind of device share: memory of a card, faults, and the process's end."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Mapping
from typing import ClassVar, Final, NoReturn, Protocol

from pytest_kvbudget.mock.failures import Failure, Usage
from pytest_kvbudget.mock.physics import Physics
from pytest_kvbudget.mock.process import Log, raw

WEIGHT_SHARDS: Final = 16
"""Slices in which weights are allocated, so that a load that does not fit fails on its way."""


class Memory(Protocol):
    """The memory of all cards, for one process: the driver's client, or a stand-in for it."""

    def fileno(self) -> int:
        """See `DriverClient`."""
        ...

    def free_bytes(self, card: int) -> int:
        """See `DriverClient`."""
        ...

    def alloc(self, card: int, size_bytes: int, kind: str = "", limit_bytes: int | None = None) -> tuple[bool, int]:
        """See `DriverClient`."""
        ...

    def free(self, card: int, size_bytes: int, kind: str = "") -> None:
        """See `DriverClient`."""
        ...

    def claim(self, card: int) -> bool:
        """See `DriverClient`."""
        ...

    def kinds(self, card: int) -> dict[tuple[int, str], int]:
        """See `DriverClient`."""
        ...


class BaseRank:
    """One rank on its card; methods of its kinds are the phases, in order. They raise `Failure`."""

    frames: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Frames of each phase, outermost in the worker first, for a fault that has nothing to do with memory."""

    def __init__(self, physics: Physics, rank: int, cards: list[int], log: Log, memory: Memory) -> None:
        self.physics = physics
        self.rank = rank
        self._cards = cards
        self._log = log
        self._first = rank == 0
        self._client = memory
        self._usage = Usage()
        self._peak_request = 0

    def leave_orphan(self) -> None:
        """Fork a process of its own session that keeps the connection to the driver, and with it the memory."""
        if os.fork() == 0:
            os.setsid()
            kept = self._client.fileno()
            os.closerange(3, kept)
            os.closerange(kept + 1, 4096)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            hang()

    def _pause(self, phase: str, parts: int = 1) -> None:
        """The time that a phase takes, or one of its equal parts."""
        pause_s = self.physics.pause_s(phase)
        if pause_s:
            time.sleep(pause_s / parts)

    def _enter(self, phase: str) -> None:
        """Faults that a rank commits on entering a phase."""
        faults = self.physics.spec.faults
        if faults.hang_in == phase:
            hang()
        if not self._first:
            return
        if faults.garbage_in == phase:
            print_garbage(self.physics.spec.seed)
        if faults.error_in == phase:
            raise Failure("ValueError", "arange's range must be a power of 2", (*self.frames[phase], "arange"))


def hang() -> NoReturn:
    """Make no progress, for ever."""
    while True:
        signal.pause()


def print_garbage(seed: int) -> None:
    """Bytes that are no text, half lines, a lone carriage return and a line of a megabyte."""
    raw(hashlib.shake_128(str(seed).encode()).digest(4096))
    raw(b"\x00\xff\xfe half a line without an end \r")
    raw(b"x" * 2**20 + b"\n")
    raw(b"\xc3\n INFO 99-99 99:99:99 [\n(EngineCore pid=) \n")
