"""Launcher ``process``: the engine is a child of a keeper on this host."""

from __future__ import annotations

import json
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import uuid4

import msgspec

from pytest_kvbudget.device.descriptor import OwnedDescriptor
from pytest_kvbudget.engine import ports
from pytest_kvbudget.engine.model import Command, EngineControlError, EngineEvent, EngineProcess, LaunchError
from pytest_kvbudget.engine.processes import alive, descendants, start_ticks
from pytest_kvbudget.engine.state import MARK, end_survivors, read_state, survivors

_START_S: Final = 60.0
"""For the keeper to start the engine; it takes tens of milliseconds where the host is not starved."""
_ANSWER_S: Final = 10.0
_UNKILLABLE_S: Final = 60.0
"""A killed process may stay this long in its driver before that is reported."""
_MESSAGE_BYTES: Final = 1 << 16

_BOOT: Final = (
    f"import sys; sys.path.append({str(Path(__file__).parents[3])!r}); "
    "from pytest_kvbudget.engine.keeper import main; main()"
)


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    """What the keeper sends: an `EngineEvent`, or an answer to an order."""

    kind: str
    at: float
    pid: int = 0
    title: str = ""
    status: int | None = None
    message: str = ""
    keeper_pid: int = 0
    keeper_ticks: int = 0


class ProcessLauncher:
    """Starts engines as processes of this host, each below a keeper of its own."""

    name = "process"

    def __init__(self, run: str = "") -> None:
        self._run = run

    def launch(
        self, command: Command, *, log_path: Path, state_path: Path, lease_descriptors: Sequence[int], critical: str
    ) -> KeptEngine:
        """Start the engine; see `pytest_kvbudget.engine.model.Launcher.launch`.

        Raises:
            LaunchError: no such command or folder, no permission, or a log or state file that cannot be written.
        """
        if not command.argv:
            raise LaunchError("the engine's command is empty; expected a program and its arguments")
        try:
            re.compile(critical)
        except re.error as error:
            raise LaunchError(f"critical processes: {critical!r} is no regular expression: {error}") from None
        order = _start_order(command, run=self._run, log_path=log_path, state_path=state_path, critical=critical)
        control, events = _start_keeper(lease_descriptors, state_path)
        try:
            _send(control, order)
            started = _first_message(events)
        except BaseException:
            # End-of-file tells the keeper to end whatever it may have started.
            control.close()
            events.close()
            raise
        descriptor = OwnedDescriptor(events.detach())
        os.set_blocking(descriptor.fileno(), False)
        return KeptEngine(control, descriptor, started, log_path=log_path, state_path=state_path)


