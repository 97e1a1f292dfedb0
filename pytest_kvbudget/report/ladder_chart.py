"""The chart of a ladder: the axis across, boots downwards, and the bracket that each boot narrowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pytest_kvbudget.report import marks
from pytest_kvbudget.report.elements import Child, Element, element
from pytest_kvbudget.report.history import Boot, rungs, why
from pytest_kvbudget.report.numbers import plain_amount
from pytest_kvbudget.search.model import Axis, Finding

ROW: Final = 40
TOP: Final = 56
BOTTOM: Final = 44
_LEFT, _RIGHT, _MIDDLE = 9.0, 94.0, 50.0
_LETTER, _GAP, _EDGE = 0.66, 2.0, 101.0
"""Percent of the width: of one letter on a page as wide as it gets, beside a mark, and where the page ends."""
_MOST_RUNG_TICKS: Final = 160
_TICKS: Final = 4
_UNITS: Final = {"max_model_len": "tokens", "kv_cache_memory_bytes": "bytes per rank"}


class _Scale:
    """Value of the axis to percent of the chart's width."""

    def __init__(self, axis: Axis, values: Sequence[int]) -> None:
        self.low = min([axis.floor, *values])
        self.high = max([axis.ceiling, *values])

    def at(self, value: float) -> float:
        """Percent of the width."""
        if self.high == self.low:
            return (_LEFT + _RIGHT) / 2
        return _LEFT + (_RIGHT - _LEFT) * (value - self.low) / (self.high - self.low)

    def x(self, value: float) -> str:
        """The same as an attribute."""
        return f"{self.at(value):.3f}%"


def ladder_chart(finding: Finding, history: Sequence[Boot], links: Mapping[int, str]) -> Element:
    """The chart; ``links`` gives the page of a boot by its number."""
    scale = _Scale(finding.axis, [boot.value for boot in history if boot.value is not None])
    bottom = TOP + ROW * max(1, len(history))
    parts: list[Child] = [_brackets(history, scale), _axis(finding.axis, scale, bottom)]
    parts.append(_boundary(finding, scale, bottom))
    parts += [_boot(boot, finding, scale, links.get(boot.number)) for boot in history]
    unit = _UNITS.get(finding.axis.name, "")
    name = f"{finding.axis.name}{', ' if unit else ''}{unit}"
    parts.append(element("text", "boot", x="1%", y=TOP - 10, class_="axis-name"))
    parts.append(element("text", name, x=f"{_RIGHT}%", y=bottom + BOTTOM - 6, class_="axis-name end"))
    said = f"Ladder over {finding.axis.name}: {finding.sentence}"
    svg = element("svg", parts, width="100%", height=bottom + BOTTOM, class_="ladder", role="img", aria_label=said)
    return element("figure", svg, _legend(history), class_="chart")


def _brackets(history: Sequence[Boot], scale: _Scale) -> list[Element]:
    """What was still possible before each boot."""
    bands = []
    for index, boot in enumerate(history):
        if boot.confirmation or boot.before.high < boot.before.low:
            continue
        left, right = scale.at(boot.before.low), scale.at(boot.before.high)
        bands.append(
            element(
                "rect", x=f"{left:.3f}%", width=f"{max(right - left, 0.2):.3f}%", y=TOP + ROW * index, height=ROW,
                class_="bracket",
            )
        )  # fmt: skip
    return bands


def _axis(axis: Axis, scale: _Scale, bottom: int) -> list[Element]:
    parts = [element("line", x1=f"{_LEFT}%", x2=f"{_RIGHT}%", y1=bottom, y2=bottom, class_="axis")]
    parts += [
        element("line", x1=scale.x(value), x2=scale.x(value), y1=bottom, y2=bottom + 5, class_="rung-tick")
        for value in rungs(axis, _MOST_RUNG_TICKS)
    ]
    ticks = _ticks(axis)
    for index, value in enumerate(ticks):
        x, anchor = scale.x(value), "start" if index == 0 else "end" if index == len(ticks) - 1 else "middle"
        parts.append(element("line", x1=x, x2=x, y1=TOP, y2=bottom + 8, class_="grid"))
        text = plain_amount(axis.name, value)
        inner = f"tick {anchor}{' inner' if 0 < index < len(ticks) - 1 else ''}"
        parts.append(element("text", text, x=x, y=bottom + 22, class_=inner))
    return parts


