"""Whether the axis moves what fails at all: where it does not, only the floor's boot is worth its time."""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING, Final

from pytest_kvbudget.search.model import Hint, Limit
from pytest_kvbudget.units import TIB
from pytest_kvbudget.verdict import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_kvbudget.ledger.model import Cause
    from pytest_kvbudget.search.model import Axis, Trial

FREE_CLASSES: Final = frozenset(
    {
        "max_num_seqs_exceeds_state",
        "startup_free_below_request",
        "weights_oom",
        "kv_reserve_underpriced",
        "min_kv_budget",
        # an unpinned pool takes what utilization leaves, whatever the window
        "graph_capture_oom",
        "warmup_oom",
    }
)
"""Classes of which one failure is enough, where its levers say that the axis is useless."""
BEYOND: Final = Hint(limits=(Limit(name="opposite_side", margin_bytes=1e300),))
"""Of a boot that failed for want of more: on the searched side it had room to spare, nobody knows how much."""
MOST_ROOM_BYTES: Final = 16.0 * TIB
"""No device has so much left: it stands for room that nobody measured, as of a sweep's opposite failure."""
_ORDERED: Final = (
    *(Phase.ARGUMENT, Phase.WORKER_INIT, Phase.WEIGHTS_LOAD, Phase.PROFILE, Phase.KV_CHECK, Phase.KV_ALLOC),
    Phase.GRAPH_CAPTURE,
)
"""Phases that every engine which has them comes to in this order; what compiles and loads does so in another one."""
CLEAR: Final = 4.0
"""How much more than the printed digits two deficits must be expected to differ for their likeness to say something."""


def not_the_lever(axis: Axis, history: Sequence[Trial], *, level: bool = False) -> bool:
    """The failures so far do not depend on the axis: nothing passed, and what is missing stayed the same.

    One failure is enough where its class says so, two where what is needed over what is there stayed constant, or the
    same class failed twice without a rate and its levers call the axis useless.

    With ``level``, only what stayed the same counts, not a line that reaches zero below the floor.
    """
    failed = [trial for trial in history if not trial.passed]
    if not failed or len(failed) < len(history):
        return False
    last = failed[-1]
    if _useless(last.cause, axis.name) and not _rated(last):
        if last.cause is not None and last.cause.failure_class in FREE_CLASSES:
            return True
        if any(_same(last.cause, other.cause) and other.value != last.value for other in failed[:-1]):
            return True
    return any(
        _still(axis, (other.value, before), (last.value, limit), level=level)
        for other in failed[:-1]
        for limit in last.hint.limits
        for before in other.hint.limits
        if before.name == limit.name and other.value != last.value
    )


def more_room_above(history: Sequence[Trial]) -> bool:
    """Nothing passed, and a larger value got further than a smaller one, or missed less by more than digits hide.

    An arena that gives way to a longer window, say: then not the floor has the most room, and that nothing passes there
    does not say that nothing passes.
    """
    if any(trial.passed for trial in history):
        return False
    return got_further(history) or any(
        _less_missing((one.value, limit), (other.value, other_limit), alike=_same(one.cause, other.cause))
        for one, other in combinations(history, 2)
        for limit in one.hint.limits
        for other_limit in other.hint.limits
        if limit.name == other_limit.name and one.value != other.value
    )


def got_further(history: Sequence[Trial]) -> bool:
    """A larger value failed later than a smaller one. That is no hint: hints may mislead, and decide no finding."""
    return any(_got_further(one, other) for one, other in combinations(history, 2))


def _got_further(one: Trial, other: Trial) -> bool:
    """The larger value failed in a later phase, which every engine comes to after that of the smaller one's failure.

    A test's own gate comes last: what it refused has booted.
    """
    causes = [trial.cause for trial in sorted((one, other), key=lambda trial: trial.value)]
    if causes[1] is not None and causes[1].by_gate:
        return causes[0] is not None and not causes[0].by_gate
    phases = [
        _ORDERED.index(cause.phase) for cause in causes if cause and not cause.by_gate and cause.phase in _ORDERED
    ]
    return len(phases) == len(causes) and phases[0] < phases[1]


def _less_missing(first: tuple[int, Limit], second: tuple[int, Limit], *, alike: bool) -> bool:
    """The larger value missed less. What allocations missed at least is compared only where ``alike`` ones failed."""
    (_, low), (_, high) = sorted((first, second), key=lambda point: point[0])
    blur = low.precision_bytes + high.precision_bytes
    comparable = (alike or not (low.at_least or high.at_least)) and 0 <= blur < math.inf
    return comparable and -math.inf < low.margin_bytes < high.margin_bytes - blur < 0