class KeptEngine:
    """An engine below its keeper, as its owner sees it."""

    def __init__(
        self, control: OwnedDescriptor, events: OwnedDescriptor, started: _Message, *, log_path: Path, state_path: Path
    ) -> None:
        self._control = control
        self._events = events
        self._started = started
        self._log_path = log_path
        self._state_path = state_path
        self._pending: list[EngineEvent] = []
        self._keeper_gone = False
        self._engine_gone = False
        self._left = False

    @property
    def log_path(self) -> Path:
        """Standard output and standard error of every engine process, together."""
        return self._log_path

    @property
    def root_pid(self) -> int:
        """Process id of the engine's first process."""
        return self._started.pid

    @property
    def keeper_pid(self) -> int:
        """Process id of the keeper, which holds the leases."""
        return self._started.keeper_pid

    def fileno(self) -> int:
        """A descriptor that becomes readable when `events` has something, and stays so once the keeper is gone."""
        return self._events.fileno()

    def events(self) -> Sequence[EngineEvent]:
        """Events since the last call, without waiting."""
        self._receive()
        found, self._pending = self._pending, []
        return found

    def pids(self) -> Sequence[int]:
        """Every living process of the engine."""
        if alive(self._started.keeper_pid, self._started.keeper_ticks):
            return [process.pid for process in descendants(self._started.keeper_pid) if process.running]
        return sorted(self._survivors())

    def stop(self, grace_s: float) -> None:
        """End the engine: SIGTERM, again after a while, SIGKILL after ``grace_s`` seconds; returns when all are gone.

        An engine that was handed over is not touched.

        Raises:
            EngineControlError: processes that SIGKILL did not end, by id: a hung driver holds them, or they are
                another user's. Their devices are still leased.
        """
        if self._left:
            return
        with suppress(LaunchError):
            _send(self._control, {"order": "stop", "grace_s": grace_s})
        if not self._wait(grace_s + _UNKILLABLE_S):
            raise EngineControlError(
                f"processes {list(self.pids())} of the engine live {_UNKILLABLE_S:g} s after SIGKILL; their keeper "
                f"{self.keeper_pid} goes on trying: look at them with ps (state D is a hung driver)"
            )
        if not self._engine_gone:
            left = end_survivors(read_state(self._state_path), grace_s=0.0)
            if left:
                raise EngineControlError(f"the keeper was killed, and processes {sorted(left)} could not be ended")

    def leave(self) -> None:
        """Hand the engine over: it lives on when this process ends, and is never ended by us again.

        Raises:
            EngineControlError: there is no engine to hand over any more, or its keeper does not answer.
        """
        if self._left:
            return
        with suppress(LaunchError):
            _send(self._control, {"order": "leave"})
        deadline = time.monotonic() + _ANSWER_S
        while not self._left:
            if self._keeper_gone or time.monotonic() > deadline:
                raise EngineControlError("the engine cannot be handed over: it is gone, or its keeper is")
            self._poll(deadline)

    def _wait(self, timeout_s: float) -> bool:
        """Wait until the keeper is gone, and with it the engine."""
        deadline = time.monotonic() + timeout_s
        while not self._keeper_gone and time.monotonic() < deadline:
            self._poll(deadline)
        return self._keeper_gone

    def _poll(self, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._events.fileno(), select.POLLIN)
        poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        self._receive()

    def _receive(self) -> None:
        while not self._keeper_gone:
            try:
                data = os.read(self._events.fileno(), _MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if data:
                self._note(msgspec.json.decode(data, type=_Message))
                continue
            self._keeper_gone = True
            if not self._engine_gone:
                # Whoever killed the keeper killed the root with it; what else lives is for `stop` to end.
                message = "the keeper of the engine was killed"
                now = time.monotonic()
                self._pending.append(EngineEvent(kind="exited", at=now, pid=self.root_pid, message=message))

    def _note(self, message: _Message) -> None:
        if message.kind == "left":
            self._left = True
            return
        self._engine_gone = self._engine_gone or message.kind in {"gone", "failed"}
        self._pending.append(msgspec.convert(message, EngineEvent, from_attributes=True))

    def _survivors(self) -> Mapping[int, int]:
        try:
            return survivors(read_state(self._state_path))
        except ValueError:
            return {}


def owns_port(process: EngineProcess, host: str, port: int) -> bool:
    """Whether whatever answers at ``host`` and ``port`` is a process of this engine, and nobody else's."""
    return ports.owned_by(process.pids(), host, port)


def _start_order(
    command: Command, *, run: str, log_path: Path, state_path: Path, critical: str
) -> Mapping[str, object]:
    owner = os.getpid()
    mark = uuid4().hex
    return {
        "argv": [_to_text(argument) for argument in command.argv],
        "env": {_to_text(name): _to_text(value) for name, value in {**command.env, MARK: mark}.items()},
        "mark": mark,
        "cwd": _to_text(command.cwd),
        "log": _to_text(str(log_path.absolute())),
        "state": _to_text(str(state_path.absolute())),
        "critical": critical,
        "run": run,
        "owner_pid": owner,
        "owner_ticks": start_ticks(owner),
    }


def _to_text(value: str) -> str:
    """One character per byte, so that no encoding on the way can change what the engine gets."""
    return os.fsencode(value).decode("latin-1")


def _start_keeper(lease_descriptors: Sequence[int], state_path: Path) -> tuple[OwnedDescriptor, socket.socket]:
    """Start a keeper; returns our ends of its control pipe and its event socket."""
    control_read, control_write = os.pipe()
    control = OwnedDescriptor(control_write)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            handed = (control_read, theirs.fileno())
            argv = (sys.executable, "-I", "-S", "-c", _BOOT, *map(str, handed), str(state_path))
            # It forks at once and its first process ends: the wait is for an interpreter's start, no longer.
            subprocess.run(
                argv,
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(*handed, *lease_descriptors),
                start_new_session=True,
            )
    except (OSError, subprocess.CalledProcessError) as error:
        control.close()
        ours.close()
        raise LaunchError(f"the keeper of the engine cannot be started with {sys.executable!r}: {error}") from None
    except BaseException:
        control.close()
        ours.close()
        raise
    finally:
        os.close(control_read)
    return control, ours


def _send(control: OwnedDescriptor, order: Mapping[str, object]) -> None:
    rest = json.dumps(order).encode() + b"\n"
    try:
        while rest:
            rest = rest[os.write(control.fileno(), rest) :]
    except OSError as error:
        raise LaunchError(f"the keeper of the engine takes no orders: {error.strerror}") from None


def _first_message(events: socket.socket) -> _Message:
    """Wait for ``started``, and leave it where `KeptEngine.events` finds it.

    Raises:
        LaunchError: the engine did not start.
    """
    events.settimeout(_START_S)
    try:
        data = events.recv(_MESSAGE_BYTES, socket.MSG_PEEK)
    except TimeoutError:
        raise LaunchError(f"the keeper of the engine did not start it within {_START_S:g} s") from None
    except OSError as error:
        raise LaunchError(f"the keeper of the engine ended before it started it: {error.strerror}") from None
    if not data:
        raise LaunchError("the keeper of the engine ended before it started it")
    message = msgspec.json.decode(data, type=_Message)
    if message.kind != "started":
        raise LaunchError(message.message)
    return message
