"""SIGKILL of pytest, or of a worker, at any moment leaves no process, no lease, no memory, a readable archive."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest

from pytest_kvbudget.archive import read_attempt
from pytest_kvbudget.device.leases import acquire
from pytest_kvbudget.device.sysfs import AmdSysfsProbe
from pytest_kvbudget.engine.processes import descendants, start_ticks, title
from tests.conftest import Project

LEFT_S = 2.0
"""What a killed run may take until nothing of its engine is left."""
LADDER = """
import pytest

@pytest.mark.ladder(start=131_072, floor=4_096)
def test_window(kv_engine): ...
"""
SLOW = """
[target.card.mock.seconds]
imports = 0.1
weights_load = 0.2
profile = 0.1
graph_capture = 0.2
"""


def marked(mark: str) -> list[int]:
    """Processes that have ``mark`` in their environment: the engine's, whatever they call themselves."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def until(reached: Callable[[], bool], timeout_s: float) -> bool:
    """Whether it is reached in time."""
    deadline = time.monotonic() + timeout_s
    while not (done := reached()) and time.monotonic() < deadline:
        select.select([], [], [], 0.01)
    return done


def start(project: Project, mark: str, *arguments: str) -> subprocess.Popen[bytes]:
    project.configure(devices="0, 1", mock=SLOW + f'[target.card.env]\nKVBUDGET_TEST_MARK = "{mark}"')
    project.tests(LADDER)
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=project.path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def check_nothing_left(project: Project, mark: str) -> None:
    assert until(lambda: not marked(mark), LEFT_S), [title(pid) for pid in marked(mark)]

    lease_names = [path.name.removesuffix(".lock") for path in Path(os.environ["KVBUDGET_LEASE_DIR"]).glob("*.lock")]
    for name in lease_names:
        acquire([(("0",), (name,))], run="after", purpose="after", timeout_s=LEFT_S).close()

    tree = project.path / "sysfs"
    if tree.exists():
        readings = AmdSysfsProbe(tree, ["0", "1"])
        idle_bytes = int(0.57 * 2**30)  # the simulated driver's own
        assert until(lambda: all(card.used_bytes == idle_bytes for card in readings.read()), LEFT_S), readings.read()

    for path in project.path.rglob("attempt.json"):
        record = read_attempt(path)
        log = path.with_name(record.log)
        assert record.message
        assert not record.command or log.exists()


@pytest.mark.parametrize("seed", range(8))
def test_kill_of_pytest_at_a_random_moment(project: Project, seed: int) -> None:
    mark = uuid4().hex
    run = start(project, mark)
    moment_s = random.Random(seed).uniform(0.3, 3.0)  # from start-up of pytest to late in the ladder
    with suppress(subprocess.TimeoutExpired):
        run.wait(moment_s)  # on a quick machine the ladder may be over: that leaves nothing either
    run.kill()
    run.wait()
    check_nothing_left(project, mark)


@pytest.mark.parametrize("seed", range(4))
def test_kill_of_an_xdist_worker_at_a_random_moment(project: Project, seed: int) -> None:
    mark = uuid4().hex
    run = start(project, mark, "-n1", "--max-worker-restart=0")
    assert until(lambda: bool(marked(mark)), 30), "no engine was started"
    with suppress(subprocess.TimeoutExpired):
        run.wait(random.Random(seed).uniform(0, 1))
    workers = [process for process in descendants(run.pid) if process.parent == run.pid]
    for worker in workers:
        if start_ticks(worker.pid) == worker.start_ticks:
            os.kill(worker.pid, signal.SIGKILL)
    check_nothing_left(project, mark)
    assert run.wait(30) in {0, 1}, "the controller reports the crash as a failed test, unless the ladder was over"
