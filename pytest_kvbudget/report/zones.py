"""The strip over a sweep's axis: what passes, between the two edges at which boots fail for opposite reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

from pytest_kvbudget.archive import AnyFinding
from pytest_kvbudget.records import SweepRecord
from pytest_kvbudget.report.elements import Element, element
from pytest_kvbudget.report.history import Boot
from pytest_kvbudget.report.searched import EdgeKey, knob_of, track_of
from pytest_kvbudget.verdict import Verdict

STRIP: Final = 26
"""Height in pixels."""
_KEYS: Final[dict[str | None, EdgeKey]] = {"allocation": "fails", "minimum_kv": "short"}


def zones(record: AnyFinding, history: Sequence[Boot], x: Callable[[float], str], top: int) -> list[Element]:
    """Booted values of each kind as bars, and what follows from them as dashes; nothing where they contradict.

    Args:
        record: of a sweep; a ladder has no such strip.
        history: its boots.
        x: place of a value on the chart.
        top: upper end of the strip, in pixels.
    """
    if not isinstance(record, SweepRecord):
        return []
    values = _booted(history)
    track, knob = track_of(record), knob_of(record)
    near, far = _KEYS[knob.ends_at], _KEYS[knob.other_side]
    order = [key for key in ((near, "passes", far) if knob.goal == "least" else (far, "passes", near)) if key in values]
    bars = [(key, min(values[key]), max(values[key])) for key in order]
    if not bars or any(left[2] >= right[1] for left, right in pairwise(bars)):
        return []
    y = top + STRIP / 2
    parts = []
    (first, first_low, _), (last, _, last_high) = bars[0], bars[-1]
    # what asks for more of one side fails further away from it too; beyond a pass nothing follows
    if first != "passes":
        parts.append(element("line", x1=x(track.low), x2=x(first_low), y1=y, y2=y, class_=f"follows {first}"))
    if last != "passes":
        parts.append(element("line", x1=x(last_high), x2=x(track.high), y1=y, y2=y, class_=f"follows {last}"))
    parts += [element("line", x1=x(low), x2=x(high), y1=y, y2=y, class_=f"zone {key}") for key, low, high in bars]
    return parts


def zones_legend() -> list[Element]:
    """What bars and dashes of the strip mean."""
    said = (("zone-bar", "between booted values"), ("zone-dash", "follows from them, not booted"))
    return [element("li", element("i", class_=f"swatch {key}"), text) for key, text in said]


def _booted(history: Sequence[Boot]) -> dict[EdgeKey, list[int]]:
    values: dict[EdgeKey, list[int]] = {}
    for boot in history:
        key: EdgeKey | None = _KEYS.get(boot.side) if boot.record.verdict is Verdict.FAIL else None
        if boot.record.verdict in {Verdict.PASS, Verdict.MARGINAL}:
            key = "passes"
        if key is not None and boot.value is not None:
            values.setdefault(key, []).append(boot.value)
    return values
