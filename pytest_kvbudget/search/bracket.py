"""Where the boundary of a ladder still can be, from the verdicts alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_kvbudget.search.model import Axis, Trial


@dataclass(frozen=True)
class Bracket:
    """The rungs between the largest that passed and the smallest above it that failed, both ends exclusive."""

    low: int
    """Index of the largest rung that passed; -1 where none did."""
    high: int
    """Index of the smallest rung above ``low`` that failed; the number of rungs where none did."""

    @property
    def candidates(self) -> int:
        """How many answers are still possible: each index from ``low`` to ``high - 1`` can be the last to pass."""
        return self.high - self.low

    @property
    def closed(self) -> bool:
        """Nothing is left to boot: two neighbours are known, or an end of the axis is reached."""
        return self.candidates == 1


def rung_of(axis: Axis, value: int) -> int | None:
    """Index of the rung with exactly this value, ``None`` where the axis has none."""
    index = axis.index_at_or_below(value)
    return index if index >= 0 and axis.value(index) == value else None


def counts(axis: Axis, value: int) -> bool:
    """A boot at this value says where the boundary is: it is a rung, or was one before the quantum was raised."""
    asked = axis if axis.fine is None else replace(axis, quantum=axis.fine, fine=None)
    return any(rung_of(rungs, value) is not None for rungs in (axis, asked))


def bracket_of(axis: Axis, history: Iterable[Trial]) -> Bracket:
    """The bracket that a history of PASS, MARGINAL and FAIL leaves.

    A value between two rungs bounds what lies beyond it: what passed there is as good as a pass of the rung below, what
    failed as good as a failure of the rung above. In a history that contradicts itself the largest pass wins;
    `contradiction` tells.
    """
    known = [trial for trial in history if counts(axis, trial.value)]
    low = max((axis.index_at_or_below(trial.value) for trial in known if trial.passed), default=-1)
    highest = max((trial.value for trial in known if trial.passed), default=None)
    above = (trial.value for trial in known if not trial.passed and (highest is None or trial.value > highest))
    high = min(map(axis.index_at_or_above, above), default=len(axis))
    return Bracket(low, high)


def contradiction(history: Iterable[Trial]) -> tuple[Trial, Trial] | None:
    """A trial that failed at or below one that passed, lowest failure and highest pass; ``None`` where none did."""
    trials = list(history)
    failed = min((trial for trial in trials if not trial.passed), key=lambda trial: trial.value, default=None)
    passed = max((trial for trial in trials if trial.passed), key=lambda trial: trial.value, default=None)
    if failed is None or passed is None or failed.value > passed.value:
        return None
    return failed, passed


def bisection_boots(candidates: int) -> int:
    """Boots that tell ``candidates`` possible answers apart in the worst case: ceil(log2(candidates))."""
    return (candidates - 1).bit_length()


def boot_bound(axis: Axis) -> int:
    """The most search boots that `Predict` may need on this axis: ceil(log2(n + 1)) + 2 for n rungs."""
    return bisection_boots(len(axis) + 1) + 2