def _ticks(axis: Axis) -> list[int]:
    """The ends of the axis, and rungs about evenly between them."""
    if len(axis) <= 2:
        return sorted({axis.floor, axis.ceiling})
    steps = min(_TICKS, len(axis) - 1)
    return [axis.value(round((len(axis) - 1) * step / steps)) for step in range(steps + 1)]


def _boundary(finding: Finding, scale: _Scale, bottom: int) -> list[Element]:
    """The winner and the failed neighbour, as lines through all boots.

    Labels stand on the side with more room; the one whose text would cross the other's line stands above its end.
    """
    ends = [(finding.failed_at, "fails", "fails"), (finding.value, "largest that passes", "passes")]
    if finding.value is not None and scale.at(finding.value) <= _MIDDLE:
        ends.reverse()
    parts = []
    for (value, word, class_), y in zip(ends, (14, 32), strict=True):
        if value is None:
            continue
        x, left = scale.x(value), scale.at(value) > _MIDDLE
        text = f"{word} {plain_amount(finding.axis.name, value)}"
        side = f"{'end' if left else 'start'} label {class_}"
        parts.append(element("line", x1=x, x2=x, y1=y - 9, y2=bottom, class_=f"boundary {class_}"))
        parts.append(element("text", text, x=x, y=y, dx=-7 if left else 7, class_=side))
    return parts


def _boot(boot: Boot, finding: Finding, scale: _Scale, link: str | None) -> Element:
    y = TOP + ROW * (boot.number - 1) + ROW / 2
    number = element("text", str(boot.number), x="1%", y=y + 4, class_="boot-number")
    if boot.value is None:
        return element("g", number, element("text", f"{boot.mark.word}, rung not stated", x=f"{_LEFT}%", y=y + 4))
    said = why(boot.record)
    width = _LETTER * len(f"{plain_amount(finding.axis.name, boot.value)} {boot.mark.word} {said}") + _GAP
    width += _LETTER * len(" (confirmation)") if boot.confirmation else 0
    left = on_the_left(scale.at(boot.value), width, [scale.at(v) for v in _ends(finding) if v != boot.value])
    deciding = boot.value in _ends(finding)
    label = element(
        "text",
        element("tspan", plain_amount(finding.axis.name, boot.value), class_="value"),
        element("tspan", f" {boot.mark.word}", class_=f"verdict-word v-{boot.mark.key}"),
        element("tspan", f"{said and f' {said}'}{' (confirmation)' if boot.confirmation else ''}", class_="why"),
        x=scale.x(boot.value), y=y + 4, dx=-14 if left else 14, class_="end" if left else "start",
    )  # fmt: skip
    marker = element(
        "svg",
        element("circle", r=12, class_="halo") if deciding else None,
        marks.drawn(boot.mark),
        x=scale.x(boot.value), y=y, overflow="visible", width=1, height=1,
    )  # fmt: skip
    content = (marker, label)
    return element("g", number, element("a", content, href=link) if link else content, class_="boot")


def _ends(finding: Finding) -> list[int]:
    return [value for value in (finding.value, finding.failed_at) if value is not None]


def on_the_left(at: float, width: float, lines: Sequence[float]) -> bool:
    """Which side of its mark a label stands on: towards the middle, unless it would cross a boundary or the edge.

    Args:
        at: place of the mark, in percent of the chart's width like the others.
        width: of the label.
        lines: places of the boundaries.
    """

    def crosses(left: bool) -> bool:
        low, high = (at - width, at) if left else (at, at + width)
        return low < 0 or high > _EDGE or any(low <= line <= high for line in lines)

    preferred = at > _MIDDLE
    return preferred if not crosses(preferred) or crosses(not preferred) else not preferred


def _legend(history: Sequence[Boot]) -> Element:
    used = {boot.mark.key for boot in history}
    entries = [
        element("li", marks.symbol(mark), element("span", f"{mark.word}: {mark.sentence.lower()}"))
        for mark in marks.ALL
        if mark.key in used
    ]
    entries.append(
        element("li", element("i", class_="swatch b-bracket"), "where the boundary could still be before a boot")
    )
    entries.append(element("li", element("i", class_="swatch b-rung"), "a rung of the ladder"))
    return element("ul", entries, class_="legend")
