"""The truth about a ladder, by booting every rung, and whether a finding agrees with it."""

from __future__ import annotations

import re
from itertools import pairwise
from statistics import fmean
from typing import Final

import msgspec

from pytest_kvbudget.config import LoadedTarget
from pytest_kvbudget.engine.backends.mock import MockBackend
from pytest_kvbudget.mock.arguments import parse
from pytest_kvbudget.mock.physics import Physics
from pytest_kvbudget.mock.probability import command_of, pass_probability
from pytest_kvbudget.mock.rehearsal import Rehearsal, rehearse
from pytest_kvbudget.mock.spec import MockDevice
from pytest_kvbudget.search.model import Finding
from pytest_kvbudget.search.pool import rung_shape
from pytest_kvbudget.search.turn import turn
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.specs import LadderSpec
from pytest_kvbudget.units import GIB
from pytest_kvbudget.verdict import FindingKind

_TOKENS: Final = re.compile(r"GPU KV cache size: ([\d,]+) tokens")
_BLOCK_TOKENS: Final = 128
_DIGITS_BYTES: Final = int(0.02 * GIB)
"""What the last digits of need and pool leave open where an engine says how far a pool is from enough."""
TWO_SIDED: Final = frozenset({"gpu_memory_utilization", "kv_cache_memory_bytes"})
"""Axes on which too little fails as well as too much."""
NOTHING: Final = frozenset({FindingKind.EMPTY, FindingKind.EMPTY_WINDOW})
HONEST: Final = frozenset({FindingKind.FLAKY, FindingKind.NON_MONOTONE})
"""What may be said where chances are no step from 1 to 0."""


class Truth(msgspec.Struct, frozen=True, kw_only=True):
    """The chance of every rung to pass, by value."""

    chances: dict[int, float]
    reference: float = 1.0
    """Chance of a scaled pool's reference."""

    @property
    def certain(self) -> bool:
        """Every rung passes always or never."""
        return set(self.chances.values()) <= {0.0, 1.0}

    @property
    def monotone(self) -> bool:
        """No rung passes more often than one below it."""
        return all(low >= high for low, high in pairwise(chance for _, chance in sorted(self.chances.items())))

    @property
    def connected(self) -> bool:
        """What passes at all is one piece of the axis: too little fails below it, too much above."""
        passing = [chance > 0 for _, chance in sorted(self.chances.items())]
        return sum(now and not before for before, now in pairwise([False, *passing])) <= 1


def truth(loaded: LoadedTarget, ladder: LadderSpec) -> Truth:
    """Boot every rung of a ladder, whatever the log says about it.

    Args:
        loaded: a simulated target.
        ladder: the ladder.

    Raises:
        UsageError: the engine refuses the command line of a rung.
    """
    axis = ladder.rungs
    rungs = [axis.value(index) for index in range(len(axis))]
    base = loaded.target.shape
    if ladder.pool == "fixed":
        shapes = {value: turn(base, ladder.axis, axis.setting(value)) for value in rungs}
        return Truth(chances={value: _chance(loaded, ladder, shape) for value, shape in shapes.items()})
    served = _roomy(loaded, ladder, base)
    found = [
        {value: _scaled_chance(loaded, ladder, rung_shape(one, ladder.axis, value, "scaled")) for value in rungs}
        for one in served
    ]
    reference = fmean(_passes(loaded, one) for one in served)
    return Truth(chances={value: fmean(chances[value] for chances in found) for value in rungs}, reference=reference)


def _chance(loaded: LoadedTarget, ladder: LadderSpec, shape: Shape) -> float:
    """The chance that a shape passes and holds its windows."""
    # one window fits wherever the engine's own check lets a boot pass
    if ladder.windows > 1 and _short(_boot(loaded, shape), ladder.windows, shape):
        return 0.0
    return _passes(loaded, shape)


def _scaled_chance(loaded: LoadedTarget, ladder: LadderSpec, shape: Shape) -> float:
    """The same with a scaled pool: one that is short says nothing, what counts is whether one that is not would do."""
    return fmean(_passes(loaded, one) for one in _roomy(loaded, ladder, shape))


def _roomy(loaded: LoadedTarget, ladder: LadderSpec, shape: Shape) -> tuple[Shape, ...]:
    """The shape; where its pool is short, with the smallest that is not, and with one that was rounded up twice.

    Where only the smallest one passes, nobody can say whether the shape does.
    """
    boot = _boot(loaded, shape)
    if boot.phase != "kv_check" and not _short(boot, ladder.windows, shape):
        return (shape,)
    pools = _enough(loaded, ladder.windows, shape)
    return tuple(shape.merged(kv_cache_memory_bytes=pool) for pool in pools)


