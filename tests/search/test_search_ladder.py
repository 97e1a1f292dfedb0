"""The rules of a ladder: what moves it, what stops it, what it says."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvbudget.ledger.model import Cause
from pytest_kvbudget.search.ladder import Ask, Ladder
from pytest_kvbudget.search.model import Axis, Hint, Limit, Strategy, Trial
from pytest_kvbudget.search.predict import Predict
from pytest_kvbudget.search.strategies import STRATEGIES, Bisect, Step
from pytest_kvbudget.verdict import FindingKind, Phase, Verdict

AXIS = Axis(name="max_model_len", floor=131_072, ceiling=262_144, quantum=4096)
CAPTURE_OOM = Cause(phase=Phase.GRAPH_CAPTURE, failure_class="graph_capture_oom", sentence="76.00 MiB did not fit")
KV_ALLOC_OOM = Cause(phase=Phase.KV_ALLOC, failure_class="kv_alloc_oom", sentence="4.62 GiB did not fit")
GATE = Cause(phase=Phase.READY, failure_class="gate", sentence="assert 190000 >= 200000", by_gate=True)
BAD_FLAG = Cause(phase=Phase.ARGUMENT, failure_class="argument_rejected", sentence="unrecognized arguments: --foo")


def told(ask: Ask | None, verdict: Verdict, cause: Cause | None = None, *, pool_short: bool = False) -> Trial:
    assert ask is not None
    return Trial(value=ask.value, verdict=verdict, cause=cause, pool_short=pool_short)


def run(ladder: Ladder, boundary: int, cause: Cause = CAPTURE_OOM) -> list[Ask]:
    """Boot on a device on which values up to ``boundary`` pass, until the ladder ends."""
    asks = []
    while (ask := ladder.next()) is not None:
        asks.append(ask)
        good = ask.value <= boundary
        ladder.tell(told(ask, Verdict.PASS if good else Verdict.FAIL, None if good else cause))
    return asks


@dataclass(frozen=True)
class Scripted:
    """A strategy that follows a list, as one from outside might."""

    values: tuple[int, ...]
    name: str = "scripted"

    def next_index(self, axis: Axis, history: tuple[Trial, ...]) -> int | None:
        return axis.index_at_or_below(self.values[len(history)]) if len(history) < len(self.values) else None


def test_proof_in_words() -> None:
    ladder = Ladder(AXIS, Step())
    run(ladder, 241_664)
    assert ladder.finding().sentence == (
        "max_model_len 241,664 passed and 245,760 failed for memory in graph_capture; proven with 6 boots"
    )
    assert ladder.finding().bounded_by == CAPTURE_OOM
    assert ladder.finding().proven


def test_ceiling_reached_in_words() -> None:
    ladder = Ladder(AXIS, Step())
    assert [ask.value for ask in run(ladder, 300_000)] == [262_144]
    assert ladder.finding().kind is FindingKind.CEILING_REACHED
    assert ladder.finding().sentence == (
        "max_model_len 262,144 passed and is the ceiling of the ladder; proven with 1 boot"
    )


def test_empty_only_after_the_floor_was_booted() -> None:
    ladder = Ladder(AXIS, Bisect())
    asks = run(ladder, 0)
    assert asks[-1].value == AXIS.floor
    finding = ladder.finding()
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.EMPTY, None, 131_072)
    assert "nothing passes: max_model_len 131,072, the floor, failed for memory in graph_capture" in finding.sentence


def arena(value: int, *, passes_from: int) -> Hint:
    """An expert arena that gives way to longer windows: one allocation misses less, the longer the window is."""
    short = min(float(value - passes_from), -1.0) * 4096
    return Hint(limits=(Limit(name="device_memory", margin_bytes=short, at_least=True),))


def test_the_ceiling_is_booted_before_nothing_passes_where_larger_values_miss_less() -> None:
    """The RDNA4 fork with a pinned pool: windows from 57,344 to the ceiling of 81,920 pass, shorter ones do not."""
    axis = Axis(name="max_model_len", floor=8_192, ceiling=81_920, quantum=8_192)
    ladder, booted = Ladder(axis, Predict()), []
    while (ask := ladder.next()) is not None:
        booted.append(ask.value)
        good = ask.value >= 57_344
        hint = Hint() if good else arena(ask.value, passes_from=57_344)
        verdict, cause = (Verdict.PASS, None) if good else (Verdict.FAIL, CAPTURE_OOM)
        ladder.tell(Trial(value=ask.value, verdict=verdict, cause=cause, hint=hint))
    assert ladder.finding().kind is FindingKind.NON_MONOTONE
    assert 81_920 in booted


def test_between_a_floor_and_a_ceiling_that_fail_for_different_reasons_something_may_pass() -> None:
    """An expert arena: short windows leave the pool no room, the ceiling's own need is too large for it."""
    axis = Axis(name="max_model_len", floor=4_096, ceiling=262_144, quantum=4_096)
    short = Cause(phase=Phase.KV_CHECK, failure_class="kv_check_short", sentence="6.24 GiB needed, 4.62 available")
    ladder = Ladder(axis, Predict())
    while (ask := ladder.next()) is not None:
        if ask.value == axis.ceiling:
            ladder.tell(told(ask, Verdict.FAIL, short))
        else:
            ladder.tell(told(ask, Verdict.FAIL, CAPTURE_OOM if ask.value > axis.floor else KV_ALLOC_OOM))
    finding = ladder.finding()
    assert finding.kind is FindingKind.UNDECIDED
    assert "what lies between was not decided" in finding.sentence


