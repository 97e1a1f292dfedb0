"""Hints from ledgers of real boots: vLLM 0.32 on CPU, public cases, the RDNA4 budget document."""

from __future__ import annotations

import pytest

from pytest_kvbudget.ledger.model import BootLedger, Cause, Evidence, Value
from pytest_kvbudget.search.hints import hint_from, sweep_hint_from
from pytest_kvbudget.search.knobs import KNOBS
from pytest_kvbudget.search.model import Hint
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import GIB, MIB
from pytest_kvbudget.verdict import Phase

HALF_CENT = 0.005 * GIB


def ledger(
    failure_class: str | None = None, phase: Phase = Phase.READY, **facts: float | tuple[float, float]
) -> BootLedger:
    """A ledger with these facts, each a number or a number and its precision."""
    values = {}
    for name, stated in facts.items():
        number, precision = stated if isinstance(stated, tuple) else (stated, 0.0)
        values[name] = Value(value=number, unit="bytes", evidence=Evidence(1, name), precision=precision)
    cause = None if failure_class is None else Cause(phase=phase, failure_class=failure_class, sentence="")
    return BootLedger(family="vllm", facts=values, cause=cause, phase=phase)


def points(hint: Hint, value: int) -> list[float]:
    """Where each limit with a rate would be hit."""
    return [value + limit.margin_bytes / limit.bytes_per_unit for limit in hint.limits if limit.bytes_per_unit]


def test_a_refused_window_on_a_pinned_pool() -> None:
    """131072 at 50M: 0.12 GiB needed, 0.05 GiB available, estimated maximum model length 51072."""
    boot = ledger(
        "kv_check_short",
        Phase.KV_CHECK,
        kv_needed_bytes=(0.12 * GIB, HALF_CENT),
        available_kv_bytes=(0.05 * GIB, HALF_CENT),
        estimated_max_model_len=51_072,
    )
    shape = Shape(max_model_len=131_072, kv_cache_memory_bytes=52_428_800)
    hint = hint_from(boot, axis="max_model_len", shape=shape)
    assert hint.estimate == 51_072
    (limit,) = hint.limits
    assert limit.bytes_per_unit is not None
    # the pin is exact and the printed need is 0.12 of a true 0.125 GiB: the true root lies just at the printed digit
    assert points(hint, 131_072) == [pytest.approx(53_333, abs=1)]
    assert abs(53_333 - 51_200) <= limit.precision_bytes / limit.bytes_per_unit


def test_the_capacity_of_a_pool_that_served() -> None:
    """51072 at 50M prints 51,200 tokens, 1.00x: 1,024 B per token."""
    boot = ledger(kv_tokens=51_200, max_concurrency=(1.0, 0.005))
    hint = hint_from(boot, axis="max_model_len", shape=Shape(max_model_len=51_072, kv_cache_memory_bytes=52_428_800))
    (limit,) = hint.limits
    assert limit.bytes_per_unit == 1024
    assert limit.margin_bytes == 128 * 1024
    assert hint.estimate is None


def test_promised_windows_count() -> None:
    """The deployed RDNA4 pool, 401,408 tokens, is used up by two windows of 200,704."""
    boot = ledger(kv_tokens=401_408, max_concurrency=(2.0, 0.005))
    shape = Shape(max_model_len=200_704, kv_cache_memory_bytes=3_166_500_000)
    assert points(hint_from(boot, axis="max_model_len", shape=shape, windows=2), 200_704) == [200_704]
    assert points(hint_from(boot, axis="max_model_len", shape=shape), 200_704) == [pytest.approx(401_408)]


def test_a_token_count_that_is_not_concurrency_times_window_gives_way() -> None:
    """R9700 on vLLM 0.13, a hybrid: 154,496 tokens beside 33.47x at 16,384 = 548,372."""
    boot = ledger(kv_tokens=154_496, max_concurrency=(33.47, 0.005), available_kv_bytes=(10 * GIB, HALF_CENT))
    hint = hint_from(boot, axis="max_model_len", shape=Shape(max_model_len=16_384))
    assert points(hint, 16_384) == [pytest.approx(548_372, abs=1)]


