"""A headroom sweep: the best value of a knob that passes on a grid, moved by the class of each failure.

A sweep is a ladder seen in a mirror. What ends the way to the goal is the ladder's failure; everything else, a boot
that passed or one that failed for the opposite reason, is on the other side of that edge. Whether the last of those
passed decides between a proof and an empty window.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from pytest_kvbudget.search import sweep_sentences
from pytest_kvbudget.search.bracket import rung_of
from pytest_kvbudget.search.ladder import Ladder
from pytest_kvbudget.search.lever import BEYOND
from pytest_kvbudget.search.model import Axis, Hint, SweepFinding, SweepKey, Trial
from pytest_kvbudget.search.predict import Predict
from pytest_kvbudget.search.rungs import COUNTED
from pytest_kvbudget.search.strategies import OneStep
from pytest_kvbudget.verdict import FindingKind, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_kvbudget.search.knobs import Knob, Side
    from pytest_kvbudget.search.log import Ask
    from pytest_kvbudget.search.model import Finding, Strategy
    from pytest_kvbudget.search.noise import Noise

ENOUGH_TOLD: Final = 2
"""Boots of a value that must agree before two values are said to contradict each other."""
OTHER_SIDE_LIMITS = MappingProxyType(
    {"allocation": frozenset({"kv_check"}), "minimum_kv": frozenset({"device_memory", "compile"})}
)
"""Limits of a hint that belong to the failures opposite to the side that ends a knob's way."""


