"""Attempts on the pool, without pytest around them: what a boot's surroundings may do to it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from pytest_kvbudget.archive import RunArchive, read_attempt
from pytest_kvbudget.attempt import Attempt
from pytest_kvbudget.config import Limits, LoadedTarget, Target
from pytest_kvbudget.device.model import DeviceMemory
from pytest_kvbudget.device.trace import changes, decode
from pytest_kvbudget.engine.processes import descendants, start_ticks, title, wait_until_gone
from pytest_kvbudget.engine.watch import Outcome
from pytest_kvbudget.judging import judge_end, with_idle_evidence
from pytest_kvbudget.ledger.reader import LedgerReader
from pytest_kvbudget.mock.spec import Faults, MockDevice, PhaseSeconds
from pytest_kvbudget.pool import EnginePool, PoolError
from pytest_kvbudget.records import RunInfo
from pytest_kvbudget.request import BootRequest
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.verdict import Phase, Provenance, Verdict
from tests.mock.rehearsing import FORK

GIB = 2**30
MIB = 2**20
SHAPE = Shape(model="simulated", max_model_len=4096)
INFO = RunInfo(run="r", host="h", plugin_version="0", python_version="3")
Pools = Callable[..., EnginePool]


@pytest.fixture
def pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pools]:
    monkeypatch.setenv("KVBUDGET_LEASE_DIR", str(tmp_path / "leases"))
    made: list[EnginePool] = []

    def make(
        *, command: tuple[str, ...] | None = None, port: int = 0, host: str = "127.0.0.1", archive: Path | None = None,
        limits: Limits | None = None, mock: MockDevice | None = None,
    ) -> EnginePool:  # fmt: skip
        target = Target(
            backend="mock", devices=(0,), command=command, port=port, host=host, shape=SHAPE,
            limits=limits or Limits(release_seconds=5, settle_seconds=3, lease_seconds=5),
            mock=mock or MockDevice(sysfs=str(tmp_path / "sysfs")),
        )  # fmt: skip
        loaded = LoadedTarget(name="t", target=target, origin="test", folder=str(tmp_path), environment={})
        pool = EnginePool(loaded, RunArchive(archive or tmp_path / "archive", INFO))
        made.append(pool)
        return pool

    yield make
    for pool in made:
        pool.close()


@contextmanager
def foreign_server() -> Iterator[int]:
    """A server that answers 200 to everything, and is nobody's engine."""

    class Always(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - the base class' name

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Always) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


def boot(pool: EnginePool, **changes: object) -> Attempt:
    return pool.boot(BootRequest(test="t", shape=SHAPE.merged(**changes), windows=1), reuse=False)


def verdict(attempt: Attempt) -> Verdict:
    """As it stands: a type checker would take it for what it was."""
    return attempt.record.verdict


def test_a_foreign_server_on_the_port_is_not_our_engine(pools: Pools) -> None:
    with foreign_server() as port:
        pool = pools(command=(sys.executable, "-c", "import threading; threading.Event().wait(60)"), port=port)
        record = boot(pool).record
    assert record.verdict is Verdict.ERROR
    assert record.cause is not None
    assert record.cause.failure_class == "port_in_use"
    assert "is not ours" in record.message


@pytest.mark.parametrize("who", ["EngineCore", "root"])
def test_an_engine_killed_under_a_content_body_is_no_pass(pools: Pools, who: str) -> None:
    attempt = boot(pools(mock=MockDevice(ranks=1)))
    assert verdict(attempt) is Verdict.PASS
    root = attempt.root_pid
    core = next(process.pid for process in descendants(root) if title(process.pid) == "VLLM::EngineCore")
    victim = core if who == "EngineCore" else root
    ticks = start_ticks(victim)
    assert ticks is not None
    os.kill(victim, signal.SIGKILL)
    assert not wait_until_gone({victim: ticks}, 5)
    attempt.used_by("t").body_ended(failed=False)
    assert verdict(attempt) is Verdict.UNKNOWN
    assert not attempt.serving


def test_an_engine_that_dies_on_a_request_which_the_body_ignores_is_a_failure(pools: Pools) -> None:
    device = MockDevice(request_peak_base=40 * 2**30, seconds=PhaseSeconds(linger=3.0))
    attempt = boot(pools(mock=device))
    with pytest.raises(Exception, match="status 500"):
        attempt.client.complete("hi", max_tokens=4)
    attempt.used_by("t").body_ended(failed=False)
    assert attempt.record.verdict is Verdict.FAIL
    assert attempt.record.cause is not None
    assert attempt.record.cause.failure_class == "request_oom"


