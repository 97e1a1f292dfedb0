"""Rungs as rows: reports of their own that no count, no exit status and no -x takes for tests.

Also imported by the xdist controller of runs that do not use us: nothing heavy here.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Final

import pytest

ATTRIBUTE: Final = "kvbudget"
"""Attribute of reports that are ours, a dict of builtins: it crosses from xdist's workers to the controller."""

_MARKUP: Final = {"PASS": {"green": True}, "MARGINAL": {"yellow": True}, "FAIL": {"red": True}}
_OTHER_MARKUP: Final = {"yellow": True}


def mark_of(report: object) -> dict[str, Any] | None:
    """What a report of ours carries, ``None`` for any other report."""
    mark: dict[str, Any] | None = getattr(report, ATTRIBUTE, None)
    return mark


def row_id(nodeid: str, label: str) -> str:
    """A rung's id: ``test[axis=V]``, ``test[fp8-axis=V]``; terminal and JUnit read it as a parametrised test's."""
    return f"{nodeid[:-1]}-{label}]" if nodeid.endswith("]") else f"{nodeid}[{label}]"


def row_reports(
    phases: Sequence[pytest.TestReport],
    mark: Mapping[str, Any],
    *,
    properties: Sequence[tuple[str, object]],
    detail: str,
    sections: Sequence[tuple[str, str]],
    shown_id: bool,
) -> tuple[pytest.TestReport, pytest.TestReport]:
    """The two reports of a rung, from those of its phases.

    The first is the deciding phase's report, re-labelled so that what other plugins attached survives. It is never
    "failed". The second makes JUnit write the properties and pytest-html the row.

    Args:
        phases: reports of setup, call and teardown, as far as they ran.
        mark: the row's own data, builtins only; ``nodeid`` is the row's id, ``verdict`` its verdict.
        properties: JUnit properties, added to those of the test.
        detail: what the verdict rests on.
        sections: further sections of text: heading, content.
        shown_id: give the reports the row's id; a worker must keep the test's, the controller changes it.
    """
    last = phases[-1]
    row = next((report for report in phases if not report.passed), phases[min(1, len(phases) - 1)])
    path, line, _ = row.location
    verdict = mark["verdict"]
    passed = verdict in {"PASS", "MARGINAL"}
    text = f"{verdict}: {detail}"
    row.outcome = "passed" if passed else "skipped"
    row.longrepr = None if passed else (path, (line or 0) + 1, text)
    if hasattr(row, "wasxfail"):
        del row.wasxfail
    if verdict == "FAIL":
        row.wasxfail = text
    row.when = "call"
    row.duration = sum(report.duration for report in phases)
    row.start, row.stop = phases[0].start, last.stop
    row.sections = [*last.sections, *sections]
    row.user_properties = [*last.user_properties, *properties]
    row.location = (path, line, str(mark["nodeid"]).partition("::")[2].replace("::", "."))
    if shown_id:
        row.nodeid = str(mark["nodeid"])
    setattr(row, ATTRIBUTE, dict(mark))
    end = pytest.TestReport(
        nodeid=row.nodeid,
        location=row.location,
        keywords=row.keywords,
        outcome="passed",
        longrepr=None,
        when="teardown",
        sections=row.sections,
        user_properties=row.user_properties,
        start=row.stop,
        stop=row.stop,
    )
    setattr(end, ATTRIBUTE, dict(mark))
    return row, end


class Rows:
    """Shows rungs and findings where reports are shown: in the one process, or in xdist's controller."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._summaries: list[list[str]] = []
        self._warnings: dict[str, None] = {}
        self._header_shown = False

    def show_header(self, lines: Sequence[str]) -> list[str]:
        """The header's lines, the first time only."""
        if self._header_shown:
            return []
        self._header_shown = True
        return list(lines)

    def show(self, lines: list[str]) -> None:
        """Keep a block for the summary."""
        if lines:
            self._summaries.append(lines)

    def warn(self, lines: Iterable[str]) -> None:
        """Keep lines that close the summary, each once, however quiet pytest is."""
        self._warnings.update(dict.fromkeys(lines))

    @pytest.hookimpl(wrapper=True)
    def pytest_report_from_serializable(self) -> Generator[None, Any, Any]:
        """In the controller: give a row its id."""
        report = yield
        mark = mark_of(report)
        if mark is not None and "nodeid" in mark:
            report.nodeid = mark["nodeid"]
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Rows are in no category and move no progress: counts, percentage and colour stay those of tests."""
        mark = mark_of(report)
        return ("", "", "") if mark is not None and mark["kind"] == "rung" else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print a rung's line; keep a finding for the summary."""
        mark = mark_of(report)
        if mark is None:
            return
        terminal: pytest.TerminalReporter | None = self._config.pluginmanager.get_plugin("terminalreporter")
        self.warn(mark.get("warnings", ()))
        verbose = terminal is not None and terminal.verbosity > 0
        self.show(mark.get("summary", []))
        self.show(mark.get("details", []) if verbose else [])
        if terminal is None:
            return
        header = self.show_header(mark.get("header", ()))
        if header and terminal.verbosity >= 0:
            self._new_line(terminal)
            for line in header:
                terminal.write_line(line)
        if mark["kind"] == "rung" and report.when == "call":
            self._new_line(terminal)
            terminal.write_line(mark["line"], **_MARKUP.get(mark["verdict"], _OTHER_MARKUP))
        elif mark["kind"] == "finding" and report.when == "call" and terminal.showfspath:
            # The rungs' lines came between the file's name and this test's letter: name the file again.
            terminal.write_fspath_result(report.nodeid, "")

    def _new_line(self, terminal: pytest.TerminalReporter) -> None:
        """Leave the line of dots: under xdist it belongs to no file, and pytest's own newline does not see it."""
        terminal.ensure_newline()
        if self._config.get_terminal_writer().width_of_current_line:
            terminal.write_line("")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One block per finding, and what must not be missed."""
        if self._summaries:
            terminalreporter.section("kvbudget")
        for lines in self._summaries:
            for line in lines:
                terminalreporter.write_line(line)
        for line in self._warnings:
            terminalreporter.write_line(line, yellow=True, bold=True)
