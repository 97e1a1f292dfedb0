"""Random devices whose boundary lies anywhere on the axis, and what such a device may mislead with."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Final, Literal

from tests.benchmarks.devices.gpu import Gpu, Offload
from tests.benchmarks.devices.model import GIB, MIB, Device
from tests.benchmarks.devices.neuron import Neuron, NeuronHeadroom

FLOOR: Final = 4096
CEILING: Final = 262_144
SWEEP_GIB: Final = 30
FAMILIES: Final = ("plain", "hybrid", "offload", "neuron", "cpu")
Lie = Literal["none", "absent", "factor", "huge", "negative", "alternating"]
LIES: Final[tuple[Lie, ...]] = ("absent", "factor", "huge", "negative", "alternating")
LIE_FACTORS: Final = (0.3, 0.5, 0.8, 1.25, 2.0, 3.0)
MISLEADING: Final = 0.2
ABOVE_CEILING: Final = 0.05
NOTHING: Final = 0.015
PRINTS_NUMBERS: Final = 0.8
"""NCC_EOOM002 states its bytes; seldom the compiler's own output does not reach the log."""


@dataclass(frozen=True)
class Case:
    """A device and how its hints mislead."""

    device: Device
    lie: Lie
    factor: float
    seed: str


def case(family: str, seed: int) -> Case:
    """The same device for the same family and seed, on every machine."""
    name = f"{family} {seed}"
    dice = random.Random(name)
    make = {"plain": plain, "hybrid": hybrid, "offload": offload, "neuron": neuron, "cpu": cpu, "sweep": headroom}
    device = make[family](dice)
    lie = dice.choice(LIES) if dice.random() < MISLEADING else "none"
    return Case(device, lie, dice.choice(LIE_FACTORS), name)


def target(dice: random.Random) -> float:
    """Where the boundary is to be, in tokens."""
    kind = dice.random()
    if kind < ABOVE_CEILING:
        return CEILING * dice.uniform(1.0, 1.6)
    if kind < ABOVE_CEILING + NOTHING:
        return FLOOR * dice.uniform(0.2, 0.95)
    return dice.uniform(FLOOR, CEILING)


def _gpu(dice: random.Random, family: str, block: int, state_blocks: int) -> Gpu:
    end = target(dice)
    rate = dice.uniform(6e3, 120e3)
    drift = rate * dice.uniform(0, 0.3) if dice.random() < 0.4 else 0.0
    graphs = dice.uniform(0.05, 1) * GIB
    charged = graphs * dice.choice((1.0, 1.0, 1.2, 2.0))
    resident, activation = dice.uniform(4, 60) * GIB, dice.uniform(0.3, 4) * GIB
    util = dice.choice((0.85, 0.9, 0.92, 0.95))
    used = resident + activation + charged + drift * end + rate * (end + state_blocks * block)
    device = Gpu(
        family=family,
        total=used / util,
        util=util,
        resident=resident,
        activation=activation,
        per_window_token=drift,
        rate=rate,
        block=block,
        state_blocks=state_blocks,
        seqs=dice.choice((1, 2, 4)),
        graphs=graphs,
        charged=charged,
    )
    return _blocked(dice, device) if end < FLOOR else device


def _blocked(dice: random.Random, device: Gpu) -> Gpu:
    """One of the ways in which no window helps."""
    if device.state_blocks and dice.random() < 0.5:
        return replace(device, seqs=4096, total=device.total * 1.3)
    if dice.random() < 0.5:
        # more graphs than the share outside utilization holds, and uncharged
        return replace(device, total=device.total * 1.4, charged=0.0, graphs=device.total)
    return device


def plain(dice: random.Random) -> Device:
    """Attention only, blocks of 16, 32 or 128 tokens."""
    return _gpu(dice, "plain", dice.choice((16, 32, 128)), 0)


def hybrid(dice: random.Random) -> Device:
    """Blocks that hold a state: 272 to 2,096 tokens, one more for each sequence."""
    return _gpu(dice, "hybrid", dice.choice((272, 528, 1056, 2096)), 1)


def cpu(dice: random.Random) -> Device:
    """A pinned pool on a CPU host, one block of it kept back."""
    end, rate, block = target(dice), dice.uniform(6e3, 120e3), dice.choice((16, 32, 128))
    return Gpu(
        family="cpu",
        total=64 * GIB,
        util=0.9,
        resident=2 * GIB,
        activation=0.0,
        per_window_token=0.0,
        rate=rate,
        block=block,
        state_blocks=0,
        seqs=1,
        graphs=0.0,
        charged=0.0,
        pinned=float(int(rate * (end + block))),
        minutes=(0.8, 1.0),
    )


