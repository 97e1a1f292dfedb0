"""Ladders: one collected test, many rungs, one finding.

The collected item never runs. Each rung runs as a fresh item of the same kind, with fixtures of its own, and is
reported as a row. A finding item then decides: it alone counts for the exit status, -x, --lf and the totals.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import pytest

from pytest_kvbudget.attempt import Attempt, target_info
from pytest_kvbudget.climb import Climb, RungPlan, SpecError
from pytest_kvbudget.plugin.checks import ladder_of
from pytest_kvbudget.plugin.finding import FindingItem, Ladder
from pytest_kvbudget.plugin.items import COUNTS_AS_PASSED, RUNG, USE, RungContext, is_ladder
from pytest_kvbudget.plugin.outcomes import add_links, files_of, properties
from pytest_kvbudget.plugin.rows import row_id, row_reports
from pytest_kvbudget.plugin.session import KvSession
from pytest_kvbudget.plugin.survival import CHECKED
from pytest_kvbudget.plugin.timers import is_timeout
from pytest_kvbudget.plugin.wording import verdict_detail

When = Literal["setup", "call", "teardown"]


@dataclass(frozen=True)
class PhaseEnd:
    """How one phase of an item ended."""

    error: BaseException | None
    text: str
    """The exception in words, without a traceback."""
    report: pytest.TestReport


class Ladders:
    """Runs ladders instead of pytest's own protocol."""

    def __init__(self, session: KvSession) -> None:
        self._session = session

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run a ladder; every other item is pytest's."""
        self._session.current = item
        if not isinstance(item, pytest.Function) or not is_ladder(item) or item.config.option.setuponly:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        LadderRun(self._session, item).run(nextitem)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


