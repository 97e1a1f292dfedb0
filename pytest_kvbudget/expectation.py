"""How many boots a question will take, said before the first one."""

from __future__ import annotations

from functools import cache
from typing import Final, Literal, NamedTuple

from pytest_kvbudget.search.bracket import boot_bound
from pytest_kvbudget.search.model import Axis, Strategy, Trial
from pytest_kvbudget.search.strategies import STRATEGIES, SWEEP_STRATEGIES
from pytest_kvbudget.verdict import Verdict

Told = Literal["nothing", "plan", "archive"]
"""What is known before the first boot."""

LADDER_MEANS: Final[dict[Told, float]] = {"nothing": 3.8, "plan": 2.3, "archive": 2.1}
"""Search boots of ``predict`` to a proof: means over the families of ``tests/benchmarks/search_table.py``, 64 rungs."""
SWEEP_MEANS: Final[dict[Told, float]] = {"nothing": 3.9, "plan": 2.8, "archive": 2.8}
"""The same for headroom sweeps (31 values); it measures no archive, which is taken for a plan."""
SWEEP_SPARE: Final = 1
"""Boots beyond the bound of a ladder that a sweep may take."""
_ANSWERS: Final = 32
"""Possible answers of a long axis that are tried, beside those at its ends."""
_ENDS: Final = 8


class Expected(NamedTuple):
    """Search boots up to a proof: repetitions for noise, retries and confirmations come on top."""

    mean: float
    at_most: int


@cache
def expected_boots(rungs: int, strategy: str = "predict", told: Told = "nothing", *, sweep: bool = False) -> Expected:
    """What a search over so many values is expected to take, each being as likely to be the answer.

    Strategies that go by verdicts alone are counted out on every answer (a sample of them on long axes); of
    ``predict`` it is what it took on simulated devices, and its bound.

    Args:
        rungs: values of the axis, 1 or more.
        strategy: ``"predict"``, ``"bisect"`` or ``"step"``.
        told: what is known before the first boot.
        sweep: the question is a headroom sweep's.

    Raises:
        ValueError: for fewer than one rung, or a strategy that does not exist.
    """
    strategies = SWEEP_STRATEGIES if sweep else STRATEGIES
    if rungs < 1 or strategy not in strategies:
        raise ValueError(f"{rungs} rungs by {strategy!r}; expected 1 or more by one of {', '.join(strategies)}")
    axis = Axis(name="rung", floor=1, ceiling=rungs, quantum=1)
    if strategy != "predict":
        return _counted(axis, strategies[strategy])
    halved = _counted(axis, strategies["bisect"])
    mean = (SWEEP_MEANS if sweep else LADDER_MEANS)[told]
    return Expected(min(mean, halved.mean), min(rungs, boot_bound(axis) + (SWEEP_SPARE if sweep else 0)))


def _counted(axis: Axis, strategy: Strategy) -> Expected:
    rungs = len(axis)
    stride = max(1, rungs // _ANSWERS)
    ends = {*range(min(_ENDS, rungs)), *range(max(0, rungs - _ENDS), rungs + 1)}
    counts = {passing: _boots(axis, strategy, passing) for passing in {*range(0, rungs + 1, stride), *ends}}
    sampled = [counts[passing] for passing in range(0, rungs + 1, stride)]
    return Expected(sum(sampled) / len(sampled), max(counts.values()))


def _boots(axis: Axis, strategy: Strategy, passing: int) -> int:
    """Boots where so many rungs, from the floor up, pass."""
    boots, told = 0, dict[Verdict, Trial]()
    # the last pass and the last failure, in their order: more of the history these strategies do not look at
    while (index := strategy.next_index(axis, tuple(told.values()))) is not None:
        verdict = Verdict.PASS if index < passing else Verdict.FAIL
        told.pop(verdict, None)
        told[verdict] = Trial(value=axis.value(index), verdict=verdict)
        boots += 1
    return boots
