"""A boot log, in any chunks, to a boot ledger."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Final

from pytest_kvbudget.ledger.assemble import assemble
from pytest_kvbudget.ledger.boot import BootState
from pytest_kvbudget.ledger.cut import Cutter
from pytest_kvbudget.ledger.grammar import TABLES
from pytest_kvbudget.ledger.grammar.model import CompiledRow, Row
from pytest_kvbudget.ledger.lines import LONGEST_PIECE, LineSplitter, capped
from pytest_kvbudget.ledger.model import BootLedger, Milestone
from pytest_kvbudget.ledger.prefix import clean
from pytest_kvbudget.ledger.scan import USAGE, Kind, Scanner, quotes_somebody, split_pieces
from pytest_kvbudget.verdict import Phase

MOST_BOOTS = 1000
"""Earlier boots of a stream that are kept."""
LONGEST_LAST_LINE = 400
"""Characters kept of the last line."""


_CLOCK = re.compile(rb"\b([01][0-9]|2[0-3]):([0-5][0-9]):([0-5][0-9])\b")
_DIGITS: Final = bytes.maketrans(b"123456789", b"000000000")
_SPEAKER_WITHIN: Final = 160
_SPEAKER_BYTES: Final = 48
_STATISTICS: Final = " reqs, Waiting: "
_USAGE_BYTES: Final = 8
_PERCENT = re.compile(rb"([0-9]{1,3}(?:\.[0-9]+)?)%")
_LOAD_BYTES: Final = 50
"""From the number of running requests to the usage, and nothing that changes with every line."""
_RUNNING = re.compile(rb"Running: [0-9]+ reqs, Waiting: [0-9]+ reqs")
_IDLE = re.compile(rb"Running: 0 reqs, Waiting: [1-9]")
_LOAD = re.compile(
    rb"(?:Running: |#running-req: )([0-9]+).*?(?:Waiting: |#queue-req: )([0-9]+)(?:.*usage: ([0-9.]+)%)?"
)


def _time_of_day(piece: bytes) -> int | None:
    match = _CLOCK.search(piece[:256])
    if match is None:
        return None
    hours, minutes, seconds = (int(number) for number in match.groups())
    return hours * 3600 + minutes * 60 + seconds


@cache
def _standard_rows() -> tuple[CompiledRow, ...]:
    return tuple(CompiledRow(row, table.family) for table in TABLES for row in table.rows)


def scanner_of(patterns: Sequence[Row] = ()) -> Scanner:
    """What finds the lines of the grammar, and of ``patterns`` that a user added.

    Raises:
        NotationError: for a pattern that does not compile or has no plain text to find its line by.
    """
    return Scanner((*_standard_rows(), *(CompiledRow(row, None) for row in patterns)))


def _look(piece: bytes) -> tuple[bytes, bytes]:
    """Who says a piece, and the piece as far as it matters which digits it has."""
    end = piece.find(b")", 0, _SPEAKER_WITHIN)
    return piece[: end + 1] if end >= 0 else piece[:_SPEAKER_BYTES], piece.translate(_DIGITS)


class _Numbers:
    """Line numbers of the pieces of a block; ask in ascending order."""

    def __init__(self, first: int, ends: bytes) -> None:
        self._line = first
        self._ends = ends
        self._counted = 0

    def of(self, index: int) -> int:
        if not self._ends:
            return self._line + index
        self._line += self._ends.count(b"\n", self._counted, index)
        self._counted = index
        return self._line


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
        self._scanner = scanner_of(patterns)
        self._family = family
        self._simulated = simulated
        self._splitter = LineSplitter()
        self._cutter = Cutter()
        self._state = self._new_state()
        self._earlier: list[BootLedger] = []
        self.forgotten: int = 0
        """Boots at the beginning of the stream that are not kept: beyond `MOST_BOOTS`, the oldest go."""
        self._starts = [1]
        self._times: list[int | None] = [None]
        self._last_piece = b""
        self._low: set[bytes] = set()
        """Usages of the KV cache that are known to be below the peak of this boot."""
        self._closed = False

    def feed(self, data: bytes) -> tuple[Milestone, ...]:
        """Read further bytes; returns the milestones that they show for the first time.

        Raises:
            ValueError: after `close`.
        """
        if self._closed:
            raise ValueError("feed() after close(); expected a reader that is still open")
        found: list[Milestone] = []
        first, last = data.find(b"\n") + 1, data.rfind(b"\n") + 1
        for line, piece in self._splitter.feed(data[:first]):
            self._piece(line, piece, found)
        if first < last:
            self._whole_lines(data[first:last], found)
        for line, piece in self._splitter.feed(data[last:]):
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
        """The boots of the stream, oldest first, less the `forgotten` ones; the last one is `ledger`."""
        return (*self._earlier, self.ledger())

    @property
    def lines(self) -> int:
        """Lines of the whole stream."""
        return self._splitter.lines

    @property
    def starts(self) -> tuple[int, ...]:
        """The first line of every boot in `boots`."""
        return tuple(self._starts)

    @property
    def times(self) -> tuple[int | None, ...]:
        """When every boot in `boots` began, in seconds of the day, where its lines say so."""
        return tuple(self._times)

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

    def _whole_lines(self, block: bytes, found: list[Milestone]) -> None:
        """Read a block that begins with a line and ends with one; most of its lines are not even looked at."""
        survey = self._scanner.survey(block)
        quiet = survey.only_alive() and not self._state.waits_for_more
        if quiet and (not survey.picked or (self._state.settled and self._says_nothing(block, survey.load()))):
            self._pass_over(block, survey.lines())
            return
        pieces = survey.pieces if survey.pieces is not None else split_pieces(block)
        numbers = _Numbers(self._splitter.line, survey.ends)
        waiting, done = self._state.waits_for_more, 0
        for index, kind in survey.chosen():
            while waiting and done < index:
                waiting = self._next(numbers.of(done), pieces[done], None, found)
                done += 1
            done = index + 1
            piece = pieces[index]
            if waiting or not ((kind.quotes and quotes_somebody(piece)) or self._known(piece, kind)):
                waiting = self._next(numbers.of(index), piece, kind, found)
        while waiting and done < len(pieces):
            waiting = self._next(numbers.of(done), pieces[done], None, found)
            done += 1
        self._pass_over(block, survey.lines())

    def _next(self, line: int, piece: bytes, kind: Kind | None, found: list[Milestone]) -> bool:
        """Read a piece of a block; returns whether the next one is needed whatever it is."""
        if kind is None or kind.quotes or len(piece) > LONGEST_PIECE:
            self._piece(line, capped(piece), found)
        elif piece and not piece.isspace():
            self._take(line, piece, kind, found, partial=False)
        return self._state.waits_for_more

    def _known(self, piece: bytes, kind: Kind) -> bool:
        """Whether a piece says nothing new, told by its look alone."""
        if self._state.waits_for_more:
            return False
        if kind.alive:
            return self._state.settled and self._says_nothing_new(piece)
        return kind.repeats and self._state.calm and _look(piece) in self._state.repeated

    def _pass_over(self, block: bytes, lines: int) -> None:
        self._splitter.skip(lines)
        end = len(block)
        while end and block[end - 1 : end].isspace():
            end -= 1
        if end:
            start = max(block.rfind(b"\n", 0, end), block.rfind(b"\r", 0, end) if b"\r" in block else -1) + 1
            self._last_piece = capped(block[start:end])

    def _new_state(self) -> BootState:
        return BootState(self._family, simulated=self._simulated)

    def _says_nothing(self, block: bytes, load: frozenset[str]) -> bool:
        """`_says_nothing_new` for every line of a block at once."""
        if self._state.starved or load - {_STATISTICS}:
            return False
        if not load:
            return True
        said = block.split(USAGE)
        before = {text[-_LOAD_BYTES:] for text in said[:-1]}
        after = {text[:_USAGE_BYTES] for text in said[1:]}
        if any(_RUNNING.search(text) is None or _IDLE.search(text) for text in before):
            return False
        peak = self._state.peak_usage
        after -= self._low
        usages = [_PERCENT.match(text) for text in after]
        if peak is None or not all(usage is not None and float(usage[1]) <= peak for usage in usages):
            return False
        self._low |= after
        return True

    def _says_nothing_new(self, piece: bytes) -> bool:
        """Of a line that only says that a settled engine serves: no request waits alone, no new peak of the usage."""
        match = _LOAD.search(piece)
        if match is None:
            return True
        running, waiting, usage = match.groups()
        peak = self._state.peak_usage
        return (
            not self._state.starved
            and (waiting == b"0" or running != b"0")
            and (usage is None or (peak is not None and float(usage) <= peak))
        )

    def _piece(self, line: int, piece: bytes, found: list[Milestone], *, partial: bool = False) -> None:
        if not piece or piece.isspace():
            return
        self._last_piece = piece
        kind = self._scanner.kind(piece)
        if not self._state.waits_for_more:
            if not kind.rows and not kind.trace:
                return
            if self._known(piece, kind):
                return
        self._take(line, piece, kind, found, partial=partial)

    def _take(self, line: int, piece: bytes, kind: Kind, found: list[Milestone], *, partial: bool) -> None:
        for text in clean(piece):
            if self._cutter.begins_boot(self._state, text, kind):
                self._earlier.append(assemble(self._state, line - self._starts[-1]))
                self._starts.append(line)
                self._times.append(None)
                if len(self._earlier) > MOST_BOOTS:
                    self.forgotten += 1
                    del self._earlier[0], self._starts[0], self._times[0]
                self._state = self._new_state()
                self._low.clear()
            if self._times[-1] is None:
                self._times[-1] = _time_of_day(piece)
            if not self._cutter.retired(text):
                found += self._state.take(line, text, kind, partial=partial)
                if kind.repeats and self._state.quiet and not piece.startswith(b"{"):
                    self._state.repeat(_look(piece))
