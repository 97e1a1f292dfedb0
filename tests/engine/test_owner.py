"""The owner of an engine dies at any moment, or leaves it: what stays, what does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pytest_kvbudget.device.leases import LeaseTimeoutError, acquire
from pytest_kvbudget.engine.processes import alive
from pytest_kvbudget.engine.state import read_state, survivors
from tests.engine.support import DEADLINE_S, TOKEN, running_with, tree, wait_for

OWNER = Path(__file__).with_name("owner.py")
MOMENTS = 20


class Owner:
    """A process that owns an engine, found again by a token in the environment of all its descendants."""

    def __init__(self, folder: Path, mode: str, *argv: str) -> None:
        self.token = uuid.uuid4().hex
        self.folder = folder
        self.process = subprocess.Popen(
            (sys.executable, str(OWNER), str(folder), mode, *argv),
            stdout=subprocess.PIPE,
            env={**os.environ, TOKEN: self.token},
            text=True,
        )

    def wait_line(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{line}\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def log(self) -> str:
        path = self.folder / "engine.log"
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        self.kill()
        for pid in running_with(self.token):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBUDGET_LEASE_DIR", str(tmp_path / "leases"))


@pytest.fixture
def owners(tmp_path: Path, leases: None) -> Iterator[list[Owner]]:
    made: list[Owner] = []
    yield made
    for owner in made:
        owner.close()


def lease_is_free() -> bool:
    try:
        acquire([(("0",), ("card-0",))], run="test", purpose="to see", timeout_s=0.0).close()
    except LeaseTimeoutError:
        return False
    return True


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_killed_owner_leaves_no_process_and_no_lease(owners: list[Owner], tmp_path: Path, moment: int) -> None:
    owner = Owner(tmp_path, "stay", *tree("family"))
    owners.append(owner)
    owner.wait_line("launching")
    # The keeper needs some 30 ms to start, the family as long again: the moments are spread over both and beyond.
    with pytest.raises(subprocess.TimeoutExpired):
        owner.process.wait(moment * 0.008)
    owner.kill()
    # A process gives up its memory, and with it the environment that shows it, just before its descriptors.
    wait_for("end of all descendants", lambda: not running_with(owner.token))
    wait_for("the lease", lease_is_free)
    assert running_with(owner.token) == []
    lines = owner.log().splitlines()
    assert all(line.startswith("up ") for line in lines)
    if (tmp_path / "keeper.json").exists():
        assert survivors(read_state(tmp_path / "keeper.json")) == {}


@pytest.mark.parametrize("mode", ["fork", "cfork"])
def test_forked_child_of_the_owner_keeps_nothing_alive(owners: list[Owner], tmp_path: Path, mode: str) -> None:
    owner = Owner(tmp_path, mode, *tree("family"))
    owners.append(owner)
    owner.wait_line("launching")
    owner.wait_line("launched")
    wait_for("the family", lambda: owner.log().count("up ") == 4)
    owner.kill()
    # One process is left: the child that the owner forked itself, which holds what a C fork copied.
    state = tmp_path / "keeper.json"
    wait_for("end of the engine", lambda: read_state(state).gone and len(running_with(owner.token)) == 1)
    wait_for("the lease", lambda: lease_is_free() == (mode == "fork"))


def test_left_engine_outlives_its_owner_and_holds_its_lease(owners: list[Owner], tmp_path: Path) -> None:
    owner = Owner(tmp_path, "leave", *tree("family"))
    owners.append(owner)
    # Reads to the end of the owner's output: nothing that lives on may hold it.
    out, _ = owner.process.communicate(timeout=DEADLINE_S)
    assert (out, owner.process.returncode) == ("launching\n", 0)
    wait_for("the family", lambda: owner.log().count("up ") == 4)
    state = wait_for("all four", lambda: s if len((s := read_state(tmp_path / "keeper.json")).processes) == 4 else None)
    assert state.left
    assert all(alive(process.pid, process.start_ticks) for process in state.processes)
    assert survivors(state) == {}
    assert not lease_is_free()
    for process in state.processes:
        os.kill(process.pid, signal.SIGKILL)
    wait_for("end of the keeper", lambda: not running_with(owner.token))
    wait_for("the lease", lease_is_free)


def test_two_owners_do_not_touch_each_other(
    owners: list[Owner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        monkeypatch.setenv("KVBUDGET_LEASE_DIR", str(folder / "leases"))
        owners.append(Owner(folder, "stay", *tree("family")))
        owners[-1].wait_line("launching")
        owners[-1].wait_line("launched")
        wait_for("the family", lambda: owners[-1].log().count("up ") == 4)
    owners[0].kill()
    wait_for("end of the first engine", lambda: not running_with(owners[0].token))
    assert len(running_with(owners[1].token)) == 6


def test_lease_outlives_owner_until_keeper_is_done(owners: list[Owner], tmp_path: Path) -> None:
    owner = Owner(tmp_path, "stay", *tree("stubborn"))
    owners.append(owner)
    owner.wait_line("launching")
    owner.wait_line("launched")
    state = read_state(tmp_path / "keeper.json")
    # A keeper that is held up cannot end the engine: the device must stay leased as long.
    os.kill(state.keeper.pid, signal.SIGSTOP)
    owner.kill()
    assert not lease_is_free()
    os.kill(state.keeper.pid, signal.SIGCONT)
    wait_for("the lease", lease_is_free)
    assert running_with(owner.token) == []
