"""One engine below its keeper: what it gets, what is reported of it, how it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import uuid
from pathlib import Path

import pytest

from pytest_kvbudget.engine.launchers import process
from pytest_kvbudget.engine.launchers.process import ProcessLauncher
from pytest_kvbudget.engine.model import EngineControlError, LaunchError
from pytest_kvbudget.engine.processes import alive, start_ticks
from pytest_kvbudget.engine.state import end_survivors, read_state, survivors
from tests.engine.support import TOKEN, Engines, command, events_until, log_of, running_with, tree, up, wait_for

SHOW = """
import json, os, sys
print(json.dumps([sys.argv[1:], os.environ.get("KIND"), os.getcwd(), sys.stdin.read()]))
sys.stderr.write("on stderr\\n")
"""


def test_engine_gets_arguments_environment_folder_and_an_empty_stdin(engines: Engines, tmp_path: Path) -> None:
    odd = os.fsdecode(b"not\xffutf8")
    argv = (sys.executable, "-c", SHOW, "two\nlines", "", odd)
    engine = engines.launch(argv, env={"KIND": odd, "HUGE": "x" * 100_000}, cwd=str(tmp_path))
    events_until(engine, "gone")
    first, second = log_of(engine).splitlines()
    assert json.loads(first) == [["two\nlines", "", odd], odd, str(tmp_path), ""]
    assert second == "on stderr"


def test_environment_of_a_megabyte_arrives(engines: Engines) -> None:
    env = {f"BIG_{number}": "x" * 100_000 for number in range(10)}
    code = "import os; print(sum(len(v) for k, v in os.environ.items() if k.startswith('BIG_')))"
    engine = engines.launch((sys.executable, "-c", code), env=env)
    events_until(engine, "gone")
    assert log_of(engine) == "1000000\n"


def test_engine_inherits_only_the_leases_and_default_signals(engines: Engines, tmp_path: Path) -> None:
    with (tmp_path / "lease").open("w") as lease, (tmp_path / "other").open("w") as other:
        os.set_inheritable(other.fileno(), True)
        script = "ls -l /proc/$$/fd | sed -n 's/.*-> //p'; grep SigIgn /proc/$$/status"
        engine = engines.launch(("/bin/sh", "-c", script), leases=(lease.fileno(),))
        events_until(engine, "gone")
    seen = [line for line in log_of(engine).splitlines() if not line.startswith("pipe:")]
    log = str(engine.log_path)
    assert sorted(seen[:-1]) == sorted(["/dev/null", log, log, str(tmp_path / "lease")])
    assert seen[-1].split() == ["SigIgn:", "0000000000000000"]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("no-such-engine", "serve"), "'no-such-engine': No such file or directory"),
        (("/etc",), "'/etc': Permission denied"),
        (("/bin/sh", "a\0b"), "'/bin/sh': ValueError"),
    ],
)
def test_command_that_cannot_run_is_named(engines: Engines, argv: tuple[str, ...], named: str) -> None:
    with pytest.raises(LaunchError) as raised:
        engines.launch(argv)
    assert named in str(raised.value)


def test_missing_working_folder_is_named(engines: Engines) -> None:
    with pytest.raises(LaunchError, match="cannot enter the folder '/no/such': No such file"):
        engines.launch(("/bin/true",), cwd="/no/such")


def test_missing_log_folder_is_named_and_nothing_starts(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    with pytest.raises(LaunchError, match=r"cannot write '.*gone/engine.log': No such file"):
        ProcessLauncher().launch(
            command(("/bin/touch", str(mark))),
            log_path=tmp_path / "gone" / "engine.log",
            state_path=tmp_path / "keeper.json",
            lease_descriptors=(),
            critical="",
        )
    assert not mark.exists()


def test_pattern_that_is_none_is_refused(engines: Engines) -> None:
    with pytest.raises(LaunchError, match="no regular expression"):
        engines.launch(("/bin/true",), critical="(")


@pytest.mark.parametrize(("script", "status"), [("exit 3", 3), ("exit 0", 0), ("kill -9 $$", -signal.SIGKILL)])
def test_end_is_reported_with_its_status(engines: Engines, script: str, status: int) -> None:
    engine = engines.launch(("/bin/sh", "-c", script))
    events = events_until(engine, "gone")
    assert [event.kind for event in events] == ["started", "exited", "gone"]
    assert (events[0].pid, events[1].pid) == (engine.root_pid, engine.root_pid)
    assert events[1].status == status
    assert events[0].at <= events[1].at <= events[2].at


def test_descriptor_becomes_readable_for_each_event(engines: Engines) -> None:
    import select  # noqa: PLC0415

    engine = engines.launch(tree("stubborn"))
    assert select.select([engine], [], [], 0)[0] == [engine]
    assert [event.kind for event in engine.events()] == ["started"]
    assert select.select([engine], [], [], 0)[0] == []
    os.kill(engine.root_pid, signal.SIGKILL)
    assert select.select([engine], [], [], 20)[0] == [engine]
    assert engine.events()[0].kind == "exited"


def test_stop_ends_whole_family(engines: Engines) -> None:
    engine = engines.launch(tree("family"))
    family = up(engine, "root", "child", "session", "orphan")
    assert set(engine.pids()) == set(family.values())
    engine.stop(0.5)
    assert engine.pids() == []
    assert not [pid for pid in family.values() if start_ticks(pid) is not None]
    assert [event.kind for event in engine.events()] == ["started", "exited", "gone"]
    engine.stop(0.5)


def test_second_sigterm_reaches_an_engine_that_lost_the_first(engines: Engines) -> None:
    engine = engines.launch(tree("deaf"))
    up(engine, "root")
    engine.stop(2.0)
    assert "ended by a second SIGTERM" in log_of(engine)
    assert engine.events()[1].status == 0


def test_engine_that_ignores_sigterm_is_killed_after_grace(engines: Engines) -> None:
    engine = engines.launch(tree("stubborn"))
    up(engine, "root")
    engine.stop(0.2)
    assert engine.events()[1].status == -signal.SIGKILL


def test_processes_that_outlive_the_root_are_seen_and_ended(engines: Engines) -> None:
    engine = engines.launch(tree("headless"))
    left = up(engine, "session", "orphan")
    events = events_until(engine, "exited")
    assert events[-1].status == 0
    assert set(engine.pids()) == set(left.values())
    engine.stop(75.0)
    assert not [pid for pid in left.values() if start_ticks(pid) is not None]


def test_fork_storm_is_ended(engines: Engines) -> None:
    token = uuid.uuid4().hex
    engine = engines.launch(tree("storm"), env={TOKEN: token})
    wait_for("the storm", lambda: "up root" in log_of(engine) and len(engine.pids()) > 1)
    engine.stop(0.0)
    assert running_with(token) == []


@pytest.mark.parametrize("pidfd", [True, False])
def test_death_of_a_critical_process_is_reported(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, *, pidfd: bool
) -> None:
    if not pidfd:
        monkeypatch.setattr(process, "_BOOT", f"import os; del os.pidfd_open; {process._BOOT}")
    engine = engines.launch(tree("titled", "2"))
    cores = wait_for("both cores", lambda: known_cores(engines) if len(known_cores(engines)) == 2 else None)
    os.kill(cores[0], signal.SIGKILL)
    died = events_until(engine, "critical_exited")[-1]
    assert (died.pid, died.title) == (cores[0], "VLLM::EngineCore 1000")
    assert alive(engine.root_pid, start_ticks(engine.root_pid) or 0)
    engine.stop(0.0)
    assert engine.pids() == []


def known_cores(engines: Engines) -> list[int]:
    """Critical processes that the keeper has seen."""
    state = read_state(engines.state_path(engines.started[-1]))
    return [process.pid for process in state.processes if process.title.startswith("VLLM::EngineCore")]


def test_hundreds_of_events_wait_for_a_slow_reader(engines: Engines) -> None:
    count = 300
    engine = engines.launch(tree("titled", str(count)))
    wait_for("all cores", lambda: len(known_cores(engines)) == count)
    for pid in known_cores(engines):
        os.kill(pid, signal.SIGKILL)
    os.kill(engine.root_pid, signal.SIGKILL)
    wait_for("the end", lambda: not engine.pids())
    kinds = [event.kind for event in events_until(engine, "gone")]
    assert kinds.count("critical_exited") == count
    assert kinds[-1] == "gone"


def test_keeper_ignores_signals_of_a_terminal(engines: Engines) -> None:
    engine = engines.launch(tree("stubborn"))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        os.kill(engine.keeper_pid, number)
    engine.stop(0.0)
    assert [event.kind for event in engine.events()] == ["started", "exited", "gone"]


def test_killed_keeper_takes_the_root_along_and_stop_ends_the_rest(engines: Engines) -> None:
    engine = engines.launch(tree("family"))
    family = up(engine, "root", "child", "session", "orphan")
    path = engines.state_path(engine)
    wait_for("the family in the state file", lambda: len(read_state(path).processes) == len(family))
    assert survivors(read_state(path)) == {}
    os.kill(engine.keeper_pid, signal.SIGKILL)
    exited = events_until(engine, "exited")[-1]
    assert "keeper of the engine was killed" in exited.message
    wait_for("death of the root", lambda: not alive(family["root"], start_ticks(family["root"]) or 0))
    assert set(engine.pids()) == {family[name] for name in ("child", "session", "orphan")}
    engine.stop(0.0)
    assert not [pid for pid in family.values() if alive(pid, start_ticks(pid) or 0)]


def test_log_survives_its_folder_and_a_closed_stdout(engines: Engines, tmp_path: Path) -> None:
    script = "echo one; exec >&-; echo two >&2; sleep 1000"
    engine = engines.launch(("/bin/sh", "-c", script))
    wait_for("the second line", lambda: log_of(engine) == "one\ntwo\n")
    # Moved first: the keeper may be writing its state file.
    shutil.rmtree(tmp_path.rename(tmp_path.with_name("away")))
    engine.stop(5.0)
    assert [event.kind for event in engine.events()] == ["started", "exited", "gone"]


def test_two_engines_live_apart(engines: Engines) -> None:
    first, second = engines.launch(tree("stubborn")), engines.launch(tree("stubborn"))
    first.stop(0.0)
    assert first.pids() == []
    assert second.pids() == [second.root_pid]


def test_state_names_what_was_started(engines: Engines) -> None:
    engine = engines.launch(tree("family"))
    family = up(engine, "root", "child", "session", "orphan")
    path = engines.state_path(engine)
    state = wait_for("all four", lambda: s if len((s := read_state(path)).processes) == 4 else None)
    assert (state.run, state.root and state.root.pid, state.keeper.pid) == ("run-1", engine.root_pid, engine.keeper_pid)
    assert state.owner.pid == os.getpid()
    assert {p.pid: p.start_ticks for p in state.processes} == {pid: start_ticks(pid) for pid in family.values()}
    engine.stop(0.0)
    assert read_state(path).gone


def test_reap_leaves_processes_of_another_boot_and_reused_ids_alone(engines: Engines) -> None:
    import msgspec  # noqa: PLC0415

    engine = engines.launch(tree("stubborn"))
    state = wait_for("the root", lambda: s if (s := read_state(engines.state_path(engine))).processes else None)
    dead = msgspec.structs.replace(state, keeper=msgspec.structs.replace(state.keeper, start_ticks=1))
    assert set(survivors(dead)) == {engine.root_pid}
    assert survivors(msgspec.structs.replace(dead, pid_space="another boot")) == {}
    assert survivors(msgspec.structs.replace(dead, left=True)) == {}
    older = msgspec.structs.replace(state.processes[0], start_ticks=state.processes[0].start_ticks - 1)
    # a process of somebody else under an id of ours has neither our start time nor our mark
    reused = msgspec.structs.replace(dead, root=older, processes=(older,), mark="another boot's")
    assert survivors(reused) == {}
    assert end_survivors(reused, grace_s=0.0) == {}
    assert engine.pids() == [engine.root_pid]


def test_a_process_that_no_look_of_the_keeper_saw_is_known_by_its_mark(engines: Engines) -> None:
    import msgspec  # noqa: PLC0415

    engine = engines.launch(tree("stubborn"))
    state = wait_for("the root", lambda: s if (s := read_state(engines.state_path(engine))).processes else None)
    # as a keeper leaves it that was killed before its first look
    blind = msgspec.structs.replace(
        state, keeper=msgspec.structs.replace(state.keeper, start_ticks=1), root=None, processes=()
    )
    assert set(survivors(blind)) == {engine.root_pid}


def test_state_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "keeper.json").write_text("{}")
    with pytest.raises(ValueError, match=r"keeper.json: is no state file"):
        read_state(tmp_path / "keeper.json")


def test_engine_that_is_gone_cannot_be_left(engines: Engines) -> None:
    engine = engines.launch(("/bin/true",))
    events_until(engine, "gone")
    with pytest.raises(EngineControlError, match="cannot be handed over"):
        engine.leave()