def test_what_the_gate_refused_above_a_failure_for_memory_is_not_called_memory() -> None:
    axis = Axis(name="max_model_len", floor=32_768, ceiling=65_536, quantum=4_096)
    ladder = Ladder(axis, Predict())
    while (ask := ladder.next()) is not None:
        ladder.tell(told(ask, Verdict.FAIL, GATE if ask.value >= 45_056 else CAPTURE_OOM))
    finding = ladder.finding()
    assert (finding.kind, finding.failed_at) == (FindingKind.EMPTY, 32_768)
    assert "65,536 booted and was refused by the test's own gate, not for memory" in finding.sentence


def test_a_gate_moves_the_search_and_is_never_called_memory() -> None:
    ladder = Ladder(AXIS, Step())
    run(ladder, 241_664, GATE)
    finding = ladder.finding()
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, 241_664, 245_760)
    assert finding.bounded_by is not None
    assert finding.bounded_by.by_gate
    assert "was refused by the test's own gate" in finding.sentence
    assert "memory" not in finding.sentence


def test_unknown_is_asked_once_more_and_is_no_verdict() -> None:
    ladder = Ladder(AXIS, Step())
    ladder.tell(told(ladder.next(), Verdict.UNKNOWN))
    assert ladder.next() == Ask(value=262_144, index=len(AXIS) - 1, attempt=2, why="retry")
    ladder.tell(told(ladder.next(), Verdict.PASS))
    assert ladder.next() is None
    finding = ladder.finding()
    assert (finding.kind, finding.boots, finding.retries) == (FindingKind.CEILING_REACHED, 2, 1)


def test_a_second_unknown_on_a_rung_ends_undecided_with_the_bracket() -> None:
    ladder = Ladder(AXIS, Step())
    ladder.tell(told(ladder.next(), Verdict.FAIL, CAPTURE_OOM))
    ladder.tell(told(ladder.next(), Verdict.UNKNOWN))
    ladder.tell(told(ladder.next(), Verdict.UNKNOWN))
    assert ladder.next() is None
    finding = ladder.finding()
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.UNDECIDED, None, 262_144)
    assert "max_model_len 245,760 gave no verdict twice" in finding.sentence
    assert "nothing passed, 262,144 failed" in finding.sentence


def test_every_rung_has_its_own_second_chance() -> None:
    ladder = Ladder(AXIS, Step())
    seen: set[int] = set()
    while (ask := ladder.next()) is not None:
        verdict = Verdict.UNKNOWN if ask.value not in seen else Verdict.PASS if ask.value <= 241_664 else Verdict.FAIL
        seen.add(ask.value)
        ladder.tell(told(ask, verdict))
    finding = ladder.finding()
    assert (finding.kind, finding.value, finding.boots, finding.retries) == (FindingKind.PROVEN, 241_664, 12, 6)


def test_an_error_ends_at_once_with_its_cause() -> None:
    ladder = Ladder(AXIS, Predict())
    ladder.tell(told(ladder.next(), Verdict.ERROR, BAD_FLAG))
    assert ladder.next() is None
    finding = ladder.finding()
    assert (finding.kind, finding.boots) == (FindingKind.ERROR, 1)
    assert "unrecognized arguments: --foo" in finding.sentence