class LadderRun:
    """One ladder, from its first rung to its finding's report."""

    def __init__(self, session: KvSession, item: pytest.Function) -> None:
        self._session, self._item = session, item
        self._ladder = Ladder()
        self._attempts: list[Attempt] = []
        parent = item.parent
        if parent is None:
            raise RuntimeError(f"{item.nodeid} has no parent")
        self._final: FindingItem = FindingItem.from_parent(parent, name=item.name, nodeid=item.nodeid, origin=item)

    def run(self, nextitem: pytest.Item | None) -> None:
        """Climb, then report what was found."""
        final = self._final
        # Skip marks, xfail(run=False) and a module that cannot be set up are settled before anything boots.
        setup = self._phase(final, "setup")
        if not setup.report.passed:
            self._log(setup)
            self._log(self._phase(final, "teardown", nextitem=self._next(nextitem)))
            return
        self._phase(final, "teardown", nextitem=self._item)
        self._climb()
        final.tell(self._ladder)
        for when in ("setup", "call"):
            end = self._phase(final, when)
            self._log(end)
            if not end.report.passed:
                break
        self._log(self._phase(final, "teardown", nextitem=self._next(nextitem)))

    def _next(self, nextitem: pytest.Item | None) -> pytest.Item | None:
        session = self._item.session
        return None if session.shouldfail or session.shouldstop else nextitem

    def _log(self, end: PhaseEnd) -> None:
        if end.report.when == "call":
            self._final.attach(end.report)
        self._item.ihook.pytest_runtest_logreport(report=end.report)

    # -- the search

    def _climb(self) -> None:
        try:
            climb = self._make_climb()
        except SpecError as error:
            self._ladder.broken = f"@pytest.mark.ladder: {error}"
            return
        try:
            while self._ladder.goes_on and not self._item.session.shouldstop and (plan := climb.next()) is not None:
                self._rung(climb, plan)
        finally:
            # An interruption keeps what is established so far.
            if self._attempts:
                self._conclude(climb)

    def _make_climb(self) -> Climb:
        session, settings = self._session, self._session.settings
        spec = ladder_of(self._item)
        if spec is None:
            raise SpecError("the mark is gone")
        if settings.leave_serving and settings.rung is None:
            # The winner has to be booted after the proof's failing rung; that boot confirms it.
            spec = msgspec.structs.replace(spec, confirm=max(1, spec.confirm))
        return Climb(
            spec,
            session.base_shape(self._item),
            test=self._item.nodeid,
            target=target_info(settings.loaded, session.pool.backend, ()),
            archive=session.archive,
            strategy=settings.strategy,
            only=settings.rung,
        )

    def _conclude(self, climb: Climb) -> None:
        ladder, session, last = self._ladder, self._session, self._attempts[-1]
        ladder.last_record, ladder.last_path = last.record, last.record_path
        if session.settings.rung is not None:
            ladder.only = climb.spec.axis, session.settings.rung
            session.page_all(self._attempts)
            return
        ladder.finding = climb.finding()
        ladder.attempts = [attempt.record for attempt in self._attempts]
        if session.settings.leave_serving and ladder.finding.proven and last.serving:
            ladder.left = session.leave(last)
        ladder.finding_path = climb.finish()
        ladder.page = session.write_pages(ladder.finding_path, self._attempts)

    # -- one rung

    def _rung(self, climb: Climb, plan: RungPlan) -> None:
        item = self._clone()
        item.stash[RUNG] = RungContext(climb, plan)
        self._session.current = item
        try:
            ends = [self._phase(item, "setup")]
            if ends[0].report.passed:
                ends.append(self._phase(item, "call"))
            attempt = self._settle(item, ends[-1])
            ends.append(self._phase(item, "teardown", nextitem=self._item))
        finally:
            self._session.current = self._item
        error = ends[-2].error
        if isinstance(error, pytest.skip.Exception):
            self._ladder.skipped = str(error)
        if ends[-1].error is not None and attempt is not None and attempt.record.verdict in COUNTS_AS_PASSED:
            attempt.body_error(f"in teardown: {ends[-1].text}")
        if attempt is None:
            if self._ladder.skipped is None:
                broken = next(end for end in ends if end.error is not None)
                self._ladder.broken = f"no boot at {plan.label}: {broken.report.longreprtext}"
            return
        self._attempts.append(attempt)
        climb.tell(plan, attempt.record, attempt.record_path)
        self._log_row(plan, attempt, ends)

    def _settle(self, item: pytest.Function, end: PhaseEnd) -> Attempt | None:
        """Put what the body said into the boot's record: after the boot's own verdict, before its engine is ended."""
        use = item.stash.get(USE, None)
        if use is None:
            return None
        attempt, error = use.attempt, end.error
        if use.boot_failed or isinstance(error, pytest.skip.Exception):
            return attempt
        if CHECKED in item.stash and attempt.record.verdict not in COUNTS_AS_PASSED:
            return attempt
        if error is None:
            attempt.body_ended(failed=False)
        elif is_timeout(error):
            attempt.body_unknown(end.text)
        elif isinstance(error, (AssertionError, pytest.fail.Exception)):
            attempt.gate_failed(end.text)
        else:
            attempt.body_error(end.text)
        return attempt

    def _clone(self) -> pytest.Function:
        """A fresh item of the same test: `_fixtureinfo` is the one private name that this needs."""
        origin = self._item
        new: pytest.Function = type(origin).from_parent(
            origin.parent,
            name=origin.name,
            originalname=origin.originalname,
            callspec=getattr(origin, "callspec", None),
            fixtureinfo=origin._fixtureinfo,  # noqa: SLF001 - see above
        )
        # An expected failure is the finding's, not a rung's.
        new.own_markers[:] = [mark for mark in origin.own_markers if mark.name != "xfail"]
        new.keywords.update(origin.keywords)
        new.extra_keyword_matches |= origin.extra_keyword_matches
        return new

    def _phase(self, item: pytest.Item, when: When, **arguments: Any) -> PhaseEnd:  # noqa: ANN401 - the hook's own
        """One phase as pytest's own runner does it, without logging the report."""
        config = item.config
        reraise: tuple[type[BaseException], ...] = (pytest.exit.Exception,)
        if not config.getoption("usepdb", False):
            reraise += (KeyboardInterrupt,)
        hook = getattr(item.ihook, f"pytest_runtest_{when}")
        is_body = when == "call" and RUNG in item.stash

        def run() -> None:
            with self._session.timers.body(item) if is_body else nullcontext():
                hook(item=item, **arguments)

        call: pytest.CallInfo[None] = pytest.CallInfo.from_call(run, when=when, reraise=reraise)
        report: pytest.TestReport = item.ihook.pytest_runtest_makereport(item=item, call=call)
        if call.excinfo is None:
            return PhaseEnd(None, "", report)
        error = call.excinfo.value
        use = item.stash.get(USE, None)
        expected = isinstance(error, pytest.skip.Exception) or (use is not None and use.boot_failed)
        if not expected and not hasattr(report, "wasxfail"):
            item.ihook.pytest_exception_interact(node=item, call=call, report=report)
        is_outcome = isinstance(error, (pytest.fail.Exception, pytest.skip.Exception))
        return PhaseEnd(error, str(error) if is_outcome else call.excinfo.exconly(tryshort=True), report)

    def _log_row(self, plan: RungPlan, attempt: Attempt, ends: Sequence[PhaseEnd]) -> None:
        record, session = attempt.record, self._session
        detail = verdict_detail(record)
        nodeid = row_id(self._item.nodeid, plan.label)
        facts = f"boot {len(self._attempts)}"
        if record.timings.boot_s is not None:
            facts = f"{record.timings.boot_s:.1f} s, {facts}"
        if record.target.simulated:
            facts += ", simulated"
        mark = {
            "kind": "rung",
            "nodeid": nodeid,
            "verdict": str(record.verdict),
            "line": f"{nodeid} {record.verdict}  {detail} ({facts})",
            "header": session.header_once(),
        }
        sections = []
        if record.cause is not None and record.cause.by_gate:
            text = next((end.report.longreprtext for end in ends if end.error is not None), "")
            sections.append(("Refused by the test", text))
        reports = row_reports(
            [end.report for end in ends],
            mark,
            properties=properties(record, attempt.record_path, rung=plan.label),
            detail=detail,
            sections=sections,
            shown_id=not session.is_worker,
        )
        add_links(reports[0], session.config, files_of(attempt))
        for report in reports:
            self._item.ihook.pytest_runtest_logreport(report=report)