def test_windows_are_counted_with_the_engines_own_window_where_the_shape_names_none(pools: Pools) -> None:
    pool = pools(mock=MockDevice(native_max_model_len=4096, kv_bytes_per_token=1024))
    shape = Shape(model="simulated", kv_cache_memory_bytes=16 * 2**20)  # 16,384 tokens: four windows
    enough = pool.boot(BootRequest(test="t", shape=shape, windows=4), reuse=False)
    assert enough.record.verdict is Verdict.PASS, enough.record.message
    pool.retire(enough)
    short = pool.boot(BootRequest(test="t", shape=shape, windows=5), reuse=False)
    assert short.record.verdict is Verdict.FAIL
    assert short.record.cause is not None
    assert short.record.cause.failure_class == "kv_windows_short"


def test_a_host_that_is_none_of_this_machine_is_named(pools: Pools) -> None:
    record = boot(pools(host="203.0.113.9")).record
    assert record.verdict is Verdict.ERROR
    assert "203.0.113.9" in record.message


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_an_archive_that_cannot_be_written_gives_the_devices_back(pools: Pools, tmp_path: Path, kind: str) -> None:
    archive = tmp_path / "bad"
    archive.touch() if kind == "file" else archive.symlink_to("/nonexistent/place")
    pool = pools(archive=archive)
    for _ in range(2):
        with pytest.raises(PoolError, match="cannot be written"):
            boot(pool)


def test_a_command_that_is_not_there_says_what_to_turn(pools: Pools) -> None:
    record = boot(pools(command=("/no/such/engine",))).record
    assert record.verdict is Verdict.ERROR
    assert record.cause is not None
    assert [lever.name for lever in record.cause.levers] == ["command"]


WRAPPER = f'exec {sys.executable} -m pytest_kvbudget.mock serve "$@" '
"""A shell's command that hands the shape on, and adds what nobody sees."""


@pytest.mark.parametrize(
    ("added", "asked", "said"),
    [
        ("--max-num-seqs 4", {"max_num_seqs": 8}, "runs with max_num_seqs 4, not the 8 that was asked for"),
        ("--gpu-memory-utilization 0.9", {"gpu_memory_utilization": 0.95}, "gpu_memory_utilization 0.9, not the 0.95"),
        ("--kv-cache-memory-bytes 200M", {"kv_cache_memory_bytes": 300 * MIB}, f"{200 * MIB}, not the {300 * MIB}"),
        ("--max-model-len 2048", {}, "serves a window of 2048, not the 4096 that was asked for"),
        ("--max-model-len 8192", {}, "serves a window of 8192, not the 4096 that was asked for"),
        ("--max-num-seqs 4 --kv-cache-memory-bytes 999G", {"max_num_seqs": 8}, "max_num_seqs 4, not the 8"),
    ],
)
@pytest.mark.parametrize("windows", [1, None])
def test_an_engine_that_runs_with_another_value_proves_nothing_of_the_shape(
    pools: Pools, added: str, asked: dict[str, object], said: str, windows: int | None
) -> None:
    pool = pools(command=("sh", "-c", WRAPPER + added, "sh"))
    attempt = pool.boot(BootRequest(test="t", shape=SHAPE.merged(**asked), windows=windows), reuse=False)
    assert (verdict(attempt), said in attempt.record.message) == (Verdict.ERROR, True), attempt.record.message
    cause = attempt.record.cause
    assert cause is not None
    assert cause.evidence[0].text
    assert "command" in cause.levers[0].why


def test_a_deadline_is_no_verdict_and_names_its_limit(pools: Pools) -> None:
    silent = (sys.executable, "-c", "import threading; threading.Event().wait(60)")
    pool = pools(command=silent, limits=Limits(boot_seconds=0.3, release_seconds=5))
    record = boot(pool).record
    assert record.verdict is Verdict.UNKNOWN
    assert "limits.boot_seconds" in record.message
    assert "in starting" in record.message, "nothing was logged yet"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "no end of phase profile within 2 s (limits.phase_default_seconds)"),
        ({Phase.PROFILE: 1.0}, "no end of phase profile within 1 s (limits.phase_seconds.profile)"),
    ],
)
def test_the_deadline_of_a_phase_names_the_limit_that_applied_and_the_phase(
    pools: Pools, changes: dict[Phase, float], said: str
) -> None:
    limits = Limits(phase_default_seconds=2.0, phase_seconds=changes, release_seconds=5)
    record = boot(pools(limits=limits, mock=MockDevice(faults=Faults(hang_in="profile")))).record
    assert record.verdict is Verdict.UNKNOWN
    assert said in record.message
    assert record.cause is not None
    assert record.cause.phase is Phase.PROFILE


