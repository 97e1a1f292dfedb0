"""Hints from ledgers of real boots: vLLM 0.32 on CPU, public cases, the RDNA4 budget document."""

from __future__ import annotations

import pytest

from pytest_kvbudget.ledger.model import BootLedger, Cause, Evidence, Value
from pytest_kvbudget.search.hints import hint_from
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
