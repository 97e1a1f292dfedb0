"""Random simulated targets by family, with the ladder that is climbed on each: physics of the simulated engine.

The boundary is put anywhere on the axis by trying: one term of the device is moved until a boot at the wanted window
just passes. What the search is told of a device is only what its log and its memory show.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from pytest_kvbudget.config import LoadedTarget, Target
from pytest_kvbudget.mock.probability import command_of
from pytest_kvbudget.mock.rehearsal import rehearse
from pytest_kvbudget.mock.spec import STACK_BYTES, Arena, Compile, MockDevice
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.specs import LadderSpec
from pytest_kvbudget.units import GIB, MIB
from tests.benchmarks.devices.families import ABOVE_CEILING, CEILING, FLOOR, LIE_FACTORS, MISLEADING, NOTHING

QUANTUM: Final = 4096
LIES: Final = ("absent", "proportional", "factor", "huge", "negative", "alternating")
TWO_RANKS: Final = 0.1
LADDER: Final = LadderSpec(axis="max_model_len", start=CEILING, floor=FLOOR, quantum=QUANTUM)
_ROOMY: Final = 2**44
"""Bytes of a card on which everything fits."""


@dataclass(frozen=True)
class Subject:
    """A simulated target and the ladder on it."""

    name: str
    """Family and number."""
    loaded: LoadedTarget
    ladder: LadderSpec
    end: float
    """Where its boundary was put, in tokens."""


def subject(family: str, seed: int) -> Subject:
    """The same target for the same family and seed, on every machine."""
    name = f"{family} {seed}"
    dice = random.Random(f"target {name}")
    end = _end(dice)
    spec, shape, ladder = MAKERS[family](dice, end)
    spec = replace(spec, estimate=_estimate(dice), seed=seed)
    target = Target(backend="mock", devices=tuple(range(spec.ranks)), shape=shape, mock=spec)
    loaded = LoadedTarget(name=f"{family}-{seed}", target=target, origin=name, folder="/", environment={})
    return Subject(name, loaded, ladder, end)


def _end(dice: random.Random) -> float:
    kind = dice.random()
    if kind < ABOVE_CEILING:
        return CEILING * dice.uniform(1.0, 1.6)
    if kind < ABOVE_CEILING + NOTHING:
        return FLOOR * dice.uniform(0.2, 0.95)
    return dice.uniform(FLOOR, CEILING)


def _estimate(dice: random.Random) -> str:
    """What the engine says of the longest window that fits."""
    if dice.random() >= MISLEADING:
        return "exact"
    lie = dice.choice(LIES)
    return f"factor {dice.choice(LIE_FACTORS)}" if lie == "factor" else lie


def least(low: int, high: int, good: Callable[[int], bool]) -> int:
    """The smallest number for which ``good`` holds, to a thousandth of a per mille; it holds for ``high``."""
    while high - low > max(1, high // 1_000_000):
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return high


def _boots(spec: MockDevice, shape: Shape, window: float) -> bool:
    argv, environ = command_of(shape.merged(max_model_len=int(window)))
    return rehearse(spec, argv, environ).passed


Made = tuple[MockDevice, Shape, LadderSpec]


def _gpu(dice: random.Random, end: float, **more: int) -> Made:
    """A card of which utilization gives the KV cache the rest."""
    rate = int(dice.uniform(6e3, 120e3))
    seqs = dice.choice((1, 2, 4))
    two = dice.random() < TWO_RANKS
    spec = MockDevice(
        device_total=_ROOMY,
        free_at_start=_ROOMY,
        ranks=2 if two else 1,
        rank_skew=int(dice.uniform(0, 0.5) * GIB) if two else 0,
        device_skew=int(dice.uniform(0, 0.3) * GIB) if two and dice.random() < 0.5 else 0,
        weights=int(dice.uniform(4, 60) * GIB),
        non_torch=int(dice.uniform(0.3, 2) * GIB),
        activation_base=int(dice.uniform(0.2, 3) * GIB),
        activation_per_batched_token=int(dice.uniform(0, 400) * 1024),
        activation_per_window_token=int(rate * dice.uniform(0, 0.3)) if dice.random() < 0.3 else 0,
        chunked_prefill=_chunking(dice),
        graph_base=int(dice.uniform(0.02, 0.5) * GIB),
        graph_per_size=int(dice.uniform(1, 60) * MIB),
        graph_estimate=dice.choice((1.0, 1.0, 1.2, 2.0, 0.5, 0.0)),
        fragmentation=int(dice.uniform(0, 300) * MIB) if dice.random() < 0.3 else 0,
        kv_bytes_per_token=rate,
        block_size=more.pop("block", 16),
        native_max_model_len=2 * CEILING,
        **more,
    )
    util = dice.choice((0.85, 0.9, 0.92, 0.95))
    shape = Shape(model="simulated", gpu_memory_utilization=util, max_num_seqs=seqs)
    idle_share = dice.uniform(0.05, 0.4) * (1 - util)

    def sized(total: int) -> MockDevice:
        # what capture takes beyond its charge is outside the share that utilization gives, and is there
        idle = int(idle_share * total)
        return replace(spec, device_total=total, free_at_start=total - idle)

    if end < FLOOR and dice.random() < 0.6:
        return *_blocked(dice, sized(least(GIB, _ROOMY, lambda total: _boots(sized(total), shape, CEILING))), shape), LADDER
    total = least(GIB, _ROOMY, lambda total: _boots(sized(total), shape, end))
    return sized(total), shape, LADDER


def _chunking(dice: random.Random) -> bool | str:
    """Mostly on; off, or off above some window, makes a step as long as the window."""
    kind = dice.random()
    return "on" if kind < 0.85 else "off" if kind < 0.9 else f"off above {dice.randrange(FLOOR, CEILING)}"


def _blocked(dice: random.Random, spec: MockDevice, shape: Shape) -> tuple[MockDevice, Shape]:
    """One of the ways in which no window helps."""
    kind = dice.choice(("capture", "startup", "weights", "seqs") if spec.state_bytes_per_seq else _BLOCKS)
    if kind == "capture":
        return replace(spec, graph_base=spec.device_total // 2, graph_estimate=0.0), shape
    if kind == "startup":
        return replace(spec, free_at_start=int(spec.device_total * 0.8)), shape
    if kind == "weights":
        return replace(spec, weights=2 * spec.device_total), shape
    return spec, shape.merged(max_num_seqs=4096)


_BLOCKS: Final = ("capture", "startup", "weights")


def plain(dice: random.Random, end: float) -> Made:
    """Attention only, blocks of 16, 32 or 128 tokens."""
    return _gpu(dice, end, block=dice.choice((16, 32, 128)))


def hybrid(dice: random.Random, end: float) -> Made:
    """Blocks that hold a state, 272 to 2,096 tokens, or small pages of which a state takes several."""
    spec, shape, ladder = _gpu(dice, end, block=16, **_state(dice))
    return spec, shape, ladder


def _state(dice: random.Random) -> dict[str, int]:
    size = int(dice.uniform(2, 60) * MIB)
    return {"state_bytes_per_seq": size} | ({"kv_page_tokens": 64} if dice.random() < 0.2 else {})
