"""How likely each rung of an open bracket is to pass, and which rungs to boot together."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from pytest_kvbudget.search.outlook import Outlook

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_kvbudget.search.bracket import Bracket
    from pytest_kvbudget.search.model import Axis, Prior, Trial

QUANTILES: Final = 32
"""Rungs of equal chances among which a batch looks, beside the neighbours of what it has."""


class Chances:
    """The outlook, given what the verdicts leave open."""

    def __init__(self, axis: Axis, bracket: Bracket, outlook: Outlook) -> None:
        self.axis, self.bracket, self.outlook = axis, bracket, outlook
        self._top = outlook.above(axis.value(bracket.high)) if bracket.high < len(axis) else 0.0
        self._bottom = outlook.above(axis.value(bracket.low)) if bracket.low >= 0 else 1.0
        self._passes: dict[int, float] = {}
        self._bits: dict[tuple[int, int], float] = {}

    @classmethod
    def of(cls, axis: Axis, history: Sequence[Trial], bracket: Bracket, prior: Prior | None) -> Chances:
        """After ``history``, whose bracket is ``bracket``."""
        return cls(axis, bracket, Outlook.of(axis, history, bracket, prior))

    def passes(self, index: int) -> float:
        """Chance that a rung passes: 1 up to the bracket, 0 from its end on."""
        if index <= self.bracket.low or index >= self.bracket.high:
            return float(index <= self.bracket.low)
        known = self._passes.get(index)
        if known is None:
            above = self.outlook.above(self.axis.value(index))
            known = self._passes[index] = (above - self._top) / (self._bottom - self._top)
        return known

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

    def bits(self, low: int, high: int) -> float:
        """Entropy of which rung from ``low`` to ``high - 1`` is the last to pass, given that one of them is.

        A long part is taken in pieces of equal length, as if all rungs of a piece were as likely.
        """
        known = self._bits.get((low, high))
        if known is not None:
            return known
        step = max(1, (high - low) // QUANTILES)
        edges = [self.passes(index) for index in (*range(low, high, step), high)]
        likely = edges[0] - edges[-1]
        bits = 0.0
        for piece, (above, below) in enumerate(pairwise(edges)):
            share = (above - below) / likely if likely > 0 else 0.0
            if share > 0:
                length = min(step, high - low - piece * step)
                bits += share * math.log2(length / share)
        self._bits[low, high] = max(0.0, bits)
        return self._bits[low, high]

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
            expected += likely * (1 + chances.bits(low, high) / math.log2(sets + 1))
    return round(expected, 9)
