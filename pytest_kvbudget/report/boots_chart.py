"""The chart of a search: its axis across, boots downwards, and the bracket that each boot narrowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pytest_kvbudget.archive import AnyFinding
from pytest_kvbudget.records import SweepRecord
from pytest_kvbudget.report import marks
from pytest_kvbudget.report.elements import Child, Element, element
from pytest_kvbudget.report.history import CONFIRMATION, Boot, why
from pytest_kvbudget.report.placing import GAP, LETTER, on_the_left, places, shortened
from pytest_kvbudget.report.searched import Track, edges_of, track_of
from pytest_kvbudget.report.zones import STRIP, zones, zones_legend

ROW: Final = 40
LEVEL: Final = 18
HEAD: Final = 20
BOTTOM: Final = 44
_LEFT, _RIGHT = 9.0, 94.0
_MOST_RUNG_TICKS: Final = 160
_TICKS: Final = 4
_UNITS: Final = {"max_model_len": "tokens", "kv_cache_memory_bytes": "bytes per rank"}


class Scale:
    """Value of the axis to percent of the chart's width."""

    def __init__(self, track: Track, values: Sequence[int]) -> None:
        self.low = min([track.low, *values])
        self.high = max([track.high, *values])

    def at(self, value: float) -> float:
        """Percent of the width."""
        if self.high == self.low:
            return (_LEFT + _RIGHT) / 2
        return _LEFT + (_RIGHT - _LEFT) * (value - self.low) / (self.high - self.low)

    def x(self, value: float) -> str:
        """The same as an attribute."""
        return f"{self.at(value):.3f}%"


class _Frame:
    """What the parts of one chart share: the axis with its scale, and where the rows begin and end."""

    def __init__(self, record: AnyFinding, history: Sequence[Boot]) -> None:
        self.track, self.edges = track_of(record), edges_of(record)
        self.scale = Scale(self.track, [boot.value for boot in history if boot.value is not None])
        self.top = HEAD + LEVEL * max(2, len(self.edges))
        self.rows_end = self.top + ROW * max(1, len(history))
        self.strip = zones(record, history, self.scale.x, self.rows_end)
        self.bottom = self.rows_end + (STRIP if self.strip else 0)


def boots_chart(record: AnyFinding, history: Sequence[Boot], links: Mapping[int, str]) -> Element:
    """The chart; ``links`` gives the page of a boot by its number."""
    frame = _Frame(record, history)
    parts: list[Child] = [_brackets(history, frame), _axis(frame), frame.strip, _edges(frame)]
    parts += [_boot(boot, frame, links.get(boot.number)) for boot in history]
    unit = _UNITS.get(frame.track.name, "")
    name = f"{frame.track.name}{', ' if unit else ''}{unit}"
    parts.append(element("text", "boot", x="1%", y=frame.top - 10, class_="axis-name"))
    parts.append(element("text", name, x=f"{_RIGHT}%", y=frame.bottom + BOTTOM - 6, class_="axis-name end"))
    kind = "Sweep" if isinstance(record, SweepRecord) else "Ladder"
    said = f"{kind} over {frame.track.name}: {record.finding.sentence}"
    height = frame.bottom + BOTTOM
    svg = element("svg", parts, width="100%", height=height, class_="ladder", role="img", aria_label=said)
    return element("figure", svg, _legend(record, history, striped=bool(frame.strip)), class_="chart")


def _brackets(history: Sequence[Boot], frame: _Frame) -> list[Element]:
    """What was still possible before each boot."""
    bands = []
    for index, boot in enumerate(history):
        if boot.confirmation or boot.before.high < boot.before.low:
            continue
        left, right = frame.scale.at(boot.before.low), frame.scale.at(boot.before.high)
        bands.append(
            element(
                "rect", x=f"{left:.3f}%", width=f"{max(right - left, 0.2):.3f}%", y=frame.top + ROW * index,
                height=ROW, class_="bracket",
            )
        )  # fmt: skip
    return bands


