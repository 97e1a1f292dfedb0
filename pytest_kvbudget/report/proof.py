"""What a search proved, in plain words."""

from __future__ import annotations

from typing import Final

from pytest_kvbudget.archive import AnyFinding
from pytest_kvbudget.records import FindingRecord, SweepRecord
from pytest_kvbudget.report import sweep_proof
from pytest_kvbudget.report.numbers import plural, words
from pytest_kvbudget.report.searched import Track, track_of
from pytest_kvbudget.search.model import Finding
from pytest_kvbudget.verdict import FindingKind


def proof(record: AnyFinding) -> str:
    """What was shown and what follows from it, as one paragraph."""
    simulated = record.target.simulated
    note = "All of it on a simulated device: this is no statement about hardware." if simulated else ""
    claim = sweep_proof.claim(record) if isinstance(record, SweepRecord) else _claim(record)
    return " ".join(filter(None, (claim, _effort(record), note)))


def _claim(record: FindingRecord) -> str:
    finding, track = record.finding, track_of(record)
    passed = "" if finding.value is None else track.named(finding.value)
    failed = "" if finding.failed_at is None else track.named(finding.failed_at)
    step = track.show(track.step)
    match finding.kind:
        case FindingKind.PROVEN:
            return (
                f"An engine booted at {passed} and passed. At {failed}, the next rung of this ladder, "
                f"it {_how(finding)}. In steps of {step} there is no rung between the two, so {passed} is the "
                "largest rung that passes. Both halves were booted; neither was calculated."
            )
        case FindingKind.CEILING_REACHED:
            return (
                f"An engine booted at {passed} and passed, and the ladder ends there: nothing larger was asked for. "
                "This shows that the ceiling fits, not that more would fail."
            )
        case FindingKind.EMPTY:
            return _nothing(finding, failed or track.named(track.low))
        case FindingKind.FLAKY:
            return f"{_WITHOUT_NUMBERS[FindingKind.FLAKY]} {_band(finding, track)}"
        case FindingKind.UNDECIDED:
            so_far = f"The largest rung that passed is {passed}. " if passed else "No rung passed. "
            above = f"The smallest that failed is {failed}. " if failed else ""
            open_end = _undecided(passed, failed, at_low=finding.failed_at == track.low)
            return f"The proof is incomplete. {so_far}{above}{open_end}; no verdict is not a failure."
        case kind:
            return _WITHOUT_NUMBERS[kind]


_WITHOUT_NUMBERS: Final = {
    FindingKind.FLOOR_REACHED: "An engine booted at the lowest rung and passed, and there is no smaller value to try.",
    FindingKind.NON_MONOTONE: (
        "A rung failed below one that passed. Memory need is expected to grow along the axis; here it did not, so "
        "there is no single boundary to report, and the search did not bisect through it."
    ),
    FindingKind.FLAKY: (
        "The same rungs passed and failed when they were booted again: the boundary is a band, not a value, and no "
        "single rung can be called the largest that passes."
    ),
    FindingKind.EMPTY_WINDOW: (
        "Two neighbouring rungs failed for opposite reasons: the lower one for want of more, the upper one because it "
        "takes too much. There is no rung between the two on this ladder."
    ),
    FindingKind.ERROR: (
        "A boot failed for another reason than memory, so the search stopped: such a failure says nothing about "
        "where the boundary is."
    ),
}


def _undecided(passed: str, failed: str, *, at_low: bool) -> str:
    """Where the boundary may still be, with both ends, one or none booted; the lowest rung has nothing below it."""
    if not passed and not failed:
        return "Nothing was decided"
    where = "between them" if passed and failed else "above it" if passed or at_low else "below it"
    return f"What lies {where} was not decided"


def _nothing(finding: Finding, where: str) -> str:
    if finding.failed_at == finding.axis.ceiling != finding.axis.floor:
        return (
            f"Nothing on this ladder passes: even its highest rung, {where}, was booted and {_how(finding)}. The rungs "
            "below it give less."
        )
    return (
        f"Nothing on this ladder passes: its lowest rung, {where}, was booted and {_how(finding)}. A larger value "
        "is expected to take more memory, not less."
    )


def _band(finding: Finding, track: Track) -> str:
    steady, refused = finding.steady_value, finding.refused_at
    below = "No rung passed three of three boots" if steady is None else f"{track.named(steady)} passed three of three"
    above = "no rung failed two of two" if refused is None else f"{track.named(refused)} failed two of two"
    return f"{below}, and {above}: what lies between is luck."


def _how(finding: Finding) -> str:
    cause = finding.bounded_by
    if cause is None:
        return "failed"
    if cause.by_gate:
        return f"was refused by the test body, which is not a statement about memory ({cause.sentence.rstrip('.')})"
    return f"failed for memory in {words(cause.phase)} ({cause.sentence.rstrip('.')})"


def _effort(record: AnyFinding) -> str:
    found = record.finding
    parts = [f"This took {plural(found.boots, 'boot')}"]
    again = []
    if found.retries:
        again.append(f"{found.retries:,} repeated a boot without verdict")
    if found.repeats:
        again.append(f"{found.repeats:,} repeated one with a verdict, to see whether it stands")
    if again:
        parts.append(f"of which {' and '.join(again)}")
    if isinstance(found, Finding) and found.neighbours:
        parts.append(f"and {plural(found.neighbours, 'boot')} beside the proof")
    if found.reused:
        parts.append(f"beside {plural(found.reused, 'finished boot')} taken over")
    parts += [
        f"beside {plural(count, 'boot')} that {'was' if count == 1 else 'were'} {ended}"
        for ended in ("called off", "interrupted")
        if (count := record.why.count(ended))
    ]
    if found.confirmations:
        winner = "rung" if not isinstance(record, SweepRecord) else "value"
        best = track_of(record).best
        parts.append(f"followed by {plural(found.confirmations, 'confirming boot')} of the {best} {winner} that passed")
    return f"{', '.join(parts)}."
