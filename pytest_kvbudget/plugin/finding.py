"""The item that decides for a ladder: its report is the test's."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_kvbudget.archive import read_finding
from pytest_kvbudget.attempt import Attempt
from pytest_kvbudget.plugin.items import COUNTS_AS_PASSED
from pytest_kvbudget.plugin.outcomes import PREFIX, add_links, target_properties
from pytest_kvbudget.plugin.phases import LadderFailed
from pytest_kvbudget.plugin.rows import ATTRIBUTE
from pytest_kvbudget.plugin.session import KvSession
from pytest_kvbudget.plugin.wording import attempt_text
from pytest_kvbudget.records import AttemptRecord
from pytest_kvbudget.report.headline import kind_word
from pytest_kvbudget.report.text import finding_lines
from pytest_kvbudget.search.knobs import KNOBS
from pytest_kvbudget.search.model import Finding, SweepFinding

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
    value: int | None = None
    """On the axis or knob, in its whole numbers."""
    reused: bool = False
    """An earlier boot that stands for the one that was wanted."""
    called_off: bool = False
    """Other boots answered before it had a verdict."""

    @property
    def passed(self) -> bool:
        """It counts as passed."""
        return self.record.verdict in COUNTS_AS_PASSED


@dataclass
class Part:
    """What came of one ladder or sweep so far."""

    rungs: list[Rung] = field(default_factory=list)
    """Every boot, in order, those that earlier ones stand for among them."""
    attempts: list[Attempt] = field(default_factory=list)
    """The boots that were made."""
    finding: Finding | SweepFinding | None = None
    finding_path: Path | None = None
    page: Path | None = None
    only: tuple[str, str] | None = None
    """Axis and label where one rung was asked for."""
    skipped: str | None = None
    """Why the test body skipped the test."""
    xfailed: str | None = None
    """Why the test body expects the test to fail."""
    broken: str | None = None
    """Why there was no boot to judge."""
    not_resumed: str | None = None
    """Why earlier boots that were asked for do not count."""
    left: list[str] = field(default_factory=list)
    """Where the winner serves and how to end it."""

    @property
    def goes_on(self) -> bool:
        """Nothing ended it before the search did."""
        return self.skipped is None and self.xfailed is None and self.broken is None

    @property
    def proven(self) -> bool:
        """It found what it was asked for."""
        return self.finding is not None and self.finding.proven and self.finding.value is not None

    @property
    def deciding(self) -> Rung | None:
        """The boot that stands for the finding: the last one that did not pass, else the last."""
        wanted = [rung for rung in reversed(self.rungs) if not rung.called_off]
        return next((rung for rung in wanted if not rung.passed), wanted[0] if wanted else None)

    @property
    def telling(self) -> list[Rung]:
        """The boots whose captured output the test's report shows: both halves of the proof, or the deciding boot."""
        finding = self.finding
        if finding is None or not finding.proven:
            return [] if self.deciding is None else [self.deciding]
        halves = {rung.value: rung for rung in self.rungs}
        return [halves[value] for value in (finding.value, finding.failed_at) if value in halves]


