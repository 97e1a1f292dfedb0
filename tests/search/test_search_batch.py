"""Several device sets at once, priors, ties by minutes, and axes that move nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvbudget.ledger.levers import levers_for
from pytest_kvbudget.ledger.model import Cause
from pytest_kvbudget.search.ladder import Ladder
from pytest_kvbudget.search.model import Axis, Hint, Limit, Prior, Trial
from pytest_kvbudget.search.noise import Noise
from pytest_kvbudget.search.predict import Predict
from pytest_kvbudget.search.strategies import Bisect, Step
from pytest_kvbudget.units import GIB, MIB
from pytest_kvbudget.verdict import FindingKind, Phase, Verdict
from tests.search.test_search_strategies import HINTS, axes, right, trial

AXIS = Axis(name="max_model_len", floor=4096, ceiling=262_144, quantum=4096)


def linear(value: int, boundary: float, rate: float = 30_000) -> Trial:
    """A boot whose KV check states exactly how far it was."""
    margin = (boundary - value) * rate
    return trial(value, margin >= 0, Hint(limits=(Limit(name="kv_check", margin_bytes=margin, bytes_per_unit=rate),)))


# -- several sets


def test_a_plan_and_two_sets_need_one_round() -> None:
    ladder = Ladder(AXIS, Predict(prior=Prior(value=150_500, relative=0.005)))
    asks = ladder.next_batch(2)
    assert [ask.value for ask in asks] == [147_456, 151_552] or {ask.value for ask in asks} == {147_456, 151_552}
    for ask in asks:
        ladder.tell(linear(ask.value, 150_500))
    assert ladder.next_batch(2) == ()
    finding = ladder.finding()
    assert (finding.kind, finding.value, finding.boots) == (FindingKind.PROVEN, 147_456, 2)


def test_a_set_that_is_free_early_gets_another_rung_while_the_other_boots() -> None:
    ladder = Ladder(AXIS, Predict())
    first, second = ladder.next_batch(2)
    ladder.tell(linear(first.value, 40_000))
    again = ladder.next_batch(2)
    assert again[0] == second
    assert len(again) == 2
    assert again[1].value not in {first.value, second.value}


def test_without_knowledge_the_sets_split_the_ladder_evenly() -> None:
    values = sorted(ask.value for ask in Ladder(AXIS, Predict()).next_batch(3))
    gaps = [after - before for before, after in zip([0, *values], [*values, AXIS.ceiling], strict=True)]
    assert max(gaps) <= 2 * min(gaps)


def test_a_strategy_for_one_set_asks_for_one_boot() -> None:
    ladder = Ladder(AXIS, Step())
    assert len(ladder.next_batch(4)) == 1


def test_the_limit_of_boots_holds_for_batches() -> None:
    ladder = Ladder(AXIS, Predict(), max_boots=3)
    for ask in ladder.next_batch(2):
        ladder.tell(trial(ask.value, ask.value < 100_000))
    assert len(ladder.next_batch(2)) == 1


@settings(max_examples=200, deadline=None)
@given(
    axis=axes(400),
    data=st.data(),
    sets=st.integers(2, 5),
    hints=st.lists(HINTS, min_size=1, max_size=6),
    value=st.none() | st.integers(-10, 10**9),
)
def test_batches_find_every_boundary_within_the_bound_on_rounds(
    axis: Axis, data: st.DataObject, sets: int, hints: list[Hint], value: int | None
) -> None:
    boundary = data.draw(st.integers(-1, len(axis) - 1))
    known = None if value is None else Prior(value=value, relative=0.03)
    ladder = Ladder(axis, Predict(prior=known))
    rounds, booted = 0, []
    while asks := ladder.next_batch(sets):
        rounds += 1
        assert len(asks) <= sets
        for ask in asks:
            assert ask.index is not None
            booted.append(ask.value)
            ladder.tell(trial(ask.value, ask.index <= boundary, hints[len(booted) % len(hints)]))
    assert right(axis, boundary, ladder.finding())
    assert len(booted) == len(set(booted))
    assert rounds <= math.ceil(math.log2(len(axis) + 1)) + 2


# -- priors


@pytest.mark.parametrize(("boundary", "said"), [(150_500, 150_500), (150_500, 152_000), (40_000, 39_500)])
def test_a_plan_that_is_right_leaves_the_proof(boundary: float, said: float) -> None:
    ladder = Ladder(AXIS, Predict(prior=Prior(value=said, relative=0.03)))
    boots = 0
    while (ask := ladder.next()) is not None:
        boots += 1
        ladder.tell(linear(ask.value, boundary))
    assert ladder.finding().value == AXIS.value(AXIS.index_at_or_below(boundary))
    assert boots <= 3


@pytest.mark.parametrize("said", [0.0, -5.0, math.inf, math.nan, 1e30])
@pytest.mark.parametrize("relative", [0.0, 0.03, 2.0, math.nan])
def test_a_plan_that_is_none_does_no_harm(said: float, relative: float) -> None:
    ladder = Ladder(AXIS, Predict(prior=Prior(value=said, relative=relative)))
    boots = 0
    while (ask := ladder.next()) is not None:
        boots += 1
        ladder.tell(trial(ask.value, ask.value <= 150_500))
    assert ladder.finding().value == 147_456
    assert boots <= 9


def test_boots_that_are_worth_the_same_are_told_apart_by_minutes() -> None:
    """On Neuron a failed KV check comes before the compile: of two equal rungs the higher one is cheaper."""
    axis = Axis(name="max_num_seqs", floor=1, ceiling=2, quantum=1)
    history = (trial(5, True),)
    cheap_failure = Predict(minutes=(25.0, 3.0)).next_index(axis, history)
    cheap_pass = Predict(minutes=(3.0, 25.0)).next_index(axis, history)
    assert cheap_failure is not None
    assert cheap_pass is not None
    assert cheap_failure >= cheap_pass


# -- axes that move nothing


def cause(failure_class: str, phase: Phase) -> Cause:
    return Cause(
        phase=phase,
        failure_class=failure_class,
        sentence=failure_class,
        levers=levers_for(failure_class, "vllm", phase),
    )


def empty(failing: Cause, hint: Hint | None = None) -> tuple[list[int], str]:
    """Boot a ladder on which everything fails in the same way."""
    ladder = Ladder(AXIS, Predict())
    booted = []
    while (ask := ladder.next()) is not None:
        booted.append(ask.value)
        ladder.tell(Trial(value=ask.value, verdict=Verdict.FAIL, cause=failing, hint=hint or Hint()))
    assert ladder.finding().kind is FindingKind.EMPTY
    assert booted[-1] == AXIS.floor
    return booted, ladder.finding().sentence


def test_state_blocks_below_the_sequences() -> None:
    """vllm#49064: max_num_seqs (256) exceeds available Mamba cache blocks (161); the window does not matter."""
    booted, sentence = empty(cause("max_num_seqs_exceeds_state", Phase.KV_CHECK))
    assert len(booted) == 2
    assert sentence.endswith("lower max_num_seqs instead")


