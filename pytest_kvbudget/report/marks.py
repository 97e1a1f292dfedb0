"""The ways a boot can end, each with its own word, colour class and drawn shape."""

from __future__ import annotations

from typing import Final

import msgspec

from pytest_kvbudget.ledger.model import Cause
from pytest_kvbudget.report.elements import Element, element
from pytest_kvbudget.search.knobs import Side
from pytest_kvbudget.verdict import Verdict


class Mark(msgspec.Struct, frozen=True):
    """How an outcome is told apart: never by colour alone."""

    key: str
    """CSS class suffix."""
    word: str
    """Short word, for tables and charts."""
    sentence: str
    """What it means, for headlines."""
    path: str
    """SVG path around the origin, 7 px in each direction."""
    hollow: bool = False


PASS: Final = Mark("pass", "PASS", "Booted and passed", "M-7 0a7 7 0 1 0 14 0a7 7 0 1 0 -14 0z")
MARGINAL: Final = Mark(
    "marginal", "MARGINAL", "Passed, with less margin than asked for",
    "M-7 0a7 7 0 1 0 14 0a7 7 0 1 0 -14 0zM-4.5 0a4.5 4.5 0 0 0 9 0z",
)  # fmt: skip
FAIL: Final = Mark(
    "fail", "FAIL", "Failed for memory",
    "M-7 -4.2L-4.2 -7L0 -2.8L4.2 -7L7 -4.2L2.8 0L7 4.2L4.2 7L0 2.8L-4.2 7L-7 4.2L-2.8 0z",
)  # fmt: skip
ALLOCATION: Final = msgspec.structs.replace(
    FAIL, word="FAIL (allocation)", sentence="Too little memory outside the KV cache"
)
MINIMUM_KV: Final = Mark("short", "FAIL (too little KV)", "Too little KV cache", "M-7.5 -5.5H7.5L0 7.5z")
GATE: Final = Mark("gate", "FAIL (gate)", "Refused by the test, not by memory", "M0 -7.5L7.5 0L0 7.5L-7.5 0z")
UNKNOWN: Final = Mark("unknown", "UNKNOWN", "No verdict", "M-6 0a6 6 0 1 0 12 0a6 6 0 1 0 -12 0z", hollow=True)
ERROR: Final = Mark("error", "ERROR", "Failed, but not for memory", "M0 -7L7.2 6H-7.2z")

ALL: Final = (PASS, MARGINAL, FAIL, ALLOCATION, MINIMUM_KV, GATE, UNKNOWN, ERROR)
_OF_SIDE: Final = {"allocation": ALLOCATION, "minimum_kv": MINIMUM_KV, None: FAIL}


def mark_of(verdict: Verdict, cause: Cause | None, side: Side | None = None) -> Mark:
    """The mark of an attempt; a FAIL that the test body gave is not a FAIL for memory.

    Args:
        verdict: of the attempt.
        cause: of the attempt.
        side: which way its failure pushes the knob of a sweep; ``None`` outside sweeps.
    """
    if verdict is Verdict.FAIL:
        return GATE if cause is not None and cause.by_gate else _OF_SIDE[side]
    return {Verdict.PASS: PASS, Verdict.MARGINAL: MARGINAL, Verdict.UNKNOWN: UNKNOWN, Verdict.ERROR: ERROR}[verdict]


def symbol(mark: Mark, *, large: bool = False) -> Element:
    """The mark's shape to stand in a line of text; hidden from screen readers, which get the word."""
    side = 22 if large else 14
    return element(
        "svg", drawn(mark), viewBox="-9 -9 18 18", width=side, height=side, class_="symbol", aria_hidden="true"
    )


def drawn(mark: Mark) -> Element:
    """The mark's shape around the origin, for charts."""
    return element("path", d=mark.path, class_=f"mark m-{mark.key}{' hollow' if mark.hollow else ''}")


def label(mark: Mark) -> Element:
    """Shape and word together."""
    return element("span", symbol(mark), element("b", mark.word), class_=f"verdict v-{mark.key}")
