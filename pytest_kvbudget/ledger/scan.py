"""Which lines of a log can concern a boot at all: the fast path over gigabytes of serving.

A log of gigabytes is a few kinds of lines, told apart by numbers, addresses and identifiers. Of every line only the
bytes in `KEPT` are looked at: its skeleton. Lines of one kind have one skeleton, and each skeleton is searched once for
the plain text of the grammar, reduced to the same bytes. Deleting bytes from a line and from the text that is looked
for cannot lose a match, only add false ones; what is found is matched again, in full.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from pytest_kvbudget.ledger.grammar.model import CompiledRow

KEPT: Final = b"\n ABCDEFGHJKLMQRUVWXYZgjklmoqrtuvwxyz/=[]_#|*!"
"""Enough letters to tell the grammar's text from what a serving engine says, and few enough to be quick."""
_DELETED: Final = bytes(byte for byte in range(256) if byte not in KEPT and byte != 0x0D)
_ENDS: Final = bytes.maketrans(b"\r", b"\n")
_NO_END: Final = bytes(byte for byte in range(256) if byte not in b"\r\n")
_NO_DIGIT = re.compile(r"\{[a-z][a-z0-9_]*:[a-z_]+\}|\{\d*,?\d*\}|0-9")
"""Parts of a pattern with digits that stand for no digit of a line."""
_TRACE: Final = ("Traceback (most recent call last)", 'File "', "Error", "Exception", "KeyboardInterrupt", "Exit")

_ALIVE: Final = frozenset({"alive", "asked"})
_STARTS: Final = frozenset({"start", "plan", "engine"})

QUOTES: Final = (b"Received request ", b"Receive: obj=", b"Finish: obj=", b"Generated response ")
"""Lines that quote what clients wrote: whatever they contain, the engine did not say it."""
QUOTE_WITHIN: Final = 240
"""Bytes of a line in which the quotation begins, prefixes included."""

USAGE: Final = b" cache usage: "
"""Stands in an engine's statistics after the numbers of requests."""

LONGEST_SKELETON: Final = 1024
"""Bytes; longer skeletons are not remembered."""
MOST_SKELETONS: Final = 32768
"""Skeletons that are remembered before all are forgotten."""


PART_BYTES: Final = 4
_SHORT: Final = -1
"""Stands for the parts of needles that are too short to have one."""


class _Needle(NamedTuple):
    needle: bytes
    rows: tuple[CompiledRow, ...]


class Kind(NamedTuple):
    """What lines of one skeleton can be."""

    rows: tuple[CompiledRow, ...]
    """Rows whose plain text may stand in the line."""
    trace: bool
    """May belong to a traceback."""
    alive: bool
    """Can only say that the engine still serves: most lines of a long log."""
    load: frozenset[str]
    """Plain text of its rows that say how many requests run and wait; empty where `USAGE` does not follow."""
    starts: bool
    """May be the first line of a boot."""
    repeats: bool
    """Lines that differ in digits only are read alike."""
    quotes: bool
    """May quote a client: then only `Scanner.quotes_somebody` tells."""


class Survey(NamedTuple):
    """The pieces of a block, by skeleton."""

    skeletons: list[bytes]
    """One per piece."""
    picked: dict[bytes, Kind]
    """Skeletons that can concern a boot."""
    ends: bytes
    r"""How each piece ends, ``\r`` or ``\n``; empty where all end in ``\n``."""
    pieces: list[bytes] | None
    """The pieces, where the survey needed them."""

    def only_alive(self) -> bool:
        """No line can say more than that the engine serves."""
        return all(kind.alive for kind in self.picked.values())

    def load(self) -> frozenset[str]:
        """Plain text of the rows that say how many requests run and wait."""
        return frozenset[str]().union(*(kind.load for kind in self.picked.values()))

    def lines(self) -> int:
        """Lines of the block."""
        return self.ends.count(b"\n") if self.ends else len(self.skeletons)

    def chosen(self) -> Iterator[tuple[int, Kind]]:
        """Indices of the pieces that can concern a boot, and what each can be."""
        picked = self.picked
        if picked:
            yield from ((index, picked[piece]) for index, piece in enumerate(self.skeletons) if piece in picked)


NOTHING: Final = Kind((), trace=False, alive=False, load=frozenset(), starts=False, repeats=False, quotes=False)


