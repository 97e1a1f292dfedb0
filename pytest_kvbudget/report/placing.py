"""Where labels stand in a chart so that they keep clear of lines, of one another and of the chart's end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations, product
from typing import Final, NamedTuple

MIDDLE: Final = 50.0
END: Final = 101.0
LETTER: Final = 0.66
"""Percent of the width that one letter takes on a page as wide as it gets."""
GAP: Final = 2.0
"""Percent of the width between a mark and its label."""
_NARROW: Final = 3
"""How many times as much it takes on a telephone."""


class Place(NamedTuple):
    """Where the label of a line stands."""

    level: int
    """Line of text from the top, from 0; the label's own line begins there and goes down."""
    left: bool
    """On the left of its line."""


def on_the_left(at: float, width: float, lines: Sequence[float]) -> bool:
    """Which side of its mark a label stands on: towards the middle, unless it would cross a line or the chart's end.

    Args:
        at: place of the mark, in percent of the chart's width like the others.
        width: of the label.
        lines: places of the lines.
    """
    preferred = at > MIDDLE
    return min(preferred, not preferred, key=lambda left: (_cut_off(at, width, left), _crossed(at, width, left, lines)))


def shortened(text: str, at: float, before: int) -> str:
    """The text, cut with an ellipsis where a label with it has room on neither side of its mark.

    Args:
        text: what may be cut.
        at: place of the mark, in percent of the chart's width.
        before: letters of the label that stand before the text and are never cut.
    """
    letters = max(0, int((max(at, END - at) - GAP) / LETTER) - before)
    if len(text) <= letters:
        return text
    return f"{text[: letters - 1].rstrip()}…" if letters > 1 else ""


def places(ats: Sequence[float], letters: Sequence[int]) -> list[Place]:
    """Level and side of the labels of lines that go down from them, each on a level of its own.

    A label crosses the lines of those that stand above it. A text that is cut off is worse than any crossed lines,
    which its halo keeps readable; of either, what a wide page shows counts more than what a narrow one shows. Towards
    the middle is better than away from it.

    Args:
        ats: places of the lines, in percent of the chart's width.
        letters: lengths of the labels.
    """
    best: tuple[Place, ...] = min(_choices(len(ats)), key=lambda choice: _cost(choice, ats, letters))
    return list(best)


def _choices(count: int) -> Iterator[tuple[Place, ...]]:
    for levels in permutations(range(count)):
        for sides in product((True, False), repeat=count):
            yield tuple(map(Place, levels, sides))


def _cost(choice: tuple[Place, ...], ats: Sequence[float], letters: Sequence[int]) -> tuple[int, ...]:
    """Labels cut off and lines crossed, each on a wide and on a narrow page, then how untidy it is."""
    cut, crossed = [0, 0], [0, 0]
    for place, at, length in zip(choice, ats, letters, strict=True):
        above = [ats[index] for index, other in enumerate(choice) if other.level < place.level and ats[index] != at]
        for page, letter in enumerate((LETTER, LETTER * _NARROW)):
            cut[page] += _cut_off(at, length * letter, place.left)
            crossed[page] += _crossed(at, length * letter, place.left, above)
    away = sum(place.left != (at > MIDDLE) for place, at in zip(choice, ats, strict=True))
    # of two that are as good, the one whose lines do not cross other lines' labels further down
    tangled = sum(
        (choice[a].level < choice[b].level) != (ats[a] > ats[b] if choice[a].left else ats[a] < ats[b])
        for a, b in combinations(range(len(choice)), 2)
    )
    return *cut, *crossed, away + tangled


def _span(at: float, width: float, left: bool) -> tuple[float, float]:
    return (at - width, at) if left else (at, at + width)


def _cut_off(at: float, width: float, left: bool) -> bool:
    low, high = _span(at, width, left)
    return low < 0 or high > END


def _crossed(at: float, width: float, left: bool, lines: Sequence[float]) -> int:
    low, high = _span(at, width, left)
    return sum(low <= line <= high for line in lines)