def offload(dice: random.Random) -> Device:
    """A pool that grows faster with the window than the plan's reserve takes from the arena."""
    end, rate, windows = target(dice), dice.uniform(6e3, 20e3), dice.choice((1, 2, 2, 3, 3, 4))
    registry = rate * dice.uniform(0.8, 1.2)
    if windows == 1:
        registry *= 0.6
    slot, graphs = dice.uniform(1.2, 2.4) * MIB, dice.uniform(0.05, 0.4) * GIB
    charged = graphs * dice.choice((0.5, 1.0, 1.5, 4.0))
    overhead, util = dice.uniform(2, 3) * GIB, dice.choice((0.95, 0.98, 0.982))
    non_expert, slots_min = dice.uniform(4, 8) * GIB, 1584
    # the plan's own floor binds sometimes: then the window is what leaves too little for the arena
    if dice.random() < 0.05:
        planned = overhead + 30 * GIB
        used = non_expert + 1.08 * registry * end + charged + planned + slots_min * slot
        total = used / util
    else:
        # what the plan keeps for overhead and graphs beyond the real ones is what the pool can take
        total = dice.uniform(1.2, 3) * (non_expert + 1.08 * registry * max(end, CEILING) + overhead + slots_min * slot)
        spare = (windows * rate * 1.002 - 1.08 * registry) * end - total * (1 - util)
        planned = overhead + graphs - charged + spare
    return Offload(
        family="offload",
        total=total,
        util=util,
        non_expert=non_expert,
        registry_rate=registry,
        rate=rate,
        windows=windows,
        slot=slot,
        slots_min=slots_min,
        graphs=graphs,
        charged=charged,
        overhead=overhead,
        planned=planned,
    )


def neuron(dice: random.Random) -> Device:
    """A window that meets the KV check, the compiler's limit or the runtime's first."""
    end, rate = target(dice), dice.uniform(6e3, 60e3)
    # the budget is fixed before the window is known, so the KV check binds as often as all that is compiled and loaded
    binding = dice.choice(("kv", "kv", "kv", "compile", "compile", "load"))
    base, per_kv, extra = dice.uniform(0.2, 2) * GIB, dice.uniform(0, 0.08), dice.uniform(0.3, 1.5) * GIB
    kv = rate * end * (1.0 if binding == "kv" else dice.uniform(1.1, 2.5))
    tokens = end * (dice.uniform(1.1, 2.5) if binding == "kv" else 1.0)
    per_token = dice.uniform(0.15, 1.0) * rate
    weights = dice.uniform(2, 8) * GIB
    # what the programs need at the window that binds; the other limit is somewhat further away
    peak = weights + kv + base + per_token * tokens + per_kv * kv
    spare = dice.uniform(0.2, 3) * GIB
    core = peak + (spare if binding == "load" else 0.0)
    allocatable = peak + extra + (0.0 if binding == "load" else spare)
    headroom_bytes = core - weights - kv
    return Neuron(
        family="neuron",
        core=core,
        limit=core,
        weights=weights,
        headroom=headroom_bytes,
        minimum=min(float(GIB), kv / 2),
        rate=rate,
        scratch_base=base,
        scratch_per_token=per_token,
        scratch_per_kv=per_kv,
        load_extra=extra,
        allocatable=allocatable,
        prints_numbers=dice.random() < PRINTS_NUMBERS,
        minutes=(dice.uniform(1.5, 4), dice.uniform(4, 40), dice.uniform(1, 4)),
    )


def headroom(dice: random.Random) -> Device:
    """A core of 36 GiB whose smallest headroom that passes lies anywhere from 0 to 30 GiB."""
    core, minimum = 36.0 * GIB, 1.0 * GIB
    kind, wanted = dice.random(), dice.uniform(0.1, SWEEP_GIB) * GIB
    # any weights that leave the minimum beside that headroom, or leave a little less than it
    most = core - minimum - wanted
    weights = most + dice.uniform(0.1, 2) * GIB if kind > 1 - NOTHING else dice.uniform(0.5 * GIB, most)
    kv = core - weights - wanted
    extra, by_load = dice.uniform(0.3, 1.5) * GIB, wanted > 3 * GIB and dice.random() < 0.5
    # at the headroom that just passes, programs take exactly what it reserves
    scratch = wanted - (extra + 0.5 * GIB if by_load else 0.0)
    per_kv = min(dice.uniform(0, 0.15), 0.8 * scratch / max(kv, 1.0)) if kv > 0 else 0.0
    device = Neuron(
        family="sweep",
        core=core,
        # where two logical cores share a stack, one program may take more than its share
        limit=core * 2 if kind < ABOVE_CEILING else core,
        weights=weights,
        headroom=0.0,
        minimum=minimum,
        rate=1024.0,
        scratch_base=scratch - per_kv * max(kv, 0.0),
        scratch_per_token=0.0,
        scratch_per_kv=per_kv,
        load_extra=extra,
        allocatable=core - 0.5 * GIB
        if by_load and kind >= ABOVE_CEILING
        else core + extra + dice.uniform(0.1, 2) * GIB,
        prints_numbers=dice.random() < PRINTS_NUMBERS,
        minutes=(dice.uniform(1.5, 4), dice.uniform(4, 40), dice.uniform(1, 4)),
    )
    return NeuronHeadroom(device)
