"""Strategies against an oracle that knows the boundary, and against hints that lie."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvbudget.search.bracket import bisection_boots, boot_bound, bracket_of, contradiction
from pytest_kvbudget.search.ladder import Ladder
from pytest_kvbudget.search.model import Axis, Finding, Hint, Limit, Strategy, Trial
from pytest_kvbudget.search.predict import Predict
from pytest_kvbudget.search.strategies import STRATEGIES, Bisect, Step
from pytest_kvbudget.units import GIB
from pytest_kvbudget.verdict import FindingKind, Verdict

RDNA4 = Axis(name="max_model_len", floor=131_072, ceiling=262_144, quantum=4096)

NUMBERS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(min_value=-1e12, max_value=1e12),
    st.just(0.0),
)
LIMITS = st.builds(
    Limit,
    name=st.sampled_from(("kv_check", "device_memory")),
    margin_bytes=NUMBERS,
    bytes_per_unit=st.none() | NUMBERS,
    precision_bytes=NUMBERS,
    rate_at_most=st.booleans(),
    grows_with=st.sampled_from((None, "kv_check")),
    at_least=st.booleans(),
)
HINTS = st.builds(
    Hint,
    limits=st.lists(LIMITS, max_size=3).map(tuple),
    estimate=st.none() | st.integers(min_value=-(10**30), max_value=10**30) | st.integers(0, 300_000),
)


@st.composite
def axes(draw: st.DrawFn, most_rungs: int = 300) -> Axis:
    quantum = draw(st.sampled_from((1, 16, 128, 4096)))
    floor = draw(st.integers(1, 20_000))
    ceiling = floor + draw(st.integers(0, quantum * most_rungs))
    return Axis(name="max_model_len", floor=floor, ceiling=ceiling, quantum=quantum)


def trial(value: int, passed: bool, hint: Hint | None = None) -> Trial:
    return Trial(value=value, verdict=Verdict.PASS if passed else Verdict.FAIL, hint=hint or Hint())


def climb(axis: Axis, strategy: Strategy, boundary: int, hints: list[Hint] | None = None) -> tuple[list[int], Finding]:
    """Boot until the ladder ends; rungs up to index ``boundary`` pass. Hints are given in turn, over and over."""
    ladder = Ladder(axis, strategy)
    booted: list[int] = []
    while (ask := ladder.next()) is not None:
        assert ask.index is not None
        hint = hints[len(booted) % len(hints)] if hints else Hint()
        booted.append(ask.value)
        ladder.tell(trial(ask.value, ask.index <= boundary, hint))
    return booted, ladder.finding()


def right(axis: Axis, boundary: int, finding: Finding) -> bool:
    if boundary < 0:
        return (finding.kind, finding.value, finding.failed_at) == (FindingKind.EMPTY, None, axis.floor)
    if boundary == len(axis) - 1:
        return (finding.kind, finding.value, finding.failed_at) == (FindingKind.CEILING_REACHED, axis.ceiling, None)
    expected = (FindingKind.PROVEN, axis.value(boundary), axis.value(boundary + 1))
    return (finding.kind, finding.value, finding.failed_at) == expected


@settings(deadline=None)
@given(axis=axes(), data=st.data(), name=st.sampled_from(sorted(STRATEGIES)))
def test_every_boundary_is_found_and_proven(axis: Axis, data: st.DataObject, name: str) -> None:
    boundary = data.draw(st.integers(-1, len(axis) - 1))
    booted, finding = climb(axis, STRATEGIES[name], boundary)
    assert right(axis, boundary, finding)
    assert len(booted) == len(set(booted)) == finding.boots
    # the proof is in the boots, never in arithmetic
    assert {finding.value, finding.failed_at} - {None} <= set(booted)


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@pytest.mark.parametrize("rungs", [1, 2, 3, 33])
def test_every_boundary_of_small_ladders(name: str, rungs: int) -> None:
    axis = Axis(name="max_num_seqs", floor=1, ceiling=rungs, quantum=1)
    for boundary in range(-1, rungs):
        _, finding = climb(axis, STRATEGIES[name], boundary)
        assert right(axis, boundary, finding)


@settings(max_examples=300, deadline=None)
@given(
    axis=axes(1000),
    data=st.data(),
    hints=st.lists(HINTS, min_size=1, max_size=6),
    first=st.none() | st.just("ceiling") | st.integers(-10, 10**9),
)
def test_predict_keeps_its_bound_whatever_the_hints_say(
    axis: Axis, data: st.DataObject, hints: list[Hint], first: int | None
) -> None:
    boundary = data.draw(st.integers(-1, len(axis) - 1))
    booted, finding = climb(axis, Predict(first=first), boundary, hints)
    assert right(axis, boundary, finding)
    assert len(booted) <= math.ceil(math.log2(len(axis) + 1)) + 2


@settings(deadline=None)
@given(axis=axes(), data=st.data(), name=st.sampled_from(sorted(STRATEGIES)), hints=st.lists(HINTS, min_size=1))
def test_a_strategy_is_a_function_of_the_history(axis: Axis, data: st.DataObject, name: str, hints: list[Hint]) -> None:
    boundary = data.draw(st.integers(-1, len(axis) - 1))
    assert climb(axis, STRATEGIES[name], boundary, hints) == climb(axis, STRATEGIES[name], boundary, hints)


@settings(max_examples=200, deadline=None)
@given(axis=axes(), data=st.data(), name=st.sampled_from(sorted(STRATEGIES)))
def test_any_history_leads_to_a_rung_inside_the_bracket(axis: Axis, data: st.DataObject, name: str) -> None:
    """Histories that contradict themselves, or hold more boots than the bound, included."""
    indices = data.draw(st.lists(st.integers(0, len(axis) - 1), unique=True, max_size=12))
    history = tuple(trial(axis.value(index), data.draw(st.booleans()), data.draw(HINTS)) for index in indices)
    chosen = STRATEGIES[name].next_index(axis, history)
    bracket = bracket_of(axis, history)
    if chosen is None:
        assert bracket.high - bracket.low == 1
    else:
        assert bracket.low < chosen < bracket.high


@settings(deadline=None)
@given(axis=axes(), data=st.data())
def test_bisect_needs_no_more_than_the_logarithm(axis: Axis, data: st.DataObject) -> None:
    booted, _ = climb(axis, Bisect(), data.draw(st.integers(-1, len(axis) - 1)))
    assert len(booted) <= math.ceil(math.log2(len(axis) + 1))


@settings(deadline=None)
@given(st.integers(1, 10**6))
def test_bound_arithmetic(rungs: int) -> None:
    axis = Axis(name="max_model_len", floor=1, ceiling=rungs, quantum=1)
    assert 2 ** bisection_boots(rungs) >= rungs > 2 ** (bisection_boots(rungs) - 1) or rungs == 1
    assert boot_bound(axis) == math.ceil(math.log2(rungs + 1)) + 2


def test_step_visits_what_the_document_says() -> None:
    """RDNA4 budget document, section 6: -16,384 after an OOM, +4,096 after a pass; 3 x bf16 ended at 241,664."""
    axis = Axis(name="max_model_len", floor=131_072, ceiling=262_144, quantum=4096)
    booted, finding = climb(axis, Step(), axis.index_at_or_below(241_664))
    assert booted == [262_144, 245_760, 229_376, 233_472, 237_568, 241_664]
    assert (finding.value, finding.failed_at, finding.boots) == (241_664, 245_760, 6)


def test_step_is_clipped_at_the_floor() -> None:
    axis = Axis(name="max_model_len", floor=250_000, ceiling=262_144, quantum=4096)
    booted, finding = climb(axis, Step(), -1)
    assert booted == [262_144, 250_000]
    assert finding.kind is FindingKind.EMPTY


def test_step_comes_down_to_a_reference_that_passed() -> None:
    reference = trial(200_704, passed=True)
    assert Step().next_index(RDNA4, (reference,)) == len(RDNA4) - 1
    failed = tuple(trial(value, passed=False) for value in (262_144, 245_760, 229_376, 212_992))
    assert RDNA4.value(Step().next_index(RDNA4, (reference, *failed)) or 0) == 204_800


def cpu_engine(window: int) -> Trial:
    """vLLM 0.32 on CPU, 50M pinned, 1,024 B per token, one of 400 blocks of 128 tokens reserved.

    Real boots: 131072 was refused (0.12 GiB needed, 0.05 GiB available, estimate 51072); 51072 printed 51,200 tokens.
    """
    pool = 52_428_800
    if window <= 51_072:
        slack = Limit(
            name="kv_check", margin_bytes=(51_200 - window) * 1024.0, bytes_per_unit=1024, precision_bytes=512
        )
        return trial(window, True, Hint(limits=(slack,)))
    half = 0.005 * 2**30
    need = round(window * 1024 / 2**30, 2) * 2**30
    short = Limit(
        name="kv_check",
        margin_bytes=pool - need,
        bytes_per_unit=need / window,
        precision_bytes=half * min(1.0, pool / need),
    )
    return trial(window, False, Hint(limits=(short,), estimate=51_072))


@pytest.mark.parametrize("first", [None, "ceiling", 131_072, 60_000, 51_200, 51_072])
@pytest.mark.parametrize("floor", [4_096, 1_024, 40_000])
def test_real_pinned_pool_is_proven_in_three_boots(first: int | None, floor: int) -> None:
    axis = Axis(name="max_model_len", floor=floor, ceiling=131_072, quantum=128)
    ladder = Ladder(axis, Predict(first=first))
    while (ask := ladder.next()) is not None:
        ladder.tell(cpu_engine(ask.value))
    finding = ladder.finding()
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, 51_072, 51_200)
    assert finding.boots <= 3


def linear_device(axis: Axis, boundary: float, value: int, bytes_per_unit: float, digit_bytes: float) -> Trial:
    margin = (boundary - value) * bytes_per_unit
    shown = round(margin / digit_bytes) * digit_bytes if digit_bytes else margin
    # what is short by less than the last digit still failed
    shown = min(shown, -digit_bytes / 2 or -1.0) if margin < 0 else max(shown, 0.0)
    limit = Limit(name="kv_check", margin_bytes=shown, bytes_per_unit=bytes_per_unit, precision_bytes=digit_bytes / 2)
    return trial(value, margin >= 0, Hint(limits=(limit,)))


@settings(deadline=None)
@given(boundary=st.floats(min_value=4096, max_value=262_143), rate=st.floats(min_value=6e3, max_value=2e5))
def test_a_truthful_first_boot_leaves_two_more(boundary: float, rate: float) -> None:
    axis = Axis(name="max_model_len", floor=4096, ceiling=262_144, quantum=4096)
    ladder = Ladder(axis, Predict())
    while (ask := ladder.next()) is not None:
        ladder.tell(linear_device(axis, boundary, ask.value, rate, digit_bytes=0))
    assert ladder.finding().value == axis.value(axis.index_at_or_below(boundary))
    assert ladder.finding().boots <= 3


def test_printed_digits_wider_than_a_quantum_cost_few_boots() -> None:
    """0.01 GiB at 8 kB per token is ten quanta of 128: six boots at most tell twenty rungs and a blind one apart."""
    axis = Axis(name="max_model_len", floor=4096, ceiling=131_072, quantum=128)
    for boundary in range(5_000, 131_000, 1_777):
        ladder = Ladder(axis, Predict())
        while (ask := ladder.next()) is not None:
            ladder.tell(linear_device(axis, boundary, ask.value, 8_000, digit_bytes=0.01 * 2**30))
        assert ladder.finding().value == axis.value(axis.index_at_or_below(boundary))
        assert ladder.finding().boots <= 7


def test_two_boots_make_a_line_where_no_rate_is_known() -> None:
    axis = Axis(name="max_num_batched_tokens", floor=1024, ceiling=66_560, quantum=1024)

    def boot(value: int) -> Trial:
        margin = 2**30 - 25_000.0 * value
        return trial(value, margin >= 0, Hint(limits=(Limit(name="kv_check", margin_bytes=margin),)))

    ladder = Ladder(axis, Predict())
    while (ask := ladder.next()) is not None:
        ladder.tell(boot(ask.value))
    assert ladder.finding().value == 41_984  # 2**30 / 25,000 = 42,949 tokens
    assert ladder.finding().boots <= 4


def compiled(window: int, *, root: int, left_bytes_per_token: float) -> Trial:
    """A program over its limit, with a scratchpad of which half grows with the window."""
    margin = (root - window) * left_bytes_per_token
    limit = Limit(name="compile", margin_bytes=margin, bytes_per_unit=2 * left_bytes_per_token, rate_at_most=True)
    return trial(window, False, Hint(limits=(limit,)))


def test_a_rate_that_is_too_large_makes_up_for_a_deficit_too_early() -> None:
    axis = Axis(name="max_model_len", floor=4096, ceiling=262_144, quantum=4096)
    history = (compiled(196_608, root=131_072, left_bytes_per_token=20_000),)
    assert (index := Predict().next_index(axis, history)) is not None
    assert axis.value(index) < (131_072 + 196_608) // 2  # where that rate reaches zero


def test_what_two_programs_took_per_token_says_where_the_device_is_full() -> None:
    """1,000 MiB were left at 32 rungs, and two programs' sums fell by 100 MiB a rung: the 42nd is the last to load."""
    axis = Axis(name="max_model_len", floor=4096, ceiling=262_144, quantum=4096)
    per_token = 100 * 2**20 / 4096
    left = Limit(name="device_memory", margin_bytes=1_000 * 2**20, grows_with="compile")
    history = (
        trial(32 * 4096, True, Hint(limits=(left,))),
        compiled(60 * 4096, root=55 * 4096, left_bytes_per_token=per_token),
        compiled(58 * 4096, root=55 * 4096, left_bytes_per_token=per_token),
    )
    assert (index := Predict().next_index(axis, history)) is not None
    assert axis.value(index) in {42 * 4096, 43 * 4096}


