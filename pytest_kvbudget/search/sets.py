"""Device sets that differ: for which of them a finding holds, and what its boots say about the others."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_kvbudget.search.model import SetBound
from pytest_kvbudget.search.rungs import COUNTED, rungs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_kvbudget.search.model import Trial

MOST_WEAKER: Final = 3
"""Kinds of weaker sets that are each named; of more than that the weakest are."""


class Words(NamedTuple):
    """How a ladder or a sweep speaks of its values."""

    name: str
    """Of axis or knob."""
    show: Callable[[int], str]
    failed: str = "failed"
    """Of a value that is too much."""
    short: str = "failed for want of more"
    """Of one that is too little."""
    best: str = "largest"
    at: str = "at most"
    """How a value bounds what may be deployed."""

    def where(self, value: int) -> str:
        """``max_model_len 245,760``."""
        return f"{self.name} {self.show(value)}"


def bounds(trials: Iterable[Trial], first: str | None) -> tuple[SetBound, ...]:
    """What was booted on each kind of device set, as far as it has a verdict: ``first``, then the weakest."""
    by_set: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.device_set is not None and trial.verdict in COUNTED:
            by_set.setdefault(trial.device_set, []).append(trial)
    found = [_bound(label, made) for label, made in by_set.items()]
    return tuple(sorted(found, key=lambda bound: (bound.device_set != first, *_strength(bound), bound.device_set)))


def _bound(label: str, trials: list[Trial]) -> SetBound:
    rungs = rungs_of(trials).values()
    failed = min((rung.value for rung in rungs if rung.failures), default=None)
    short = max((rung.value for rung in rungs if any(trial.short for trial in rung.passes)), default=None)
    low, high = -math.inf if short is None else short, math.inf if failed is None else failed
    passed = (rung.value for rung in rungs if low < rung.value < high)
    return SetBound(
        device_set=label,
        devices=tuple(sorted({"+".join(trial.devices) for trial in trials if trial.devices})),
        passed=max(passed, default=None),
        failed_at=failed,
        short_at=short,
    )


def _strength(bound: SetBound) -> tuple[float, float]:
    return (
        -math.inf if bound.passed is None else bound.passed,
        math.inf if bound.failed_at is None else bound.failed_at,
    )


def notes(sets: tuple[SetBound, ...], value: int | None, failed_at: int | None, words: Words) -> tuple[str, ...]:
    """For which kind of set a finding holds, and what it means on the others; nothing where there is one kind.

    Args:
        sets: the one that it holds for first.
        value: what passed there.
        failed_at: what failed there, where nothing passed.
        words: of the search.
    """
    if len(sets) < 2:
        return ()
    holds, *others = sets
    said = [f"device sets differ, and this holds for {named(holds)}"]
    if value is None:
        return (*said, *_of_nothing(others, failed_at, words))
    weaker = [bound for bound in others if _against(bound, value) is not None]
    said += [_weaker(bound, value, words) for bound in weaker[:MOST_WEAKER]]
    if len(weaker) > MOST_WEAKER:
        said.append(f"it failed on {len(weaker) - MOST_WEAKER} further kinds of device sets")
    rest = [bound for bound in others if bound not in weaker]
    said += [f"on {named(bound)} {words.where(bound.passed)} passed as well" for bound in rest
             if bound.passed is not None and bound.passed >= value]  # fmt: skip
    unseen = [bound for bound in rest if bound.passed is None or bound.passed < value]
    return (*said, *(_unseen(bound, value, words) for bound in unseen))


def named(bound: SetBound) -> str:
    """``devices 0, 2 (34208743424 B, 32608 MiB free when idle)``."""
    if not bound.devices or bound.device_set.startswith("devices "):
        return bound.device_set
    return f"devices {', '.join(bound.devices)} ({bound.device_set})"


def _against(bound: SetBound, value: int) -> int | None:
    """What failed on these sets although by the finding it should not have; ``None`` where nothing did."""
    if bound.failed_at is not None and bound.failed_at <= value:
        return bound.failed_at
    return bound.short_at if bound.short_at is not None and bound.short_at >= value else None


def _weaker(bound: SetBound, value: int, words: Words) -> str:
    against = _against(bound, value)
    how = words.failed if against == bound.failed_at else words.short
    where = words.where(value if against is None else against)
    if bound.passed is None:
        return f"on {named(bound)} {where} {how}, and nothing passed there: it needs a search of its own"
    at = f" {words.at}" if against == bound.failed_at else ""
    deploy = f"deploy{at} {words.show(bound.passed)}"
    return f"on {named(bound)} {where} {how}: {deploy} there, the {words.best} that passed"


def _unseen(bound: SetBound, value: int, words: Words) -> str:
    known = "" if bound.passed is None else f", where {words.show(bound.passed)} passed"
    return f"{words.where(value)} was not booted on {named(bound)}{known}"


def _of_nothing(others: Iterable[SetBound], failed_at: int | None, words: Words) -> Iterator[str]:
    """Where nothing passed: what failed there may not have been booted elsewhere."""
    for bound in others:
        if bound.passed is not None:
            yield f"on {named(bound)} {words.where(bound.passed)} passed"
        elif failed_at is not None and failed_at in {bound.failed_at, bound.short_at}:
            yield f"it failed on {named(bound)} as well"
        elif failed_at is not None:
            yield f"{words.where(failed_at)} was not booted on {named(bound)}"
