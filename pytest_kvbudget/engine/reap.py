"""End what dead runs of ours left behind: only processes that a keeper's record proves we started."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

import msgspec

from pytest_kvbudget.engine.processes import alive, descendants, send_signal, title, wait_until_gone

STATE_FILE: Final = "keeper.json"
TERM_S: Final = 5.0
"""From SIGTERM to SIGKILL: the run is dead, nobody waits for a clean goodbye."""
KILL_S: Final = 10.0

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class _Id(msgspec.Struct, frozen=True):
    pid: int
    start_ticks: int


class _Named(_Id, frozen=True):
    title: str = ""


class KeeperState(msgspec.Struct, frozen=True):
    """What a keeper wrote about the engine it owns; see `pytest_kvbudget.engine.keeper`."""

    schema: int
    run: str
    boot_id: str
    owner: _Id
    keeper: _Id
    root: _Id | None
    left: bool
    gone: bool
    processes: tuple[_Named, ...] = ()


def reap(archive: Path, *, dry_run: bool, out: TextIO) -> int:
    """End engines below ``archive`` whose run is dead; returns an exit status: 1 when something could not be ended.

    Never touched: engines left serving on purpose, engines of a living run, records of an earlier boot of this
    machine, and processes whose start time is not the recorded one.
    """
    boot_id = _BOOT_ID.read_text(encoding="ascii").strip()
    found = failed = 0
    for path, state in _states(archive, out):
        if state.boot_id != boot_id or state.left or state.gone or alive(state.owner.pid, state.owner.start_ticks):
            continue
        ours = _living(state)
        if not ours:
            continue
        found += 1
        out.write(f"run {state.run} is dead and left {len(ours)} processes ({path.parent}):\n")
        for pid in ours:
            out.write(f"  {pid}  {title(pid)[:100]}\n")
        if dry_run:
            continue
        left = _end(ours)
        failed += bool(left)
        for pid in left:
            out.write(f"  {pid} could not be ended: it is in the kernel's hands, or not ours to signal\n")
    if not found:
        out.write(f"nothing to end below {archive}\n")
    return 1 if failed else 0


def _states(archive: Path, out: TextIO) -> Iterator[tuple[Path, KeeperState]]:
    for path in sorted(archive.rglob(STATE_FILE)):
        try:
            yield path, msgspec.json.decode(path.read_bytes(), type=KeeperState)
        except (OSError, msgspec.MsgspecError) as error:
            out.write(f"{path}: cannot be read, nothing of it is touched: {error}\n")


def _living(state: KeeperState) -> dict[int, int]:
    """Start ticks by pid of every process that the state names and that lives, with everything below it."""
    named = [state.keeper, *([] if state.root is None else [state.root]), *state.processes]
    living = {known.pid: known.start_ticks for known in named if alive(known.pid, known.start_ticks)}
    for pid in list(living):
        living |= {below.pid: below.start_ticks for below in descendants(pid) if below.running}
    return living


def _end(processes: dict[int, int]) -> dict[int, int]:
    for number, wait_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
        for pid, ticks in processes.items():
            send_signal(pid, ticks, number)
        processes = wait_until_gone(processes, wait_s)
        if not processes:
            break
    return processes
