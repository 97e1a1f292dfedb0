"""When each phase of a boot began and how long it took."""

from __future__ import annotations

from pytest_kvbudget.records import Timings
from pytest_kvbudget.report.elements import Element, element
from pytest_kvbudget.report.numbers import NOT_STATED, duration, words
from pytest_kvbudget.verdict import STARTING


def timeline(timings: Timings) -> Element:
    """Phases on one time axis, from launch to ready or dead; a phase whose end nobody saw has no end."""
    if not timings.phases:
        return element("p", "No phase of this boot was timed.", class_="absent")
    phases = sorted(timings.phases, key=lambda phase: phase.start_s)
    last = phases[-1].start_s
    over_s = timings.boot_s if timings.boot_s is not None else timings.ended_s
    end = max(last, over_s or 0.0)
    # room for the open end of a boot that nobody saw end
    scale = end if over_s is not None and over_s > last else end * 1.08 or 1.0
    # what came before the first phase that the log names: interpreter, imports, reading the model's configuration
    rows = [_row(STARTING, 0.0, phases[0].start_s, scale)] if phases[0].start_s > 0 else []
    for index, phase in enumerate(phases):
        following = phases[index + 1].start_s if index + 1 < len(phases) else over_s
        rows.append(_row(words(phase.phase), phase.start_s, following, scale))
    return element("div", rows, class_="timeline")


def _row(name: str, start_s: float, end_s: float | None, scale_s: float) -> Element:
    ended = end_s is not None and end_s >= start_s
    took = (end_s or 0.0) - start_s if ended else None
    width = 100 * (took if took is not None else scale_s - start_s) / scale_s
    bar = element(
        "rect", x=f"{100 * start_s / scale_s:.3f}%", y=3, width=f"{width:.3f}%", height=10,
        class_="phase" if ended else "phase-open",
    )  # fmt: skip
    return element(
        "div",
        element("span", name, class_="phase-name"),
        element("svg", bar, width="100%", height=16, aria_hidden="true"),
        element("span", f"+{duration(start_s)}", class_="num at"),
        element("span", duration(took) if took is not None else element("i", f"end {NOT_STATED}"), class_="num"),
        class_="phase-row",
    )
