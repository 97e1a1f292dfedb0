"""One rung: a fresh item of its ladder's or sweep's test, from setup to teardown, and its row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_kvbudget.attempt import Attempt
from pytest_kvbudget.plugin.finding import Rung
from pytest_kvbudget.plugin.items import COUNTS_AS_PASSED, RUNG, USE, RungContext
from pytest_kvbudget.plugin.outcomes import add_links, properties
from pytest_kvbudget.plugin.phases import ENDS_THE_LADDER, PhaseEnd, refused_by_test, run_phase
from pytest_kvbudget.plugin.rows import row_id, row_reports
from pytest_kvbudget.plugin.session import KvSession
from pytest_kvbudget.plugin.timers import is_timeout
from pytest_kvbudget.plugin.wording import FROM_THE_BODY, verdict_detail
from pytest_kvbudget.question import UNJUDGED, RungPlan
from pytest_kvbudget.records import LOG_FILE, AttemptRecord
from pytest_kvbudget.report.history import why
from pytest_kvbudget.verdict import Verdict


@dataclass
class RungEnd:
    """How a rung's item ended."""

    attempt: Attempt | None = None
    """Its boot; ``None`` where there was none."""
    ends: list[PhaseEnd] = field(default_factory=list)
    """Its phases, as far as they ran."""

    @property
    def body(self) -> PhaseEnd:
        """The phase that judged: the body's, or the one before it that broke."""
        return self.ends[-2]

    @property
    def trace(self) -> str:
        """Traceback of the body where it decided."""
        cause = None if self.attempt is None else self.attempt.record.cause
        if cause is None or cause.failure_class not in FROM_THE_BODY:
            return ""
        return next((end.trace for end in self.ends if end.error is not None), "")

    @property
    def sections(self) -> tuple[tuple[str, str], ...]:
        """Captured output."""
        return tuple(self.ends[-1].report.sections) if self.ends else ()


class RungRunner:
    """Runs the rungs of one collected test."""

    def __init__(self, session: KvSession, item: pytest.Function) -> None:
        self._session, self._item = session, item
        self.last: pytest.Function | None = None
        """The item of the rung that ran last."""

    def run(self, context: RungContext) -> RungEnd:
        """Run one rung. What ends the session passes through, with the boot's verdict settled: see `cut_short`."""
        item = self.last = self._clone()
        item.stash[RUNG] = context
        session = self._session
        session.current = item
        rung = RungEnd()
        try:
            rung.ends.append(run_phase(item, "setup"))
            if rung.ends[0].report.passed:
                rung.ends.append(run_phase(item, "call", around=session.timers.body(item)))
            rung.attempt = self._settle(item, rung.ends[-1])
            rung.ends.append(run_phase(item, "teardown", nextitem=self._item))
        except BaseException:
            self._cut_short(item, rung)
            raise
        finally:
            session.current = self._item
        last = rung.ends[-1]
        if last.error is not None and rung.attempt is not None and rung.attempt.record.verdict in COUNTS_AS_PASSED:
            rung.attempt.body_error(f"in teardown: {last.said}")
        if rung.attempt is not None:
            rung.attempt.settle()
        return rung

    def _cut_short(self, item: pytest.Function, rung: RungEnd) -> None:
        """Keep the boot that the end of the session cut short: during the boot, or during the body."""
        use = item.stash.get(USE, None)
        if rung.attempt is None and use is not None and use.attempt.record.verdict in COUNTS_AS_PASSED:
            use.attempt.body_interrupted()

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
        if attempt.record.verdict not in COUNTS_AS_PASSED:  # by a check, or by a count that nobody stated
            return attempt
        if error is None:
            use.exercise.body_ended(failed=False)
        elif is_timeout(error):
            attempt.body_unknown(end.said)
        elif refused_by_test(error):
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

    # -- rows

    def row(self, plan: RungPlan, rung: RungEnd, boot: int) -> None:
        """Report a boot as a row; ``boot`` is its number among all of its ladder, those taken over among them."""
        attempt = rung.attempt
        if attempt is None:
            return
        record = attempt.record
        sections = []
        if record.cause is not None and record.cause.failure_class in FROM_THE_BODY:
            text = next((end.report.longreprtext for end in rung.ends if end.error is not None), "")
            sections.append(("Refused by the test" if record.cause.by_gate else "Raised by the test", text))
        mark = self._mark(plan, record, f"boot {boot}")
        reports = row_reports(
            [end.report for end in rung.ends],
            mark,
            properties=properties(record, attempt.record_path, boot=boot, rung=plan.label),
            detail=verdict_detail(record),
            sections=sections,
            shown_id=not self._session.is_worker,
        )
        self._log(reports, attempt.record_path)

    def reused_row(
        self, plan: RungPlan, booted: tuple[Path, AttemptRecord], boot: int, made: Rung | None = None
    ) -> None:
        """Report a boot that an earlier one stands for.

        Args:
            plan: what was wanted.
            booted: what stands for it.
            boot: as in `row`.
            made: the rung of an earlier ladder of this test that it was: its body ran there, and its output goes along.
        """
        run = booted[1].run.run
        origin = f"run {run}" if made is None or made.reused else f"{made.label} of this run, where the body ran"
        how = f"not booted: taken over from {origin}"
        self._without_item(
            plan,
            booted,
            boot,
            how,
            more=(("kvbudget.reused", str(run)),),
            sections=() if made is None else made.sections,
        )

    def unjudged_row(self, plan: RungPlan, attempt: Attempt, boot: int) -> None:
        """Report a boot that no body judged to its end; ``boot`` as in `row`."""
        self._without_item(plan, (attempt.record_path, attempt.record), boot, f"boot {boot}")

    def _without_item(
        self,
        plan: RungPlan,
        booted: tuple[Path, AttemptRecord],
        boot: int,
        how: str,
        *,
        more: Sequence[tuple[str, object]] = (),
        sections: Sequence[tuple[str, str]] = (),
    ) -> None:
        path, record = booted
        item = self._item
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords=dict.fromkeys(item.keywords, 1),
            outcome="passed",
            longrepr=None,
            when="call",
        )
        reports = row_reports(
            [report],
            self._mark(plan, record, how),
            properties=[*properties(record, path, boot=boot, rung=plan.label), *more],
            detail=_detail(record),
            sections=sections,
            shown_id=not self._session.is_worker,
        )
        self._log(reports, path)

    def _mark(self, plan: RungPlan, record: AttemptRecord, how: str) -> dict[str, Any]:
        nodeid = row_id(self._item.nodeid, plan.label)
        facts = [how, "simulated"] if record.target.simulated else [how]
        if record.timings.boot_s is not None:
            facts.insert(0, f"{record.timings.boot_s:.1f} s")
        line = f"{nodeid} {record.verdict}  {_detail(record)} ({', '.join(facts)})"
        return self._session.mark("rung", str(record.verdict), nodeid=nodeid, label=plan.label, line=line)

    def _log(self, reports: Sequence[pytest.TestReport], path: Path) -> None:
        files = {"record": path, "log": path.with_name(LOG_FILE), "page": path.with_name("rung.html")}
        add_links(reports[0], self._session.config, files)
        for report in reports:
            self._item.ihook.pytest_runtest_logreport(report=report)


def _detail(record: AttemptRecord) -> str:
    """What a verdict rests on; of a boot that nobody waited for, whether it was called off or interrupted."""
    return why(record) if record.verdict is Verdict.UNKNOWN and why(record) in UNJUDGED else verdict_detail(record)
