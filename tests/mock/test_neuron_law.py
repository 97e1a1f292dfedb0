"""The simulator's own budget of a NeuronCore against the golden cases of the facts, and its reading of variables."""

from __future__ import annotations

import pytest

from pytest_kvbudget.mock.arguments import parse
from pytest_kvbudget.mock.failures import Failure
from pytest_kvbudget.mock.neuron import law
from pytest_kvbudget.mock.physics import Physics
from pytest_kvbudget.mock.spec import MockDevice
from pytest_kvbudget.units import GIB

ONE = {"NEURON_LOGICAL_NC_CONFIG": "1"}
TRN2, TRN3 = 25_769_803_776, 38_654_705_664
MEASURED = 13_733_871_288
"""Weights of a model that was measured on trn2."""


def physics(
    platform: str = "trn2",
    weights: int = 5 * GIB,
    utilization: float = 0.9,
    release: str = "2.33",
    env: dict[str, str] | None = None,
) -> Physics:
    spec = MockDevice(dialect="neuron", platform=platform, weights=weights, release=release)  # type: ignore[arg-type]
    return Physics(spec, parse(["serve", "m", "--gpu-memory-utilization", str(utilization)], fork=False), env or {})


def budget(subject: Physics) -> law.Budget:
    return law.budget(subject, subject.spec.device_total)


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        (physics(), (TRN2, 23192823398, 17824114278, 6957847019, 6957847019)),
        (physics(weights=MEASURED), (TRN2, 23192823398, 9458952110, 6957847019, 6957847019)),
        (physics(weights=MEASURED, utilization=0.92), (TRN2, 23708219473, 9974348185, 7112465841, 7112465841)),
        (physics(env=ONE), (TRN2 // 2, 11596411699, 6227702579, 3478923509, 3478923509)),
        (physics(weights=21792500000), (TRN2, 23192823398, 1400323398, 6957847019, 1400323398)),
        (physics(weights=21792500000, utilization=0.8), (TRN2, 20615843020, 0, 6184752906, 0)),
        (physics("trn3", 8 * GIB), (TRN3, 34789235097, 26199300505, 10436770529, 10436770529)),
        (
            physics("trn3", 8 * GIB, env=ONE),
            (TRN3 // 2, 17394617548, 8804682956, 5218385264, 5218385264),
        ),
        (
            physics(utilization=1.0, env={law.CAP: "1.0"}),
            (TRN2, TRN2, 20401094656, TRN2, 20401094656),
        ),
    ],
)  # fmt: skip
def test_default_policy(subject: Physics, expected: tuple[int, int, int, int, int]) -> None:
    result = budget(subject)
    assert (
        result.core_bytes,
        result.total_budget_bytes,
        result.user_budget_bytes,
        result.cap_bytes,
        result.available_bytes,
    ) == expected


@pytest.mark.parametrize(
    ("core", "weights", "headroom", "available", "below"),
    [
        (("trn3", "2"), 8 * GIB, "4", 25769803776, False),
        (("trn3", "1"), 8 * GIB, "4", 6442450944, False),
        (("trn3", "2"), 8 * GIB, "0", 30064771072, False),
        (("trn2", "2"), MEASURED, "4", 7740965192, False),
        (("trn2", "1"), 8 * GIB, "4", 0, True),
        (("trn2", "1"), 8 * GIB, "3", 1073741824, False),
        (("trn2", "1"), 8 * GIB, "3.000000001", 1073741823, True),
        (("trn3", "2"), 8 * GIB, "4.5", 25232932864, False),
    ],
)
def test_headroom_policy(core: tuple[str, str], weights: int, headroom: str, available: int, below: bool) -> None:
    platform, lnc = core
    env = {law.HEADROOM: headroom, law.LNC: lnc}
    result = budget(physics(platform, weights, env=env))
    assert result.available_bytes == available
    assert result.below is below


@pytest.mark.parametrize("release", ["0.21", "0.24"])
def test_releases_before_2_33_know_no_headroom_and_divide_nothing(release: str) -> None:
    env = {"VLLM_NEURON_RESERVED_HEADROOM_GIB": "4", "NEURON_LOGICAL_NC_CONFIG": "1"}
    assert budget(physics(release=release, env=env)).available_bytes == 6957847019


@pytest.mark.parametrize(("value", "tested"), [("0", False), ("-1", False), ("nan", False), ("2", True)])
def test_minimum_is_tested_only_above_zero(value: str, tested: bool) -> None:
    result = budget(physics(env={law.MINIMUM: value}))
    assert result.minimum_bytes == (2 * GIB if tested else None)


@pytest.mark.parametrize(
    ("env", "kind", "text"),
    [
        (
            {"VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION": "0"},
            "RuntimeError", "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION must be in (0, 1]. Got 0.0.",
        ),
        ({"VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION": "nan"}, "ValueError", "cannot convert float NaN to integer"),
        ({"VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION": "x"}, "ValueError", "could not convert string to float: 'x'"),
        ({"VLLM_NEURON_MIN_KV_BUDGET_GIB": "inf"}, "OverflowError", "cannot convert float infinity to integer"),
        ({"VLLM_NEURON_RESERVED_HEADROOM_GIB": "x"}, "RuntimeError", "must be a number of GiB. Got 'x'."),
        ({"VLLM_NEURON_RESERVED_HEADROOM_GIB": "nan"}, "RuntimeError", "Got nan."),
        ({"NEURON_LOGICAL_NC_CONFIG": "3"}, "RuntimeError", "must be 1 or 2 on trn2. Got '3'."),
    ],
)  # fmt: skip
def test_nonsense_in_variables(env: dict[str, str], kind: str, text: str) -> None:
    with pytest.raises(Failure) as failed:
        budget(physics(env=env))
    assert failed.value.kind == kind
    assert text in failed.value.text


def test_headroom_keeps_the_cap_from_being_read() -> None:
    env = {"VLLM_NEURON_RESERVED_HEADROOM_GIB": "4", "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION": "9"}
    assert budget(physics(env=env)).available_bytes == TRN2 - 9 * GIB


def test_guard_names_what_to_turn() -> None:
    # 8 of 12 GiB are weights: 3 GiB of headroom are the most that leave the minimum of 1
    subject = physics(weights=8 * GIB, env={**ONE, law.HEADROOM: "4"})
    text = law.below_minimum(subject, budget(subject)).text
    assert "effective=0.00 GiB, minimum=1.00 GiB." in text
    assert "VLLM_NEURON_RESERVED_HEADROOM_GIB is 4.00 GiB per logical core; its maximum is 3.00 GiB." in text
    subject = physics(weights=21792500000, utilization=0.8)
    text = law.below_minimum(subject, budget(subject)).text
    assert "gpu_memory_utilization" in text
    assert "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION" in text
    subject = physics(weights=21792500000, utilization=0.8, release="0.24")
    assert law.below_minimum(subject, budget(subject)).text == (
        "Computed KV cache budget is below minimum threshold. effective=0.00 GiB, minimum=1.00 GiB. Increase"
        " gpu_memory_utilization or lower VLLM_NEURON_MIN_KV_BUDGET_GIB."
    )


def test_buckets_come_from_the_additional_config() -> None:
    config = '{"neuron_config": {"num_batched_tokens_buckets": [256, 1024], "num_seqs_buckets": [1, 4]}}'
    arguments = parse(["serve", "m", "--additional-config", config, "--max-model-len", "8192"], fork=False)
    found = law.buckets_of(Physics(MockDevice(dialect="neuron"), arguments, {}))
    assert (found.prefill, found.decode, found.count, found.kv_segment) == ((256, 1024), (1, 4), 4, 8192)
