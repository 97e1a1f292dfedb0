"""Numbers of the RDNA4 document that a law produces, and of the facts on the fork, section 3."""

from __future__ import annotations

import pytest

from pytest_kvbudget.budget import rdna4
from pytest_kvbudget.budget.footprint import error_bytes, footprint, used_bytes
from pytest_kvbudget.budget.graphs import GraphCharge
from pytest_kvbudget.budget.model import BudgetInputError, Reach
from pytest_kvbudget.budget.pool import KvPrice
from pytest_kvbudget.budget.rdna4 import ArenaPlan, OverheadMode, arena_plan, overhead_bytes, precise_trade
from pytest_kvbudget.units import GIB, MIB

TOTAL = 34_208_743_424
HALF_CENT = 0.005 * GIB


def row(utilization: float, base_mib: int, per_graph_mib: int) -> ArenaPlan:
    return arena_plan(
        total_bytes=TOTAL,
        utilization=utilization,
        non_expert_bytes=int(8.199 * GIB),
        kv_reserve_bytes=None,
        graph_bytes=GraphCharge(base_mib=base_mib, per_graph_mib=per_graph_mib).charged_bytes(6),
        overhead=overhead_bytes(OverheadMode.PRECISE),
    )


@pytest.mark.parametrize(
    ("settings", "graphs_gib", "arena_gib", "slots"),
    [
        pytest.param((0.98, 256, 52), 0.55, 17.22, 7522, id="E"),
        pytest.param((0.982, 256, 12), 0.32, 17.52, 7653, id="F"),
        pytest.param((0.982, 0, 12), 0.07, 17.77, 7762, id="G"),
    ],
)
def test_ladder_rows(settings: tuple[float, int, int], graphs_gib: float, arena_gib: float, slots: int) -> None:
    plan = row(*settings)
    assert abs(plan.plan.term("CUDA graphs").size_bytes - graphs_gib * GIB) <= HALF_CENT
    assert abs(plan.plan.left_bytes - arena_gib * GIB) <= HALF_CENT
    assert plan.slots == slots


def test_f_to_g() -> None:
    f, g = row(0.982, 256, 12), row(0.982, 0, 12)
    assert g.plan.left_bytes - f.plan.left_bytes == 256 * MIB  # 0.25 GiB
    assert g.slots - f.slots == 109


def test_every_term_says_who_moves_it() -> None:
    plan = arena_plan(
        total_bytes=TOTAL, utilization=0.98, non_expert_bytes=6 * GIB, kv_reserve_bytes=2 * GIB, graph_bytes=0,
        overhead=overhead_bytes(OverheadMode.DEFAULT),
    ).plan  # fmt: skip
    assert {term.name: term.reach for term in plan.terms} == {
        "budget": Reach.FLAG,
        "non-expert weights": Reach.FIXED,
        "KV reserve": Reach.IMAGE_EDIT,
        "CUDA graphs": Reach.ENVIRONMENT,
        "runtime overhead": Reach.PARTLY,
    }
    assert all(term.how and term.law for term in plan.terms)
    # a pinned pool is no term of the plan
    assert not any("pool" in term.name for term in plan.terms)


def test_public_plan_table_is_reproduced() -> None:
    # 65,536 tokens, utilization 0.90, 8192 batched tokens; all figures printed to 0.01 GiB
    price = KvPrice(bytes_per_token=9190, pages_bytes_per_seq=int(0.034 * GIB))
    reserve = price.reserve_bytes(65_536)
    assert abs(reserve - 0.64 * GIB) <= HALF_CENT
    overhead = overhead_bytes(OverheadMode.DEFAULT, 8192)
    assert abs(overhead - 8.48 * GIB) <= HALF_CENT
    plan = arena_plan(
        total_bytes=TOTAL, utilization=0.90, non_expert_bytes=int(4.47 * GIB), kv_reserve_bytes=reserve,
        graph_bytes=int(0.40 * GIB), overhead=overhead,
    ).plan  # fmt: skip
    assert abs(plan.term("budget").size_bytes - 28.67 * GIB) <= HALF_CENT
    assert abs(plan.left_bytes - 14.68 * GIB) <= 3 * HALF_CENT


def test_slot_and_slots_per_gib() -> None:
    assert rdna4.SLOT_BYTES == 2_457_600
    slot_mib, per_gib = rdna4.SLOT_BYTES / MIB, GIB / rdna4.SLOT_BYTES
    assert slot_mib == pytest.approx(2.344, abs=0.0005)
    assert per_gib == pytest.approx(437, abs=0.5)
    assert rdna4.expert_bytes(513 * 1000 + 700, 512, fused_shared=True) == 1001


def test_overhead_anchor() -> None:
    assert overhead_bytes(OverheadMode.PRECISE) == int(5.25 * GIB)
    same = {overhead_bytes(OverheadMode.PRECISE, tokens) for tokens in (1024, 2048, 4096)}
    assert len(same) == 1
    assert rdna4.plan_identical(1024, 4096)
    assert not rdna4.plan_identical(4096, 8192)
    step = overhead_bytes(OverheadMode.PRECISE, 5120) - overhead_bytes(OverheadMode.PRECISE, 4096)
    assert step == int(0.22 * GIB)


