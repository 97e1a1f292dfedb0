from __future__ import annotations

from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvbudget.units import (
    GIB,
    MIB,
    SizeError,
    exact_unit,
    format_gib,
    format_size,
    parse_memory,
    parse_size,
    size_beyond,
    size_in,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("31.86 GiB", 34_209_414_512),  # 31.86 * 2^30 = 34,209,414,512.64, cut
        ("76 MiB", 79_691_776),
        ("76MiB", 79_691_776),
        ("0.5 kib", 512),
        ("1 TiB", 1_099_511_627_776),
        ("50_000 B", 50_000),
        ("512", 512),
        (52_428_800, 52_428_800),
        (0, 0),
    ],
)
def test_reads_sizes(text: object, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("value", [8, "8", 512, "24_576", MIB - 1])
def test_a_bare_number_that_no_memory_has_needs_its_unit(value: object) -> None:
    with pytest.raises(SizeError, match=f"'{value} GiB', '{value} MiB', or '{value} B' if bytes are meant"):
        parse_memory(value)


@pytest.mark.parametrize(
    ("value", "size_bytes"), [(0, 0), (MIB, MIB), ("2457600", 2_457_600), ("512 B", 512), ("8 GiB", 8 * GIB)]
)
def test_reads_amounts_of_memory(value: object, size_bytes: int) -> None:
    assert parse_memory(value) == size_bytes


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("31.86 GB", "write '31.86 GiB' for 2^30"),
        ("50M", "write '50 MiB' for 2^20"),
        ("lots", "'lots' is not a size"),
        ("", "'' is not a size"),
        ("1.5", "fraction of a byte"),
        ("-3 GiB", "is not a size"),
        (-3, "-3 is negative"),
        (1.5, "1.5 is float"),
        (True, "True is bool"),
        (None, "None is NoneType"),
        ("3 parsecs", "unit 'parsecs'"),
        ("1e9", "'1e9' is not a size"),
    ],
)
def test_refuses_what_is_no_size_and_says_what_is_accepted(value: object, said: str) -> None:
    with pytest.raises(SizeError) as caught:
        parse_size(value)
    assert said in str(caught.value)
    assert "GiB" in str(caught.value), "the message shows what is accepted"


@given(st.integers(min_value=0, max_value=2**50))
def test_an_integer_of_bytes_stays_what_it_is(size_bytes: int) -> None:
    assert parse_size(size_bytes) == parse_size(str(size_bytes)) == parse_size(f"{size_bytes} B") == size_bytes


@given(st.integers(min_value=0, max_value=2**50))
def test_what_is_written_reads_back_within_its_printed_precision(size_bytes: int) -> None:
    unit = max(1, 2 ** (10 * min(4, max(0, (size_bytes.bit_length() - 1) // 10))))
    assert abs(parse_size(format_size(size_bytes)) - size_bytes) <= unit * 0.005 + 1


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_size_error(text: str) -> None:
    with suppress(SizeError):
        assert parse_size(text) >= 0


@given(st.integers(0, 2**45), st.integers(0, 2**45))
def test_a_size_is_exact_in_whatever_unit_it_is_asked_for(size_bytes: int, other: int) -> None:
    assert parse_size(size_in(size_bytes, exact_unit((other,))).replace(",", "")) == size_bytes


@given(st.integers(0, 2**45), st.sampled_from([1, 2**10, MIB, GIB]))
def test_what_is_none_of_a_grid_is_rounded_to_the_side_that_is_asked_for(size_bytes: int, unit: int) -> None:
    down, up = (size_beyond(size_bytes, unit, up=up).replace(",", "").split() for up in (False, True))
    assert down[1] == up[1]
    assert Fraction(down[0]) * unit <= size_bytes <= Fraction(up[0]) * unit
    assert Fraction(up[0]) - Fraction(down[0]) <= Fraction(1, 100)


def test_writes_for_people() -> None:
    assert format_size(34_208_743_424) == "31.86 GiB"
    assert format_size(76 * MIB) == "76.00 MiB"
    assert format_size(-62 * MIB) == "-62.00 MiB"
    assert format_size(999) == "999 B"
    assert format_gib(0.12 * GIB) == "0.12 GiB"