def test_capture_beside_an_unpinned_pool() -> None:
    """The pool takes what is left, whatever the window: graphs are short of the same at every rung."""
    short = Limit(name="device_memory", margin_bytes=-76.0 * MIB, at_least=True)
    booted, sentence = empty(cause("graph_capture_oom", Phase.GRAPH_CAPTURE), Hint(limits=(short,)))
    assert len(booted) == 2
    assert sentence.endswith("lower gpu_memory_utilization instead")


def test_capture_beside_a_scaled_pool_is_the_windows_matter() -> None:
    """RDNA4 document: 3 x bf16 fails in capture at 245,760 and passes at 241,664."""
    failing = cause("graph_capture_oom", Phase.GRAPH_CAPTURE)
    short = Hint(limits=(Limit(name="device_memory", margin_bytes=-76.0 * MIB, bytes_per_unit=41_517, at_least=True),))
    ladder = Ladder(Axis(name="max_model_len", floor=131_072, ceiling=262_144, quantum=4096), Predict(first="ceiling"))
    booted = []
    while (ask := ladder.next()) is not None:
        booted.append(ask.value)
        good = ask.value <= 241_664
        ladder.tell(trial(ask.value, True) if good else Trial(
            value=ask.value, verdict=Verdict.FAIL, cause=failing, hint=short
        ))  # fmt: skip
    assert ladder.finding().value == 241_664
    assert 131_072 not in booted


ROOMIER = {
    "further": [cause("plan_refused", Phase.KV_CHECK), cause("profile_oom", Phase.PROFILE)],
    "less": [cause("kv_check_short", Phase.KV_CHECK), cause("kv_check_short", Phase.KV_CHECK)],
}


@pytest.mark.parametrize("sets", [1, 2])
@pytest.mark.parametrize("causes", ROOMIER.values(), ids=ROOMIER.keys())
def test_where_larger_rungs_have_more_room_the_ceiling_is_booted_before_all_is_called_empty(
    causes: list[Cause], sets: int
) -> None:
    """A larger rung got further than a smaller one, or missed less: only the ceiling passes."""
    axis = Axis(name="max_model_len", floor=4096, ceiling=65_536, quantum=4096)
    ladder = Ladder(axis, Bisect() if sets == 1 else Predict(), noise=Noise(sigma_bytes=0, source="archive"))
    booted = []
    while asks := ladder.next_batch(sets):
        for ask in asks:
            booted.append(ask.value)
            short = Hint(limits=(Limit(name="kv_check", margin_bytes=-9e9 + 1e4 * ask.value, precision_bytes=1e6),))
            ladder.tell(trial(ask.value, True) if ask.value == 65_536 else Trial(
                value=ask.value, verdict=Verdict.FAIL, cause=causes[ask.value <= 8192],
                hint=short if causes[0] == causes[1] else Hint(),
            ))  # fmt: skip
    finding = ladder.finding()
    assert finding.kind is FindingKind.NON_MONOTONE
    assert booted.count(65_536) == 2
    assert "although 65,536 passed, each of them twice" in finding.sentence


def test_a_reserve_that_is_capped_in_proportion() -> None:
    """Pool and need both grow with the window: what is there over what is needed stays 0.8 at every rung."""
    ladder = Ladder(AXIS, Predict())
    booted = []
    while (ask := ladder.next()) is not None:
        booted.append(ask.value)
        need = 9_190.0 * ask.value
        limit = Limit(
            name="kv_check", margin_bytes=-0.2 * need, bytes_per_unit=9_190, precision_bytes=0.005 * GIB
        )  # fmt: skip
        ladder.tell(trial(ask.value, False, Hint(limits=(limit,))))
    assert ladder.finding().kind is FindingKind.EMPTY
    assert booted[-1] == AXIS.floor
    assert len(booted) <= 3