def test_precise_memory_moves_one_term() -> None:
    trade = precise_trade(4096, rdna4.SLOT_BYTES)
    assert abs(trade.gained_bytes - 2.35 * GIB) <= 1
    # the document's "~1,025": 2.35 GiB printed to 0.01 is 1,024.6 to 1,028.9 slots
    assert trade.gained_slots == 1026
    assert trade.gained_slots == pytest.approx(1025, abs=2.2)
    assert trade.harmful is None
    assert "smaller pinned pool" in trade.sentence


def test_precise_memory_is_harmful_above_its_plan() -> None:
    trade = precise_trade(8192, measured_bytes=int(6.38 * GIB))
    assert abs(trade.planned_bytes - 6.13 * GIB) <= HALF_CENT
    assert trade.harmful
    assert precise_trade(4096, measured_bytes=int(2.5 * GIB)).harmful is False


def test_resident_floor() -> None:
    # the facts say "~1,584", which is 3 x 512 + 48; their own law, with the shared expert of each layer, gives 1,587
    assert rdna4.resident_floor_slots() == 1587
    assert 3 * 512 + 48 == 1584
    assert rdna4.resident_floor_slots() == pytest.approx(1584, abs=3)


def test_slot_price_from_resident_layers() -> None:
    # 1.87 GiB in three layers of 513 is the 1.245 MiB of MXFP4 at TP 2
    price = rdna4.slot_bytes_from_resident(1.87 * GIB, 3)
    assert price == pytest.approx(1.245 * MIB, rel=0.005 / 1.87 + 0.0005 / 1.245)


def test_slots_against_window_on_small_cards() -> None:
    """Slots by window on 16 GiB cards: registry 8937, slots of 1.245 MiB; only the reserve moves."""
    price = KvPrice(bytes_per_token=8937)
    anchor, slots = 32_768, 3359
    for window, printed in ((65_536, 3117), (131_072, 2633), (262_144, 1664)):
        taken = price.reserve_bytes(window) - price.reserve_bytes(anchor)
        assert slots - taken / rdna4.MXFP4_SLOT_BYTES == pytest.approx(printed, abs=1.5)


def test_host_bound() -> None:
    bound = rdna4.host_bound_bytes(int(179.3 * GIB), int(38.74 * GIB), ranks=2)
    assert bound / GIB == pytest.approx(112.6, abs=0.05 + 0.05 + 0.005)
    assert rdna4.host_bound_bytes(1, 0, 2, offload_mem_bytes=GIB) == GIB
    assert rdna4.host_bound_bytes(10 * GIB, 0, 2) < 0  # negative, not clamped


def test_pinned_target() -> None:
    assert rdna4.pinned_target_slots(7762) == 2561  # floor(0.33 x 7762) = floor(2561.46)


def test_negative_room() -> None:
    plan = row(0.5, 256, 52)
    over = arena_plan(
        total_bytes=TOTAL, utilization=0.5, non_expert_bytes=12 * GIB, kv_reserve_bytes=0, graph_bytes=0,
        overhead=int(5.25 * GIB),
    )  # fmt: skip
    assert plan.slots > 0
    assert over.plan.left_bytes == int(TOTAL * 0.5) - 12 * GIB - int(5.25 * GIB)
    assert over.plan.sentence.startswith("does not fit by 1.32 GiB")
    assert over.slots == 0
    with pytest.raises(BudgetInputError, match=r"1\.2"):
        row(1.2, 0, 0)


def test_footprint_warns_and_counts_the_pool() -> None:
    # row G: weights are what 8.199 GiB leave beside the reserve, the pool is the pinned 3,166,500,000 bytes
    weights = int(8.199 * GIB) - KvPrice().reserve_bytes(200_704)
    g = footprint(
        total_bytes=TOTAL, weights_bytes=weights, pool_bytes=3_166_500_000, graph_bytes=72 * MIB,
        arena_bytes=7762 * rdna4.SLOT_BYTES,
    )  # fmt: skip
    assert g.fits
    assert not g.warnings
    assert g.term("pinned pool").size_bytes == 3_166_500_000
    # 0.89 GiB stayed free on the card: the law promised 1.8 GiB too little, which is why it never refuses
    high_water = TOTAL - int(0.89 * GIB)
    assert error_bytes(g, high_water) == high_water - used_bytes(g)
    assert error_bytes(g, high_water) / GIB == pytest.approx(1.81, abs=0.05)
    over = footprint(total_bytes=TOTAL, weights_bytes=weights, pool_bytes=12 * GIB, graph_bytes=0, arena_bytes=17 * GIB)
    assert not over.fits
    assert "at risk" in over.warnings[0]


def test_one_margin_booted_and_crash_looped() -> None:
    """The document's margin of 0.13 GiB: section 1 booted with it, section 4 crash-looped with it.

    31.86 - 31.73 = 0.13: the law cannot tell the two apart, so a positive margin is no promise and is not refused.
    """
    margin = 31.86 - 31.73
    assert margin == pytest.approx(0.13, abs=1e-9)
    tight = footprint(
        total_bytes=int(31.86 * GIB), weights_bytes=int(31.73 * GIB), pool_bytes=0, graph_bytes=0, arena_bytes=0,
        non_torch_bytes=0, driver_reserve_bytes=0,
    )  # fmt: skip
    assert tight.left_bytes / GIB == pytest.approx(0.13, abs=1e-6)
    assert not tight.warnings


def test_plan_inverse() -> None:
    g = row(0.982, 0, 12)
    least = rdna4.utilization_for_slots(7762, g, TOTAL)
    assert least <= 0.982
    assert row(least, 0, 12).slots >= 7762
    assert row(least - 1e-6, 0, 12).slots < 7762
