"""Ladders and sweeps in one vocabulary: what was varied, which way is the goal, and which values bound the answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from pytest_kvbudget.archive import AnyFinding
from pytest_kvbudget.ledger.model import Cause
from pytest_kvbudget.records import SweepRecord
from pytest_kvbudget.report.numbers import BYTES_FIELDS, TOKEN_FIELDS, plain_amount
from pytest_kvbudget.search.knobs import KNOBS, Goal, Knob, Side
from pytest_kvbudget.search.model import Finding
from pytest_kvbudget.units import exact_unit, size_beyond, size_in
from pytest_kvbudget.verdict import FindingKind

RUNG_PAGE: Final = "rung.html"
"""Of one boot, beside its record."""
EdgeKey = Literal["passes", "fails", "short"]
_SHORT_WORDS: Final = {"fails for allocation": "allocation fails", "fails for too little KV cache": "too little KV"}
SIDE_WORDS: Final = {"allocation": "for allocation", "minimum_kv": "for too little KV cache"}


class Track(NamedTuple):
    """What a search varied, in whole numbers as searches count: see `Axis` and `Knob`."""

    name: str
    low: int
    high: int
    step: int
    goal: Goal
    """``most``: the largest value that passes is wanted, as on every ladder; ``least``: the smallest."""
    unit_bytes: int | None = None
    """The unit of its sizes, as the search wrote them; ``None`` takes that of ends and step."""

    @property
    def rungs(self) -> int:
        """Values of the grid, both ends included."""
        return 1 + -(-(self.high - self.low) // self.step)

    @property
    def unit(self) -> int:
        """The unit, in bytes, that writes every value exactly: neighbours must not look alike, nor be retyped wrong."""
        if self.name not in BYTES_FIELDS:
            return 1
        return exact_unit((self.low, self.high, self.step)) if self.unit_bytes is None else self.unit_bytes

    def show(self, value: int) -> str:
        """A value for people: ``"241,664"``, ``"0.97"``, ``"4.00 GiB"``, ``"1,856.00 MiB"``."""
        return size_in(value, self.unit) if self.name in BYTES_FIELDS else plain_amount(self.name, value)

    def amount(self, value: int) -> str:
        """`show` with the word tokens."""
        return f"{self.show(value)} tokens" if self.name in TOKEN_FIELDS else self.show(value)

    def named(self, value: int) -> str:
        """`amount`; a number that has no unit with the name of what it counts: ``"max_num_seqs 7"``."""
        bare = self.name not in TOKEN_FIELDS and self.name not in BYTES_FIELDS
        return f"{self.name} {self.show(value)}" if bare else self.amount(value)

    def beyond(self, value: int) -> str:
        """`amount` of a value that is none of the grid, rounded away from the edge."""
        if self.name not in BYTES_FIELDS:
            return self.amount(value)
        return size_beyond(value, self.unit, up=self.goal == "least")

    @property
    def best(self) -> Literal["largest", "smallest"]:
        """What a value is that no better one passes beside."""
        return "largest" if self.goal == "most" else "smallest"

    @property
    def wanted(self) -> Literal["more", "less"]:
        """What the search is for."""
        return "more" if self.goal == "most" else "less"

    def value(self, index: int) -> int:
        """A value of the grid, counted from 0 at the low end; the grid begins at the goal's end."""
        if self.goal == "least":
            return min(self.high, self.low + index * self.step)
        return max(self.low, self.high - (self.rungs - 1 - index) * self.step)

    def values(self, most: int) -> Iterator[int]:
        """Every value from the low end up; none where there are more than ``most``."""
        if self.rungs <= most:
            yield from (self.value(index) for index in range(self.rungs))


class Edge(NamedTuple):
    """A booted value that bounds the answer."""

    value: int
    words: str
    """``"largest that passes"``, ``"fails for too little KV cache"``."""
    key: EdgeKey

    @property
    def short_words(self) -> str:
        """The same for a chart on a telephone: ``"too little KV"``."""
        return _SHORT_WORDS.get(self.words, self.words)


def page_name(record: AnyFinding) -> str:
    """File name of a finding's page, beside its record."""
    return "sweep.html" if isinstance(record, SweepRecord) else "ladder.html"


def knob_of(record: SweepRecord) -> Knob:
    """The knob that a sweep turned."""
    return KNOBS[record.finding.knob]


def track_of(record: AnyFinding) -> Track:
    """What the search varied."""
    if isinstance(record, SweepRecord):
        found = record.finding
        goal = KNOBS[found.knob].goal
        return Track(found.knob, found.lowest, found.highest, found.step, goal, found.unit_bytes)
    axis = record.finding.axis
    return Track(axis.name, axis.floor, axis.ceiling, axis.quantum, "most", axis.unit_bytes)


def side_of(record: AnyFinding, cause: Cause | None) -> Side | None:
    """Which way a failure pushes the knob of a sweep; ``None`` on a ladder, and where it pushes neither way."""
    if not isinstance(record, SweepRecord):
        return None
    found, knob = record.finding, knob_of(record)
    told = ((found.short_by, knob.other_side), (found.bounded_by if _settled(record) else None, knob.ends_at))
    # a record does not hold the test's own failure classes, but its finding says on which side they were
    own = {known.failure_class: side for known, side in told if known is not None and knob.side(known) != side}
    return knob.side(cause, own)


def edges_of(record: AnyFinding) -> tuple[Edge, ...]:
    """The values that bound the answer, the answer first."""
    found = record.finding
    if isinstance(found, Finding) and found.kind is FindingKind.FLAKY:
        return _present(
            (found.steady_value, "passed three of three", "passes"), (found.refused_at, "failed two of two", "fails")
        )
    best = track_of(record).best
    words = f"{best} that {'passes' if found.proven else 'passed'}"
    if not isinstance(record, SweepRecord):
        return _present((found.value, words, "passes"), (found.failed_at, "fails", "fails"))
    keys: dict[Side, EdgeKey] = {"allocation": "fails", "minimum_kv": "short"}
    near, far = knob_of(record).ends_at, knob_of(record).other_side
    return _present(
        (found.value, words, "passes"),
        (record.finding.failed_at, fails_near(record, "fails"), keys[near]),
        (record.finding.short_at, f"fails {SIDE_WORDS[far]}", keys[far]),
    )


def fails_near(record: SweepRecord, verb: str) -> str:
    """``"fails for allocation"``; a failure that pushes neither way, which ends a sweep, only ``"fails"``."""
    near = knob_of(record).ends_at
    known = _settled(record) or side_of(record, record.finding.bounded_by) == near
    return f"{verb} {SIDE_WORDS[near]}" if known else verb


def _settled(record: SweepRecord) -> bool:
    """What failed on the way to the goal did so for the reason that ends it: the finding's kind says so."""
    return record.finding.proven or record.finding.kind in {FindingKind.EMPTY, FindingKind.EMPTY_WINDOW}


def _present(*edges: tuple[int | None, str, EdgeKey]) -> tuple[Edge, ...]:
    return tuple(Edge(value, words, key) for value, words, key in edges if value is not None)
