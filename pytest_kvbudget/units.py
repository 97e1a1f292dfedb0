"""Sizes in bytes: reading what people write and writing what people read.

Every size inside the package is a plain ``int`` of bytes; names carry ``_bytes``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Final

KIB: Final = 2**10
MIB: Final = 2**20
GIB: Final = 2**30
TIB: Final = 2**40

ACCEPTED: Final = "a number and one of B, KiB, MiB, GiB, TiB ('31.86 GiB', '76 MiB'), or an integer in bytes"

_UNITS: Final = {"b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB}
_SIZE = re.compile(r"\s*(?P<number>[0-9][0-9_]*(?:\.[0-9]+)?)\s*(?P<unit>[A-Za-z]+)?\s*", re.ASCII)


class SizeError(ValueError):
    """A size that cannot be read; the message shows the text and what is accepted."""


def parse_size(value: object) -> int:
    """Read a size: ``"31.86 GiB"``, ``"76 MiB"``, ``"512"`` or an ``int`` of bytes; returns bytes.

    A fraction of a byte is cut off, as the engines do. Decimal units (``GB``) and bare letters (``M``) are refused:
    one tool reads them as 10^9 and another as 2^30.

    Raises:
        SizeError: for text, types and numbers that are not a size of zero or more bytes.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise SizeError(f"{value} is negative; expected {ACCEPTED}")
        return int(value)
    if not isinstance(value, str):
        raise SizeError(f"{value!r} is {type(value).__name__}; expected {ACCEPTED}")
    match = _SIZE.fullmatch(value)
    if match is None:
        raise SizeError(f"{value!r} is not a size; expected {ACCEPTED}")
    unit = (match["unit"] or "B").lower()
    number = Decimal(match["number"].replace("_", ""))
    if unit not in _UNITS:
        hint = ""
        if unit.rstrip("b") in {"k", "m", "g", "t"}:
            hint = f"; write '{number} {unit[0].upper()}iB' for 2^{ {'k': 10, 'm': 20, 'g': 30, 't': 40}[unit[0]] }"
        raise SizeError(f"{value!r} has the unit {match['unit']!r}; expected {ACCEPTED}{hint}")
    if match["unit"] is None and number != int(number):
        raise SizeError(f"{value!r} is a fraction of a byte; expected {ACCEPTED}")
    return int(number * _UNITS[unit])


def parse_memory(value: object) -> int:
    """Read an amount of a device's or a pool's memory, as `parse_size`; returns bytes.

    A number without a unit that is less than 1 MiB and not 0 is refused: whoever writes 8 or 512 means another unit.

    Raises:
        SizeError: for what is no size, or is surely not meant in bytes.
    """
    size_bytes = parse_size(value)
    bare = not isinstance(value, str) or value.strip().replace("_", "").isdecimal()
    if bare and 0 < size_bytes < MIB:
        number = str(value).strip()
        raise SizeError(
            f"{value!r} has no unit and would be {size_bytes:,} bytes; expected '{number} GiB', '{number} MiB', or "
            f"'{number} B' if bytes are meant"
        )
    return size_bytes


def format_size(size_bytes: float) -> str:
    """Write bytes for people in the largest unit that keeps a leading digit: ``"31.86 GiB"``, ``"-62.00 MiB"``."""
    magnitude = abs(size_bytes)
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        # 999.996 KiB is shown in its own unit, not rounded up to the next one
        if magnitude >= factor:
            return f"{size_bytes / factor:.2f} {unit}"
    return f"{int(size_bytes)} B"


def exact_unit(sizes_bytes: Iterable[int]) -> int:
    """The largest unit, in bytes, in which two decimals write all of these sizes exactly; 1 where none does."""
    sizes = tuple(sizes_bytes)
    return next((unit for unit in (GIB, MIB, KIB) if all(100 * size % unit == 0 for size in sizes)), 1)


def size_in(size_bytes: int, unit: int) -> str:
    """A size in a unit of `exact_unit`: ``"1,856.00 MiB"``; one that it cannot write exactly in a unit of its own.

    Neighbours on a grid must not look alike, and what is shown must be what was booted.
    """
    return _written(size_bytes, unit if 100 * size_bytes % unit == 0 else exact_unit((size_bytes,)))


def size_beyond(size_bytes: int, unit: int, *, up: bool) -> str:
    """A size that is none of the grid, rounded to two decimals of the grid's unit, upwards or downwards."""
    if unit == 1:
        return _written(size_bytes, unit)
    hundredths = -(-100 * size_bytes // unit) if up else 100 * size_bytes // unit
    return f"{hundredths // 100:,}.{hundredths % 100:02d} {_NAMES[unit]}"


_NAMES: Final = {GIB: "GiB", MIB: "MiB", KIB: "KiB"}


def _written(size_bytes: int, unit: int) -> str:
    return f"{size_bytes / unit:,.2f} {_NAMES[unit]}" if unit in _NAMES else f"{size_bytes:,} B"


def format_gib(size_bytes: float) -> str:
    """Write bytes as GiB with two decimals, the unit and precision the engines print: ``"0.12 GiB"``."""
    return f"{size_bytes / GIB:.2f} GiB"
