"""The keeper's state file: what was started, by identity, and what is left of it when its keeper was killed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Final

import msgspec

from pytest_kvbudget.engine.processes import alive, descendants, marked, pid_space, send_signal, wait_until_gone

_KILL_WAIT_S: Final = 10.0
MARK: Final = "KVBUDGET_BOOT"
"""Variable that marks the processes of one engine."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """A process: an id and a start time in clock ticks since boot."""

    pid: int
    start_ticks: int
    title: str = ""


class KeeperState(msgspec.Struct, frozen=True, kw_only=True):
    """What the keeper of one engine wrote last."""

    schema: int
    run: str
    pid_space: str
    """Boot and namespaces in which the identities mean anything."""
    owner: Identity
    keeper: Identity
    root: Identity | None
    left: bool
    """Handed over: not ours any more, whatever happens."""
    gone: bool
    """The keeper saw the last process end."""
    mark: str = ""
    """Value of `MARK` in the environment of every process of this engine."""
    processes: tuple[Identity, ...] = ()
    """Who was there when the keeper last looked."""


def read_state(path: Path) -> KeeperState:
    """Read a state file.

    Raises:
        ValueError: it cannot be read or is not what a keeper writes; names the file.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=KeeperState)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path}: is no state file of a keeper: {error}") from None


def is_here(state: KeeperState) -> bool:
    """The state's process ids and start times mean here what they meant to the keeper."""
    return state.pid_space == pid_space()


def survivors(state: KeeperState) -> dict[int, int]:
    """Processes of an engine that nobody looks after any more: start ticks by process id.

    Empty while the keeper lives (it ends them itself, or its owner uses them), for an engine that was handed over,
    and for a state file from another boot, machine or namespace.
    """
    if state.left or state.gone or not is_here(state):
        return {}
    if alive(state.keeper.pid, state.keeper.start_ticks):
        return {}
    known = (*((state.root,) if state.root is not None else ()), *state.processes)
    # a process that was born after the keeper's last look is known by its environment alone
    found: dict[int, int] = marked(f"{MARK}={state.mark}") if state.mark else {}
    for process in known:
        if alive(process.pid, process.start_ticks):
            found[process.pid] = process.start_ticks
            found.update({child.pid: child.start_ticks for child in descendants(process.pid) if child.running})
    return found


def end_survivors(state: KeeperState, *, grace_s: float) -> dict[int, int]:
    """End them: SIGTERM, and SIGKILL after ``grace_s`` seconds.

    Returns:
        Those that still run (start ticks by process id): another user's, or in the hands of a hung driver.
    """
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_WAIT_S)):
        left = survivors(state)
        for pid, ticks in left.items():
            send_signal(pid, ticks, number)
        wait_until_gone(left, wait_s)
    return survivors(state)
