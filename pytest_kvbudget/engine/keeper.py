"""The keeper: a process of its own that owns one engine, so that the engine's life does not depend on pytest's.

It runs with the standard library alone and starts in some 25 ms. The owner (a pytest process, see
`pytest_kvbudget.engine.launchers.process`) hands it three things by descriptor: a control pipe, an event socket and
the leases' locked files. Orders are JSON lines, the first one says what to start; events are JSON messages.

* All descendants of the engine stay below the keeper, however they detach: it is their subreaper. No child left
  therefore means: no process of the engine left, and only then does the keeper end and free the leases.
* When the owner is gone - end-of-file on the control pipe, or its pidfd where a forked child of it still holds the
  pipe - everything is killed, unless the owner said ``leave`` before.
* Deaths wake it up: SIGCHLD for its own children, pidfds for critical processes further down. Only who is there is
  found by looking, several times a second.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import signal
import sys
import time

from pytest_kvbudget.engine.processes import (
    Process,
    alive,
    descendants,
    open_pidfd,
    send_signal,
    start_ticks,
    title,
)

STATE_SCHEMA = 1

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SCAN_S = 0.1
_SCAN_SHARE = 20
"""A scan may take one part in this many of the time: on a host with many processes it happens less often."""
_TERM_AGAIN_S = 5.0
"""vLLM loses a SIGTERM that arrives just after it spawned its core; a second one ends it."""
_REST_S = 2.0
"""From SIGTERM to SIGKILL for processes that outlived the engine's root."""
_KILL_PAUSE_S = (0.005, 0.2)
"""First and longest pause between two rounds of SIGKILL; a process in the kernel's hands may take its time."""
_STORM_ROUNDS = 3
"""Rounds after which whole process groups are killed: a fork storm outruns a walk over ``/proc``."""
_TITLE_CHARS = 200


class _Critical:
    """A process without which the engine cannot serve."""

    __slots__ = ("name", "pidfd", "ticks")

    def __init__(self, ticks: int, name: str, pidfd: int | None) -> None:
        self.ticks = ticks
        self.name = name
        self.pidfd = pidfd


