"""The rules of a headroom sweep against an oracle that knows both edges, and against hints that lie."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvbudget.ledger.model import Cause, Lever
from pytest_kvbudget.search.knobs import KNOBS, Knob
from pytest_kvbudget.search.model import Hint, Limit, SweepKey, Trial
from pytest_kvbudget.search.noise import Noise
from pytest_kvbudget.search.strategies import SWEEP_STRATEGIES
from pytest_kvbudget.search.sweep import Sweep
from pytest_kvbudget.units import GIB, MIB
from pytest_kvbudget.verdict import FindingKind, Phase, Verdict
from tests.search.test_search_strategies import HINTS

HEADROOM = KNOBS["reserved_headroom"]
ALLOCATION = Cause(
    phase=Phase.COMPILE,
    failure_class="compile_hbm_exceeded",
    sentence="the program needs more than the limit",
    levers=(
        Lever("VLLM_NEURON_RESERVED_HEADROOM_GIB", "raise", "helps"),
        Lever("tensor_parallel_size", "raise", "helps"),
    ),
)
MINIMUM = Cause(phase=Phase.KV_CHECK, failure_class="min_kv_budget", sentence="less than the minimum")
LNC = Cause(phase=Phase.MODEL_LOAD, failure_class="lnc_mismatch", sentence="compiled for another LNC")
LESS_KV_ABOVE = {"reserved_headroom", "cudagraph_per_graph"}
POOL_SHORT = Cause(phase=Phase.KV_CHECK, failure_class="kv_check_short", sentence="one request does not fit")
POOL_LARGE = Cause(phase=Phase.KV_ALLOC, failure_class="kv_alloc_oom", sentence="the pool does not fit")


def sweep(knob: Knob = HEADROOM, **arguments: Any) -> Sweep:
    """A sweep from 0 to 30 GiB in steps of 1 GiB without confirmation."""
    defaults: dict[str, Any] = {"lowest": 0, "highest": 30 * GIB, "confirm": 0}
    return Sweep(knob, **{**defaults, **arguments})


def boot(knob: Knob, value: int, low: float, high: float, hint: Hint | None = None) -> Trial:
    """What a device shows on which values from ``low`` to ``high`` pass; the KV check comes before any allocation."""
    short = value > high if knob.name in LESS_KV_ABOVE else value < low
    large = value < low if knob.name in LESS_KV_ABOVE else value > high
    causes = (POOL_SHORT, POOL_LARGE) if knob.name == "kv_cache_memory_bytes" else (MINIMUM, ALLOCATION)
    cause = causes[0] if short else causes[1] if large else None
    verdict = Verdict.PASS if cause is None else Verdict.FAIL
    return Trial(value=value, verdict=verdict, cause=cause, hint=hint or Hint())


def run(search: Sweep, low: float, high: float, hints: list[Hint] | None = None) -> list[int]:
    booted: list[int] = []
    while (ask := search.next()) is not None:
        hint = hints[len(booted) % len(hints)] if hints else None
        booted.append(ask.value)
        search.tell(boot(search.knob, ask.value, low, high, hint))
    return booted


def test_the_documents_procedure_in_words() -> None:
    """In steps of 1 GiB until it passes, then once more; GPT-OSS 120B on Trn3 was validated at 4 GiB."""
    search = sweep(start=2 * GIB, strategy=SWEEP_STRATEGIES["step"], confirm=1)
    assert [value // GIB for value in run(search, 3.2 * GIB, 27 * GIB)] == [2, 3, 4, 4]
    finding = search.finding()
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, 4 * GIB, 3 * GIB)
    assert "reserved_headroom 4.00 GiB passed and 3.00 GiB failed for allocation in compile" in finding.sentence
    assert finding.sentence.endswith("1 confirming boot")


@pytest.mark.parametrize("start", [None, 0, 4 * GIB, 30 * GIB])
@pytest.mark.parametrize(
    ("window", "kind", "value", "failed_at"),
    [
        ((3.2, 27.0), FindingKind.PROVEN, 4, 3),
        ((-1.0, 27.0), FindingKind.FLOOR_REACHED, 0, None),
        ((0.0, 0.0), FindingKind.FLOOR_REACHED, 0, None),
        ((27.5, 27.9), FindingKind.EMPTY_WINDOW, None, 27),
        ((4.2, 4.1), FindingKind.EMPTY_WINDOW, None, 4),
        ((31.0, 99.0), FindingKind.EMPTY, None, 30),
        ((-9.0, -1.0), FindingKind.EMPTY, None, None),
    ],
)
def test_every_end_of_a_headroom(
    start: int | None, window: tuple[float, float], kind: FindingKind, value: int | None, failed_at: int | None
) -> None:
    search = sweep(start=start)
    booted = run(search, window[0] * GIB, window[1] * GIB)
    finding = search.finding()
    assert finding.kind is kind
    assert finding.value == (None if value is None else value * GIB)
    assert finding.failed_at == (None if failed_at is None else failed_at * GIB)
    assert len(booted) == len(set(booted)) == finding.boots
    if kind is FindingKind.EMPTY_WINDOW:
        # adjacent, and both really booted
        assert finding.failed_at is not None
        assert finding.short_at == finding.failed_at + GIB
        assert {finding.failed_at, finding.short_at} <= set(booted)


def test_an_empty_window_in_words() -> None:
    search = sweep(start=4 * GIB)
    run(search, 4.2 * GIB, 4.1 * GIB)
    assert search.finding().sentence.startswith(
        "empty window: reserved_headroom 4.00 GiB failed for allocation in compile, "
        "and 5.00 GiB failed for too little KV cache in kv_check"
    )
    assert "raise tensor_parallel_size instead" in search.finding().sentence
    assert not search.finding().proven


def test_nothing_passes_in_words() -> None:
    search = sweep()
    run(search, 31 * GIB, 99 * GIB)
    assert search.finding().sentence.startswith(
        "nothing passes: reserved_headroom 30.00 GiB, the largest of the sweep, still failed for allocation in compile"
    )
    other = sweep()
    run(other, -9 * GIB, -GIB)
    assert other.finding().sentence.startswith(
        "nothing passes: reserved_headroom 0.00 GiB, the smallest of the sweep, already failed for too little KV cache"
    )


@pytest.mark.parametrize("knob", ["kv_cap_fraction", "gpu_memory_utilization"])
def test_an_allocation_failure_lowers_a_fraction(knob: str) -> None:
    """Down from the law's ceiling, 0.982, in steps of 0.01; never up after an allocation failure."""
    search = sweep(KNOBS[knob], lowest=5020, highest=9820, start=9820)
    booted = run(search, 0.6 * 1e4, 0.95 * 1e4)
    assert booted[0] == 9820
    finding = search.finding()
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, 9420, 9520)
    assert f"{knob} 0.942 passed and 0.952 failed for allocation" in finding.sentence


