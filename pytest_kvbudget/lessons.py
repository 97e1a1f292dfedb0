"""What the boots of earlier runs tell a search before its first boot. None of it decides a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median
from typing import Final, NamedTuple

from pytest_kvbudget.history import Booted, Found, History, same_identity
from pytest_kvbudget.records import AttemptRecord, BootIdentity
from pytest_kvbudget.search.model import Axis, Prior
from pytest_kvbudget.search.noise import REPEATS_FOR_SIGMA, Noise
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.verdict import Verdict

SAME_ENGINE: Final = 0.01
"""What a finding of the same engine on the same devices may be off, as a share of it."""
OTHER_ENGINE: Final = 0.03
"""The same where engine, driver, devices or host are others: as a plan."""
READY: Final = "ready"
_SERVED: Final = frozenset({Verdict.PASS, Verdict.MARGINAL})
_RUNG: Final = ("shape", "asked")
"""Parts of an identity that tell the boots of one search apart."""
_GEOMETRY: Final = ("model", "tensor_parallel_size", "kv_cache_dtype", "lnc", "enforce_eager", "extra_args")
"""Fields of a shape with which an engine is another one: what boots differ by is not carried between them."""
_MINUTE_S: Final = 60.0


class Minutes(NamedTuple):
    """What boots of a target take, on average, without waiting for devices."""

    passing: float
    """A boot that passes, its teardown included."""
    failing: float
    """A boot that fails; as a passing one where none has failed yet, and the other way round."""
    boots: int
    """How many boots say so."""


def prior(history: History, like: BootIdentity, *, axis: Axis, base: Shape, pool: str, windows: int) -> Prior | None:
    """Where the newest ladder that asked the same question found the boundary; ``None`` where none did.

    That is half way between its winner and the rung that failed, and a quantum above a ceiling that passed.

    Args:
        history: of the archive, without this run.
        like: identity of any boot of this ladder.
        axis: its rungs.
        base: its shape; the axis' own field counts only for a scaled pool, which is scaled from there.
        pool: ``"fixed"`` or ``"scaled"``.
        windows: full windows that the pool must hold.
    """
    for found in reversed(history.findings):
        record, finding = found.record, found.record.finding
        asked = (record.pool, record.windows, finding.axis.name, finding.axis.scale)
        if not finding.proven or finding.value is None or asked != (pool, windows, axis.name, axis.scale):
            continue
        if _based(record.shape, axis.name, pool) != _based(base.redacted(), axis.name, pool):
            continue
        boot = _boot_of(history, found)
        if boot is None or boot.target != like.target:
            continue
        end = finding.value + finding.axis.quantum * 2 if finding.failed_at is None else finding.failed_at
        same = same_identity(boot, like, but=(*_RUNG, "schema_version", "plugin_version"))
        return Prior(value=(finding.value + end) / 2, relative=SAME_ENGINE if same else OTHER_ENGINE, source="archive")
    return None


def sigma(history: History, like: BootIdentity, *, base: Shape) -> Noise | None:
    """What boots of one identity differ by, where five or more that served say so; ``None`` where they do not.

    Measured is what the same boot had left: on the device once it was ready, and for its KV cache. Where the pool is
    pinned all noise is in the first, where it takes what utilization leaves in the second; so the larger one counts.
    Half a unit of the last digit that the engine prints is added as its own deviation. Of several such identities, the
    one with most boots counts.

    Args:
        history: of the archive.
        like: identity of any boot of this search; its shape and what the test asks do not count.
        base: the search's shape: model, data types and flags count, not what a search moves.
    """
    best: tuple[int, float] | None = None
    for group in _groups(history, like, base, warmth=True):
        served = [booted.record for booted in group if booted.record.verdict in _SERVED]
        found = [spread for left in (_left_on_device, _left_for_kv) if (spread := _deviation(served, left)) is not None]
        if found:
            said = max(found, key=lambda spread: spread[1])
            best = said if best is None else max(best, said)
    return None if best is None else Noise(sigma_bytes=best[1], source="archive")


def cold_extra(history: History, like: BootIdentity, *, base: Shape) -> float | None:
    """Bytes that a boot with nothing in its compile cache took beyond a warm one; ``None`` where no pair was booted.

    The middle of the cold and of the warm boots of one shape on one device set are compared, by what `sigma` looks at;
    of several shapes the largest difference counts, for with it more cold failures are repeated. Never negative.
    """
    found = []
    for group in _groups(history, like, base, warmth=False):
        for left in (_left_on_device, _left_for_kv):
            cold, warm = ([said[0] for said in _said(group, left, warm=state)] for state in (False, True))
            if cold and warm:
                found.append(median(warm) - median(cold))
    return max(0.0, *found) if found else None


def minutes(history: History, like: BootIdentity) -> Minutes | None:
    """What boots of the same target took; ``None`` where it has none with a verdict."""
    taken: dict[bool, list[float]] = {True: [], False: []}
    for booted in history.attempts:
        record = booted.record
        known = record.identity is not None and record.identity.target == like.target and record.settled
        if known and record.verdict in _SERVED | {Verdict.FAIL}:
            seconds = _seconds(record)
            if seconds is not None:
                taken[record.verdict in _SERVED].append(seconds / _MINUTE_S)
    means = {passed: fmean(found) for passed, found in taken.items() if found}
    if not means:
        return None
    any_mean = next(iter(means.values()))
    return Minutes(means.get(True, any_mean), means.get(False, any_mean), sum(map(len, taken.values())))


def _seconds(record: AttemptRecord) -> float | None:
    """From the launch to free devices, as far as it was timed: boot, requests, teardown; ``None`` without a launch."""
    timings = record.timings
    booted = timings.ended_s if timings.boot_s is None else timings.boot_s
    if booted is None:
        return None
    parts = [booted, timings.verdict_s, timings.teardown_s, timings.release_s]
    for use in record.uses:
        parts += [] if use.survival is None else [request.seconds for request in use.survival.requests]
        parts += [] if use.soak is None else [use.soak.seconds]
    return sum(part for part in parts if part is not None)


def _based(shape: Shape, axis: str, pool: str) -> Shape:
    """What of a base shape a ladder's answer depends on."""
    return shape if pool == "scaled" or axis not in Shape.__struct_fields__ else shape.merged(**{axis: None})


