"""The table of the search: boots, rounds and minutes to a proven answer, and how often it is wrong.

Run as ``python -m tests.benchmarks.search_table [DEVICES]`` (1,000 of each family by default). Prints the table and
exits 1 when an answer is wrong or a figure misses its goal, which is marked. Everything is simulated.
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING, Final

from pytest_kvbudget.search.bracket import boot_bound
from pytest_kvbudget.search.knobs import KNOBS
from pytest_kvbudget.search.ladder import Ladder
from pytest_kvbudget.search.model import Axis, Prior
from pytest_kvbudget.search.noise import Noise
from pytest_kvbudget.search.predict import Predict
from pytest_kvbudget.search.strategies import SWEEP_STRATEGIES, Bisect, Step
from pytest_kvbudget.search.sweep import Sweep
from pytest_kvbudget.verdict import FindingKind
from tests.benchmarks.devices.families import CEILING, FAMILIES, FLOOR, SWEEP_GIB, Case, case
from tests.benchmarks.devices.model import GIB
from tests.benchmarks.devices.trials import ladder_trial, sweep_trial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pytest_kvbudget.search.model import Strategy

QUANTUM: Final = 4096
AXIS: Final = Axis(name="max_model_len", floor=FLOOR, ceiling=CEILING, quantum=QUANTUM)
HEADROOM: Final = KNOBS["reserved_headroom"]
PLAN, ARCHIVE = 0.03, 0.01
NOISE_QUANTA: Final = 0.2
REPEATS: Final = 8
"""Boots of one key in the archive, for sigma."""
NOISE_WRONG: Final = 0.01


@dataclass
class Runs:
    """What came of many searches of one kind."""

    boots: dict[str, list[int]] = field(default_factory=dict)
    minutes: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, family: str, boots: int, minutes: float, fault: str | None) -> None:
        self.boots.setdefault(family, []).append(boots)
        self.minutes.append(minutes)
        if fault is not None:
            self.wrong.append(fault)

    def mean(self, family: str) -> float:
        return fmean(self.boots[family])

    @property
    def all(self) -> list[int]:
        return sorted(count for counts in self.boots.values() for count in counts)

    def p95(self, families: Iterable[str]) -> int:
        every = sorted(count for family in families for count in self.boots[family])
        return every[math.ceil(0.95 * len(every)) - 1]


# -- the truth, by booting everything


def boundary(subject: Case) -> float:
    """The largest window that serves, to a token; what a perfect plan would say."""
    low, high = 0, 2 * CEILING
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if subject.device.boot(middle).good else (low, middle)
    return float(low)


@cache
def ladder_truth(subject: Case) -> tuple[FindingKind, int | None]:
    """The finding of somebody who boots every rung."""
    rungs = [AXIS.value(index) for index in range(len(AXIS))]
    good = [value for value in rungs if subject.device.boot(value).good]
    if good != rungs[: len(good)]:
        raise AssertionError(f"{subject} is not monotone")
    if not good:
        return FindingKind.EMPTY, None
    return (FindingKind.CEILING_REACHED if len(good) == len(rungs) else FindingKind.PROVEN), good[-1]


@cache
def sweep_truth(subject: Case) -> tuple[FindingKind, int | None]:
    """The same for a headroom."""
    shown = [(value * GIB, subject.device.boot(value * GIB)) for value in range(SWEEP_GIB + 1)]
    good = [value for value, boot in shown if boot.good]
    if good:
        return (FindingKind.PROVEN if good[0] > 0 else FindingKind.FLOOR_REACHED), good[0]
    short = [boot.failure_class == "min_kv_budget" for _, boot in shown]
    return (FindingKind.EMPTY_WINDOW if len(set(short)) == 2 else FindingKind.EMPTY), None


# -- searches


def climb(subject: Case, strategy: Strategy, sets: int = 1) -> tuple[int, int, float, str | None]:
    """Rounds, boots and minutes to the finding, and what is wrong with it."""
    ladder = Ladder(AXIS, strategy)
    rounds, minutes, number = 0, 0.0, 0
    while asks := ladder.next_batch(sets):
        rounds += 1
        shown = [(ask.value, subject.device.boot(ask.value)) for ask in asks]
        minutes += max(boot.minutes for _, boot in shown)
        for value, boot in shown:
            number += 1
            ladder.tell(ladder_trial(subject, value, number, boot))
    found = ladder.finding()
    right = (found.kind, found.value) == ladder_truth(subject)
    return rounds, found.boots, minutes, None if right else f"{subject.seed}: {found.sentence}"


def climb_in_noise(subject: Case) -> tuple[int, float, str | None]:
    """Boots and minutes on a device whose boots differ, and whether its winner passes less than every other time."""
    dice = random.Random(f"noise {subject.seed}")
    per_quantum = _bytes_per_quantum(subject)
    sigma = dice.uniform(0, NOISE_QUANTA) * per_quantum
    noise = Noise.of([dice.gauss(0, sigma) for _ in range(REPEATS)])
    ladder = Ladder(AXIS, Predict(), noise=noise)
    minutes, number = 0.0, 0
    while (ask := ladder.next()) is not None:
        number += 1
        shown = subject.device.boot(ask.value, dice.gauss(0, sigma))
        minutes += shown.minutes
        ladder.tell(ladder_trial(subject, ask.value, number, shown))
    found = ladder.finding()
    if found.proven and found.value is not None:
        # a boot that takes nothing extra is the median one
        wrong = not subject.device.boot(found.value).good
    else:
        kind, _ = ladder_truth(subject)
        wrong = found.kind is FindingKind.EMPTY and kind is not FindingKind.EMPTY
    return found.boots + found.confirmations, minutes, f"{subject.seed}: {found.sentence}" if wrong else None


def _bytes_per_quantum(subject: Case) -> float:
    """What moves a device's boundary by one quantum, in bytes, found by trying."""
    end = boundary(subject)
    if end <= 2 * QUANTUM:
        return 0.0
    low, high = 0.0, 64.0 * GIB
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if subject.device.boot(int(end) - QUANTUM, middle).good else (low, middle)
    return low if low < 63 * GIB else 0.0