def test_a_closed_attempt_judges_nothing_more(pools: Pools) -> None:
    pool = pools()
    attempt = boot(pool)
    pool.retire(attempt)
    attempt.used_by("t").body_ended(failed=True)
    assert attempt.record.verdict is Verdict.PASS


def test_a_record_holds_the_footprint_against_the_most_that_the_card_showed(pools: Pools, tmp_path: Path) -> None:
    device = msgspec.structs.replace(FORK, sysfs=str(tmp_path / "sysfs"))
    precise = {"gpu_memory_utilization": 0.75, "max_model_len": 65_536, "extra_args": ("--expert-precise-memory",)}
    attempt = boot(pools(mock=device), **precise)
    assert attempt.record.verdict is Verdict.PASS, attempt.record.message
    attempt.close()
    record = attempt.record
    (found,) = [term for term in record.reconciled if term.term == "footprint"]
    # A budget of 7.5 GiB leaves 4,448 MiB for the arena: after 1 GiB of weights, 96 MiB of pool, 64 MiB of graphs and
    # 2 GiB. 1.45 + 0.57 GiB are the law's (RDNA4 document, section 1). Each is printed to a hundredth of a GiB.
    planned_bytes = (1024 + 96 + 64 + 4448) * MIB + int(1.45 * GIB) + int(0.57 * GIB)
    assert found.planned_bytes == pytest.approx(planned_bytes, abs=3 * GIB / 200)
    trace = decode((attempt.folder / "memory.json").read_bytes())
    most = max(point.used_bytes for rank in range(len(trace.series)) for point in changes(trace, rank))
    assert found.stated_bytes == most
    assert found.difference_bytes == most - found.planned_bytes
    assert found.provenance is Provenance.SIMULATED
    # beside the plan's own terms, in the record on disk as well
    on_disk = read_attempt(attempt.record_path)
    assert found in on_disk.reconciled


def test_a_plain_boot_has_no_footprint_of_experts(pools: Pools) -> None:
    attempt = boot(pools())
    attempt.close()
    assert all(term.term != "footprint" for term in attempt.record.reconciled)


def test_a_record_says_what_the_engines_processes_took_of_the_host(pools: Pools) -> None:
    pool = pools()
    attempt = boot(pool)
    processes = len(attempt.pids())
    pool.retire(attempt)
    taken = read_attempt(attempt.record_path).engine_host
    assert taken is not None
    assert taken.processes == processes >= 2, "server, core and worker, each of them once"
    # an interpreter alone takes some MiB, and nobody counts the pages that all of them share more than once
    assert processes * MIB < taken.pss_bytes < processes * GIB
    failed = boot(pool, kv_cache_memory_bytes=MIB)
    pool.retire(failed)
    assert failed.record.engine_host is None, "it did not serve"


def test_what_an_idle_device_keeps_is_no_stranger(pools: Pools, tmp_path: Path) -> None:
    """4.86 of 31.86 GiB look like somebody else's in a log; a device that shows them when idle is asked too much."""
    device = MockDevice(device_total=int(31.86 * GIB), free_at_start=27 * GIB, sysfs=str(tmp_path / "sysfs"))
    record = boot(pools(mock=device), gpu_memory_utilization=0.9).record
    assert record.verdict is Verdict.FAIL
    assert record.cause is not None
    assert record.cause.failure_class == "startup_free_below_request"
    assert "27.00 GiB of 31.86 GiB is free at start-up, as on the idle device" in record.message


def test_what_an_idle_device_did_not_show_is_somebody_elses() -> None:
    stranger = "(EngineCore pid=1) ValueError: Free memory on device cuda:0 (27.0/31.86 GiB) on startup is less than"
    reader = LedgerReader("vllm")
    reader.feed(f"{stranger} desired GPU memory utilization (0.9, 28.67 GiB).\n".encode())
    reader.close()
    ledger = reader.ledger()
    judged = judge_end(Outcome(kind="dead", at=0.0, status=1), ledger)
    assert judged[0] is Verdict.UNKNOWN
    idle = DeviceMemory(device="0", total_bytes=int(31.86 * GIB), used_bytes=GIB, source="sysfs")
    assert with_idle_evidence(judged, ledger, [idle]) == judged
    assert with_idle_evidence(judged, ledger, []) == judged
    # digits of the log are no difference: 4.86 GiB are held, give or take 10 MiB
    kept = msgspec.structs.replace(idle, used_bytes=int(4.855 * GIB))
    assert with_idle_evidence(judged, ledger, [kept])[0] is Verdict.FAIL
