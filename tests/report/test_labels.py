from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvbudget.report import labels
from pytest_kvbudget.report.history import rung_value
from pytest_kvbudget.report.numbers import amount, plain_amount, shape_fields
from pytest_kvbudget.search.knobs import KNOBS
from pytest_kvbudget.search.model import Axis
from pytest_kvbudget.search.turn import label
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import GIB
from tests.report.building import attempt

STACKED = "gpu_memory_utilization=0.97,max_num_seqs=3,max_model_len=245760#2"


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_model_len", 245_760), ("max_num_seqs", 3), ("gpu_memory_utilization", 9_700), ("kv_cap_fraction", None)],
)
def test_a_label_names_every_axis(name: str, value: int | None) -> None:
    assert labels.value_of(STACKED, name) == value


@given(knob=st.sampled_from(sorted(KNOBS)), value=st.integers(0, 10**15))
def test_a_label_gives_back_what_the_search_counted(knob: str, value: int) -> None:
    value = value if KNOBS[knob].unit == "bytes" else value % 10_001
    written = label(knob, KNOBS[knob].setting(value))
    assert labels.value_of(written, knob) == value
    assert labels.value_of(f"max_num_seqs=3,{written}#4", knob) == value


@pytest.mark.parametrize("text", [None, "", "boot", "a=", "a=x", "a=1e5", "a=-3", "a=" + "9" * 5_000, "a=٣", "a=nan"])
def test_what_is_no_number_is_not_stated(text: str | None) -> None:
    assert labels.value_of(text, "a") is None


@given(st.text())
def test_any_text_may_be_a_label(text: str) -> None:
    labels.value_of(text, "max_model_len")
    labels.climbed(text)
    assert labels.shown(text).startswith(text)


def test_the_axis_that_was_climbed_stands_last() -> None:
    assert labels.climbed(STACKED) == "max_model_len"
    assert labels.climbed("max_model_len=4096") == "max_model_len"
    assert labels.climbed(None) is None


def test_bytes_are_shown_as_sizes_too() -> None:
    assert labels.shown(f"max_num_seqs=3,reserved_headroom={4 * GIB}#2") == (
        "max_num_seqs=3,reserved_headroom=4294967296#2 (4.00 GiB)"
    )
    assert labels.shown("max_model_len=4096") == "max_model_len=4096"


def test_the_rung_of_a_stacked_ladder_is_that_of_its_own_axis() -> None:
    record = attempt(245_760, rung=STACKED, shape=Shape(max_model_len=1, max_num_seqs=3, gpu_memory_utilization=0.97))
    values = {
        name: rung_value(record, Axis(name=name, floor=1, ceiling=10**6, quantum=1))
        for name in ("max_model_len", "max_num_seqs", "gpu_memory_utilization")
    }
    assert values == {"max_model_len": 245_760, "max_num_seqs": 3, "gpu_memory_utilization": 9_700}


def test_without_a_label_the_shape_says_where_a_boot_stood() -> None:
    record = attempt(4_096, rung=None, shape=Shape(gpu_memory_utilization=0.97))
    assert rung_value(record, Axis(name="gpu_memory_utilization", floor=1, ceiling=10**4, quantum=100)) == 9_700
    assert rung_value(record, Axis(name="max_model_len", floor=1, ceiling=10**4, quantum=100)) is None


@pytest.mark.parametrize(
    ("value", "text"), [(9_700, "0.97"), (9_000, "0.90"), (9_825, "0.9825"), (9_820, "0.982"), (10_000, "1.00")]
)
def test_fractions_are_fractions(value: int, text: str) -> None:
    assert plain_amount("gpu_memory_utilization", value) == amount("kv_cap_fraction", value) == text


def test_a_shape_holds_fractions_as_engines_take_them() -> None:
    assert ("gpu_memory_utilization", "0.97") in shape_fields(Shape(gpu_memory_utilization=0.97))
    assert ("gpu_memory_utilization", "1") in shape_fields(Shape(gpu_memory_utilization=1))
