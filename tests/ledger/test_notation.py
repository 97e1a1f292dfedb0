"""The notation of the grammar tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvbudget.ledger.grammar import TABLES
from pytest_kvbudget.ledger.grammar.model import SHORTEST_NEEDLE
from pytest_kvbudget.ledger.notation import NotationError, Pattern, read
from tests.ledger.support import GIB


@given(st.integers(-(2**45), 2**45))
def test_a_size_printed_with_two_decimals_is_read_within_its_precision(size_bytes: int) -> None:
    reading = read(f"{size_bytes / GIB:.2f} GiB", "gib")
    assert isinstance(reading.value, int)
    assert abs(reading.value - size_bytes) <= reading.precision + 1


@given(st.integers(0, 2**45))
def test_a_size_with_its_zeros_dropped_is_read_within_its_precision(size_bytes: int) -> None:
    reading = read(f"{round(size_bytes / GIB, 2)} GiB", "gib")
    assert isinstance(reading.value, int)
    assert abs(reading.value - size_bytes) <= reading.precision + 1


@given(st.integers(0, 10**12))
def test_a_count_is_read_with_and_without_separators(count: int) -> None:
    assert read(f"{count:,}", "tokens").value == count
    assert read(str(count), "tokens").value == count


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("76.00 MiB", "size", 76 * 2**20),
        ("448.00 KiB", "size", 448 * 2**10),
        ("0 bytes", "size", 0),
        ("15.855GB", "size", round(15.855 * GIB)),
        ("0.000B", "size", 0),
        ("+1188", "signed_count", 1188),
        ("-12", "signed_count", -12),
        ("31.86", "gib_bare", round(31.86 * GIB)),
        ("1", "fraction", 1.0),
        ("14", "secs", 14),
    ],
)
def test_figures_are_read_in_base_units(text: str, kind: str, value: float) -> None:
    assert read(text, kind).value == value


def test_a_count_does_not_take_the_comma_or_the_full_stop_that_follows_it() -> None:
    pattern = Pattern(r"size: {kv_tokens:tokens} tokens|length is {estimated_max_model_len:count}\b")
    for text, value in (("size: 150,745 tokens, Maximum", 150745), ("length is 28800. Try", 28800)):
        match = pattern.regex.search(text)
        assert match is not None
        assert [reading.value for reading in pattern.readings(match).values()] == [value]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("x {a:pounds}", "no such kind"),
        ("x {a:gib} {a:gib}", "stands twice"),
        ("x ({a:gib}", "is no pattern"),
    ],
)
def test_a_wrong_pattern_says_what_is_wrong(pattern: str, message: str) -> None:
    with pytest.raises(NotationError, match=message):
        Pattern(pattern)


def test_a_pattern_of_plain_text_takes_any_spaces_and_no_wildcards() -> None:
    pattern = Pattern("KV (budget): {available_kv_bytes:size}", literal=True)
    assert pattern.regex.search("KV   (budget): 4.00 GiB") is not None
    assert pattern.regex.search("KV budget: 4.00 GiB") is None


ROWS = [row for table in TABLES for row in table.rows]


def test_every_row_can_be_found_by_its_text() -> None:
    assert [row.pattern for row in ROWS if len(row.literal_needle()) < SHORTEST_NEEDLE] == []


def test_no_two_rows_say_the_same() -> None:
    assert len({row.pattern for row in ROWS}) == len(ROWS)
