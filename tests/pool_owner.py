"""A process with a pool of four simulated cards, for tests that kill it or run two of them. Run as a script.

Arguments: folder, mode. ``hang``: two boots that never come up, then wait to be killed. ``rounds``: as many boots at
once as there are free cards, again and again until the file ``enough`` is there, at least once.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from pytest_kvbudget.archive import RunArchive
from pytest_kvbudget.config import Limits, LoadedTarget, Target
from pytest_kvbudget.mock.spec import MockDevice
from pytest_kvbudget.pool import EnginePool
from pytest_kvbudget.records import RunInfo
from pytest_kvbudget.request import BootRequest
from pytest_kvbudget.shape import Shape

FOLDER, MODE = Path(sys.argv[1]), sys.argv[2]
SHAPE = Shape(model="simulated", max_model_len=4096)


def make_pool(command: tuple[str, ...] | None) -> EnginePool:
    target = Target(
        backend="mock", devices=(0, 1, 2, 3), shape=SHAPE, command=command,
        limits=Limits(release_seconds=20, lease_seconds=60), mock=MockDevice(sysfs=str(FOLDER / "sysfs")),
    )  # fmt: skip
    loaded = LoadedTarget(name="t", target=target, origin="test", folder=str(FOLDER), environment={})
    info = RunInfo(run=f"run-{os.getpid()}", host="h", plugin_version="0", python_version="3")
    return EnginePool(loaded, RunArchive(FOLDER / "archive", info))


def hang() -> None:
    pool = make_pool((sys.executable, str(Path(__file__).with_name("doorman.py"))))
    pool.reserve(SHAPE, 2)
    print("begins", flush=True)
    for name in ("one", "two"):
        environment = {"DOORMAN_FOLDER": str(FOLDER), "DOORMAN_NAME": name, "DOORMAN_WAITS_FOR": "nobody"}
        pool.start(BootRequest(test="t", shape=SHAPE.merged(env=environment), rung=name))
    signal.pause()


def rounds() -> None:
    pool = make_pool(None)
    while True:
        sets = pool.reserve(SHAPE, 4)
        boots = [pool.start(BootRequest(test="t", shape=SHAPE, rung=str(number))) for number in range(sets)]
        verdicts = {str(pool.finish(boot).record.verdict) for boot in boots}
        for boot in boots:
            pool.retire(boot.attempt)
        print(sets, *verdicts, flush=True)
        if (FOLDER / "enough").exists():
            break
    pool.close()


{"hang": hang, "rounds": rounds}[MODE]()
