"""Tables of a device's memory in a log: who prints them, and which of their lines belong together."""

from __future__ import annotations

from typing import Final

from pytest_kvbudget.ledger import columns
from pytest_kvbudget.ledger.facts import Process
from pytest_kvbudget.ledger.model import Evidence
from pytest_kvbudget.ledger.notation import Reading

TABLE_LINES: Final = 40
"""Lines after an allocation failure that may still be its table."""


class Tables:
    """The last table of a boot."""

    def __init__(self) -> None:
        self._begun = -TABLE_LINES
        self._owner: Process | None = None
        self._heads: list[Evidence] = []
        self._cells = 0

    def begin(self, line: int, owner: Process) -> None:
        """A line that a table follows."""
        self._begun, self._owner = line, owner

    def owner(self, line: int, process: Process) -> Process | None:
        """Who prints the table that a line of ``process`` belongs to: its rows mostly name no process."""
        if self._owner is None or line - self._begun > TABLE_LINES:
            return None
        return self._owner if process in {self._owner, (None, None)} else None

    def head(self, evidence: Evidence) -> None:
        """A line that names columns."""
        if self._heads and (self._heads[-1].line == evidence.line or self._heads[-1].line < self._cells):
            self._heads = [] if self._heads[-1].line < self._cells else self._heads[:-1]
        self._heads = [*self._heads, evidence][-columns.MOST_HEADS :]

    def cells(self, evidence: Evidence) -> dict[str, Reading]:
        """The sizes in a line of cells, by fact."""
        self._cells = evidence.line
        return columns.readings([head.text for head in self._heads], evidence.text)