def _passes(loaded: LoadedTarget, shape: Shape) -> float:
    return pass_probability(_spec(loaded), shape, loaded.environment, cards=_cards(loaded, shape))


def _boot(loaded: LoadedTarget, shape: Shape) -> Rehearsal:
    argv, environ = command_of(shape, loaded.environment)
    return rehearse(_spec(loaded), argv, environ, cards=_cards(loaded, shape))


def _short(boot: Rehearsal, windows: int, shape: Shape) -> bool:
    """It serves, and by the engine's own count the KV cache does not hold the windows."""
    said = _TOKENS.search(boot.log)
    held = 0 if said is None else int(said[1].replace(",", ""))
    return boot.passed and held < windows * (shape.max_model_len or 0)


def _enough(loaded: LoadedTarget, windows: int, shape: Shape) -> tuple[int, int]:
    """The smallest pool that holds the windows, by the simulator's own arithmetic, and one rounded up twice."""
    argv, environ = command_of(shape, loaded.environment)
    spec = _spec(loaded)
    physics = Physics(spec, parse(argv, fork=spec.dialect == "rdna4"), environ)
    window = physics.blocks_for(physics.max_model_len)
    # the block that is never handed out counts among those that the engine says it has
    least = max(windows * window, window + 1) * physics.block_bytes
    rounding = (windows + 1) * max(physics.block_bytes, _BLOCK_TOKENS * physics.kv_bytes_per_token)
    return least, least + rounding + _DIGITS_BYTES


def _spec(loaded: LoadedTarget) -> MockDevice:
    return loaded.target.mock or MockDevice()


def _cards(loaded: LoadedTarget, shape: Shape) -> list[int]:
    return [int(card) for card in MockBackend().slots(loaded, shape)[0]]


# -- findings


def disagreement(finding: Finding, real: Truth) -> str | None:
    """What is wrong with a finding, in words; ``None`` where it agrees with every rung's boot.

    Its neighbours may be as far apart as its own quantum, which may have been raised. Where a rung passes now and then,
    or a longer one passes and a shorter one does not, no rung is the only right answer: the proof has to be true all
    the same, and `HONEST` findings are right too.
    """
    if finding.kind is FindingKind.UNDECIDED and real.reference < 1 and finding.value is None:
        return None
    if real.certain and (real.monotone or (real.connected and finding.axis.name in TWO_SIDED)):
        return _unexpected(finding, real.chances)
    return None if finding.kind in HONEST else _untrue(finding, real.chances)


def _unexpected(finding: Finding, chances: dict[int, float]) -> str | None:
    """How a finding differs from the only right one, where what passes is one piece.

    Neighbours may be nearer to each other than the quantum, which was raised after they were booted.
    """
    good = [value for value, chance in chances.items() if chance == 1]
    value, failed_at = finding.value, finding.failed_at
    if not good:
        right = finding.kind in NOTHING and value is None and failed_at in chances
        return None if right else f"{finding.kind} {value}; in truth nothing passes"
    if finding.kind is FindingKind.CEILING_REACHED:
        right = value == finding.axis.ceiling == good[-1]
    else:
        right = value in good and finding.kind is FindingKind.PROVEN
        next_fails = value is not None and failed_at is not None and failed_at <= value + finding.axis.quantum
        right = right and next_fails and good[-1] < (failed_at or 0)
    return None if right else f"{finding.kind} {value} (fails at {failed_at}); in truth {good[-1]:,} passes"


def _untrue(finding: Finding, chances: dict[int, float]) -> str | None:
    """Why the proof of a finding is none."""
    value, failed_at = finding.value, finding.failed_at
    if finding.kind is FindingKind.EMPTY:
        passing = [value for value in (min(chances), max(chances)) if chances[value] > 0.5]
        return f"empty, and {passing[0]:,}, an end of the axis, passes" if passing else None
    if value is None or not finding.proven:
        return f"{finding.kind}: {finding.sentence}"
    if chances[value] < 0.5:
        return f"{value} is proven and passes {chances[value]:.0%} of its boots"
    if finding.kind is FindingKind.CEILING_REACHED:
        return None if value == finding.axis.ceiling else f"{value} is not the ceiling"
    if failed_at is None or not value < failed_at <= value + finding.axis.quantum:
        return f"{value} is proven by {failed_at}, which is no neighbour in steps of {finding.axis.quantum}"
    return None if chances[failed_at] < 1 else f"{failed_at} is said to fail and always passes"