def _boot_of(history: History, found: Found) -> BootIdentity | None:
    """Identity of the boots that prove a finding: of the last one that has any."""
    known = (booted.record.identity for booted in reversed(history.boots_of(found)))
    return next((identity for identity in known if identity is not None), None)


def _groups(history: History, like: BootIdentity, base: Shape, *, warmth: bool) -> list[list[Booted]]:
    """Settled boots by shape, device set and, where asked for, warmth, all else being as in this search."""
    wanted = _geometry(base.redacted())
    groups: dict[tuple[str, str | None, bool | None], list[Booted]] = {}
    for booted in history.attempts:
        record = booted.record
        if record.identity is None or not record.settled or _geometry(record.shape) != wanted:
            continue
        if same_identity(record.identity, like, but=_RUNG):
            key = (record.identity.shape, record.device_set, record.warm if warmth else None)
            groups.setdefault(key, []).append(booted)
    return list(groups.values())


def _geometry(shape: Shape) -> tuple[object, ...]:
    return tuple(getattr(shape, name) for name in _GEOMETRY)


_Left = Callable[[AttemptRecord], tuple[float, float] | None]
"""Bytes that a boot had left, and half a unit of their last digit; ``None`` where its record does not say."""


def _left_on_device(record: AttemptRecord) -> tuple[float, float] | None:
    """Least free memory of a device when the boot was ready."""
    free = [device.free_bytes for reading in record.memory if reading.moment == READY for device in reading.devices]
    return (float(min(free)), 0.0) if free else None


def _left_for_kv(record: AttemptRecord) -> tuple[float, float] | None:
    """What the engine found for its KV cache, the least of all ranks; a pinned pool is no finding."""
    ledger = record.ledger
    value = None if ledger is None else ledger.facts.get("available_kv_bytes")
    if value is None or isinstance(value.value, (str, bool)) or record.shape.kv_cache_memory_bytes is not None:
        return None
    return float(value.value), value.precision


def _said(group: Sequence[Booted], left: _Left, *, warm: bool) -> Iterator[tuple[float, float]]:
    for booted in group:
        said = left(booted.record) if booted.record.warm is warm else None
        if said is not None:
            yield said


def _deviation(records: Sequence[AttemptRecord], left: _Left) -> tuple[int, float] | None:
    """How many boots say what they had left, and its deviation in bytes; ``None`` below five."""
    said = [found for record in records if (found := left(record)) is not None]
    if len(said) < REPEATS_FOR_SIGMA:
        return None
    blur = max(precision for _, precision in said)
    # a rounded figure is off by anything up to half a unit: its deviation is that over the root of three
    return len(said), math.hypot(Noise.of([size for size, _ in said]).sigma_bytes, blur / math.sqrt(3))
