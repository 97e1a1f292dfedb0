"""Cancelling a boot that runs in another thread: it is asked to end, and ends at its next step."""

from __future__ import annotations

from threading import Event


class CancelledError(Exception):
    """Nobody waits for this boot any more."""


class Cancellation:
    """Whether somebody called the boot off. Any thread may."""

    def __init__(self) -> None:
        self._event = Event()

    @property
    def asked(self) -> bool:
        """It was called off."""
        return self._event.is_set()

    def ask(self) -> None:
        """Call the boot off. It cannot be taken back."""
        self._event.set()

    def check(self) -> None:
        """Go on unless the boot was called off.

        Raises:
            CancelledError: it was.
        """
        if self.asked:
            raise CancelledError

    def pause(self, pause_s: float) -> None:
        """Wait, but no longer than until the boot is called off.

        Raises:
            CancelledError: it was.
        """
        self._event.wait(pause_s)
        self.check()