class Sweep:
    """Asks for boots until the best passing value is proven or cannot be; values are in the knob's whole numbers."""

    def __init__(
        self,
        knob: Knob,
        *,
        lowest: int,
        highest: int,
        step: int | None = None,
        fine_step: int | None = None,
        start: int | None = None,
        maximum: int | None = None,
        strategy: Strategy | None = None,
        confirm: int = 1,
        max_boots: int | None = None,
        noise: Noise | None = None,
        cold_extra_bytes: float | None = 0,
        classes: Mapping[str, Side] = MappingProxyType({}),
        key: SweepKey | None = None,
    ) -> None:
        """A sweep that has not booted anything yet.

        Args:
            knob: what is turned.
            lowest: smallest value of the grid.
            highest: largest value of the grid.
            step: of the grid; the knob's own by default. The grid begins at the goal's end.
            fine_step: a second, finer grid between the proof's two neighbours.
            start: value to boot first, put on the grid.
            maximum: value that arithmetic allows at most (``maximum_headroom``), or at least for a fraction: beyond
                it the opposite failure is expected, so nothing is booted there unless a proof needs it.
            strategy: chooses among the values, `Predict` by default.
            confirm: further boots of the winner after the proof.
            max_boots: stop after this many boots, confirmations included.
            noise: as `Ladder`.
            cold_extra_bytes: as `Ladder`.
            classes: sides of the caller's own failure classes.
            key: what the result belongs to.

        Raises:
            ValueError: for a grid that is none, a fine step that is no finer, or a start outside.
        """
        step = knob.default_step if step is None else step
        if step < 1 or not 0 <= lowest <= highest:
            raise ValueError(
                f"{knob.name} from {knob.show(lowest)} to {knob.show(highest)} in steps of {step}; expected a step of "
                "1 or more and a lowest value of 0 or more, not above the highest"
            )
        if fine_step is not None and not 0 < fine_step < step:
            raise ValueError(f"fine_step is {knob.show(fine_step)}; expected above 0 and below {knob.show(step)}")
        if start is not None and not lowest <= start <= highest:
            raise ValueError(f"start is {knob.show(start)}; expected {knob.show(lowest)} to {knob.show(highest)}")
        self.knob = knob.in_unit_of(lowest, highest, step, fine_step or step)
        self.lowest, self.highest, self.step = lowest, highest, step
        self._fine_step, self._confirm, self._max_boots = fine_step, confirm, max_boots
        self._noise, self._cold_extra_bytes, self._classes = noise, cold_extra_bytes, classes
        self._key, self._maximum = key or SweepKey(), maximum
        self._strategy = strategy or Predict(spare=1)
        if start is not None and isinstance(self._strategy, (Predict, OneStep)):
            self._strategy = replace(self._strategy, first=self._mirror(start))
        self._short: dict[int, Trial] = {}
        """Values that failed for the opposite reason."""
        self._passed: dict[int, Trial] = {}
        self._booted: dict[int, Trial] = {}
        self._told: dict[int, list[str]] = {}
        """What came of each boot of a value: ``short``, ``passed`` or ``failed``."""
        self._stop: str | None = None
        self._halted = False
        self._reused = 0
        self._coarse: Finding | None = None
        ends = sorted((self._mirror(lowest), self._mirror(highest)))
        axis = Axis(name=knob.name, floor=ends[0], ceiling=ends[1], quantum=step, scale=knob.scale)
        self._base = axis
        self._ladder = self._new_ladder(axis, (), confirm=0 if fine_step else confirm)

    def next(self) -> Ask | None:
        """The boot that is wanted now, its value in the knob's unit; ``None`` when the sweep is at its end."""
        return next(iter(self.next_batch(1)), None)

    def next_batch(self, count: int) -> tuple[Ask, ...]:
        """The boots that are wanted now with ``count`` free device sets, those not yet told of first."""
        asks = self._asks(count)
        if not asks and self._refine():
            asks = self._asks(count)
        return tuple(msgspec.structs.replace(ask, value=self._mirror(ask.value)) for ask in asks)

    def moot(self) -> tuple[int, ...]:
        """Values under way whose verdicts can change nothing any more, see `Ladder.moot`."""
        return tuple(map(self._mirror, self._ladder.moot()))

    def drop(self, value: int) -> None:
        """A boot under way was called off.

        Raises:
            ValueError: no boot of this value is under way.
        """
        self._ladder.drop(self._mirror(value))

    def halt(self, reason: str) -> None:
        """Want no further boot: something outside the search ends it. What is proven by then stays proven."""
        self._halted = True
        self._ladder.halt(reason)

    def is_rung(self, value: int) -> bool:
        """The value is on the coarse grid."""
        return rung_of(self._base, self._mirror(value)) is not None

    def know(self, trial: Trial) -> None:
        """Take a boot that nobody asked for, before the first one is asked for.

        Raises:
            ValueError: a boot was asked for already, or it has no verdict.
        """
        self._take(trial, self._ladder.know)

    def tell(self, trial: Trial) -> None:
        """Take the outcome of a boot that was asked for.

        Raises:
            ValueError: it was not asked for.
        """
        self._take(trial, self._ladder.tell)

    def _take(self, trial: Trial, tell: Callable[[Trial], None]) -> None:
        side = self.knob.side(trial.cause, self._classes) if trial.verdict is Verdict.FAIL else None
        seen = msgspec.structs.replace(trial, value=self._mirror(trial.value), hint=self._seen_hint(trial.hint))
        short = trial.verdict is Verdict.FAIL and side == self.knob.other_side
        tell(msgspec.structs.replace(seen, verdict=Verdict.PASS, hint=BEYOND) if short else seen)
        self._booted[trial.value] = trial
        self._reused += trial.reused
        if trial.verdict in COUNTED:
            self._told.setdefault(trial.value, []).append("short" if short else "passed" if trial.passed else "failed")
        if short:
            self._short[trial.value] = trial
        elif trial.passed:
            self._passed[trial.value] = trial
        elif trial.verdict is Verdict.FAIL and side is None:
            self._stop = sweep_sentences.stopped(self.knob, trial)

    def finding(self) -> SweepFinding:
        """What the boots so far prove; ``undecided`` while that is incomplete."""
        found = self._ladder.finding()
        kind, reason = self._outcome(found)
        first = self._coarse
        short = {self._mirror(value) for value in self._short}
        proof = max((t.value for t in self._ladder.history if t.passed and t.value not in short), default=None)
        short_at = max(short, default=None)
        no_room = proof is None or (
            found.deploy_value is not None and short_at is not None and found.deploy_value <= short_at
        )
        finding = SweepFinding(
            kind=kind,
            knob=self.knob.name,
            lowest=self.lowest,
            highest=self.highest,
            step=found.axis.quantum,
            unit_bytes=self.knob.unit_bytes,
            coarse_step=None if first is None else first.axis.quantum,
            key=self._key,
            value=None if proof is None else self._mirror(proof),
            failed_at=None if found.failed_at is None else self._mirror(found.failed_at),
            bounded_by=found.bounded_by,
            short_at=None if short_at is None else self._mirror(short_at),
            short_by=None if short_at is None else self._short[self._mirror(short_at)].cause,
            boots=found.boots + (first.boots if first else 0),
            retries=found.retries + (first.retries if first else 0),
            repeats=found.repeats + (first.repeats if first else 0),
            confirmations=found.confirmations,
            reused=self._reused,
            sigma_bytes=found.sigma_bytes,
            sigma_source=found.sigma_source,
            deploy_value=None if found.deploy_value is None or no_room else self._mirror(found.deploy_value),
            steady_value=None if found.steady_value is None else self._mirror(found.steady_value),
            refused_at=None if found.refused_at is None else self._mirror(found.refused_at),
            lever=sweep_sentences.other_lever(self.knob, kind, found, self._short.values()),
            notes=(
                *(note for note in found.notes if not note.startswith("rungs above")),
                *(("no value keeps three sigma from both edges",) if no_room and proof is not None else ()),
            ),
            sentence="",
        )
        return msgspec.structs.replace(finding, sentence=sweep_sentences.of(self.knob, finding, reason))

    # -- the mirror

    def _mirror(self, value: int) -> int:
        """The ladder's value for the knob's, and back: larger is nearer to the goal."""
        return value if self.knob.goal == "most" else self.highest + self.step - value

    def _seen_hint(self, hint: Hint) -> Hint:
        """What bears on the edge that is searched."""
        other = OTHER_SIDE_LIMITS[self.knob.ends_at]
        return Hint(
            limits=tuple(limit for limit in hint.limits if limit.name not in other),
            estimate=None if hint.estimate is None else self._mirror(hint.estimate),
        )

    def _sight(self) -> float | None:
        """The ladder's value below which the opposite failure is expected, by arithmetic and by what boots stated."""
        edges: list[float] = [] if self._maximum is None else [self._mirror(self._maximum)]
        other = OTHER_SIDE_LIMITS[self.knob.ends_at]
        for value, trial in self._booted.items():
            for limit in trial.hint.limits:
                rate, short = limit.bytes_per_unit, value in self._short
                if limit.name in other and rate is not None and rate > 0 and (limit.margin_bytes < 0) == short:
                    edges.append(self._mirror(value) - limit.margin_bytes / rate)
        return max(edges, default=None)

    # -- the search

    def _new_ladder(self, axis: Axis, known: tuple[Trial, ...], *, confirm: int) -> Ladder:
        booted = self._coarse.boots if self._coarse else 0
        return Ladder(
            axis,
            self._strategy,
            confirm=confirm,
            max_boots=None if self._max_boots is None else max(1, self._max_boots - booted),
            noise=self._noise,
            cold_extra_bytes=self._cold_extra_bytes,
            two_sided=False,
            known=known,
            show=lambda value: self.knob.show(self._mirror(value)),
        )

    def _asks(self, count: int) -> tuple[Ask, ...]:
        if self._stop is not None:
            return ()
        pair = self._clash()
        if pair is not None:
            doubted = [value for value in pair if len(self._told[value]) < ENOUGH_TOLD]
            if self._noise is None or self._flipped(pair) or not doubted:
                return ()
            return self._ladder.again(self._mirror(doubted[0]))
        if isinstance(self._ladder.strategy, Predict):
            self._ladder.strategy = replace(self._ladder.strategy, sight=self._sight())
        asks = self._ladder.next_batch(count)
        # what failed for the opposite reason is no winner to confirm
        return tuple(ask for ask in asks if ask.why != "confirm" or self._mirror(ask.value) not in self._short)

    def _refine(self) -> bool:
        """Go on between the proof's neighbours on the finer grid, once."""
        if self._fine_step is None or self._coarse is not None or self._halted:
            return False
        found = self._ladder.finding()
        if self._outcome(found)[0] is not FindingKind.PROVEN or found.value is None or found.failed_at is None:
            return False
        axis = msgspec.structs.replace(
            found.axis, floor=found.value, ceiling=found.failed_at, quantum=self._fine_step, fine=None
        )
        known = tuple(trial for trial in self._ladder.history if trial.value in {found.value, found.failed_at})
        if self._max_boots is not None and found.boots >= self._max_boots:
            return False
        self._coarse = found
        self._strategy = replace(self._strategy, first=None) if isinstance(self._strategy, Predict) else self._strategy
        self._ladder = self._new_ladder(axis, known, confirm=self._confirm)
        return True

    # -- how it ends

    def _clash(self) -> tuple[int, int] | None:
        """A value that failed for the opposite reason nearer to the goal than one that passed, and that one."""
        short = max((self._mirror(value) for value in self._short), default=None)
        passed = min((self._mirror(value) for value in self._passed), default=None)
        if short is None or passed is None or short < passed:
            return None
        return self._mirror(short), self._mirror(passed)

    def _flipped(self, pair: tuple[int, int]) -> bool:
        """Another boot of one of the two ended differently."""
        return any(len(set(self._told[value])) > 1 for value in pair)

    def _outcome(self, found: Finding) -> tuple[FindingKind, str]:
        kind, reason = self._ladder.outcome()
        pair = self._clash()
        if kind is not FindingKind.ERROR and self._stop is not None:
            return FindingKind.UNDECIDED, self._stop
        if kind is not FindingKind.ERROR and pair is not None:
            return self._clashed(pair, reason)
        return self._ended(found, kind, reason)

    def _clashed(self, pair: tuple[int, int], reason: str) -> tuple[FindingKind, str]:
        """How a sweep ends in which two values contradict each other."""
        if self._flipped(pair):
            return FindingKind.FLAKY, sweep_sentences.flipped(self.knob, *pair)
        twice = all(len(self._told[value]) >= ENOUGH_TOLD for value in pair)
        if twice or self._noise is None:
            return FindingKind.NON_MONOTONE, sweep_sentences.contradiction(self.knob, *pair, twice=twice)
        return FindingKind.UNDECIDED, reason or "not all boots are done"

    def _ended(self, found: Finding, kind: FindingKind, reason: str) -> tuple[FindingKind, str]:
        """The ladder's kind as the sweep's."""
        short = found.value is not None and self._mirror(found.value) in self._short
        goal = FindingKind.FLOOR_REACHED if self.knob.goal == "least" else FindingKind.CEILING_REACHED
        if kind is FindingKind.PROVEN:
            return (FindingKind.EMPTY_WINDOW if short else kind), ""
        if kind is FindingKind.CEILING_REACHED:
            return (FindingKind.EMPTY if short else goal), ""
        if kind is FindingKind.FLAKY:
            steady, refused = (None if v is None else self._mirror(v) for v in (found.steady_value, found.refused_at))
            return kind, sweep_sentences.band(self.knob, reason, steady, refused)
        return kind, reason
