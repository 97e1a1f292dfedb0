"""Golden values of the facts on vLLM Neuron, section 4, and the worked cases of the source document."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_kvbudget.budget.blocks import KvGeometry, block_count, bytes_for_blocks, parity
from pytest_kvbudget.budget.model import BudgetInputError
from pytest_kvbudget.budget.neuron import (
    CAP_VARIABLE,
    HEADROOM_VARIABLE,
    Budget,
    Variant,
    compute_kv_budget,
    cpu_kv_budget,
    default_lnc,
    hbm_stack_bytes,
    logical_cores_per_stack,
    maximum_headroom,
    minimum_from_text,
    minimum_refusal,
    switch_warning,
    variant_of,
)
from pytest_kvbudget.units import GIB, MIB

W5, W8, W16 = 5 * GIB, 8 * GIB, 16 * GIB


def budget(platform: str, lnc: int, weights_bytes: int, **settings: Any) -> Budget:
    return compute_kv_budget(
        stack_bytes=hbm_stack_bytes(platform),
        weights_bytes=weights_bytes,
        cores_per_stack=logical_cores_per_stack(platform, lnc),
        **settings,
    )


CORE_24, CORE_12, CORE_36, CORE_18 = 25769803776, 12884901888, 38654705664, 19327352832
FORK_WEIGHTS, NEAR_FULL = 13733871288, 21792500000


@pytest.mark.parametrize(
    ("target", "settings", "expected"),
    [
        # expected: share, total budget, user budget, cap, available. The engine prints max(user, 0); here it is kept
        pytest.param(("trn2", 2, W5), (0.9, 0.3), (CORE_24, 23192823398, 17824114278, 6957847019, 6957847019), id="D1"),
        pytest.param(
            ("trn2", 2, FORK_WEIGHTS), (0.9, 0.3), (CORE_24, 23192823398, 9458952110, 6957847019, 6957847019), id="D2"
        ),
        pytest.param(
            ("trn2", 2, FORK_WEIGHTS), (0.92, 0.3), (CORE_24, 23708219473, 9974348185, 7112465841, 7112465841), id="D3"
        ),
        pytest.param(("trn2", 1, W5), (0.9, 0.3), (CORE_12, 11596411699, 6227702579, 3478923509, 3478923509), id="D4"),
        pytest.param(
            ("trn2", 2, NEAR_FULL), (0.9, 0.3), (CORE_24, 23192823398, 1400323398, 6957847019, 1400323398), id="D5"
        ),
        pytest.param(("trn2", 2, NEAR_FULL), (0.8, 0.3), (CORE_24, 20615843020, -1176656980, 6184752906, 0), id="D6"),
        pytest.param(
            ("trn3", 2, W8), (0.9, 0.3), (CORE_36, 34789235097, 26199300505, 10436770529, 10436770529), id="D7"
        ),
        pytest.param(("trn3", 1, W8), (0.9, 0.3), (CORE_18, 17394617548, 8804682956, 5218385264, 5218385264), id="D9"),
        pytest.param(("trn3", 1, W16), (0.9, 0.3), (CORE_18, 17394617548, 214748364, 5218385264, 214748364), id="D10"),
        pytest.param(("trn2", 2, W5), (1.0, 1.0), (CORE_24, CORE_24, 20401094656, CORE_24, 20401094656), id="D12"),
    ],
)
def test_default_policy(
    target: tuple[str, int, int], settings: tuple[float, float], expected: tuple[int, int, int, int, int]
) -> None:
    utilization, cap_fraction = settings
    result = budget(*target, utilization=utilization, cap_fraction=cap_fraction)
    assert expected == (
        result.share_bytes,
        result.total_budget_bytes,
        result.user_budget_bytes,
        result.cap_bytes,
        result.available_bytes,
    )
    assert result.plan.left_bytes == min(result.user_budget_bytes, expected[3])


@pytest.mark.parametrize(
    ("target", "headroom_gib", "available", "most_gib"),
    [
        pytest.param(("trn3", 2, W8), 4, 25769803776, 27, id="H1"),
        pytest.param(("trn3", 1, W8), 4, 6442450944, 9, id="H2"),
        pytest.param(("trn3", 2, W8), 0, 30064771072, 27, id="H3"),
        pytest.param(("trn2", 2, FORK_WEIGHTS), 4, 7740965192, None, id="H4"),
        pytest.param(("trn2", 1, W8), 4, 0, 3, id="H5"),
        pytest.param(("trn2", 1, W8), 3, 1073741824, 3, id="H6"),
        pytest.param(("trn2", 1, W8), 3.000000001, 1073741823, 3, id="H7"),
        pytest.param(("trn3", 2, W8), 4.5, 25232932864, 27, id="H9"),
    ],
)
def test_headroom_policy(
    target: tuple[str, int, int], headroom_gib: float, available: int, most_gib: int | None
) -> None:
    result = budget(*target, headroom_bytes=int(headroom_gib * GIB))
    assert result.mode == "headroom"
    assert result.cap_bytes is None
    assert result.total_budget_bytes == result.share_bytes  # utilization is forced to 1.0
    assert result.available_bytes == available
    if most_gib is not None:
        assert result.maximum_headroom_bytes == most_gib * GIB


@pytest.mark.parametrize(
    ("platform", "lnc", "weights", "settings", "refused"),
    [
        ("trn2", 2, 21792500000, {"utilization": 0.9}, False),  # D5 boots, measured
        ("trn2", 2, 21792500000, {"utilization": 0.8}, True),  # D6 does not, measured
        ("trn3", 1, W16, {"utilization": 0.9}, True),
        ("trn2", 1, W8, {"headroom_bytes": 4 * GIB}, True),
        ("trn2", 1, W8, {"headroom_bytes": 3 * GIB}, False),  # exactly the minimum
        ("trn2", 1, W8, {"headroom_bytes": int(3.000000001 * GIB)}, True),
        ("trn2", 1, W8, {"headroom_bytes": 4 * GIB, "minimum_bytes": None}, False),
    ],
)
def test_minimum_is_strict(platform: str, lnc: int, weights: int, settings: dict[str, Any], refused: bool) -> None:
    result = budget(platform, lnc, weights, **settings)
    assert result.below_minimum is refused
    assert (minimum_refusal(result) is not None) is refused


def test_one_byte_short_is_not_decidable_from_print() -> None:
    # H7 prints 1.00 against 1.00
    assert minimum_from_text(1.0 * GIB, 1.0 * GIB, 0.005 * GIB) is None
    assert minimum_from_text(0.0, 1.0 * GIB, 0.005 * GIB) is True
    assert minimum_from_text(6.48 * GIB, 1.0 * GIB, 0.005 * GIB) is False


def test_negative_room_is_kept_and_said() -> None:
    plan = budget("trn2", 2, 21792500000, utilization=0.8).plan
    assert plan.left_bytes == 20615843020 - 21792500000
    assert plan.sentence == "does not fit by 1.10 GiB"


def test_advice_belongs_to_the_mode() -> None:
    headroom = minimum_refusal(budget("trn2", 1, W8, headroom_bytes=4 * GIB))
    assert headroom is not None
    assert HEADROOM_VARIABLE in headroom.advice
    assert "at most 3.00 GiB" in headroom.advice
    assert "worse" in headroom.advice
    memory_binds = minimum_refusal(budget("trn3", 1, W16, utilization=0.9))
    assert memory_binds is not None
    assert memory_binds.advice.startswith("raise --gpu-memory-utilization")
    cap_binds = minimum_refusal(budget("trn2", 1, 0, utilization=0.9, cap_fraction=0.05))
    assert cap_binds is not None
    assert cap_binds.advice.startswith(f"raise {CAP_VARIABLE}")


def test_no_headroom_passes_when_weights_fill_the_share() -> None:
    assert maximum_headroom(12 * GIB, 12 * GIB, GIB) == -GIB
    refusal = minimum_refusal(budget("trn2", 1, 12 * GIB, headroom_bytes=0))
    assert refusal is not None
    assert "no headroom passes" in refusal.advice


def test_cpu_inference() -> None:
    default = cpu_kv_budget(host_available_bytes=68719489081, local_workers=4, utilization=0.9)
    assert default.share_bytes == 17179872270
    assert default.total_budget_bytes == 15461885043
    assert default.available_bytes == 4638565512
    headroom = cpu_kv_budget(host_available_bytes=68719489081, local_workers=4, headroom_bytes=4 * GIB)
    assert headroom.available_bytes == 12884904974


@pytest.mark.parametrize(("host", "workers"), [(68719489081, 4), (10_000_000_019, 7), (1 << 40, 3)])
def test_cpu_share_floors_where_the_document_divides(host: int, workers: int) -> None:
    floored = cpu_kv_budget(host_available_bytes=host, local_workers=workers, utilization=0.9)
    divided = int(host / workers * 0.9)
    assert 0 <= divided - floored.total_budget_bytes <= 1
    reserved = cpu_kv_budget(host_available_bytes=host, local_workers=workers, headroom_bytes=GIB)
    assert reserved.available_bytes == int(max(host / workers - GIB, 0))


@pytest.mark.parametrize(("variant", "refused"), [(Variant.RELEASE_0_24, False), (Variant.SDK_2_33, True)])
def test_minimum_on_cpu_by_release(variant: Variant, refused: bool) -> None:
    small = cpu_kv_budget(host_available_bytes=2 * GIB, local_workers=2, utilization=0.9, variant=variant)
    assert small.below_minimum is refused


def test_old_releases_do_not_divide_the_stack() -> None:
    old = budget("trn2", 1, W5, utilization=0.9, variant=Variant.RELEASE_0_21)
    assert old.available_bytes == 6957847019  # D1's figure: the whole stack, though LNC is 1
    assert budget("trn2", 1, W5, utilization=0.9).available_bytes == 3478923509


def test_old_releases_do_not_read_headroom() -> None:
    old = budget("trn2", 2, W5, utilization=0.9, headroom_bytes=4 * GIB, variant=Variant.RELEASE_0_24)
    assert old.mode == "default"
    assert HEADROOM_VARIABLE in old.plan.warnings[0]


@pytest.mark.parametrize(
    ("version", "variant"),
    [
        ("0.21.0.1.0.0", Variant.RELEASE_0_21),
        ("0.24.0.1.1.0", Variant.RELEASE_0_24),
        ("2.31", Variant.RELEASE_0_21),
        ("2.32", Variant.RELEASE_0_24),
        ("2.33", Variant.SDK_2_33),
    ],
)
def test_variant_by_version(version: str, variant: Variant) -> None:
    assert variant_of(version) is variant


@pytest.mark.parametrize("version", ["0.11.0", "neuron", ""])
def test_unknown_version_is_not_guessed(version: str) -> None:
    with pytest.raises(BudgetInputError, match="no budget law"):
        variant_of(version)


@pytest.mark.parametrize(
    ("platform", "stack_gib", "lnc", "share_lnc1_gib"),
    [("trn1", 16, 1, 16), ("trn2", 24, 2, 12), ("trn3", 36, 2, 18), ("trn3-rev2", 36, 2, 18), ("inf2", 16, 1, 16)],
)
def test_static_table(platform: str, stack_gib: int, lnc: int, share_lnc1_gib: int) -> None:
    assert hbm_stack_bytes(platform) == stack_gib * GIB
    assert default_lnc(platform) == lnc
    assert logical_cores_per_stack(platform, lnc) == 1
    assert budget(platform, 1, 0, headroom_bytes=0).share_bytes == share_lnc1_gib * GIB


def test_impossible_values_are_named() -> None:
    with pytest.raises(BudgetInputError, match=r"gen4.*expected one of"):
        hbm_stack_bytes("gen4")
    with pytest.raises(BudgetInputError, match="expected 1 or 2"):
        logical_cores_per_stack("trn3", 3)
    with pytest.raises(BudgetInputError, match=r"0\.9, 0\.92"):
        budget("trn2", 2, W5)
    with pytest.raises(BudgetInputError, match="headroom is -1"):
        budget("trn2", 2, W5, headroom_bytes=-1)
    with pytest.raises(BudgetInputError, match="nan"):
        budget("trn2", 2, W5, utilization=float("nan"))


GEOMETRY = KvGeometry(layers=32, kv_heads=1, head_size=128)


def test_blocks() -> None:
    assert GEOMETRY.page_bytes == 16384
    blocks = block_count(6957847019, GEOMETRY)
    assert blocks == 13271
    assert blocks * GEOMETRY.block_tokens == 424_672
    # the plugin's own example: one layer's tensor
    example = KvGeometry(layers=1, kv_heads=4, head_size=128, block_tokens=16)
    assert bytes_for_blocks(16384, example) == 536870912


def test_parity_holds_for_equal_totals_only() -> None:
    def at(stack_bytes: int) -> Budget:
        return compute_kv_budget(stack_bytes=stack_bytes, weights_bytes=W8, cores_per_stack=1, headroom_bytes=4 * GIB)

    table = at(36 * GIB)
    assert parity(table, at(36 * GIB), GEOMETRY).equal
    short = parity(table, at(36 * GIB - 3 * MIB), GEOMETRY)
    assert not short.equal
    assert short.share_difference_bytes == 3 * MIB
    # 3 MiB are 6 blocks of 512 KiB: the smaller count is what both sides can hold
    assert short.compile_blocks - short.device_blocks == 6
    assert short.restoring_override == f"--num-gpu-blocks-override {short.device_blocks}"
    assert "3.00 MiB" in short.sentence
    assert "cold" in short.sentence


def test_switching_policies_warns_upward_only() -> None:
    default, headroom = budget("trn3", 2, W8, utilization=0.9), budget("trn3", 2, W8, headroom_bytes=4 * GIB)
    warning = switch_warning(default, headroom)
    assert warning is not None
    assert "14.28 GiB more" in warning  # 24.00 - 9.72
    assert "only after a boot" in warning
    assert switch_warning(headroom, default) is None
