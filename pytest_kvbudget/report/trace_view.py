"""Device memory over the time of an attempt: one chart per rank, and what every phase took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from pytest_kvbudget.device.trace import (
    BEFORE,
    LAUNCH,
    MemoryTrace,
    Point,
    WindowMemory,
    changes,
    decode,
    end_s,
    high_water,
)
from pytest_kvbudget.records import AttemptRecord
from pytest_kvbudget.report.elements import Child, Element, element, table
from pytest_kvbudget.report.numbers import NOT_STATED, duration, plural, size, words

MOST_RANKS: Final = 8
"""Charts on a page; of more ranks those with the least free memory are shown."""
MOST_POINTS: Final = 2000
_WIDE, _HIGH = 1000, 100
"""Units of the drawing, which is stretched to whatever room there is."""
_LEFT, _ACROSS = 9.0, 88.0
_TOP, _HEIGHT, _BOTTOM = 44, 130, 30
_LABEL_ROOM: Final = 9.0
"""Percent of the width that a phase's name needs."""
_ROWS: Final = 3
_TICKS: Final = 4


def trace_section(record: AttemptRecord, folder: Path) -> Iterator[Child]:
    """The charts with the table of phases; says so where there is no trace or no file of it."""
    summary = record.trace
    if summary is None:
        yield element("p", "Nobody could read device memory while this attempt ran.", class_="absent")
        return
    try:
        trace = decode((folder / Path(summary.file).name).read_bytes())
    except (OSError, msgspec.MsgspecError):
        trace = None
        yield element("p", f"The memory trace {summary.file} is not beside this record.", class_="absent")
    if trace is not None and trace.series:
        yield from _charts(record, trace)
    yield _phase_table(record)
    for leak in summary.leaks:
        text = f"device {leak.device} kept {size(leak.leaked_bytes)} more than before the launch"
        yield element("p", f"Rank {leak.rank}, {text}.", class_="note")
    limits = f"; {summary.limits}" if summary.limits else ""
    yield element("p", f"Read from {summary.source}{limits}.", class_="note")


def _charts(record: AttemptRecord, trace: MemoryTrace) -> Iterator[Child]:
    worst = high_water(trace)
    order = sorted(range(len(trace.series)), key=lambda rank: _least_free(worst[rank]))
    for rank in sorted(order[:MOST_RANKS]):
        yield _chart(record, trace, rank, worst[rank])
    if len(order) > MOST_RANKS:
        yield element("p", f"{plural(len(order) - MOST_RANKS, 'rank')} with more free memory not drawn.", class_="note")


def _least_free(window: WindowMemory | None) -> float:
    return float("inf") if window is None else window.least_free_bytes


def _chart(record: AttemptRecord, trace: MemoryTrace, rank: int, worst: WindowMemory | None) -> Element:
    device = trace.series[rank].device
    points = changes(trace, rank)
    total = _total_bytes(record, device) or max((point.used_bytes + point.free_bytes for point in points), default=1)
    scale = _Scale(
        end_s(trace) or 1.0, total or 1, launch_s=next((mark.at_s for mark in trace.marks if mark.phase == LAUNCH), 0.0)
    )
    bottom = _TOP + _HEIGHT
    said = f"Rank {rank}, device {device}: used memory over {duration(scale.end_s)}"
    least = None
    if worst is not None:
        least = f"least free {size(worst.least_free_bytes)} after {duration(scale.since_launch(worst.least_free_at_s))}"
        said += f"; {least}"
    parts: list[Child] = [
        element("text", "total", x=f"{_LEFT - 1}%", y=_TOP + 4, class_="tick end"),
        element("text", "0", x=f"{_LEFT - 1}%", y=bottom + 4, class_="tick end"),
        _drawing(trace, points, scale),
        _times(scale, bottom),
        _marks(trace, scale, bottom),
    ]
    if worst is not None:
        parts.append(_least_free_point(worst, total, scale))
    svg = element("svg", parts, width="100%", height=bottom + _BOTTOM, class_="trace", role="img", aria_label=said)
    caption = element(
        "figcaption",
        element("span", f"Rank {rank}", class_="bar-title"),
        element("span", f"device {device}", class_="rank"),
        element("span", f"of {size(total)}", class_="against"),
        element("span", least, class_="least") if least is not None else None,
    )
    return element("figure", caption, svg, class_="chart")


