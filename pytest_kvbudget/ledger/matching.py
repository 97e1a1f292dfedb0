"""What the rows of the grammar find in one text: pure, so texts that come again are not matched again."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from pytest_kvbudget.ledger.grammar.model import CompiledRow
from pytest_kvbudget.ledger.notation import Reading
from pytest_kvbudget.ledger.scan import TRACE_WORDS, Kind
from pytest_kvbudget.ledger.wrapped import loose_names

LONGEST_KNOWN: Final = 4096
"""Characters; what longer texts say is not remembered."""
MOST_KNOWN: Final = 1024
"""Texts whose matches are remembered."""


class Found(NamedTuple):
    """A row that a text contains, or begins to contain."""

    row: CompiledRow
    whole: bool
    """The row's pattern was found; else only its plain text, and the rest may come in the next lines."""
    readings: Mapping[str, Reading]
    loose: frozenset[str]
    """Figures that end where the text ends."""
    complete: bool
    """Every part of the row was found."""


def concerns(text: str, kind: Kind) -> bool:
    """Whether a text has the plain text of a row, or words of a traceback: its kind only says that it may."""
    if len(text) > LONGEST_KNOWN:
        return _concerns(text, kind.rows, trace=kind.trace)
    return _known_to_concern(text, kind.rows, trace=kind.trace)


def _concerns(text: str, rows: tuple[CompiledRow, ...], *, trace: bool) -> bool:
    if any(row.needle in text for row in rows):
        return True
    return trace and any(word in text for word in TRACE_WORDS)


_known_to_concern = lru_cache(maxsize=MOST_KNOWN)(_concerns)


def find_rows(text: str, rows: tuple[CompiledRow, ...], *, partial: bool) -> tuple[Found, ...]:
    """The rows in ``text``, in their order; a ``partial`` one has no figure that its last character belongs to."""
    if partial or len(text) > LONGEST_KNOWN:
        return _find(text, rows, partial=partial)
    return _remembered(text, rows)


@lru_cache(maxsize=MOST_KNOWN)
def _remembered(text: str, rows: tuple[CompiledRow, ...]) -> tuple[Found, ...]:
    return _find(text, rows, partial=False)


def _find(text: str, rows: tuple[CompiledRow, ...], *, partial: bool) -> tuple[Found, ...]:
    found = (_match(row, text, partial=partial) for row in rows if row.needle in text)
    return tuple(each for each in found if each is not None)


def _sure(text: str) -> int:
    """Where the last figure of a text whose end has not come begins, if it ends in one: ``179.`` may be ``179.3``."""
    return min(len(text.rstrip("0123456789.,")), len(text) - 1)


def _match(compiled: CompiledRow, text: str, *, partial: bool) -> Found | None:
    match = compiled.main.regex.search(text)
    if match is None:
        begins = compiled.row.wraps and not partial
        return Found(compiled, False, {}, frozenset(), complete=False) if begins else None
    end = _sure(text) if partial else None
    readings = compiled.main.readings(match, end)
    loose = loose_names(compiled.main, match)
    complete = True
    for part in compiled.parts:
        found = part.regex.search(text)
        complete &= found is not None
        if found is not None:
            loose |= loose_names(part, found)
            for name, reading in part.readings(found, end).items():
                readings.setdefault(name, reading)
    return Found(compiled, True, readings, frozenset(loose), complete=complete)
