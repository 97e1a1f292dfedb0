"""Pool arithmetic: figures of the RDNA4 budget document, sections 3, 5 and 6."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvbudget.ledger.model import BootLedger, Evidence, Value
from pytest_kvbudget.search.pool import (
    kv_windows_short,
    measured_pool_bytes,
    next_pool_bytes,
    pool_short,
    rung_shape,
    scaled_pool_bytes,
)
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import GIB
from pytest_kvbudget.verdict import Phase

DEPLOYED = Shape(max_model_len=200_704, max_num_seqs=3, kv_cache_dtype="fp8", kv_cache_memory_bytes=3_166_500_000)


def test_the_deployed_pool_holds_its_two_windows_exactly() -> None:
    """401,408 tokens printed, 2.00x."""
    assert not pool_short(401_408, 2, 200_704)
    assert pool_short(401_407, 2, 200_704)
    assert pool_short(401_408, 3, 200_704)


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (200_704, 3_166_500_000),
        # 49 quanta of 4,096 to 50, 59 and 64: x/49 by hand
        (204_800, 3_231_122_449),
        (241_664, 3_812_724_490),
        (262_144, 4_135_836_735),
        (100_352, 1_583_250_000),
    ],
)
def test_the_pool_scales_with_the_window(window: int, expected: int) -> None:
    assert rung_shape(DEPLOYED, "max_model_len", window, "scaled").kv_cache_memory_bytes == expected


def test_sequences_cancel_unless_they_are_the_axis() -> None:
    assert rung_shape(DEPLOYED, "max_num_seqs", 6, "scaled").kv_cache_memory_bytes == 6_333_000_000
    assert rung_shape(DEPLOYED, "max_num_seqs", 6, "fixed").kv_cache_memory_bytes == 3_166_500_000
    without = Shape(max_model_len=200_704, kv_cache_memory_bytes=3_166_500_000)
    assert scaled_pool_bytes(without, without.merged(max_model_len=100_352)) == 1_583_250_000


def test_a_fixed_pool_keeps_its_bytes() -> None:
    rung = rung_shape(DEPLOYED, "max_model_len", 262_144, "fixed")
    assert (rung.max_model_len, rung.kv_cache_memory_bytes) == (262_144, 3_166_500_000)


@pytest.mark.parametrize(
    ("base", "axis", "word"),
    [
        (Shape(max_model_len=4096), "max_model_len", "needs kv_cache_memory_bytes"),
        (Shape(kv_cache_memory_bytes=4096), "max_num_seqs", "needs max_model_len"),
        (DEPLOYED, "kv_cache_memory_bytes", "use 'fixed'"),
    ],
)
def test_what_cannot_be_scaled_is_refused(base: Shape, axis: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        rung_shape(base, axis, 8, "scaled")


def test_an_axis_that_is_no_field_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        rung_shape(DEPLOYED, "window", 8, "fixed")


def test_the_rate_of_the_deployed_geometry() -> None:
    """3,166,500,000 B for 401,408 tokens is 7,888.49 B per token, 7,889 rounded up."""
    assert measured_pool_bytes(3_166_500_000, 401_408, 1, 1) == 7_889
    assert measured_pool_bytes(3_166_500_000, 401_408, 2, 204_800) == 7_889 * 409_600


def test_windows_are_filled_in_whole_blocks() -> None:
    assert measured_pool_bytes(1_000_000, 1_000, 1, 900, block_tokens=272) == 1_000 * 4 * 272


def test_no_tokens_no_rate() -> None:
    with pytest.raises(ValueError, match="at least 1 of each"):
        measured_pool_bytes(3_166_500_000, 0, 2, 200_704)


@settings(deadline=None)
@given(
    block_tokens=st.integers(1, 2_096),
    token_bytes=st.integers(1, 200_000),
    blocks=st.integers(1, 5_000),
    rest=st.floats(0, 0.999),
    windows=st.integers(1, 8),
    window=st.integers(1, 300_000),
)
def test_the_measured_pool_is_never_short_again(
    *, block_tokens: int, token_bytes: int, blocks: int, rest: float, windows: int, window: int
) -> None:
    """An engine that fills whole blocks and wastes a part of one, whatever the geometry."""
    block_bytes = block_tokens * token_bytes
    pool_bytes = blocks * block_bytes + int(rest * block_bytes)
    again = measured_pool_bytes(pool_bytes, blocks * block_tokens, windows, window, block_tokens=block_tokens)
    assert not pool_short(again // block_bytes * block_tokens, windows, window)


def test_a_pool_that_is_not_scaled_and_short_failed_for_memory() -> None:
    cause = kv_windows_short(401_408, 3, 200_704, pool_bytes=3_166_500_000)
    assert (cause.phase, cause.failure_class, cause.by_gate) == (Phase.KV_CHECK, "kv_windows_short", False)
    assert "2.95 GiB holds 401,408 tokens" in cause.sentence
    assert "3 windows of 200,704 need 602,112: 200,704 short" in cause.sentence
    assert [(lever.name, lever.direction, lever.effect) for lever in cause.levers] == [
        ("kv_cache_memory_bytes", "raise", "helps"),
        ("max_model_len", "lower", "helps"),
        ("windows", "lower", "helps"),
    ]
    assert "3 of 133,802 tokens fit" in cause.levers[1].why
    assert "2 of 200,704 tokens fit" in cause.levers[2].why


def test_without_a_pin_it_is_utilization_that_moves_the_pool() -> None:
    cause = kv_windows_short(150_745, 1, 160_000)
    assert "1 window of 160,000" in cause.sentence
    assert cause.levers[0].name == "gpu_memory_utilization"


def short_boot(
    window: int, rate: int, block: int, blocks: int, estimate: int | None, *, states: int = 0
) -> tuple[BootLedger, Shape]:
    """A KV check that failed: the need in hundredths of a GiB, and whatever the engine estimates."""
    needed = (-(-window // block) + states) * block * rate
    shown = {"kv_needed_bytes": (int(round(needed / GIB, 2) * GIB), 0.005 * GIB)}
    if estimate is not None:
        shown["estimated_max_model_len"] = (estimate, 0.0)
    facts = {
        name: Value(value=value, unit="bytes", evidence=Evidence(1, name), precision=precision)
        for name, (value, precision) in shown.items()
    }
    return BootLedger(family="rdna4", facts=facts), Shape(
        max_model_len=window, kv_cache_memory_bytes=blocks * block * rate
    )


@settings(deadline=None)
@given(
    window=st.integers(4_096, 300_000),
    rate=st.integers(4_000, 200_000),
    block=st.sampled_from((16, 32, 64, 128)),
    lie=st.one_of(st.none(), st.integers(-(10**15), 10**15)),
)
def test_a_short_pool_holds_its_window_at_the_second_boot_whatever_is_estimated(
    window: int, rate: int, block: int, lie: int | None
) -> None:
    blocks = -(-window // block)
    # as many blocks as the window needs, of which one is never handed out
    ledger, shape = short_boot(window, rate, block, blocks, lie)
    again = next_pool_bytes(ledger, shape, 1, block_tokens=128)
    assert again is not None
    assert again // (block * rate) >= blocks + 1
    # digits and blocks are all that it is given more
    assert again <= (blocks + 1) * block * rate + 0.01 * GIB + 3 * 128 * (rate + 0.01 * GIB / window)


def test_an_estimate_that_agrees_with_the_need_is_finer_than_it() -> None:
    needed = 915 * 64 * 9_000
    ledger, shape = short_boot(58_560, 9_000, 64, 915, 58_496)
    fine = next_pool_bytes(ledger, shape, 1, block_tokens=128)
    assert fine is not None
    assert needed + 64 * 9_000 <= fine < needed + 2 * 128 * 9_010
    ledger, shape = short_boot(58_560, 9_000, 64, 915, 58_496_000)
    coarse = next_pool_bytes(ledger, shape, 1, block_tokens=128)
    assert coarse is not None
    assert fine < coarse <= needed + 0.01 * GIB + 128 * 9_200


def test_a_count_is_the_truth() -> None:
    facts = {"kv_tokens": Value(value=20_480, unit="tokens", evidence=Evidence(1, "kv_tokens"))}
    shape = Shape(max_model_len=10_272, kv_cache_memory_bytes=20_480 * 9_000)
    again = next_pool_bytes(BootLedger(family="rdna4", facts=facts), shape, 2, block_tokens=64)
    assert again == 9_000 * 64 * 321  # 20,544 tokens are 321 blocks
    assert next_pool_bytes(BootLedger(family="rdna4", facts={}), DEPLOYED, 2, block_tokens=128) is None
    assert next_pool_bytes(BootLedger(family="rdna4", facts=facts), Shape(), 2, block_tokens=128) is None


def test_a_block_that_is_larger_than_usual_is_filled_whole() -> None:
    """A hybrid: 163,840 tokens are 166 blocks of 992; of 166 there one holds the state, and 164 are 162,688 tokens."""
    rate, block = 19_923, 992
    ledger, shape = short_boot(163_840, rate, block, 166, 162_688, states=1)
    facts = {**ledger.facts, "block_size": Value(value=block, unit="tokens", evidence=Evidence(1, "block_size"))}
    again = next_pool_bytes(BootLedger(family="rdna4", facts=facts), shape, 1, block_tokens=128)
    assert again is not None
    assert again // (block * rate) >= 166 + 2
