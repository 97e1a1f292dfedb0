"""What a boot said about where the boundary is, for the search that asked for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from pytest_kvbudget.device.trace import WindowMemory
from pytest_kvbudget.ledger.model import BootLedger
from pytest_kvbudget.records import AttemptRecord, MemoryReading
from pytest_kvbudget.request import BootRequest
from pytest_kvbudget.search.hints import KV_LIMIT, hint_from, sweep_hint_from
from pytest_kvbudget.search.knobs import KNOBS
from pytest_kvbudget.search.model import Hint
from pytest_kvbudget.search.noise import MOVED_TERMS, OUTSIDE_TERM, steady_terms

READY: Final = "ready"


def hint_of(
    ledger: BootLedger,
    request: BootRequest,
    readings: Iterable[MemoryReading] = (),
    windows: Sequence[WindowMemory | None] = (),
) -> Hint:
    """Slack and deficits of a boot along what the search turns.

    Args:
        ledger: what the boot printed.
        request: what was asked for.
        readings: device memory at named moments; only ``ready`` counts.
        windows: device memory of every rank while the engine was sent its largest request: the least of it counts.
    """
    free = [device.free_bytes for reading in readings if reading.moment == READY for device in reading.devices]
    free += [window.least_free_bytes for window in windows if window is not None]
    least = min(free, default=None)
    if request.knob or request.axis == "gpu_memory_utilization":
        knob = KNOBS[request.axis]
        hint = sweep_hint_from(ledger, knob=knob, shape=request.shape, windows=request.windows or 1, free_bytes=least)
        if request.knob:
            return hint
        # a ladder goes up: what a larger share gives to the KV cache is no limit on its way
        return msgspec.structs.replace(hint, limits=tuple(x for x in hint.limits if x.name != KV_LIMIT))
    return hint_from(
        ledger,
        axis=request.axis,
        shape=request.shape,
        windows=request.windows or 1,
        scaled=request.pool == "scaled",
        free_bytes=least,
    )


def terms_of_record(record: AttemptRecord, axis: str) -> dict[str, float]:
    """Terms of a boot that its place on an axis does not move: what differs between boots is noise.

    Beside what the engine prints, what it holds outside a pinned pool once it is ready, to the byte.
    """
    terms = {} if record.ledger is None else steady_terms(record.ledger, axis)
    pool = record.shape.kv_cache_memory_bytes
    ready = [reading for reading in record.memory if reading.moment == READY]
    used = max((device.used_bytes for reading in ready for device in reading.devices), default=None)
    moved = axis in MOVED_TERMS
    return terms if pool is None or used is None or moved else {**terms, OUTSIDE_TERM: float(used - pool)}


def hint_of_record(record: AttemptRecord, request: BootRequest) -> Hint:
    """The same from a finished boot's record, for a search that did not ask for it."""
    if record.ledger is None:
        return record.hint
    phases = () if record.trace is None else record.trace.phases
    windows = [window for phase in phases if phase.phase == "request" for window in phase.devices]
    return hint_of(record.ledger, request, record.memory, windows)
