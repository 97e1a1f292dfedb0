"""What each bad value does in the real worker: facts on vLLM Neuron, section 3."""

from __future__ import annotations

import pytest

from pytest_kvbudget.budget.model import BudgetInputError
from pytest_kvbudget.budget.neuron import Variant
from pytest_kvbudget.budget.neuron_env import lnc_warning, read_knobs
from pytest_kvbudget.units import GIB

CAP = "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION"
MINIMUM = "VLLM_NEURON_MIN_KV_BUDGET_GIB"
HEADROOM = "VLLM_NEURON_RESERVED_HEADROOM_GIB"


def test_defaults() -> None:
    knobs = read_knobs({})
    assert (knobs.cap_fraction, knobs.minimum_bytes, knobs.headroom_bytes) == (0.30, GIB, None)
    assert not knobs.refusals


@pytest.mark.parametrize(
    ("name", "raw", "raises"),
    [
        (CAP, "0", "must be in"),
        (CAP, "-0.1", "must be in"),
        (CAP, "1.01", "must be in"),
        (CAP, "inf", "must be in"),
        (CAP, "nan", "cannot convert float NaN to integer"),
        (CAP, "", "could not convert string to float: ''"),
        (CAP, "30%", "could not convert string to float: '30%'"),
        (MINIMUM, "inf", "OverflowError"),
        (MINIMUM, "one", "could not convert string to float"),
        (HEADROOM, "nan", "not a finite number"),
        (HEADROOM, "inf", "not a finite number"),
        (HEADROOM, "4 GiB", "could not convert string to float"),
        ("NEURON_LOGICAL_NC_CONFIG", "3", "an error"),
        ("VLLM_NEURON_CPU_MODE", "yes", "invalid literal for int"),
    ],
)
def test_values_that_stop_the_worker(name: str, raw: str, raises: str) -> None:
    knobs = read_knobs({name: raw})
    assert len(knobs.refusals) == 1
    assert name in knobs.refusals[0].sentence
    assert raises in knobs.refusals[0].sentence


@pytest.mark.parametrize("raw", ["0", "-1", "nan", "-inf"])
def test_minimum_values_that_disable_the_check_are_warned_about(raw: str) -> None:
    knobs = read_knobs({MINIMUM: raw})
    assert knobs.minimum_bytes is None
    assert not knobs.refusals
    assert "disables" in knobs.warnings[0]


@pytest.mark.parametrize(("raw", "size_bytes"), [("0", 0), ("4", 4 * GIB), ("4.5", 4831838208), (" 4 ", 4 * GIB)])
def test_explicit_headroom(raw: str, size_bytes: int) -> None:
    assert read_knobs({HEADROOM: raw}).headroom_bytes == size_bytes


def test_negative_headroom_has_no_known_rule() -> None:
    with pytest.raises(BudgetInputError, match="not public"):
        read_knobs({HEADROOM: "-1"})


def test_headroom_is_not_read_before_2_33() -> None:
    knobs = read_knobs({HEADROOM: "4"}, Variant.RELEASE_0_24)
    assert knobs.headroom_bytes is None
    assert "does not read" in knobs.warnings[0]


def test_bad_cap_beside_headroom_is_a_warning() -> None:
    # read lazily, and headroom bypasses the cap: not known to stop the boot
    knobs = read_knobs({HEADROOM: "4", CAP: "nan"})
    assert not knobs.refusals
    assert CAP in knobs.warnings[0]


def test_cpu_switches() -> None:
    both = read_knobs(
        {"VLLM_NEURON_CPU_MODE": "1", "VLLM_NEURON_CPU_COMPILE": "1", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}
    )
    assert "not compatible" in both.refusals[0].sentence
    alone = read_knobs({"VLLM_NEURON_CPU_COMPILE": "1"})
    assert "NEURON_PLATFORM_TARGET_OVERRIDE" in alone.refusals[0].sentence
    odd = read_knobs({"VLLM_NEURON_CPU_MODE": "01"})
    assert odd.cpu_mode
    assert "write 1" in odd.warnings[0]


def test_lnc_1_on_a_release_written_for_lnc_2() -> None:
    assert lnc_warning(1, Variant.SDK_2_33) is None
    assert lnc_warning(2, Variant.RELEASE_0_24) is None
    warning = lnc_warning(1, Variant.RELEASE_0_24)
    assert warning is not None
    assert "status=4" in warning
