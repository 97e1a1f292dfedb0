"""What must hold before anything is launched: devices at their idle level, and a shape that the law does not forbid."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from pytest_kvbudget.cancel import Cancellation
from pytest_kvbudget.config import LoadedTarget
from pytest_kvbudget.device.host import read_host
from pytest_kvbudget.device.model import DeviceMemory, ProbeError
from pytest_kvbudget.gate import cautions_for, refusal_for
from pytest_kvbudget.judgement import reason
from pytest_kvbudget.ledger.classes import verdict_on
from pytest_kvbudget.memory import AttemptMemory
from pytest_kvbudget.planning import Experience, plan_for
from pytest_kvbudget.recording import Recording
from pytest_kvbudget.request import BootRequest
from pytest_kvbudget.verdict import Phase, Verdict

SetLabel = Callable[[Sequence[DeviceMemory]], str | None]
"""What a device set is called in records, from its readings when idle."""


def devices_clean(recording: Recording, memory: AttemptMemory, cancellation: Cancellation, set_label: SetLabel) -> bool:
    """Device memory is back at its idle level, or the attempt ends here.

    Raises:
        CancelledError: the boot was called off.
    """
    begun = time.monotonic()
    try:
        readings = memory.wait_clean(cancellation)
    except ProbeError as error:
        recording.note(f"device memory cannot be read: {error}")
        readings = ()
    except TimeoutError as error:
        recording.timed(clean_wait_s=time.monotonic() - begun)
        recording.decide(*reason(Verdict.ERROR, Phase.WORKER_INIT, "devices_not_clean", str(error)))
        return False
    recording.timed(clean_wait_s=time.monotonic() - begun)
    with suppress(ProbeError):
        recording.record.host = read_host()
    recording.record.device_set = set_label(readings)
    recording.memory("idle", readings)
    return True


def allowed(
    recording: Recording, request: BootRequest, loaded: LoadedTarget, experience: Experience, *, gate: bool
) -> bool:
    """Price the shape; what the law forbids is not booted, and the attempt ends here with the law's numbers."""
    recording.record.plan = plan_for(loaded, request.shape, experience)
    for caution in cautions_for(loaded, request.shape, axis=request.axis):
        recording.note(caution)
    there = experience.on(recording.record.target.devices)
    cause = refusal_for(loaded, request.shape, there) if gate else None
    is_rung = request.rung is not None
    if cause is None or (is_rung and verdict_on(cause) is Verdict.FAIL):
        # Arithmetic may save a boot, but never bounds a finding: a rung that may fail for memory is booted.
        return True
    said = f"{cause.failure_class}: {cause.sentence}; --kvbudget-no-gate boots it all the same"
    recording.decide(Verdict.ERROR, cause, said)
    return False