def wants_more(cause: Cause | None, axis: str) -> bool:
    """A failure that a larger value of the axis cures: what passes, if anything does, lies above.

    A share of the device, or a pinned pool, that is too small for the window fails so.
    """
    levers = () if cause is None else cause.levers
    return any((lever.name, lever.direction, lever.effect) == (axis, "raise", "helps") for lever in levers)


def stays_short(trials: Sequence[Trial], names: frozenset[str]) -> bool:
    """Nothing but failures for want of more so far, and what is missing stayed the same at two values.

    Then the axis does not move it, or only its end can: the boots between the two tell nothing. A class that says
    nothing in bytes counts as the same where it came twice.

    Args:
        trials: every boot with a verdict, as it was told.
        names: limits of those failures.
    """
    if not trials or not all(trial.short for trial in trials):
        return False
    last = trials[-1]
    return any(_short_alike(other, last, names) for other in trials[:-1] if other.value != last.value)


def _short_alike(first: Trial, second: Trial, names: frozenset[str]) -> bool:
    one, two = ({limit.name: limit for limit in trial.hint.limits if limit.name in names} for trial in (first, second))
    if not one and not two:
        return _same(first.cause, second.cause)
    return any(_level(one[name], two[name], abs(first.value - second.value)) for name in one.keys() & two.keys())


def _level(limit: Limit, other: Limit, apart: int) -> bool:
    """Two deficits differ by no more than their digits hide, and a rate that was measured would have shown."""
    blur, rate = limit.precision_bytes + other.precision_bytes, limit.bytes_per_unit
    short = -math.inf < limit.margin_bytes < 0 and -math.inf < other.margin_bytes < 0 and 0 <= blur < math.inf
    return (
        short and abs(limit.margin_bytes - other.margin_bytes) <= blur and (rate is None or rate * apart > CLEAR * blur)
    )


def not_limited(axis: Axis, history: Sequence[Trial]) -> bool:
    """The boots so far passed with the same room, to the digit, at two values: only the ceiling's boot tells more.

    Where it fails after all the search goes on below it.
    """
    if len(history) < 2 or not all(trial.passed for trial in history):
        return False
    last = history[-1]
    return any(
        other.value != last.value and _same_room(other, last) and max(other.value, last.value) < axis.ceiling
        for other in history[:-1]
    )


def _same_room(first: Trial, second: Trial) -> bool:
    """Both state the same limits, and none of them moved."""
    here = {limit.name: limit.margin_bytes for limit in first.hint.limits}
    there = {limit.name: limit.margin_bytes for limit in second.hint.limits}
    apart = abs(first.value - second.value)
    told = all(
        # digits too coarse to show what the axis takes say nothing
        limit.precision_bytes == 0 or (limit.bytes_per_unit or 0) * apart > CLEAR * limit.precision_bytes
        for limit in first.hint.limits
    )
    return bool(here) and here == there and told and all(abs(margin) < MOST_ROOM_BYTES for margin in here.values())


def _useless(cause: Cause | None, axis: str) -> bool:
    return cause is not None and any(lever.name == axis and lever.effect == "useless" for lever in cause.levers)


def _rated(trial: Trial) -> bool:
    """A limit that failed has a rate: the axis moves it after all, as it moves a scaled pool."""
    return any(limit.margin_bytes < 0 and limit.bytes_per_unit is not None for limit in trial.hint.limits)


def _same(cause: Cause | None, other: Cause | None) -> bool:
    return cause is not None and other is not None and cause.failure_class == other.failure_class


def _still(axis: Axis, first: tuple[int, Limit], second: tuple[int, Limit], *, level: bool) -> bool:
    """The line through two deficits is level, or reaches zero only below the floor.

    A deficit that stays is a need that the axis does not move; one that shrinks with the value itself is a pool that is
    capped in proportion to the need. Digits too coarse to tell are no such sign. Where the digits mislead, the floor's
    boot passes and the search goes on.
    """
    (value, limit), (other, other_limit) = sorted((first, second), key=lambda point: point[0])
    margins = limit.margin_bytes, other_limit.margin_bytes
    blur = limit.precision_bytes + other_limit.precision_bytes
    if not all(-math.inf < margin < 0 for margin in margins) or not 0 <= blur < math.inf:
        return False
    if limit.at_least or other_limit.at_least:
        # the same allocation failed by the same bytes: whatever grows with the axis comes after it
        alike = limit.at_least and other_limit.at_least and margins[0] == margins[1]
        return alike and limit.bytes_per_unit is None and CLEAR * blur < -margins[0]
    fall, apart = margins[0] - margins[1], other - value
    rate = limit.bytes_per_unit
    if fall < -blur:
        return False  # see `more_room_above`
    if fall <= blur:
        return rate is None or rate * apart > CLEAR * blur
    return not level and value + margins[0] * apart / fall < axis.floor
