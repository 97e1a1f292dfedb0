"""A wall clock that jumps by hours changes no verdict, no duration, no trace, and nobody's identity."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest

import pytest_kvbudget
from pytest_kvbudget import clean
from pytest_kvbudget.archive import read_attempt, read_finding
from pytest_kvbudget.cancel import Cancellation
from pytest_kvbudget.clean import CleanGate
from pytest_kvbudget.config import Limits
from pytest_kvbudget.device import leases
from pytest_kvbudget.device.leases import LeaseTimeoutError, acquire
from pytest_kvbudget.device.model import DeviceMemory
from pytest_kvbudget.device.trace import decode, end_s
from pytest_kvbudget.engine.processes import alive, start_ticks
from pytest_kvbudget.engine.state import read_state
from pytest_kvbudget.records import AttemptRecord
from pytest_kvbudget.verdict import Verdict
from tests.clock.conftest import Clocks
from tests.conftest import Project
from tests.engine.support import Engines, tree, up, wait_for
from tests.plugin.test_killed import check_nothing_left, marked, start, until

PACKAGE = Path(pytest_kvbudget.__file__).parent
WAITS_OR_IDENTIFIES = (
    *("engine/**/*.py", "device/**/*.py", "attempt.py", "clean.py", "ending.py", "exercise.py", "judging.py"),
    *("memory.py", "pool.py", "starting.py", "plugin/timers.py", "plugin/survival.py", "search/**/*.py"),
)
WALL_CLOCK = frozenset({"time", "time_ns", "localtime", "gmtime", "now", "utcnow", "today", "create_time", "boot_time"})
STAMPS = {("device/leases.py", "_write_holders"), ("device/sampler.py", "start")}
"""Functions that write down when something began, for people."""
HOURS_S = 1800.0
"""Less than the smallest jump, more than anything here can take."""
TESTS = """
import pytest

@pytest.mark.ladder(start=12_288, floor=4_096, quantum=4_096)
@pytest.mark.knife_edge(hold=8)
def test_window(kv_engine): ...

@pytest.mark.kv_shape(max_model_len=4_096)
@pytest.mark.kv_soak(minutes=0.05)
def test_soak(kv_engine): ...
"""


def test_nothing_that_waits_or_identifies_reads_the_wall_clock() -> None:
    found = set()
    for pattern in WAITS_OR_IDENTIFIES:
        paths = sorted(PACKAGE.glob(pattern))
        assert paths, pattern
        for path in paths:
            for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(function, ast.FunctionDef):
                    names = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
                    if names & WALL_CLOCK:
                        found.add((str(path.relative_to(PACKAGE)), function.name))
    assert found <= STAMPS


def test_a_lease_is_waited_for_as_long_as_was_asked(
    clocks: Clocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBUDGET_LEASE_DIR", str(tmp_path))
    held = acquire([(("0",), ("card",))], run="r", purpose="p", timeout_s=0)
    monkeypatch.setattr(leases, "time", clocks)
    begun_s = clocks.now_s
    with pytest.raises(LeaseTimeoutError, match="within 7 s"):
        acquire([(("0",), ("card",))], run="r", purpose="p", timeout_s=7)
    held.close()
    assert clocks.now_s - begun_s == pytest.approx(7, abs=0.1)


def test_devices_are_waited_for_as_long_as_was_asked(
    clocks: Clocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Busy:
        def read(self) -> tuple[DeviceMemory, ...]:
            return (DeviceMemory(device="0", total_bytes=100, used_bytes=90, source="test"),)

    class Pause(Cancellation):
        def pause(self, pause_s: float) -> None:
            clocks.sleep(pause_s)

    monkeypatch.setenv("KVBUDGET_LEASE_DIR", str(tmp_path))
    monkeypatch.setattr(clean, "time", clocks)
    begun_s = clocks.now_s
    with pytest.raises(TimeoutError, match="for 7 s"):
        CleanGate(Limits(release_seconds=7, idle_used=10)).wait(Busy(), ["card"], cancellation=Pause())
    assert clocks.now_s - begun_s == pytest.approx(7, abs=0.1)


def floats(value: object) -> list[float]:
    """Every duration in a record's timings, however deep."""
    if isinstance(value, dict):
        return [number for part in value.values() for number in floats(part)]
    if isinstance(value, list):
        return [number for part in value for number in floats(part)]
    return [value] if isinstance(value, float) else []