def test_a_ceiling_that_passes_is_the_answer_after_one_boot() -> None:
    search = sweep(KNOBS["gpu_memory_utilization"], lowest=5020, highest=9820, start=9820)
    assert run(search, 0, 1e4) == [9820]
    assert search.finding().kind is FindingKind.CEILING_REACHED
    assert search.finding().sentence.startswith("gpu_memory_utilization 0.982 passed and is the largest of the sweep")


def test_the_smallest_pool_that_serves_a_window() -> None:
    """vLLM 0.32 on CPU: 51,072 tokens at 1,024 B and one block kept back are 50 MiB exactly."""
    search = sweep(KNOBS["kv_cache_memory_bytes"], lowest=MIB, highest=128 * MIB)
    boots = 0
    while (ask := search.next()) is not None:
        boots += 1
        good = ask.value >= 50 * MIB
        need = round(51_072 * 1024 / GIB, 2) * GIB
        tokens = ask.value / 1024 - 128
        limit = (
            Limit(name="kv_check", margin_bytes=(tokens - 51_072) * 1024, bytes_per_unit=1.0, precision_bytes=512)
            if good
            else Limit(
                name="kv_check",
                margin_bytes=min(-1.0, ask.value - need),
                bytes_per_unit=1.0,
                precision_bytes=0.005 * GIB,
            )
        )
        search.tell(
            Trial(
                value=ask.value,
                verdict=Verdict.PASS if good else Verdict.FAIL,
                cause=None if good else POOL_SHORT,
                hint=Hint(limits=(limit,)),
            )
        )
    finding = search.finding()
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, 50 * MIB, 49 * MIB)
    assert "kv_cache_memory_bytes 50.00 MiB passed and 49.00 MiB failed for too little KV cache" in finding.sentence
    assert boots <= 4


