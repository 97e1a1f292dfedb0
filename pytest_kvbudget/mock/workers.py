"""The executor: the ranks of an engine, in worker processes or, on one card, in the engine core itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Final, NoReturn, Protocol

from pytest_kvbudget.mock.base import BaseRank, Memory
from pytest_kvbudget.mock.driver import DriverClient
from pytest_kvbudget.mock.failures import Failure, log_exception
from pytest_kvbudget.mock.physics import Physics
from pytest_kvbudget.mock.process import Channel, Log, Message, channel_pair, set_title

# frames of the engine core down to the executor, by method of a rank
_CORE: Final = {
    "compile": ("core", "super", "kv_caches", "determine"),
    "profile": ("core", "super", "kv_caches", "determine"),
    "kv_alloc": ("core", "super", "kv_caches", "from_config"),
    "capture": ("core", "super", "kv_caches", "compile_or_warm"),
    "build": ("core", "super", "kv_caches", "compile_or_warm"),
    "load_programs": ("core", "super", "kv_caches", "compile_or_warm"),
    "warm_up": ("core", "super", "kv_caches", "compile_or_warm"),
    "prefill": ("core_loop", "busy_loop", "engine_step", "step"),
}


_STARTING: Final = {"start", "load"}
"""Methods that a real worker process runs before it takes calls."""


class WorkerDiedError(Exception):
    """A worker process is gone."""


class Executor(Protocol):
    """Runs a phase on every rank."""

    def run(self, method: str, *arguments: int) -> list[int]:
        """Run a method of `Rank` everywhere; one result per rank.

        Raises:
            Failure: of one rank, with the frames of the core.
            WorkerDiedError: a worker process is gone.
        """
        ...

    def channels(self) -> list[Channel]:
        """What becomes readable when a worker process is gone."""
        ...

    def pids(self) -> list[int]:
        """The worker processes."""
        ...

    def lost(self, channel: Channel) -> WorkerDiedError:
        """What to raise when one of `channels` became readable."""
        ...

    def kill(self) -> None:
        """End worker processes at once."""
        ...

    def shut_down(self) -> None:
        """End worker processes in order."""
        ...


def make_rank(physics: Physics, rank: int, cards: list[int], log: Log, memory: Memory) -> BaseRank:
    """A rank of the dialect's kind; the other kinds are not even imported."""
    if physics.neuron:
        from pytest_kvbudget.mock.neuron.rank import NeuronRank  # noqa: PLC0415

        return NeuronRank(physics, rank, cards, log, memory)
    from pytest_kvbudget.mock.rank import Rank  # noqa: PLC0415

    return Rank(physics, rank, cards, log, memory)


def answer_of(worker: BaseRank, log: Log, method: str, arguments: Sequence[int]) -> Message:
    """What a worker process answers to a call; a failure is in its log."""
    try:
        return {"result": getattr(worker, method)(*arguments)}
    except Failure as failure:
        if method in _STARTING:
            outer = ("worker_main", "proc_init" if method == "start" else "proc_load")
            log_exception(log, "multiproc_executor.py:951", "WorkerProc failed to start.", failure, outer)
        else:
            title = "WorkerProc hit an exception."
            log_exception(log, "multiproc_executor.py:1063", title, failure, ("worker_rpc",))
        return {"text": failure.text}


def settle(answers: Sequence[Message], method: str) -> list[int]:
    """The results of all workers.

    Raises:
        Failure: one of them failed, in the executor's words.
    """
    failed = [answer for answer in answers if "text" in answer]
    if failed and method in _STARTING:
        raise Failure(
            "Exception",
            "WorkerProc initialization failed due to an exception in a background process. See stack trace for root"
            " cause.",
            ("core", "super", "executor", "multi_init", "wait_ready"),
        )
    if failed:
        raise Failure(
            "RuntimeError",
            f"Worker failed with error '{failed[0]['text']}', please check the stack trace above for the root cause",
            (*_CORE[method], "multi_rpc", "get_response"),
        )
    return [int(answer["result"]) for answer in answers]


def in_core(worker: BaseRank, method: str, arguments: Sequence[int]) -> int:
    """Run a method of the rank that lives in the engine core.

    Raises:
        Failure: the rank's, with the frames of the core.
    """
    try:
        return int(getattr(worker, method)(*arguments))
    except Failure as failure:
        if method in _STARTING:
            outer: tuple[str, ...] = ("core", "super", "executor", "uni_init" if method == "start" else "uni_load")
        else:
            outer = (*_CORE[method], "uni_rpc")
        frames = (*outer, *failure.frames)
        raise Failure(failure.kind, failure.text, frames, failure.cause, failure.notes) from None


