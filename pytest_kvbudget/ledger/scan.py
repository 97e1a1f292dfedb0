"""Which lines of a log can concern a boot at all: the fast path over gigabytes of serving.

A log of gigabytes is a few kinds of lines, told apart by numbers, addresses and identifiers. Of every line only the
bytes in `KEPT` are looked at: its skeleton. Lines of one kind have one skeleton, and each skeleton is searched once for
the plain text of the grammar, reduced to the same bytes. Deleting bytes from a line and from the text that is looked
for cannot lose a match, only add false ones; what is found is matched again, in full.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from io import BytesIO
from itertools import compress, islice
from typing import Final, NamedTuple

from pytest_kvbudget.ledger.grammar.common import CALLS
from pytest_kvbudget.ledger.grammar.model import CompiledRow
from pytest_kvbudget.ledger.quotes import QUOTES, Quotations

KEPT: Final = b"\n#=BCEFHJKLMTV[]_fgijlmnoqrstuwxyz"
"""Enough letters to tell the grammar's text from what a serving engine says, and few enough to be quick; nothing of
numbers, of identifiers in hexadecimal or of the spaces between words. Chosen by search: least time for an engine's own
lines, and no more lines taken for the grammar's than with most letters kept."""
_DELETED: Final = bytes(byte for byte in range(256) if byte not in KEPT and byte != 0x0D)
_ZEROED: Final = bytes.maketrans(b"123456789\r", b"000000000\n")
_SAMPLE_BYTES: Final = 4096
"""From the beginning of a block, to tell whether it is redrawn progress bars."""
_NO_DIGIT = re.compile(r"\{[a-z][a-z0-9_]*:[a-z_]+\}|\{\d*,?\d*\}|0-9")
"""Parts of a pattern with digits that stand for no digit of a line."""
TRACE_WORDS: Final = (
    *("Traceback (most recent call last)", "Error", "Exception", "KeyboardInterrupt", "Exit"),
    *('File "', "File /", "File ~", "File ["),
    *CALLS,
)
"""What every line that matters to a traceback has one of."""

_ALIVE: Final = frozenset({"alive", "asked"})
_STARTS: Final = frozenset({"start", "plan", "engine"})

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
    """Plain text of its rows that say how many requests run and wait."""
    starts: bool
    """May be the first line of a boot."""
    repeats: bool
    """Lines that differ in digits only are read alike."""
    quotes: bool
    """May quote a client: then only `Scanner.quotes` tells."""


class Survey(NamedTuple):
    """The pieces of a block, by kind."""

    keys: list[bytes]
    """One per piece; pieces with the same key are of one kind."""
    picked: dict[bytes, Kind]
    """Keys of pieces that can concern a boot."""
    redrawn: bool
    r"""Some pieces end in ``\r``: there are fewer lines than pieces."""
    zeroed: bool
    """A key is the whole piece with every digit a zero; else its skeleton, with the end."""
    pieces: list[bytes] | None
    """The pieces, where the survey needed them."""

    def indices(self, picked: Container[bytes], start: int = 0) -> Iterator[int]:
        """Indices from ``start`` on of the pieces whose key is one of ``picked``."""
        keys = self.keys
        return compress(range(start, len(keys)), map(picked.__contains__, islice(keys, start, None)))


NOTHING: Final = Kind((), trace=False, alive=False, load=frozenset(), starts=False, repeats=False, quotes=False)


class Scanner:
    """Tells lines that can concern a boot from the others."""

    def __init__(self, rows: Iterable[CompiledRow]) -> None:
        """``rows``: the grammar."""
        needles: dict[bytes, list[CompiledRow]] = {skeleton_of(word.encode()): [] for word in TRACE_WORDS}
        self._trace = frozenset(needles)
        self._order: dict[CompiledRow, int] = {}
        for compiled in rows:
            self._order[compiled] = len(self._order)
            needles.setdefault(skeleton_of(compiled.needle.encode()), []).append(compiled)
        self._needles = _by_part(needles)
        self._parts = frozenset(self._needles)
        self._quotations = Quotations()
        self._quotes = tuple(skeleton_of(quote) for quote in QUOTES)
        self._kinds: dict[bytes, Kind] = {}

    def kind(self, piece: bytes) -> Kind:
        """What one piece of a line can be."""
        kind = self._kind(skeleton_of(piece) + b"\n")
        return NOTHING if kind.quotes and self.quotes(piece) else kind

    def quotes(self, piece: bytes) -> bool:
        """Whether the piece is the engine's record of what a client wrote."""
        return self._quotations.quotes(piece)

    def survey(self, block: bytes) -> Survey:
        """What the pieces of ``block`` can be; ``block`` is whole pieces, with the end of the last one."""
        if block.count(b"\r", 0, _SAMPLE_BYTES) > block.count(b"\n", 0, _SAMPLE_BYTES):
            return self._survey_of_bars(block)
        skeletons = self._quotations.cut(block).translate(None, _DELETED)
        redrawn = b"\r" in skeletons
        keys = BytesIO(skeletons.replace(b"\r", b"\n") if redrawn else skeletons).readlines()  # quicker than a split
        picked: dict[bytes, Kind] = {}
        unknown: list[bytes] = []
        known = self._kinds
        for key in set(keys):
            kind = known.get(key)
            if kind is None:
                unknown.append(key)
            elif kind is not NOTHING:
                picked[key] = kind
        pieces = split_pieces(block) if unknown else None
        if pieces is not None:
            self._learn(unknown, keys, pieces, picked)
        return Survey(keys, picked, redrawn=redrawn, zeroed=False, pieces=pieces)

    def _survey_of_bars(self, block: bytes) -> Survey:
        """Redrawn progress bars differ in digits, and in little else."""
        keys = block.translate(_ZEROED).split(b"\n")
        keys.pop()
        picked = {key: kind for key in set(keys) if (kind := self._kind(skeleton_of(key) + b"\n")) is not NOTHING}
        return Survey(keys, picked, redrawn=True, zeroed=True, pieces=None)

    def _learn(
        self, unknown: list[bytes], skeletons: list[bytes], pieces: Sequence[bytes], picked: dict[bytes, Kind]
    ) -> None:
        count = len(skeletons)
        last = dict(zip(skeletons, range(count), strict=True))
        first = dict(zip(reversed(skeletons), range(count - 1, -1, -1), strict=True))
        for skeleton in unknown:
            place = last[skeleton]
            # what a client wrote comes once; such a skeleton is not worth remembering
            if place == first[skeleton] and self._may_quote(skeleton) and self.quotes(pieces[place]):
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
        return Kind(
            rows,
            trace,
            # what also says that a phase is reached is read each time
            alive=not trace and events <= _ALIVE and all(compiled.row.phase is None for compiled in rows),
            load=frozenset(row.needle for row in rows if _tells_load(row)),
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


def skeleton_of(text: bytes) -> bytes:
    """The text without what tells lines of one kind apart; every end of a piece is a newline."""
    return text.translate(None, _DELETED).replace(b"\r", b"\n")


def split_pieces(block: bytes) -> list[bytes]:
    """The pieces of a block, as many as its survey has keys."""
    pieces = (block.replace(b"\r", b"\n") if b"\r" in block else block).split(b"\n")
    pieces.pop()
    return pieces
