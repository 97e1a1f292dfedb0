"""How quickly the end of a boot is noticed, and what we add to its wall time; on the simulated engine.

Prints one table; run it with ``python -m tests.benchmarks.latency``. Goals: death to verdict p95 at most 50 ms, ready
to noticed p95 at most 100 ms, wall time added to a boot of zero seconds at most 250 ms.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pytest_kvbudget.archive import RunArchive, new_run_id
from pytest_kvbudget.config import Limits, LoadedTarget, Target
from pytest_kvbudget.engine.health import Health, free_port, probe
from pytest_kvbudget.mock.spec import Faults, MockDevice
from pytest_kvbudget.pool import EnginePool
from pytest_kvbudget.progress import Snapshot
from pytest_kvbudget.records import RunInfo
from pytest_kvbudget.report.html import write_attempt_page
from pytest_kvbudget.request import BootRequest
from pytest_kvbudget.shape import Shape

REPEATS: Final = 20
SHAPE: Final = Shape(model="simulated", max_model_len=4096)
HOST: Final = "127.0.0.1"
LATE: Final = ("weights_load", "profile")


def pool_in(folder: Path, faults: Faults, port: int) -> EnginePool:
    """A pool on a simulated card whose boots take no time."""
    target = Target(backend="mock", devices=(0,), port=port, shape=SHAPE, limits=Limits(settle_seconds=2),
                    mock=MockDevice(faults=faults, sysfs=str(folder / "sysfs")))  # fmt: skip
    loaded = LoadedTarget(name="bench", target=target, origin="benchmark", folder=str(folder), environment={})
    info = RunInfo(run=new_run_id(), host="bench", plugin_version="0", python_version="3")
    return EnginePool(loaded, RunArchive(folder / "archive", info))


def death_to_verdict(folder: Path) -> list[float]:
    """Seconds from SIGKILL of the root process, half way in a boot, to the verdict."""
    pool = pool_in(folder, Faults(hang_in="profile"), free_port(HOST))
    found = []
    for _ in range(REPEATS):
        killed: list[float] = []
        hanging = threading.Event()

        def kill(pool: EnginePool = pool, killed: list[float] = killed, hanging: threading.Event = hanging) -> None:
            hanging.wait()
            (attempt,) = pool._in_use
            assert attempt._launched is not None
            killed.append(time.monotonic())
            with contextlib.suppress(ProcessLookupError):
                os.kill(attempt._launched.process.root_pid, 9)

        def show_progress(*boots: Snapshot, hanging: threading.Event = hanging) -> None:
            if boots[0].phase in LATE:
                hanging.set()

        pool._progress = show_progress
        thread = threading.Thread(target=kill)
        thread.start()
        attempt = pool.boot(BootRequest(test="death", shape=SHAPE))
        found.append(time.monotonic() - killed[0])
        thread.join()
        pool.retire(attempt)
    pool.close()
    return found


def ready_to_noticed(folder: Path) -> list[float]:
    """Seconds from the first answer of /health to the verdict."""
    port = free_port(HOST)
    pool = pool_in(folder, Faults(), port)
    found = []
    for _ in range(REPEATS):
        first: list[float] = []

        def wait(first: list[float] = first) -> None:
            while probe(HOST, port) is not Health.READY:
                time.sleep(0.001)
            first.append(time.monotonic())

        thread = threading.Thread(target=wait)
        thread.start()
        attempt = pool.boot(BootRequest(test="ready", shape=SHAPE), reuse=False)
        noticed = time.monotonic()
        thread.join()
        found.append(noticed - first[0])
        pool.retire(attempt)
    pool.close()
    return found


def bare(folder: Path, port: int) -> float:
    """Seconds that the engine takes from start to ready to gone, with nobody but this loop."""
    pool = pool_in(folder, Faults(), port)
    command = pool.command(SHAPE)
    pool.close()
    begun = time.monotonic()
    with (folder / "bare.log").open("ab") as log:
        process = subprocess.Popen(command.argv, env=dict(command.env), stdout=log, stderr=log)
        while probe(HOST, port) is not Health.READY:
            time.sleep(0.001)
        process.terminate()
        process.wait()
    return time.monotonic() - begun


def whole(folder: Path, port: int) -> list[float]:
    """Seconds of whole attempts: lease to release, record and page written."""
    pool = pool_in(folder, Faults(), port)
    found = []
    for _ in range(REPEATS):
        begun = time.monotonic()
        attempt = pool.boot(BootRequest(test="whole", shape=SHAPE), reuse=False)
        pool.retire(attempt)
        write_attempt_page(attempt.record_path)
        found.append(time.monotonic() - begun)
    pool.close()
    return found


def show(label: str, seconds: Sequence[float]) -> None:
    """One row: median and 95th percentile in milliseconds."""
    p95 = statistics.quantiles(seconds, n=20)[-1]
    print(f"{label:34}{statistics.median(seconds) * 1e3:>10.1f} ms{p95 * 1e3:>10.1f} ms")


def main() -> int:
    """Print the table; returns an exit status."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["KVBUDGET_LEASE_DIR"] = str(folder / "leases")
        print(f"{REPEATS} boots each{'median':>31}{'p95':>13}")
        show("death to verdict", death_to_verdict(folder))
        show("ready to noticed", ready_to_noticed(folder))
        port = free_port(HOST)
        engine = [bare(folder, port) for _ in range(REPEATS)]
        attempts = whole(folder, port)
        show("engine alone, start to gone", engine)
        show("whole attempt, record and page", attempts)
        added = statistics.median(attempts) - statistics.median(engine)
        print(f"{'added wall time':34}{added * 1e3:>10.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