def test_printed_bytes_bound_the_raise() -> None:
    """NCC_EOOM002: used 28.50 of 24.00 GiB; the raise is at least 4.5 GiB."""
    search = sweep(start=0)
    ask = search.next()
    assert ask is not None
    over = Limit(name="compile", margin_bytes=-4.5 * GIB, bytes_per_unit=1.0, at_least=True)
    search.tell(boot(HEADROOM, ask.value, 5.2 * GIB, 27 * GIB, Hint(limits=(over,))))
    second = search.next()
    assert second is not None
    assert second.value >= 5 * GIB
    assert second.value <= 8 * GIB


def test_measured_slack_bounds_the_cut() -> None:
    """A boot at 12 GiB that left 6.5 GiB free: nothing below 5.5 GiB can pass."""
    search = sweep(start=12 * GIB)
    ask = search.next()
    assert ask is not None
    left = Limit(name="device_memory", margin_bytes=6.5 * GIB, bytes_per_unit=1.0)
    search.tell(boot(HEADROOM, ask.value, 5.6 * GIB, 27 * GIB, Hint(limits=(left,))))
    booted = run(search, 5.6 * GIB, 27 * GIB)
    assert min(booted) >= 5 * GIB
    assert search.finding().value == 6 * GIB
    assert search.finding().boots <= 3


def test_nothing_is_booted_above_the_maximum_headroom_without_need() -> None:
    """Core 36, weights 8, minimum 1: 27 GiB is the most that leaves the minimum."""
    search = sweep(maximum=27 * GIB)
    booted = run(search, 26.5 * GIB, 27 * GIB)
    assert max(booted) <= 27 * GIB
    assert search.finding().value == 27 * GIB
    # where even that fails for allocation, one step beyond it proves the empty window
    search = sweep(maximum=27 * GIB, start=27 * GIB)
    assert run(search, 29.5 * GIB, 27 * GIB)[:2] == [27 * GIB, 28 * GIB]
    assert search.finding().kind is FindingKind.EMPTY_WINDOW
    assert search.finding().boots == 2


def test_a_finer_last_step() -> None:
    search = sweep(start=4 * GIB, fine_step=GIB // 4, confirm=1)
    booted = run(search, 3.3 * GIB, 27 * GIB)
    finding = search.finding()
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, 3.5 * GIB, 3.25 * GIB)
    assert finding.step == GIB // 4
    assert finding.boots == len(set(booted))
    assert finding.confirmations == 1
    assert booted[-1] == 3.5 * GIB


def test_another_failure_stops_the_sweep() -> None:
    search = sweep(start=4 * GIB)
    ask = search.next()
    assert ask is not None
    search.tell(Trial(value=ask.value, verdict=Verdict.FAIL, cause=LNC))
    assert search.next() is None
    finding = search.finding()
    assert finding.kind is FindingKind.UNDECIDED
    assert "failed for something that reserved_headroom does not move: compiled for another LNC" in finding.sentence


def test_a_gate_stops_the_sweep_and_is_not_called_memory() -> None:
    search = sweep(start=4 * GIB)
    gate = Cause(phase=Phase.READY, failure_class="gate", sentence="assert 3 > 4", by_gate=True)
    search.next()
    search.tell(Trial(value=4 * GIB, verdict=Verdict.FAIL, cause=gate))
    assert search.next() is None
    assert "refused by the test's own gate" in search.finding().sentence


