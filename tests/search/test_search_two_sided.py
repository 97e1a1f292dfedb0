"""Ladders on which too little fails as well as too much: shares of a device and pinned pools."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvbudget.ledger.levers import levers_for
from pytest_kvbudget.ledger.model import Cause
from pytest_kvbudget.search.bracket import boot_bound
from pytest_kvbudget.search.ladder import Ladder
from pytest_kvbudget.search.lever import wants_more
from pytest_kvbudget.search.model import Axis, Finding, Strategy, Trial
from pytest_kvbudget.search.predict import Predict
from pytest_kvbudget.search.strategies import STRATEGIES
from pytest_kvbudget.verdict import FindingKind, Phase, Verdict

SHARE = Axis(name="gpu_memory_utilization", floor=5000, ceiling=9900, quantum=100, scale=10_000)


def cause(failure_class: str, phase: Phase) -> Cause:
    levers = levers_for(failure_class, "vllm", phase)
    return Cause(phase=phase, failure_class=failure_class, sentence=failure_class, levers=levers)


SHORT = cause("kv_check_short", Phase.KV_CHECK)
TOO_MUCH = cause("startup_free_below_request", Phase.WORKER_INIT)


def boot(value: int, low: int, high: int) -> Trial:
    """Shares below ``low`` leave too little KV cache, those above ``high`` are not free."""
    failing = SHORT if value < low else TOO_MUCH if value > high else None
    return Trial(value=value, verdict=Verdict.PASS if failing is None else Verdict.FAIL, cause=failing)


def climb(low: int, high: int, strategy: Strategy | None = None, axis: Axis = SHARE) -> tuple[Finding, list[int]]:
    ladder, booted = Ladder(axis, strategy or Predict()), []
    while (ask := ladder.next()) is not None:
        booted.append(ask.value)
        ladder.tell(boot(ask.value, low, high))
    return ladder.finding(), booted


@given(st.sampled_from(list(STRATEGIES.values())), st.integers(4900, 10_000), st.integers(4900, 10_000))
@settings(deadline=None)
def test_the_largest_share_that_passes_is_found_wherever_it_lies(strategy: Strategy, low: int, high: int) -> None:
    found, booted = climb(low, high, strategy)
    shares = [SHARE.value(index) for index in range(len(SHARE))]
    good = [value for value in shares if low <= value <= high]
    assert found.value == (good[-1] if good else None)
    if good:
        assert found.kind is (FindingKind.CEILING_REACHED if good[-1] == SHARE.ceiling else FindingKind.PROVEN)
        assert found.failed_at == (None if good[-1] == SHARE.ceiling else good[-1] + SHARE.quantum)
    else:
        assert found.kind in {FindingKind.EMPTY, FindingKind.EMPTY_WINDOW}
    if strategy.name == "predict":
        assert len(booted) <= boot_bound(SHARE)


def test_nothing_passes_where_the_two_failures_meet() -> None:
    found, _ = climb(low=9800, high=9700)
    assert found.kind is FindingKind.EMPTY_WINDOW
    assert (found.value, found.failed_at) == (None, 9800)
    assert found.sentence.startswith(
        "nothing passes: gpu_memory_utilization 0.97 failed for memory in kv_check for want of more, and 0.98, the "
        "next rung, failed for memory in worker_init; "
    )
    assert found.sentence.endswith("; lower max_model_len instead")


def test_even_the_ceiling_is_too_little() -> None:
    found, booted = climb(low=10_000, high=10_000)
    assert found.kind is FindingKind.EMPTY
    assert found.sentence == (
        "nothing passes: gpu_memory_utilization 0.99, even the ceiling, failed for memory in kv_check; 2 boots; lower "
        "max_model_len instead"
    )
    assert booted[-1] == SHARE.ceiling


def test_too_much_everywhere_is_said_of_the_floor() -> None:
    found, _ = climb(low=0, high=4000)
    assert found.kind is FindingKind.EMPTY
    assert found.sentence.startswith("nothing passes: gpu_memory_utilization 0.5, the floor, failed for memory")


def test_a_failure_for_want_of_more_above_a_pass_has_no_single_boundary() -> None:
    ladder = Ladder(SHARE, Predict(), known=[boot(7000, 0, 9900), boot(8000, 9900, 9900)])
    assert ladder.next() is None
    assert ladder.finding().kind is FindingKind.NON_MONOTONE
    assert "0.8 failed for want of more although 0.7 passed" in ladder.finding().sentence


def test_a_winner_is_confirmed_and_a_failure_for_want_of_more_is_not() -> None:
    for low, high, confirmations in ((6000, 7000, 2), (7100, 7000, 0)):
        ladder = Ladder(SHARE, Predict(), confirm=2)
        while (ask := ladder.next()) is not None:
            ladder.tell(boot(ask.value, low, high))
        assert ladder.finding().confirmations == confirmations


@pytest.mark.parametrize(
    ("failure_class", "axis", "more"),
    [
        ("kv_check_short", "gpu_memory_utilization", True),
        ("kv_check_short", "kv_cache_memory_bytes", True),
        ("kv_check_short", "max_model_len", False),
        ("max_num_seqs_exceeds_state", "gpu_memory_utilization", True),
        ("graph_capture_oom", "gpu_memory_utilization", False),
        ("kv_alloc_oom", "kv_cache_memory_bytes", False),
    ],
)
def test_levers_tell_which_failures_want_more(failure_class: str, axis: str, more: bool) -> None:
    assert wants_more(cause(failure_class, Phase.KV_CHECK), axis) is more
    assert not wants_more(None, axis)


def test_pinned_bytes_make_the_share_no_cure() -> None:
    """The utilization sizes nothing then: a larger one does not help, and the floor is what has to be booted."""
    levers = levers_for("kv_check_short", "vllm", Phase.KV_CHECK, pinned=True)
    pinned = Cause(phase=Phase.KV_CHECK, failure_class="kv_check_short", sentence="short", levers=levers)
    assert not wants_more(pinned, "gpu_memory_utilization")
    assert wants_more(pinned, "kv_cache_memory_bytes")