def _axis(frame: _Frame) -> list[Element]:
    scale, bottom = frame.scale, frame.bottom
    parts = [element("line", x1=f"{_LEFT}%", x2=f"{_RIGHT}%", y1=bottom, y2=bottom, class_="axis")]
    parts += [
        element("line", x1=scale.x(value), x2=scale.x(value), y1=bottom, y2=bottom + 5, class_="rung-tick")
        for value in frame.track.values(_MOST_RUNG_TICKS)
    ]
    ticks = _ticks(frame.track)
    for index, value in enumerate(ticks):
        x, anchor = scale.x(value), "start" if index == 0 else "end" if index == len(ticks) - 1 else "middle"
        parts.append(element("line", x1=x, x2=x, y1=frame.top, y2=bottom + 8, class_="grid"))
        inner = f"tick {anchor}{' inner' if 0 < index < len(ticks) - 1 else ''}"
        parts.append(element("text", frame.track.show(value), x=x, y=bottom + 22, class_=inner))
    return parts


def _ticks(track: Track) -> list[int]:
    """The ends of the axis, and values of the grid about evenly between them."""
    if track.rungs <= 2:
        return sorted({track.low, track.high})
    steps = min(_TICKS, track.rungs - 1)
    return [track.value(round((track.rungs - 1) * step / steps)) for step in range(steps + 1)]


def _edges(frame: _Frame) -> list[Element]:
    """The values that bound the answer, as lines through all boots, each with its label at its upper end."""
    texts = [f"{edge.short_words} {frame.track.show(edge.value)}" for edge in frame.edges]
    ats = [frame.scale.at(edge.value) for edge in frame.edges]
    placed = zip(frame.edges, texts, places(ats, [len(text) for text in texts]), strict=True)
    parts = []
    for edge, text, place in sorted(placed, key=lambda entry: entry[2].level):
        x, y = frame.scale.x(edge.value), LEVEL * place.level + 14
        parts.append(element("line", x1=x, x2=x, y1=y - 9, y2=frame.bottom, class_=f"boundary {edge.key}"))
        side = f"{'end' if place.left else 'start'} label {edge.key}"
        parts.append(element("text", text, x=x, y=y, dx=-7 if place.left else 7, class_=side))
    return parts


def _boot(boot: Boot, frame: _Frame, link: str | None) -> Element:
    y = frame.top + ROW * (boot.number - 1) + ROW / 2
    number = element("text", str(boot.number), x="1%", y=y + 4, class_="boot-number")
    if boot.value is None:
        return element("g", number, element("text", f"{boot.mark.word}, value not stated", x=f"{_LEFT}%", y=y + 4))
    remarks = [CONFIRMATION if boot.confirmation else "", "taken over" if boot.taken_over else ""]
    said = "".join([*(f" {text}" for text in [why(boot.record)] if text), *(f" ({text})" for text in remarks if text)])
    head = f"{frame.track.show(boot.value)} {boot.mark.word}"
    bounds = [edge.value for edge in frame.edges]
    at = frame.scale.at(boot.value)
    shown = shortened(said, at, len(head))
    width = LETTER * len(f"{head}{shown}") + GAP
    left = on_the_left(at, width, [frame.scale.at(value) for value in bounds if value != boot.value])
    label = element(
        "text",
        element("tspan", frame.track.show(boot.value), class_="value"),
        element("tspan", f" {boot.mark.word}", class_=f"verdict-word v-{boot.mark.key}"),
        element("tspan", shown, class_="why"),
        element("title", f"{head}{said}") if shown != said else None,
        x=frame.scale.x(boot.value), y=y + 4, dx=-14 if left else 14, class_="end" if left else "start",
    )  # fmt: skip
    marker = element(
        "svg",
        element("circle", r=12, class_="halo") if boot.value in bounds else None,
        marks.drawn(boot.mark),
        x=frame.scale.x(boot.value), y=y, overflow="visible", width=1, height=1,
    )  # fmt: skip
    content = (marker, label)
    return element("g", number, element("a", content, href=link) if link else content, class_="boot")


def _legend(record: AnyFinding, history: Sequence[Boot], *, striped: bool) -> Element:
    used = {boot.mark.word for boot in history}
    sweep = isinstance(record, SweepRecord)
    entries = [
        element(
            "li", marks.symbol(mark), element("span", f"{mark.word}: {mark.sentence[0].lower()}{mark.sentence[1:]}")
        )
        for mark in marks.ALL
        if mark.word in used
    ]
    edge = "edge" if sweep else "boundary"
    entries.append(
        element("li", element("i", class_="swatch b-bracket"), f"where the {edge} could still be before a boot")
    )
    if striped:
        entries += zones_legend()
    a_value = "a value of the sweep" if sweep else "a rung of the ladder"
    entries.append(element("li", element("i", class_="swatch b-rung"), a_value))
    return element("ul", entries, class_="legend")