def test_an_axis_that_moves_nothing_is_given_up_in_three_boots() -> None:
    """Deficits that are the same at two values: the third boot is the floor."""
    axis = Axis(name="max_model_len", floor=4096, ceiling=262_144, quantum=4096)
    ladder = Ladder(axis, Predict())
    booted = []
    while (ask := ladder.next()) is not None:
        booted.append(ask.value)
        ladder.tell(trial(ask.value, False, Hint(limits=(Limit(name="device_memory", margin_bytes=-3e8),))))
    assert ladder.finding().kind is FindingKind.EMPTY
    assert booted[-1] == axis.floor
    assert len(booted) <= 3


def test_a_refuted_estimate_is_left_within_the_bound() -> None:
    """A real boot at 221000 said 122080 where about 169k fits: it is one more point, not the truth."""
    axis = Axis(name="max_model_len", floor=4096, ceiling=221_184, quantum=4096)
    booted, finding = climb(axis, Predict(first="ceiling"), axis.index_at_or_below(169_000), [Hint(estimate=122_080)])
    assert right(axis, axis.index_at_or_below(169_000), finding)
    assert 118_784 in booted or 122_880 in booted
    assert len(booted) <= boot_bound(axis)


def test_a_contradiction_is_seen_and_never_bracketed() -> None:
    """vllm#10517: 20k and 35k booted, 29k did not."""
    history = (trial(29_000, False), trial(35_000, True), trial(20_000, True), trial(45_000, False))
    axis = Axis(name="max_model_len", floor=20_000, ceiling=45_000, quantum=1_000)
    assert contradiction(history) == (history[0], history[1])
    bracket = bracket_of(axis, history)
    assert (axis.value(bracket.low), axis.value(bracket.high)) == (35_000, 45_000)
    assert contradiction(history[1:]) is None