def test_a_short_scaled_pool_is_asked_again_once_with_its_rate() -> None:
    ladder = Ladder(AXIS, Step())
    ladder.tell(told(ladder.next(), Verdict.UNKNOWN, pool_short=True))
    again = ladder.next()
    assert again is not None
    assert (again.value, again.why, again.attempt) == (262_144, "rate", 2)
    ladder.tell(told(again, Verdict.UNKNOWN, pool_short=True))
    assert ladder.next() is None
    assert ladder.finding().kind is FindingKind.UNDECIDED
    assert "the scaled pool was too small twice at max_model_len 262,144" in ladder.finding().sentence


def test_a_lost_log_does_not_use_up_the_second_chance_of_the_rate() -> None:
    ladder = Ladder(AXIS, Step())
    ladder.tell(told(ladder.next(), Verdict.UNKNOWN))
    ladder.tell(told(ladder.next(), Verdict.UNKNOWN, pool_short=True))
    ladder.tell(told(ladder.next(), Verdict.PASS))
    assert ladder.finding().kind is FindingKind.CEILING_REACHED
    assert ladder.finding().retries == 2


def test_a_short_pool_is_never_a_verdict() -> None:
    ladder = Ladder(AXIS, Step())
    ask = ladder.next()
    with pytest.raises(ValueError, match="a short pool came with FAIL"):
        ladder.tell(told(ask, Verdict.FAIL, pool_short=True))


def test_confirmations_come_after_the_proof_and_are_counted_apart() -> None:
    ladder = Ladder(AXIS, Step(), confirm=2)
    asks = run(ladder, 241_664)
    assert [(ask.value, ask.why) for ask in asks[6:]] == [(241_664, "confirm")] * 2
    assert [ask.attempt for ask in asks[6:]] == [2, 3]
    finding = ladder.finding()
    assert (finding.kind, finding.boots, finding.confirmations) == (FindingKind.PROVEN, 6, 2)
    assert finding.sentence.endswith("proven with 6 boots; 2 of 2 confirmations passed")


def test_a_confirmation_that_fails_takes_the_proof_back() -> None:
    ladder = Ladder(AXIS, Step(), confirm=1)
    ladder.tell(told(ladder.next(), Verdict.PASS))
    ladder.tell(told(ladder.next(), Verdict.FAIL, CAPTURE_OOM))
    assert ladder.next() is None
    finding = ladder.finding()
    assert finding.kind is FindingKind.UNDECIDED
    assert "passed and then failed when it was booted again" in finding.sentence


def test_a_confirmation_without_verdict_is_repeated_once() -> None:
    ladder = Ladder(AXIS, Step(), confirm=1)
    ladder.tell(told(ladder.next(), Verdict.PASS))
    ladder.tell(told(ladder.next(), Verdict.UNKNOWN))
    assert ladder.finding().kind is FindingKind.CEILING_REACHED
    ladder.tell(told(ladder.next(), Verdict.UNKNOWN))
    assert ladder.next() is None
    assert ladder.finding().kind is FindingKind.UNDECIDED
    assert (ladder.finding().boots, ladder.finding().confirmations) == (1, 2)


@pytest.mark.parametrize(("reference", "index"), [(200_704, 17), (200_000, None), (65_536, None)])
def test_the_reference_of_a_scaled_pool_is_booted_first(reference: int, index: int | None) -> None:
    ladder = Ladder(AXIS, Predict(), reference=reference)
    assert ladder.next() == Ask(value=reference, index=index, attempt=1, why="reference")
    run(ladder, 241_664)
    assert (ladder.finding().kind, ladder.finding().value) == (FindingKind.PROVEN, 241_664)


def test_a_failed_reference_scales_nothing() -> None:
    ladder = Ladder(AXIS, Predict(), reference=200_704)
    ladder.tell(told(ladder.next(), Verdict.FAIL, CAPTURE_OOM))
    assert ladder.next() is None
    assert ladder.finding().kind is FindingKind.UNDECIDED
    assert "the reference rung max_model_len 200,704 failed" in ladder.finding().sentence


def test_a_failure_below_a_pass_is_reported_and_not_searched_through() -> None:
    """vllm#10517: 20k and 35k booted, 29k did not."""
    axis = Axis(name="max_model_len", floor=20_000, ceiling=45_000, quantum=1_000)
    ladder = Ladder(axis, Scripted((20_000, 35_000, 29_000, 32_000)))
    for passed in (True, True, False):
        ladder.tell(told(ladder.next(), Verdict.PASS if passed else Verdict.FAIL))
    assert ladder.next() is None
    finding = ladder.finding()
    assert finding.kind is FindingKind.NON_MONOTONE
    assert "no single boundary: max_model_len 29,000 failed although 35,000 passed" in finding.sentence


