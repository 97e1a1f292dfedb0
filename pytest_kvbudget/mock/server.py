"""The API server: the engine's first process, from its arguments to its end."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

import msgspec

from pytest_kvbudget.mock import announce
from pytest_kvbudget.mock.api import DEAD, Api
from pytest_kvbudget.mock.arguments import Arguments, UsageError, parse, refuse
from pytest_kvbudget.mock.base import hang, print_garbage
from pytest_kvbudget.mock.conditions import begin, shape_key
from pytest_kvbudget.mock.core import Core
from pytest_kvbudget.mock.driver import DriverError, ensure_driver
from pytest_kvbudget.mock.failures import Failure, log_exception, uncaught
from pytest_kvbudget.mock.frames import SERVE
from pytest_kvbudget.mock.neuron.announce import check
from pytest_kvbudget.mock.physics import Physics
from pytest_kvbudget.mock.process import Channel, Log, Message, channel_pair, raw
from pytest_kvbudget.mock.spec import MockDevice
from pytest_kvbudget.mock.wire import Connection

DEVICE_VARIABLE: Final = "KVBUDGET_MOCK_DEVICE"
VISIBLE_VARIABLE: Final = "KVBUDGET_MOCK_VISIBLE"
NEURON_VISIBLE: Final = "NEURON_VISIBLE_DEVICES"
SYSFS_VARIABLE: Final = "KVBUDGET_MOCK_SYSFS"
CORE_EXIT_S: Final = 5.0
"""How long a core that was told to end may take."""
_STARTUP: Final = (*SERVE, "async_llm", "core_client", "wait_startup")


class Server:
    """The API server process."""

    def __init__(self, spec: MockDevice, arguments: Arguments, cards: list[int], sysfs: str) -> None:
        self._spec = spec
        self._arguments = arguments
        self._cards = cards
        self._sysfs = sysfs
        self._log = Log("APIServer")
        self._terms = 0
        self._core_pid = 0
        self._workers: list[int] = []
        self._connections: set[Connection] = set()
        self._selector = selectors.DefaultSelector()

    def main(self) -> NoReturn:
        """Boot, serve, end the process."""
        announce.banner(self._log, self._spec, self._arguments, self._cards, self._sysfs)
        try:
            listener = self._bind()
            announce.check_model(self._arguments)
            announce.check_arguments(self._spec, self._arguments)
            if self._spec.dialect == "neuron":
                check(self._arguments, os.environ)
            conditions = begin(self._spec, shape_key(self._arguments, dict(os.environ)), self._sysfs)
            physics = Physics(self._spec, self._arguments, os.environ, conditions)
            announce.configured(self._log, physics)
        except Failure as failure:
            uncaught(failure, ())
            os._exit(1)
        ensure_driver(self._sysfs, self._spec, os.getpid(), cards=max(self._cards) + 1)
        channel = self._fork_core(physics, listener)
        self._watch_signals()
        ready = self._boot(channel)
        self._serve(listener, channel, Api(self._spec, self._arguments, channel, ready))

    def _bind(self) -> socket.socket:
        """Bound, not listening: connections are refused until the engine is ready."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self._arguments.host, self._arguments.port))
        except OSError as error:
            text = f"[Errno {error.errno}] {error.strerror}"
            raise Failure("OSError", text, (*SERVE[:3], "setup", "setup_server", "bind")) from None
        return listener

    def _fork_core(self, physics: Physics, listener: socket.socket) -> Channel:
        ours, theirs = channel_pair()
        self._core_pid = os.fork()
        if self._core_pid == 0:
            listener.close()
            ours.close()
            Core(physics, self._cards, self._sysfs, theirs).main()
        theirs.close()
        return ours

    def _watch_signals(self) -> None:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing)
        self._selector.register(reading, selectors.EVENT_READ, "wake")
        if self._spec.faults.ignore_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._on_sigterm)

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        self._terms += 1

    def _boot(self, channel: Channel) -> Message:
        """Wait for the engine; the first SIGTERM is heard at the next phase only, as with vLLM."""
        self._selector.register(channel, selectors.EVENT_READ, "core")
        while True:
            for key, _ in self._selector.select():
                if key.data == "wake":
                    os.read(key.fd, 64)
                    if self._terms > 1:
                        self._interrupt(channel)
                    continue
                messages = channel.receive()
                for message in messages or ():
                    if message["type"] == "ready":
                        return message
                    self._boot_message(channel, message)
                if messages is None:
                    self._startup_failed()

    def _boot_message(self, channel: Channel, message: Message) -> None:
        kind = message["type"]
        if kind == "workers":
            self._workers = message["pids"]
        elif kind == "phase" and self._terms:
            self._interrupt(channel)
        elif kind == "die":
            os._exit(1)
        elif kind == "vanish":
            self._engine_gone(crashed=False)
            time.sleep(self._spec.seconds.linger)
            os._exit(0)
        elif kind == "failed":
            self._startup_failed()

    def _startup_failed(self) -> NoReturn:
        _, status = os.waitpid(self._core_pid, 0)
        failed = {"EngineCore": os.waitstatus_to_exitcode(status)}
        text = f"Engine core initialization failed. See root cause above. Failed core proc(s): {failed}"
        uncaught(Failure("RuntimeError", text, _STARTUP), ())
        os._exit(1)

    def _interrupt(self, channel: Channel) -> NoReturn:
        """SIGTERM before the engine was ready: Python ends by the interrupt that vLLM makes of it."""
        self._end_core(channel)
        frames = (*SERVE, "async_llm", "core_client", "poll", "interrupt")
        uncaught(Failure("KeyboardInterrupt", "terminated", frames), ())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        hang()

    def _serve(self, listener: socket.socket, channel: Channel, api: Api) -> NoReturn:
        listener.listen(128)
        self._selector.register(listener, selectors.EVENT_READ, "listener")
        announce.serving(self._log, f"{self._arguments.host or '0.0.0.0'}:{self._arguments.port}")  # noqa: S104
        leave_at: float | None = None
        while leave_at is None or time.monotonic() < leave_at:
            timeout = None if leave_at is None else max(0.0, leave_at - time.monotonic())
            for key, events in self._selector.select(timeout):
                if key.data == "wake":
                    os.read(key.fd, 64)
                elif key.data == "core":
                    if not self._hear(channel, api):
                        self._selector.unregister(channel)
                        leave_at = time.monotonic() + self._spec.seconds.linger
                elif key.data == "listener":
                    self._accept(listener)
                elif isinstance(key.fileobj, Connection) and key.fileobj in self._connections:
                    self._talk(key.fileobj, events, api)
            self._tidy(api)
            if self._terms and leave_at is None:
                self._shut_down(channel, listener, api)
        self._close_server()
        raw(f"INFO:     Finished server process [{os.getpid()}]\n")
        os._exit(0)

    def _hear(self, channel: Channel, api: Api) -> bool:
        """Messages of the core; false when it is gone."""
        messages = channel.receive()
        if messages is None:
            self._engine_gone(crashed=not api.dead)
            api.engine_died()
            return False
        for message in messages:
            if message["type"] == "die":
                os._exit(1)
            if message["type"] == "failed":
                # it has said why; its end is no surprise
                api.dead = True
            api.engine_says(message)
        return True

    def _engine_gone(self, *, crashed: bool) -> None:
        os.waitpid(self._core_pid, 0)
        log = self._log
        if crashed:
            log.say("utils.py:628", "[shutdown] Process manager: send sigterm to process EngineCore")
            log.caution("core_client.py:817", "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup")
            self._clean_up("default")
        failure = Failure("vllm.v1.engine.exceptions.EngineDeadError", DEAD, ("output_handler", "get_output"))
        log_exception(log, "async_llm.py:906", "AsyncLLM output_handler failed.", failure, ())

    def _clean_up(self, timeout: str) -> None:
        log = self._log
        log.say("core_client.py:770", f"[shutdown] MPClient: start timeout={timeout}")
        log.say("core_client.py:772", "[shutdown] MPClient: stopping engine manager")
        log.say("core_client.py:774", "[shutdown] MPClient: engine manager stopped")
        log.say("core_client.py:775", "[shutdown] MPClient: cleaning up background resources")
        log.say("core_client.py:777", "[shutdown] MPClient: complete")

    def _accept(self, listener: socket.socket) -> None:
        client, (host, port) = listener.accept()
        connection = Connection(client, f"{host}:{port}")
        self._connections.add(connection)
        self._selector.register(connection, selectors.EVENT_READ, "client")

    def _talk(self, connection: Connection, events: int, api: Api) -> None:
        if events & selectors.EVENT_READ and not connection.receive():
            self._drop(connection, api)
            return
        if events & selectors.EVENT_WRITE and not connection.flush():
            self._drop(connection, api)
            return
        while (request := connection.next_request()) is not None:
            api.handle(connection, request)

    def _drop(self, connection: Connection, api: Api) -> None:
        api.client_left(connection)
        self._connections.discard(connection)
        self._selector.unregister(connection)
        connection.close()

    def _tidy(self, api: Api) -> None:
        """Close what is done, and wait for writing only where something is to be written."""
        for connection in list(self._connections):
            if connection.closing and not connection.backlog:
                self._drop(connection, api)
                continue
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.backlog else 0)
            if self._selector.get_key(connection).events != wanted:
                self._selector.modify(connection, wanted, "client")

    def _shut_down(self, channel: Channel, listener: socket.socket, api: Api) -> NoReturn:
        """SIGTERM: the engine goes first; clients that wait for an answer then hold the server up, as in vLLM."""
        log = self._log
        log.say("launcher.py:254", "[shutdown] API server: shutdown triggered")
        log.say("launcher.py:270", "[shutdown] API server: stopping engine client mode=abort timeout=0s")
        log.say("core_client.py:770", "[shutdown] MPClient: start timeout=0s")
        log.say("core_client.py:772", "[shutdown] MPClient: stopping engine manager")
        self._end_core(channel)
        log.say("core_client.py:774", "[shutdown] MPClient: engine manager stopped")
        log.say("core_client.py:775", "[shutdown] MPClient: cleaning up background resources")
        log.say("core_client.py:777", "[shutdown] MPClient: complete")
        log.say("launcher.py:279", "[shutdown] API server: engine client stopped")
        log.say("launcher.py:282", "[shutdown] API server: signalling HTTP server shutdown")
        log.say("launcher.py:304", "[shutdown] API server: shutting down FastAPI HTTP server")
        self._selector.unregister(listener)
        listener.close()
        if api.busy:
            raw("INFO:     Shutting down\nINFO:     Waiting for connections to close. (CTRL+C to force quit)\n")
        while api.busy:
            for key, events in self._selector.select():
                if key.data == "wake":
                    os.read(key.fd, 64)
                elif isinstance(key.fileobj, Connection):
                    self._talk(key.fileobj, events, api)
        self._close_server()
        os._exit(0)

    def _end_core(self, channel: Channel) -> None:
        """SIGTERM, and SIGKILL to whatever of the engine is then left."""
        log = self._log
        log.say("utils.py:628", "[shutdown] Process manager: send sigterm to process EngineCore")
        os.kill(self._core_pid, signal.SIGTERM)
        if not self._wait_for_core(channel, self._spec.seconds.shutdown + CORE_EXIT_S):
            log.caution("utils.py:648", "[shutdown] Process manager: force killing remaining processes count=1")
            log.caution(
                "utils.py:653",
                f"[shutdown] Process manager: force killing remaining process EngineCore pid {self._core_pid}",
            )
            for rank, pid in enumerate(self._workers):
                # workers are the core's children and not reaped before it is gone
                log.caution(
                    "system_utils.py:225", f"[shutdown] force killing sub process VLLM::Worker_TP{rank} pid {pid}"
                )
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.kill(self._core_pid, signal.SIGKILL)
        os.waitpid(self._core_pid, 0)

    def _wait_for_core(self, channel: Channel, seconds: float) -> bool:
        """Whether the core left in time."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(channel, selectors.EVENT_READ)
            while selector.select(max(0.0, deadline - time.monotonic())):
                if channel.receive() is None:
                    return True
        return False

    def _close_server(self) -> None:
        raw("INFO:     Shutting down\nINFO:     Waiting for application shutdown.\n"
            "INFO:     Application shutdown complete.\n")  # fmt: skip


def _device() -> tuple[MockDevice, str]:
    """The device that the environment describes, and where it is shown."""
    text = os.environ.get(DEVICE_VARIABLE, "{}")
    try:
        spec = msgspec.json.decode(text, type=MockDevice)
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"{DEVICE_VARIABLE}: {error}; expected the JSON of a [target.NAME.mock] table, in bytes"
        ) from None
    return spec, os.environ.get(SYSFS_VARIABLE) or spec.sysfs or _default_tree()


def _default_tree() -> str:
    import tempfile  # noqa: PLC0415 - a launcher names the tree, and every import delays the boot

    return str(Path(tempfile.gettempdir(), f"kvbudget-mock-{os.getuid()}", "default"))


def _cards(spec: MockDevice, ranks: int) -> list[int]:
    """Cards, or logical cores, which may also be given as on a real Neuron host, with ranges."""
    name = NEURON_VISIBLE if spec.dialect == "neuron" and NEURON_VISIBLE in os.environ else VISIBLE_VARIABLE
    text = os.environ.get(name, "")
    if not text:
        return list(range(ranks))
    cards: list[int] = []
    try:
        for word in text.split(","):
            first, dash, last = word.partition("-")
            cards += range(int(first), int(last if dash else first) + 1)
    except ValueError:
        raise UsageError(f"{name}: {text!r} is no list of numbers, such as '0,1'") from None
    return cards


def _imports(spec: MockDevice) -> None:
    """The silent first seconds, in which SIGTERM ends the process at once."""
    time.sleep(spec.seconds.imports)
    faults = spec.faults
    if faults.hang_in == "imports":
        hang()
    if faults.die_in == "imports":
        os._exit(1)
    if faults.exit_zero_in == "imports":
        os._exit(0)
    if faults.garbage_in == "imports":
        print_garbage(spec.seed)
    if faults.error_in == "imports":
        text = "libamdhip64.so.7: cannot open shared object file: No such file or directory"
        uncaught(Failure("ImportError", text, ("vllm", "main", "import")), ())
        os._exit(1)


def main(argv: list[str]) -> NoReturn:
    """The command ``python -m pytest_kvbudget.mock serve MODEL [flags of vllm serve]``."""
    try:
        spec, sysfs = _device()
        _imports(spec)
        arguments = parse(argv, fork=spec.dialect == "rdna4")
        cards = _cards(spec, arguments.tensor_parallel_size or spec.ranks)
    except UsageError as error:
        refuse(error)
    try:
        Server(spec, arguments, cards, sysfs).main()
    except DriverError as error:
        uncaught(Failure("DriverError", str(error), SERVE), ())
        os._exit(1)
