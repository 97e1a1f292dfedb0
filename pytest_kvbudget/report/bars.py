"""Stacked bars of memory terms with their legends. Widths are percentages: nothing is distorted on narrow screens."""

from __future__ import annotations

from typing import Final

from pytest_kvbudget.report.elements import Element, element
from pytest_kvbudget.report.numbers import NOT_STATED, size
from pytest_kvbudget.report.terms import Bar, Segment

HEIGHT: Final = 34
_LABEL_FROM: Final = 11.0
"""Percent of the width from which a segment has room for its name."""


def scale_of(bars: list[Bar]) -> float:
    """Bytes at the right edge: the same for all bars, so that they compare."""
    return max((_extent(bar) for bar in bars), default=1.0) or 1.0


def bar_figure(bar: Bar, scale_bytes: float) -> Element:
    """One bar with title, drawing and legend."""
    against = "device total not stated" if bar.total_bytes is None else f"of {size(bar.total_bytes)}"
    return element(
        "figure",
        element(
            "figcaption",
            element("span", bar.title, class_="bar-title"),
            element("span", bar.rank, class_="rank") if bar.rank else None,
            element("span", bar.kind, class_="kind k-simulated" if "simulated" in bar.kind else "kind"),
            element("span", against, class_="against"),
        ),
        _drawing(bar, scale_bytes),
        _legend(bar),
        class_="bar",
    )


def hatch_definitions() -> Element:
    """The two hatchings, once per page: what is missing and what nothing states."""
    patterns = [
        element(
            "pattern",
            element("rect", width=8, height=8, class_=f"hatch-ground-{name}"),
            element("path", d="M-2 2L2 -2M0 8L8 0M6 10L10 6", class_=f"hatch-line-{name}"),
            id=f"hatch-{name}", width=8, height=8, patternUnits="userSpaceOnUse",
        )
        for name in ("deficit", "rest")
    ]  # fmt: skip
    return element("svg", element("defs", patterns), width=0, height=0, class_="definitions", aria_hidden="true")


def _extent(bar: Bar) -> float:
    return max(bar.stacked_bytes + (bar.deficit.size_bytes if bar.deficit else 0.0), bar.total_bytes or 0.0)


def _drawing(bar: Bar, scale_bytes: float) -> Element:
    parts, at = [], 0.0
    if bar.total_bytes is not None:
        parts.append(_rect("s-rest", 0, bar.total_bytes, scale_bytes))
        if bar.free_bytes is not None:
            parts.append(_rect("s-free", bar.total_bytes - bar.free_bytes, bar.free_bytes, scale_bytes))
    for segment in bar.segments:
        if segment.size_bytes <= 0:
            continue
        parts.append(_segment(segment, at, scale_bytes))
        at += segment.size_bytes
    if bar.deficit is not None:
        # a line as well: what was missing is often too little to see
        x = f"{100 * at / scale_bytes:.3f}%"
        parts.append(_segment(bar.deficit, at, scale_bytes))
        parts.append(element("line", x1=x, x2=x, y1=-4, y2=HEIGHT + 4, class_="edge-deficit"))
    for edge, class_ in ((bar.budget_bytes, "edge-budget"), (bar.total_bytes, "edge-total")):
        if edge is not None:
            x = f"{100 * edge / scale_bytes:.3f}%"
            parts.append(element("line", x1=x, x2=x, y1=-4, y2=HEIGHT + 4, class_=class_))
    said = ", ".join(f"{segment.name} {size(segment.size_bytes, segment.precision_bytes)}" for segment in bar.segments)
    return element(
        "svg", parts, width="100%", height=HEIGHT, class_="stack", role="img", aria_label=f"{bar.title}: {said}"
    )


def _segment(segment: Segment, at_bytes: float, scale_bytes: float) -> Element:
    percent = 100 * segment.size_bytes / scale_bytes
    text = f"{segment.name} {size(segment.size_bytes, segment.precision_bytes)}"
    shown = element("text", segment.name, x=8, y=HEIGHT / 2 + 4, class_=f"t-{segment.key}")
    return element(
        "svg",
        element("title", text),
        element("rect", width="100%", height=HEIGHT, class_=f"s-{segment.key}"),
        shown if percent > max(_LABEL_FROM, 0.95 * len(segment.name)) else None,
        x=f"{100 * at_bytes / scale_bytes:.3f}%", width=f"{percent:.3f}%", height=HEIGHT,
    )  # fmt: skip


def _rect(class_: str, at_bytes: float, size_bytes: float, scale_bytes: float) -> Element:
    return element(
        "rect", x=f"{100 * at_bytes / scale_bytes:.3f}%", width=f"{100 * size_bytes / scale_bytes:.3f}%", height=HEIGHT,
        class_=class_,
    )  # fmt: skip


def _legend(bar: Bar) -> Element:
    entries = [_entry(segment.key, segment.name, _size_of(segment)) for segment in bar.segments]
    if bar.deficit is not None:
        entries.append(_entry("deficit", bar.deficit.name, _size_of(bar.deficit)))
    if bar.free_bytes is not None:
        entries.append(_entry("free", "free", size(bar.free_bytes)))
        unexplained = None if bar.remainder_bytes is None else bar.remainder_bytes - bar.free_bytes
        if unexplained is not None and bar.total_bytes and unexplained > bar.total_bytes / 1000:
            entries.append(_entry("none", "neither stated nor free", size(unexplained, bar.precision_bytes)))
    elif bar.remainder_bytes is not None:
        entries.append(_entry("rest", "left by this account", size(bar.remainder_bytes, bar.precision_bytes)))
    if bar.budget_bytes is not None:
        entries.append(_entry("budget", "budget", size(bar.budget_bytes)))
    entries += [_entry("none", name, element("i", NOT_STATED)) for name in bar.missing]
    return element("ul", entries, class_="legend")


def _size_of(segment: Segment) -> list[Element | str]:
    note = element("small", " derived") if segment.derived else ""
    return [size(segment.size_bytes, segment.precision_bytes), note]


def _entry(key: str, name: str, value: str | Element | list[Element | str]) -> Element:
    return element(
        "li",
        element("i", class_=f"swatch b-{key}", aria_hidden="true"),
        element("span", name, class_="term"),
        element("span", value, class_="num"),
    )
