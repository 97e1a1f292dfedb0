"""The boots of a ladder as pages and texts need them, read from their records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from pytest_kvbudget.ledger.model import Cause
from pytest_kvbudget.records import AttemptRecord, FindingRecord
from pytest_kvbudget.report.marks import Mark, mark_of
from pytest_kvbudget.report.numbers import duration, words
from pytest_kvbudget.search.model import Axis
from pytest_kvbudget.verdict import Verdict


class Bracket(NamedTuple):
    """What was known before a boot: the boundary lies at or above ``low`` and below ``high``, both from the axis."""

    low: int
    high: int


class Boot(NamedTuple):
    """One boot of a ladder."""

    number: int
    """From 1, in boot order."""
    value: int | None
    """Its rung, ``None`` where the record does not say."""
    record: AttemptRecord
    mark: Mark
    before: Bracket
    confirmation: bool
    """Booted after the proof, not part of it."""


def boots(attempts: Sequence[AttemptRecord], axis: Axis, proof_boots: int) -> list[Boot]:
    """The attempts in boot order with the bracket before each; ``proof_boots`` is how many the proof took."""
    low, high = axis.floor, axis.ceiling
    made = []
    for number, record in enumerate(attempts, 1):
        value = rung_value(record, axis)
        mark = mark_of(record.verdict, record.cause)
        made.append(Boot(number, value, record, mark, Bracket(low, high), number > proof_boots))
        if value is None:
            continue
        if record.verdict in {Verdict.PASS, Verdict.MARGINAL}:
            low = max(low, value)
        elif record.verdict is Verdict.FAIL:
            high = min(high, value)
    return made


def rung_value(record: AttemptRecord, axis: Axis) -> int | None:
    """The rung an attempt stood on: the axis' field of its shape, else its label."""
    value = getattr(record.shape, axis.name, None)
    if isinstance(value, int):
        return value
    label = (record.rung or "").partition("=")[2].partition("#")[0]
    return int(label) if label.isdecimal() else None


def pool_bytes(record: FindingRecord, attempts: Sequence[AttemptRecord]) -> int | None:
    """The pinned pool per rank with which the winner of a scaled ladder passed; else ``None``."""
    finding = record.finding
    if record.pool != "scaled" or finding.value is None:
        return None
    passed = [
        attempt.shape.kv_cache_memory_bytes
        for attempt in attempts
        if rung_value(attempt, finding.axis) == finding.value and attempt.verdict in {Verdict.PASS, Verdict.MARGINAL}
    ]
    return passed[-1] if passed else None


def took(record: AttemptRecord) -> str | None:
    """How long the boot took until ready or dead; at least how long where nobody saw its end; else ``None``."""
    if record.timings.boot_s is not None:
        return duration(record.timings.boot_s)
    if record.timings.ended_s is not None:
        return duration(record.timings.ended_s)
    begun = max((phase.start_s for phase in record.timings.phases), default=None)
    return None if begun is None else f"≥ {duration(begun)}"


_OF_THE_TEST: Final = {
    "body_error": "the test itself failed",
    "body_timeout": "the test ran out of time",
    "interrupted": "interrupted",
}


def why(record: AttemptRecord) -> str:
    """Why a boot did not pass, in few words; empty where it did."""
    if record.cause is not None:
        return reason(record.cause)
    return "" if record.verdict in {Verdict.PASS, Verdict.MARGINAL} else record.message.partition(":")[0]


def reason(cause: Cause) -> str:
    """Failure class and phase in words, the phase only where the class does not name it already."""
    if cause.by_gate:
        return "refused by the test"
    if cause.failure_class in _OF_THE_TEST:
        return _OF_THE_TEST[cause.failure_class]
    failure, phase = words(cause.failure_class), words(cause.phase)
    return failure if phase in failure else f"{failure} in {phase}"


def rungs(axis: Axis, most: int) -> Iterator[int]:
    """Every rung of the axis from the floor up; none where there are more than ``most``."""
    if len(axis) <= most:
        yield from (axis.value(index) for index in range(len(axis)))
