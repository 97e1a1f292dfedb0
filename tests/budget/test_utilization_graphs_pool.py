"""Utilization law, graph charge and KV pool: RDNA4 document, sections 1 to 3 and 5."""

from __future__ import annotations

import pytest

from pytest_kvbudget.budget.graphs import GraphCharge, advise, charge_from, charge_in_force
from pytest_kvbudget.budget.model import BudgetInputError
from pytest_kvbudget.budget.pool import (
    ALIGNMENT_LOSS_BYTES,
    Alignment,
    KvPrice,
    PagesReading,
    bytes_for_tokens,
    contract_floor_bytes,
    full_windows,
    measured_bytes_per_token,
    pool_bytes,
    tokens_for_bytes,
)
from pytest_kvbudget.budget.utilization import (
    FreeAtInit,
    from_driver_reserve,
    largest_utilization,
    requested_bytes,
    utilization_refusal,
    worth_bytes,
)
from pytest_kvbudget.units import GIB, MIB

TOTAL = 34_208_743_424


def seen(free_gib: float, total_bytes: int = int(31.86 * GIB), precision_bytes: float = 0) -> FreeAtInit:
    return FreeAtInit(
        free_bytes=int(free_gib * GIB), total_bytes=total_bytes, source="refusal line", precision_bytes=precision_bytes
    )


@pytest.mark.parametrize(("free_gib", "most"), [(31.29, 0.982), (31.23, 0.980)])
def test_largest_bootable_utilization(free_gib: float, most: float) -> None:
    free = seen(free_gib)
    assert largest_utilization(free) == most
    assert utilization_refusal(most, free=free) is None
    assert utilization_refusal(round(most + 0.001, 3), free=free) is not None


def test_equality_passes() -> None:
    asked = requested_bytes(TOTAL, 0.982)
    assert asked == 33_592_986_043  # ceil of 33,592,986,042.368
    exact = FreeAtInit(free_bytes=asked, total_bytes=TOTAL, source="debug snapshot")
    assert exact.boots(0.982) is True
    short = FreeAtInit(free_bytes=asked - 1, total_bytes=TOTAL, source="debug snapshot")
    assert short.boots(0.982) is False


def test_full_utilization_is_refused_and_nothing_else_unknown() -> None:
    assert utilization_refusal(1.0) is not None
    assert utilization_refusal(0.999) is None
    assert utilization_refusal(1.0, full_refused=False) is None
    refusal = utilization_refusal(1.0, free=seen(31.29))
    assert refusal is not None
    assert refusal.numbers["largest_utilization"] == 0.982
    assert "0.982" in refusal.advice


def test_idle_figures_would_bless_what_does_not_boot() -> None:
    # idle torch free of an R9700: 33,975,959,552 bytes would give 0.993, and 0.993 is refused by what the worker saw
    assert 33_975_959_552 * 1000 // TOTAL == 993
    assert utilization_refusal(0.993, free=seen(31.29, TOTAL)) is not None
    with pytest.raises(BudgetInputError, match="idle driver figures"):
        FreeAtInit(free_bytes=33_975_959_552, total_bytes=TOTAL, source="sysfs")  # type: ignore[arg-type]


def test_driver_reserve_stands_in_for_a_worker() -> None:
    free = from_driver_reserve(TOTAL, int(0.57 * GIB))
    assert largest_utilization(free) == 0.982


def test_slack_is_printed_in_mib_and_may_be_undecidable() -> None:
    free = seen(31.29, TOTAL, precision_bytes=0.005 * GIB)
    assert free.slack_bytes(0.982) / MIB == pytest.approx(4.2, abs=0.1)
    assert free.boots(0.982) is None  # 4.2 MiB of slack, printed to 5.1
    assert free.boots(0.98) is True
    assert free.boots(0.985) is False
    assert "4.2 MiB" in free.describe(0.982)


def test_a_hundredth_of_utilization() -> None:
    assert worth_bytes(TOTAL) / GIB == pytest.approx(0.32, abs=0.005)
    assert worth_bytes(TOTAL) / GIB == pytest.approx(0.3186, abs=0.00005)


