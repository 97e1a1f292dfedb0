"""Labels of rungs: ``max_num_seqs=3,max_model_len=245760#2``, the axis that was climbed last, then the repetition."""

from __future__ import annotations

import re
from typing import Final

from pytest_kvbudget.report.numbers import BYTES_FIELDS, whole_number
from pytest_kvbudget.units import exact_unit, size_in

_NUMBER: Final = re.compile(r"[0-9]{1,18}(?:\.[0-9]{1,9})?")


def value_of(label: str | None, name: str) -> int | None:
    """What a label says of an axis, as searches count it (fractions in ten-thousandths); ``None`` where it does not."""
    text = _settings(label).get(name, "")
    return whole_number(name, float(text) if "." in text else int(text)) if _NUMBER.fullmatch(text) else None


def climbed(label: str | None) -> str | None:
    """The axis that was climbed: the last one that a label names; ``None`` where it names none."""
    return next(reversed(_settings(label)), None)


def shown(label: str) -> str:
    """The label for people: what it gives in bytes follows as sizes, ``reserved_headroom=4294967296 (4.00 GiB)``."""
    values = [value_of(label, name) for name in _settings(label) if name in BYTES_FIELDS]
    sizes = ", ".join(size_in(value, exact_unit((value,))) for value in values if value is not None)
    return f"{label} ({sizes})" if sizes else label


def _settings(label: str | None) -> dict[str, str]:
    parts = (part.partition("=") for part in (label or "").partition("#")[0].split(","))
    return {name: setting for name, equals, setting in parts if equals}
