"""The search on simulated engines: boots to a proven answer where hints come only from their logs and their memory.

Run as ``python -m tests.benchmarks.search_processes [DEVICES]`` (1,000 random targets of each family by default). Every
finding is held against a boot of every rung, and one boot in a hundred is made once more as real processes. One target
of a configuration file is checked with ``--target NAME --config FILE --axis max_model_len --floor N --ceiling N
--quantum N``. Exits 1 when a finding is wrong, or processes did otherwise than the rehearsal. Everything is simulated.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Final

from pytest_kvbudget.config import load
from pytest_kvbudget.question import Known
from pytest_kvbudget.search.model import Prior
from pytest_kvbudget.specs import AXES, check_spec
from tests.benchmarks.devices.exhaustive import Truth, disagreement, truth
from tests.benchmarks.devices.odd import odd
from tests.benchmarks.devices.processes import difference, in_processes
from tests.benchmarks.devices.rehearsed import Bench, climb
from tests.benchmarks.devices.targets import MAKERS, Subject, subject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_kvbudget.config import LoadedTarget
    from pytest_kvbudget.specs import LadderSpec
    from tests.benchmarks.devices.rehearsed import Booted, Climbed

PRIORS: Final = {"cold": None, "plan": 0.03, "archive": 0.01}
"""What is known beforehand, and what it may be off as a share."""
PROCESSES: Final = 0.01
"""Of the boots, those that are made once more as real processes."""
LEAST_PROCESSES: Final = 20
"""Of a family."""
ODD: Final = "odd"
"""Targets that mix everything, with ladders over every axis."""


@dataclass(frozen=True)
class Row:
    """What came of one search."""

    way: str
    search: int
    """Boots of the search."""
    more: int
    """Boots that repeated one, for noise, a cold cache or a pool that was short, and of a scaled pool's reference."""
    first: int
    """Boots that a device tree of its own could make: with an empty compile cache."""
    raised: bool
    """The quantum was raised."""
    wrong: str | None


def target(family: str, seed: int) -> Subject:
    """A random target."""
    return odd(seed) if family == ODD else subject(family, seed)


def searched(family: str, seed: int) -> list[Row]:
    """Climb one random target in every way; an odd one knowing nothing."""
    chosen = target(family, seed)
    real, bench = truth(chosen.loaded, chosen.ladder), Bench(chosen.loaded)
    ways = ["cold"] if family == ODD else list(PRIORS)
    return [_row(way, chosen, climb(bench, chosen.ladder, known(way, chosen, real)), real) for way in ways]


def known(way: str, chosen: Subject, real: Truth) -> Known:
    """A plan or an archive that is right within so much of where the boundary is, as a test would have it."""
    relative = PRIORS[way]
    if relative is None:
        return Known()
    good = sum(chance == 1 for chance in real.chances.values())
    axis = chosen.ladder.rungs
    # where the boundary was put, unless something else on the device comes first
    end = chosen.end if axis.index_at_or_below(chosen.end) == good - 1 else axis.floor + (good - 0.5) * axis.quantum
    said = end * (1 + random.Random(f"{way} {chosen.name}").uniform(-relative, relative))
    return Known(prior=Prior(value=said, relative=relative, source="plan" if way == "plan" else "archive"))


def _row(way: str, chosen: Subject, climbed: Climbed, real: Truth) -> Row:
    found = climbed.finding
    wrong = disagreement(found, real)
    more = found.repeats + found.retries + climbed.references
    return Row(
        way,
        found.boots - more,
        more,
        len(first_boots(climbed)),
        found.axis.quantum > chosen.ladder.quantum,
        None if wrong is None else f"{way} {chosen.name}: {wrong} ({found.sentence})",
    )


def as_processes(family: str, seed: int, places: Sequence[int]) -> list[str | None]:
    """Make some boots of a cold climb once more as processes; what each did otherwise, ``None`` for nothing."""
    chosen = target(family, seed)
    boots = first_boots(climb(Bench(chosen.loaded), chosen.ladder))
    found = []
    for place in places:
        told = difference(boots[place].record, in_processes(chosen.loaded, boots[place]))
        found.append(None if told is None else f"{chosen.name}: {told}")
    return found


def first_boots(climbed: Climbed) -> list[Booted]:
    """Those that met an empty compile cache, as they do on a device tree of their own."""
    return [booted for booted in climbed.boots if booted.request.number == 1 and booted.record.warm is not True]


def chosen_boots(family: str, first: Sequence[int]) -> dict[int, list[int]]:
    """By device, which of its boots to make as processes: the same ones on every machine.

    Args:
        family: of the devices.
        first: by device, how many of its boots could be chosen.
    """
    every = [(seed, place) for seed, count in enumerate(first) for place in range(count)]
    wanted = min(len(every), max(LEAST_PROCESSES, math.ceil(PROCESSES * len(every))))
    found: dict[int, list[int]] = {}
    for seed, place in sorted(random.Random(f"processes {family}").sample(every, wanted)):
        found.setdefault(seed, []).append(place)
    return found