def tune(subject: Case, strategy: Strategy | None, start: int | None) -> tuple[int, float, str | None]:
    """Boots and minutes of a headroom sweep from 0 to 30 GiB, and what is wrong with its finding."""
    sweep = Sweep(HEADROOM, lowest=0, highest=SWEEP_GIB * GIB, strategy=strategy, start=start, confirm=0)
    minutes, number = 0.0, 0
    while (ask := sweep.next()) is not None:
        number += 1
        shown = subject.device.boot(ask.value)
        minutes += shown.minutes
        sweep.tell(sweep_trial(subject, HEADROOM, ask.value, number, shown))
    found = sweep.finding()
    right = (found.kind, found.value) == sweep_truth(subject)
    return found.boots, minutes, None if right else f"{subject.seed}: {found.sentence}"


def prior(subject: Case, relative: float, end: float) -> Prior:
    """A plan or an archive that is right within so much."""
    dice = random.Random(f"prior {relative} {subject.seed}")
    said = end * (1 + dice.uniform(-relative, relative))
    return Prior(value=said, relative=relative, source="plan" if relative == PLAN else "archive")


def headroom_plan(subject: Case) -> int:
    """A plan of the headroom, right within 3 % of the core, on the grid."""
    low, high = 0, SWEEP_GIB * GIB
    for _ in range(40):
        middle = (low + high) // 2
        boot = subject.device.boot(middle)
        enough = boot.good or boot.failure_class == "min_kv_budget"
        low, high = (low, middle) if enough else (middle, high)
    dice = random.Random(f"headroom {subject.seed}")
    planned = high + dice.uniform(-PLAN, PLAN) * 36 * GIB
    return min(max(math.ceil(planned / GIB), 0), SWEEP_GIB) * GIB


# -- the table

GOALS: Final[dict[str, dict[str, float]]] = {
    "cold": {"plain": 3.7, "hybrid": 4.0, "offload": 4.0, "neuron": 4.4, "cpu": 3.4, "p95": 7},
    "plan": {"plain": 2.5, "hybrid": 2.5, "offload": 2.6, "neuron": 2.8, "cpu": 2.5, "p95": 4, "p95 neuron": 6},
    "archive": {"plain": 2.3, "hybrid": 2.3, "offload": 2.4, "neuron": 2.5, "cpu": 2.2, "p95": 4, "p95 neuron": 5},
}
ROUND_GOALS: Final = {("cold", 2): 2.7, ("cold", 4): 2.2, ("plan", 2): 1.8, ("plan", 4): 1.3}
SWEEP_GOALS: Final = {"cold": 3.8, "plan": 3.0, "step": 11.2, "bisect": 5.3}


class Table:
    """Prints figures and remembers which missed their goals."""

    def __init__(self) -> None:
        self.missed = 0

    def figure(self, measured: float, goal: float | None) -> str:
        """The figure, marked where the goal (to its one decimal) is missed."""
        late = goal is not None and round(measured, 1) > goal
        self.missed += late
        text = str(measured) if isinstance(measured, int) else f"{measured:.2f}"
        return text + ("!" if late else "")