class FindingItem(pytest.Item):
    """Stands for the ladder's test when it is reported: its id, its marks, its place."""

    def __init__(self, *, origin: pytest.Function, **arguments: Any) -> None:  # noqa: ANN401 - pytest's own
        super().__init__(**arguments)
        self._origin = origin
        self._parts: list[Part] = []
        self.own_markers = list(origin.own_markers)
        self.keywords.update(origin.keywords)
        self.user_properties = list(origin.user_properties)

    def tell(self, parts: list[Part]) -> None:
        """Take what was established, one part for each ladder that was begun."""
        self._parts = parts
        found = [(part, part.finding) for part in parts if part.finding is not None]
        if not found:
            return
        last, finding = found[-1]
        self.user_properties += [
            *_properties(PREFIX, last, finding),
            ("kvbudget.axis", _named(finding)[0]),
            *target_properties(last.rungs[-1].record.target),
        ]
        if len(found) > 1:
            for part, finding in found:
                self.user_properties += _properties(f"{PREFIX}{_named(finding)[0]}.", part, finding)

    def runtest(self) -> None:
        """Fail where a ladder or sweep did not establish what passes, with its proof."""
        if not self._parts:
            raise LadderFailed("the ladder was not run")
        for part in self._parts:
            _judge(part)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:  # noqa: ANN401 - pytest's own
        """The finding in words; no traceback of ours."""
        if isinstance(excinfo.value, LadderFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        """Where the test is defined."""
        return self._origin.reportinfo()

    def summary(self) -> list[str]:
        """What the end of the session says about this test; nothing where there is no boot to speak of."""
        lines: list[str] = []
        for part in self._parts:
            found = self._about(part)
            # one heading for all its ladders
            lines += found[1:] if lines else found
        return lines

    def _about(self, part: Part) -> list[str]:
        if not part.rungs:
            return []
        if part.only is not None:
            rung = part.rungs[-1]
            return [f"{self.nodeid}:", _alone(rung), f"record: {rung.path}"]
        if part.finding is None or part.finding_path is None:
            return []
        record = read_finding(part.finding_path)
        lines = [f"{self.nodeid}:", *finding_lines(record, [rung.record for rung in part.rungs])]
        if part.not_resumed is not None:
            lines.append(f"nothing was taken over: {part.not_resumed}")
        lines.append(f"record: {part.finding_path}")
        if part.page is not None:
            lines.append(f"page:   {part.page}")
        again = part.rungs[-1].label.partition("#")[0].rpartition("=")[0]
        lines.append(f"one rung again: pytest {shlex.quote(self.nodeid)} --kvbudget-rung {_placeholder(again)}")
        return lines + part.left

    def attach(self, report: pytest.TestReport, session: KvSession) -> None:
        """Give the test's report what the summary and pytest-html show."""
        skipped = next((part.skipped for part in self._parts if part.skipped is not None), None)
        if skipped is not None and isinstance(report.longrepr, tuple):
            path, line, _ = self.location
            report.longrepr = (path, (line or 0) + 1, f"Skipped: {skipped}")
        for part in self._parts:
            for rung in part.telling:
                report.sections += [(f"{name} of {rung.label}", text) for name, text in rung.sections]
        lines = self.summary()
        if not lines:
            return
        last = next(part for part in reversed(self._parts) if part.rungs)
        rung = last.rungs[-1]
        verdict = str(rung.record.verdict) if last.finding is None else kind_word(last.finding)
        setattr(report, ATTRIBUTE, session.mark("finding", verdict, summary=lines))
        for part in self._parts:
            files = {"record": part.finding_path, "page": part.page}
            if part.only is not None:
                files = {"record": rung.path, "page": rung.path.with_name("rung.html")}
            add_links(report, self.config, files)


def _properties(prefix: str, part: Part, finding: Finding | SweepFinding) -> list[tuple[str, object]]:
    """A finding as JUnit properties."""
    return [
        (f"{prefix}finding", str(finding.kind)),
        (f"{prefix}value", "none" if finding.value is None else setting_of(finding)),
        (f"{prefix}boots", int(finding.boots)),
        (f"{prefix}sentence", finding.sentence),
        (f"{prefix}record", str(part.finding_path)),
    ]


def _judge(part: Part) -> None:
    """Fail, skip or xfail where this part says so."""
    if part.skipped is not None:
        pytest.skip(part.skipped)
    if part.xfailed is not None:
        pytest.xfail(part.xfailed)
    if part.broken is not None:
        raise LadderFailed(part.broken)
    rung = part.deciding
    if rung is None:
        raise LadderFailed("stopped before the first boot" if part.finding is None else part.finding.sentence)
    if part.only is not None:
        if not rung.passed:
            raise LadderFailed("\n".join([_alone(rung), *_boot_lines(rung)]))
    elif not part.proven:
        raise LadderFailed(_explain(part, rung))


def setting_of(finding: Finding | SweepFinding) -> int | float:
    """The value that was found, as its field or variable takes it."""
    value = finding.value or 0
    return KNOBS[finding.knob].setting(value) if isinstance(finding, SweepFinding) else finding.axis.setting(value)


def _named(finding: Finding | SweepFinding) -> tuple[str, Callable[[int], str]]:
    if isinstance(finding, SweepFinding):
        return finding.knob, msgspec.structs.replace(KNOBS[finding.knob], unit_bytes=finding.unit_bytes).show
    return finding.axis.name, finding.axis.show


def _placeholder(names: str) -> str:
    return "VALUE" if "," not in names else shlex.quote(f"{names}=VALUE")


def _alone(rung: Rung) -> str:
    return f"rung {rung.label}: {rung.record.verdict}; {ALONE}"


def _explain(part: Part, rung: Rung) -> str:
    finding = part.finding
    lines = []
    if finding is not None:
        name, show = _named(finding)
        low = "nothing passed" if finding.value is None else f"{show(finding.value)} passed"
        nothing = "nothing failed" if finding.value is None else "nothing beyond it failed"
        high = nothing if finding.failed_at is None else f"{show(finding.failed_at)} failed"
        lines += [finding.sentence, f"bracket on {name}: {low}, {high}"]
    lines.append(f"finding: {part.finding_path}")
    if not rung.passed:
        lines += ["the deciding boot:", *_boot_lines(rung)]
    return "\n".join(lines)


def _boot_lines(rung: Rung) -> list[str]:
    """A boot for people, and the traceback of the body where that decided."""
    lines = attempt_text(rung.record, rung.path).splitlines()
    if rung.trace:
        lines += ["the test's own code:", *rung.trace.splitlines()]
    return lines
