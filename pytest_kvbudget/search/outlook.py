"""What the hints of a history say about where the boundary is, as a distribution over values of the axis."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import permutations
from typing import TYPE_CHECKING, Final

from pytest_kvbudget.units import GIB, TIB
from pytest_kvbudget.verdict import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_kvbudget.search.bracket import Bracket
    from pytest_kvbudget.search.model import Axis, Limit, Prior, Trial

# Weights of the parts of the mixture and what a prediction may be off. Only the number of boots depends on them, never
# an answer; they were chosen on the devices of tests/benchmarks/search_table.py.
NO_HINT_WEIGHT: Final = 0.08
"""Of the belief that the hints are worth nothing and every rung is as likely."""
NARROW_SHARE: Final = 0.8
"""Of a prediction's weight on being right to its printed precision; the rest on being off by its distance's share."""
RATE_ERROR: Final = 0.25
"""What a prediction from one boot is off, as a share of its distance from that boot: rates change with the shape."""
BOUND_ERROR: Final = 0.5
"""The same where the rate is more than the true one at most: the limit is hit earlier by such a share."""
FOLLOWING_BYTES: Final = 0.4 * GIB
"""What else would have been allocated after an allocation that failed: graphs, workspaces."""
LINE_ERROR: Final = 0.008
"""The same for a line through two boots, from the nearer one."""
AGE_WEIGHT: Final = 0.6
"""What an older boot's prediction weighs against the next younger one's."""
NARROW_QUANTA: Final = 0.2
"""Least spread of a prediction, in quanta."""

TRUST: Final = 0.85
"""What is left of the belief in hints after each boot all of whose predictions were refuted."""
LOOSE_SHARE: Final = 0.45
"""Of a prediction's weight on anything below it, where limits that are not stated may be hit first."""
ABSURD_BYTES: Final = 16 * TIB
"""No device has so much left or is short of so much: only how it differs between boots can mean something."""
PRIOR_SPREAD: Final = 0.7
"""Scale of a plan's or an archive's value, as a share of what it may be off."""

PHASE_LIMITS: Final = {Phase.ARGUMENT: "expert_arena", Phase.KV_CHECK: "kv_check", Phase.COMPILE: "compile"}
"""The limit that a phase tests; every later one meets the device's memory."""
SAME_LIMIT_QUANTA: Final = 1.0
"""How far apart, in quanta, figures may be that mean the same limit."""


@dataclass(frozen=True)
class Prediction:
    """A value of the axis at which something said it would no longer fit."""

    value: float
    """The predicted boundary; minus infinity where the axis does not move the limit."""
    spread: float
    """What it is off by its printed precision, in the axis' unit."""
    reach: float
    """What it may be off because it was measured elsewhere, in the axis' unit."""
    at_most: bool = False
    """The boundary is at or below it."""
    loose: bool = False
    """Limits that the engine does not state may be hit first."""
    name: str = ""
    """The limit that it is about."""

    @property
    def off(self) -> float:
        """What it may be off altogether, in the axis' unit."""
        return self.spread + self.reach


@dataclass(frozen=True)
class Guess:
    """One part of the mixture: a Cauchy distribution, whose heavy tails make a refuted guess give way by doubling."""

    centre: float
    scale: float
    weight: float
    below: bool = False
    """Only the half below the centre: one limit's boundary is the device's at most."""
    flat: bool = False
    """Anything from the centre down by the scale is as likely."""

    def above(self, value: float) -> float:
        """Chance that the boundary is at or above ``value``."""
        if self.flat:
            return min(max((self.centre - value) / self.scale, 0.0), 1.0)
        if self.below:
            return 2 * math.atan(max(self.centre - value, 0.0) / self.scale) / math.pi
        return 0.5 - math.atan((value - self.centre) / self.scale) / math.pi


