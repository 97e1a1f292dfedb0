"""Ladders and sweeps: one collected test, many boots, one finding (several, where ladders are stacked).

The collected item never runs. Each rung runs as a fresh item of the same kind, with fixtures of its own, and is
reported as a row. A finding item then decides: it alone counts for the exit status, -x, --lf and the totals.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Final

import pytest

from pytest_kvbudget.attempt import Attempt
from pytest_kvbudget.booting import Booting
from pytest_kvbudget.judging import first_line
from pytest_kvbudget.plugin.finding import FindingItem, Part, Rung
from pytest_kvbudget.plugin.items import USE, RungContext, searches
from pytest_kvbudget.plugin.phases import PhaseEnd, run_phase
from pytest_kvbudget.plugin.quest import Earlier, Quest, QuestError
from pytest_kvbudget.plugin.rungs import RungEnd, RungRunner
from pytest_kvbudget.plugin.session import KvSession
from pytest_kvbudget.pool import PoolError
from pytest_kvbudget.question import CALLED_OFF, INTERRUPTED, Question, RungPlan
from pytest_kvbudget.search.rungs import COUNTED
from pytest_kvbudget.verdict import FindingKind, Verdict

RUN_INTERRUPTED: Final = "the run was interrupted; --kvbudget-resume takes over what is finished"
"""Why a search is not over."""
_INTERRUPTS: Final = (KeyboardInterrupt, SystemExit, pytest.exit.Exception)
"""What people, and debuggers, end a run with."""


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
            except BaseException as error:
                self._cut_short(quest, question, part)
                question.halt(RUN_INTERRUPTED if isinstance(error, _INTERRUPTS) else f"the run ended with {error!r}")
                raise
            finally:
                self._cancel(question, part)
                if quest.side_by_side:
                    self._session.pool.spare()
                # An interruption keeps what is established so far.
                if part.rungs:
                    self._conclude(quest, question, part)
            if part.finding is None or not part.finding.proven or not part.goes_on:
                break
            try:
                question = quest.next(question)
            except QuestError as error:
                self._parts.append(Part(broken=str(error)))
                break

    def _answer(self, quest: Quest, question: Question, part: Part) -> None:
        for known, path, record in quest.known(question):
            self._taken(quest, question, part, known, (path, record), known=True)
        part.not_resumed = None if part.rungs else quest.unlike()
        while part.goes_on and not self._item.session.shouldstop:
            try:
                plans = self._wanted(quest, question, part)
                if not plans:
                    break
                if self._take_over(quest, question, part, plans):
                    self._call_off(question, part)
                    continue
                plan, booting = self._next_boot(quest, question, plans)
            except PoolError as error:
                if self._at_limit(quest, question, part) and not self._running:
                    break
                part.broken = f"no boot: {error}"
                question.halt(first_line(part.broken))
                break
            begun = time.monotonic()
            self._rung(quest, question, plan, booting, part)
            quest.took(_own_s(time.monotonic() - begun, part, booting))
            self._call_off(question, part)
        if self._item.session.shouldstop and part.goes_on:
            question.halt(f"the run was stopped: {self._item.session.shouldstop}")

    def _wanted(self, quest: Quest, question: Question, part: Part) -> tuple[RungPlan, ...]:
        """The boots to make now, those that run first; their devices are there, and time for them is left.

        Raises:
            PoolError: no device set could be had.
        """
        running = len(self._running)
        if self._at_limit(quest, question, part):
            return question.next_batch(running)
        if not running and question.finding().kind is not FindingKind.UNDECIDED and not question.next_batch():
            return ()  # all is said, and room for a boot would cost the winner that serves
        room = quest.room(question, running=running)
        # Devices may have been waited for.
        return question.next_batch(running if self._at_limit(quest, question, part) else running + room)

    def _at_limit(self, quest: Quest, question: Question, part: Part) -> bool:
        """Whether no boot may begin any more. The search is told once nothing runs that may still answer it."""
        limit = quest.limit()
        if limit is not None and not self._running:
            question.halt(limit)
            part.broken = None if part.rungs else f"undecided: {limit}; nothing was booted"
        return limit is not None

    def _take_over(self, quest: Quest, question: Question, part: Part, plans: tuple[RungPlan, ...]) -> bool:
        """Tell the search of earlier boots that stand for those that are wanted; whether there was one."""
        some = False
        for plan in plans:
            found = None if plan.label in self._running else quest.earlier(question, plan)
            if found is not None:
                self._taken(quest, question, part, plan, found)
                some = True
        return some

    def _taken(
        self,
        quest: Quest,
        question: Question,
        part: Part,
        plan: RungPlan,
        found: Earlier,
        *,
        known: bool = False,
    ) -> None:
        """Tell the search of an earlier boot, and show it."""
        path, record = found
        made = next((rung for other in self._parts for rung in other.rungs if rung.path == path), None)
        rung = Rung(plan.label, record, path, value=plan.value, reused=True)
        if made is not None:
            rung = replace(rung, trace=made.trace, sections=made.sections)
        part.rungs.append(rung)
        question.tell(plan, record, path, reused=True, known=known)
        quest.keep(path, record, question.request(plan, plan.shape))
        self._runner.reused_row(plan, found, len(part.rungs), made)

    def _next_boot(
        self, quest: Quest, question: Question, plans: tuple[RungPlan, ...]
    ) -> tuple[RungPlan, Booting | None]:
        """The rung whose item runs next. Where several device sets are free, their boots begin before their items."""
        if not quest.side_by_side:
            return plans[0], None
        pool = self._session.pool
        for plan in plans:
            if plan.label not in self._running:
                pool.start(
                    question.request(plan, plan.shape),
                    device_set=plan.device_set,
                    longest_s=quest.left_s(),
                    known=partial(self._begun, plan),
                )
        with self._session.timers.paused(self._item):
            first = pool.first_of([booting for _, booting in self._running.values()])
        label = next(label for label, (_, booting) in self._running.items() if booting is first)
        return self._running.pop(label)

    def _begun(self, plan: RungPlan, booting: Booting) -> None:
        self._running[plan.label] = plan, booting

    def _call_off(self, question: Question, part: Part) -> None:
        """End the boots under way that other boots have answered: their devices are for those that are wanted.

        One that has failed by itself meanwhile is over: it is told of and counted as any other.
        """
        answered = {None, *(rung.record.device_set for rung in part.rungs)}
        for value in question.moot():
            running = {label: booting for label, (plan, booting) in self._running.items() if plan.value == value}
            if any(booting.attempt.record.device_set not in answered for booting in running.values()):
                continue  # what another kind of device set says is no answer for this one
            if any(booting.attempt.record.verdict is Verdict.FAIL for booting in running.values()):
                continue
            for label in running:
                self._end(label, question, part)
            question.drop(value)

    def _cancel(self, question: Question, part: Part) -> None:
        """End the boots that nobody waits for any more."""
        for label in list(self._running):
            self._end(label, question, part)

    def _end(self, label: str, question: Question, part: Part) -> None:
        """Call a boot off, and show it."""
        plan, booting = self._running.pop(label)
        attempt = booting.attempt
        self._session.pool.call_off(attempt)
        self._session.keep(attempt)
        self._unjudged(question, plan, attempt, part, CALLED_OFF)

    def _cut_short(self, quest: Quest, question: Question, part: Part) -> None:
        """The session ends: end every boot, and show those too that have no verdict."""
        for label in list(self._running):
            plan, booting = self._running.pop(label)
            self._session.pool.retire(booting.attempt)
            self._session.keep(booting.attempt)
            self._interrupt(quest, question, plan, booting.attempt, part)

    def _interrupt(self, quest: Quest, question: Question, plan: RungPlan, attempt: Attempt, part: Part) -> None:
        """Show a boot that the end of the session met: it counts only where it had failed by itself."""
        if attempt.record.verdict in COUNTED:
            self._take(quest, question, plan, RungEnd(attempt), part)
            self._runner.unjudged_row(plan, attempt, len(part.rungs))
            return
        self._unjudged(question, plan, attempt, part, INTERRUPTED)

    def _unjudged(self, question: Question, plan: RungPlan, attempt: Attempt, part: Part, why: str) -> None:
        """Show a boot that has no verdict, for this reason."""
        part.attempts.append(attempt)
        part.rungs.append(
            Rung(plan.label, attempt.record, attempt.record_path, value=plan.value, called_off=why == CALLED_OFF)
        )
        question.unjudged(attempt.record_path, why)
        self._runner.unjudged_row(plan, attempt, len(part.rungs))

    def _conclude(self, quest: Quest, question: Question, part: Part) -> None:
        session = self._session
        if quest.only is not None:
            part.only = question.name, part.rungs[-1].label
            session.pages.of_boots(part.attempts)
            return
        part.finding = question.finding()
        if session.settings.leave_serving and not quest.more:
            part.left = self._leave(part)
        try:
            part.finding_path = question.finish()
        except OSError as error:
            part.broken = f"{session.archive.folder}: the finding cannot be written: {error.strerror or error}"
            part.finding = None
            return
        part.page = session.pages.of_search(part.finding_path, part.attempts)

    def _leave(self, part: Part) -> list[str]:
        """Hand the winner over where it serves; says where, or why nothing does."""
        finding = part.finding
        last = next((attempt for attempt in reversed(part.attempts) if not attempt.cancelled), None)
        rung = next((rung for rung in reversed(part.rungs) if not rung.called_off), None)
        if finding is None or not finding.proven:
            return ["nothing is left serving: the finding is no proof"]
        if last is None or not last.serving or rung is None or rung.value != finding.value:
            return ["nothing is left serving: the winner was not booted again after the proof"]
        return self._session.leave(last)

    # -- one rung

    def _rung(self, quest: Quest, question: Question, plan: RungPlan, booting: Booting | None, part: Part) -> None:
        try:
            rung = self._runner.run(RungContext(question, plan, booting))
        except BaseException:
            if booting is not None:
                self._session.pool.retire(booting.attempt)
            attempt = self._interrupted(booting, part)
            if attempt is not None:
                self._interrupt(quest, question, plan, attempt, part)
            raise
        if isinstance(rung.body.error, pytest.xfail.Exception):
            part.xfailed = str(rung.body.error)
        elif isinstance(rung.body.error, pytest.skip.Exception):
            part.skipped = str(rung.body.error)
        if rung.attempt is None:
            if part.goes_on:
                broken = next(end for end in rung.ends if end.error is not None)
                part.broken = f"no boot at {plan.label}: {broken.trace}"
                question.halt(f"no boot at {plan.label}: {broken.said}")
            if booting is not None:
                self._session.pool.retire(booting.attempt)
            return
        self._take(quest, question, plan, rung, part)
        self._runner.row(plan, rung, len(part.rungs))
        if rung.attempt.lost is not None:
            part.broken = rung.attempt.lost
            question.halt(first_line(part.broken))
        if part.skipped is not None:
            question.halt(f"the test body called pytest.skip: {first_line(part.skipped)}")
        elif part.xfailed is not None:
            question.halt(f"the test body called pytest.xfail: {first_line(part.xfailed)}")

    def _interrupted(self, booting: Booting | None, part: Part) -> Attempt | None:
        """The boot of a rung that the end of the session cut short."""
        current = self._runner.last
        use = None if current is None else current.stash.get(USE, None)
        if use is not None:
            return use.attempt
        cut_short = self._session.pool.cut_short
        if cut_short is not None and cut_short not in part.attempts:
            return cut_short
        return None if booting is None else booting.attempt

    def _take(self, quest: Quest, question: Question, plan: RungPlan, rung: RungEnd, part: Part) -> None:
        """Tell the search, and keep what the finding may have to show of this rung."""
        attempt = rung.attempt
        if attempt is None:
            return
        part.attempts.append(attempt)
        part.rungs.append(
            Rung(plan.label, attempt.record, attempt.record_path, rung.trace, rung.sections, value=plan.value)
        )
        question.tell(plan, attempt.record, attempt.record_path)
        quest.keep(attempt.record_path, attempt.record, attempt.request)


def _own_s(spent_s: float, part: Part, booting: Booting | None) -> float:
    """What a boot took with its body: with what went by before its item ran, without any wait for its devices."""
    if booting is not None:
        timings = booting.attempt.record.timings
        return spent_s + (timings.boot_s or timings.ended_s or 0.0)
    if not part.attempts:
        return spent_s
    timings = part.attempts[-1].record.timings
    return max(0.0, spent_s - timings.lease_wait_s - timings.clean_wait_s)
