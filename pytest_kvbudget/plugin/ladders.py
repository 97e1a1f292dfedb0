"""Ladders and sweeps: one collected test, many boots, one finding (several, where ladders are stacked).

The collected item never runs. Each rung runs as a fresh item of the same kind, with fixtures of its own, and is
reported as a row. A finding item then decides: it alone counts for the exit status, -x, --lf and the totals.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pytest_kvbudget.attempt import Attempt
from pytest_kvbudget.booting import Booting
from pytest_kvbudget.plugin.finding import FindingItem, Part, Rung
from pytest_kvbudget.plugin.items import USE, RungContext, searches
from pytest_kvbudget.plugin.phases import PhaseEnd, run_phase
from pytest_kvbudget.plugin.quest import Quest, QuestError
from pytest_kvbudget.plugin.rungs import RungEnd, RungRunner
from pytest_kvbudget.plugin.session import KvSession
from pytest_kvbudget.pool import PoolError
from pytest_kvbudget.question import Question, RungPlan
from pytest_kvbudget.records import AttemptRecord
from pytest_kvbudget.verdict import Verdict


class Ladders:
    """Runs ladders and sweeps instead of pytest's own protocol."""

    def __init__(self, session: KvSession) -> None:
        self._session = session

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run a ladder or sweep; every other item is pytest's."""
        self._session.current = item
        if (
            not isinstance(item, pytest.Function)
            or not searches(item)
            or getattr(item.config.option, "setuponly", False)
        ):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        LadderRun(self._session, item).run(nextitem)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


