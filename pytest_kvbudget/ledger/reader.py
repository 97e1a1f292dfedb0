"""A boot log, in any chunks, to a boot ledger."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_kvbudget.ledger.assemble import assemble
from pytest_kvbudget.ledger.boot import BootState
from pytest_kvbudget.ledger.cut import Cutter
from pytest_kvbudget.ledger.grammar import Grammar, standard
from pytest_kvbudget.ledger.grammar.model import Row
from pytest_kvbudget.ledger.lines import LineSplitter
from pytest_kvbudget.ledger.model import BootLedger, Milestone
from pytest_kvbudget.ledger.prefix import clean
from pytest_kvbudget.verdict import Phase

LONGEST_LAST_LINE = 400
"""Characters kept of the last line."""


class LedgerReader:
    """Reads a log while it is written. Memory does not grow with the log, and chunking never changes the result.

    A stream may hold several boots (a crash loop in a journal): `ledger` is the last one, `boots` are all.
    """

    def __init__(self, family: str | None = None, *, simulated: bool = False, patterns: Sequence[Row] = ()) -> None:
        """Start before the first byte.

        Args:
            family: grammar that the backend expects; a log that shows another family is read as what it is.
            simulated: the engine is simulated: so is every value.
            patterns: rows that a user added to the grammar.

        Raises:
            NotationError: for a pattern that does not compile.
        """
        self._grammar = Grammar(extra=patterns) if patterns else standard()
        self._family = family
        self._simulated = simulated
        self._splitter = LineSplitter()
        self._cutter = Cutter()
        self._state = self._new_state()
        self._earlier: list[BootLedger] = []
        self._starts = [1]
        self._last_piece = b""
        self._closed = False

    def feed(self, data: bytes) -> tuple[Milestone, ...]:
        """Read further bytes; returns the milestones that they show for the first time.

        Raises:
            ValueError: after `close`.
        """
        if self._closed:
            raise ValueError("feed() after close(); expected a reader that is still open")
        found: list[Milestone] = []
        for line, piece in self._splitter.feed(data):
            if piece:
                self._piece(line, piece, found)
        return tuple(found)

    def end_line(self) -> None:
        """The source ends here, perhaps within a line: what it says so far counts, a figure at its end does not."""
        rest = self._splitter.rest()
        if rest is not None:
            self._piece(*rest, [], partial=True)
            self.feed(b"\n")

    def close(self) -> None:
        """The stream is complete; a last line that has no end counts as in `end_line`."""
        if not self._closed:
            self.end_line()
            self._closed = True

    def ledger(self) -> BootLedger:
        """What the last boot of the stream said so far."""
        return assemble(self._state, self._splitter.lines - self._starts[-1] + 1)

    def boots(self) -> tuple[BootLedger, ...]:
        """Every boot of the stream, oldest first; the last one is `ledger`."""
        return (*self._earlier, self.ledger())

    @property
    def lines(self) -> int:
        """Lines of the whole stream."""
        return self._splitter.lines

    @property
    def starts(self) -> tuple[int, ...]:
        """The first line of every boot of the stream."""
        return tuple(self._starts)

    @property
    def phase(self) -> Phase:
        """What is going on now, in the last boot of the stream."""
        return self._state.now

    @property
    def last_line(self) -> str:
        """The last line that says anything, without prefixes."""
        text = ""
        for said in clean(self._last_piece):
            text = said.text.strip() or text
        return text[:LONGEST_LAST_LINE]

    def _new_state(self) -> BootState:
        return BootState(self._grammar, self._family, simulated=self._simulated)

    def _piece(self, line: int, piece: bytes, found: list[Milestone], *, partial: bool = False) -> None:
        if not piece.isspace():
            self._last_piece = piece
        if not self._state.waits_for_more and not self._grammar.concerns(piece):
            return
        for text in clean(piece):
            if self._cutter.begins_boot(self._state, text):
                self._earlier.append(assemble(self._state, line - self._starts[-1]))
                self._starts.append(line)
                self._state = self._new_state()
            if not self._cutter.retired(text):
                found += self._state.take(line, text, partial=partial)