def test_a_reference_above_a_failure_is_a_contradiction_too() -> None:
    ladder = Ladder(AXIS, Bisect(), reference=230_000)
    ladder.tell(told(ladder.next(), Verdict.PASS))
    ladder.tell(told(ladder.next(), Verdict.FAIL))
    assert ladder.next() is None
    assert ladder.finding().kind is FindingKind.NON_MONOTONE


def test_a_limit_on_boots_ends_undecided_with_the_best_so_far() -> None:
    ladder = Ladder(AXIS, Step(), max_boots=4)
    assert len(run(ladder, 241_664)) == 4
    finding = ladder.finding()
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.UNDECIDED, 233_472, 245_760)
    assert finding.sentence == (
        "undecided: the limit of 4 boots is reached; max_model_len 233,472 passed, 245,760 failed; 4 boots"
    )


def test_an_unfinished_ladder_is_undecided_at_any_time() -> None:
    ladder = Ladder(AXIS, Step())
    assert ladder.finding().kind is FindingKind.UNDECIDED
    assert ladder.finding().boots == 0
    ladder.next()
    assert ladder.finding().kind is FindingKind.UNDECIDED


def test_next_is_the_same_until_told_and_tell_takes_only_what_was_asked() -> None:
    ladder = Ladder(AXIS, Step())
    with pytest.raises(ValueError, match=r"next\(\) asked for no boot"):
        ladder.tell(Trial(value=262_144, verdict=Verdict.PASS))
    assert ladder.next() is ladder.next()
    with pytest.raises(ValueError, match=r"max_model_len 4,096; next\(\) asked for max_model_len 262,144"):
        ladder.tell(Trial(value=4096, verdict=Verdict.PASS))


@pytest.mark.parametrize(
    ("strategy", "found"),
    [(Scripted(()), "rung None"), (Scripted((262_144, 262_144)), "rung 32"), (Scripted((0,)), "-1")],
)
def test_a_strategy_that_leads_nowhere_is_named(strategy: Strategy, found: str) -> None:
    ladder = Ladder(AXIS, strategy)
    with pytest.raises(ValueError, match=f"strategy scripted chose .*{found}"):
        run(ladder, 241_664)


@pytest.mark.parametrize(("confirm", "max_boots", "word"), [(-1, None, "confirm is -1"), (0, 0, "max_boots is 0")])
def test_impossible_numbers_are_refused(confirm: int, max_boots: int | None, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Ladder(AXIS, Step(), confirm=confirm, max_boots=max_boots)


@settings(deadline=None)
@given(st.data(), st.sampled_from(sorted(STRATEGIES)), st.integers(0, 2), st.none() | st.integers(100_000, 262_144))
def test_whatever_a_device_does_the_ladder_ends_and_says_only_what_was_booted(
    data: st.DataObject, name: str, confirm: int, reference: int | None
) -> None:
    """Verdicts at random: a claim never goes beyond the boots, and no rung is booted a third time for a verdict."""
    ladder = Ladder(AXIS, STRATEGIES[name], confirm=confirm, reference=reference)
    trials = []
    while (ask := ladder.next()) is not None:
        verdict = data.draw(st.sampled_from(("PASS", "FAIL", "PASS", "FAIL", "MARGINAL", "UNKNOWN", "ERROR")))
        short = verdict == "UNKNOWN" and data.draw(st.booleans())
        trials.append(told(ask, Verdict(verdict), pool_short=short))
        ladder.tell(trials[-1])
        assert ask.attempt <= 3 + 2 * confirm + 2
    finding = ladder.finding()
    assert finding.boots + finding.confirmations == len(trials)
    assert finding.value is None or any(trial.passed and trial.value == finding.value for trial in trials)
    assert finding.failed_at is None or any(
        trial.verdict is Verdict.FAIL and trial.value == finding.failed_at for trial in trials
    )
    if finding.kind is FindingKind.PROVEN:
        assert finding.value is not None
        assert finding.failed_at == finding.value + AXIS.quantum
        assert not any(trial.verdict is Verdict.ERROR for trial in trials)
    assert (finding.kind is FindingKind.ERROR) == (trials[-1].verdict is Verdict.ERROR)
