"""A ladder's proof in plain words."""

from __future__ import annotations

from typing import Final

from pytest_kvbudget.report.numbers import amount, plain_amount, plural, words
from pytest_kvbudget.search.model import Finding
from pytest_kvbudget.verdict import FindingKind


def proof(finding: Finding, *, simulated: bool) -> str:
    """What was shown and what follows from it, as one paragraph."""
    note = "All of it on a simulated device: this is no statement about hardware." if simulated else ""
    return " ".join(filter(None, (_claim(finding), _effort(finding), note)))


def _claim(finding: Finding) -> str:
    axis = finding.axis
    passed = "" if finding.value is None else amount(axis.name, finding.value)
    failed = "" if finding.failed_at is None else amount(axis.name, finding.failed_at)
    step = plain_amount(axis.name, axis.quantum)
    match finding.kind:
        case FindingKind.PROVEN:
            return (
                f"An engine booted at {passed} and passed. At {failed}, the next rung of this ladder, "
                f"it {_how(finding)}. The ladder has no rung between the two (steps of {step}), so {passed} is the "
                "largest rung that passes. Both halves were booted; neither was calculated."
            )
        case FindingKind.CEILING_REACHED:
            return (
                f"An engine booted at {passed} and passed, and the ladder ends there: nothing larger was asked for. "
                "This shows that the ceiling fits, not that more would fail."
            )
        case FindingKind.FLOOR_REACHED:
            return f"An engine booted at {passed} and passed, and there is no smaller value to try."
        case FindingKind.EMPTY:
            where = failed or amount(axis.name, axis.floor)
            return (
                f"Nothing on this ladder passes: its lowest rung, {where}, was booted and {_how(finding)}. The rungs "
                "above it ask for more."
            )
        case FindingKind.UNDECIDED:
            so_far = f"The largest rung that passed is {passed}. " if passed else "No rung passed. "
            above = f"The smallest that failed is {failed}. " if failed else ""
            rest = "What lies between them was not decided; no verdict is not a failure."
            return f"The proof is incomplete. {so_far}{above}{rest}"
        case kind:
            return _WITHOUT_NUMBERS[kind]


_WITHOUT_NUMBERS: Final = {
    FindingKind.NON_MONOTONE: (
        "A rung failed below one that passed. Memory need is expected to grow along the axis; here it did not, so "
        "there is no single boundary to report, and the search did not bisect through it."
    ),
    FindingKind.FLAKY: (
        "The same rungs passed and failed when they were booted again: the boundary is a band, not a value, and no "
        "single rung can be called the largest that passes."
    ),
    FindingKind.EMPTY_WINDOW: (
        "Two neighbouring values failed for opposite reasons: with less there is too little room to allocate, with "
        "more too little KV cache is left. No value between them exists on this grid."
    ),
    FindingKind.ERROR: (
        "A boot failed for another reason than memory, so the search stopped: such a failure says nothing about "
        "where the boundary is."
    ),
}


def _how(finding: Finding) -> str:
    cause = finding.bounded_by
    if cause is None:
        return "failed"
    if cause.by_gate:
        return f"was refused by the test body, which is not a statement about memory ({cause.sentence.rstrip('.')})"
    return f"failed for memory in {words(cause.phase)} ({cause.sentence.rstrip('.')})"


def _effort(finding: Finding) -> str:
    parts = [f"This took {plural(finding.boots, 'boot')}"]
    if finding.retries:
        parts.append(f"of which {finding.retries:,} repeated a boot without verdict")
    if finding.confirmations:
        parts.append(f"followed by {plural(finding.confirmations, 'confirming boot')} of the largest rung that passed")
    return f"{', '.join(parts)}."