@pytest.mark.parametrize(
    ("base", "per_graph", "graphs", "gib"),
    [(0, 12, 6, 0.07), (0, 12, 18, 0.21), (256, 52, 6, 0.55), (256, 12, 6, 0.32)],
)
def test_graph_charge(base: int, per_graph: int, graphs: int, gib: float) -> None:
    charge = GraphCharge(base_mib=base, per_graph_mib=per_graph)
    assert charge.charged_bytes(graphs) / GIB == pytest.approx(gib, abs=0.005)


def test_explicit_estimate_does_not_scale() -> None:
    charge = GraphCharge(estimate_mib=72)
    assert charge.charged_bytes(6) == charge.charged_bytes(18) == 72 * MIB
    warning = charge.warning("max_num_seqs")
    assert warning is not None
    assert "does not scale" in warning
    assert charge.warning("max_model_len") is None
    assert GraphCharge().warning("max_num_seqs") is None


def test_advice_from_the_heavier_rank() -> None:
    shipped = GraphCharge(base_mib=0, per_graph_mib=12)
    captured = {"Worker_TP0": int(0.31 * GIB), "Worker_TP1": int(0.17 * GIB)}
    advice = advise(shipped, 6, captured)
    assert not advice.keep
    assert advice.rank == "Worker_TP0"
    assert advice.per_graph_mib == 53  # 0.31 GiB over 6 graphs is 52.9 MiB
    assert GraphCharge(base_mib=0, per_graph_mib=53).charged_bytes(6) >= int(0.31 * GIB)
    assert advise(GraphCharge(), 6, captured).keep  # 0.55 charged


def test_negative_capture_keeps_the_charge() -> None:
    advice = advise(GraphCharge(base_mib=0, per_graph_mib=12), 6, {"Worker_TP0": int(-0.06 * GIB)})
    assert advice.keep
    assert advice.per_graph_mib is None


def test_charge_from_the_environment() -> None:
    assert charge_from({}) == GraphCharge(base_mib=256, per_graph_mib=52)
    shipped = charge_from({"VLLM_CUDAGRAPH_MEM_BASE_MB": "0", "VLLM_CUDAGRAPH_MEM_PER_GRAPH_MB": "12"})
    assert shipped.charged_bytes(6) == 72 * MIB
    with pytest.raises(BudgetInputError, match="VLLM_CUDAGRAPH_MEM_BASE_MB is 'x'"):
        charge_from({"VLLM_CUDAGRAPH_MEM_BASE_MB": "x"})


def test_a_pinned_boot_has_its_charge_from_the_plan_row() -> None:
    printed = charge_in_force(5, 7)
    pinned = charge_in_force(None, 7)
    assert printed is not None
    assert pinned is not None
    assert (printed.size_bytes, printed.source) == (5, "estimate line")
    assert (pinned.size_bytes, pinned.source) == (7, "plan row")
    assert charge_in_force(None, None) is None


def test_reserve_is_for_one_window() -> None:
    plain = KvPrice()
    assert plain.reserve_bytes(200_704, 1) == plain.reserve_bytes(200_704, 6)
    assert plain.reserve_bytes(200_704) / GIB == pytest.approx(1.855, abs=0.0005)
    paged = KvPrice(pages_bytes_per_seq=10 * MIB)
    assert paged.reserve_bytes(200_704, 6) - paged.reserve_bytes(200_704, 1) == 50 * MIB


def test_both_readings_of_the_state_pages() -> None:
    # printed 0.64 at 65,536: 0.606 of tokens, and the rest is pages in either reading
    tokens = 1.08 * 9190 * 65_536
    assert tokens / GIB == pytest.approx(0.606, abs=0.0005)
    pages = int(0.034 * GIB)
    outside = KvPrice(pages_bytes_per_seq=pages).reserve_bytes(65_536)
    inside = KvPrice(pages_bytes_per_seq=pages, reading=PagesReading.INSIDE).reserve_bytes(65_536)
    assert outside == int(tokens) + pages
    assert inside - outside == pytest.approx(0.08 * pages, abs=1)
    for size in (outside, inside):
        assert size / GIB == pytest.approx(0.64, abs=0.005)