class _Channel:
    """The owner: orders come from it, events go to it, and it may be gone at any moment."""

    def __init__(self, control: int, events: int) -> None:
        self.control = control
        self.events = events
        self.gone = False
        self.left = False
        self.pidfd: int | None = None
        self._owner = (0, 0)
        self._received = b""
        self._unsent: list[bytes] = []
        for descriptor in (control, events):
            os.set_inheritable(descriptor, False)  # noqa: FBT003
        os.set_blocking(events, False)  # noqa: FBT003

    def first_order(self) -> dict[str, object] | None:
        """Wait for the first order; ``None`` where the owner went away before it was complete."""
        while b"\n" not in self._received:
            data = os.read(self.control, 1 << 16)
            if not data:
                return None
            self._received += data
        os.set_blocking(self.control, False)  # noqa: FBT003
        return self._next_order()

    def watch(self, pid: int, ticks: int) -> None:
        """From now on notice when this process, the owner, is gone."""
        self._owner = (pid, ticks)
        self.pidfd = open_pidfd(pid, ticks)
        self.look()

    def look(self) -> None:
        """Notice a dead owner where there is no pidfd of it."""
        if self.pidfd is None and not alive(*self._owner):
            self.gone = True

    def orders(self) -> list[dict[str, object]]:
        """Orders that have come, without waiting. Whatever the owner said before it died is among them."""
        while True:
            try:
                data = os.read(self.control, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                self.gone = True
                break
            self._received += data
        found = []
        while (order := self._next_order()) is not None:
            found.append(order)
        return found

    def _next_order(self) -> dict[str, object] | None:
        line, end, rest = self._received.partition(b"\n")
        if not end:
            return None
        self._received = rest
        order: dict[str, object] = json.loads(line)
        return order

    def send(self, kind: str, **fields: object) -> None:
        """Send an event, later if the owner is slow to read."""
        message = {"kind": kind, "at": time.monotonic(), **fields}
        self._unsent.append(json.dumps(message).encode())
        self.flush()

    def flush(self) -> None:
        """Send what can be sent now."""
        try:
            while self._unsent:
                os.write(self.events, self._unsent[0])
                del self._unsent[0]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()

    @property
    def unsent(self) -> bool:
        """Events wait for the owner to read, and it may still do so."""
        return bool(self._unsent) and not self.gone


class Keeper:
    """Starts one engine, watches it, and ends it."""

    def __init__(self, channel: _Channel, order: dict[str, object]) -> None:
        self._channel = channel
        self._order = order
        self._pattern = re.compile(str(order["critical"]))
        self._poll = select.poll()
        self._root: Process | None = None
        self._root_alive = False
        self._none_left = False
        self._critical: dict[int, _Critical] = {}
        self._statuses: dict[int, int] = {}
        self._seen: list[tuple[int, int, str]] = []
        self._next_scan = 0.0
        self._stop_at: float | None = None
        self._term_again_at: float | None = None
        self._rest_at: float | None = None
        self._kill_rounds = 0
        self._next_kill: float | None = None

    def run(self) -> None:
        """Keep the engine until no process of it is left."""
        wake = self._wake_on_children()
        message = start_failure = self._start()
        if message is not None:
            self._channel.send("failed", message=start_failure)
            self._linger()
            return
        for descriptor in (wake, self._channel.control, self._channel.pidfd):
            if descriptor is not None:
                self._poll.register(descriptor, select.POLLIN)
        while not self._none_left:
            self._step(wake)
        self._write_state()
        self._channel.send("gone")
        self._linger()

    def _step(self, wake: int) -> None:
        """Sleep until something happens or is due, and deal with it."""
        ready = {descriptor for descriptor, _ in self._poll.poll(self._timeout_ms())}
        if wake in ready:
            os.read(wake, 1 << 12)
        if self._channel.pidfd in ready:
            self._channel.gone = True
        self._reap()
        self._critical_deaths(ready)
        if not self._channel.left:
            self._obey()
        now = time.monotonic()
        if now >= self._next_scan:
            self._scan()
        self._advance(now)
        self._channel.flush()

    def _timeout_ms(self) -> float:
        moments = [self._next_scan]
        moments += [m for m in (self._stop_at, self._term_again_at, self._rest_at, self._next_kill) if m is not None]
        return max(0.0, min(moments) - time.monotonic()) * 1000

    # -- the start

    def _wake_on_children(self) -> int:
        read, write = os.pipe()
        os.set_blocking(read, False)  # noqa: FBT003
        os.set_blocking(write, False)  # noqa: FBT003
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        return read

    def _start(self) -> str | None:
        """Start the engine; the reason where that fails."""
        if _prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
            return "this kernel lets no process adopt orphans (PR_SET_CHILD_SUBREAPER)"
        try:
            log = os.open(self._bytes("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            self._write_state(must=True)
        except OSError as error:
            return f"cannot write {os.fsdecode(error.filename)!r}: {error.strerror}"
        read, write = os.pipe()
        keeper = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_engine(keeper, log, write)
        os.close(write)
        os.close(log)
        with os.fdopen(read, "rb") as pipe:
            problem = pipe.read()  # ends when the command has taken over
        if problem:
            os.waitpid(pid, 0)
            return problem.decode("utf-8", "replace")
        self._root = Process(pid, keeper, pid, start_ticks(pid) or 0, running=True)
        self._root_alive = True
        self._write_state()
        self._channel.send("started", pid=pid, keeper_pid=keeper, keeper_ticks=start_ticks(keeper))
        return None

    def _become_engine(self, keeper: int, log: int, problems: int) -> None:
        """In the forked child: become the command, or say why not. Never returns."""
        argv = [_to_bytes(text) for text in self._list("argv")]
        try:
            # Should the keeper itself be killed, the root goes with it.
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:
                os._exit(1)
            os.setpgid(0, 0)
            for number in (*_IGNORED, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            null = os.open("/dev/null", os.O_RDONLY)
            for target, source in enumerate((null, log, log)):
                os.dup2(source, target)
            environment = {_to_bytes(name): _to_bytes(value) for name, value in self._pairs("env")}
            try:
                os.chdir(self._bytes("cwd"))
            except OSError as error:
                _report(problems, f"cannot enter the folder {os.fsdecode(self._bytes('cwd'))!r}: {error.strerror}")
            os.execvpe(argv[0], argv, environment)  # noqa: S606
        except OSError as error:
            _report(problems, f"cannot run {os.fsdecode(argv[0])!r}: {error.strerror}")
        except Exception as error:  # noqa: BLE001 - a child of ours must never run on into the keeper's code
            _report(problems, f"cannot run {os.fsdecode(argv[0])!r}: {type(error).__name__}: {error}")
        os._exit(127)

    def _bytes(self, key: str) -> bytes:
        return _to_bytes(str(self._order[key]))

    def _list(self, key: str) -> list[str]:
        value = self._order[key]
        return [str(item) for item in value] if isinstance(value, list) else []

    def _pairs(self, key: str) -> list[tuple[str, str]]:
        value = self._order[key]
        return [(str(k), str(v)) for k, v in value.items()] if isinstance(value, dict) else []

    # -- what happens

    def _reap(self) -> None:
        """Collect children that have ended: the root, and orphans that came to us."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._none_left = True
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if self._root_alive and self._root is not None and pid == self._root.pid:
                self._root_alive = False
                self._channel.send("exited", pid=pid, status=code)
            elif pid in self._critical:
                self._statuses[pid] = code

    def _critical_deaths(self, ready: set[int]) -> None:
        for pid, process in list(self._critical.items()):
            if pid not in self._statuses and process.pidfd not in ready:
                continue
            self._critical_died(pid, process)

    def _critical_died(self, pid: int, process: _Critical) -> None:
        del self._critical[pid]
        if process.pidfd is not None:
            self._poll.unregister(process.pidfd)
            os.close(process.pidfd)
        self._channel.send("critical_exited", pid=pid, title=process.name, status=self._statuses.pop(pid, None))

    def _obey(self) -> None:
        """Carry out what the owner ordered, and what its death means."""
        for order in self._channel.orders():
            if order["order"] == "leave":
                self._leave()
                return
            grace_s = float(str(order.get("grace_s", 0.0)))
            self._stop(grace_s)
        if self._channel.gone and self._next_kill is None:
            self._next_kill = 0.0

    def _leave(self) -> None:
        self._channel.left = True
        for descriptor in (self._channel.control, self._channel.pidfd):
            if descriptor is not None:
                self._poll.unregister(descriptor)
        self._write_state()
        self._channel.send("left")

    def _scan(self) -> None:
        """See who is there: for the state file, and to learn of critical processes."""
        begun = time.monotonic()
        self._channel.look()
        root = self._root.pid if self._root is not None else 0
        seen: list[tuple[int, int, str]] = []
        for process in descendants(os.getpid()):
            if not process.running:
                continue
            name = title(process.pid)[:_TITLE_CHARS]
            seen.append((process.pid, process.start_ticks, name))
            if process.pid != root and process.pid not in self._critical and self._pattern.search(name):
                self._adopt(process, name)
        there = {pid: ticks for pid, ticks, _ in seen}
        for pid, critical in list(self._critical.items()):
            if critical.pidfd is None and there.get(pid) != critical.ticks:
                self._critical_died(pid, critical)
        if seen != self._seen:
            self._seen = seen
            self._write_state()
        now = time.monotonic()
        self._next_scan = now + max(_SCAN_S, (now - begun) * _SCAN_SHARE)

    def _adopt(self, process: Process, name: str) -> None:
        pidfd = open_pidfd(process.pid, process.start_ticks)
        if pidfd is not None:
            self._poll.register(pidfd, select.POLLIN)
        self._critical[process.pid] = _Critical(process.start_ticks, name, pidfd)

    # -- the end

    def _stop(self, grace_s: float) -> None:
        now = time.monotonic()
        self._stop_at = min(now + grace_s, self._stop_at or now + grace_s)
        if self._root_alive and self._root is not None:
            send_signal(self._root.pid, self._root.start_ticks, signal.SIGTERM)
            self._term_again_at = now + min(_TERM_AGAIN_S, grace_s / 2)

    def _advance(self, now: float) -> None:
        """Take the next step of an ending that is under way, if it is due."""
        if self._next_kill is None and self._stop_at is not None:
            if not self._root_alive and self._rest_at is None:
                self._signal_all(signal.SIGTERM)
                self._rest_at = min(now + _REST_S, self._stop_at)
            if now >= (self._stop_at if self._rest_at is None else self._rest_at):
                self._next_kill = now
            elif self._term_again_at is not None and now >= self._term_again_at:
                self._term_again_at = None
                if self._root_alive and self._root is not None:
                    send_signal(self._root.pid, self._root.start_ticks, signal.SIGTERM)
        if self._next_kill is not None and now >= self._next_kill:
            first, longest = _KILL_PAUSE_S
            self._signal_all(signal.SIGKILL)
            self._next_kill = now + min(longest, first * 1.5**self._kill_rounds)
            self._kill_rounds += 1
            self._stop_at = self._term_again_at = self._rest_at = None

    def _signal_all(self, number: signal.Signals) -> None:
        below = [process for process in descendants(os.getpid()) if process.running]
        if number == signal.SIGKILL and self._kill_rounds >= _STORM_ROUNDS:
            # Sessions and groups below us are of our descendants' making: no stranger can be in them.
            for group in {process.group for process in below} - {os.getpgrp(), 0}:
                try:
                    os.killpg(group, number)
                except (ProcessLookupError, PermissionError):
                    continue
        for process in below:
            send_signal(process.pid, process.start_ticks, number)

    def _linger(self) -> None:
        """Stay until the owner has read every event, or is gone."""
        poll = select.poll()
        poll.register(self._channel.events, select.POLLOUT)
        if self._channel.pidfd is not None:
            poll.register(self._channel.pidfd, select.POLLIN)
        while self._channel.unsent:
            ready = dict(poll.poll(_SCAN_S * 1000))
            self._channel.gone |= self._channel.pidfd in ready
            self._channel.look()
            self._channel.flush()

    def _write_state(self, *, must: bool = False) -> None:
        """Say on disk what was started, for `kvbudget reap`: identities, not names.

        Raises:
            OSError: it cannot be written, and ``must`` be; later on an archive that vanished is no reason to fail.
        """
        order = self._order
        root = self._root
        state = {
            "schema": STATE_SCHEMA,
            "run": order["run"],
            "boot_id": order["boot_id"],
            "owner": {"pid": order["owner_pid"], "start_ticks": order["owner_ticks"]},
            "keeper": {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())},
            "root": None if root is None else {"pid": root.pid, "start_ticks": root.start_ticks},
            "argv": [os.fsdecode(_to_bytes(text)) for text in self._list("argv")],
            "left": self._channel.left,
            "gone": self._none_left,
            "processes": []
            if self._none_left
            else [{"pid": pid, "start_ticks": ticks, "title": name} for pid, ticks, name in self._seen],
        }
        path = self._bytes("state")
        new = path + b".new"
        try:
            with open(new, "w", encoding="utf-8") as file:  # noqa: PTH123
                json.dump(state, file, indent=1)
            os.replace(new, path)  # noqa: PTH105
        except OSError:
            if must:
                raise


_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def _prctl(option: int, value: int) -> int:
    return int(_LIBC.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)))


_LIBC = ctypes.CDLL(None)


def _to_bytes(text: str) -> bytes:
    """Bytes travel as text of one character per byte, so that no encoding can change them."""
    return text.encode("latin-1")


def _report(descriptor: int, problem: str) -> None:
    os.write(descriptor, problem.encode("utf-8", "replace")[:4000])
    os._exit(127)


def main() -> None:
    """Run as a keeper: ``argv[1]`` is the control pipe's descriptor, ``argv[2]`` the event socket's."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # The owner's child ends here and the keeper is init's: nobody's wait, and nobody's tree walk, finds it.
    if os.fork() != 0:
        os._exit(0)
    os.setsid()
    os.chdir("/")
    channel = _Channel(int(sys.argv[1]), int(sys.argv[2]))
    order = channel.first_order()
    if order is None:
        return
    channel.watch(int(str(order["owner_pid"])), int(str(order["owner_ticks"])))
    if not channel.gone:
        Keeper(channel, order).run()
