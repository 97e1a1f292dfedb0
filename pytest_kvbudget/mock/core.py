"""The engine core: boots the ranks phase by phase, then schedules requests on the KV pool."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Final, NoReturn

import msgspec

from pytest_kvbudget.mock import announce
from pytest_kvbudget.mock.boot import Boot
from pytest_kvbudget.mock.conditions import CompileCache
from pytest_kvbudget.mock.driver import DriverClient
from pytest_kvbudget.mock.failures import Failure, log_exception, uncaught
from pytest_kvbudget.mock.physics import Physics
from pytest_kvbudget.mock.process import Channel, Log, Message, set_title
from pytest_kvbudget.mock.workers import Executor, ManyProcesses, OneProcess, WorkerDiedError

TOKENS_AT_ONCE: Final = 512
"""Tokens that a request gets between two looks at other messages when generating takes no time."""


class Request(msgspec.Struct):
    """A request in the engine."""

    id: int
    prompt_tokens: int
    max_tokens: int
    blocks: int
    generated: int = 0
    started_at: float = 0.0


class Core:
    """One engine core process. ``channel`` leads to the API server, which may die without ending this process."""

    def __init__(self, physics: Physics, cards: list[int], sysfs: str, channel: Channel) -> None:
        self._physics = physics
        self._cards = cards
        self._sysfs = sysfs
        self._channel = channel
        self._log = Log("EngineCore")
        self._cache = CompileCache(sysfs)
        self._executor: Executor | None = None
        self._blocks = 0
        self._free_blocks = 0
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._stop = False

    def main(self) -> NoReturn:
        """The life of the process."""
        set_title("VLLM::EngineCore")
        faults = self._physics.spec.faults
        # a terminal's interrupt reaches every process; the server's SIGTERM is the one that counts
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN if faults.ignore_sigterm else self._on_sigterm)
        try:
            self._boot()
        except Failure as failure:
            self._failed("EngineCore failed to start.", failure)
        except WorkerDiedError as death:
            self._failed("EngineCore failed to start.", self._executor_failed(death, ("core", "super")))
        try:
            self._serve()
        except Failure as failure:
            self._failed("EngineCore encountered a fatal error.", failure)
        except WorkerDiedError as death:
            fatal = self._executor_failed(death, ("core_loop", "busy_loop", "input"))
            self._failed("EngineCore encountered a fatal error.", fatal)
        self._shut_down()

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        self._log.say("core.py:1454", "[shutdown] EngineCore: trigger received signal=SIGTERM")
        self._stop = True

    def _executor_failed(self, death: WorkerDiedError, frames: tuple[str, ...]) -> Failure:
        self._log.fail("multiproc_executor.py:315", str(death))
        return Failure("RuntimeError", "Executor failed.", frames)

    def _failed(self, title: str, failure: Failure) -> NoReturn:
        log_exception(self._log, "core.py:1510", title, failure, ())
        if self._executor is not None and self._executor.channels():
            self._executor.shut_down()
        frames = ("bootstrap", "run", "reraise", *failure.frames)
        uncaught(Failure(failure.kind, failure.text, frames, failure.cause, failure.notes), (), "EngineCore")
        self._channel.send({"type": "failed"})
        os._exit(1)

    def _phase(self, name: str) -> None:
        """A phase begins: tell the server, and commit the faults that concern the whole engine."""
        self._channel.send({"type": "phase"})
        faults = self._physics.spec.faults
        for fault, kind in ((faults.die_in, "die"), (faults.exit_zero_in, "vanish")):
            if fault == name:
                if self._executor is not None:
                    self._executor.kill()
                self._channel.send({"type": kind})
                os._exit(1)

    def _boot(self) -> None:
        physics, log = self._physics, self._log
        if physics.spec.keeps_cache and not physics.neuron:
            physics.cold = not self._cache.has(physics.compile_key())
        announce.engine(log, physics)
        if physics.ranks > 1:
            log.say(
                "multiproc_executor.py:153",
                "DP group leader: node_rank=0, node_rank_within_dp=0, master_addr=127.0.0.1, mq_connect_ip=127.0.0.1"
                f" (local), world_size={physics.ranks}, local_world_size={physics.ranks}",
            )
            executor: Executor = ManyProcesses(physics, self._cards, log, self._sysfs, self._channel)
        else:
            executor = OneProcess(physics, self._cards, log, DriverClient(self._sysfs))
        self._executor = executor
        self._channel.send({"type": "workers", "pids": executor.pids()})
        boot = Boot(physics, log, self._cache, executor)
        took_s, compiled_s = boot.run(self._phase)
        self._blocks, self._free_blocks = boot.blocks, boot.blocks - 1
        compiled = f" (compilation: {compiled_s:.2f} s)" if compiled_s else ""
        log.say("core.py:402", f"init engine (profile, create kv cache, warmup model) took {took_s:.2f} s{compiled}")

    def _serve(self) -> None:
        """Ready: schedule requests until told to stop. Lives on when the API server is gone, as vLLM's does."""
        assert self._executor is not None
        physics = self._physics
        self._channel.send({
            "type": "ready",
            "blocks": self._blocks,
            "block_tokens": physics.block_tokens,
            "concurrency": self._blocks / physics.blocks_for(physics.max_model_len),
            "max_model_len": physics.max_model_len,
        })  # fmt: skip
        with selectors.DefaultSelector() as selector, _signals_wake(selector):
            selector.register(self._channel, selectors.EVENT_READ, "server")
            for channel in self._executor.channels():
                selector.register(channel, selectors.EVENT_READ, "worker")
            while not self._stop:
                for key, _ in selector.select(self._wait_s()):
                    if key.data == "wake":
                        os.read(key.fd, 64)
                    elif key.data == "worker":
                        assert isinstance(key.fileobj, Channel)
                        raise self._executor.lost(key.fileobj)
                    else:
                        messages = self._channel.receive()
                        if messages is None:
                            selector.unregister(self._channel)
                        for message in messages or ():
                            self._handle(message)
                self._step()

    def _wait_s(self) -> float | None:
        """Until something is to be generated."""
        per_token = self._physics.spec.seconds.per_token
        if not self._running or self._physics.spec.faults.request_hang:
            return None
        now = time.monotonic()
        due = min(request.started_at + (request.generated + 1) * per_token for request in self._running)
        return max(0.0, due - now)

    def _handle(self, message: Message) -> None:
        if message["type"] == "add":
            prompt, answer = message["prompt_tokens"], message["max_tokens"]
            blocks = self._physics.blocks_for(prompt + answer)
            self._waiting.append(Request(message["id"], prompt, answer, blocks))
        elif message["type"] == "abort":
            for queue in (self._waiting, self._running):
                for request in [request for request in queue if request.id == message["id"]]:
                    self._leave(queue, request)
        self._report()

    def _leave(self, queue: list[Request], request: Request) -> None:
        queue.remove(request)
        if queue is self._running:
            self._free_blocks += request.blocks

    def _step(self) -> None:
        """Generate what is due, then start what fits, in order of arrival."""
        assert self._executor is not None
        for request in () if self._physics.spec.faults.request_hang else tuple(self._running):
            count = self._due(request)
            if count:
                request.generated += count
                self._channel.send({"type": "tokens", "id": request.id, "count": count})
            if request.generated >= request.max_tokens:
                self._leave(self._running, request)
                self._report()
                self._channel.send({"type": "finished", "id": request.id})
        while (
            self._waiting
            and self._waiting[0].blocks <= self._free_blocks
            and len(self._running) < self._physics.arguments.max_num_seqs
        ):
            request = self._waiting.pop(0)
            self._free_blocks -= request.blocks
            self._running.append(request)
            self._report()
            self._prefill(request)
            request.started_at = time.monotonic()

    def _prefill(self, request: Request) -> None:
        assert self._executor is not None
        self._phase("request")
        self._executor.run("prefill", request.prompt_tokens + request.max_tokens)

    def _due(self, request: Request) -> int:
        per_token = self._physics.spec.seconds.per_token
        left = request.max_tokens - request.generated
        if per_token == 0:
            return min(left, TOKENS_AT_ONCE)
        return min(left, int((time.monotonic() - request.started_at) / per_token) - request.generated)

    def _report(self) -> None:
        usable = self._blocks - 1
        self._channel.send({
            "type": "stats",
            "running": len(self._running),
            "waiting": len(self._waiting),
            "usage": (usable - self._free_blocks) / usable if usable else 0.0,
        })  # fmt: skip

    def _shut_down(self) -> NoReturn:
        assert self._executor is not None
        time.sleep(self._physics.spec.seconds.shutdown)
        say = self._log.say
        say("core.py:1635", "[shutdown] EngineCore: start mode=abort timeout=0s")
        if self._running or self._waiting:
            count = len(self._running) + len(self._waiting)
            say("core.py:1642", f"[shutdown] EngineCore: aborting in-flight requests count={count}")
        say("core.py:1666", "[shutdown] EngineCore: request processing complete; starting resource teardown")
        say("core.py:1499", "[shutdown] EngineCore: exiting busy loop")
        if self._executor.channels():
            self._executor.shut_down()
        self._channel.close()
        os._exit(0)


@contextlib.contextmanager
def _signals_wake(selector: selectors.BaseSelector) -> Iterator[None]:
    """Signals interrupt the selector for good, not only when they arrive inside it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing)
    selector.register(reading, selectors.EVENT_READ, "wake")
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)
