"""Random simulated targets by family, with the ladder that is climbed on each: physics of the simulated engine.

The boundary is put anywhere on the axis by trying: one term of the device is moved until a boot at the wanted window
just passes. What the search is told of a device is only what its log and its memory show.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

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
_PLATFORMS: Final[tuple[Literal["trn2", "trn3"], ...]] = ("trn2", "trn3")
_EXPERT_UTIL: Final = 0.98
LADDER: Final = LadderSpec(axis="max_model_len", start=CEILING, floor=FLOOR, quantum=QUANTUM)


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


def largest(high: int, good: Callable[[int], bool]) -> int:
    """The largest number up to ``high`` for which ``good`` holds, to a millionth of it; 0 where it holds for none."""
    low = 0
    if good(high):
        return high
    while high - low > max(1, high // 1_000_000):
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def _boots(spec: MockDevice, shape: Shape, end: float) -> bool:
    argv, environ = command_of(shape.merged(max_model_len=int(end)))
    return rehearse(spec, argv, environ).passed


Made = tuple[MockDevice, Shape, LadderSpec]


def _gpu(dice: random.Random, end: float, block: int, state_pages: int = 0) -> Made:
    """A card of which utilization gives the KV cache the rest.

    ``state_pages`` is how many blocks of the default size hold the state of one sequence; 0: it has none.
    """
    rate = int(dice.uniform(6e3, 120e3))
    util = dice.choice((0.85, 0.9, 0.92, 0.95))
    total = int(rate * end * dice.uniform(1.2, 3) + dice.uniform(24, 96) * GIB)
    free = int(total * (1 - dice.uniform(0.02, 0.5) * (1 - util)))
    # what is captured beyond its charge is taken from what utilization leaves, and has room there
    spare = free - util * total
    graphs, estimate = dice.uniform(0.05, 0.45) * spare, dice.choice((1.0, 1.0, 1.2, 2.0, 0.5, 0.0))
    ranks = 2 if dice.random() < TWO_RANKS else 1
    spec = MockDevice(
        device_total=total,
        free_at_start=free,
        ranks=ranks,
        rank_skew=int(dice.uniform(0, 0.5) * GIB) if ranks > 1 else 0,
        device_skew=int(dice.uniform(0, 0.3) * spare) if ranks > 1 else 0,
        weights=0,
        non_torch=int(dice.uniform(0.3, 2) * GIB),
        activation_base=int(dice.uniform(0.2, 3) * GIB),
        activation_per_batched_token=int(dice.uniform(0, 0.2) * rate),
        activation_per_window_token=int(dice.uniform(0, 0.3) * rate) if dice.random() < 0.3 else 0,
        chunked_prefill=_chunking(dice),
        graph_base=int(graphs / 2),
        graph_per_size=int(graphs / 20),
        graph_estimate=estimate,
        fragmentation=int(dice.uniform(0, 0.1) * spare) if dice.random() < 0.3 else 0,
        kv_bytes_per_token=rate,
        block_size=block,
        state_bytes_per_seq=state_pages * block * rate,
        kv_page_tokens=block if state_pages and dice.random() < 0.2 else 0,
        native_max_model_len=2 * CEILING,
    )
    shape = Shape(model="simulated", gpu_memory_utilization=util, max_num_seqs=dice.choice((1, 2, 4)))
    if end < FLOOR and dice.random() < 0.7:
        return (*_blocked(dice, replace(spec, weights=total // 8), shape), LADDER)
    weights = largest(total, lambda weights: _boots(replace(spec, weights=weights), shape, end))
    return replace(spec, weights=weights), shape, LADDER


def _chunking(dice: random.Random) -> bool | str:
    """Mostly on; off, or off above some window, makes a step as long as the window."""
    kind = dice.random()
    return "on" if kind < 0.85 else "off" if kind < 0.9 else f"off above {dice.randrange(FLOOR, CEILING)}"


def _blocked(dice: random.Random, spec: MockDevice, shape: Shape) -> tuple[MockDevice, Shape]:
    """One of the ways in which no window helps."""
    kind = dice.choice(("capture", "startup", "weights", *(("seqs",) * 3 if spec.state_bytes_per_seq else ())))
    if kind == "capture":
        return replace(spec, graph_base=spec.device_total // 2, graph_estimate=0.0), shape
    if kind == "startup":
        return replace(spec, free_at_start=spec.device_total * 4 // 5), shape
    if kind == "weights":
        return replace(spec, weights=2 * spec.device_total), shape
    return spec, shape.merged(max_num_seqs=1_000_000)


def plain(dice: random.Random, end: float) -> Made:
    """Attention only, blocks of 16, 32 or 128 tokens."""
    return _gpu(dice, end, dice.choice((16, 32, 128)))


def hybrid(dice: random.Random, end: float) -> Made:
    """Blocks grow until one holds a state, to 272 to 2,096 tokens; or stay small, and a state takes many."""
    return _gpu(dice, end, 16, dice.choice((17, 33, 66, 131)))


def cpu(dice: random.Random, end: float) -> Made:
    """A pinned pool, and memory for everything else."""
    rate, block = int(dice.uniform(6e3, 120e3)), dice.choice((16, 32, 128))
    spec = MockDevice(
        device_total=512 * GIB,
        free_at_start=500 * GIB,
        weights=2 * GIB,
        kv_bytes_per_token=rate,
        block_size=block,
        native_max_model_len=2 * CEILING,
    )
    shape = Shape(
        model="simulated", max_num_seqs=1, enforce_eager=True, kv_cache_memory_bytes=int(rate * (end + block)) + 1
    )
    return spec, shape, LADDER


def offload(dice: random.Random, end: float) -> Made:
    """Expert slots fill what the plan leaves: a pinned pool that is scaled or stays, or one capped at the reserve."""
    kind = dice.choice(("scaled", "scaled", "scaled", "capped", "pinned"))
    windows = dice.choice((1, 2, 2, 3, 3, 4)) if kind == "scaled" else 1
    spec, arena = _expert_card(dice, capped=kind == "capped", single=kind == "scaled" and windows == 1)
    shape = Shape(model="simulated", gpu_memory_utilization=_EXPERT_UTIL, max_num_seqs=windows)
    ladder = replace(LADDER, windows=windows)
    rate, block = spec.kv_bytes_per_token, spec.block_size

    def planned(overhead: int) -> MockDevice:
        return replace(spec, arena=replace(arena, overhead_planned=overhead))

    if kind == "capped":
        # the reserve of a window is taken from the slots, of which there are too few in the end
        return planned(largest(spec.device_total, lambda size: _boots(planned(size), shape, end))), shape, ladder
    if kind == "pinned":
        shape = shape.merged(kv_cache_memory_bytes=int(rate * (end + block)) + 1)
        at_end, tried = shape, float(FLOOR)
    else:
        # what somebody booted: a window that surely serves, with a pool that holds it and a little more
        window = dice.randrange(FLOOR, max(FLOOR + 1, int(min(end, CEILING))), QUANTUM)
        pool = int(rate * windows * window * dice.uniform(1.0, 1.01)) + 2 * block * rate
        shape = shape.merged(max_model_len=window, kv_cache_memory_bytes=pool)
        ladder = replace(ladder, pool="scaled")
        at_end, tried = shape.merged(kv_cache_memory_bytes=int(pool * end / window)), end
    # what the plan keeps for overhead and graphs beyond the real ones is what the pool can take
    most = largest(spec.device_total, lambda size: not _refused(planned(size), at_end, tried))
    free = largest(most, lambda less: _boots(planned(most - less), at_end, tried))
    return planned(most - free), shape, ladder


def _expert_card(dice: random.Random, *, capped: bool, single: bool) -> tuple[MockDevice, Arena]:
    """A card with an arena on which everything fits; ``single``: a pool of one window takes more than the plan has."""
    rate = int(dice.uniform(6e3, 20e3))
    registry = int(rate * (dice.uniform(1.0, 1.2) if capped else dice.uniform(0.8, 1.2)) * (0.6 if single else 1))
    arena = Arena(
        slot_bytes=int(dice.uniform(1.2, 2.4) * MIB),
        slots_min=dice.choice((800, 1584)),
        registry_bytes_per_token=registry,
        overhead_planned=0,
        overhead_real=int(dice.uniform(2, 3) * GIB),
    )
    weights = int(dice.uniform(4, 8) * GIB)
    least = weights + 8 * GIB + arena.slots_min * arena.slot_bytes + 2 * registry * CEILING
    total = int(dice.uniform(1.5, 3) * least)
    spec = MockDevice(
        dialect="rdna4",
        device_total=total,
        free_at_start=int(total * (_EXPERT_UTIL + dice.uniform(0.3, 1) * (1 - _EXPERT_UTIL))),
        weights=weights,
        activation_base=256 * MIB,
        activation_per_batched_token=0,
        graph_base=int(dice.uniform(0.02, 0.3) * GIB),
        graph_per_size=int(dice.uniform(1, 20) * MIB),
        graph_estimate=dice.choice((0.5, 1.0, 1.5, 4.0)),
        kv_bytes_per_token=rate,
        block_size=dice.choice((16, 32)),
        arena=arena,
        native_max_model_len=2 * CEILING,
    )
    return spec, arena


def _refused(spec: MockDevice, shape: Shape, end: float) -> bool:
    argv, environ = command_of(shape.merged(max_model_len=int(end)))
    return rehearse(spec, argv, environ).phase == "argument"


def neuron(dice: random.Random, end: float) -> Made:
    """A window that meets the KV check, the compiler's limit or the runtime's first, in either budget mode."""
    platform, binding = dice.choice(_PLATFORMS), dice.choice(("kv", "kv", "kv", "compile", "compile", "load"))
    stack = STACK_BYTES[platform]
    kv = int(dice.uniform(0.08, 0.3) * stack)
    tokens = end * (1.0 if binding == "kv" else dice.uniform(1.1, 2.5))
    rate = max(1, int(kv / tokens))
    weights = int(dice.uniform(0.1, 0.3) * stack)
    compiler = Compile(
        scratch_base=int(dice.uniform(0.01, 0.05) * stack),
        scratch_per_token=int(dice.uniform(0.15, 1.0) * kv / max(end, FLOOR)),
        load_extra=int(dice.uniform(0.01, 0.04) * stack),
        min_kv=min(GIB, kv // 2),
        prints_numbers=dice.random() < 0.8,
    )
    spec = MockDevice(
        dialect="neuron",
        platform=platform,
        weights=weights,
        non_torch=512 * MIB,
        activation_base=64 * MIB,
        activation_per_batched_token=0,
        kv_bytes_per_token=rate,
        block_size=dice.choice((16, 32)),
        compile=compiler,
        native_max_model_len=2 * CEILING,
    )
    shape = Shape(model="simulated", max_num_seqs=dice.choice((1, 2, 4)), reserved_headroom=stack - weights - kv)
    if binding == "compile":
        limit = stack - largest(stack, lambda less: _boots(_compiled(spec, limit=stack - less), shape, end))
        return _compiled(spec, limit=limit), shape, LADDER
    if binding == "load":
        least = stack - largest(stack, lambda less: _boots(_compiled(spec, allocatable=stack - less), shape, end))
        return _compiled(spec, allocatable=least), shape, LADDER
    # one block is never handed out
    return spec, shape.merged(reserved_headroom=stack - weights - kv - rate * spec.block_size), LADDER


def _compiled(spec: MockDevice, **limits: int) -> MockDevice:
    return replace(spec, compile=replace(spec.compile or Compile(), **limits))


MAKERS: Final[dict[str, Callable[[random.Random, float], Made]]] = {
    "plain": plain,
    "hybrid": hybrid,
    "offload": offload,
    "neuron": neuron,
    "cpu": cpu,
}