@dataclass(frozen=True)
class Outlook:
    """A mixture of guesses and of the belief that they are worth nothing."""

    axis: Axis
    guesses: tuple[Guess, ...]

    @classmethod
    def of(cls, axis: Axis, history: Sequence[Trial], bracket: Bracket, prior: Prior | None = None) -> Outlook:
        """The outlook after ``history``; hints that a verdict refuted, or that are no numbers, are left out."""
        told: list[tuple[Prediction, float]] = []
        weight, refuted = 1.0, 0
        failed = _failed_limit(axis, history, bracket)
        for seen in range(len(history), 0, -1):
            found = list(_predictions(axis, history, seen - 1))
            kept = [item for item in found if _possible(axis, bracket, item, failed)]
            refuted += bool(found) and not kept
            told += [(item, weight / len(kept)) for item in kept]
            weight *= AGE_WEIGHT
        told += [(item, weight) for item in _by_prior(axis, prior) if _possible(axis, bracket, item, failed)]
        passed = axis.value(bracket.low) if bracket.low >= 0 else -math.inf
        standing = [other for other, _ in told if other.value >= passed]
        told = [(item, weight) for item, weight in told if not any(_binds_before(other, item) for other in standing)]
        sure = [(item, weight) for item, weight in told if not any(_refines(other, item) for other, _ in told)]
        exact = [item.value for item, _ in told if item.spread < axis.quantum]
        guesses = [guess for item, weight in sure for guess in _guesses(axis, _smallest(axis, item, exact), weight)]
        total = sum(guess.weight for guess in guesses)
        believed = (1 - NO_HINT_WEIGHT) * TRUST**refuted
        scale = believed / total if total else 0.0
        return cls(axis, tuple(replace(guess, weight=guess.weight * scale) for guess in guesses))

    def above(self, value: float) -> float:
        """Chance that the boundary is at or above ``value``."""
        axis = self.axis
        span = axis.ceiling - axis.floor + 2 * axis.quantum
        even = min(max((axis.ceiling + axis.quantum - value) / span, 0.0), 1.0)
        told = sum(guess.weight for guess in self.guesses)
        return (1 - told) * even + sum(guess.weight * guess.above(value) for guess in self.guesses)


def _guesses(axis: Axis, item: Prediction, weight: float) -> Iterator[Guess]:
    least = NARROW_QUANTA * axis.quantum
    wide = item.off + least
    if item.at_most or not math.isfinite(item.value):
        yield Guess(item.value, wide, weight, below=True)
        return
    if item.loose:
        yield Guess(item.value, max(item.value - axis.floor, axis.quantum), weight * LOOSE_SHARE, flat=True)
        weight *= 1 - LOOSE_SHARE
    index = axis.index_at_or_below(item.value)
    if item.spread < axis.quantum / 2 and index >= 0:
        # the answer is a rung, and every value up to the next rung means the same one
        top = axis.value(index) + axis.quantum
        yield Guess(top, max(item.spread, least), weight * NARROW_SHARE, below=True)
    else:
        yield Guess(item.value, max(item.spread, least), weight * NARROW_SHARE)
    yield Guess(item.value, wide, weight * (1 - NARROW_SHARE))


def _by_prior(axis: Axis, prior: Prior | None) -> Iterator[Prediction]:
    if prior is not None and math.isfinite(prior.value) and 0 < prior.relative < 1:
        value = min(max(prior.value, 0.0), 2.0 * axis.ceiling)
        yield Prediction(value, prior.relative * value * PRIOR_SPREAD, 0.0)


def _binds_before(other: Prediction, item: Prediction) -> bool:
    """Another limit is hit earlier: the boundary is that of the smallest one, whichever boot stated it."""
    return bool(item.name and other.name) and other.name != item.name and other.value + other.spread < item.value


def _refines(finer: Prediction, item: Prediction) -> bool:
    """A surer prediction lies within what the other leaves open, and makes it superfluous."""
    return finer.off < item.off and abs(finer.value - item.value) <= item.off


def _smallest(axis: Axis, item: Prediction, exact: Sequence[float]) -> Prediction:
    """The prediction moved to the smallest exact figure of the rung below, where there is one.

    Figures a rung apart mean the same limit, and the smaller counts: a pool of 51,200 tokens that holds 51,072 because
    one block is kept back (real vLLM boots on CPU).
    """
    close = [value for value in exact if item.value - SAME_LIMIT_QUANTA * axis.quantum <= value <= item.value]
    return replace(item, value=min(close, default=item.value))


def _failed_limit(axis: Axis, history: Sequence[Trial], bracket: Bracket) -> str | None:
    """Which limit the bracket's upper end failed for; ``None`` where it is open or does not say."""
    if bracket.high >= len(axis):
        return None
    failed = (trial for trial in history if not trial.passed and axis.index_at_or_above(trial.value) == bracket.high)
    cause = next((trial.cause for trial in failed), None)
    if cause is None or cause.by_gate or cause.phase is Phase.UNKNOWN:
        return None
    return PHASE_LIMITS.get(cause.phase, "device_memory")


def _possible(axis: Axis, bracket: Bracket, item: Prediction, failed: str | None) -> bool:
    """A verdict does not refute the prediction by more than it may be off, and what failed below it was that limit."""
    slack = item.off + axis.quantum
    if bracket.low >= 0 and item.value + slack < axis.value(bracket.low):
        return False
    if bracket.high == len(axis):
        return True
    # another limit that was hit below an exact one leaves that one nothing to say
    other = item.name and failed is not None and item.name != failed
    return item.value - (item.off if other else slack) < axis.value(bracket.high)


