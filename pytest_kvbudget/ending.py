"""The end of a boot: the engine is ended, its memory awaited, the trace closed, and the footprint held against it."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Final

import msgspec

from pytest_kvbudget.config import Limits
from pytest_kvbudget.device.host import read_tree
from pytest_kvbudget.device.model import ProbeError
from pytest_kvbudget.device.trace import TRACE_FILE
from pytest_kvbudget.engine.model import EngineControlError, EngineProcess
from pytest_kvbudget.ledger.model import BootLedger
from pytest_kvbudget.memory import AttemptMemory
from pytest_kvbudget.plan_check import reconcile
from pytest_kvbudget.planning import footprint_of
from pytest_kvbudget.recording import Recording
from pytest_kvbudget.verdict import Provenance

FAILED_STOP_S: Final = 5.0
"""Grace for what is left of an engine whose boot failed: it has nothing to finish."""


def teardown(
    process: EngineProcess, recording: Recording, memory: AttemptMemory, limits: Limits, *, healthy: bool
) -> None:
    """End the engine and wait until device memory is back; trouble with either is noted."""
    if healthy:
        # now, not when it got ready: walking the pages of a large engine takes seconds, and no verdict waits for it
        with suppress(ProbeError):
            others = [pid for pid in process.pids() if pid != process.root_pid]
            recording.record.engine_host = read_tree(process.root_pid, below=others)
    begun = time.monotonic()
    memory.teardown()
    try:
        process.stop(limits.stop_seconds if healthy else FAILED_STOP_S)
    except EngineControlError as error:
        recording.note(str(error))
    stopped = time.monotonic()
    recording.timed(teardown_s=stopped - begun)
    try:
        readings = memory.wait_clean()
    except (ProbeError, TimeoutError) as error:
        # Not this rung's fault any more: the next boot's clean gate decides what it means.
        recording.note(f"device memory did not come back: {error}")
        return
    if readings:
        recording.timed(release_s=time.monotonic() - stopped)
        recording.memory("released", readings)


def end_trace(recording: Recording, memory: AttemptMemory, limits: Limits, ledger: BootLedger) -> None:
    """Write the memory trace, and what it showed, into folder and record."""
    try:
        path = recording.folder / TRACE_FILE
        recording.record.trace = memory.finish(path, tolerance_bytes=limits.release_tolerance)
    except OSError as error:
        recording.note(f"the memory trace cannot be written: {error}")
    _reconcile_footprint(recording, ledger)
    for problem in memory.problems():
        recording.note(f"memory trace: {problem}")
    memory.close()


def _reconcile_footprint(recording: Recording, ledger: BootLedger) -> None:
    """What the footprint law of an expert plan expected, against the most that the driver showed: it only warns."""
    record = recording.record
    seen = () if record.trace is None else (win for phase in record.trace.phases for win in phase.devices if win)
    high_water = max((window.peak_used_bytes for window in seen), default=None)
    totals = [device.total_bytes for reading in record.memory for device in reading.devices]
    expected = footprint_of(ledger, min(totals, default=None))
    if expected is not None:
        found = reconcile(expected, ledger, high_water_bytes=high_water)
        if record.target.simulated:
            found = tuple(msgspec.structs.replace(one, provenance=Provenance.SIMULATED) for one in found)
        record.reconciled += found