@pytest.mark.parametrize("axis", ["max_num_seqs", "max_num_batched_tokens"])
def test_another_axis_gets_the_margin_without_a_rate(axis: str) -> None:
    boot = ledger(kv_needed_bytes=(4 * GIB, HALF_CENT), available_kv_bytes=(3 * GIB, HALF_CENT))
    hint = hint_from(boot, axis=axis, shape=Shape(max_model_len=65_536, max_num_seqs=8, max_num_batched_tokens=4096))
    (limit,) = hint.limits
    assert (limit.margin_bytes, limit.bytes_per_unit) == (-GIB, None)
    assert hint.estimate is None


def test_an_allocation_that_failed_is_only_a_bound() -> None:
    """vllm#57475: 136 MiB asked, 120.88 MiB free."""
    boot = ledger(
        "graph_capture_oom",
        Phase.GRAPH_CAPTURE,
        tried_alloc_bytes=(136 * MIB, 0.005 * MIB),
        free_bytes=(120.88 * MIB, 0.005 * MIB),
    )
    shape = Shape(max_model_len=245_760, kv_cache_memory_bytes=245_760 * 7_701)
    (limit,) = hint_from(boot, axis="max_model_len", shape=shape, scaled=True).limits
    assert limit.at_least
    assert limit.margin_bytes == pytest.approx(-15.12 * MIB)
    assert limit.bytes_per_unit == 7_701
    (unmoved,) = hint_from(boot, axis="max_model_len", shape=shape).limits
    assert unmoved.bytes_per_unit is None


def test_free_memory_of_a_boot_that_served_is_slack() -> None:
    """Shape G: 0.89 GiB free per card, pool scaled with the window."""
    shape = Shape(max_model_len=200_704, kv_cache_memory_bytes=3_166_500_000)
    hint = hint_from(
        ledger(kv_tokens=401_408), axis="max_model_len", shape=shape, scaled=True, free_bytes=int(0.89 * GIB)
    )
    assert points(hint, 200_704) == [pytest.approx(200_704 + 0.89 * GIB / (3_166_500_000 / 200_704), abs=1)]


def test_state_blocks_bound_the_sequences() -> None:
    """vllm#49064: max_num_seqs (256) exceeds available Mamba cache blocks (161)."""
    boot = ledger("max_num_seqs_exceeds_state", Phase.KV_CHECK, state_blocks=161, max_num_seqs=256)
    assert hint_from(boot, axis="max_num_seqs", shape=Shape(max_num_seqs=256)).estimate == 161
    assert hint_from(boot, axis="max_model_len", shape=Shape(max_num_seqs=256)).estimate is None


def test_a_pool_as_axis_is_paid_byte_by_byte() -> None:
    """RDNA4 budget document: tried 10.28 GiB with 9.46 GiB free died in KV allocation."""
    boot = ledger(
        "kv_alloc_oom",
        Phase.KV_ALLOC,
        tried_alloc_bytes=(10.28 * GIB, HALF_CENT),
        free_bytes=(9.46 * GIB, HALF_CENT),
    )
    hint = hint_from(boot, axis="kv_cache_memory_bytes", shape=Shape(kv_cache_memory_bytes=11_038_065_951))
    assert points(hint, 11_038_065_951) == [pytest.approx(11_038_065_951 - 0.82 * GIB)]


def test_silence_is_no_hint() -> None:
    assert hint_from(ledger(), axis="max_model_len", shape=Shape(max_model_len=4096)) == Hint()
    failed = ledger("graph_capture_oom", Phase.GRAPH_CAPTURE)
    assert hint_from(failed, axis="max_model_len", shape=Shape(max_model_len=4096), free_bytes=GIB) == Hint()


# -- sweeps


