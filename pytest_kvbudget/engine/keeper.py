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

import json
import os
import re
import select
import signal
import sys
import time
from contextlib import suppress

from pytest_kvbudget.engine.keeper_owner import Owner
from pytest_kvbudget.engine.keeper_start import IGNORED, StartError, StartOrder, adopt_orphans, start_engine
from pytest_kvbudget.engine.processes import (
    Process,
    descendants,
    open_pidfd,
    pid_space,
    send_signal,
    start_ticks,
    title,
)

STATE_SCHEMA = 1

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


class Keeper:
    """Starts one engine, watches it, and ends it."""

    def __init__(self, owner: Owner, order: StartOrder) -> None:
        self._owner = owner
        self._order = order
        self._pattern = re.compile(order.critical)
        self._poll = select.poll()
        self._root: Process | None = None
        self._root_alive = False
        self._none_left = False
        self._owned = True
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
        try:
            self._start()
        except StartError as error:
            self._owner.send("failed", message=str(error))
            self._linger()
            return
        for descriptor in (wake, self._owner.control, self._owner.pidfd):
            if descriptor is not None:
                self._poll.register(descriptor, select.POLLIN)
        while not self._none_left:
            self._step(wake)
        self._update_state()
        self._owner.send("gone")
        self._linger()

    def give_up(self, problem: str) -> None:
        """The keeper itself is at fault: leave nothing behind that nobody would look after."""
        while not self._none_left:
            self._signal_all(signal.SIGKILL)
            self._kill_rounds += 1
            time.sleep(_KILL_PAUSE_S[0])
            self._reap()
        self._update_state()
        self._owner.send("failed", message=f"the keeper failed: {problem}")
        self._linger()

    def _step(self, wake: int) -> None:
        """Sleep until something happens or is due, and deal with it."""
        if self._owner.unsent:
            self._poll.register(self._owner.events, select.POLLOUT)
        ready = {descriptor for descriptor, _ in self._poll.poll(self._timeout_ms())}
        if self._owner.unsent:
            self._poll.unregister(self._owner.events)
        if wake in ready:
            os.read(wake, 1 << 12)
        if self._owner.pidfd in ready:
            self._owner.gone = True
        self._reap()
        self._critical_deaths(ready)
        if self._owned:
            self._obey()
        now = time.monotonic()
        if now >= self._next_scan:
            self._scan()
        self._advance(now)
        self._owner.flush()

    def _timeout_ms(self) -> float:
        moments = [self._next_scan]
        moments += [m for m in (self._stop_at, self._term_again_at, self._rest_at, self._next_kill) if m is not None]
        return max(0.0, min(moments) - time.monotonic()) * 1000

    # -- the start

    def _wake_on_children(self) -> int:
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        return read

    def _start(self) -> None:
        """Start the engine.

        Raises:
            StartError: nothing was started.
        """
        adopt_orphans()
        try:
            self._write_state()
        except OSError as error:
            raise StartError(f"cannot write {os.fsdecode(self._order.state)!r}: {error.strerror}") from None
        pid = start_engine(self._order)
        keeper = os.getpid()
        self._root = Process(pid, keeper, pid, start_ticks(pid) or 0, running=True)
        self._root_alive = True
        self._update_state()
        self._owner.send("started", pid=pid, keeper_pid=keeper, keeper_ticks=start_ticks(keeper))

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
                self._owner.send("exited", pid=pid, status=code)
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
        self._owner.send("critical_exited", pid=pid, title=process.name, status=self._statuses.pop(pid, None))

    def _obey(self) -> None:
        """Carry out what the owner ordered, and what its death means."""
        for order in self._owner.orders():
            if order["order"] == "leave":
                self._leave()
                return
            grace_s = float(str(order.get("grace_s", 0.0)))
            self._stop(grace_s)
        if self._owner.gone:
            self._forget_owner()
            self._next_kill = 0.0

    def _leave(self) -> None:
        self._owner.left = True
        self._forget_owner()
        self._update_state()
        self._owner.send("left")

    def _forget_owner(self) -> None:
        """Nothing more will come from it; its descriptors would only wake us up for ever."""
        self._owned = False
        for descriptor in (self._owner.control, self._owner.pidfd):
            if descriptor is not None:
                self._poll.unregister(descriptor)

    def _scan(self) -> None:
        """See who is there: for the state file, and to learn of critical processes."""
        begun = time.monotonic()
        self._owner.look()
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
            self._update_state()
        now = time.monotonic()
        self._next_scan = now + max(_SCAN_S, (now - begun) * _SCAN_SHARE)

    def _adopt(self, process: Process, name: str) -> None:
        pidfd = open_pidfd(process.pid, process.start_ticks)
        if pidfd is not None:
            self._poll.register(pidfd, select.POLLIN)
        self._critical[process.pid] = _Critical(process.start_ticks, name, pidfd)

    # -- the end

    def _stop(self, grace_s: float) -> None:
        if self._next_kill is not None:
            return
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
        poll.register(self._owner.events, select.POLLOUT)
        if self._owner.pidfd is not None:
            poll.register(self._owner.pidfd, select.POLLIN)
        while self._owner.unsent:
            ready = dict(poll.poll(_SCAN_S * 1000))
            self._owner.gone |= self._owner.pidfd in ready
            self._owner.look()
            self._owner.flush()

    def _update_state(self) -> None:
        """Write the state file where it can be: an archive that vanished is no reason to fail."""
        with suppress(OSError):
            self._write_state()

    def _write_state(self) -> None:
        """Say on disk what was started, for `kvbudget reap`: identities, not names."""
        root = self._root
        seen = [] if self._none_left else self._seen
        state = {
            "schema": STATE_SCHEMA,
            "run": self._order.run,
            "mark": self._order.mark,
            "pid_space": pid_space(),
            "owner": _identity(*self._order.owner),
            "keeper": _identity(os.getpid(), start_ticks(os.getpid()) or 0),
            "root": None if root is None else _identity(root.pid, root.start_ticks),
            "left": self._owner.left,
            "gone": self._none_left,
            "processes": [{**_identity(pid, ticks), "title": name} for pid, ticks, name in seen],
        }
        new = self._order.state + b".new"
        with open(new, "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump(state, file, indent=1)
        os.replace(new, self._order.state)  # noqa: PTH105


def _identity(pid: int, ticks: int) -> dict[str, object]:
    return {"pid": pid, "start_ticks": ticks}


def main() -> None:
    """Run as a keeper: ``argv[1]`` is the control pipe's descriptor, ``argv[2]`` the event socket's."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # The owner's child ends here and the keeper is init's: nobody's wait, and nobody's tree walk, finds it.
    if os.fork() != 0:
        os._exit(0)
    os.setsid()
    os.chdir("/")
    owner = Owner(int(sys.argv[1]), int(sys.argv[2]))
    raw = owner.first_order()
    if raw is None:
        return
    order = StartOrder(raw)
    owner.watch(*order.owner)
    if owner.gone:
        return
    keeper = Keeper(owner, order)
    try:
        keeper.run()
    except Exception as error:  # noqa: BLE001 - an engine without its keeper would live for ever
        keeper.give_up(f"{type(error).__name__}: {error}")
