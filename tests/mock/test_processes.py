"""The process tree: titles, death of its members, signals, faults, cards shared by engines."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from pytest_kvbudget.mock.spec import BootPhase, FaultPhase, Faults, PhaseSeconds
from pytest_kvbudget.units import GIB, MIB

from .harness import BASE, DEADLINE_S, UTILIZATION, Engine, Host, until

SMALL = (*UTILIZATION, "--max-model-len", "4096")
QUICK_END = PhaseSeconds(linger=0.05)
TWO = replace(BASE, ranks=2, seconds=QUICK_END)
SERVING = (5120 + 1984 + 576) * MIB
PHASES: tuple[BootPhase, ...] = (
    "worker_init", "weights_load", "compile", "profile", "kv_alloc", "graph_capture", "warmup",
)  # fmt: skip


def start_faulty(host: Host, **kinds: object) -> Engine:
    return host.start(replace(BASE, seconds=QUICK_END, faults=Faults(**kinds)), *SMALL)  # type: ignore[arg-type]


def test_tree_and_titles_are_vllms(host: Host) -> None:
    engine = host.start(TWO, *SMALL).wait_ready()
    core = engine.wait_titled("VLLM::EngineCore")
    assert core.ppid() == engine.pid
    for rank in (0, 1):
        worker = engine.wait_titled(f"VLLM::Worker_TP{rank}")
        assert worker.ppid() == core.pid
        assert Path(f"/proc/{worker.pid}/comm").read_text(encoding="ascii") == "VLLM::Worker_TP\n"
        assert f"(Worker_TP{rank} pid={worker.pid})" in engine.log()
        assert host.used(rank) == SERVING
    assert "pytest_kvbudget.mock" in psutil.Process(engine.pid).cmdline()
    assert len(engine.tree()) == 4


def test_one_rank_lives_in_the_core(host: Host) -> None:
    engine = host.start(BASE, *SMALL).wait_ready()
    core = engine.wait_titled("VLLM::EngineCore")
    assert len(engine.tree()) == 2
    assert f"(EngineCore pid={core.pid}) INFO" in engine.log()
    assert "Worker" not in engine.log()


@pytest.mark.parametrize("title", ["VLLM::EngineCore", "VLLM::Worker_TP1"])
def test_death_of_the_engine_ends_it_with_status_0(host: Host, title: str) -> None:
    engine = host.start(TWO, *SMALL).wait_ready()
    engine.wait_titled(title).kill()
    assert engine.wait_exit() == 0
    until("no process left", lambda: not engine.tree())
    host.wait_used(0)
    host.wait_used(0, card=1)
    log = engine.log()
    assert "vllm.v1.engine.exceptions.EngineDeadError" in log
    if title == "VLLM::EngineCore":
        assert "engine core exited unexpectedly; starting cleanup" in log
        assert "Parent process exited, terminating worker queues" in log
    else:
        assert "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor." in log


def test_engine_outlives_its_server_and_keeps_the_memory(host: Host) -> None:
    engine = host.start(TWO, *SMALL).wait_ready()
    log = engine.log()
    engine.process.kill()
    assert engine.wait_exit() == -signal.SIGKILL
    core = engine.wait_titled("VLLM::EngineCore")
    assert len(engine.tree()) == 3
    assert host.used() == SERVING
    assert engine.health() is None
    assert engine.log() == log
    core.terminate()
    until("no process left", lambda: not engine.tree())
    host.wait_used(0)


def test_memory_is_back_whoever_is_killed(host: Host) -> None:
    engine = host.start(TWO, *SMALL).wait_ready()
    for process in reversed(engine.tree()):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may go with the one before
            process.kill()
    host.wait_used(0)
    host.wait_used(0, card=1)


def test_engine_killed_while_it_boots_is_a_refused_boot(host: Host) -> None:
    engine = host.start(replace(TWO, seconds=PhaseSeconds(weights_load=DEADLINE_S)), *SMALL)
    engine.wait_log("Starting to load model")
    engine.wait_titled("VLLM::EngineCore").kill()
    assert engine.wait_exit() == 1
    assert "Failed core proc(s): {'EngineCore': -9}" in engine.log()


def test_idle_engine_ends_in_order(host: Host) -> None:
    engine = host.start(TWO, *SMALL).wait_ready()
    engine.process.terminate()
    assert engine.wait_exit() == 0
    assert not engine.tree()
    assert engine.log().rstrip().endswith("INFO:     Application shutdown complete.")
    assert "[shutdown] Executor: all workers exited gracefully" in engine.log()
    host.wait_used(0)


def test_interrupt_ends_it_like_sigterm(host: Host) -> None:
    engine = host.start(TWO, *SMALL).wait_ready()
    for process in engine.tree():
        # the first one that hears it may end the others before it is their turn
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGINT)
    assert engine.wait_exit() == 0
    assert "KeyboardInterrupt" not in engine.log()


def test_sigterm_during_imports_ends_it_silently(host: Host) -> None:
    engine = host.start(replace(BASE, seconds=PhaseSeconds(imports=DEADLINE_S)), *SMALL)
    engine.process.terminate()
    assert engine.wait_exit() == -signal.SIGTERM
    assert engine.log() == ""


def test_sigterm_during_boot_waits_for_the_next_phase(host: Host) -> None:
    engine = host.start(replace(BASE, seconds=PhaseSeconds(weights_load=0.3)), *SMALL)
    engine.wait_log("Starting to load model")
    engine.process.terminate()
    assert engine.wait_exit() == -signal.SIGINT
    assert "KeyboardInterrupt: terminated" in engine.log()
    assert not engine.tree()


def test_request_in_flight_holds_up_the_end(host: Host) -> None:
    engine = host.start(replace(BASE, seconds=PhaseSeconds(per_token=1)), *SMALL).wait_ready()
    with engine.complete(8, 1000, stream=True):
        engine.process.terminate()
        engine.wait_log("Waiting for connections to close.")
        host.wait_used(0)
        assert engine.process.poll() is None
    assert engine.wait_exit() == 0


@pytest.mark.parametrize(
    ("phase", "held_mib"),
    tuple(zip(PHASES, (0, 0, 5120, 5120, 5120, 5120 + 1984, 5120 + 1984 + 576), strict=True)),
)
def test_hangs_with_what_the_phases_before_took(host: Host, phase: BootPhase, held_mib: int) -> None:
    engine = start_faulty(host, hang_in=phase)
    core = engine.wait_titled("VLLM::EngineCore")
    host.wait_used(held_mib * MIB)
    until("the core at rest", lambda: core.status() == psutil.STATUS_SLEEPING)
    assert engine.process.poll() is None
    assert engine.health() is None
    assert "Error" not in engine.log()


def test_second_sigterm_ends_a_hung_boot(host: Host) -> None:
    engine = start_faulty(host, hang_in="profile")
    host.wait_used(5120 * MIB)
    engine.process.terminate()
    assert engine.process.poll() is None

    def ended() -> bool:
        # signals that arrive together count once
        engine.process.terminate()
        return engine.process.poll() is not None

    until("the server's end", ended)
    assert engine.wait_exit() == -signal.SIGINT
    assert "force killing remaining process EngineCore" in engine.log()
    host.wait_used(0)


@pytest.mark.parametrize("phase", ["imports", *PHASES])
@pytest.mark.parametrize("ranks", [1, 2])
def test_dies_without_a_word(host: Host, phase: FaultPhase, ranks: int) -> None:
    spec = replace(BASE, ranks=ranks, faults=Faults(die_in=phase))
    engine = host.start(spec, *SMALL)
    assert engine.wait_exit() == 1
    assert "Error" not in engine.log()
    assert "Traceback" not in engine.log()
    until("no process left", lambda: not engine.tree())


@pytest.mark.parametrize("phase", ["imports", "worker_init", "kv_alloc", "request"])
def test_core_vanishes_and_the_status_says_nothing(host: Host, phase: FaultPhase) -> None:
    engine = start_faulty(host, exit_zero_in=phase)
    if phase == "request":
        assert engine.wait_ready().complete(8, 8).status_code == 500
    assert engine.wait_exit() == 0


@pytest.mark.parametrize("phase", PHASES)
def test_error_that_is_not_memory(host: Host, phase: FaultPhase) -> None:
    engine = start_faulty(host, error_in=phase)
    assert engine.wait_exit() == 1
    log = engine.log()
    assert "ValueError: arange's range must be a power of 2" in log
    assert "out of memory" not in log
    assert "not enough GPU memory" not in log


def test_error_while_importing(host: Host) -> None:
    engine = start_faulty(host, error_in="imports")
    assert engine.wait_exit() == 1
    assert engine.log().rstrip().endswith("cannot open shared object file: No such file or directory")


@pytest.mark.parametrize("phase", ["imports", "profile", "request"])
def test_garbage_does_not_stop_it(host: Host, phase: FaultPhase) -> None:
    engine = start_faulty(host, garbage_in=phase).wait_ready()
    assert engine.complete(8, 8).status_code == 200
    data = engine.log_path.read_bytes()
    assert b"x" * 2**20 in data
    assert b"\x00\xff\xfe half a line without an end \r" in data


def test_sigterm_can_be_ignored_by_all(host: Host) -> None:
    engine = start_faulty(host, ignore_sigterm=True).wait_ready()
    for process in engine.tree():
        process.terminate()
    assert engine.complete(8, 8).status_code == 200
    assert len(engine.tree()) == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_orphan_keeps_the_memory(host: Host, ranks: int) -> None:
    spec = replace(BASE, ranks=ranks, faults=Faults(leave_orphan=True))
    engine = host.start(spec, *SMALL).wait_ready()
    # it has the title of the process that it came from, and a session of its own
    orphan = until("the orphan", lambda: [one for one in engine.tree() if os.getsid(one.pid) == one.pid])[0]
    engine.process.terminate()
    assert engine.wait_exit() == 0
    assert orphan.is_running()
    assert host.used() == SERVING
    orphan.terminate()
    host.wait_used(0)


def test_accepted_and_never_answered(host: Host) -> None:
    engine = start_faulty(host, request_hang=True).wait_ready()
    with engine.complete(8, 8, stream=True):
        until("a running request", lambda: engine.metric("num_requests_running") == 1)
        assert engine.metric("generation_tokens_total") == 0


def test_engines_contend_for_a_card(host: Host) -> None:
    host.start(BASE, *SMALL).wait_ready()
    # 10 GiB less 7680 MiB are free: 2.5 of the 7.5 GiB that are asked for
    second = host.start(BASE, *SMALL)
    assert second.wait_exit() == 1
    assert "Free memory on device cuda:0 (2.5/10.0 GiB) on startup is less than desired" in second.log()
    host.start(BASE, *SMALL, visible="1").wait_ready()
    assert host.used() == host.used(1) == SERVING


def test_memory_freed_by_a_neighbour_disturbs_the_profile(host: Host) -> None:
    first = host.start(BASE, *SMALL).wait_ready()
    spec = replace(BASE, weights=GIB, seconds=PhaseSeconds(profile=DEADLINE_S / 20))
    second = host.start(spec, "--gpu-memory-utilization", "0.25")
    second.wait_log("torch.compile took")
    first.end()
    assert second.wait_exit() == 1
    assert (
        "AssertionError: Error in memory profiling. Initial free memory 2.5 GiB, current free memory 8.0"
        in second.log()
    )


def test_unknown_flag(host: Host) -> None:
    engine = host.start(BASE, "--no-such-flag", "3")
    assert engine.wait_exit() == 2
    assert engine.log().endswith("vllm: error: unrecognized arguments: --no-such-flag 3\n")


def test_forks_flags_are_unknown_to_vllm(host: Host) -> None:
    assert host.start(BASE, "--expert-precise-memory").wait_exit() == 2


def test_missing_model(host: Host) -> None:
    engine = host.start(BASE, model="/no/such/model")
    assert engine.wait_exit() == 1
    assert "HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/no/such/model'." in (
        engine.log()
    )


def test_busy_port(host: Host) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        engine = host.start(BASE, port=taken.getsockname()[1])
        assert engine.wait_exit() == 1
    assert engine.log().rstrip().endswith("OSError: [Errno 98] Address already in use")
    assert "EngineCore" not in engine.log()


def test_too_few_cards(host: Host) -> None:
    engine = host.start(TWO, *SMALL, visible="0")
    assert engine.wait_exit() == 1
    assert "AssertionError: DP adjusted local rank 1 is out of bounds for 1 devices." in engine.log()


def test_wrong_environment_is_explained(host: Host) -> None:
    engine = host.start(BASE, env={"KVBUDGET_MOCK_DEVICE": '{"weight": 1}'})
    assert engine.wait_exit() == 2
    assert "KVBUDGET_MOCK_DEVICE: Object contains unknown field `weight`" in engine.log()