def test_unknown_twice_and_error_end_it_in_the_knobs_own_words() -> None:
    search = sweep(start=4 * GIB)
    for _ in range(2):
        ask = search.next()
        assert ask is not None
        search.tell(Trial(value=ask.value, verdict=Verdict.UNKNOWN))
    assert search.next() is None
    assert search.finding().sentence.startswith("undecided: reserved_headroom 4.00 GiB gave no verdict twice")
    other = sweep(start=4 * GIB)
    other.next()
    other.tell(Trial(value=4 * GIB, verdict=Verdict.ERROR, cause=LNC))
    assert other.finding().kind is FindingKind.ERROR
    assert "reserved_headroom 4.00 GiB ended for another reason than memory" in other.finding().sentence


def test_a_minimum_failure_below_a_pass_is_a_contradiction() -> None:
    search = sweep(start=20 * GIB)
    search.next()
    search.tell(boot(HEADROOM, 20 * GIB, 5 * GIB, 30 * GIB))
    ask = search.next()
    assert ask is not None
    search.tell(Trial(value=ask.value, verdict=Verdict.FAIL, cause=MINIMUM))
    assert search.next() is None
    assert search.finding().kind is FindingKind.NON_MONOTONE
    assert "failed for too little KV cache although 20.00 GiB passed" in search.finding().sentence


@pytest.mark.parametrize("flips", [False, True])
def test_a_contradiction_is_booted_again_before_it_is_one(flips: bool) -> None:
    """Each of the two once more; where one of them ends differently the edge is flaky."""
    search = Sweep(HEADROOM, lowest=0, highest=30 * GIB, start=20 * GIB, noise=Noise(sigma_bytes=0, source="archive"))
    search.next()
    search.tell(boot(HEADROOM, 20 * GIB, 5 * GIB, 30 * GIB))
    first = search.next()
    assert first is not None
    search.tell(Trial(value=first.value, verdict=Verdict.FAIL, cause=MINIMUM))
    asked = []
    while (ask := search.next()) is not None:
        asked.append((ask.value, ask.why))
        if ask.value == 20 * GIB or flips:
            search.tell(boot(HEADROOM, ask.value, 0, 30 * GIB))
        else:
            search.tell(Trial(value=ask.value, verdict=Verdict.FAIL, cause=MINIMUM))
    finding = search.finding()
    if flips:
        assert asked == [(first.value, "repeat")]
        assert finding.kind is FindingKind.FLAKY
        assert "and one of them did not when it was booted again" in finding.sentence
    else:
        assert asked == [(first.value, "repeat"), (20 * GIB, "repeat")]
        assert finding.kind is FindingKind.NON_MONOTONE
        assert "although 20.00 GiB passed, each of them twice" in finding.sentence
    assert finding.boots == 2 + len(asked)


@pytest.mark.parametrize("limit", ["boots", "halted"])
def test_a_contradiction_that_a_limit_leaves_open_names_the_limit(limit: str) -> None:
    search = Sweep(
        HEADROOM, lowest=0, highest=30 * GIB, start=20 * GIB, noise=Noise(sigma_bytes=0, source="archive"),
        max_boots=2 if limit == "boots" else None,
    )  # fmt: skip
    search.next()
    search.tell(boot(HEADROOM, 20 * GIB, 5 * GIB, 30 * GIB))
    ask = search.next()
    assert ask is not None
    search.tell(Trial(value=ask.value, verdict=Verdict.FAIL, cause=MINIMUM))
    if limit == "halted":
        search.halt("--kvbudget-until 06:00 is reached")
    assert search.next() is None
    said = "the limit of 2 boots is reached" if limit == "boots" else "--kvbudget-until 06:00 is reached"
    finding = search.finding()
    assert finding.kind is FindingKind.UNDECIDED
    assert finding.sentence.startswith(f"undecided: {said}; reserved_headroom 20.00 GiB passed")


