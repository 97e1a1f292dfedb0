"""`kvbudget reap`: ends what dead runs of ours left, and nothing else."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path

import msgspec
import pytest

from pytest_kvbudget.engine.processes import alive, start_ticks
from pytest_kvbudget.engine.reap import reap
from pytest_kvbudget.engine.state import KeeperState, read_state
from tests.engine.support import Engines, tree, wait_for


class Reaper:
    """An archive with the state of an engine, as its keeper and owner may have left it."""

    def __init__(self, engines: Engines, folder: Path) -> None:
        self._engine = engines.launch(tree("stubborn"))
        self.root = self._engine.root_pid
        self._ticks = start_ticks(self.root) or 0
        path = engines.state_path(self._engine)
        self.state = wait_for("the root", lambda: state if (state := read_state(path)).processes else None)
        gone = msgspec.structs.replace(self.state.owner, start_ticks=1)
        self.dead = msgspec.structs.replace(
            self.state, owner=gone, keeper=msgspec.structs.replace(self.state.keeper, start_ticks=1)
        )
        self._folder = folder / "archive"
        self._folder.mkdir()

    def run(self, state: KeeperState, *, dry_run: bool = False) -> tuple[int, str]:
        (self._folder / "keeper.json").write_bytes(msgspec.json.encode(state))
        out = io.StringIO()
        return reap(self._folder, dry_run=dry_run, out=out), out.getvalue()

    @property
    def lives(self) -> bool:
        return alive(self.root, self._ticks)


@pytest.fixture
def reaper(engines: Engines, tmp_path: Path) -> Reaper:
    return Reaper(engines, tmp_path)


def test_what_a_dead_run_left_is_ended(reaper: Reaper) -> None:
    status, said = reaper.run(reaper.dead)
    assert status == 0
    assert "run run-1 is dead and left 1 processes" in said
    assert not reaper.lives


def test_a_dry_run_only_says_it(reaper: Reaper) -> None:
    status, said = reaper.run(reaper.dead, dry_run=True)
    assert (status, reaper.lives) == (0, True)
    assert str(reaper.root) in said


def test_an_engine_of_a_living_run_is_not_touched(reaper: Reaper) -> None:
    keeperless = msgspec.structs.replace(reaper.dead, owner=reaper.state.owner)
    for state in (reaper.state, keeperless):
        assert "nothing to end" in reaper.run(state)[1]
    assert reaper.lives


def test_an_engine_that_was_left_serving_is_named_and_not_touched(reaper: Reaper) -> None:
    _, said = reaper.run(msgspec.structs.replace(reaper.dead, left=True))
    assert f"left serving on purpose by run run-1, not touched; to end it: kill {reaper.root}" in said
    assert reaper.lives


def test_records_of_another_boot_say_nothing_about_processes_here(reaper: Reaper) -> None:
    boot, *namespaces = reaper.state.pid_space.split()
    other_boot = " ".join(("0" * len(boot), *namespaces))
    other_time = " ".join((boot, namespaces[0], "time:[1]"))
    for space in (other_boot, other_time):
        for left in (False, True):
            _, said = reaper.run(msgspec.structs.replace(reaper.dead, pid_space=space, left=left))
            assert str(reaper.root) not in said
    assert reaper.lives


@pytest.mark.parametrize("text", ["", "{}", "no json", '{"schema": 1}'])
def test_a_state_file_that_is_none_is_named_and_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "keeper.json").write_text(text)
    out = io.StringIO()
    assert reap(tmp_path, dry_run=False, out=out) == 0
    assert f"{tmp_path / 'keeper.json'}: is no state file of a keeper" in out.getvalue()


def test_no_archive_is_an_error_that_names_it(tmp_path: Path) -> None:
    out = io.StringIO()
    assert reap(tmp_path / "missing", dry_run=False, out=out) == 2
    assert "missing" in out.getvalue()


def test_a_killed_keeper_is_no_reason_to_touch_a_living_owner(engines: Engines, tmp_path: Path) -> None:
    engine = engines.launch(tree("family"))
    path = engines.state_path(engine)
    wait_for("the family", lambda: len(read_state(path).processes) == 4)
    os.kill(engine.keeper_pid, signal.SIGKILL)
    out = io.StringIO()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "keeper.json").write_bytes(path.read_bytes())
    reap(tmp_path / "a", dry_run=False, out=out)
    # the owner may be at it already: what counts is that nobody else was
    assert "nothing to end" in out.getvalue(), "its owner lives, and ends it itself"
