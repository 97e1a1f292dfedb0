"""Processes as /proc shows them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from pytest_kvbudget.engine.processes import (
    alive,
    descendants,
    look_up,
    open_pidfd,
    pid_space,
    send_signal,
    start_ticks,
    title,
    wait_until_gone,
)
from tests.engine.support import Engines, tree, up, wait_for

NO_PID = 2**22 + 1
"""Larger than any process id that Linux gives."""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(("/bin/sleep", "1000")) as process:
        yield process
        process.kill()


def test_start_ticks_agree_with_psutil(sleeper: subprocess.Popen[bytes]) -> None:
    ticks = start_ticks(sleeper.pid)
    assert ticks is not None
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    assert psutil.boot_time() + since_boot == pytest.approx(psutil.Process(sleeper.pid).create_time(), abs=0.02)


def test_process_is_named_by_id_and_start(sleeper: subprocess.Popen[bytes]) -> None:
    ticks = start_ticks(sleeper.pid)
    assert ticks is not None
    assert alive(sleeper.pid, ticks)
    assert not alive(sleeper.pid, ticks + 1)
    assert open_pidfd(sleeper.pid, ticks + 1) is None
    assert not send_signal(sleeper.pid, ticks + 1, signal.SIGKILL)
    assert sleeper.poll() is None
    assert send_signal(sleeper.pid, ticks, signal.SIGKILL)
    assert sleeper.wait(20) == -signal.SIGKILL


def test_nothing_is_said_of_a_process_that_is_not_there() -> None:
    assert look_up(NO_PID) is None
    assert start_ticks(NO_PID) is None
    assert title(NO_PID) == ""
    assert descendants(NO_PID) == []
    assert not send_signal(NO_PID, 0, signal.SIGTERM)


def test_zombie_does_not_run(sleeper: subprocess.Popen[bytes]) -> None:
    ticks = start_ticks(sleeper.pid)
    assert ticks is not None
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    found = look_up(sleeper.pid)
    assert found is not None
    assert not found.running
    assert not alive(sleeper.pid, ticks)
    assert title(sleeper.pid) == "sleep"


def test_name_with_parentheses_and_spaces_hides_nothing(engines: Engines) -> None:
    code = "open('/proc/self/comm', 'w').write('a) S 1 (b'); print('ready', flush=True); __import__('signal').pause()"
    engine = engines.launch(("python3", "-c", code))
    wait_for("the name", engine.log_path.read_text)
    found = look_up(engine.root_pid)
    assert found is not None
    assert (found.parent, found.group, found.running) == (engine.keeper_pid, engine.root_pid, True)


def test_title_is_the_command_line_or_what_replaced_it(engines: Engines) -> None:
    engine = engines.launch(tree("titled", "1"))
    core = wait_for("the core", lambda: [p for p in engine.pids() if title(p) == "VLLM::EngineCore 1000"])
    assert title(engine.root_pid).endswith("tree.py titled 1")
    assert len(core) == 1


def test_descendants_are_those_that_psutil_sees(engines: Engines) -> None:
    engine = engines.launch(tree("family"))
    up(engine, "root", "child", "session", "orphan")
    found = descendants(engine.keeper_pid)
    assert {p.pid for p in found} == {c.pid for c in psutil.Process(engine.keeper_pid).children(recursive=True)}
    order = [process.pid for process in found]
    assert all(p.parent == engine.keeper_pid or order.index(p.parent) < order.index(p.pid) for p in found)


def test_wait_returns_those_that_stay(sleeper: subprocess.Popen[bytes]) -> None:
    stays = start_ticks(os.getpid())
    ticks = start_ticks(sleeper.pid)
    assert stays is not None
    assert ticks is not None
    sleeper.kill()
    assert wait_until_gone({sleeper.pid: ticks}, 20) == {}
    assert wait_until_gone({os.getpid(): stays, NO_PID: 1}, 0.02) == {os.getpid(): stays}


def test_pid_space_is_equal_within_a_boot() -> None:
    other = subprocess.run(
        ("cat", "/proc/sys/kernel/random/boot_id"), capture_output=True, text=True, check=True
    ).stdout.strip()
    assert pid_space().startswith(f"{other} pid:[")
