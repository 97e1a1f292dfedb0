"""The HTML pages of a run: written when a record is complete, never at a verdict's cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from weakref import WeakSet

import pytest

from pytest_kvbudget.attempt import Attempt
from pytest_kvbudget.report.html import write_attempt_page, write_finding_page


class Pages:
    """Writes pages and remembers which boots have theirs, and which could not be written."""

    def __init__(self) -> None:
        self._written: WeakSet[Attempt] = WeakSet()
        self._troubles: list[str] = []

    def of_search(self, finding: Path, attempts: Iterable[Attempt]) -> Path | None:
        """The pages of a finished search; returns the finding's, ``None`` where it cannot be written."""
        self.of_boots(attempts)
        return self._page(write_finding_page, finding)

    def of_boots(self, attempts: Iterable[Attempt]) -> None:
        """The pages of boots; of those that serve on they are written again when the session ends."""
        for attempt in attempts:
            self._page(write_attempt_page, attempt.record_path)
            if not attempt.serving:
                self._written.add(attempt)

    def complete(self, attempts: Iterable[Attempt]) -> None:
        """The session ends: what has no page yet gets one, and what has no record is told of."""
        for attempt in attempts:
            if attempt.lost is not None:
                self._troubles.append(attempt.lost)
            elif attempt not in self._written:
                self._page(write_attempt_page, attempt.record_path)

    def _page(self, write: Callable[[Path], Path], record: Path) -> Path | None:
        """What ``write`` returns, or ``None``: a page can be rebuilt from its record, a verdict cannot."""
        try:
            return write(record)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a page must not cost the run its verdict
            self._troubles.append(f"no page for {record}: {error!r}; `kvbudget report` can rebuild it")
            return None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what went wrong beside the verdicts."""
        for line in self._troubles:
            terminalreporter.write_line(f"kvbudget: {line}")