def _total_bytes(record: AttemptRecord, device: str) -> int | None:
    readings = (entry for reading in record.memory for entry in reading.devices if entry.device == device)
    return next((entry.total_bytes for entry in readings), None)


class _Scale:
    """Seconds and bytes to percent of the chart's width and to units of the drawing.

    Times are shown from the launch on, as everywhere on the page; the trace begins a little before it.
    """

    def __init__(self, end_s: float, total_bytes: int, *, launch_s: float) -> None:
        self.end_s, self.total_bytes, self.launch_s = end_s, total_bytes, launch_s

    def since_launch(self, at_s: float) -> float:
        return max(0.0, at_s - self.launch_s)

    def percent(self, at_s: float) -> float:
        return _LEFT + _ACROSS * min(1.0, max(0.0, at_s / self.end_s))

    def x(self, at_s: float) -> float:
        return round(_WIDE * at_s / self.end_s, 2)

    def y(self, used_bytes: int) -> float:
        return round(_HIGH * (1 - used_bytes / self.total_bytes), 2)


def _drawing(trace: MemoryTrace, points: Sequence[Point], scale: _Scale) -> Element:
    """The used memory as steps; nothing is drawn where nothing was read."""
    parts: list[Child] = [
        element("line", x1=0, x2=_WIDE, y1=0, y2=0, class_="edge-total", vector_effect="non-scaling-stroke")
    ]
    for run in _runs(trace, _thinned(points)):
        line = f"M{scale.x(run[0].at_s)} {scale.y(run[0].used_bytes)}"
        line += "".join(f"H{scale.x(point.at_s)}V{scale.y(point.used_bytes)}" for point in run[1:])
        area = f"{line}V{_HIGH}H{scale.x(run[0].at_s)}Z"
        parts.append(element("path", d=area, class_="trace-area"))
        parts.append(element("path", d=line, class_="trace-line", vector_effect="non-scaling-stroke"))
    return element(
        "svg", parts, x=f"{_LEFT}%", y=_TOP, width=f"{_ACROSS}%", height=_HEIGHT, viewBox=f"0 0 {_WIDE} {_HIGH}",
        preserveAspectRatio="none",
    )  # fmt: skip


