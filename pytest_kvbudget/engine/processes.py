"""Processes as ``/proc`` shows them. Standard library only, and quick to import: the keeper uses it too."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress

_WAIT_STEP_S = 0.01
"""Pause between two looks at a process where the kernel gives no pidfd."""


class Process:
    """One line of ``/proc/PID/stat``: identity and place in the tree, at one moment."""

    __slots__ = ("parent", "group", "pid", "running", "start_ticks")  # noqa: RUF023 - pid is what it is about

    def __init__(self, pid: int, parent: int, group: int, start_ticks: int, *, running: bool) -> None:
        self.pid = pid
        self.parent = parent
        self.group = group
        """Process group."""
        self.start_ticks = start_ticks
        """Clock ticks from boot to start, field 22 of ``/proc/PID/stat``: with ``pid`` it names a process."""
        self.running = running
        """False for a zombie: all its threads have ended and only its parent's wait is missing."""


def look_up(pid: int) -> Process | None:
    """The process with this id, zombies included; ``None`` where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - pathlib costs the keeper's start-up
            line = file.read()
    except OSError:
        return None
    # The name in parentheses may hold anything, also parentheses; no later field can.
    fields = line[line.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None
    # A leader that ended before its other threads shows as a zombie, and the process lives.
    running = fields[0] not in {b"Z", b"X"} or int(fields[17]) > 1
    return Process(pid, int(fields[1]), int(fields[2]), int(fields[19]), running=running)


def start_ticks(pid: int) -> int | None:
    """Start time of ``pid`` in clock ticks since boot; ``None`` where there is no such process."""
    found = look_up(pid)
    return None if found is None else found.start_ticks


def alive(pid: int, ticks: int) -> bool:
    """Whether exactly this process, not a later one with the same id, still runs. A zombie does not."""
    found = look_up(pid)
    return found is not None and found.start_ticks == ticks and found.running


def title(pid: int) -> str:
    """What ``ps`` shows: the command line, which a process may have replaced by a title of its own.

    A process without a command line (a zombie, a kernel thread) shows its short name; a vanished one an empty text.
    """
    for name in ("cmdline", "comm"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:  # noqa: PTH123
                text = file.read().strip(b"\0 \n").replace(b"\0", b" ")
        except OSError:
            return ""
        if text:
            return text.decode("utf-8", "replace")
    return ""


def descendants(pid: int) -> list[Process]:
    """Every process below ``pid``, itself excluded, parents before children, zombies included.

    One pass over ``/proc``. A process that forks and exits meanwhile may be missed: whoever must end all of them
    looks again until nothing is left.
    """
    children: dict[int, list[Process]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit() and (found := look_up(int(name))) is not None:
            children.setdefault(found.parent, []).append(found)
    below = list(children.get(pid, ()))
    for process in below:
        below.extend(children.get(process.pid, ()))
    return below


def marked(assignment: str) -> dict[int, int]:
    """Start ticks by id of every running process with this ``NAME=value`` in the environment it was started with.

    Processes of other users cannot be looked into, and are not found.
    """
    wanted = b"\0" + assignment.encode() + b"\0"
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:  # noqa: PTH123
                environment = b"\0" + file.read()
        except OSError:
            continue
        process = look_up(int(name)) if wanted in environment else None
        if process is not None and process.running:
            found[process.pid] = process.start_ticks
    return found


def open_pidfd(pid: int, ticks: int) -> int | None:
    """A descriptor that becomes readable when this process ends.

    Returns:
        The descriptor, to be closed by the caller; ``None`` where the kernel gives none. Whether the process is
        there at all is for `alive` to say.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    # The descriptor names whatever process has the id now: only now can the start time be trusted.
    if start_ticks(pid) == ticks:
        return descriptor
    os.close(descriptor)
    return None


def send_signal(pid: int, ticks: int, number: signal.Signals) -> bool:
    """Signal exactly this process, never a later one with its id. False where it is gone, or not ours to signal."""
    descriptor = open_pidfd(pid, ticks)
    try:
        if descriptor is not None:
            signal.pidfd_send_signal(descriptor, number)
            return True
        if start_ticks(pid) == ticks:
            os.kill(pid, number)
            return True
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return False


def wait_until_gone(processes: Mapping[int, int], timeout_s: float) -> dict[int, int]:
    """Wait until none of ``processes`` (start ticks by process id) runs.

    Returns:
        Those that still run after ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    left = dict(processes)
    for pid, ticks in processes.items():
        descriptor = open_pidfd(pid, ticks)
        if descriptor is not None:
            try:
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            finally:
                os.close(descriptor)
        while alive(pid, ticks) and time.monotonic() < deadline:
            time.sleep(_WAIT_STEP_S)
        if not alive(pid, ticks):
            del left[pid]
    return left


def pid_space() -> str:
    """Where process ids and start times mean what they meant: this boot of this machine, these namespaces.

    A start time counts from the machine's boot and no step of the wall clock touches it, but a time namespace shifts
    it (time_namespaces(7)): from inside another one a living keeper would look like one that is gone.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123
        parts = [file.read().strip()]
    for kind in ("pid", "time"):
        with suppress(FileNotFoundError):  # Linux before 5.6 has no time namespaces
            parts.append(os.readlink(f"/proc/self/ns/{kind}"))  # noqa: PTH115
    return " ".join(parts)
