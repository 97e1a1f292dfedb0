"""What a search is expected to cost, against searches that are run to their end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvbudget.expectation import Told, expected_boots
from pytest_kvbudget.search.ladder import Ladder
from pytest_kvbudget.search.model import Axis, Trial
from pytest_kvbudget.search.strategies import STRATEGIES
from pytest_kvbudget.verdict import Verdict


def climbed(rungs: int, strategy: str, passing: int) -> int:
    """Boots of a whole ladder whose lowest ``passing`` rungs pass."""
    ladder = Ladder(Axis(name="a", floor=1, ceiling=rungs, quantum=1), STRATEGIES[strategy])
    while (ask := ladder.next()) is not None:
        ladder.tell(Trial(value=ask.value, verdict=Verdict.PASS if ask.value <= passing else Verdict.FAIL))
    return ladder.finding().boots


@settings(max_examples=20, deadline=None)
@given(rungs=st.integers(1, 40), strategy=st.sampled_from(["bisect", "step"]))
def test_strategies_without_hints_are_counted_out(rungs: int, strategy: str) -> None:
    boots = [climbed(rungs, strategy, passing) for passing in range(rungs + 1)]
    expected = expected_boots(rungs, strategy)
    assert expected.at_most == max(boots)
    assert expected.mean == pytest.approx(sum(boots) / len(boots))


@settings(max_examples=20, deadline=None)
@given(rungs=st.integers(1, 300), told=st.sampled_from(["nothing", "plan", "archive"]), data=st.data())
def test_predict_keeps_what_is_promised(rungs: int, told: Told, data: st.DataObject) -> None:
    expected = expected_boots(rungs, "predict", told)
    assert climbed(rungs, "predict", data.draw(st.integers(0, rungs))) <= expected.at_most
    assert 1 <= expected.mean <= expected.at_most


def test_whoever_knows_more_needs_less() -> None:
    nothing, plan, archive = (expected_boots(64, "predict", told) for told in ("nothing", "plan", "archive"))
    assert nothing.mean > plan.mean > archive.mean >= 2
    assert expected_boots(64, "step").mean > expected_boots(64, "bisect").mean > nothing.mean


def test_long_axes_are_sampled() -> None:
    expected = expected_boots(2049, "step")
    # from the ceiling in steps of four, and at most three up: 512 failures, then the floor's neighbours
    assert expected.at_most == climbed(2049, "step", 3)
    assert expected.mean == pytest.approx(2049 / 8, rel=0.02)


def test_a_sweep_by_steps_walks_the_grid() -> None:
    # from the end that is farthest from the goal, one step at a time
    assert expected_boots(31, "step", sweep=True).at_most == 31
    assert expected_boots(31, "predict", sweep=True).at_most == 8


@pytest.mark.parametrize(("rungs", "strategy"), [(0, "predict"), (64, "guess")])
def test_what_cannot_be_asked(rungs: int, strategy: str) -> None:
    with pytest.raises(ValueError, match="expected 1 or more by one of predict, step, bisect"):
        expected_boots(rungs, strategy)