# -- the table


def main(devices: int) -> int:
    """Print the table; the exit status."""
    print(f"{devices} random targets of each family, rehearsed: hints from logs and memory only; simulated")
    with ProcessPoolExecutor(os.cpu_count()) as workers:
        rows = {
            family: list(workers.map(searched, [family] * devices, range(devices), chunksize=4))
            for family in (*MAKERS, ODD)
        }
        wrong = _table(rows)
        differ: list[str] = []
        made = 0
        for family, found in rows.items():
            picked = chosen_boots(family, [ways[0].first for ways in found])
            told = workers.map(as_processes, [family] * len(picked), picked, picked.values(), chunksize=1)
            results = [result for several in told for result in several]
            made += len(results)
            differ += [result for result in results if result is not None]
    print(f"{made} boots also as real processes: {made - len(differ)} with the same verdict, cause and hint")
    for fault in [*wrong, *differ][:10]:
        print(f"wrong: {fault}")
    print(f"wrong {len(wrong) + len(differ)}")
    return 1 if wrong or differ else 0


def _table(rows: dict[str, list[list[Row]]]) -> list[str]:
    """Print what the searches took; what of them is wrong."""
    names = (*MAKERS, "p95", "neuron95", "raised", "wrong")
    print(f"{'boots':9}" + "".join(f"{name:>13}" for name in names))
    wrong = []
    for place, way in enumerate(PRIORS):
        wrong += _line(way, {family: [row[place] for row in rows[family]] for family in MAKERS})
    mixed = [row for ways in rows[ODD] for row in ways]
    faults = [row.wrong for row in mixed if row.wrong is not None]
    print(f"{len(mixed)} odd targets, every axis: {_mean(mixed)} boots, wrong {len(faults)}")
    return wrong + faults


def _line(way: str, rows: dict[str, list[Row]]) -> list[str]:
    """Print one line; what of it is wrong. Boots of the search first, then all of them."""
    others = sorted(row.search for family, found in rows.items() if family != "neuron" for row in found)
    every = [row for found in rows.values() for row in found]
    wrong = [row.wrong for row in every if row.wrong is not None]
    texts = [_mean(found) for found in rows.values()]
    texts += [
        str(_p95(others)),
        str(_p95(sorted(row.search for row in rows["neuron"]))),
        f"{100 * fmean(row.raised for row in every):.0f} %",
        str(len(wrong)),
    ]
    print(f"{way:9}" + "".join(f"{text:>13}" for text in texts))
    return wrong


def _mean(rows: Sequence[Row]) -> str:
    """Boots of the search, and all of them."""
    return f"{fmean(row.search for row in rows):.2f} ({fmean(row.search + row.more for row in rows):.2f})"


def _p95(counts: Sequence[int]) -> int:
    return counts[math.ceil(0.95 * len(counts)) - 1]


# -- one target


def check(loaded: LoadedTarget, ladder: LadderSpec) -> int:
    """Climb one target, boot every rung, and say whether they agree; the exit status."""
    real, climbed = truth(loaded, ladder), climb(Bench(loaded), ladder)
    axis = ladder.rungs
    passing = [value for value, chance in sorted(real.chances.items()) if chance >= 0.5]
    span = "none" if not passing else f"{axis.show(passing[0])} to {axis.show(passing[-1])}"
    shape = "a boundary" if real.certain and real.monotone else "no single boundary"
    print(f"every rung: {len(passing)} of {len(axis)} pass, {span}; {shape}; simulated")
    print(f"finding: {climbed.finding.sentence}")
    wrong = disagreement(climbed.finding, real)
    print("they agree" if wrong is None else f"wrong: {wrong}")
    return 0 if wrong is None else 1


def command(argv: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="search_processes", description=__doc__)
    parser.add_argument("devices", type=int, nargs="?", default=1000)
    parser.add_argument("--config", type=Path, default=Path("kvbudget.toml"))
    parser.add_argument("--target", help="check this target alone")
    parser.add_argument("--axis", choices=AXES, default="max_model_len")
    parser.add_argument("--floor", help="as in a ladder's mark: 4096, '1 GiB', 0.5")
    parser.add_argument("--ceiling")
    parser.add_argument("--quantum")
    parser.add_argument("--pool", choices=("fixed", "scaled"), default="fixed")
    parser.add_argument("--windows", type=int, default=1)
    options = parser.parse_args(argv)
    if options.target is None:
        return main(options.devices)
    texts = {"start": options.ceiling, "floor": options.floor, "quantum": options.quantum}
    numbers = {name: int(text) if text.isdecimal() else text for name, text in texts.items() if text is not None}
    ladder = check_spec({"axis": options.axis, "pool": options.pool, "windows": options.windows, **numbers})
    return check(load(options.config).pick(options.target), ladder)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