def test_an_underpriced_reserve_is_short_at_every_length() -> None:
    price = KvPrice(bytes_per_token=8937)
    assert price.reserve_bytes(1) == 9651  # 1.08 * 8937 = 9651.96, printed as 9652
    assert price.underpriced(10_125)
    assert not price.underpriced(9_000)
    for window in (16_384, 28_800, 32_768, 262_144):
        assert price.reserve_bytes(window) < 10_125 * window
    assert KvPrice(bytes_per_token=8940).underpriced(11_597)  # the MTP layer: 11,597 needed, 9,655 reserved


def test_pool_is_capped_at_the_reserve_unless_pinned() -> None:
    assert pool_bytes(5 * GIB, 2 * GIB) == 2 * GIB
    assert pool_bytes(GIB, 2 * GIB) == GIB
    assert pool_bytes(5 * GIB, 2 * GIB, pinned_bytes=3_166_500_000) == 3_166_500_000


def test_measured_rates_decompose() -> None:
    assert 7_701 == 6_138 + 1_563
    assert 13_839 == 12_276 + 1_563
    assert 12_276 == 2 * 6_138


def test_contract_floor_of_the_corpse() -> None:
    # 5 x 262,144 at fp8: 1,350,182 tokens, 5.15x, 0.28 GiB above the floor
    windows = 1_350_182 / 262_144
    assert windows == pytest.approx(5.15, abs=0.005)
    over = 1_350_182 * 7_701 - contract_floor_bytes(5, 262_144, 7_701)
    assert over / GIB == pytest.approx(0.28, abs=0.005)


def test_the_rate_in_the_text_is_not_that_of_its_own_pool() -> None:
    """3,166,500,000 bytes for 401,408 tokens are 7,888.5 a token; the text says 7,891.8.

    Its alignment loss of 3.87 MB explains the difference in neither direction: the engine's size line decides.
    """
    rate = measured_bytes_per_token(3_166_500_000, 401_408)
    assert rate == pytest.approx(7_888.5, abs=0.05)
    assert abs(rate - 7_891.8) > 3
    for direction in Alignment:
        asked = bytes_for_tokens(401_408, 7_891.8, alignment_bytes=ALIGNMENT_LOSS_BYTES, direction=direction)
        assert abs(asked - 3_166_500_000) > 2_000_000


def test_alignment_direction_is_explicit() -> None:
    up = bytes_for_tokens(1000, 10, alignment_bytes=7, direction=Alignment.ADD)
    down = bytes_for_tokens(1000, 10, alignment_bytes=7, direction=Alignment.SUBTRACT)
    assert (up, down) == (10_007, 9_993)
    assert tokens_for_bytes(up, 10, alignment_bytes=7) == 1000
    assert tokens_for_bytes(down, 10, alignment_bytes=7, direction=Alignment.SUBTRACT) == 1000
    assert tokens_for_bytes(up + 9, 10, alignment_bytes=7, block_tokens=16) == 992


def test_row_g_holds_two_full_windows() -> None:
    """Called 200704x3, and 401,408 tokens are 2.00 windows: what counts is the size line."""
    assert full_windows(401_408, 200_704) == 2
    assert 401_408 / 200_704 == 2.00


def test_about_207k_has_no_law() -> None:
    """Document, section 6: six sequences ask 10.70 GiB with 9.18 free, "~207k per context max".

    No rate that the document measured makes 10.70 GiB of six windows that it names, and at those rates 9.18 GiB hold
    other windows. Scaling 241,664 by 9.18 over 10.70 gives the figure: hand arithmetic, which its own section forbids.
    """
    for rate in (7_701, 7_891.8):
        for window in (241_664, 245_760, 262_144):
            assert abs(6 * window * rate - 10.70 * GIB) > 0.005 * GIB
        assert abs(tokens_for_bytes(int(9.18 * GIB), rate) // 6 - 207_000) > 500
    scaled = 241_664 * 9.18 / 10.70
    assert scaled == pytest.approx(207_000, abs=500)
