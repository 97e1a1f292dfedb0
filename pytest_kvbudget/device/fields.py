"""Numbers in what the vendors' tools print: a value is a number of bytes or an error, never a default."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Final

from pytest_kvbudget.device.model import DeviceHolder, DeviceMemory, ProbeError

_UNITS: Final = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
"""Every one of these tools writes MB for 2^20 bytes: a Radeon AI PRO R9700 of 34208743424 bytes is their 32624 MB."""
_LARGEST: Final = 2**60
"""An unsigned 64-bit counter that went below zero shows near 2^64: no device has an exbibyte."""
_LONGEST: Final = 64
_MOST_DIGITS: Final = 40


def decimal(text: str) -> int | None:
    """A text of ASCII digits, not absurdly many, as a number; ``None`` for any other.

    ``int`` alone takes signs, underscores and other scripts' digits, and raises for thousands of digits.
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def whole(value: object, where: str, unit: str = "B") -> int:
    """Bytes from a JSON number or a text of digits in ``unit``.

    Raises:
        ProbeError: it is anything else: ``N/A``, nothing, a negative number, a counter that ran below zero.
    """
    factor = _UNITS.get(unit.upper())
    number: int | float | None = None
    if isinstance(value, str):
        number = decimal(value.strip(" \t\r\n"))
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        number = value
    if number is None or factor is None or number * factor >= _LARGEST:
        shown = repr(value)[:60] if factor is not None else f"{value!r} {unit!r}"[:60]
        raise ProbeError(f"{where} shows {shown}; expected a number of bytes")
    return int(number * factor)


def read_number(path: str) -> int:
    """Bytes from a file of the kernel that shows one number.

    Opened and read once, without pathlib: a sampler does this a hundred times a second.

    Raises:
        ProbeError: it cannot be read or shows something else.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            raw = os.read(descriptor, _LONGEST)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ProbeError(f"{path}: cannot be read: {error.strerror}; expected a number of bytes") from None
    return whole(raw.decode("ascii", "replace"), f"{path}:")


def measured(value: object, where: str) -> int:
    """Bytes from a bare number of bytes or from ``{"value": 32624, "unit": "MB"}``.

    Raises:
        ProbeError: it is neither.
    """
    if isinstance(value, Mapping):
        return whole(value.get("value"), where, str(value.get("unit", "B")))
    return whole(value, where)


def index(value: object, where: str) -> int:
    """A small number that counts things: a device, a process.

    Raises:
        ProbeError: it is none.
    """
    number = whole(value, where)
    if isinstance(value, float) and value != number:
        raise ProbeError(f"{where} shows {value!r}; expected a whole number")
    return number


def checked(
    *,
    device: str,
    total_bytes: int,
    used_bytes: int,
    source: str,
    where: str,
    reserved_bytes: int = 0,
    holders: tuple[DeviceHolder, ...] = (),
    limits: str = "",
) -> DeviceMemory:
    """A reading whose parts fit into its total.

    Raises:
        ProbeError: they do not.
    """
    if total_bytes <= 0 or used_bytes + reserved_bytes > total_bytes:
        raise ProbeError(
            f"{where}: shows {used_bytes} bytes used and {reserved_bytes} reserved of {total_bytes}; "
            "expected part of a total"
        )
    return DeviceMemory(
        device=device,
        total_bytes=total_bytes,
        used_bytes=used_bytes,
        source=source,
        reserved_bytes=reserved_bytes,
        holders=holders,
        limits=limits,
    )


def table(value: object, where: str) -> Mapping[str, object]:
    """A JSON object.

    Raises:
        ProbeError: it is something else.
    """
    if not isinstance(value, dict):
        raise ProbeError(f"{where} is {type(value).__name__}; expected an object")
    return value


def rows(value: object, where: str) -> list[Mapping[str, object]]:
    """A JSON array of objects.

    Raises:
        ProbeError: it is something else.
    """
    if not isinstance(value, list):
        raise ProbeError(f"{where} is {type(value).__name__}; expected an array")
    return [table(entry, where) for entry in value]