def _runs(trace: MemoryTrace, points: Sequence[Point]) -> Iterator[list[Point]]:
    """The points between gaps."""
    starts = [gap.start_s for gap in trace.gaps]
    run: list[Point] = []
    for point in points:
        if run and any(run[-1].at_s < start <= point.at_s for start in starts):
            yield run
            run = []
        run.append(point)
    if run:
        yield run


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Enough points to draw: of a stretch that is too fine to see its first, lowest, highest and last."""
    if len(points) <= MOST_POINTS:
        return points
    stretch = len(points) // (MOST_POINTS // 4) + 1
    kept: list[Point] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        low, high = min(part, key=lambda p: p.used_bytes), max(part, key=lambda p: p.used_bytes)
        kept += sorted({part[0], low, high, part[-1]}, key=lambda point: point.at_s)
    return kept


def _times(scale: _Scale, bottom: int) -> list[Element]:
    parts = [element("line", x1=f"{_LEFT}%", x2=f"{_LEFT + _ACROSS}%", y1=bottom, y2=bottom, class_="axis")]
    for index in range(_TICKS + 1):
        since_s = scale.since_launch(scale.end_s) * index / _TICKS
        anchor = "start" if index == 0 else "end" if index == _TICKS else "middle"
        inner = " inner" if 0 < index < _TICKS else ""
        x = f"{scale.percent(scale.launch_s + since_s):.3f}%"
        parts.append(element("text", duration(since_s), x=x, y=bottom + 20, class_=f"tick {anchor}{inner}"))
    return parts


def _marks(trace: MemoryTrace, scale: _Scale, bottom: int) -> list[Element]:
    """Where phases began; a name only where it has room, all of them are in the table. Names lie over the lines."""
    lines: list[Element] = []
    names: list[Element] = []
    ends = [0.0] * _ROWS
    for mark in trace.marks:
        at = scale.percent(mark.at_s)
        right = at > _LEFT + _ACROSS - _LABEL_ROOM
        first = at - _LABEL_ROOM if right else at
        row = next((row for row in range(_ROWS) if ends[row] <= first), None)
        y = 10 if row is None else 10 + 13 * row
        title = element("title", f"{words(mark.phase)} {duration(scale.since_launch(mark.at_s))}")
        lines.append(
            element("line", title, x1=f"{at:.3f}%", x2=f"{at:.3f}%", y1=_TOP if row is None else y + 2, y2=bottom,
                    class_="phase-mark")
        )  # fmt: skip
        if row is None:
            continue
        ends[row] = first + _LABEL_ROOM
        names.append(
            element("text", words(mark.phase), x=f"{at:.3f}%", y=y, dx=-3 if right else 3,
                    class_=f"phase-label {'end' if right else 'start'}")
        )  # fmt: skip
    return [*lines, *names]


def _least_free_point(worst: WindowMemory, total_bytes: int, scale: _Scale) -> Element:
    used = total_bytes - worst.least_free_bytes
    x, y = scale.percent(worst.least_free_at_s), _TOP + _HEIGHT * scale.y(used) / _HIGH
    return element("circle", cx=f"{x:.3f}%", cy=f"{y:.1f}", r=4, class_="least-dot")


def _raised(window: WindowMemory, before_bytes: int | None) -> str:
    """Against the highest that the rank had in any phase before; nothing in the first one."""
    return "" if before_bytes is None else size(max(0, window.peak_used_bytes - before_bytes))


def _phase_table(record: AttemptRecord) -> Element | None:
    """Every phase with the rank that had the least free memory in it, and by how much it raised that rank's peak.

    From phase to phase the raises add up to the peak of the whole attempt.
    """
    phases = record.trace.phases if record.trace is not None else ()
    if not phases:
        return None
    launch_s = next((phase.start_s for phase in phases if phase.phase == LAUNCH), 0.0)
    rows = []
    highest: dict[int, int] = {}
    for phase in phases:
        seen = [window for window in phase.devices if window is not None]
        tight = min(seen, key=lambda window: window.least_free_bytes, default=None)
        cells = (
            (NOT_STATED, NOT_STATED, NOT_STATED)
            if tight is None
            else (size(tight.peak_used_bytes), size(tight.least_free_bytes), _raised(tight, highest.get(tight.rank)))
        )
        for window in seen:
            highest[window.rank] = max(window.peak_used_bytes, highest.get(window.rank, 0))
        begun = "launch" if phase.start_s <= launch_s else f"+{duration(phase.start_s - launch_s)}"
        rows.append(
            element(
                "tr",
                element("th", words(phase.phase), scope="row"),
                element("td", "" if phase.phase == BEFORE else begun, class_="num"),
                element("td", duration(phase.end_s - phase.start_s), class_="num"),
                [element("td", cell, class_="num") for cell in cells],
                element("td", "" if tight is None else f"{tight.rank} ({tight.device})", class_="rank"),
            )
        )
    names = ("from", "for", "peak used", "least free", "raised the peak by")
    head: tuple[Child, ...] = (
        "phase",
        *(element("th", name, class_="num", scope="col") for name in names),
        "rank (device)",
    )
    return table(head, rows, class_="numbers trace-phases")
