"""The item that decides for a ladder: its report is the test's."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_kvbudget.archive import read_finding
from pytest_kvbudget.plugin.items import COUNTS_AS_PASSED
from pytest_kvbudget.plugin.outcomes import add_links, target_properties
from pytest_kvbudget.plugin.phases import LadderFailed
from pytest_kvbudget.plugin.rows import ATTRIBUTE
from pytest_kvbudget.plugin.session import KvSession
from pytest_kvbudget.plugin.wording import attempt_text
from pytest_kvbudget.records import AttemptRecord
from pytest_kvbudget.report.history import rung_value
from pytest_kvbudget.report.text import finding_lines
from pytest_kvbudget.search.model import Finding

ALONE = "it proves nothing about other rungs"


@dataclass(frozen=True)
class Rung:
    """One boot of a ladder, and what the test's body left of it."""

    label: str
    record: AttemptRecord
    path: Path
    trace: str = ""
    """Traceback of the body that refused it, or failed."""
    sections: tuple[tuple[str, str], ...] = ()
    """Captured output."""

    @property
    def passed(self) -> bool:
        """It counts as passed."""
        return self.record.verdict in COUNTS_AS_PASSED


@dataclass
class Ladder:
    """What came of a ladder so far."""

    rungs: list[Rung] = field(default_factory=list)
    """Every boot, in order."""
    finding: Finding | None = None
    finding_path: Path | None = None
    page: Path | None = None
    only: tuple[str, int] | None = None
    """Axis and value where one rung was asked for."""
    skipped: str | None = None
    """Why the test body skipped the test."""
    xfailed: str | None = None
    """Why the test body expects the test to fail."""
    broken: str | None = None
    """Why there was no boot to judge."""
    left: list[str] = field(default_factory=list)
    """Where the winner serves and how to end it."""

    @property
    def goes_on(self) -> bool:
        """Nothing ended it before the search did."""
        return self.skipped is None and self.xfailed is None and self.broken is None

    @property
    def deciding(self) -> Rung | None:
        """The boot that stands for the finding: the last one that did not pass, else the last."""
        return next((rung for rung in reversed(self.rungs) if not rung.passed), self.rungs[-1] if self.rungs else None)

    @property
    def telling(self) -> list[Rung]:
        """The boots whose captured output the test's report shows: both halves of the proof, or the deciding boot."""
        finding = self.finding
        if finding is None or not finding.proven:
            return [] if self.deciding is None else [self.deciding]
        halves = {rung_value(rung.record, finding.axis): rung for rung in self.rungs}
        return [halves[value] for value in (finding.value, finding.failed_at) if value in halves]


class FindingItem(pytest.Item):
    """Stands for the ladder's test when it is reported: its id, its marks, its place."""

    def __init__(self, *, origin: pytest.Function, **arguments: Any) -> None:  # noqa: ANN401 - pytest's own
        super().__init__(**arguments)
        self._origin = origin
        self._ladder: Ladder | None = None
        self.own_markers = list(origin.own_markers)
        self.keywords.update(origin.keywords)
        self.user_properties = list(origin.user_properties)

    def tell(self, ladder: Ladder) -> None:
        """Take what the ladder established."""
        self._ladder = ladder
        finding = ladder.finding
        if finding is not None:
            value = "none" if finding.value is None else int(finding.value)
            self.user_properties += [
                ("kvbudget.finding", str(finding.kind)),
                ("kvbudget.value", value),
                ("kvbudget.boots", int(finding.boots)),
                ("kvbudget.sentence", finding.sentence),
                ("kvbudget.record", str(ladder.finding_path)),
                *target_properties(ladder.rungs[-1].record.target),
            ]

    def runtest(self) -> None:
        """Fail where the ladder did not establish a passing rung with its proof."""
        ladder = self._ladder
        if ladder is None:
            raise LadderFailed("the ladder was not run")
        if ladder.skipped is not None:
            pytest.skip(ladder.skipped)
        if ladder.xfailed is not None:
            pytest.xfail(ladder.xfailed)
        if ladder.broken is not None:
            raise LadderFailed(ladder.broken)
        rung = ladder.deciding
        if rung is None:
            raise LadderFailed("stopped before the first boot")
        if ladder.only is not None:
            if not rung.passed:
                raise LadderFailed("\n".join([_alone(ladder.only, rung), *_boot_lines(rung)]))
            return
        if ladder.finding is None or not ladder.finding.proven or ladder.finding.value is None:
            raise LadderFailed(_explain(ladder, rung))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:  # noqa: ANN401 - pytest's own
        """The finding in words; no traceback of ours."""
        if isinstance(excinfo.value, LadderFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        """Where the test is defined."""
        return self._origin.reportinfo()

    def summary(self) -> list[str]:
        """What the end of the session says about this ladder; nothing where there is no boot to speak of."""
        ladder = self._ladder
        if ladder is None or not ladder.rungs:
            return []
        if ladder.only is not None:
            rung = ladder.rungs[-1]
            return [f"{self.nodeid}:", _alone(ladder.only, rung), f"record: {rung.path}"]
        if ladder.finding is None or ladder.finding_path is None:
            return []
        record = read_finding(ladder.finding_path)
        lines = [f"{self.nodeid}:", *finding_lines(record, [rung.record for rung in ladder.rungs])]
        lines.append(f"record: {ladder.finding_path}")
        if ladder.page is not None:
            lines.append(f"page:   {ladder.page}")
        lines.append(f"one rung again: pytest {shlex.quote(self.nodeid)} --kvbudget-rung VALUE")
        return lines + ladder.left

    def attach(self, report: pytest.TestReport, session: KvSession) -> None:
        """Give the test's report what the summary and pytest-html show."""
        ladder = self._ladder
        if ladder is None:
            return
        if ladder.skipped is not None and isinstance(report.longrepr, tuple):
            path, line, _ = self.location
            report.longrepr = (path, (line or 0) + 1, f"Skipped: {ladder.skipped}")
        for rung in ladder.telling:
            report.sections += [(f"{name} of {rung.label}", text) for name, text in rung.sections]
        lines = self.summary()
        if not lines:
            return
        rung = ladder.rungs[-1]
        verdict = str(rung.record.verdict if ladder.finding is None else ladder.finding.kind).upper()
        setattr(report, ATTRIBUTE, session.mark("finding", verdict, summary=lines))
        files = {"record": ladder.finding_path, "page": ladder.page}
        if ladder.only is not None:
            files = {"record": rung.path, "page": rung.path.with_name("rung.html")}
        add_links(report, self.config, files)


def _alone(only: tuple[str, int], rung: Rung) -> str:
    axis, value = only
    return f"rung {axis}={value}: {rung.record.verdict}; {ALONE}"


def _explain(ladder: Ladder, rung: Rung) -> str:
    finding = ladder.finding
    lines = []
    if finding is not None:
        low = "nothing passed" if finding.value is None else f"{finding.value:,} passed"
        nothing = "nothing failed" if finding.value is None else "nothing above it failed"
        high = nothing if finding.failed_at is None else f"{finding.failed_at:,} failed"
        lines += [finding.sentence, f"bracket on {finding.axis.name}: {low}, {high}"]
    lines += [f"finding: {ladder.finding_path}", "the deciding boot:", *_boot_lines(rung)]
    return "\n".join(lines)


def _boot_lines(rung: Rung) -> list[str]:
    """A boot for people, and the traceback of the body where that decided."""
    lines = attempt_text(rung.record, rung.path).splitlines()
    if rung.trace:
        lines += ["the test's own code:", *rung.trace.splitlines()]
    return lines
