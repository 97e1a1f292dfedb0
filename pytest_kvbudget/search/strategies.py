"""The ways to choose the next rung, by the word users type for them."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from pytest_kvbudget.search.bracket import bracket_of, counts
from pytest_kvbudget.search.predict import Predict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_kvbudget.search.model import Axis, Strategy, Trial

STEP_DOWN_RUNGS: Final = 4
"""Rungs down after a failure: 16,384 tokens at a quantum of 4,096 (RDNA4 budget document, section 6 point 5)."""


@dataclass(frozen=True)
class Step:
    """The RDNA4 budget document's ladder: four rungs down after a failure, one up after each pass."""

    name: str = "step"

    def next_index(self, axis: Axis, history: tuple[Trial, ...]) -> int | None:
        """The ceiling first; up ends at a failure or a rung already known, down ends at the floor."""
        bracket = bracket_of(axis, history)
        if bracket.closed:
            return None
        if bracket.high == len(axis):
            return len(axis) - 1
        # a reference rung passed before the ladder began, and is no pass to climb from until the ladder came down to it
        last = next(trial for trial in reversed(history) if counts(axis, trial.value))
        return bracket.low + 1 if last.passed else max(bracket.high - STEP_DOWN_RUNGS, bracket.low + 1)


@dataclass(frozen=True)
class Bisect:
    """Halves the rungs that are left; needs nothing but verdicts."""

    name: str = "bisect"

    def next_index(self, axis: Axis, history: tuple[Trial, ...]) -> int | None:
        """The rung that leaves as many answers above as below."""
        bracket = bracket_of(axis, history)
        return None if bracket.closed else (bracket.low + bracket.high) // 2


@dataclass(frozen=True)
class OneStep:
    """The Neuron document's tuning: one step of the grid at a time, the way that each boot points."""

    first: int | None = None
    """Value to boot first, as a sweep sees it; ``None`` for the one farthest from the goal."""
    name: str = "step"

    def next_index(self, axis: Axis, history: tuple[Trial, ...]) -> int | None:
        """Up after a pass, down after a failure, until both ends of the bracket are known."""
        bracket = bracket_of(axis, history)
        if bracket.closed:
            return None
        if not history:
            return 0 if self.first is None else max(0, axis.index_at_or_below(self.first))
        return bracket.low + 1 if bracket.low >= 0 else bracket.high - 1


STRATEGIES: Final[Mapping[str, Strategy]] = MappingProxyType(
    {strategy.name: strategy for strategy in (Predict(), Step(), Bisect())}
)
"""The strategies by name, the default first."""

SWEEP_STRATEGIES: Final[Mapping[str, Strategy]] = MappingProxyType(
    {strategy.name: strategy for strategy in (Predict(), OneStep(), Bisect())}
)
"""The same for headroom sweeps."""