def test_a_limit_that_leaves_the_finer_step_out_is_said() -> None:
    """3.5 GiB would pass; one boot more than the coarse grid takes is not enough to prove it."""
    coarse = len(run(sweep(start=4 * GIB), 3.3 * GIB, 27 * GIB))
    search = sweep(start=4 * GIB, fine_step=GIB // 4, max_boots=coarse)
    run(search, 3.3 * GIB, 27 * GIB)
    finding = search.finding()
    assert (finding.kind, finding.value, finding.step) == (FindingKind.PROVEN, 4 * GIB, GIB)
    assert finding.notes[-1] == f"nothing was booted in steps of 0.25 GiB: the limit of {coarse} boots is reached"
    search = sweep(start=4 * GIB, fine_step=GIB // 4, max_boots=coarse + 1)
    run(search, 3.3 * GIB, 27 * GIB)
    assert search.finding().boots == coarse + 1
    assert search.finding().sentence.startswith(f"undecided: the limit of {coarse + 1} boots is reached; ")


STUCK = {
    "level": Hint(limits=(Limit(name="kv_check", margin_bytes=-3.0 * GIB, precision_bytes=0.01 * GIB),)),
    "silent": Hint(),
}


@pytest.mark.parametrize("hint", STUCK.values(), ids=STUCK.keys())
def test_where_the_knob_does_not_move_the_shortage_three_boots_are_enough(hint: Hint) -> None:
    search = sweep(KNOBS["cudagraph_per_graph"], lowest=0, highest=160 * MIB, step=MIB)
    booted = run(search, -9, -1, [hint])
    assert search.finding().kind is FindingKind.EMPTY
    assert len(booted) <= 3
    assert booted[-1] == 0


def test_a_shortage_that_shrinks_is_searched() -> None:
    """13 of 30 GiB are missing at the first boot and 6 at the next: the end is not the only value that tells."""
    limits = [Limit(name="kv_check", margin_bytes=-gib * GIB, bytes_per_unit=1.0) for gib in (13.0, 6.0)]
    search = sweep(start=30 * GIB)
    booted = run(search, 2.5 * GIB, 17 * GIB, [Hint(limits=(limit,)) for limit in limits])
    assert 0 not in booted
    assert (search.finding().kind, search.finding().value) == (FindingKind.PROVEN, 3 * GIB)


def test_a_limit_keeps_the_best_so_far() -> None:
    search = sweep(start=20 * GIB, max_boots=1)
    run(search, 3.2 * GIB, 27 * GIB)
    finding = search.finding()
    assert (finding.kind, finding.value, finding.boots) == (FindingKind.UNDECIDED, 20 * GIB, 1)


def test_a_confirmation_that_fails_takes_the_proof_back() -> None:
    search = sweep(start=4 * GIB, confirm=1)
    for value, verdict in ((4, Verdict.PASS), (3, Verdict.FAIL), (4, Verdict.FAIL)):
        ask = search.next()
        while ask is not None and ask.value != value * GIB:
            search.tell(boot(HEADROOM, ask.value, 3.5 * GIB, 27 * GIB))
            ask = search.next()
        assert ask is not None
        cause = None if verdict is Verdict.PASS else ALLOCATION
        search.tell(Trial(value=ask.value, verdict=verdict, cause=cause))
    assert search.next() is None
    assert search.finding().kind is FindingKind.UNDECIDED
    assert "passed and then failed when it was booted again" in search.finding().sentence


def test_the_key_goes_with_the_result() -> None:
    key = SweepKey(model="gpt-oss-120b", weights_format="mxfp4", tensor_parallel_size=8, lnc=2, hardware="trn3")
    assert sweep(key=key).finding().key == key


def test_noise_repeats_a_winner_without_room_and_deploys_further_away() -> None:
    search = sweep(start=4 * GIB, noise=Noise(sigma_bytes=100 * MIB, source="archive"))
    near = Hint(limits=(Limit(name="device_memory", margin_bytes=50 * MIB, bytes_per_unit=1.0),))
    run(search, 3.97 * GIB, 27 * GIB, [near])
    finding = search.finding()
    assert (finding.kind, finding.value, finding.repeats) == (FindingKind.PROVEN, 4 * GIB, 2)
    assert finding.deploy_value == 4 * GIB + 300 * MIB


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"lowest": 5, "highest": 4}, "expected"),
        ({"step": 0}, "steps of 0"),
        ({"fine_step": GIB}, "fine_step is 1.00 GiB"),
        ({"start": 31 * GIB}, "start is 31.00 GiB"),
    ],
)
def test_impossible_grids_are_refused(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        sweep(**arguments)


def expected(knob: Knob, low: float, high: float, grid: list[int]) -> tuple[FindingKind, int | None]:
    """The exhaustive answer."""
    trials = [boot(knob, value, low, high) for value in grid]
    if knob.goal == "most":
        trials.reverse()
    best = next((trial for trial in trials if trial.passed), None)
    end = FindingKind.FLOOR_REACHED if knob.goal == "least" else FindingKind.CEILING_REACHED
    if best is not None:
        return (end if best is trials[0] else FindingKind.PROVEN), best.value
    classes = {trial.cause.failure_class for trial in trials if trial.cause is not None}
    return (FindingKind.EMPTY_WINDOW if len(classes) == 2 else FindingKind.EMPTY), None


@settings(max_examples=300, deadline=None)
@given(
    data=st.data(),
    name=st.sampled_from(sorted(KNOBS)),
    steps=st.integers(0, 60),
    hints=st.lists(HINTS, min_size=1, max_size=6),
    way=st.sampled_from(sorted(SWEEP_STRATEGIES)),
)
def test_every_window_is_found_within_the_bound_whatever_the_hints_say(
    data: st.DataObject, name: str, steps: int, hints: list[Hint], way: str
) -> None:
    knob, step = KNOBS[name], 7
    grid = [10 + step * index for index in range(steps + 1)]
    low = data.draw(st.floats(grid[0] - 20, grid[-1] + 20))
    high = low + data.draw(st.floats(-6.9, 500))
    names = ("compile", "device_memory", "kv_check")
    hints = [Hint(limits=tuple(Limit(name=data.draw(st.sampled_from(names)), margin_bytes=limit.margin_bytes,
                                     bytes_per_unit=limit.bytes_per_unit) for limit in hint.limits),
                  estimate=hint.estimate) for hint in hints]  # fmt: skip
    search = sweep(
        knob,
        lowest=grid[0],
        highest=grid[-1],
        step=step,
        maximum=data.draw(st.none() | st.integers(0, 1000)),
        strategy=SWEEP_STRATEGIES[way] if way != "predict" else None,
        start=data.draw(st.none() | st.sampled_from(grid)) if way == "predict" else None,
    )
    booted = run(search, low, high, hints)
    finding = search.finding()
    assert (finding.kind, finding.value) == expected(knob, low, high, grid)
    assert len(booted) == len(set(booted)) == finding.boots
    assert {finding.value, finding.failed_at} - {None} <= set(booted)
    if way == "predict":
        assert len(booted) <= math.ceil(math.log2(len(grid) + 1)) + 3


@settings(max_examples=200, deadline=None)
@given(data=st.data(), noisy=st.booleans(), fine=st.booleans())
def test_random_verdicts_end_and_claim_only_what_was_booted(data: st.DataObject, noisy: bool, fine: bool) -> None:
    search = sweep(
        highest=12 * GIB,
        confirm=1,
        fine_step=GIB // 4 if fine else None,
        noise=Noise(sigma_bytes=MIB, source="archive") if noisy else None,
    )
    told: list[Trial] = []
    while (ask := search.next()) is not None:
        verdict = data.draw(st.sampled_from((Verdict.PASS, Verdict.FAIL, Verdict.UNKNOWN)))
        cause = data.draw(st.sampled_from((ALLOCATION, MINIMUM))) if verdict is Verdict.FAIL else None
        told.append(Trial(value=ask.value, verdict=verdict, cause=cause))
        search.tell(told[-1])
        assert len(told) < 60
    finding = search.finding()
    assert finding.boots + finding.confirmations == len(told)
    assert finding.value is None or any(trial.passed and trial.value == finding.value for trial in told)
    failed = {trial.value for trial in told if trial.cause is ALLOCATION}
    assert finding.failed_at is None or finding.failed_at in failed
    assert finding.kind is not FindingKind.EMPTY_WINDOW or finding.short_at == (finding.failed_at or 0) + finding.step
