"""An owner to be killed: leases a device, starts an engine, says so, and waits. Run as a script."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from pytest_kvbudget.device.leases import acquire
from pytest_kvbudget.engine.launchers.process import ProcessLauncher
from pytest_kvbudget.engine.model import Command

FOLDER = Path(sys.argv[1])
MODE = sys.argv[2]
ARGV = tuple(sys.argv[3:])


def main() -> None:
    lease = acquire([(("0",), ("card-0",))], run="run-1", purpose="a test", timeout_s=0.0)
    command = Command(argv=ARGV, env=dict(os.environ), env_added={}, cwd="/", host="127.0.0.1", port=0)
    print("launching", flush=True)
    engine = ProcessLauncher("run-1").launch(
        command,
        log_path=FOLDER / "engine.log",
        state_path=FOLDER / "keeper.json",
        lease_descriptors=lease.descriptors,
        critical="",
    )
    if MODE == "leave":
        engine.leave()
        return
    if MODE == "fork" and os.fork() == 0:
        signal.pause()
    if MODE == "cfork" and ctypes.PyDLL(None).fork() == 0:
        # No hook of the interpreter runs: this child holds the pipe and the lease like its parent.
        signal.pause()
    print("launched", flush=True)
    signal.pause()


main()
