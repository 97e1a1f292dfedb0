"""Real logs, mutated: cut, shuffled, repeated, spliced. Nothing breaks, nothing is invented, no half line decides."""

from __future__ import annotations

import io
import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvbudget import explain
from pytest_kvbudget.ledger.classes import CLASSES
from pytest_kvbudget.ledger.model import BootLedger
from pytest_kvbudget.ledger.reader import LedgerReader
from tests.ledger.support import DATA

LOGS = sorted([*DATA.glob("boots/*.log"), *DATA.glob("cases/*.log")])
CONSEQUENCES = {None, "unexplained", "engine_exception", "engine_killed"}
OOM = {name for name in CLASSES if name.endswith("_oom")} | {"single_alloc_limit"}

logs = st.sampled_from(LOGS)


@cache
def lines_of(log: Path) -> tuple[bytes, ...]:
    return tuple(log.read_bytes().splitlines(keepends=True))


def boots_of(data: bytes, cuts: tuple[int, ...] = ()) -> tuple[BootLedger, ...]:
    reader = LedgerReader()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        reader.feed(data[start:end])
    reader.close()
    return reader.boots()


@cache
def known_of(log: Path) -> tuple[dict[str, set[object]], set[str | None]]:
    """What the lines of a log state, taken alone and together, and the classes of its failure."""
    lines = lines_of(log)
    values: dict[str, set[object]] = {}
    classes: set[str | None] = set()
    texts = [b"".join(lines), *lines, *(b"".join(lines[start:]) for start in range(len(lines)))]
    for text in texts:
        for ledger in boots_of(text):
            classes.add(ledger.failure_class)
            for name, value in ledger.facts.items():
                values.setdefault(name, set()).update({value.value, *_of_ranks(ledger, name)})
    return values, classes


def _of_ranks(ledger: BootLedger, name: str) -> set[object]:
    return {value.value for value in ledger.ranks.get(name, {}).values()}


def check(data: bytes, *sources: Path) -> None:
    """Every figure stands in the line that is named for it, and one of the sources states it."""
    shown = data.split(b"\n")
    allowed: dict[str, set[object]] = {}
    classes: set[str | None] = set(CONSEQUENCES)
    for source in sources:
        values, known = known_of(source)
        classes |= known
        for name, stated in values.items():
            allowed.setdefault(name, set()).update(stated)
    if classes & OOM:
        classes |= OOM  # where an allocation failed is told by the lines before it, and these were moved
    for ledger in boots_of(data):
        assert ledger.failure_class in classes | {"request_starved"}
        for name, value in ledger.facts.items():
            assert value.value in allowed.get(name, set()), name
            text = shown[value.evidence.line - 1].decode("utf-8", "replace")
            assert value.evidence.text.strip()[:40] in text or "\r" in text, name


@given(logs, st.integers(0, 1 << 20))
@settings(max_examples=1500, deadline=None)
def test_a_log_that_ends_anywhere(log: Path, cut: int) -> None:
    data = b"".join(lines_of(log))
    check(data[: cut % (len(data) + 1)], log)


@given(logs, st.data())
@settings(max_examples=1500, deadline=None)
def test_chunks_of_lines_in_any_order(log: Path, data: st.DataObject) -> None:
    lines = lines_of(log)
    cuts = data.draw(st.lists(st.integers(0, len(lines)), max_size=6))
    chunks = [lines[start:end] for start, end in pairwise([0, *sorted(cuts), len(lines)])]
    order = data.draw(st.permutations(chunks))
    check(b"".join(line.rstrip(b"\n") + b"\n" for chunk in order for line in chunk), log)


@given(logs, st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), max_size=4))
@settings(max_examples=1500, deadline=None)
def test_parts_that_come_again(log: Path, parts: list[tuple[int, int]]) -> None:
    lines = [line.rstrip(b"\n") + b"\n" for line in lines_of(log)]
    for start, length in parts:
        part = lines[start % len(lines) :][:length]
        lines[start % len(lines) : start % len(lines)] = part
    check(b"".join(lines), log)


@given(logs, logs, st.integers(0, 400), st.integers(0, 400))
@settings(max_examples=1500, deadline=None)
def test_two_engines_in_one_stream(one: Path, other: Path, leave: int, join: int) -> None:
    first, second = lines_of(one), lines_of(other)
    lines = [
        *first[: leave % (len(first) + 1)],
        *second[join % (len(second) + 1) :],
        *first[leave % (len(first) + 1) :],
    ]
    check(b"".join(line.rstrip(b"\n") + b"\n" for line in lines), one, other)


@given(logs, st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 3000), st.binary(max_size=12)), max_size=5))
@settings(max_examples=1500, deadline=None)
def test_bytes_that_are_lost_or_broken_in_any_chunks(log: Path, holes: list[tuple[int, int, bytes]]) -> None:
    data = bytearray(b"".join(lines_of(log)))
    for start, length, noise in holes:
        begin = start % (len(data) + 1)
        data[begin : begin + length] = noise
    cuts = tuple(start for start, _, _ in holes)
    assert boots_of(bytes(data), cuts) == boots_of(bytes(data))
    out = io.StringIO()
    status = explain.run([], as_json=True, out=out, stdin=io.BytesIO(bytes(data)))
    said: dict[str, Any] = json.loads(out.getvalue())
    assert status in {0, 1, 2}
    assert said["failure_class"] is None or said["failure_class"] in CLASSES
