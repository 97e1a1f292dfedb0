"""The notation of the grammar tables: a regular expression in which ``{name:kind}`` stands for a printed figure.

``Available KV cache memory: {available_kv_bytes:gib}`` reads the figure and its unit. Engines print binary units
whatever they call them (``GB`` is 2^30 in every engine read here), drop trailing zeros, print negative sizes and
thousands separators; the kinds know all of that.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final, NamedTuple

from pytest_kvbudget.ledger.model import Unit
from pytest_kvbudget.units import GIB, KIB, MIB, TIB

_NUMBER = r"-?[0-9]+(?:\.[0-9]+)?"
_COUNT = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+"
_FACTORS: Final = {"": 1, "K": KIB, "M": MIB, "G": GIB, "T": TIB}

_KINDS: Final[dict[str, str]] = {
    "gib": rf"(?:{_NUMBER})\s?Gi?B\b",
    "mib": rf"(?:{_NUMBER})\s?Mi?B\b",
    "size": rf"(?:{_NUMBER})\s?(?:[KMGT]i?B|[Bb]ytes|B)\b",
    "xla": rf"(?:{_NUMBER})[KMGT]?B?\b",
    "gib_bare": _NUMBER,
    "mib_bare": _NUMBER,
    "bytes": r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)",
    "tokens": _COUNT,
    "count": _COUNT,
    "signed_count": r"[+-]?[0-9]+",
    "fraction": r"[0-9]+(?:\.[0-9]+)?",
    "ratio": r"[0-9]+(?:\.[0-9]+)?",
    "percent": r"[0-9]+(?:\.[0-9]+)?",
    "share": r"[0-9]+(?:\.[0-9]+)?",
    "secs": r"[0-9]+(?:\.[0-9]+)?",
    "word": r"\S+?",
    "text": r".+?",
}
_UNITS: Final[dict[str, Unit]] = {
    "gib": "bytes",
    "mib": "bytes",
    "size": "bytes",
    "xla": "bytes",
    "gib_bare": "bytes",
    "mib_bare": "bytes",
    "bytes": "bytes",
    "tokens": "tokens",
    "count": "count",
    "signed_count": "count",
    "fraction": "fraction",
    "ratio": "ratio",
    "percent": "percent",
    "share": "percent",
    "secs": "seconds",
    "word": "text",
    "text": "text",
}
_PLACE = re.compile(r"\{([a-z][a-z0-9_]*):([a-z_]+)\}")
_SIZE = re.compile(r"\s?([KMGT]?)(?:i?B|ytes|[Bb]ytes)?")


class NotationError(ValueError):
    """A pattern that cannot be compiled; the message shows the pattern and what is accepted."""


class Reading(NamedTuple):
    """A figure as a line prints it."""

    value: int | float | str
    unit: Unit
    precision: float
    """Half a unit of the last printed digit; 0 for exact values."""


class Pattern:
    """A compiled pattern of the notation."""

    def __init__(self, text: str, *, literal: bool = False) -> None:
        """Compile ``text``; with ``literal`` everything outside the places is plain text and spaces stand for any run.

        Raises:
            NotationError: for an unknown kind or a regular expression that does not compile.
        """
        self.text = text
        self.kinds: dict[str, str] = {}
        source, end = "", 0
        for place in _PLACE.finditer(text):
            name, kind = place.group(1), place.group(2)
            if kind not in _KINDS:
                raise NotationError(f"{text!r}: {{{name}:{kind}}} has no such kind; known: {', '.join(_KINDS)}")
            if name in self.kinds:
                raise NotationError(f"{text!r}: {{{name}:...}} stands twice; a name may stand once")
            source += self._plain(text[end : place.start()], literal=literal) + f"(?P<{name}>{_KINDS[kind]})"
            self.kinds[name] = kind
            end = place.end()
        source += self._plain(text[end:], literal=literal)
        try:
            self.regex = re.compile(source)
        except re.error as error:
            raise NotationError(f"{text!r} is no pattern: {error}") from error

    @staticmethod
    def _plain(text: str, *, literal: bool) -> str:
        if not literal:
            return text
        return r"\s+".join(re.escape(word) for word in re.split(r"\s+", text))

    def readings(self, match: re.Match[str], end: int | None = None) -> dict[str, Reading]:
        """The figures of a match, by name; places that did not match, or digits beyond ``end``, are not there."""
        found = {}
        for name, kind in self.kinds.items():
            printed = match[name]
            if printed is not None and (end is None or match.end(name) <= end or not printed[-1].isdigit()):
                found[name] = read(printed, kind)
        return found


def places(pattern: str) -> dict[str, Unit]:
    """The facts that a pattern prints, with their units."""
    return {name: _UNITS[kind] for name, kind in _PLACE.findall(pattern)}


def read(printed: str, kind: str) -> Reading:
    """Read a figure of a kind: bytes for sizes, ``int`` for counts, ``float`` for the rest, ``str`` for words."""
    unit = _UNITS[kind]
    if kind in {"word", "text"}:
        return Reading(printed, unit, 0)
    if kind in {"bytes", "tokens", "count", "signed_count"}:
        return Reading(int(printed.replace(",", "")), unit, 0)
    number = re.match(r"-?[0-9]+(?:\.[0-9]+)?", printed)
    assert number is not None, "every kind begins with a number"
    value, decimals = Decimal(number.group()), len(number.group().partition(".")[2])
    if kind == "share":
        return Reading(float(100 * value), unit, 50 / 10**decimals if decimals else 0)
    if unit != "bytes":
        exact = decimals == 0
        return Reading(
            int(value) if exact and kind == "secs" else float(value), unit, 0 if exact else 0.5 / 10**decimals
        )
    factor = _factor(printed[number.end() :], kind)
    if factor == 1:
        return Reading(int(value), unit, 0)
    # "30.9 GiB" is 30.90 with its zero dropped: engines round to two decimals and then print the shortest form
    digits = max(decimals, 2) if factor == GIB else decimals
    return Reading(round(value * factor), unit, 0.5 * factor / 10**digits)


def _factor(tail: str, kind: str) -> int:
    if kind == "gib_bare":
        return GIB
    if kind == "mib_bare":
        return MIB
    size = _SIZE.fullmatch(tail)
    return _FACTORS[size.group(1)] if size is not None else 1