class Scanner:
    """Tells lines that can concern a boot from the others."""

    def __init__(self, rows: Iterable[CompiledRow]) -> None:
        """``rows``: the grammar."""
        needles: dict[bytes, list[CompiledRow]] = {skeleton_of(word.encode()): [] for word in _TRACE}
        self._trace = frozenset(needles)
        self._order: dict[CompiledRow, int] = {}
        for compiled in rows:
            self._order[compiled] = len(self._order)
            needles.setdefault(skeleton_of(compiled.needle.encode()), []).append(compiled)
        self._needles = _by_part(needles)
        self._parts = frozenset(self._needles)
        self._quotes = tuple(skeleton_of(quote) for quote in QUOTES)
        self._kinds: dict[bytes, Kind] = {}

    def kind(self, piece: bytes) -> Kind:
        """What one piece of a line can be."""
        kind = self._kind(skeleton_of(piece))
        return NOTHING if kind.quotes and quotes_somebody(piece) else kind

    def survey(self, block: bytes) -> Survey:
        """What the pieces of ``block`` can be; ``block`` is whole lines, with the end of the last one."""
        skeletons = skeleton_of(block).split(b"\n")
        skeletons.pop()
        ends = block.translate(None, _NO_END) if b"\r" in block else b""
        picked: dict[bytes, Kind] = {}
        unknown: list[bytes] = []
        known = self._kinds
        for skeleton in set(skeletons):
            kind = known.get(skeleton)
            if kind is None:
                unknown.append(skeleton)
            elif kind is not NOTHING:
                picked[skeleton] = kind
        pieces = split_pieces(block) if unknown else None
        if pieces is not None:
            self._learn(unknown, skeletons, pieces, picked)
        return Survey(skeletons, picked, ends, pieces)

    def _learn(
        self, unknown: list[bytes], skeletons: list[bytes], pieces: Sequence[bytes], picked: dict[bytes, Kind]
    ) -> None:
        count = len(skeletons)
        last = dict(zip(skeletons, range(count), strict=True))
        first = dict(zip(reversed(skeletons), range(count - 1, -1, -1), strict=True))
        for skeleton in unknown:
            place = last[skeleton]
            # what a client wrote comes once; such a skeleton is not worth remembering
            if place == first[skeleton] and self._may_quote(skeleton) and quotes_somebody(pieces[place]):
                continue
            kind = self._kind(skeleton)
            if kind is not NOTHING:
                picked[skeleton] = kind

    def _may_quote(self, skeleton: bytes) -> bool:
        for quote in self._quotes:  # noqa: SIM110 - quicker than a generator, and it runs once per line
            if quote in skeleton:
                return True
        return False

    def _kind(self, skeleton: bytes) -> Kind:
        known = self._kinds.get(skeleton)
        if known is None:
            known = self._classify(skeleton)
            if len(skeleton) <= LONGEST_SKELETON:
                if len(self._kinds) >= MOST_SKELETONS:
                    self._kinds.clear()
                self._kinds[skeleton] = known
        return known

    def _classify(self, skeleton: bytes) -> Kind:
        found = [
            each
            for part in (_SHORT, *(self._parts & _parts_of(skeleton)))
            for each in self._needles[part]
            if each.needle in skeleton
        ]
        if not found:
            return NOTHING
        trace = any(each.needle in self._trace for each in found)
        rows = tuple(sorted((row for each in found for row in each.rows), key=self._order.__getitem__))
        events = {compiled.row.event for compiled in rows}
        usage = skeleton_of(USAGE) in skeleton
        return Kind(
            rows,
            trace,
            alive=not trace and events <= _ALIVE,
            load=frozenset(row.needle if usage else "" for row in rows if _tells_load(row)),
            starts=bool(events & _STARTS),
            repeats=not trace and all(_any_digits(compiled) for compiled in rows),
            quotes=self._may_quote(skeleton),
        )


def _by_part(needles: dict[bytes, list[CompiledRow]]) -> dict[int, list[_Needle]]:
    """Needles by the rarest part of each, so that a skeleton is searched for few of them."""
    often: dict[int, int] = {}
    parts = {
        needle: {
            int.from_bytes(needle[start : start + PART_BYTES], sys.byteorder)
            for start in range(len(needle) - PART_BYTES + 1)
        }
        or {_SHORT}
        for needle in needles
    }
    for part in (part for inner in parts.values() for part in inner):
        often[part] = often.get(part, 0) + 1
    grouped: dict[int, list[_Needle]] = {_SHORT: []}
    for needle, rows in needles.items():
        rarest = min(parts[needle], key=lambda part: (often[part], part))
        grouped.setdefault(rarest, []).append(_Needle(needle, tuple(rows)))
    return grouped


def _parts_of(skeleton: bytes) -> set[int]:
    """Every `PART_BYTES` bytes that stand side by side, as numbers."""
    room = memoryview(skeleton + b"\n" * PART_BYTES * 2)
    size = len(skeleton) // PART_BYTES * PART_BYTES + PART_BYTES
    return {part for offset in range(PART_BYTES) for part in room[offset : offset + size].cast("I")}


def _tells_load(compiled: CompiledRow) -> bool:
    return any("waiting" in pattern.kinds for pattern in (compiled.main, *compiled.parts))


def _any_digits(compiled: CompiledRow) -> bool:
    """Whether the row matches whatever the digits of a line are."""
    texts = (compiled.row.pattern, *compiled.row.parts)
    return not any(character.isdigit() for text in texts for character in _NO_DIGIT.sub("", text))


def quotes_somebody(piece: bytes) -> bool:
    """Whether the piece is the engine's record of what a client wrote."""
    for quote in QUOTES:  # noqa: SIM110 - quicker than a generator, and it runs once per line
        if piece.find(quote, 0, QUOTE_WITHIN) >= 0:
            return True
    return False


def skeleton_of(text: bytes) -> bytes:
    """The text without what tells lines of one kind apart; every end of a piece is a newline."""
    return text.translate(_ENDS, _DELETED)


def split_pieces(block: bytes) -> list[bytes]:
    """The pieces of whole lines, as many as their skeletons."""
    pieces = (block.replace(b"\r", b"\n") if b"\r" in block else block).split(b"\n")
    pieces.pop()
    return pieces
