"""Boots to a proven answer for the three strategies on random simulated devices.

Run as ``python -m tests.benchmarks.search_boots [DEVICES]``: prints a table, exits 1 when any answer was wrong. The
devices below are simple physics of their own: they share no arithmetic with the search, and a strategy sees only what
an engine would print, to the digits it would print.
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass
from statistics import fmean
from typing import Final, Literal

from pytest_kvbudget.ledger.model import Cause
from pytest_kvbudget.search.bracket import boot_bound
from pytest_kvbudget.search.ladder import Ladder
from pytest_kvbudget.search.model import Axis, Hint, Limit, Trial
from pytest_kvbudget.search.strategies import STRATEGIES
from pytest_kvbudget.verdict import FindingKind, Phase, Verdict

GIB: Final = 2**30
MIB: Final = 2**20
AXIS: Final = Axis(name="max_model_len", floor=4096, ceiling=262_144, quantum=4096)

Family = Literal["plain", "hybrid", "offload", "neuron", "cpu"]
FAMILIES: Final[tuple[Family, ...]] = ("plain", "hybrid", "offload", "neuron", "cpu")
Lie = Literal["none", "absent", "factor", "huge", "negative", "alternating"]
LIES: Final[tuple[Lie, ...]] = ("absent", "factor", "huge", "negative", "alternating")


@dataclass(frozen=True)
class Device:
    """One device and the engine on it; bytes."""

    family: Family
    room: float
    """What is left for all that the window moves, and for the graphs."""
    rate: float
    """KV bytes of one token."""
    state: float
    """Fixed bytes of the sequences' state."""
    per_window_token: float
    """Activation bytes that grow with the window (no chunked prefill)."""
    graphs: float
    graphs_charged: float
    """What the engine believes the graphs take."""
    prints_numbers: bool
    lie: Lie
    factor: float
    block: int = 16


def random_device(family: Family, seed: int) -> Device:
    """A device whose boundary lies anywhere on the axis: 5 % pass the ceiling, 1.5 % pass nothing."""
    dice = random.Random(f"{family} {seed}")
    rate = dice.uniform(6e3, 120e3)
    state = dice.uniform(0.05, 3) * GIB if family == "hybrid" else 0.0
    drift = rate * dice.uniform(0, 0.3) if family in {"plain", "offload"} and dice.random() < 0.4 else 0.0
    graphs = dice.uniform(0.05, 1) * GIB if family != "cpu" else 0.0
    kind = dice.random()
    target = dice.uniform(AXIS.floor, AXIS.ceiling)
    if kind < 0.05:
        target = AXIS.ceiling * dice.uniform(1.0, 1.6)
    elif kind < 0.065:
        target = AXIS.floor * dice.uniform(0.2, 0.95)
    charged = graphs * dice.choice((1.0, 1.0, 1.2, 2.0)) if family in {"plain", "hybrid"} else graphs
    return Device(
        family=family,
        room=(rate + drift) * target + state + charged,
        rate=rate,
        state=state,
        per_window_token=drift,
        graphs=graphs,
        graphs_charged=charged,
        prints_numbers=family != "neuron" or dice.random() < 0.6,
        lie=dice.choice(LIES) if dice.random() < 0.2 else "none",
        factor=dice.choice((0.3, 0.5, 0.8, 1.25, 2.0, 3.0)),
        block=dice.choice((272, 528, 1056)) if family == "hybrid" else dice.choice((16, 32, 128)),
    )


def passes(device: Device, window: int) -> bool:
    """The truth about one window."""
    blocks = math.ceil(window / device.block)
    kv = device.rate * device.block * blocks + device.state
    return kv <= device.room - device.graphs_charged - device.per_window_token * window


def boot(device: Device, window: int, number: int) -> Trial:
    """What a boot shows: the verdict, and what the engine printed about it."""
    good = passes(device, window)
    hint = _honest(device, window, good)
    phase = Phase.GRAPH_CAPTURE if device.family in {"offload", "neuron"} else Phase.KV_CHECK
    cause = None if good else Cause(phase=phase, failure_class="simulated", sentence="does not fit")
    return Trial(
        value=window,
        verdict=Verdict.PASS if good else Verdict.FAIL,
        hint=_bent(device, hint, number),
        cause=cause,
    )


