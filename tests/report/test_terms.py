from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvbudget.ledger.model import BootLedger, Value
from pytest_kvbudget.report.numbers import amount, duration, size, value_text
from pytest_kvbudget.report.terms import Bar, comparisons, memory_bars
from pytest_kvbudget.units import GIB, MIB
from pytest_kvbudget.verdict import Verdict
from tests.report.building import HALF_DIGIT, TOTAL_BYTES, attempt, base_ledger, gib, value


def bars_of(facts: dict[str, Value], **changes: object) -> list[Bar]:
    record = attempt(65_536, ledger=BootLedger(family="vllm", facts=facts))
    record.memory = ()
    for name, changed in changes.items():
        setattr(record, name, changed)
    return memory_bars(record)


def in_gib(bar: Bar) -> dict[str, float]:
    return {segment.name: round(segment.size_bytes / GIB, 2) for segment in bar.segments}


def test_expert_offload_plan_closes_at_its_budget() -> None:
    # the public table at 65,536 tokens: 28.67 - 4.47 - 0.64 - 0.40 - 8.48 = 14.68
    (bar,) = bars_of(
        {
            "plan_budget_bytes": gib(28.67, 1),
            "plan_non_expert_bytes": gib(4.47, 2),
            "plan_kv_reserve_bytes": gib(0.64, 3),
            "plan_graphs_bytes": gib(0.40, 4),
            "plan_overhead_bytes": gib(8.48, 5),
            "plan_expert_cache_bytes": gib(14.68, 6),
            "total_bytes": gib(31.86, 7),
        }
    )
    assert bar.kind == "planned"
    assert bar.stacked_bytes == pytest.approx(28.67 * GIB, abs=5 * HALF_DIGIT)
    assert bar.remainder_bytes == pytest.approx(3.19 * GIB, abs=6 * HALF_DIGIT)
    assert bar.missing == ()


def test_the_graph_estimate_is_not_stacked_twice() -> None:
    # from vLLM 0.27 on: requested - consumed - peak = available, 30.90 - 24.57 - 1.46 = 4.87, the estimate inside peak
    (bar,) = bars_of(
        {
            "requested_bytes": gib(30.90, 1),
            "consumed_bytes": gib(24.57, 1),
            "peak_activation_bytes": gib(1.46, 1),
            "graph_estimated_bytes": gib(0.31, 2),
            "kv_in_use_bytes": gib(4.87, 1),
            "graph_actual_bytes": gib(0.31, 3),
        }
    )
    assert in_gib(bar) == {
        "weights and non-torch": 24.57,
        "peak activation": 1.15,
        "KV cache": 4.87,
        "CUDA graphs": 0.31,
    }
    assert bar.stacked_bytes == pytest.approx(bar.budget_bytes, abs=5 * HALF_DIGIT)
    assert [segment.name for segment in bar.segments if segment.derived] == ["peak activation"]


def test_a_capture_that_gave_memory_back_takes_no_room() -> None:
    (bar,) = bars_of({"weights_bytes": gib(20.0, 1), "graph_capture_bytes": gib(-0.06, 2)})
    assert in_gib(bar)["CUDA graphs"] == -0.06
    assert bar.stacked_bytes == 20 * GIB


def test_a_pool_that_is_too_small_shows_what_is_missing() -> None:
    (bar,) = bars_of({"available_kv_bytes": gib(2.89, 1), "kv_needed_bytes": gib(3.54, 2)})
    assert bar.deficit is not None
    assert round(bar.deficit.size_bytes / GIB, 2) == 0.65
    assert bar.total_bytes is None
    assert bar.remainder_bytes is None


def test_failed_allocation_keeps_stated_free_apart_from_what_is_unexplained() -> None:
    failed = [bar for bar in memory_bars(attempt(245_760, Verdict.FAIL)) if bar.title == "At the failed allocation"]
    (bar,) = failed
    assert in_gib(bar) == {
        "allocated by PyTorch": 30.24,
        "private pools (graphs)": 0.19,
        "reserved, unallocated": 0.31,
    }
    assert bar.free_bytes == 0
    assert bar.deficit is not None
    assert bar.deficit.size_bytes == 76 * MIB
    # 31.86 - 30.43 - 0.31
    assert bar.remainder_bytes == pytest.approx(1.12 * GIB, abs=3 * HALF_DIGIT)


