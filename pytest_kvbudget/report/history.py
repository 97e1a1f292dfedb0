"""The boots of a search as pages and texts need them, read from their records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from pytest_kvbudget.archive import AnyFinding
from pytest_kvbudget.ledger.model import Cause
from pytest_kvbudget.records import AttemptRecord, FindingRecord, SweepRecord
from pytest_kvbudget.report import labels
from pytest_kvbudget.report.marks import Mark, mark_of
from pytest_kvbudget.report.numbers import NOT_STATED, duration, whole_number, words
from pytest_kvbudget.report.searched import knob_of, side_of, track_of
from pytest_kvbudget.search.knobs import Side
from pytest_kvbudget.search.model import Axis
from pytest_kvbudget.verdict import Verdict

CONFIRMATION: Final = "confirmation"
BESIDE: Final = "beside the proof"
CALLED_OFF: Final = "called off"


class Bracket(NamedTuple):
    """What was known before a boot: the boundary lies from ``low`` to ``high``, both from the axis."""

    low: int
    high: int


class Boot(NamedTuple):
    """One boot of a ladder or a sweep."""

    number: int
    """From 1, in boot order."""
    value: int | None
    """Its rung, or its value of the knob; ``None`` where the record does not say."""
    record: AttemptRecord
    mark: Mark
    side: Side | None
    """Which way its failure pushes the knob of a sweep."""
    before: Bracket
    confirmation: bool
    """Booted after the proof, not part of it."""
    taken_over: str | None
    """Where the boot was taken over from: ``"run 20261005T…"``; ``None`` for boots of this search."""
    remarks: tuple[str, ...]
    """What else its row says: confirmation, cache warm or cold, devices, where it was taken over from."""


def boots(record: AnyFinding, attempts: Sequence[AttemptRecord]) -> list[Boot]:
    """The attempts in boot order, each with what was still possible before it."""
    track, several = track_of(record), bool(set_words(attempts))
    reasons = record.why if len(record.why) == len(attempts) else ("",) * len(attempts)
    low, high = track.low, track.high
    made: list[Boot] = []
    own = 0
    for number, (attempt, asked) in enumerate(zip(attempts, reasons, strict=True), 1):
        value = _value(attempt, track.name)
        side = side_of(record, attempt.cause)
        origin = _taken_over_from(record, attempt)
        own += origin is None
        # a record from before reasons were kept: what is beyond the boots of the proof confirms it
        confirmation = asked == "confirm" if asked else origin is None and own > record.finding.boots
        remarks = (
            CONFIRMATION if confirmation else "",
            BESIDE if asked == "verify" else "",
            {True: "warm", False: "cold", None: ""}[attempt.warm],
            _devices(attempt) if attempt.device_set is not None and several else "",
            f"taken over from {origin}" if origin else "",
        )
        made.append(
            Boot(
                number, value, attempt, mark_of(attempt.verdict, attempt.cause, side), side, Bracket(low, high),
                confirmation, origin, tuple(filter(None, remarks)),
            )
        )  # fmt: skip
        ended = None if value is None else _ended(record, attempt, side)
        if value is None or ended is None:
            continue
        if ended == (track.goal == "most"):
            high = min(high, value)
        else:
            low = max(low, value)
    return made


def set_words(attempts: Sequence[AttemptRecord]) -> list[str]:
    """The device sets with their labels, where boots ran on sets of different labels; else none.

    ``"devices 0, 1: 2 x (34208743424 B, 32608 MiB free when idle)"``
    """
    sets = {(_devices(attempt), attempt.device_set) for attempt in attempts if attempt.device_set is not None}
    several = len({label for _, label in sets}) > 1
    return [f"{devices}: {label}" for devices, label in sorted(sets)] if several else []


def _devices(attempt: AttemptRecord) -> str:
    return f"devices {', '.join(attempt.target.devices) or NOT_STATED}"


def _ended(record: AnyFinding, attempt: AttemptRecord, side: Side | None) -> bool | None:
    """Whether a boot failed for what ends the way to the goal; ``None`` where it says nothing about that."""
    if attempt.verdict in {Verdict.PASS, Verdict.MARGINAL}:
        return False
    if attempt.verdict is not Verdict.FAIL:
        return None
    if not isinstance(record, SweepRecord):
        return True
    return None if side is None else side == knob_of(record).ends_at


def _taken_over_from(record: AnyFinding, attempt: AttemptRecord) -> str | None:
    if attempt.run.run != record.run.run:
        return f"run {attempt.run.run}"
    # a ladder that is stacked on another takes over what that one booted in the same run
    return "an earlier ladder" if record.finding.reused and attempt.started < record.started else None


def rung_value(record: AttemptRecord, axis: Axis) -> int | None:
    """The rung that an attempt stood on, in the axis' whole numbers; ``None`` where its record does not say."""
    return _value(record, axis.name)


def _value(record: AttemptRecord, name: str) -> int | None:
    """What the label says, else that field of the shape: a knob may be no field at all."""
    value = labels.value_of(record.rung, name)
    if value is not None:
        return value
    field = getattr(record.shape, name, None)
    return whole_number(name, field) if isinstance(field, (int, float)) else None


def pool_bytes(record: AnyFinding, attempts: Sequence[AttemptRecord]) -> int | None:
    """The pinned pool per rank with which the winner of a scaled ladder passed; else ``None``."""
    if not isinstance(record, FindingRecord) or record.pool != "scaled" or record.finding.value is None:
        return None
    passed = [
        attempt.shape.kv_cache_memory_bytes
        for attempt in attempts
        if rung_value(attempt, record.finding.axis) == record.finding.value
        and attempt.verdict in {Verdict.PASS, Verdict.MARGINAL}
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
    if CALLED_OFF in record.message:
        return CALLED_OFF
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
