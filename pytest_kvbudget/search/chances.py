"""How likely each rung of an open bracket is to pass, and which rungs to boot together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from pytest_kvbudget.search.outlook import Outlook

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_kvbudget.search.bracket import Bracket
    from pytest_kvbudget.search.model import Axis, Prior, Trial

QUANTILES: Final = 32
"""Rungs of equal chances among which a batch looks, beside the neighbours of what it has."""


@dataclass(frozen=True)
class Chances:
    """The outlook, given what the verdicts leave open."""

    axis: Axis
    bracket: Bracket
    outlook: Outlook

    @classmethod
    def of(cls, axis: Axis, history: Sequence[Trial], bracket: Bracket, prior: Prior | None) -> Chances:
        """After ``history``, whose bracket is ``bracket``."""
        return cls(axis, bracket, Outlook.of(axis, history, bracket, prior))

    @cached_property
    def _ends(self) -> tuple[float, float]:
        low, high = self.bracket.low, self.bracket.high
        top = self.outlook.above(self.axis.value(high)) if high < len(self.axis) else 0.0
        bottom = self.outlook.above(self.axis.value(low)) if low >= 0 else 1.0
        return top, bottom

    def passes(self, index: int) -> float:
        """Chance that a rung passes: 1 up to the bracket, 0 from its end on."""
        if index <= self.bracket.low or index >= self.bracket.high:
            return float(index <= self.bracket.low)
        top, bottom = self._ends
        return (self.outlook.above(self.axis.value(index)) - top) / (bottom - top)

    def last(self, index: int) -> float:
        """Chance that a rung is the last to pass."""
        return self.passes(index) - self.passes(index + 1)

    def quantile(self, share: float) -> int:
        """Lowest rung of the bracket with no more than this chance to pass; the highest one where none has."""
        low, high = self.bracket.low + 1, self.bracket.high - 1
        while low < high:
            middle = (low + high) // 2
            if self.passes(middle) <= share:
                high = middle
            else:
                low = middle + 1
        return low

    def median(self) -> int:
        """Lowest rung with no more than an even chance."""
        return self.quantile(0.5)


def next_of_batch(chances: Chances, chosen: Sequence[int], sets: int) -> int:
    """The rung that, booted together with those chosen, leaves least to do: rounds with ``sets`` boots each."""
    return min(sorted(_candidates(chances, chosen)), key=lambda index: _left(chances, sorted((*chosen, index)), sets))


def _candidates(chances: Chances, chosen: Sequence[int]) -> Iterator[int]:
    bracket = chances.bracket
    wanted = {chances.quantile(step / QUANTILES) for step in range(1, QUANTILES)}
    wanted |= {index + off for index in (*chosen, chances.median()) for off in (-1, 1)}
    wanted |= {bracket.low + 1, bracket.high - 1, chances.median()}
    free = {index for index in wanted if bracket.low < index < bracket.high} - set(chosen)
    if free:
        yield from free
    else:
        yield next(index for index in range(bracket.low + 1, bracket.high) if index not in chosen)


def _left(chances: Chances, probes: Sequence[int], sets: int) -> float:
    """Rounds expected after these: one for each part that stays open, and more the more even its chances are."""
    edges = [chances.bracket.low, *probes, chances.bracket.high]
    expected = 0.0
    for low, high in pairwise(edges):
        likely = chances.passes(low) - chances.passes(high)
        if high - low > 1 and likely > 0:
            expected += likely * (1 + _entropy(chances, low, high, likely) / math.log2(sets + 1))
    return round(expected, 9)


def _entropy(chances: Chances, low: int, high: int, likely: float) -> float:
    """Bits in which rung of a part is the last to pass; long parts are taken in pieces of equal length."""
    count = high - low
    step = max(1, count // QUANTILES)
    bits = 0.0
    for start in range(low, high, step):
        end = min(start + step, high)
        share = (chances.passes(start) - chances.passes(end)) / likely
        if share > 0:
            bits += share * math.log2((end - start) / share)
    return max(0.0, bits)
