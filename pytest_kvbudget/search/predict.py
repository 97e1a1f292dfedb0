"""The next rung from what the boots said in bytes: prediction inside a safeguarded bracket."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from pytest_kvbudget.search.bracket import Bracket, bisection_boots, boot_bound, bracket_of
from pytest_kvbudget.search.chances import Chances, next_of_batch
from pytest_kvbudget.search.lever import not_limited, not_the_lever

if TYPE_CHECKING:
    from pytest_kvbudget.search.model import Axis, Prior, Trial


# What a rung's other merits are worth beside an even split. They move the number of boots, never an answer, and were
# chosen on the devices of tests/benchmarks/search_table.py.
END_WORTH: Final = 0.95
"""Of a chance to end the search with this boot."""
PAIR_WORTH: Final = 0.6
"""Of a chance to end it with the next one."""
PASS_WORTH: Final = 0.4
"""Of a chance to pass: a boot that serves shows the slack of every limit, a failed one only the first deficit."""


PASSED_WORTH: Final = 0.1
"""The same where one passed already."""
TIE_DIGITS: Final = 9
"""Decimals of a rung's merits below which two rungs tie."""


@dataclass(frozen=True)
class Predict:
    """Boots where the hints say the boundary is, and never needs more than `boot_bound` boots, whatever they say.

    What the hints say is a distribution over the possible answers (`Outlook`); the rung whose verdict tells most about
    it is booted. A hint that is right makes that the winner and its neighbour; one that is wrong loses its weight as
    soon as a verdict contradicts it, and a history without hints is roughly bisected.
    """

    first: int | Literal["ceiling"] | None = None
    """Value to boot first: ``"ceiling"``, or one that a user named; ``None`` for where the outlook points to."""
    prior: Prior | None = None
    """Where a plan or an archive says that the boundary is."""
    minutes: tuple[float, float] = (1.0, 1.0)
    """What a boot that passes and one that fails take: rungs that are worth the same are told apart by it."""
    sight: float | None = None
    """Value below which there is nothing to look for unless the bracket says so."""
    only_the_end: bool = False
    """Boots before the end of the axis tell nothing, while nothing failed for too much."""
    spare: int = 0
    """Boots beyond `boot_bound` that it may need at worst."""
    name: str = "predict"

    def next_index(self, axis: Axis, history: tuple[Trial, ...]) -> int | None:
        """The rung that tells most by the outlook, of those that keep the bound."""
        bracket = bracket_of(axis, history)
        if bracket.closed:
            return None
        boots_left = boot_bound(axis) + self.spare - len(history)
        wanted = self._told(axis, history, bracket)
        if wanted is None:
            in_sight = self._in_sight(axis, bracket)
            chances = Chances.of(axis, history, in_sight, self.prior)
            pass_worth = PASS_WORTH if bracket.low < 0 else PASSED_WORTH
            wanted = bracket.high - 1 if in_sight.closed else _best(chances, boots_left, self.minutes, pass_worth)
        return _kept(wanted, bracket, boots_left)

    def next_indices(
        self, axis: Axis, history: tuple[Trial, ...], pending: tuple[int, ...], count: int, rounds: int
    ) -> tuple[int, ...]:
        """The rungs that together leave least to do; one of each round keeps the bound, which is then one on rounds."""
        bracket = bracket_of(axis, history)
        if bracket.closed:
            return ()
        boots_left = boot_bound(axis) + self.spare - rounds
        end = self._only_end(axis, history, bracket) if history else None
        if end is not None and end == _kept(end, bracket, boots_left):
            return () if end in pending else (end,)
        in_sight = self._in_sight(axis, bracket)
        chances = Chances.of(axis, history, bracket if in_sight.closed else in_sight, self.prior)
        chosen = [index for index in pending if bracket.low < index < bracket.high]
        wanted = None if chosen else self._told(axis, history, bracket)
        added: list[int] = []
        for _ in range(min(count, bracket.candidates - 1 - len(chosen))):
            if wanted is None:
                wanted = next_of_batch(chances, chosen, count + len(pending))
            if not chosen:
                wanted = _kept(wanted, bracket, boots_left)
            chosen.append(wanted)
            added.append(wanted)
            wanted = None
        return tuple(added)

    def _told(self, axis: Axis, history: tuple[Trial, ...], bracket: Bracket) -> int | None:
        """The rung that needs no outlook: the first one, or an end where the axis moves nothing."""
        if not history and self.first is not None:
            return len(axis) - 1 if self.first == "ceiling" else axis.index_at_or_below(self.first)
        return self._only_end(axis, history, bracket)

    def _only_end(self, axis: Axis, history: tuple[Trial, ...], bracket: Bracket) -> int | None:
        """The end of the axis that alone tells more, where the boots say that the axis moves nothing before it."""
        if bracket.low < 0 and not_the_lever(axis, history):
            return 0
        if bracket.high == len(axis) and (self.only_the_end or not_limited(axis, history)):
            return len(axis) - 1
        return None

    def _in_sight(self, axis: Axis, bracket: Bracket) -> Bracket:
        """What of the bracket is in sight; closed where that is no rung but the one beside the failure."""
        if self.sight is None or not math.isfinite(self.sight):
            return bracket
        lowest = axis.index_at_or_below(self.sight - 1) + 1
        return Bracket(min(max(bracket.low, lowest - 1), bracket.high - 1), bracket.high)


def _kept(index: int, bracket: Bracket, boots_left: int) -> int:
    lowest, highest = _safe(bracket, boots_left)
    return min(max(index, lowest), highest)


def _safe(bracket: Bracket, boots_left: int) -> tuple[int, int]:
    """Lowest and highest rung after which either verdict leaves no more answers than bisection can still tell apart.

    More boots than the bound may have gone by already (rungs booted for another reason): then bisection's own count.
    """
    after = max(boots_left, bisection_boots(bracket.candidates)) - 1
    reach = 1 << min(after, bracket.candidates.bit_length())
    return max(bracket.low + 1, bracket.high - reach), min(bracket.high - 1, bracket.low + reach)


def _best(chances: Chances, boots_left: int, minutes: tuple[float, float], pass_worth: float) -> int:
    """The rung whose verdict tells most: an even chance to pass, and a chance to end the search with it or the next."""
    bracket = chances.bracket

    def worth(index: int) -> tuple[float, float, int]:
        passes = chances.passes(index)
        winner = chances.last(index), _end_worth(Bracket(index, bracket.high), index + 1, boots_left - 1)
        failure = chances.last(index - 1), _end_worth(Bracket(bracket.low, index), index - 1, boots_left - 1)
        ends = sum(likely * worth for likely, worth in (winner, failure))
        told = min(passes, 1 - passes) + pass_worth * passes + ends
        # rounded, so that two rungs that are worth the same stay so and the cheaper one is taken
        return round(told, TIE_DIGITS), -round(passes * minutes[0] + (1 - passes) * minutes[1], 9), -index

    low = chances.median()
    near = (min(max(low + off, bracket.low + 1), bracket.high - 1) for off in (-1, 0, 1))
    return max((bracket.low + 1, *near, bracket.high - 1), key=worth)


def _end_worth(after: Bracket, neighbour: int, boots_left: int) -> float:
    """What half of the proof is worth: the other half is known, or can be booted next, or not without a detour."""
    if after.closed:
        return END_WORTH
    lowest, highest = _safe(after, boots_left)
    return PAIR_WORTH if lowest <= neighbour <= highest else -PAIR_WORTH