def sweep_points(hint: Hint, value: int, name: str, *, goal: str = "least") -> list[float]:
    """Where each limit of a name would be hit, on the knob's own scale; ``kv_check`` on the other side."""
    found = [limit for limit in hint.limits if limit.name == name and limit.bytes_per_unit]
    sign = (1 if name == "kv_check" else -1) * (1 if goal == "least" else -1)
    return [value + sign * limit.margin_bytes / (limit.bytes_per_unit or 1) for limit in found]


def test_the_maximum_headroom_of_the_neuron_document() -> None:
    """Trn3 at LNC 2: 36 GiB of core, 8 of weights, 1 of minimum leave 27 GiB; a boot at 4 GiB tells."""
    boot = ledger(total_bytes=36.0 * GIB, weights_bytes=8.0 * GIB)
    hint = sweep_hint_from(boot, knob=KNOBS["reserved_headroom"], shape=Shape(reserved_headroom=4 * GIB))
    assert sweep_points(hint, 4 * GIB, "kv_check") == [27 * GIB]


def test_ncc_peak_over_its_limit_is_the_raise() -> None:
    """NCC_EOOM002 with 28.50 GB against the 24.00 GB of a trn2 stack: about 4.5 GiB of headroom more."""
    boot = ledger(
        "compile_hbm_exceeded",
        Phase.COMPILE,
        peak_hbm_bytes=(28.5 * GIB, HALF_CENT),
        hbm_limit_bytes=(24.0 * GIB, HALF_CENT),
    )
    hint = sweep_hint_from(boot, knob=KNOBS["reserved_headroom"], shape=Shape(reserved_headroom=2 * GIB))
    (raised,) = sweep_points(hint, 2 * GIB, "compile")
    # the program's own share shrinks with the cache, so a little less than the printed difference may do
    assert 6 * GIB < raised <= 6.5 * GIB
    by_cap = sweep_hint_from(boot, knob=KNOBS["kv_cap_fraction"], shape=Shape())
    assert [limit.bytes_per_unit for limit in by_cap.limits] == [None]  # the budget was not printed


def test_measured_room_is_the_cut() -> None:
    hint = sweep_hint_from(
        ledger(), knob=KNOBS["reserved_headroom"], shape=Shape(reserved_headroom=12 * GIB), free_bytes=int(6.5 * GIB)
    )
    assert sweep_points(hint, 12 * GIB, "device_memory") == [5.5 * GIB]


def test_a_share_is_worth_its_part_of_the_device() -> None:
    """RDNA4 document, section 1: 0.01 of a 31.86 GiB card is 0.32 GiB."""
    boot = ledger(total_bytes=31.86 * GIB)
    knob = KNOBS["gpu_memory_utilization"]
    hint = sweep_hint_from(boot, knob=knob, shape=Shape(gpu_memory_utilization=0.97), free_bytes=int(0.32 * GIB))
    (limit,) = hint.limits
    assert limit.bytes_per_unit is not None
    assert limit.bytes_per_unit * 100 == pytest.approx(0.3186 * GIB)
    assert sweep_points(hint, 9700, "device_memory", goal="most") == [pytest.approx(9800, abs=1)]


def test_a_pools_own_edge_is_what_its_window_needs() -> None:
    """The real CPU engine: 51,200 tokens in a pool that serves 51,072; 128 tokens at 1,024 B to spare."""
    boot = ledger(kv_tokens=51_200, max_concurrency=(1.0, 0.005))
    shape = Shape(max_model_len=51_072, kv_cache_memory_bytes=52_428_800)
    hint = sweep_hint_from(boot, knob=KNOBS["kv_cache_memory_bytes"], shape=shape)
    (limit,) = hint.limits
    assert (limit.name, limit.bytes_per_unit, limit.exact) == ("kv_check", 1.0, True)
    assert limit.margin_bytes == 128 * 1024


