"""A headroom sweep: the best value of a knob that passes on a grid, moved by the class of each failure.

A sweep is a ladder seen in a mirror. What ends the way to the goal is the ladder's failure; everything else, a boot
that passed or one that failed for the opposite reason, is on the other side of that edge. Whether the last of those
passed decides between a proof and an empty window.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from pytest_kvbudget.search import sweep_sentences
from pytest_kvbudget.search.bracket import rung_of
from pytest_kvbudget.search.ladder import Ladder, as_short
from pytest_kvbudget.search.lever import stays_short
from pytest_kvbudget.search.model import Axis, Hint, SweepFinding, SweepKey, Trial
from pytest_kvbudget.search.predict import Predict
from pytest_kvbudget.search.rungs import COUNTED
from pytest_kvbudget.search.strategies import OneStep
from pytest_kvbudget.verdict import FindingKind, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_kvbudget.search.knobs import Knob, Side
    from pytest_kvbudget.search.log import Ask
    from pytest_kvbudget.search.model import Finding, SetBound, Strategy
    from pytest_kvbudget.search.noise import Noise

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
        self._words = sweep_sentences.words(self.knob, self._mirror)
        self._fine_step, self._confirm, self._max_boots = fine_step, confirm, max_boots
        self._noise, self._cold_extra_bytes, self._classes = noise, cold_extra_bytes, classes
        self._key, self._maximum = key or SweepKey(), maximum
        self._strategy = strategy or Predict(spare=1)
        if start is not None and isinstance(self._strategy, (Predict, OneStep)):
            self._strategy = replace(self._strategy, first=self._mirror(start))
        self._told: list[Trial] = []
        """Every boot as the ladder sees it, on both grids."""
        self._booted: dict[int, Trial] = {}
        """The last boot of each value as it was told."""
        self._stop: str | None = None
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
        seen = as_short(seen) if short else seen
        tell(seen)
        self._told.append(seen)
        self._booted[trial.value] = msgspec.structs.replace(trial, short=short)
        self._reused += trial.reused
        if trial.verdict is Verdict.FAIL and side is None:
            self._stop = sweep_sentences.stopped(self.knob, trial)

    def finding(self) -> SweepFinding:
        """What the boots so far prove; ``undecided`` while that is incomplete."""
        found = self._ladder.finding()
        kind, reason = self._outcome(found)
        first, failed_at = self._coarse, self._ladder.ends[1]
        shorts = {trial.value: trial for trial in self._counted() if trial.short}
        proof = max((t.value for t in self._ladder.history if t.passed and t.value not in shorts), default=None)
        short_at = max(shorts, default=None)
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
            failed_at=None if failed_at is None else self._mirror(failed_at),
            bounded_by=None if failed_at is None else found.bounded_by,
            short_at=None if short_at is None else self._mirror(short_at),
            short_by=None if short_at is None else shorts[short_at].cause,
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
            lever=sweep_sentences.other_lever(self.knob, kind, found.bounded_by, shorts.values()),
            sets=tuple(map(self._mirrored, found.sets)),
            notes=(
                *(note for note in found.notes if not note.startswith("rungs above")),
                *(("no value keeps three sigma from both edges",) if no_room and proof is not None else ()),
                *self._unrefined(kind),
            ),
            sentence="",
        )
        return msgspec.structs.replace(finding, sentence=sweep_sentences.of(self.knob, finding, reason))

    # -- the mirror

    def _mirror(self, value: int) -> int:
        """The ladder's value for the knob's, and back: larger is nearer to the goal."""
        return value if self.knob.goal == "most" else self.highest + self.step - value

    def _mirrored(self, bound: SetBound) -> SetBound:
        values = {name: getattr(bound, name) for name in ("passed", "failed_at", "short_at")}
        back = {name: None if value is None else self._mirror(value) for name, value in values.items()}
        return msgspec.structs.replace(bound, **back)

    def _counted(self) -> list[Trial]:
        """Boots on the device sets that count."""
        home = self._ladder.home
        return [trial for trial in self._told if home is None or trial.device_set in {None, home}]

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
                rate = limit.bytes_per_unit
                if limit.name in other and rate is not None and rate > 0 and (limit.margin_bytes < 0) == trial.short:
                    edges.append(self._mirror(value) - limit.margin_bytes / rate)
        return max(edges, default=None)

    # -- the search

    def _new_ladder(self, axis: Axis, known: tuple[Trial, ...], *, confirm: int, home: str | None = None) -> Ladder:
        return Ladder(
            axis,
            self._strategy,
            confirm=confirm,
            max_boots=self._max_boots,
            spent=self._coarse.boots if self._coarse else 0,
            noise=self._noise,
            cold_extra_bytes=self._cold_extra_bytes,
            two_sided=False,
            known=known,
            before=self._told,
            home=home,
            words=self._words,
        )

    def _asks(self, count: int) -> tuple[Ask, ...]:
        if self._stop is not None:
            return ()
        if isinstance(self._ladder.strategy, Predict):
            told = [trial for trial in self._booted.values() if trial.verdict in COUNTED]
            self._ladder.strategy = replace(
                self._ladder.strategy,
                sight=self._sight(),
                only_the_end=stays_short(told, OTHER_SIDE_LIMITS[self.knob.ends_at]),
            )
        return self._ladder.next_batch(count)

    def _refine(self) -> bool:
        """Go on between the proof's neighbours on the finer grid, once."""
        if self._fine_step is None or self._coarse is not None or self._ladder.limit is not None:
            return False
        found = self._ladder.finding()
        if self._outcome(found)[0] is not FindingKind.PROVEN or found.value is None or found.failed_at is None:
            return False
        axis = msgspec.structs.replace(
            found.axis, floor=found.value, ceiling=found.failed_at, quantum=self._fine_step, fine=None
        )
        known = tuple(trial for trial in self._ladder.history if trial.value in {found.value, found.failed_at})
        self._coarse = found
        self._strategy = replace(self._strategy, first=None) if isinstance(self._strategy, Predict) else self._strategy
        # the finer grid's ends hold for the sets that they were booted on
        kinds = {trial.device_set for trial in known}
        home = self._ladder.home or (kinds.pop() if len(kinds) == 1 else None)
        self._ladder = self._new_ladder(axis, known, confirm=self._confirm, home=home)
        return True

    def _unrefined(self, kind: FindingKind) -> tuple[str, ...]:
        """Why the finer grid that was asked for has not been booted, where the coarse one is proven."""
        limit, fine = self._ladder.limit, self._fine_step
        if fine is None or self._coarse is not None or limit is None or kind is not FindingKind.PROVEN:
            return ()
        return (f"nothing was booted in steps of {self.knob.show(fine)}: {limit}",)

    # -- how it ends

    def _outcome(self, found: Finding) -> tuple[FindingKind, str]:
        kind, reason = self._ladder.outcome()
        if kind is not FindingKind.ERROR and self._stop is not None:
            return FindingKind.UNDECIDED, self._stop
        return self._ended(found, kind, reason)

    def _ended(self, found: Finding, kind: FindingKind, reason: str) -> tuple[FindingKind, str]:
        """The ladder's kind as the sweep's."""
        if kind is FindingKind.CEILING_REACHED and found.axis.ceiling != self._base.ceiling:
            # the finer grid ends where the coarse one failed: on sets whose boots do not count any more
            end = self.knob.show(self._mirror(found.axis.ceiling))
            return FindingKind.UNDECIDED, (
                f"device sets differ: {self.knob.name} {end} failed on another and passed on {self._ladder.home}, "
                "where nothing beyond it was booted"
            )
        if kind is FindingKind.CEILING_REACHED:
            return (FindingKind.FLOOR_REACHED if self.knob.goal == "least" else kind), ""
        if kind is FindingKind.FLAKY:
            steady, refused = (None if v is None else self._mirror(v) for v in (found.steady_value, found.refused_at))
            return kind, sweep_sentences.band(self.knob, reason, steady, refused)
        return kind, reason
