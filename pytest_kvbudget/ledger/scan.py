"""Which lines of a log can concern a boot at all: the fast path over gigabytes of serving.

A log of gigabytes is a few kinds of lines, told apart by numbers and identifiers. Without digits and hexadecimal
letters they become a few skeletons: each is searched once for the plain text of the grammar, and from then on its
lines cost a lookup. Deleting letters from a line and from the text that is looked for cannot lose a match, only add
false ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from pytest_kvbudget.ledger.grammar.model import CompiledRow

_DELETED: Final = b"0123456789abcdef"
_TRACE: Final = ("Traceback (most recent call last)", 'File "', "Error", "Exception", "KeyboardInterrupt", "Exit")

_ALIVE: Final = frozenset({"alive", "asked"})
_STARTS: Final = frozenset({"start", "plan", "engine"})

LONGEST_SKELETON: Final = 1024
"""Bytes; longer skeletons are not remembered."""
MOST_SKELETONS: Final = 32768
"""Skeletons that are remembered before all are forgotten."""


class Kind(NamedTuple):
    """What lines of one skeleton can be."""

    rows: tuple[CompiledRow, ...]
    """Rows whose plain text may stand in the line."""
    trace: bool
    """May belong to a traceback."""
    alive: bool
    """Can only say that the engine still serves: most lines of a long log."""
    starts: bool
    """May be the first line of a boot."""


class Survey(NamedTuple):
    """The lines of a block, by skeleton."""

    skeletons: list[bytes]
    """One per line."""
    picked: dict[bytes, Kind]
    """Skeletons that can concern a boot."""

    def only_alive(self) -> bool:
        """No line can say more than that the engine serves."""
        return all(kind.alive for kind in self.picked.values())

    def lines(self) -> Iterator[tuple[int, Kind]]:
        """Indices of the lines that can concern a boot, and what each can be."""
        picked = self.picked
        if picked:
            yield from ((index, picked[line]) for index, line in enumerate(self.skeletons) if line in picked)


_NOTHING: Final = Kind((), trace=False, alive=False, starts=False)


class Scanner:
    """Tells lines that can concern a boot from the others."""

    def __init__(self, rows: Iterable[CompiledRow]) -> None:
        """``rows``: the grammar."""
        self._needles: dict[bytes, list[CompiledRow]] = {}
        for compiled in rows:
            self._needles.setdefault(skeleton_of(compiled.row.literal_needle().encode()), []).append(compiled)
        self._trace = tuple(skeleton_of(word.encode()) for word in _TRACE)
        self._kinds: dict[bytes, Kind] = {}

    def kind(self, piece: bytes) -> Kind:
        """What one piece of a line can be."""
        return self._kind(skeleton_of(piece))

    def survey(self, block: bytes) -> Survey:
        """What the lines of ``block`` can be; ``block`` is whole lines, with the end of the last one."""
        skeletons = skeleton_of(block).split(b"\n")
        skeletons.pop()
        picked = {}
        for skeleton in set(skeletons):
            kind = self._kind(skeleton)
            if kind is not _NOTHING:
                picked[skeleton] = kind
        return Survey(skeletons, picked)

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
        rows = tuple(row for needle, rows in self._needles.items() if needle in skeleton for row in rows)
        trace = any(word in skeleton for word in self._trace)
        if not rows and not trace:
            return _NOTHING
        events = {compiled.row.event for compiled in rows}
        return Kind(rows, trace, alive=not trace and events <= _ALIVE, starts=bool(events & _STARTS))


def skeleton_of(text: bytes) -> bytes:
    """The text without what tells lines of one kind apart."""
    return text.translate(None, _DELETED)
