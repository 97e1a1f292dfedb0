"""The next rung from what the boots said in bytes: prediction inside a safeguarded bracket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from pytest_kvbudget.search.bracket import Bracket, bisection_boots, boot_bound, bracket_of
from pytest_kvbudget.search.outlook import Outlook

if TYPE_CHECKING:
    from pytest_kvbudget.search.model import Axis, Trial

EVEN: Final = 0.5

# What a rung's other merits are worth beside an even split. They move the number of boots, never an answer, and were
# chosen on the devices of tests/benchmarks/search_boots.py.
END_WORTH: Final = 0.5
"""Of a chance to end the search with this boot."""
PAIR_WORTH: Final = 0.5
"""Of a chance to end it with the next one."""
PASS_WORTH: Final = 0.3
"""Of a chance to pass: a boot that serves shows the slack of every limit, a failed one only the first deficit."""


@dataclass(frozen=True)
class Predict:
    """Boots where the hints say the boundary is, and never needs more than `boot_bound` boots, whatever they say.

    What the hints say is a distribution over the possible answers (`Outlook`); the rung whose verdict tells most about
    it is booted. A hint that is right makes that the winner and its neighbour; one that is wrong loses its weight as
    soon as a verdict contradicts it, and a history without hints is roughly bisected.
    """

    first: int | Literal["ceiling"] | None = None
    """Value to boot first: where a plan or an archive points to; ``None`` for the middle."""
    name: str = "predict"

    def next_index(self, axis: Axis, history: tuple[Trial, ...]) -> int | None:
        """The rung that tells most by the outlook, of those that keep the bound."""
        bracket = bracket_of(axis, history)
        if bracket.closed:
            return None
        boots_left = boot_bound(axis) - len(history)
        if not history and self.first is not None:
            wanted = len(axis) - 1 if self.first == "ceiling" else axis.index_at_or_below(self.first)
        else:
            wanted = _best(axis, bracket, Outlook.of(axis, history, bracket), boots_left)
        lowest, highest = _safe(bracket, boots_left)
        return min(max(wanted, lowest), highest)


def _safe(bracket: Bracket, boots_left: int) -> tuple[int, int]:
    """Lowest and highest rung after which either verdict leaves no more answers than bisection can still tell apart.

    More boots than the bound may have gone by already (rungs booted for another reason): then bisection's own count.
    """
    after = max(boots_left, bisection_boots(bracket.candidates)) - 1
    reach = 1 << min(after, bracket.candidates.bit_length())
    return max(bracket.low + 1, bracket.high - reach), min(bracket.high - 1, bracket.low + reach)


def _best(axis: Axis, bracket: Bracket, outlook: Outlook, boots_left: int) -> int:
    """The rung whose verdict tells most: an even chance to pass, and a chance to end the search with it or the next."""
    top = outlook.above(axis.value(bracket.high)) if bracket.high < len(axis) else 0.0
    bottom = outlook.above(axis.value(bracket.low)) if bracket.low >= 0 else 1.0

    def chance(index: int) -> float:
        if index <= bracket.low or index >= bracket.high:
            return float(index <= bracket.low)
        return (outlook.above(axis.value(index)) - top) / (bottom - top)

    def worth(index: int) -> float:
        passes = chance(index)
        winner = passes - chance(index + 1), _end_worth(Bracket(index, bracket.high), index + 1, boots_left - 1)
        failure = chance(index - 1) - passes, _end_worth(Bracket(bracket.low, index), index - 1, boots_left - 1)
        ends = sum(likely * worth for likely, worth in (winner, failure))
        # rounded, so that two rungs that are worth the same stay so
        return round(min(passes, 1 - passes) + PASS_WORTH * passes + ends, 9)

    first, last = bracket.low + 1, bracket.high - 1
    low, high = first, last
    while low < high:  # lowest rung with no more than an even chance
        middle = (low + high) // 2
        if chance(middle) <= EVEN:
            high = middle
        else:
            low = middle + 1
    near = (min(max(low + off, first), last) for off in (-1, 0, 1))
    return max((first, *near, last), key=lambda index: (worth(index), -index))


def _end_worth(after: Bracket, neighbour: int, boots_left: int) -> float:
    """What half of the proof is worth: the other half is known, or can be booted next."""
    if after.closed:
        return END_WORTH
    lowest, highest = _safe(after, boots_left)
    return PAIR_WORTH if lowest <= neighbour <= highest else 0.0
