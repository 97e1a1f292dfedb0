"""What a headroom sweep proved, in plain words: two edges at which boots fail for opposite reasons.

The classes of failure and what each asks for are those of the Neuron document, sections 3 and 5.
"""

from __future__ import annotations

from pytest_kvbudget.ledger.model import Cause
from pytest_kvbudget.records import SweepRecord
from pytest_kvbudget.report.numbers import words
from pytest_kvbudget.report.searched import SIDE_WORDS, fails_near, knob_of, track_of
from pytest_kvbudget.search.knobs import Knob, Side
from pytest_kvbudget.verdict import FindingKind


def claim(record: SweepRecord) -> str:
    """What was shown and what follows from it."""
    found = record.finding
    passed, failed, short = (_shown(record, value) for value in (found.value, found.failed_at, found.short_at))
    match found.kind:
        case FindingKind.PROVEN:
            said = (
                f"An engine booted at {passed} and passed. At {failed}, one step {_towards(record)}, "
                f"it {_near(record)}. In steps of {_shown(record, found.step)} no value lies between the two, so "
                f"{passed} is the {track_of(record).best} that passes. Both were booted; neither was calculated. "
                f"{_far_edge(record)}"
            )
        case FindingKind.FLOOR_REACHED | FindingKind.CEILING_REACHED:
            said = (
                f"An engine booted at {passed} and passed, and the sweep ends there: nothing {_better(record)} was "
                f"asked for. This shows that {passed} passes, not that a {_better(record)} value would fail. "
                f"{_far_edge(record)}"
            )
        case FindingKind.EMPTY:
            end, how = (failed, _near(record)) if found.failed_at is not None else (short, _far(record))
            said = (
                f"Nothing passes: {end}, the value of the sweep with most room on that side, was booted and {how}. "
                f"Every other value leaves less."
            )
        case FindingKind.EMPTY_WINDOW:
            said = (
                f"{failed} {_near(record)}; {short}, one step further, {_far(record)}. "
                f"Each failure asks for the value that the other one refused, both were "
                f"booted, and in steps of {_shown(record, found.step)} nothing lies between them: no value of "
                f"{found.knob} passes on this grid. A finer step may still find one; more room comes only from "
                "something else."
            )
        case FindingKind.NON_MONOTONE:
            said = (
                "Boots contradict one another: a value failed although one with less room on that side passed. There "
                "is no single window to report, and the search did not bisect through it."
            )
        case FindingKind.FLAKY:
            said = (
                "The same values passed and failed when they were booted again: the edge is a band, not a value, and "
                f"no single one can be called the {track_of(record).best} that passes."
            )
        case FindingKind.UNDECIDED:
            said = f"The proof is incomplete. {_so_far(record)} No verdict is not a failure."
        case FindingKind.ERROR:
            said = (
                "A boot failed for another reason than memory, so the sweep stopped: such a failure says nothing "
                f"about where the edge is. {_so_far(record)}"
            )
    return said.rstrip()


def opposite_turns(record: SweepRecord) -> str:
    """What each class of failure asks for, in one sentence."""
    knob = knob_of(record)
    near, far = knob.ends_at, knob.other_side
    return (
        f"A failure {SIDE_WORDS[near]} asks to {_turn(knob, near)} {knob.name}, one {SIDE_WORDS[far]} asks for the "
        f"opposite, to {_turn(knob, far)} it."
    )


def _turn(knob: Knob, side: Side) -> str:
    """Away from the goal cures what ends the way to it."""
    return "raise" if (side == knob.ends_at) == (knob.goal == "least") else "lower"


def _better(record: SweepRecord) -> str:
    return "smaller" if track_of(record).goal == "least" else "larger"


def _towards(record: SweepRecord) -> str:
    return "down" if track_of(record).goal == "least" else "up"


def _near(record: SweepRecord) -> str:
    return _failed(knob_of(record).ends_at, record.finding.bounded_by)


def _far(record: SweepRecord) -> str:
    return _failed(knob_of(record).other_side, record.finding.short_by)


def _failed(side: Side, cause: Cause | None) -> str:
    if cause is None:
        return f"failed {SIDE_WORDS[side]}"
    return f"failed {SIDE_WORDS[side]} in {words(cause.phase)} ({cause.sentence.rstrip('.')})"


def _far_edge(record: SweepRecord) -> str:
    far = SIDE_WORDS[knob_of(record).other_side]
    if record.finding.short_at is None:
        return f"No boot failed {far}: where that edge lies was not asked."
    return f"The other edge was seen too: {_shown(record, record.finding.short_at)} {_far(record)}."


def _so_far(record: SweepRecord) -> str:
    found, knob = record.finding, knob_of(record)
    said = "No value passed." if found.value is None else f"{_shown(record, found.value)} passed."
    if found.failed_at is not None:
        said += f" {_shown(record, found.failed_at)} {fails_near(record, 'failed')}."
    if found.short_at is not None:
        said += f" {_shown(record, found.short_at)} failed {SIDE_WORDS[knob.other_side]}."
    return f"{said} {_undecided(record)}"


def _undecided(record: SweepRecord) -> str:
    """Where the edge may still be, with both ends, one or none booted."""
    found = record.finding
    if found.failed_at is not None and (found.value is not None or found.short_at is not None):
        return "What lies between was not decided."
    onward, back = ("below", "above") if track_of(record).goal == "least" else ("above", "below")
    if found.failed_at is not None:
        return f"What lies {back} it was not decided."
    reached = found.short_at if found.value is None else found.value
    if reached is None:
        return "Nothing was decided."
    return f"What lies {onward} {_shown(record, reached)} was not decided."


def _shown(record: SweepRecord, value: int | None) -> str:
    return "nothing" if value is None else track_of(record).show(value)
