from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pytest_kvbudget.report import certainty
from pytest_kvbudget.report.searched import Track, track_of
from pytest_kvbudget.search.knobs import KNOBS
from pytest_kvbudget.search.model import Axis, SweepFinding
from pytest_kvbudget.units import GIB, MIB
from pytest_kvbudget.verdict import FindingKind
from tests.report.building import finding_record
from tests.report.sweeping import MINIMUM, sweep_record

FOUR_GIB = SweepFinding(
    kind=FindingKind.PROVEN, knob="reserved_headroom", lowest=0, highest=12 * GIB, step=GIB, value=4 * GIB,
    failed_at=3 * GIB, boots=3, sentence="", sigma_bytes=64.0 * MIB, sigma_source="archive",
)  # fmt: skip


@given(floor=st.integers(1, 10**6), above=st.integers(0, 10**6), quantum=st.integers(1, 10**6))
def test_the_grid_of_a_ladder_is_its_axis(floor: int, above: int, quantum: int) -> None:
    axis = Axis(name="max_model_len", floor=floor, ceiling=floor + above, quantum=quantum)
    track = track_of(finding_record((), axis=axis))
    assert track.rungs == len(axis)
    for index in {0, len(axis) // 2, len(axis) - 1}:
        assert track.value(index) == axis.value(index)


def test_the_grid_of_a_sweep_begins_at_the_goals_end() -> None:
    assert list(Track("reserved_headroom", 0, 10, 4, "least").values(9)) == [0, 4, 8, 10]
    assert list(Track("gpu_memory_utilization", 0, 10, 4, "most").values(9)) == [0, 2, 6, 10]
    assert list(Track("reserved_headroom", 0, 10, 4, "least").values(3)) == []


@given(low=st.integers(0, 2**35), step=st.integers(1, 2**33), count=st.integers(1, 40))
def test_values_of_a_grid_of_bytes_never_look_alike(low: int, step: int, count: int) -> None:
    track = Track("kv_cache_memory_bytes", low, low + count * step, step, "least")
    shown = [track.show(value) for value in track.values(50)]
    assert len(set(shown)) == count + 1
    assert len({text.split()[-1] for text in shown}) == 1


def test_a_default_step_of_one_mebibyte_can_be_read_and_typed_again() -> None:
    track = Track("kv_cache_memory_bytes", GIB, 4 * GIB, MIB, "least")
    assert [track.show(1_925 * MIB), track.show(1_926 * MIB)] == ["1,925.00 MiB", "1,926.00 MiB"]
    assert Track("reserved_headroom", 0, 30 * GIB, GIB, "least").show(4 * GIB) == "4.00 GiB"


@pytest.mark.parametrize(
    ("changes", "text", "why"),
    [
        ({"deploy_value": 4 * GIB + 192 * MIB}, "at least 4.19 GiB", "arithmetic, not a boot"),
        ({"deploy_value": 4 * GIB + 192 * MIB, "short_at": 7 * GIB}, "at least 4.19 GiB", "three sigma above"),
        ({"deploy_value": 5 * GIB, "short_at": 5 * GIB, "short_by": MINIMUM}, "no value", "narrower than three sigma"),
        ({"deploy_value": 13 * GIB}, "at least 13.00 GiB", "beyond what was asked for"),
        ({"deploy_value": 4 * GIB}, "at least 4.00 GiB", "noise does not move"),
        ({"knob": "gpu_memory_utilization", "lowest": 8_000, "highest": 9_900, "value": 9_500, "deploy_value": 9_461},
         "at most 0.9461", "three sigma below the largest"),
        ({"knob": "gpu_memory_utilization", "lowest": 8_000, "highest": 9_900, "value": 9_500, "deploy_value": 9_461,
          "short_at": 9_470}, "no value", "narrower"),
    ],
)  # fmt: skip
def test_what_may_be_deployed(changes: dict[str, Any], text: str, why: str) -> None:
    deploy = certainty.deploy(sweep_record(replaced(**changes)))
    assert deploy is not None
    assert deploy.text == text
    assert why in deploy.why


@given(extra=st.integers(1, 8 * GIB), knob=st.sampled_from(["reserved_headroom", "kv_cache_memory_bytes"]))
def test_a_deploy_value_is_never_rounded_towards_the_edge(extra: int, knob: str) -> None:
    deploy = certainty.deploy(sweep_record(replaced(knob=knob, deploy_value=4 * GIB + extra)))
    assert deploy is not None
    assert float(deploy.value.split()[0]) * GIB >= 4 * GIB + extra


def test_where_nothing_is_known_nothing_is_promised() -> None:
    assert certainty.deploy(sweep_record(replaced())) is None
    assert certainty.deploy(finding_record(())) is None
    assert certainty.noise(finding_record(())) is None


@pytest.mark.parametrize(
    "kind", [FindingKind.UNDECIDED, FindingKind.FLAKY, FindingKind.NON_MONOTONE, FindingKind.ERROR]
)
def test_what_is_not_proven_is_not_deployed(kind: FindingKind) -> None:
    assert certainty.deploy(sweep_record(replaced(kind=kind, deploy_value=4 * GIB + 192 * MIB))) is None
    assert certainty.deploy(finding_record((), kind=kind, deploy_value=239_616)) is None


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("archive", "one sigma is 12.00 MiB, from repeated boots in the archive"),
        ("residuals", "one sigma is 12.00 MiB, from this search's own boots"),
        ("assumed", "one sigma is 12.00 MiB, assumed, not measured"),
    ],
)
def test_where_sigma_comes_from(source: str, words: str) -> None:
    assert certainty.noise(finding_record((), sigma_bytes=12.0 * MIB, sigma_source=source)) == words


def test_boots_that_differ_by_no_printed_digit_measured_no_noise() -> None:
    """Figures of two decimals: a uniform error of 0.01 GiB has a deviation of that over the root of 12."""
    record = finding_record((), sigma_bytes=0.01 * GIB / 12**0.5, sigma_source="residuals")
    said = certainty.noise(record)
    assert said == "one sigma is 2.96 MiB, what two printed decimals hide: this search's own boots show no more"


def test_no_noise_is_no_measurement_of_none() -> None:
    record = finding_record((), sigma_bytes=0.0, sigma_source="residuals")
    assert certainty.noise(record) == "none seen between this search's own boots"


def test_ladders_deploy_less_and_never_more() -> None:
    deploy = certainty.deploy(finding_record((), deploy_value=239_616))
    assert deploy is not None
    assert (deploy.text, deploy.why) == (
        "at most 239,616 tokens", "three sigma below the largest that passed; arithmetic, not a boot",
    )  # fmt: skip


def test_every_knob_has_a_track() -> None:
    for name, knob in KNOBS.items():
        assert track_of(sweep_record(replaced(knob=name))).goal == knob.goal
    grid = [track_of(sweep_record(replaced())).value(index) for index in range(13)]
    assert {high - low for low, high in pairwise(grid)} == {GIB}


def replaced(**changes: Any) -> SweepFinding:
    """The proven headroom of 4 GiB, with some fields set."""
    return replace(FOUR_GIB, **changes)
