"""What all boots of one rung say together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from pytest_kvbudget.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_kvbudget.search.model import Axis, Trial

COUNTED: Final = frozenset({Verdict.PASS, Verdict.MARGINAL, Verdict.FAIL})
FLAKY_RUNGS: Final = 3
"""Mixed rungs that make a boundary flaky."""
FLAKY_QUANTA: Final = 3
"""Width of a band of mixed rungs above which it is flaky."""


class RungState(StrEnum):
    """What the boots of a rung amount to."""

    GOOD = "good"
    BAD = "bad"
    MIXED = "mixed"
    """Passed and failed: counts as bad."""


@dataclass(frozen=True)
class Rung:
    """The boots of one value that had a verdict, in boot order."""

    value: int
    trials: tuple[Trial, ...]

    @property
    def counted(self) -> tuple[Trial, ...]:
        """Without cold failures where a boot with a warm cache came after: a first boot takes more."""
        if not any(trial.warm for trial in self.trials):
            return self.trials
        return tuple(trial for trial in self.trials if trial.passed or trial.warm is not False)

    @property
    def passes(self) -> tuple[Trial, ...]:
        """The boots that passed."""
        return tuple(trial for trial in self.counted if trial.passed)

    @property
    def failures(self) -> tuple[Trial, ...]:
        """The boots that failed for memory or by the test's gate."""
        return tuple(trial for trial in self.counted if not trial.passed)

    @property
    def state(self) -> RungState:
        """Good, bad or mixed."""
        if not self.failures:
            return RungState.GOOD
        return RungState.MIXED if self.passes else RungState.BAD

    @property
    def trial(self) -> Trial:
        """The boot that speaks for the rung: the last failure where there is one, else the last pass."""
        return (self.failures or self.passes)[-1]

    @property
    def short(self) -> Trial | None:
        """The last boot that failed for want of more; ``None`` where none did."""
        return next((trial for trial in reversed(self.passes) if trial.short), None)

    @property
    def served(self) -> bool:
        """It really passed, now and then at least."""
        return any(trial.served for trial in self.passes)

    @property
    def endings(self) -> list[tuple[bool, bool]]:
        """How each boot ended: whether it passed, and whether it failed for want of more."""
        return [(trial.passed, trial.short) for trial in self.counted]

    @property
    def cold_only(self) -> bool:
        """It failed, and only with nothing in the compile cache."""
        return bool(self.failures) and all(trial.warm is False for trial in self.failures)

    @property
    def repeated(self) -> bool:
        """Two boots agree in verdict, warmth and device set."""
        keys = [(trial.passed, trial.warm, trial.device_set) for trial in self.counted]
        return len(keys) > len(set(keys))

    @property
    def sets(self) -> frozenset[str | None]:
        """Device sets on which its state was established."""
        return frozenset(trial.device_set for trial in self.failures or self.passes)


def rungs_of(trials: Iterable[Trial]) -> dict[int, Rung]:
    """The rungs by value, in the order of their first boot."""
    by_value: dict[int, list[Trial]] = {}
    for trial in trials:
        if trial.verdict in COUNTED:
            by_value.setdefault(trial.value, []).append(trial)
    return {value: Rung(value, tuple(found)) for value, found in by_value.items()}


def clash(rungs: Iterable[Rung]) -> tuple[Rung, Rung] | None:
    """Lowest rung that is not good and highest good one, where the latter is the higher; ``None`` where none is."""
    known = list(rungs)
    failed = min((rung for rung in known if rung.state is not RungState.GOOD), key=_value, default=None)
    passed = max((rung for rung in known if rung.state is RungState.GOOD), key=_value, default=None)
    if failed is None or passed is None or failed.value > passed.value:
        return None
    return failed, passed


def short_clash(rungs: Iterable[Rung]) -> tuple[Rung, Rung] | None:
    """Highest rung that failed for want of more and lowest that passed, where the latter is no higher."""
    known = list(rungs)
    short = max((rung for rung in known if rung.short is not None), key=_value, default=None)
    passed = min((rung for rung in known if rung.served), key=_value, default=None)
    if short is None or passed is None or short.value < passed.value:
        return None
    return short, passed


def apart(rungs: Iterable[Rung]) -> str | None:
    """The device set of a pass that contradicts a failure on other sets: a boot is another boot on each of them.

    Of two failures of opposite reasons that contradict each other, that of the one for want of more. ``None`` where
    nothing is contradicted, or where it is on one set, or on sets that nobody tells apart.
    """
    known = list(rungs)
    pairs = [(rung.failures, rung.passes) for rung in known if rung.state is RungState.MIXED]
    found, low = clash(known), short_clash(known)
    if found is not None:
        pairs.append((found[0].failures, found[1].passes))
    if low is not None:
        short, passed = low
        pairs.append((_those(short.passes, short=True), _those(passed.passes, short=False)))
    for against, passes in pairs:
        there, elsewhere = {trial.device_set for trial in passes}, {trial.device_set for trial in against}
        if None not in there | elsewhere and there.isdisjoint(elsewhere):
            return min(str(name) for name in there)
    return None


def _those(trials: Iterable[Trial], *, short: bool) -> tuple[Trial, ...]:
    return tuple(trial for trial in trials if trial.short is short)


def flaky(rungs: Iterable[Rung], quantum: int) -> str | None:
    """Why no single boundary can be told, ``None`` where it can."""
    mixed = sorted(rung.value for rung in rungs if rung.state is RungState.MIXED)
    if len(mixed) >= FLAKY_RUNGS:
        return f"{len(mixed)} rungs passed and failed"
    if mixed and mixed[-1] - mixed[0] > FLAKY_QUANTA * quantum:
        return "rungs more than three quanta apart passed and failed"
    return None


def steady_rung(axis: Axis, rungs: Sequence[Rung]) -> tuple[int, int] | None:
    """Value below all failures that could pass three of three, and its passes so far; ``None`` below the floor."""
    lowest = min((rung.value for rung in rungs if rung.failures), default=axis.ceiling + 1)
    below = max((rung for rung in rungs if rung.value < lowest), key=_value, default=None)
    if below is not None:
        return below.value, len(below.passes)
    index = axis.index_at_or_below(lowest - 1)
    return None if index < 0 else (axis.value(index), 0)


def refused_rung(axis: Axis, rungs: Sequence[Rung]) -> tuple[int, int] | None:
    """Value above all passes that could fail two of two, and its failures so far; ``None`` above the ceiling."""
    highest = max((rung.value for rung in rungs if rung.passes), default=axis.floor - 1)
    above = min((rung for rung in rungs if rung.value > highest), key=_value, default=None)
    if above is not None:
        return above.value, len(above.failures)
    index = axis.index_at_or_below(highest) + 1
    return None if index >= len(axis) else (axis.value(index), 0)


def _value(rung: Rung) -> int:
    return rung.value
