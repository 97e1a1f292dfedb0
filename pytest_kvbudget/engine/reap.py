"""End what dead runs of ours left behind: only processes that a keeper's record proves we started."""

from __future__ import annotations

from pathlib import Path
from typing import Final, TextIO

from pytest_kvbudget.engine.processes import alive, title
from pytest_kvbudget.engine.state import KeeperState, end_survivors, is_here, read_state, survivors

STATE_FILE: Final = "keeper.json"
GRACE_S: Final = 5.0
"""From SIGTERM to SIGKILL: the run is dead, nobody waits for a clean goodbye."""


def reap(archive: Path, *, dry_run: bool, out: TextIO) -> int:
    """End engines below ``archive`` whose run and keeper are dead.

    Returns an exit status: 1 when something could not be ended, 2 when there is no such archive.

    Never touched: engines left serving on purpose, engines of a living run, records of another boot of this machine,
    and processes whose start time is not the recorded one.
    """
    if not archive.is_dir():
        out.write(f"{archive} is no folder; expected an archive of runs\n")
        return 2
    found = failed = 0
    for path in sorted(archive.rglob(STATE_FILE)):
        try:
            state = read_state(path)
        except ValueError as error:
            out.write(f"{error}; nothing of it is touched\n")
            continue
        if not is_here(state):
            continue
        if state.left and state.root is not None and alive(state.root.pid, state.root.start_ticks):
            out.write(f"left serving on purpose by run {state.run}, not touched; to end it: kill {state.root.pid}\n")
        left = {} if alive(state.owner.pid, state.owner.start_ticks) else survivors(state)
        if left:
            found += 1
            failed += _end(path, state, left, dry_run=dry_run, out=out)
    if not found:
        out.write(f"nothing to end below {archive}\n")
    return 1 if failed else 0


def _end(path: Path, state: KeeperState, left: dict[int, int], *, dry_run: bool, out: TextIO) -> bool:
    """Say what a dead run left, and end it; whether some of it could not be ended."""
    out.write(f"run {state.run} is dead and left {len(left)} processes ({path.parent}):\n")
    out.writelines(f"  {pid}  {title(pid)[:100]}\n" for pid in left)
    if dry_run:
        return False
    stubborn = end_survivors(state, grace_s=GRACE_S)
    out.writelines(f"  {pid} could not be ended: a hung driver holds it, or it is another user's\n" for pid in stubborn)
    return bool(stubborn)