class LadderRun:
    """One test's ladders or its sweep, from the first rung to the finding's report."""

    def __init__(self, session: KvSession, item: pytest.Function) -> None:
        self._session, self._item = session, item
        self._runner = RungRunner(session, item)
        self._parts: list[Part] = []
        self._running: dict[str, tuple[RungPlan, Booting]] = {}
        """Boots that began before their items, by label."""
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
            final.tell(self._parts)
            self._session.show(final.summary())
            raise
        final.tell(self._parts)
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
        """One search after the other: the next one begins at the winner of the one before."""
        try:
            quest = Quest(self._session, self._item)
            question = quest.next()
        except QuestError as error:
            self._parts.append(Part(broken=str(error)))
            return
        while question is not None:
            part = Part()
            self._parts.append(part)
            try:
                self._answer(quest, question, part)
            finally:
                self._cancel()
                if quest.side_by_side:
                    self._session.pool.spare()
                # An interruption keeps what is established so far.
                if part.rungs:
                    self._conclude(quest, question, part)
            if part.finding is None or not part.finding.proven or not part.goes_on:
                break
            quest.keep(part.attempts)
            try:
                question = quest.next(question)
            except QuestError as error:
                self._parts.append(Part(broken=str(error)))
                break

    def _answer(self, quest: Quest, question: Question, part: Part) -> None:
        for known, path, record in quest.known(question):
            self._taken(question, part, known, path, record, known=True)
        part.not_resumed = None if part.rungs else quest.unlike()
        while part.goes_on and not self._item.session.shouldstop:
            running = len(self._running)
            limit = quest.limit(part.longest_s)
            if limit is not None and not running:
                question.halt(limit)
                part.broken = None if part.rungs else f"undecided: {limit}; nothing was booted"
            try:
                plans = question.next_batch(running + (0 if limit else quest.room(question, running=running)))
                if not plans:
                    break
                if self._take_over(quest, question, part, plans):
                    self._call_off(question)
                    continue
                plan, booting = self._next_boot(quest, question, plans)
            except PoolError as error:
                part.broken = f"no boot: {error}"
                break
            begun = time.monotonic()
            self._rung(question, plan, booting, part)
            spent_s = (
                time.monotonic() - begun + (0.0 if booting is None else booting.attempt.record.timings.boot_s or 0)
            )
            part.longest_s = max(part.longest_s, spent_s)
            self._call_off(question)

    def _take_over(self, quest: Quest, question: Question, part: Part, plans: tuple[RungPlan, ...]) -> bool:
        """Tell the search of earlier boots that stand for those that are wanted; whether there was one."""
        some = False
        for plan in plans:
            found = None if plan.label in self._running else quest.earlier(question, plan)
            if found is not None:
                self._taken(question, part, plan, *found)
                some = True
        return some

    def _taken(
        self, question: Question, part: Part, plan: RungPlan, path: Path, record: AttemptRecord, *, known: bool = False
    ) -> None:
        """Tell the search of an earlier boot, and show it."""
        part.rungs.append(Rung(plan.label, record, path, value=plan.value, reused=True))
        question.tell(plan, record, path, reused=True, known=known)
        self._runner.reused_row(plan, record, path)

    def _next_boot(
        self, quest: Quest, question: Question, plans: tuple[RungPlan, ...]
    ) -> tuple[RungPlan, Booting | None]:
        """The rung whose item runs next. Where several device sets are free, their boots begin before their items."""
        if not quest.side_by_side:
            return plans[0], None
        pool = self._session.pool
        for plan in plans:
            if plan.label not in self._running:
                request = question.request(plan, plan.shape)
                self._running[plan.label] = plan, pool.start(request, device_set=plan.device_set)
        with self._session.timers.paused(self._item):
            first = pool.first_of([booting for _, booting in self._running.values()])
        label = next(label for label, (_, booting) in self._running.items() if booting is first)
        return self._running.pop(label)

    def _call_off(self, question: Question) -> None:
        """End the boots under way that other boots have answered: their devices are for those that are wanted.

        One that has failed by itself meanwhile is over: it is told of and counted as any other.
        """
        for value in question.moot():
            running = {label: booting for label, (plan, booting) in self._running.items() if plan.value == value}
            if any(booting.done and booting.attempt.record.verdict is Verdict.FAIL for booting in running.values()):
                continue
            for label in running:
                self._end(label)
            question.drop(value)

    def _cancel(self) -> None:
        """End the boots that nobody waits for any more."""
        for label in list(self._running):
            self._end(label)

    def _end(self, label: str) -> None:
        _, booting = self._running.pop(label)
        self._session.pool.retire(booting.attempt)
        self._session.keep(booting.attempt)

    def _conclude(self, quest: Quest, question: Question, part: Part) -> None:
        session, last = self._session, part.attempts[-1] if part.attempts else None
        if quest.only is not None:
            part.only = question.name, part.rungs[-1].label
            session.page_all(part.attempts)
            return
        part.finding = question.finding()
        if session.settings.leave_serving and part.finding.proven and last is not None and last.serving:
            part.left = session.leave(last)
        part.finding_path = question.finish()
        part.page = session.write_pages(part.finding_path, part.attempts)

    # -- one rung

    def _rung(self, question: Question, plan: RungPlan, booting: Booting | None, part: Part) -> None:
        try:
            rung = self._runner.run(RungContext(question, plan, booting))
        except BaseException:
            attempt = self._interrupted(booting)
            if attempt is not None:
                self._take(question, plan, RungEnd(attempt), part)
            raise
        if isinstance(rung.body.error, pytest.xfail.Exception):
            part.xfailed = str(rung.body.error)
        elif isinstance(rung.body.error, pytest.skip.Exception):
            part.skipped = str(rung.body.error)
        if rung.attempt is None:
            if part.goes_on:
                broken = next(end for end in rung.ends if end.error is not None)
                part.broken = f"no boot at {plan.label}: {broken.trace}"
            if booting is not None:
                self._session.pool.retire(booting.attempt)
            return
        self._take(question, plan, rung, part)
        self._runner.row(plan, rung, len(part.attempts))

    def _interrupted(self, booting: Booting | None) -> Attempt | None:
        """The boot of a rung that the end of the session cut short."""
        current = self._runner.last
        use = None if current is None else current.stash.get(USE, None)
        if use is not None:
            return use.attempt
        return self._session.pool.cut_short or (None if booting is None else booting.attempt)

    def _take(self, question: Question, plan: RungPlan, rung: RungEnd, part: Part) -> None:
        """Tell the search, and keep what the finding may have to show of this rung."""
        attempt = rung.attempt
        if attempt is None:
            return
        part.attempts.append(attempt)
        part.rungs.append(
            Rung(plan.label, attempt.record, attempt.record_path, rung.trace, rung.sections, value=plan.value)
        )
        question.tell(plan, attempt.record, attempt.record_path)