def test_a_pool_that_the_engine_sized_otherwise_is_what_it_printed() -> None:
    """vLLM 0.32 on CPU with VLLM_CPU_KVCACHE_SPACE=1 beside a pin of 64 MiB: 1.00 GiB, 1,048,576 tokens."""
    boot = ledger(available_kv_bytes=(GIB, HALF_CENT), kv_tokens=1_048_576, max_concurrency=(8.0, 0.005))
    hint = hint_from(boot, axis="max_model_len", shape=Shape(max_model_len=131_072, kv_cache_memory_bytes=64 * MIB))
    (limit,) = hint.limits
    assert limit.margin_bytes == (1_048_576 - 131_072) * 1024
    assert not limit.exact


# -- what a ladder reads of compiled programs and arenas


def test_a_programs_scratchpad_over_its_limit() -> None:
    """Rates are of this window: 3.875 GiB of scratchpad is one figure of a public prefill graph of 4.57 GiB."""
    boot = ledger(
        "compile_hbm_exceeded",
        Phase.COMPILE,
        peak_hbm_bytes=24.5 * GIB,
        hbm_limit_bytes=24.0 * GIB,
        scratchpad_bytes=3.875 * GIB,
    )
    hint = hint_from(boot, axis="max_model_len", shape=Shape(max_model_len=131_072))
    assert points(hint, 131_072) == [pytest.approx(131_072 * (1 - 0.5 / 3.875))]
    (limit,) = hint.limits
    assert limit.rate_at_most  # some of a scratchpad is there whatever the window


def test_a_program_takes_of_the_device_what_it_takes_of_its_limit() -> None:
    for family, other in (("neuron", "compile"), ("vllm", None)):
        boot = ledger()
        boot.family = family
        (limit,) = hint_from(boot, axis="max_model_len", shape=Shape(max_model_len=4096), free_bytes=GIB).limits
        assert (limit.name, limit.bytes_per_unit, limit.grows_with) == ("device_memory", None, other)


def test_an_arena_gives_back_what_the_plan_reserved() -> None:
    """Three windows of fp8 take 3 x 7,701 B more per token; 1.08 x 9,190 B of it come from the arena."""
    boot = ledger(plan_registry_b_per_token=9190)
    shape = Shape(max_model_len=200_704, max_num_seqs=3, kv_cache_memory_bytes=200_704 * 3 * 7701)
    hint = hint_from(boot, axis="max_model_len", shape=shape, windows=3, scaled=True, free_bytes=int(0.89 * GIB))
    (limit,) = hint.limits
    assert limit.bytes_per_unit == pytest.approx(3 * 7701 - 1.08 * 9190)


def test_an_arena_shrinks_to_its_resident_layers() -> None:
    """The table of facts, section 3: 14.68 GiB of expert cache, 1.87 of it resident, at 65,536 tokens."""
    boot = ledger(
        plan_registry_b_per_token=9190,
        plan_expert_cache_bytes=(14.68 * GIB, HALF_CENT),
        plan_resident_layers_bytes=(1.87 * GIB, HALF_CENT),
    )
    hint = hint_from(boot, axis="max_model_len", shape=Shape(max_model_len=65_536))
    assert points(hint, 65_536) == [pytest.approx(65_536 + 12.81 * GIB / (1.08 * 9190))]


def test_only_an_engine_that_compiles_has_limits_it_does_not_state() -> None:
    for family, loose in (("vllm", False), ("neuron", True)):
        boot = ledger(kv_tokens=51_200, available_kv_bytes=GIB)
        boot.family = family
        (limit,) = hint_from(boot, axis="max_model_len", shape=Shape(max_model_len=4096)).limits
        assert limit.loose is loose


def test_an_allocation_whose_free_memory_is_not_printed_was_short_of_no_more_than_itself() -> None:
    """The runtime names the piece that failed; what the worker printed as free is of long before."""
    boot = ledger("runtime_hbm_oom", Phase.MODEL_LOAD, tried_alloc_bytes=256 * MIB, free_bytes=16.94 * GIB)
    boot.family = "neuron"
    (limit,) = sweep_hint_from(boot, knob=KNOBS["reserved_headroom"], shape=Shape()).limits
    assert limit.at_least
    assert (limit.margin_bytes, limit.precision_bytes) == (-128 * MIB, 128 * MIB)
