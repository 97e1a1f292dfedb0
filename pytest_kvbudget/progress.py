"""What people who wait for a boot are told while it runs."""

from __future__ import annotations

from contextlib import suppress
from typing import Final, Protocol

import msgspec

from pytest_kvbudget.verdict import Phase

_INTERVAL_S: Final = 0.1


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a boot is doing, for people who wait for it."""

    label: str
    phase: Phase
    elapsed_s: float
    text: str


class Progress(Protocol):
    """Shows what goes on."""

    def __call__(self, *boots: Snapshot) -> None:
        """Every boot that runs now, as it stands. About ten times a second at most, and at each change of phase."""
        ...


class Latest:
    """Keeps what a boot in a thread of its own said last, for the thread that shows it."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None

    def __call__(self, *boots: Snapshot) -> None:
        """Keep it."""
        self.snapshot = boots[-1]


class Ticker:
    """Passes on what a boot says of itself, thinned out to what somebody can read."""

    def __init__(self, label: str, progress: Progress | None) -> None:
        self._label, self._progress = label, progress
        self._shown = (Phase.UNKNOWN, 0.0)

    def tick(self, phase: Phase, elapsed_s: float, text: str) -> None:
        """The boot is in ``phase``, ``elapsed_s`` after its launch, and said ``text`` last."""
        shown_phase, shown_at = self._shown
        if self._progress is None or (phase is shown_phase and elapsed_s - shown_at < _INTERVAL_S):
            return
        self._shown = (phase, elapsed_s)
        with suppress(OSError):  # a terminal that went away is no reason to lose a boot
            self._progress(Snapshot(label=self._label, phase=phase, elapsed_s=elapsed_s, text=text))
