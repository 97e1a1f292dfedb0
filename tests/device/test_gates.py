"""Gates on memory: the heaviest rank binds and is named, and what was not seen is never a pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvbudget.device.gates import GateResult, MemoryGates, judge_memory, worst
from pytest_kvbudget.device.trace import WindowMemory
from pytest_kvbudget.units import GIB, MIB
from pytest_kvbudget.verdict import Verdict


def rank(number: int, *, free: int, used: int = 0, first: int = 0, last: int = 0) -> WindowMemory:
    return WindowMemory(
        rank=number,
        device=f"card{number}",
        samples=3,
        first_used_bytes=first,
        last_used_bytes=last,
        peak_used_bytes=used,
        peak_at_s=4.0,
        least_free_bytes=free,
        least_free_at_s=7.25,
    )


def only(results: tuple[GateResult, ...]) -> GateResult:
    (result,) = results
    return result


def test_documented_margins_of_the_rdna4_card() -> None:
    """0.13 GiB left died, 0.89 GiB lived; the default asks for 512 MiB."""
    gates = MemoryGates(min_free_bytes=512 * MIB)
    died = only(judge_memory([rank(0, free=int(0.89 * GIB)), rank(1, free=int(0.13 * GIB))], gates))
    assert (died.verdict, died.rank, died.device) == (Verdict.MARGINAL, 1, "card1")
    assert "rank 1 (device card1) had 133.12 MiB free at the worst moment, 7.2 s in" in died.sentence
    assert died.over_bytes == 512 * MIB - int(0.13 * GIB)
    lived = only(judge_memory([rank(0, free=int(0.89 * GIB))], gates))
    assert lived.verdict is Verdict.PASS
    assert "911.36 MiB free" in lived.sentence


def test_more_than_the_device_has_can_never_be_free() -> None:
    seen = [rank(0, free=2 * GIB, used=30 * GIB)]
    never = only(judge_memory(seen, MemoryGates(min_free_bytes=100 * GIB)))
    assert never.verdict is Verdict.MARGINAL
    assert never.sentence.endswith("was asked for, and can never be: the device has 32.00 GiB in all")
    assert "never" not in only(judge_memory(seen, MemoryGates(min_free_bytes=32 * GIB))).sentence


def test_growth_and_use_fail() -> None:
    ranks = [rank(0, free=1, used=90, first=10, last=15), rank(1, free=1, used=80, first=10, last=40)]
    used, growth = judge_memory(ranks, MemoryGates(max_used_bytes=85, max_growth_bytes=20))
    assert (used.verdict, used.rank, used.measured_bytes) == (Verdict.FAIL, 0, 90)
    assert (growth.verdict, growth.rank, growth.measured_bytes) == (Verdict.FAIL, 1, 30)
    assert worst([used, growth]) is Verdict.FAIL


@pytest.mark.parametrize("ranks", [[], [None], [None, rank(1, free=GIB)]])
def test_what_was_not_seen_is_unknown(ranks: list[WindowMemory | None]) -> None:
    result = only(judge_memory(ranks, MemoryGates(min_free_bytes=MIB)))
    assert result.verdict is Verdict.UNKNOWN
    assert "seen" in result.sentence


def test_a_rank_that_misses_decides_whatever_was_not_seen() -> None:
    result = only(judge_memory([None, rank(1, free=1)], MemoryGates(min_free_bytes=2)))
    assert result.verdict is Verdict.MARGINAL
    assert "the memory of rank 0 was not seen" in result.sentence


def test_nothing_asked_nothing_judged() -> None:
    assert judge_memory([None], MemoryGates()) == ()
    assert worst(()) is Verdict.PASS


@given(st.lists(st.one_of(st.none(), st.integers(0, 100)), max_size=5), st.integers(0, 100))
def test_min_free_passes_only_if_every_rank_was_seen_with_enough(free: list[int | None], limit: int) -> None:
    ranks = [None if size is None else rank(number, free=size) for number, size in enumerate(free)]
    result = only(judge_memory(ranks, MemoryGates(min_free_bytes=limit)))
    seen = [size for size in free if size is not None]
    if any(size < limit for size in seen):
        assert result.verdict is Verdict.MARGINAL
        assert result.measured_bytes == min(seen)
    else:
        assert (result.verdict is Verdict.PASS) == (bool(free) and None not in free)
        assert result.verdict in {Verdict.PASS, Verdict.UNKNOWN}
