"""The item that decides for a ladder: its report is the test's."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_kvbudget.archive import read_finding
from pytest_kvbudget.plugin.items import COUNTS_AS_PASSED
from pytest_kvbudget.plugin.outcomes import add_links
from pytest_kvbudget.plugin.rows import ATTRIBUTE
from pytest_kvbudget.plugin.wording import attempt_text
from pytest_kvbudget.records import AttemptRecord
from pytest_kvbudget.report.text import finding_lines
from pytest_kvbudget.search.model import Finding


@dataclass
class Ladder:
    """What came of a ladder so far."""

    finding: Finding | None = None
    finding_path: Path | None = None
    page: Path | None = None
    attempts: list[AttemptRecord] = field(default_factory=list)
    last_record: AttemptRecord | None = None
    last_path: Path | None = None
    only: tuple[str, int] | None = None
    """Axis and value where one rung was asked for."""
    skipped: str | None = None
    """Why the test body skipped the test."""
    broken: str | None = None
    """Why there was no boot to judge."""
    left: list[str] = field(default_factory=list)
    """Where the winner serves and how to end it."""

    @property
    def goes_on(self) -> bool:
        """Nothing ended it before the search did."""
        return self.skipped is None and self.broken is None


class LadderFailed(Exception):  # noqa: N818 - what a report names
    """The ladder did not establish what its test asks for; the text is for people."""


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
            ]

    def runtest(self) -> None:
        """Fail where the ladder did not establish a passing rung with its proof."""
        ladder = self._ladder
        if ladder is None:
            raise LadderFailed("the ladder was not run")
        if ladder.skipped is not None:
            pytest.skip(ladder.skipped)
        if ladder.broken is not None:
            raise LadderFailed(ladder.broken)
        if ladder.last_record is None or ladder.last_path is None:
            raise LadderFailed("stopped before the first boot")
        if ladder.only is not None:
            if ladder.last_record.verdict not in COUNTS_AS_PASSED:
                axis, value = ladder.only
                text = attempt_text(ladder.last_record, ladder.last_path)
                raise LadderFailed(f"rung {axis}={value}: {ladder.last_record.verdict}\n{text}")
            return
        if ladder.finding is None or not ladder.finding.proven or ladder.finding.value is None:
            raise LadderFailed(self._explain(ladder))

    def _explain(self, ladder: Ladder) -> str:
        finding = ladder.finding
        lines = []
        if finding is not None:
            low = "nothing passed" if finding.value is None else f"{finding.value:,} passed"
            high = "nothing above it failed" if finding.failed_at is None else f"{finding.failed_at:,} failed"
            lines += [finding.sentence, f"bracket on {finding.axis.name}: {low}, {high}"]
        lines.append(f"finding: {ladder.finding_path}")
        if ladder.last_record is not None and ladder.last_path is not None:
            lines += ["the deciding boot:", attempt_text(ladder.last_record, ladder.last_path)]
        return "\n".join(lines)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:  # noqa: ANN401 - pytest's own
        """The finding in words; no traceback of ours."""
        if isinstance(excinfo.value, LadderFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        """Where the test is defined."""
        return self._origin.reportinfo()

    def attach(self, report: pytest.TestReport) -> None:
        """Give the test's report what the summary and pytest-html show."""
        ladder = self._ladder
        if ladder is None:
            return
        if ladder.skipped is not None and isinstance(report.longrepr, tuple):
            path, line, _ = self.location
            report.longrepr = (path, (line or 0) + 1, f"Skipped: {ladder.skipped}")
        if ladder.finding is None or ladder.finding_path is None:
            return
        lines = [f"{self.nodeid}:", *finding_lines(read_finding(ladder.finding_path), ladder.attempts)]
        lines.append(f"record: {ladder.finding_path}")
        if ladder.page is not None:
            lines.append(f"page:   {ladder.page}")
        lines += ladder.left
        mark = {"kind": "finding", "verdict": str(ladder.finding.kind), "summary": lines}
        setattr(report, ATTRIBUTE, mark)
        add_links(report, self.config, {"record": ladder.finding_path, "page": ladder.page})
