"""What one test searches for: its questions one after the other, what is known beforehand, and when to stop."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec
import pytest

from pytest_kvbudget import lessons
from pytest_kvbudget.climb import Climb
from pytest_kvbudget.expectation import expected_boots
from pytest_kvbudget.plugin.asking import digest, own_shape
from pytest_kvbudget.plugin.checks import MarkerError, OneRung, one_rung, specs_of
from pytest_kvbudget.plugin.session import KvSession
from pytest_kvbudget.question import Known, Question, RungPlan, Setting
from pytest_kvbudget.recording import target_info
from pytest_kvbudget.records import AttemptRecord, BootIdentity
from pytest_kvbudget.report.numbers import duration
from pytest_kvbudget.request import BootRequest
from pytest_kvbudget.search.model import Prior
from pytest_kvbudget.search.noise import Noise
from pytest_kvbudget.search.rungs import COUNTED
from pytest_kvbudget.search.turn import turn, turned
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.specs import LadderSpec, SpecError, SweepSpec
from pytest_kvbudget.tuning import Tuning
from pytest_kvbudget.vantage import from_the_law, largest_headroom, plan_prior, turns_nothing

Earlier = tuple[Path, AttemptRecord]


class QuestError(Exception):
    """A question cannot be asked; the message says why, for people."""


class Quest:
    """The questions of one test, in order: each stacked ladder begins at the winner of the one before."""

    def __init__(self, session: KvSession, item: pytest.Function) -> None:
        """Raises `QuestError` for a wrong mark, or a rung that was asked for alone and is none."""
        self._session, self._item = session, item
        self._base = session.base_shape(item)
        try:
            self._specs = specs_of(item)
            text = session.settings.rung
            self.only: OneRung | None = None if text is None else one_rung(self._specs, text, item.nodeid)
        except MarkerError as error:
            raise QuestError(str(error)) from None
        self._asked = 0
        self._home: str | None = None
        """The kind of device set that the ladder before is proven on, where sets differ."""
        self._longest_s = 0.0
        self._settled: dict[str, int | float] = {}
        self._booted: list[tuple[Path, AttemptRecord, BootRequest]] = []
        """Boots of the ladders before this one, and what each was asked for; those taken over among them."""
        self._minutes: lessons.Minutes | None = None
        self._told: str = "nothing"
        self._like: BootIdentity | None = None
        self._most = self._sets()

    # -- questions

    def next(self, previous: Question | None = None) -> Question | None:
        """The next question, ``None`` after the last.

        Args:
            previous: the one before, proven.

        Raises:
            QuestError: its base shape does not allow it.
        """
        if previous is not None:
            finding = previous.finding()
            winner, value = previous.winner(), finding.value
            self._home = finding.sets[0].device_set if finding.sets else None
            if winner is not None and value is not None:
                self._base, self._settled[previous.name] = winner, previous.setting(value)
        if self.only is not None:
            found: list[LadderSpec | SweepSpec] = [] if self._asked else [self.only.spec]
        else:
            found = list(self._specs[self._asked : self._asked + 1])
        if not found:
            return None
        self._asked += 1
        self._longest_s = 0.0
        try:
            return self._question(found[0])
        except SpecError as error:
            raise QuestError(str(error)) from None

    def _question(self, spec: LadderSpec | SweepSpec) -> Question:
        session, settings = self._session, self._session.settings
        base = self._base
        for name, setting in ({} if self.only is None else self.only.fixed).items():
            base = turn(base, name, setting)
        if settings.leave_serving and self.only is None and self._asked == len(self._specs):
            # The winner has to be booted after the proof's failing rung; that boot confirms it.
            spec = msgspec.structs.replace(spec, confirm=max(1, spec.confirm))
        asked = digest(self._item, spec.windows, getattr(spec, "pool", "fixed"), spec.name)
        ladder = spec if isinstance(spec, LadderSpec) else None
        about = Setting(
            test=self._item.nodeid,
            target=target_info(settings.loaded, session.pool.backend, ()),
            strategy=settings.strategy,
            only=None if self.only is None else self.only.value,
            known=self._known(base, asked, ladder),
            fixed={} if ladder is None else self._fixed(ladder, base),
            asked=asked or "",
        )
        if isinstance(spec, LadderSpec):
            return Climb(spec, base, about, session.archive)
        futile = turns_nothing(settings.loaded, spec, base)
        if futile is not None:
            raise QuestError(futile)
        sweep = from_the_law(spec, session.pool.experience.free())
        return Tuning(sweep, base, about, session.archive, maximum=largest_headroom(settings.loaded, sweep, base))

    def _fixed(self, spec: LadderSpec, base: Shape) -> dict[str, int | float]:
        """What a stacked ladder's labels name beside its own axis: the other axes, as they stand.

        An axis that no ladder has settled yet and that has no value in the shape is the engine's own default: nobody
        knows it here, and labels do not name it.
        """
        others = (other.name for other in self._specs if other.name != spec.name)
        found = {name: self._settled.get(name, turned(base, name)) for name in others}
        return {name: setting for name, setting in found.items() if setting is not None}

    @property
    def more(self) -> tuple[str, ...]:
        """What is climbed after the question that was asked last."""
        return () if self.only is not None else tuple(spec.name for spec in self._specs[self._asked :])

    # -- what is known beforehand

    def _known(self, base: Shape, asked: str | None, ladder: LadderSpec | None) -> Known:
        session = self._session
        like = self._like = session.identity(base, asked)
        self._minutes = None if like is None else lessons.minutes(session.history, like)
        prior = None if ladder is None else self._prior(ladder, base, like)
        self._told = "nothing" if prior is None else prior.source
        return Known(
            prior=prior,
            noise=(None if like is None else lessons.sigma(session.history, like, base=base)) or Noise(),
            cold_extra_bytes=None if like is None else lessons.cold_extra(session.history, like, base=base),
            minutes=(1.0, 1.0) if self._minutes is None else self._minutes[:2],
            max_boots=session.settings.max_boots,
        )

    def _prior(self, ladder: LadderSpec, base: Shape, like: BootIdentity | None) -> Prior | None:
        found = None
        if like is not None:
            found = lessons.prior(
                self._session.history, like, axis=ladder.rungs, base=base, pool=ladder.pool, windows=ladder.windows
            )
        loaded, experience = self._session.settings.loaded, self._session.pool.experience
        return found or plan_prior(loaded, ladder, base, experience)

    def known(self, question: Question) -> Iterator[tuple[RungPlan, Path, AttemptRecord]]:
        """Finished boots that stand on rungs of a question, each rung once, in the order in which they were booted.

        Those of the ladders before this one and, with ``--kvbudget-resume``, those of earlier runs. Repeated boots of a
        rung are left for when the search asks for them.
        """
        seen: set[int] = set()
        # where device sets differ, a boot on the one that the winner before was proven on speaks first
        for path, record, made in sorted(self._booted, key=lambda booted: booted[1].device_set != self._home):
            plan = question.known_plan(made.shape)
            if plan is None or plan.value in seen or record.verdict not in COUNTED:
                continue
            if _same(made, question.request(plan, plan.shape)):
                seen.add(plan.value)
                yield plan, path, record
        if self.only is not None:
            return
        for booted in self._session.earlier_boots:
            plan = question.known_plan(booted.record.shape)
            if plan is None or plan.value in seen or booted.record.number > 1:
                continue
            found = self.earlier(question, plan)
            if found is not None:
                seen.add(plan.value)
                yield plan, *found

    def earlier(self, question: Question, plan: RungPlan) -> Earlier | None:
        """A finished boot of an earlier run that stands for one that is wanted."""
        settings = self._session.settings
        if self.only is not None or (settings.leave_serving and plan.why == "confirm"):
            return None  # what is to be left serving has to be booted
        return self._session.resume(plan.shape, question.request(plan, plan.shape).asked or None)

    def unlike(self) -> str | None:
        """Why the newest finished boot of this test in an earlier run stands for none of this one, in words.

        ``None`` where nothing speaks against it but its shape, or where earlier boots are not asked for.
        """
        test, like = self._item.nodeid, self._like
        finished = [booted.record for booted in self._session.earlier_boots if booted.record.test == test]
        earlier = next((record.identity for record in reversed(finished) if record.settled), None)
        if self.only is not None or like is None or earlier is None:
            return None
        reasons = [words for part, words in _PARTS.items() if getattr(earlier, part) != getattr(like, part)]
        reasons += [f"{words} cannot be told" for part, words in _UNTOLD.items() if getattr(like, part) is None]
        return None if not reasons else f"earlier boots of this test are others: {', '.join(reasons)}"

    def keep(self, path: Path, record: AttemptRecord, made: BootRequest) -> None:
        """Keep a boot of this ladder, made or taken over: a later one does not repeat it."""
        self._booted.append((path, record, made))

    # -- several device sets

    @property
    def side_by_side(self) -> bool:
        """Rungs boot before their items run, on several device sets."""
        return self._most > 1

    def room(self, question: Question, *, running: int) -> int:
        """How many further boots can begin now; a device set for one is waited for, but not past ``--kvbudget-until``.

        Raises:
            PoolError: no device set could be had.
        """
        left_s = self.left_s()
        if not self.side_by_side and left_s is None:
            return 1  # what boots it waits for its devices
        if running >= self._most:
            return 0
        return self._session.pool.reserve(question.base, self._most - running, longest_s=left_s)

    def _sets(self) -> int:
        """Device sets for this test: the target's, shared with the other workers of the run."""
        session = self._session
        if self.only is not None or not own_shape(self._item):
            return 1
        sets = len(session.pool.backend.slots(session.settings.loaded, self._base))
        return max(1, sets // int(session.worker_input.get("workercount", 1)))

    # -- limits and estimates

    def took(self, spent_s: float) -> None:
        """What a boot took, with its body, and without what its devices were waited for."""
        self._longest_s = max(self._longest_s, spent_s)

    def left_s(self) -> float | None:
        """Seconds until no further boot may begin, below 0 where none may; ``None`` without ``--kvbudget-until``."""
        until = self._session.settings.until
        if until is None:
            return None
        return (until - datetime.now().astimezone()).total_seconds() - self._boot_s()

    def _boot_s(self) -> float:
        """What a boot takes: the longest of this search, before its first what earlier runs took; 0 where unknown."""
        return self._longest_s or (0.0 if self._minutes is None else 60 * self._minutes.passing)

    def limit(self) -> str | None:
        """Why no further boot may begin, ``None`` where one may."""
        until, left_s, boot_s = self._session.settings.until, self.left_s(), self._boot_s()
        if until is None or left_s is None or left_s > 0:
            return None
        took = f", and a boot takes {duration(boot_s)}" if boot_s else ""
        return f"--kvbudget-until {until:%H:%M} is reached{took}"

    def estimate(self, question: Question) -> Iterator[str]:
        """What a search is expected to cost, in words."""
        rungs = len(question.grid)
        expected = expected_boots(rungs, question.strategy, self._told, sweep=question.kind == "sweep")
        bound = f"at most {expected.at_most}{' rounds' if self.side_by_side else ''}"
        yield f"expected: {expected.mean:.1f} boots, {bound} for {rungs} rungs ({_TOLD[self._told]})"
        limit = self._session.settings.max_boots
        if limit is not None and limit < expected.at_most:
            yield f"--kvbudget-max-boots {limit} may end it undecided"
        if self._minutes is not None:
            longest = max(self._minutes.passing, self._minutes.failing)
            typical = expected.mean * (self._minutes.passing + self._minutes.failing) / 2
            most, passing, failing = expected.at_most * longest, self._minutes.passing, self._minutes.failing
            yield (
                f"about {duration(60 * typical)}, at most {duration(60 * most)}, by {self._minutes.boots} earlier "
                f"boots of this target ({duration(60 * passing)} where it passed, {duration(60 * failing)} where it "
                "failed)"
            )
        else:
            yield "minutes: no boot of this target is in the archive"


def _same(made: BootRequest, request: BootRequest) -> bool:
    """A boot answers what is asked for, whichever ladder it was made for."""
    return (made.shape, made.windows, made.pool) == (request.shape, request.windows, request.pool)


_PARTS: Final = {
    "schema_version": "records of another layout",
    "plugin_version": "another release of pytest-kvbudget",
    "host": "another host",
    "devices": "other devices",
    "driver": "another driver",
    "engine": "another build of the engine",
    "image": "another image",
    "target": "another configuration or environment",
    "asked": "the test asks something else (marks, body, fixtures)",
}
_UNTOLD: Final = {"driver": "the driver", "engine": "the engine's build", "asked": "what the test asks"}
_TOLD = {
    "nothing": "nothing is known beforehand",
    "plan": "the plan says where to begin",
    "archive": "an earlier finding says where to begin",
}
