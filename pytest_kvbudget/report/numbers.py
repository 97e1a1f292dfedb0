"""Numbers and words as people read them. A missing number is ``NOT_STATED``, never 0."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

import msgspec

from pytest_kvbudget.ledger.model import Value
from pytest_kvbudget.search.knobs import KNOBS, TICKS
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import MIB, format_gib, format_size

NOT_STATED: Final = "not stated"

BYTES_FIELDS: Final = frozenset(knob.name for knob in KNOBS.values() if knob.unit == "bytes")
_FRACTIONS: Final = frozenset(knob.name for knob in KNOBS.values() if knob.unit == "fraction")
TOKEN_FIELDS: Final = frozenset({"max_model_len", "max_num_batched_tokens"})
_COARSE: Final = MIB
"""Half a digit of an engine's "0.05 GiB" is 5 MiB: such a value is not shown in MiB, which would look exact."""


def size(size_bytes: float, precision_bytes: float = 0) -> str:
    """Bytes in the largest unit that keeps a leading digit, but never finer than they were read."""
    return format_gib(size_bytes) if precision_bytes >= _COARSE else format_size(size_bytes)


def amount(field: str, value: int) -> str:
    """A value that a search counts for people: ``"241,664 tokens"``, ``"2.95 GiB"``, ``"3"``, ``"0.97"`` for 9,700."""
    return f"{value:,} tokens" if field in TOKEN_FIELDS else plain_amount(field, value)


def plain_amount(field: str, value: int) -> str:
    """`amount` without the word tokens, for axes and columns whose head says it."""
    if field in _FRACTIONS:
        text = f"{value / TICKS:.4f}"
        return text.removesuffix("00") if text.endswith("00") else text.removesuffix("0")
    return size(value) if field in BYTES_FIELDS else f"{value:,}"


def whole_number(field: str, setting: float) -> int:
    """What a search counts for a setting of a field: ten-thousandths of a fraction, else the number itself."""
    return round(setting * TICKS) if field in _FRACTIONS else round(setting)


def duration(seconds: float) -> str:
    """Seconds as ``"40 ms"``, ``"8.4 s"``, ``"85 s"``, ``"6 min 52 s"``, ``"1 h 03 min"``."""
    if round(seconds, 3) < 1:
        return f"{round(1000 * seconds)} ms" if seconds else "0 s"
    if round(seconds, 1) < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def stated_duration(seconds: float | None) -> str:
    """`duration`, or that nothing was stated."""
    return NOT_STATED if seconds is None else duration(seconds)


def value_text(value: Value) -> str:
    """A fact's value with its unit."""
    number = value.value
    if isinstance(number, bool):
        return "yes" if number else "no"
    if isinstance(number, str):
        return number
    if value.unit == "bytes":
        return size(number, value.precision)
    if value.unit == "ratio":
        return f"{number:,.2f}×"
    plain = f"{number:,}" if isinstance(number, int) else f"{number:,.10g}"
    suffix = {"tokens": " tokens", "seconds": " s", "percent": " %"}.get(value.unit, "")
    return plain + suffix


def exact_text(value: Value) -> str:
    """What lies behind `value_text`: all digits of a size and how exactly the line gave it; else empty."""
    number = value.value
    if value.unit != "bytes" or isinstance(number, (bool, str)):
        return ""
    about = f" ± {size(value.precision)}" if value.precision >= 1 else ""
    return f"{round(number):,} B{about}"


def shape_fields(shape: Shape) -> list[tuple[str, str]]:
    """What was asked for, field by field, without environment and extra flags."""
    fields = []
    for name, value in msgspec.to_builtins(shape).items():
        if name in {"env", "extra_args"}:
            continue
        counts = isinstance(value, int) and not isinstance(value, bool) and name not in _FRACTIONS
        text = amount(name, value) if counts else str(value)
        fields.append((name, text))
    return fields


def words(identifier: str) -> str:
    """A vocabulary word for people: ``"graph_capture"`` is ``"graph capture"``, ``"kv_check"`` is ``"KV check"``."""
    upper = {"kv": "KV", "oom": "OOM", "hbm": "HBM", "lnc": "LNC"}
    return " ".join(upper.get(part, part) for part in identifier.split("_"))


def moment(timestamp: str) -> str:
    """A record's time for people: ``"2026-10-05 02:15:03 UTC"``; shown as it is where it is no ISO 8601 time."""
    try:
        return datetime.fromisoformat(timestamp).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError):
        return timestamp


def plural(number: int, noun: str) -> str:
    """``"1 boot"``, ``"3 boots"``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
