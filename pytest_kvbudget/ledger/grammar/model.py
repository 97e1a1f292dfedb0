"""What a row of a grammar table says about a line."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Final, Literal

import msgspec

from pytest_kvbudget.ledger.notation import NotationError, Pattern
from pytest_kvbudget.verdict import Phase, Provenance

Scope = Literal["api", "engine", "rank", "rank0"]
"""Who prints the line: the server, the engine once, every rank, the first local rank only."""

SHORTEST_NEEDLE: Final = 4
_LITERAL = re.compile(r"(?:[^\\{}()\[\]?*+.|^$]|\\(?=[^\w])[^\w])+")


class Tier(IntEnum):
    """How near to the root a failure line is; the lowest wins, then the first line."""

    ROOT = 0
    """Names the cause itself."""
    KILLED = 1
    """An unrecognised exception, or a death with a status that says who did it."""
    DEATH = 2
    """A process is gone and nothing says why."""
    WRAPPER = 3
    """Reports somebody else's failure; never a cause, yet proof that the boot failed."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What a failure line proves."""

    failure_class: str
    """A word of `pytest_kvbudget.ledger.classes.CLASSES`, or ``"oom"``: an allocation failed, the phase decides."""
    phase: Phase | None = None
    """Phase that the wording belongs to; ``None``: the traceback or the last milestone decides."""
    tier: Tier = Tier.ROOT
    soft: bool = False
    """The engine may go on after it: a cause only if nothing follows."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One wording: what the line looks like, where in a boot it stands, which figures it prints."""

    pattern: str
    """In the notation of `pytest_kvbudget.ledger.notation`; may match anywhere in the line."""
    needle: str = ""
    """Plain text that every such line contains; default: the plain text that the pattern begins with."""
    parts: tuple[str, ...] = ()
    """Further patterns for the same line, each on its own: a cut line gives the parts that are there."""
    phase: Phase | None = None
    """Boot phase that the line belongs to; ``None`` for lines that may stand anywhere."""
    then: Phase | None = None
    """What goes on after the line; default ``phase``."""
    scope: Scope = "engine"
    releases: str = ""
    """Releases that print it, as far as read; empty: all."""
    provenance: Provenance = Provenance.MEASURED
    failure: Failure | None = None
    event: Literal[
        "", "start", "engine", "plan", "served", "stopping", "alive", "asked", "simulated", "table", "head", "cells"
    ] = ""
    """``table``: the lines below list a device's memory. ``head``, ``cells``: parts of a table with columns.
    ``start``: a boot begins. ``engine``: its engine does. ``served``: it answers. ``alive``: it still serves.
    ``asked``: it has a request. ``simulated``: no figure of this boot was measured. ``stopping``: an orderly end."""
    follows: str = ""
    """The row counts only within a few lines after a failure line of this class: parts of a table."""
    flags: tuple[str, ...] = ()
    """Facts that the line makes true without printing a figure."""
    wraps: bool = False
    """Terminals and log shippers wrap this text over lines: the next lines are read with it."""
    known: bool = True
    """Only an engine of this family prints it; ``False`` for texts of libraries that any program may print."""
    literal: bool = False
    """The pattern is plain text around its places (patterns that users write)."""

    def literal_needle(self) -> str:
        """Text that every matching line contains.

        Raises:
            NotationError: when the pattern begins with no such text and ``needle`` is empty.
        """
        if self.needle:
            return self.needle
        if self.literal:
            words = re.split(r"\{[a-z0-9_]+:[a-z_]+\}|\s+", self.pattern)
            needle = max(words, key=len)
        else:
            match = _LITERAL.match(self.pattern)
            needle = match.group() if match is not None else ""
            if match is not None and self.pattern[match.end() : match.end() + 1] in {"?", "*"}:
                needle = needle[:-1]
            needle = needle.replace("\\", "")
        if len(needle) < SHORTEST_NEEDLE:
            raise NotationError(
                f"{self.pattern!r} has no plain text of {SHORTEST_NEEDLE} characters to find its line by"
            )
        return needle


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """The wording of one engine family."""

    family: str | None
    """``None``: wording that several engines share; it does not tell the family."""
    rows: tuple[Row, ...]
    order: tuple[Phase, ...] = ()
    """Phases in the order in which this family goes through them."""


class CompiledRow:
    """A row ready to be matched."""

    __slots__ = ("family", "main", "needle", "parts", "row")

    def __init__(self, row: Row, family: str | None) -> None:
        self.row = row
        self.family = family
        self.needle = row.literal_needle()
        self.main = Pattern(row.pattern, literal=row.literal)
        self.parts = tuple(Pattern(part) for part in row.parts)
