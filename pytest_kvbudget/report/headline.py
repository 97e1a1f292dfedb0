"""A finding's headline: its kind as people say it, and its sentence without what is shown as a note of its own."""

from __future__ import annotations

from pytest_kvbudget.report import marks
from pytest_kvbudget.report.marks import Mark
from pytest_kvbudget.search.model import Finding, SweepFinding
from pytest_kvbudget.verdict import FindingKind

_KIND_MARK = {
    FindingKind.PROVEN: marks.PASS,
    FindingKind.CEILING_REACHED: marks.PASS,
    FindingKind.FLOOR_REACHED: marks.PASS,
    FindingKind.EMPTY: marks.FAIL,
    FindingKind.EMPTY_WINDOW: marks.FAIL,
    FindingKind.NON_MONOTONE: marks.UNKNOWN,
    FindingKind.FLAKY: marks.UNKNOWN,
    FindingKind.UNDECIDED: marks.UNKNOWN,
    FindingKind.ERROR: marks.ERROR,
}
_KIND_WORD = {
    FindingKind.PROVEN: "Proven",
    FindingKind.CEILING_REACHED: "Proven up to the ceiling",
    FindingKind.FLOOR_REACHED: "Proven down to the floor",
    FindingKind.EMPTY: "Nothing passes",
    FindingKind.EMPTY_WINDOW: "Nothing passes",
    FindingKind.NON_MONOTONE: "No single boundary",
    FindingKind.FLAKY: "Flaky",
    FindingKind.UNDECIDED: "Not decided",
    FindingKind.ERROR: "Stopped by an error",
}


def kind_word(finding: Finding | SweepFinding) -> str:
    """The kind of a finding as a headline says it."""
    return _KIND_WORD[finding.kind]


def kind_mark(finding: Finding | SweepFinding) -> Mark:
    """The mark of a finding; where the test body refused everything, that is not memory."""
    by_gate = finding.bounded_by is not None and finding.bounded_by.by_gate
    return marks.GATE if finding.kind is FindingKind.EMPTY and by_gate else _KIND_MARK[finding.kind]


def headline(finding: Finding | SweepFinding) -> str:
    """The sentence without its notes, which are shown one by one."""
    return finding.sentence.removesuffix("".join(f"; {note}" for note in finding.notes))