def _predictions(axis: Axis, history: Sequence[Trial], at: int) -> Iterator[Prediction]:
    """What the boot at ``at`` says, with the others' help: the smallest limit, and the estimate."""
    last = history[at]
    by_limit = [item for limit in last.hint.limits if (item := _limit_prediction(axis, history, at, limit)) is not None]
    passed = max((trial.value for trial in history[: at + 1] if trial.passed), default=-math.inf)
    standing = [item for item in by_limit if item.value + item.off >= passed]
    if standing:
        yield min(standing, key=lambda item: item.value)
    estimate = last.hint.estimate
    if estimate is not None and estimate > 0 and (estimate >= last.value) == last.passed:
        value = min(estimate, 2 * axis.ceiling)
        loose = any(limit.loose for limit in last.hint.limits)
        yield Prediction(value, 0.0, RATE_ERROR * abs(value - last.value), loose=loose, name="kv_check")


def _limit_prediction(axis: Axis, history: Sequence[Trial], at: int, limit: Limit) -> Prediction | None:
    """Where ``limit`` of a boot is hit: from its own rate, or on the line through an earlier boot's margin."""
    last = history[at]
    if not _usable(limit) or (limit.margin_bytes < 0) == last.passed:
        return None
    found: list[Prediction] = []
    rate = limit.bytes_per_unit
    if rate is not None and math.isfinite(rate) and rate > 0 and abs(limit.margin_bytes) < ABSURD_BYTES:
        distance = limit.margin_bytes / rate
        more = FOLLOWING_BYTES / rate if limit.at_least else 0.0
        share = BOUND_ERROR if limit.rate_at_most else RATE_ERROR
        item = Prediction(last.value + distance, limit.precision_bytes / rate, share * abs(distance) + more)
        # a deficit at a rate that is too large is made up for too early
        early = limit.rate_at_most and limit.margin_bytes < 0
        found.append(replace(item, at_most=limit.at_least or early))
    if limit.grows_with is not None and limit.margin_bytes > 0:
        found += _carried(last.value, limit, history)
    lines = (
        _line((earlier.value, other), (last.value, limit))
        for earlier in history[:at]
        for other in earlier.hint.limits
        if other.name == limit.name and _usable(other) and earlier.value != last.value
    )
    found += [item for item in lines if item is not None]
    found = [replace(item, loose=limit.loose, name=limit.name) for item in found]
    within = [kept for item in found if (kept := _within(axis, item)) is not None]
    return min(within, key=lambda item: item.off, default=None)


def _carried(value: int, limit: Limit, history: Sequence[Trial]) -> Iterator[Prediction]:
    """Where a boot's margin ends at the rate that two boots showed of the limit that it grows with."""
    known = [
        (trial.value, other)
        for trial in history
        for other in trial.hint.limits
        if other.name == limit.grows_with and _usable(other) and not other.at_least
    ]
    for (low, before), (high, after) in permutations(known, 2):
        fall = before.margin_bytes - after.margin_bytes
        blur = before.precision_bytes + after.precision_bytes
        if low < high and blur < fall < ABSURD_BYTES and limit.margin_bytes < ABSURD_BYTES:
            distance = limit.margin_bytes / fall * (high - low)
            spread = limit.precision_bytes / fall * (high - low) + distance * blur / fall
            yield Prediction(value + distance, spread, LINE_ERROR * distance)


def _usable(limit: Limit) -> bool:
    return math.isfinite(limit.margin_bytes) and 0 <= limit.precision_bytes < math.inf


def _within(axis: Axis, item: Prediction) -> Prediction | None:
    """The prediction in numbers that can be worked with; ``None`` where they overflowed."""
    if math.isnan(item.value + item.spread + item.reach):
        return None
    far = 2.0 * axis.ceiling
    return replace(
        item,
        value=item.value if item.value == -math.inf else min(max(item.value, -far), far),
        spread=min(item.spread, far),
        # what lies far beyond the axis stays refutable by a boot at its end
        reach=min(item.reach, max(RATE_ERROR, LINE_ERROR) * far),
    )


def _line(first: tuple[int, Limit], second: tuple[int, Limit]) -> Prediction | None:
    """Where the line through two boots' margins reaches zero; minus infinity where it is below zero everywhere."""
    (value, limit), (other, other_limit) = sorted((first, second), key=lambda point: point[0])
    if limit.at_least or other_limit.at_least:
        return None
    fall = limit.margin_bytes - other_limit.margin_bytes
    blur = limit.precision_bytes + other_limit.precision_bytes
    if fall <= blur:
        return Prediction(-math.inf, 0.0, 0.0) if limit.margin_bytes < 0 and other_limit.margin_bytes < 0 else None
    rate = fall / (other - value)
    if rate == 0:  # smaller than a float can be
        return None
    root = value + limit.margin_bytes / rate
    distance = min(abs(root - value), abs(root - other))
    return Prediction(root, blur / rate * (1 + 2 * distance / (other - value)), LINE_ERROR * distance)
