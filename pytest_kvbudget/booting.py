"""A boot in a thread of its own, so that several run at once."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from pytest_kvbudget.attempt import Attempt
from pytest_kvbudget.cancel import CancelledError
from pytest_kvbudget.progress import Latest, Snapshot
from pytest_kvbudget.verdict import Verdict


class Booting:
    """A boot that runs in a thread until it has its verdict, or until it is cancelled and its engine is gone.

    The thread is a daemon: a run that is ended by force does not wait for it, and the engine's keeper notices.

    Attributes:
        attempt: the boot; before it is done nothing but its record and its cancellation is anybody else's business.
        error: what the boot raised instead of a verdict.
        called_off: other boots have answered for this one; one that is cancelled for another reason is interrupted.
        done_at: when it was done, on the monotonic clock.
    """

    def __init__(self, attempt: Attempt, latest: Latest, changed: threading.Condition) -> None:
        self.attempt = attempt
        self.error: BaseException | None = None
        self.called_off = False
        self.done_at: float | None = None
        self._latest = latest
        self._changed = changed
        self._thread = threading.Thread(target=self._run, name="kvbudget-boot", daemon=True)

    def start(self) -> None:
        """Begin to boot."""
        self._thread.start()

    @property
    def done(self) -> bool:
        """Its verdict is known, or it was cancelled: nothing is waited for."""
        return self.done_at is not None

    @property
    def snapshot(self) -> Snapshot | None:
        """What it is doing; ``None`` before its launch, and once it is done."""
        return None if self.done else self._latest.snapshot

    def join(self) -> None:
        """Wait until the thread has nothing more to do with the attempt."""
        if self._thread.ident is not None:
            self._thread.join()

    def unjudged(self) -> None:
        """Nobody waits for its verdict any more: the record says why, unless it had failed by itself."""
        if self.called_off:
            self.attempt.unwanted()
        elif self.attempt.record.verdict in {Verdict.PASS, Verdict.MARGINAL}:
            self.attempt.body_interrupted()

    def _run(self) -> None:
        try:
            with suppress(CancelledError):
                self.attempt.run()
            if self.attempt.cancelled:
                # Here, not where it was cancelled: several boots end at the same time.
                self.unjudged()
                self.attempt.close()
        except BaseException as error:  # noqa: BLE001 - raised again where its verdict is asked for
            self.error = error
        finally:
            with self._changed:
                self.done_at = time.monotonic()
                self._changed.notify_all()
