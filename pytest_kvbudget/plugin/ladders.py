"""Ladders: one collected test, many rungs, one finding.

The collected item never runs. Each rung runs as a fresh item of the same kind, with fixtures of its own, and is
reported as a row. A finding item then decides: it alone counts for the exit status, -x, --lf and the totals.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from pytest_kvbudget.attempt import Attempt
from pytest_kvbudget.climb import Climb, RungPlan, SpecError
from pytest_kvbudget.plugin.checks import MarkerError, check_rung, ladder_of
from pytest_kvbudget.plugin.finding import FindingItem, Ladder, Rung
from pytest_kvbudget.plugin.items import COUNTS_AS_PASSED, RUNG, USE, RungContext, is_ladder
from pytest_kvbudget.plugin.outcomes import add_links, files_of, properties
from pytest_kvbudget.plugin.phases import ENDS_THE_LADDER, PhaseEnd, run_phase
from pytest_kvbudget.plugin.rows import row_id, row_reports
from pytest_kvbudget.plugin.session import KvSession
from pytest_kvbudget.plugin.survival import CHECKED
from pytest_kvbudget.plugin.timers import is_timeout
from pytest_kvbudget.plugin.wording import FROM_THE_BODY, verdict_detail
from pytest_kvbudget.recording import target_info


class Ladders:
    """Runs ladders instead of pytest's own protocol."""

    def __init__(self, session: KvSession) -> None:
        self._session = session

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run a ladder; every other item is pytest's."""
        self._session.current = item
        if (
            not isinstance(item, pytest.Function)
            or not is_ladder(item)
            or getattr(item.config.option, "setuponly", False)
        ):
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
        setup = run_phase(final, "setup")
        if not setup.report.passed:
            self._log(setup)
            self._log(run_phase(final, "teardown", nextitem=self._next(nextitem)))
            return
        run_phase(final, "teardown", nextitem=self._item)
        try:
            self._climb()
        except BaseException:
            # The session ends here, and no report will: say at least what is established.
            final.tell(self._ladder)
            self._session.show(final.summary())
            raise
        final.tell(self._ladder)
        for when in ("setup", "call"):
            end = run_phase(final, when)
            self._log(end)
            if not end.report.passed:
                break
        self._log(run_phase(final, "teardown", nextitem=self._next(nextitem)))

    def _next(self, nextitem: pytest.Item | None) -> pytest.Item | None:
        session = self._item.session
        return None if session.shouldfail or session.shouldstop else nextitem

    def _log(self, end: PhaseEnd) -> None:
        if end.report.when == "call":
            self._final.attach(end.report, self._session)
        self._item.ihook.pytest_runtest_logreport(report=end.report)

    # -- the search

    def _climb(self) -> None:
        try:
            climb = self._make_climb()
        except (SpecError, MarkerError) as error:
            self._ladder.broken = str(error)
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
            raise MarkerError("@pytest.mark.ladder: the mark is gone")
        if settings.rung is not None:
            check_rung(spec, settings.rung, self._item.nodeid)
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
        if session.settings.rung is not None:
            ladder.only = climb.spec.axis, session.settings.rung
            session.page_all(self._attempts)
            return
        ladder.finding = climb.finding()
        if session.settings.leave_serving and ladder.finding.proven and last.serving:
            ladder.left = session.leave(last)
        ladder.finding_path = climb.finish()
        ladder.page = session.write_pages(ladder.finding_path, self._attempts)

    # -- one rung

    def _rung(self, climb: Climb, plan: RungPlan) -> None:
        item = self._clone()
        item.stash[RUNG] = RungContext(climb, plan)
        session = self._session
        session.current = item
        ends: list[PhaseEnd] = []
        attempt: Attempt | None = None
        try:
            ends.append(run_phase(item, "setup"))
            if ends[0].report.passed:
                ends.append(run_phase(item, "call", around=session.timers.body(item)))
            attempt = self._settle(item, ends[-1])
            ends.append(run_phase(item, "teardown", nextitem=self._item))
        except BaseException:
            self._cut_short(climb, plan, item, attempt)
            raise
        finally:
            session.current = self._item
        body, last = ends[-2], ends[-1]
        if isinstance(body.error, pytest.xfail.Exception):
            self._ladder.xfailed = str(body.error)
        elif isinstance(body.error, pytest.skip.Exception):
            self._ladder.skipped = str(body.error)
        if last.error is not None and attempt is not None and attempt.record.verdict in COUNTS_AS_PASSED:
            attempt.body_error(f"in teardown: {last.said}")
        if attempt is None:
            if self._ladder.goes_on:
                broken = next(end for end in ends if end.error is not None)
                self._ladder.broken = f"no boot at {plan.label}: {broken.trace}"
            return
        self._take(climb, plan, attempt, ends)
        self._log_row(plan, attempt, ends)

    def _take(self, climb: Climb, plan: RungPlan, attempt: Attempt, ends: Sequence[PhaseEnd]) -> None:
        """Tell the search, and keep what the finding may have to show of this rung."""
        cause = attempt.record.cause
        said_no = cause is not None and cause.failure_class in FROM_THE_BODY
        trace = next((end.trace for end in ends if end.error is not None), "") if said_no else ""
        sections = tuple(ends[-1].report.sections) if ends else ()
        self._attempts.append(attempt)
        self._ladder.rungs.append(Rung(plan.label, attempt.record, attempt.record_path, trace, sections))
        climb.tell(plan, attempt.record, attempt.record_path)

    def _cut_short(self, climb: Climb, plan: RungPlan, item: pytest.Function, attempt: Attempt | None) -> None:
        """Keep the boot that the end of the session cut short: during the boot, or during the body."""
        if attempt is None and (use := item.stash.get(USE, None)) is not None:
            attempt = use.attempt
            if attempt.record.verdict in COUNTS_AS_PASSED:
                attempt.body_interrupted()
        attempt = attempt or self._session.pool.cut_short
        if attempt is not None:
            self._take(climb, plan, attempt, ())

    def _settle(self, item: pytest.Function, end: PhaseEnd) -> Attempt | None:
        """Put what the body said into the boot's record: after the boot's own verdict, before its engine is ended."""
        use = item.stash.get(USE, None)
        if use is None:
            return None
        attempt, error = use.attempt, end.error
        if use.boot_failed:
            return attempt
        if isinstance(error, ENDS_THE_LADDER):
            attempt.body_skipped(end.said)
            return attempt
        if CHECKED in item.stash and attempt.record.verdict not in COUNTS_AS_PASSED:
            return attempt
        if error is None:
            attempt.body_ended(failed=False)
        elif is_timeout(error):
            attempt.body_unknown(end.said)
        elif isinstance(error, (AssertionError, pytest.fail.Exception)):
            attempt.gate_failed(end.said)
        else:
            attempt.body_error(end.said)
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

    def _log_row(self, plan: RungPlan, attempt: Attempt, ends: Sequence[PhaseEnd]) -> None:
        record, session = attempt.record, self._session
        detail = verdict_detail(record)
        nodeid = row_id(self._item.nodeid, plan.label)
        facts = f"boot {len(self._attempts)}"
        if record.timings.boot_s is not None:
            facts = f"{record.timings.boot_s:.1f} s, {facts}"
        if record.target.simulated:
            facts += ", simulated"
        line = f"{nodeid} {record.verdict}  {detail} ({facts})"
        mark = session.mark("rung", str(record.verdict), nodeid=nodeid, line=line)
        sections = []
        if record.cause is not None and record.cause.failure_class in FROM_THE_BODY:
            text = next((end.report.longreprtext for end in ends if end.error is not None), "")
            sections.append(("Refused by the test" if record.cause.by_gate else "Raised by the test", text))
        reports = row_reports(
            [end.report for end in ends],
            mark,
            properties=properties(record, attempt.record_path, boot=len(self._attempts), rung=plan.label),
            detail=detail,
            sections=sections,
            shown_id=not session.is_worker,
        )
        add_links(reports[0], session.config, files_of(attempt))
        for report in reports:
            self._item.ihook.pytest_runtest_logreport(report=report)