def test_neuron_table_of_a_refused_allocation() -> None:
    # aws-neuron-sdk#1014: 15.855 of tensors, 1.062 KB runtime, 32 KB rings, 172 MB refused
    (bar,) = bars_of(
        {
            "hbm_total_used_bytes": value(17_024_176_620, "bytes", 4),
            "hbm_tensors_bytes": value(17_024_176_620, "bytes", 5),
            "hbm_runtime_bytes": value(1_087, "bytes", 6, precision=2),
            "hbm_dma_rings_bytes": value(32_768, "bytes", 7, precision=2),
            "tried_alloc_bytes": value(180_355_072, "bytes", 1, precision=0),
        }
    )
    assert [segment.name for segment in bar.segments] == ["tensors", "runtime", "DMA rings"]
    assert bar.missing == ("constants", "model code", "shared scratchpad", "collectives")
    assert bar.deficit is not None
    assert bar.deficit.size_bytes == 180_355_072
    assert bar.total_bytes is None


def test_each_rank_has_its_own_bar_and_a_rank_that_said_nothing_gets_nothing() -> None:
    bars = [bar for bar in memory_bars(attempt(241_664)) if bar.title == "The engine's own account"]
    assert [bar.rank for bar in bars] == ["Worker_TP0", "Worker_TP1"]
    assert in_gib(bars[1]) == {"weights": 24.55}
    assert bars[1].missing == ("non-torch", "peak activation", "KV cache", "CUDA graphs")
    assert [bar.total_bytes for bar in bars] == [TOTAL_BYTES, TOTAL_BYTES]


def test_what_the_engine_said_for_all_ranks_is_shown_once() -> None:
    ledger = base_ledger(200_704)
    ledger.facts["plan_budget_bytes"] = gib(31.29, 1, "EngineCore")
    ledger.facts["plan_kv_reserve_bytes"] = gib(1.85, 1, "EngineCore")
    bars = memory_bars(attempt(200_704, ledger=ledger))
    assert [(bar.title, bar.rank) for bar in bars if bar.kind == "planned"] == [("Planned before the boot", None)]


def test_planned_is_compared_only_with_what_was_measured() -> None:
    facts = {
        "plan_overhead_bytes": gib(8.48, 1),
        "plan_overhead_measured_bytes": gib(6.38, 1),
        "plan_graphs_bytes": gib(0.40, 2),
        "plan_registry_b_per_token": value(9_190, "bytes", 3, precision=0),
    }
    found = comparisons(attempt(65_536, ledger=BootLedger(family="rdna4", facts=facts)))
    assert [(entry.name, entry.planned.value, entry.measured.value) for entry in found] == [
        ("Runtime overhead", round(8.48 * GIB), round(6.38 * GIB))
    ]


NAMES = ("weights_bytes", "model_load_bytes", "non_torch_bytes", "consumed_bytes", "peak_activation_bytes",
         "available_kv_bytes", "kv_needed_bytes", "graph_estimated_bytes", "graph_actual_bytes", "total_bytes",
         "tried_alloc_bytes", "free_bytes", "torch_allocated_bytes", "plan_budget_bytes", "peak_hbm_bytes",
         "hbm_tensors_bytes", "hbm_limit_bytes", "scratchpad_bytes")  # fmt: skip


@given(st.dictionaries(st.sampled_from(NAMES), st.integers(-GIB, 2**40)))
def test_no_term_comes_from_nowhere(stated: dict[str, int]) -> None:
    facts = {name: value(number, "bytes", 1, precision=0) for name, number in stated.items()}
    for bar in bars_of(facts):
        for segment in bar.segments:
            assert segment.derived or segment.size_bytes in stated.values()
        assert bar.deficit is None or bar.deficit.size_bytes > 0 or bar.deficit.size_bytes in stated.values()
        assert bar.total_bytes is None or bar.total_bytes in stated.values()
        assert not {segment.name for segment in bar.segments} & set(bar.missing)


def test_numbers_for_people() -> None:
    assert amount("max_model_len", 241_664) == "241,664 tokens"
    assert amount("max_num_seqs", 3) == "3"
    assert amount("kv_cache_memory_bytes", 3_166_500_000) == "2.95 GiB"
    assert size(0.12 * GIB, HALF_DIGIT) == "0.12 GiB"
    assert size(76 * MIB) == "76.00 MiB"
    assert [duration(seconds) for seconds in (0, 0.04, 8.44, 85.4, 412.3, 3_780)] == [
        "0 s", "40 ms", "8.4 s", "85 s", "6 min 52 s", "1 h 03 min",
    ]  # fmt: skip
    assert value_text(value(2.0, "ratio", 1)) == "2.00×"
    assert value_text(value(True, "flag", 1)) == "yes"