def outcome(record: AttemptRecord) -> tuple[str, int | None, Verdict, str | None, tuple[str, ...]]:
    cause = None if record.cause is None else record.cause.failure_class
    phases = () if record.trace is None else tuple(phase.phase for phase in record.trace.phases)
    return record.test, record.shape.max_model_len, record.verdict, cause, phases


@pytest.mark.parametrize("arguments", [(), ("-n2",)], ids=["plain", "n2"])
def test_a_ladder_with_survival_and_a_soak_come_out_the_same(
    project: Project, jumping: str, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    # 1 MiB a token of a request: with 8 GiB free about 8,000 tokens are survived
    project.configure(mock="request_peak_per_token = 1_048_576", limits="trace_hz = 50")
    project.tests(TESTS)
    archives = [project.path / "calm", project.path / "wild"]
    project.run("--kvbudget-archive", str(archives[0]), *arguments).assert_outcomes(passed=2)
    monkeypatch.setenv("LD_PRELOAD", jumping)
    project.run("--kvbudget-archive", str(archives[1]), *arguments).assert_outcomes(passed=2)
    monkeypatch.delenv("LD_PRELOAD")

    calm, wild = ([read_attempt(path) for path in sorted(archive.rglob("attempt.json"))] for archive in archives)
    now = datetime.now(UTC)
    stamps = [datetime.fromisoformat(record.started) for record in wild]
    assert any(abs(stamp - now) > timedelta(minutes=50) for stamp in stamps), "the clock did not jump"
    assert {outcome(record)[:4] for record in wild} == {outcome(record)[:4] for record in calm}
    findings = [read_finding(next(archive.rglob("finding.json"))).finding for archive in archives]
    assert (findings[1].kind, findings[1].value, findings[1].failed_at) == (
        *(findings[0].kind, findings[0].value, findings[0].failed_at),
    )
    for record in wild:
        durations = floats(msgspec.to_builtins((record.timings, record.uses)))
        assert all(0 <= duration < HOURS_S for duration in durations), record.timings
        starts = [phase.start_s for phase in record.timings.phases]
        assert starts == sorted(starts)
    for path in archives[1].rglob("memory.json"):
        trace = decode(path.read_bytes())
        assert 0 < end_s(trace) < HOURS_S
        assert all(0 <= mark.at_s <= end_s(trace) + 1 for mark in trace.marks)
        assert sum(trace.runs) < HOURS_S * trace.rate_hz


def test_a_killed_run_leaves_nothing(project: Project, jumping: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", jumping)
    mark = uuid4().hex
    run = start(project, mark)
    monkeypatch.delenv("LD_PRELOAD")
    assert until(lambda: bool(marked(mark)), 30), "no engine was started"
    run.kill()
    run.wait()
    check_nothing_left(project, mark)


def reap(folder: Path, jumping: str) -> str:
    command = [sys.executable, "-m", "pytest_kvbudget.cli", "reap", str(folder)]
    found = subprocess.run(
        command, env={**os.environ, "LD_PRELOAD": jumping}, capture_output=True, text=True, check=True
    )
    return found.stdout


def test_reap_knows_a_living_run_and_what_a_dead_one_left(engines: Engines, jumping: str, tmp_path: Path) -> None:
    engine = engines.launch(tree("family"))
    family = up(engine, "root", "child", "session", "orphan")
    state = engines.state_path(engine)
    wait_for("the family in the state file", lambda: len(read_state(state).processes) == len(family))
    ticks = {pid: start_ticks(pid) or 0 for pid in family.values()}
    stranger = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"])

    assert "nothing to end" in reap(_as_archive(state, tmp_path), jumping)
    assert all(alive(pid, ticks[pid]) for pid in ticks)

    os.kill(engine.keeper_pid, signal.SIGKILL)
    wait_for("death of the root", lambda: not alive(family["root"], ticks[family["root"]]))
    said = reap(_as_archive(state, tmp_path, owner_gone=True), jumping)
    assert "is dead and left 3 processes" in said
    assert not any(alive(pid, ticks[pid]) for pid in ticks)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def _as_archive(state: Path, folder: Path, *, owner_gone: bool = False) -> Path:
    """An archive with this state file; its owner, this process, is one that is gone if asked for."""
    found = read_state(state)
    if owner_gone:
        found = msgspec.structs.replace(found, owner=msgspec.structs.replace(found.owner, start_ticks=1))
    path = folder / "archive" / "boot" / "keeper.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(found))
    return path.parent.parent
