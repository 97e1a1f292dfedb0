"""A boot log, in any chunks, to a boot ledger."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

from pytest_kvbudget.ledger.boot import BootState
from pytest_kvbudget.ledger.grammar import TABLES
from pytest_kvbudget.ledger.grammar.model import CompiledRow, Row
from pytest_kvbudget.ledger.lines import LONGEST_PIECE, LineSplitter, after_first_end, after_last_end, capped
from pytest_kvbudget.ledger.matching import concerns
from pytest_kvbudget.ledger.model import BootLedger, Milestone
from pytest_kvbudget.ledger.prefix import clean
from pytest_kvbudget.ledger.scan import Kind, Scanner, Survey, split_pieces
from pytest_kvbudget.ledger.services import Boots
from pytest_kvbudget.verdict import Phase

LONGEST_LAST_LINE = 400
"""Characters kept of the last line."""


BLOCK_BYTES: Final = 512 * 1024
"""Read at once: large enough to be quick, small enough that a line that has to be read does not slow down many."""
SHORT_BYTES: Final = 4096
"""Of fewer new bytes every piece is looked at."""
_NO_END: Final = bytes(byte for byte in range(256) if byte not in b"\r\n")

_CLOCK = re.compile(rb"\b([01][0-9]|2[0-3]):([0-5][0-9]):([0-5][0-9])\b")


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


class _Numbers:
    """Line numbers of the pieces of a block; ask in ascending order."""

    def __init__(self, first: int, block: bytes) -> None:
        self._line = first
        self._ends = block.translate(None, _NO_END) if b"\r" in block else b""
        self._counted = 0

    def of(self, index: int) -> int:
        if not self._ends:
            return self._line + index
        self._line += self._ends.count(b"\n", self._counted, index)
        self._counted = index
        return self._line


class LedgerReader:
    """Reads a log while it is written. Memory does not grow with the log, and chunking never changes the result.

    A stream may hold several boots (a crash loop in a journal, services that log together): `ledger` is the one that
    began last, `boots` are all.
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
        self._boots = Boots(self._new_state)
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
        start = after_first_end(data) if self._splitter.begun else 0
        self._short(data[:start], found)
        newline = data.rfind(b"\n")
        last = max(newline, data.rfind(b"\r", newline + 1)) + 1
        while last - start >= SHORT_BYTES:
            end = last if last - start <= BLOCK_BYTES else after_last_end(data, start, start + BLOCK_BYTES) or last
            self._block(data[start:end], found)
            start = end
        self._short(data[start:], found)
        return tuple(found)

    def _short(self, data: bytes, found: list[Milestone]) -> None:
        for line, piece in self._splitter.feed(data):
            self._piece(line, piece, found)

    def end_line(self) -> None:
        """The source ends here, perhaps within a line: what it says so far counts, a figure at its end does not.

        Another source may follow: a file of another rank, whose lines a log shipper gave to another service.
        """
        rest = self._splitter.rest()
        if rest is not None:
            self._piece(*rest, [], partial=True)
            self.feed(b"\n")
        self._boots.source_ends(self._splitter.line)

    def close(self) -> None:
        """The stream is complete; a last line that has no end counts as in `end_line`."""
        if not self._closed:
            self.end_line()
            self._closed = True

    def ledger(self) -> BootLedger:
        """What the last boot of the stream said so far."""
        return self._boots.ledger(self._boots.listed[-1], self.lines)

    def boots(self) -> tuple[BootLedger, ...]:
        """The boots of the stream, oldest first, less the `forgotten` ones; the last one is `ledger`."""
        return tuple(self._boots.ledger(boot, self.lines) for boot in self._boots.listed)

    @property
    def forgotten(self) -> int:
        """Boots at the beginning of the stream that are not kept."""
        return self._boots.forgotten

    @property
    def lines(self) -> int:
        """Lines of the whole stream."""
        return self._splitter.lines

    @property
    def starts(self) -> tuple[int, ...]:
        """The first line of every boot in `boots`."""
        return tuple(boot.start for boot in self._boots.listed)

    @property
    def times(self) -> tuple[int | None, ...]:
        """When every boot in `boots` began, in seconds of the day, where its lines say so."""
        return tuple(boot.time for boot in self._boots.listed)

    @property
    def services(self) -> tuple[str | None, ...]:
        """Who logged every boot in `boots`; ``None`` where all boots are of one service."""
        names = tuple(boot.service for boot in self._boots.listed)
        return names if len(set(names)) > 1 else (None,) * len(names)

    @property
    def phase(self) -> Phase:
        """What is going on now, in the last boot of the stream."""
        return self._boots.phase

    @property
    def last_line(self) -> str:
        """The last line that says anything, without prefixes."""
        text = ""
        for said in clean(self._last_piece):
            text = said.text.strip() or text
        return text[:LONGEST_LAST_LINE]

    def _block(self, block: bytes, found: list[Milestone]) -> None:
        """Read a block that begins with a piece and ends with one; most of its pieces are not even looked at."""
        whole = block.replace(b"\r\n", b"\n") if b"\r\n" in block[:SHORT_BYTES] else block
        survey = self._scanner.survey(whole)
        waiting, loud = self._boots.waits_for_more, self._loud(survey, whole)
        if loud or waiting:
            self._pieces(whole, survey, loud, found)
        lines = whole.count(b"\n") if survey.redrawn else len(survey.keys)
        self._splitter.skip(lines, within=block[-1:] == b"\r")
        self._remember_last(block)

    def _loud(self, survey: Survey, block: bytes) -> Mapping[bytes, Kind]:
        """Keys of the pieces that have to be looked at for one service or another."""
        first, *others = [quiet.loud(survey, block) for quiet in self._boots.quiets]
        return {key: kind for loud in (first, *others) for key, kind in loud.items()} if others else first

    def _known(self, piece: bytes, kind: Kind) -> bool:
        quiet, *others = self._boots.quiets
        return quiet.known(piece, kind) and all(other.known(piece, kind) for other in others)

    def _pieces(self, block: bytes, survey: Survey, loud: Mapping[bytes, Kind], found: list[Milestone]) -> None:
        pieces = survey.pieces if survey.pieces is not None else split_pieces(block)
        numbers = _Numbers(self._splitter.line, block)
        picked, quiets = survey.picked, self._boots.quiets
        waiting, done, count = self._boots.waits_for_more, 0, len(pieces)
        while done < count:
            while waiting and done < count:
                piece = pieces[done]
                waiting = self._next(numbers.of(done), piece, picked.get(survey.keys[done]), found)
                done += 1
            for index in survey.indices(loud, done):
                done = index + 1
                piece, kind = pieces[index], loud[survey.keys[index]]
                if (kind.quotes and self._scanner.quotes(piece)) or self._known(piece, kind):
                    continue
                waiting = self._next(numbers.of(index), piece, kind, found)
                stays = loud is picked or (self._boots.quiets == quiets and all(quiet.stays() for quiet in quiets))
                if waiting or not stays:
                    loud = picked
                    break
            else:
                break

    def _next(self, line: int, piece: bytes, kind: Kind | None, found: list[Milestone]) -> bool:
        """Read a piece of a block; returns whether the next one is needed whatever it is."""
        if kind is None or kind.quotes or len(piece) > LONGEST_PIECE:
            self._piece(line, capped(piece), found)
        elif piece and not piece.isspace():
            self._take(line, piece, kind, found, partial=False)
        return self._boots.waits_for_more

    def _remember_last(self, block: bytes) -> None:
        end = len(block)
        while end and block[end - 1 : end].isspace():
            end -= 1
        if end:
            newline = block.rfind(b"\n", 0, end)
            self._last_piece = capped(block[max(newline, block.rfind(b"\r", newline + 1, end)) + 1 : end])

    def _new_state(self) -> BootState:
        return BootState(self._family, simulated=self._simulated)

    def _piece(self, line: int, piece: bytes, found: list[Milestone], *, partial: bool = False) -> None:
        if not piece or piece.isspace():
            return
        self._last_piece = piece
        kind = self._scanner.kind(piece)
        if not self._boots.waits_for_more:
            if not kind.rows and not kind.trace:
                return
            if self._known(piece, kind):
                return
        self._take(line, piece, kind, found, partial=partial)

    def _take(self, line: int, piece: bytes, kind: Kind, found: list[Milestone], *, partial: bool) -> None:
        for text in clean(piece):
            if not (self._boots.waits_for_more or concerns(text.text, kind)):
                continue
            service = self._boots.of(line, text, kind)
            if service.boot.time is None:
                service.boot.time = _time_of_day(piece)
            if not service.cutter.retired(text):
                found += self._boots.take(line, text, kind, partial=partial)
                service.quiet.remember(piece, kind)