def main(devices: int = 1000) -> int:
    """Print the table; the exit status."""
    print(f"{devices} random devices of each family, {len(AXIS)} rungs, bound {boot_bound(AXIS)}; simulated")
    subjects = {family: [case(family, seed) for seed in range(devices)] for family in FAMILIES}
    ends = {subject.seed: boundary(subject) for cases in subjects.values() for subject in cases}
    table, wrong = Table(), []
    wrong += ladder_rows(table, subjects, ends)
    wrong += round_rows(table, subjects, ends)
    wrong += sweep_row(table, [case("sweep", seed) for seed in range(devices)])
    noise_row(table, subjects)
    for fault in wrong[:10]:
        print(f"wrong: {fault}")
    print(f"wrong {len(wrong)}, goals missed {table.missed}")
    return 1 if wrong or table.missed else 0


def ladder_rows(table: Table, subjects: dict[str, list[Case]], ends: dict[str, float]) -> list[str]:
    """Boots by family, strategy and what is known beforehand."""
    print(
        f"{'boots':10}" + "".join(f"{name:>9}" for name in (*FAMILIES, "p95", "neuron95", "most", "minutes", "wrong"))
    )
    wrong = []
    ways: dict[str, Callable[[Case], Strategy]] = {
        "cold": lambda _: Predict(),
        "plan": lambda subject: Predict(prior=prior(subject, PLAN, ends[subject.seed])),
        "archive": lambda subject: Predict(prior=prior(subject, ARCHIVE, ends[subject.seed])),
        "step": lambda _: Step(),
        "bisect": lambda _: Bisect(),
    }
    for name, way in ways.items():
        runs = Runs()
        for family, cases in subjects.items():
            for subject in cases:
                _, boots, minutes, fault = climb(subject, way(subject))
                runs.add(family, boots, minutes, fault)
        goals = GOALS.get(name, {})
        split = "p95 neuron" in goals
        figures = [table.figure(runs.mean(family), goals.get(family)) for family in FAMILIES]
        others = [family for family in FAMILIES if family != "neuron" or not split]
        figures += [
            table.figure(runs.p95(others), goals.get("p95")),
            table.figure(runs.p95(["neuron"]), goals.get("p95 neuron")),
            str(runs.all[-1]),
            f"{fmean(runs.minutes):.0f}",
            str(len(runs.wrong)),
        ]
        print(f"{name:10}" + "".join(f"{text:>9}" for text in figures))
        wrong += runs.wrong
    return wrong


def round_rows(table: Table, subjects: dict[str, list[Case]], ends: dict[str, float]) -> list[str]:
    """Rounds where several device sets boot at once."""
    wrong = []
    for (name, sets), goal in ROUND_GOALS.items():
        runs, rounds = Runs(), []
        for family, cases in subjects.items():
            for subject in cases:
                known = prior(subject, PLAN, ends[subject.seed]) if name == "plan" else None
                took, boots, minutes, fault = climb(subject, Predict(prior=known), sets)
                runs.add(family, boots, minutes, fault)
                rounds.append(took)
        print(
            f"rounds {name} with {sets} sets: {table.figure(fmean(rounds), goal)} "
            f"(boots {fmean(runs.all):.2f}, most rounds {max(rounds)}, minutes {fmean(runs.minutes):.0f}, "
            f"wrong {len(runs.wrong)})"
        )
        wrong += runs.wrong
    return wrong


def sweep_row(table: Table, cases: list[Case]) -> list[str]:
    """Boots of a headroom sweep."""
    wrong, texts = [], []
    for name, goal in SWEEP_GOALS.items():
        runs = Runs()
        for subject in cases:
            start = headroom_plan(subject) if name == "plan" else 4 * GIB if name == "step" else None
            runs.add("sweep", *tune(subject, SWEEP_STRATEGIES.get(name), start))
        beaten = goal if name in {"cold", "plan"} else None
        texts.append(f"{name} {table.figure(runs.mean('sweep'), beaten)} ({fmean(runs.minutes):.0f} min)")
        wrong += runs.wrong
    print(f"sweep over 0 to {SWEEP_GIB} GiB at 1 GiB: {', '.join(texts)}; wrong {len(wrong)}")
    return wrong


def noise_row(table: Table, subjects: dict[str, list[Case]]) -> None:
    """Wrong answers where boots differ by up to a fifth of a quantum."""
    runs = Runs()
    for family, cases in subjects.items():
        for subject in cases:
            runs.add(family, *climb_in_noise(subject))
    share = len(runs.wrong) / len(runs.all)
    missed = share > NOISE_WRONG
    table.missed += missed
    print(
        f"noise up to {NOISE_QUANTA} quanta: {fmean(runs.all):.2f} boots, repetitions included; "
        f"{100 * share:.2f} % pass less than every other time{'!' if missed else ''}"
    )


if __name__ == "__main__":
    sys.exit(main(*(int(argument) for argument in sys.argv[1:])))