def _honest(device: Device, window: int, good: bool) -> Hint:
    """Figures as engines print them: GiB to two decimals, tokens exactly, an allocator's request only as a bound."""
    available = device.room - device.graphs_charged - device.per_window_token * window
    need = device.rate * device.block * math.ceil(window / device.block) + device.state
    if device.family in {"offload", "neuron"}:
        return _outside_view(device, window, available - need)
    if good:
        tokens = int(available / need * window)
        shown = _gib(available)
        per_token = shown / tokens
        return Hint(
            limits=(
                Limit(
                    name="kv",
                    margin_bytes=(tokens - window) * per_token,
                    bytes_per_unit=per_token,
                    precision_bytes=per_token,
                ),
            )
        )
    shown, shown_need = _gib(available), _gib(need)
    if shown <= 0:
        return Hint()
    whole = int((available - device.state) / device.rate / device.block) * device.block
    half = 0.005 * GIB
    limit = Limit(
        name="kv",
        margin_bytes=shown - shown_need,
        bytes_per_unit=shown_need / window,
        precision_bytes=half * (1 + min(1.0, shown / shown_need)),
    )
    return Hint(limits=(limit,), estimate=whole if whole > 0 else None)


def _outside_view(device: Device, window: int, margin: float) -> Hint:
    """A pool that is scaled with the window: free memory of a passing boot, a failed allocation of a failing one."""
    if margin >= 0:
        shown = round(margin / MIB) * MIB
        limit = Limit(name="device", margin_bytes=shown, bytes_per_unit=device.rate, precision_bytes=MIB / 2)
        return Hint(limits=(limit,)) if device.prints_numbers or device.family == "neuron" else Hint()
    if not device.prints_numbers:
        return Hint()
    # the pool itself is one allocation, with the graphs still to come; a near miss is a small one among many
    pool_fails = -margin > 0.5 * GIB
    deficit = max(-margin - device.graphs, 10 * MIB) if pool_fails else min(-margin, 76 * MIB)
    return Hint(limits=(Limit(name="device", margin_bytes=-deficit, bytes_per_unit=device.rate, at_least=True),))


def _gib(size: float) -> float:
    return round(size / GIB, 2) * GIB


def _bent(device: Device, hint: Hint, number: int) -> Hint:
    """The hint as a device that misleads gives it."""
    if device.lie == "none":
        return hint
    if device.lie == "absent":
        return Hint()
    factor = {
        "factor": device.factor,
        "huge": 1e9,
        "negative": -1.0,
        "alternating": device.factor ** (-1) ** number,
    }[device.lie]
    return Hint(
        limits=tuple(
            Limit(
                name=limit.name,
                margin_bytes=limit.margin_bytes * factor,
                bytes_per_unit=limit.bytes_per_unit,
                precision_bytes=limit.precision_bytes,
                at_least=limit.at_least,
            )
            for limit in hint.limits
        ),
        estimate=None if hint.estimate is None else int(hint.estimate * factor),
    )


def truth(device: Device) -> tuple[FindingKind, int | None]:
    """The finding that an exhaustive check of every rung gives."""
    rungs = [AXIS.value(index) for index in range(len(AXIS))]
    good = [value for value in rungs if passes(device, value)]
    if good != rungs[: len(good)]:
        raise AssertionError(f"{device} is not monotone")
    if not good:
        return FindingKind.EMPTY, None
    return (FindingKind.CEILING_REACHED if len(good) == len(rungs) else FindingKind.PROVEN), good[-1]


def climb(device: Device, strategy: str) -> tuple[int, bool]:
    """Boots to the finding, and whether it is the truth."""
    ladder = Ladder(AXIS, STRATEGIES[strategy])
    number = 0
    while (ask := ladder.next()) is not None:
        number += 1
        ladder.tell(boot(device, ask.value, number))
    finding = ladder.finding()
    return finding.boots, (finding.kind, finding.value) == truth(device)


def main(devices: int = 200) -> int:
    """Print the table; the exit status."""
    print(f"{devices} random devices, {len(AXIS)} rungs, bound for predict {boot_bound(AXIS)}; simulated")
    print(f"{'strategy':10}{'mean':>7}{'p95':>5}{'most':>6}{'x predict':>11}{'wrong':>7}   mean by family")
    wrong_at_all, base = 0, 0.0
    for strategy in STRATEGIES:
        boots: dict[Family, list[int]] = {family: [] for family in FAMILIES}
        wrong = 0
        for seed in range(devices):
            family = FAMILIES[seed % len(FAMILIES)]
            count, right = climb(random_device(family, seed), strategy)
            boots[family].append(count)
            wrong += not right
        every = sorted(count for counts in boots.values() for count in counts)
        mean = fmean(every)
        base = base or mean
        families = "  ".join(f"{family} {fmean(counts):.2f}" for family, counts in boots.items() if counts)
        p95 = every[math.ceil(0.95 * len(every)) - 1]
        print(f"{strategy:10}{mean:7.2f}{p95:5}{every[-1]:6}{mean / base:11.2f}{wrong:7}   {families}")
        wrong_at_all += wrong
    return 1 if wrong_at_all else 0


if __name__ == "__main__":
    sys.exit(main(*(int(argument) for argument in sys.argv[1:])))