class OneProcess:
    """One card: the rank lives in the engine core."""

    def __init__(self, physics: Physics, cards: list[int], log: Log, memory: Memory) -> None:
        self._rank = make_rank(physics, 0, cards, log, memory)
        self._orphan = physics.spec.faults.leave_orphan

    def run(self, method: str, *arguments: int) -> list[int]:
        """See `Executor`."""
        result = [in_core(self._rank, method, arguments)]
        if method == "warm_up" and self._orphan:
            self._rank.leave_orphan()
        return result

    def channels(self) -> list[Channel]:
        """See `Executor`."""
        return []

    def pids(self) -> list[int]:
        """See `Executor`."""
        return []

    def lost(self, channel: Channel) -> WorkerDiedError:
        """See `Executor`; there is no worker process to lose."""
        raise NotImplementedError(channel)

    def kill(self) -> None:
        """See `Executor`."""

    def shut_down(self) -> None:
        """See `Executor`."""


class ManyProcesses:
    """Several cards: ``VLLM::Worker_TP<n>`` processes, forked by the engine core."""

    def __init__(self, physics: Physics, cards: list[int], log: Log, sysfs: str, upstream: Channel) -> None:
        self._log = log
        self._workers: list[tuple[int, Channel]] = []
        for rank in range(physics.ranks):
            ours, theirs = channel_pair()
            pid = os.fork()
            if pid == 0:
                upstream.close()
                for _, channel in (*self._workers, (0, ours)):
                    channel.close()
                _worker(physics, rank, cards, sysfs, theirs)
            theirs.close()
            self._workers.append((pid, ours))

    def run(self, method: str, *arguments: int) -> list[int]:
        """See `Executor`."""
        for _, channel in self._workers:
            channel.send({"method": method, "arguments": arguments})
        answers = [channel.answer() for _, channel in self._workers]
        for rank, answer in enumerate(answers):
            if answer is None:
                death = self._bury(rank)
                self.kill()
                raise WorkerDiedError(death)
        return settle([answer for answer in answers if answer is not None], method)

    def _bury(self, index: int) -> str:
        pid, _ = self._workers.pop(index)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return f"Worker proc VllmWorker-{index} died unexpectedly (exit code: {code}), shutting down executor."

    def lost(self, channel: Channel) -> WorkerDiedError:
        """A worker's channel ended between two phases: the others are ended, as vLLM's monitor does."""
        index = next(index for index, (_, ours) in enumerate(self._workers) if ours is channel)
        death = self._bury(index)
        self.kill()
        return WorkerDiedError(death)

    def pids(self) -> list[int]:
        """See `Executor`."""
        return [pid for pid, _ in self._workers]

    def channels(self) -> list[Channel]:
        """See `Executor`."""
        return [channel for _, channel in self._workers]

    def kill(self) -> None:
        """See `Executor`."""
        for pid, _ in self._workers:
            # not reaped yet, so the pid is still this worker's
            os.kill(pid, signal.SIGKILL)
        self._reap()

    def shut_down(self) -> None:
        """See `Executor`."""
        self._log.say(
            "multiproc_executor.py:479", f"[shutdown] Executor: waiting for worker exit count={len(self._workers)}"
        )
        for _, channel in self._workers:
            channel.close()
        self._reap()
        self._log.say("multiproc_executor.py:486", "[shutdown] Executor: all workers exited gracefully")

    def _reap(self) -> None:
        for pid, _ in self._workers:
            os.waitpid(pid, 0)
        self._workers = []


def _worker(physics: Physics, rank: int, cards: list[int], sysfs: str, channel: Channel) -> NoReturn:
    """A worker process: runs what the core asks until the core is gone."""
    set_title(f"VLLM::Worker_TP{rank}")
    faults = physics.spec.faults
    # workers leave when the core does; a SIGTERM of their own is the only other way
    signal.signal(signal.SIGTERM, signal.SIG_IGN if faults.ignore_sigterm else signal.SIG_DFL)
    log = Log(f"Worker_TP{rank}")
    worker = make_rank(physics, rank, cards, log, DriverClient(sysfs))
    while (request := channel.answer()) is not None:
        answer = answer_of(worker, log, request["method"], request["arguments"])
        if request["method"] == "warm_up" and rank == 0 and faults.leave_orphan and "result" in answer:
            worker.leave_orphan()
        channel.send(answer)
    log.say("multiproc_executor.py:843", "Parent process exited, terminating worker queues")
    os._exit(0)