def test_the_same_allocation_that_fails_by_the_same_bytes_is_not_moved_by_the_axis() -> None:
    """A boot that dies before anything that grows with the axis: the floor is next, and that says it is empty."""
    axis = Axis(name="max_num_seqs", floor=1, ceiling=256, quantum=1)
    short = Hint(limits=(Limit(name="device_memory", margin_bytes=-1.97 * GIB, at_least=True),))
    ladder = Ladder(axis, Predict())
    asked = []
    while (ask := ladder.next()) is not None:
        asked.append(ask.value)
        ladder.tell(Trial(value=ask.value, verdict=Verdict.FAIL, hint=short))
    assert len(asked) == 3
    assert asked[-1] == 1
    assert ladder.finding().kind is FindingKind.EMPTY


@pytest.mark.parametrize(
    ("last", "kind", "most"), [(256, FindingKind.CEILING_REACHED, 3), (200, FindingKind.PROVEN, 10)]
)
def test_boots_that_pass_with_the_same_room_send_the_search_to_the_ceiling(
    last: int, kind: FindingKind, most: int
) -> None:
    """Sequences that cost nothing: every boot has the same slack; where the ceiling fails all the same, it goes on."""
    axis = Axis(name="max_num_seqs", floor=1, ceiling=256, quantum=1)
    room = Hint(limits=(Limit(name="device_memory", margin_bytes=3.39 * GIB),))
    ladder = Ladder(axis, Predict())
    asked = []
    while (ask := ladder.next()) is not None:
        asked.append(ask.value)
        passed = ask.value <= last
        verdict = Verdict.PASS if passed else Verdict.FAIL
        ladder.tell(Trial(value=ask.value, verdict=verdict, hint=room if passed else Hint()))
    finding = ladder.finding()
    assert (finding.kind, finding.value) == (kind, last)
    assert 256 in asked[:3]
    assert len(asked) <= most == min(most, boot_bound(axis))
