"""A memory trace: device memory over a whole attempt, stored as what changed, and what can be read from it.

Time is counted in ticks of the sampling period from the first sample. A trace holds runs of ticks that were sampled;
what is between them is a gap, and nothing is ever filled in. Values are stored where they change, as differences.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Final

import msgspec

TRACE_FILE: Final = "memory.json"
BEFORE: Final = "before"
"""Name of the time before the first mark: the baseline."""
LAUNCH: Final = "launch"
TEARDOWN: Final = "teardown"

SchemaVersion = Annotated[int, msgspec.Meta(ge=1, description="version of this document's layout")]


class PhaseMark(msgspec.Struct, frozen=True, kw_only=True):
    """A phase began, in seconds after the first sample."""

    phase: str
    at_s: float


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing could be read from ``start_s`` on."""

    start_s: float
    samples: int
    """How many readings failed one after the other."""
    reason: str
    """What the first of them said."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one device. Its place in the trace is its rank in the engine."""

    device: str
    used: tuple[int, ...]
    """Pairs: samples since the last change, and by how many bytes the use changed; the first from 0."""
    room: tuple[int, ...]
    """The same for used and free together: what a process could have of an idle device."""


class MemoryTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Device memory from before the launch to after the teardown."""

    schema_version: SchemaVersion = 1
    source: str
    limits: str = ""
    """What the source leaves out or assumes."""
    rate_hz: float
    started: str
    """Of the first sample; ISO 8601, UTC."""
    runs: tuple[int, ...] = ()
    """Pairs: ticks without a sample, and samples on the ticks after them."""
    marks: tuple[PhaseMark, ...] = ()
    """By time."""
    gaps: tuple[Gap, ...] = ()
    gaps_left_out: int = 0
    """Further gaps of which only the missing ticks are kept."""
    series: tuple[Series, ...] = ()


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A device's memory at one sample."""

    at_s: float
    used_bytes: int
    free_bytes: int


class WindowMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A device's memory over a stretch of time that has at least one sample."""

    rank: int
    device: str
    samples: int
    first_used_bytes: int
    last_used_bytes: int
    peak_used_bytes: int
    peak_at_s: float
    least_free_bytes: int
    least_free_at_s: float

    @property
    def growth_bytes(self) -> int:
        """From the first sample to the last."""
        return self.last_used_bytes - self.first_used_bytes


class PhaseMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of every device during one phase; ``None`` for a device without a sample in it."""

    phase: str
    start_s: float
    end_s: float
    devices: tuple[WindowMemory | None, ...]


class Leak(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a device that did not come back."""

    rank: int
    device: str
    before_bytes: int
    """Used before the launch."""
    after_bytes: int
    """Used at the last sample after the teardown."""

    @property
    def leaked_bytes(self) -> int:
        """How much more."""
        return self.after_bytes - self.before_bytes


def encode(trace: MemoryTrace) -> bytes:
    """As JSON, for a file beside the attempt's record."""
    return msgspec.json.encode(trace)


def decode(data: bytes) -> MemoryTrace:
    """Read a trace.

    Raises:
        msgspec.MsgspecError: it is none.
    """
    return msgspec.json.decode(data, type=MemoryTrace)


def end_s(trace: MemoryTrace) -> float:
    """Time of the last sample; 0 where there is none."""
    times = _Times(trace)
    return times.at(times.samples - 1) if times.samples else 0.0


def changes(trace: MemoryTrace, rank: int) -> tuple[Point, ...]:
    """A rank's first and last sample, those where a value changed, and both sides of every gap: enough to draw it."""
    times = _Times(trace)
    if not times.samples:
        return ()
    used, room = _Steps(trace.series[rank].used), _Steps(trace.series[rank].room)
    edges = {0, times.samples - 1, *times.firsts, *(first - 1 for first in times.firsts if first)}
    return tuple(
        Point(at_s=times.at(sample), used_bytes=used.at(sample), free_bytes=room.at(sample) - used.at(sample))
        for sample in sorted(edges | set(used.samples) | set(room.samples))
    )


def between(trace: MemoryTrace, start_s: float, stop_s: float) -> tuple[WindowMemory | None, ...]:
    """Memory of every rank from ``start_s`` up to and without ``stop_s``; ``None`` where there is no sample."""
    return _Reader(trace).between(start_s, stop_s)


def phases(trace: MemoryTrace) -> tuple[PhaseMemory, ...]:
    """Memory of every rank in every phase, in order. What came before the first mark is phase ``"before"``."""
    reader = _Reader(trace)
    last = end_s(trace)
    marks = [PhaseMark(phase=BEFORE, at_s=0.0), *trace.marks, PhaseMark(phase="", at_s=float("inf"))]
    return tuple(
        PhaseMemory(
            phase=mark.phase,
            start_s=mark.at_s,
            end_s=min(following.at_s, last),
            devices=reader.between(mark.at_s, following.at_s),
        )
        for mark, following in pairwise(marks)
        if following.at_s > mark.at_s
    )


def since(trace: MemoryTrace, phase: str, until: str | None = TEARDOWN) -> tuple[WindowMemory | None, ...]:
    """Memory of every rank from the first mark of ``phase`` to the next one of ``until``, or to the end.

    ``None`` for every rank where the phase was never marked.
    """
    begun = next((mark.at_s for mark in trace.marks if mark.phase == phase), None)
    if begun is None:
        return (None,) * len(trace.series)
    ended = next((mark.at_s for mark in trace.marks if mark.phase == until and mark.at_s >= begun), float("inf"))
    return between(trace, begun, ended)


def high_water(trace: MemoryTrace) -> tuple[WindowMemory | None, ...]:
    """Memory of every rank from the launch to the teardown."""
    return since(trace, LAUNCH)


def leaks(trace: MemoryTrace, tolerance_bytes: int) -> tuple[Leak | None, ...]:
    """What every rank has more at the end than before the launch, if that is more than ``tolerance_bytes``.

    A rank that cannot be judged - no sample before the launch, or none after the teardown - is given no leak; whether
    it could be is told by `is_complete`.
    """
    found: list[Leak | None] = []
    for before, after in zip(*_ends(trace), strict=True):
        if before is None or after is None or after.last_used_bytes - before.last_used_bytes <= tolerance_bytes:
            found.append(None)
            continue
        found.append(
            Leak(
                rank=before.rank,
                device=before.device,
                before_bytes=before.last_used_bytes,
                after_bytes=after.last_used_bytes,
            )
        )
    return tuple(found)


def is_complete(trace: MemoryTrace) -> bool:
    """Every rank has a sample before the launch and one after the teardown."""
    return bool(trace.series) and all(window is not None for windows in _ends(trace) for window in windows)


def _ends(trace: MemoryTrace) -> tuple[tuple[WindowMemory | None, ...], tuple[WindowMemory | None, ...]]:
    launched = next((mark.at_s for mark in trace.marks if mark.phase == LAUNCH), 0.0)
    return between(trace, 0.0, launched), since(trace, TEARDOWN, until=None)


class _Times:
    """Sample numbers and times."""

    def __init__(self, trace: MemoryTrace) -> None:
        self._rate_hz = trace.rate_hz
        skipped, counts = trace.runs[::2], trace.runs[1::2]
        self.firsts = [0, *accumulate(counts)][:-1] if counts else []
        """Number of each run's first sample."""
        self.samples = sum(counts)
        self._ticks = [skip + first for skip, first in zip(accumulate(skipped), self.firsts, strict=True)]
        """Tick of each run's first sample."""
        self._counts = counts

    def at(self, sample: int) -> float:
        """Time of a sample in seconds."""
        run = bisect_right(self.firsts, sample) - 1
        return (self._ticks[run] + sample - self.firsts[run]) / self._rate_hz

    def first_from(self, at_s: float) -> int:
        """The first sample at or after a time; the number of samples where there is none."""
        if at_s == float("inf"):
            return self.samples
        # A time that came from `at` must find its own sample, whatever the division made of it.
        tick = at_s * self._rate_hz - 1e-6
        run = bisect_right(self._ticks, tick) - 1
        if run < 0:
            return 0
        return self.firsts[run] + min(self._counts[run], max(0, math.ceil(tick - self._ticks[run])))


class _Steps:
    """Values by sample number."""

    def __init__(self, pairs: Sequence[int]) -> None:
        self.samples = list(accumulate(pairs[::2]))
        self._values = list(accumulate(pairs[1::2]))

    def at(self, sample: int) -> int:
        """The value at a sample."""
        return self._values[bisect_right(self.samples, sample) - 1]

    def changed(self, first: int, last: int) -> Iterator[int]:
        """``first``, and the samples after it up to ``last`` where the value changed."""
        yield first
        yield from self.samples[bisect_right(self.samples, first) : bisect_right(self.samples, last)]


class _Reader:
    """Answers for stretches of one trace, unpacked once."""

    def __init__(self, trace: MemoryTrace) -> None:
        self._times = _Times(trace)
        self._series = [(series.device, _Steps(series.used), _Steps(series.room)) for series in trace.series]

    def between(self, start_s: float, stop_s: float) -> tuple[WindowMemory | None, ...]:
        """See `between`."""
        times = self._times
        first, last = times.first_from(start_s), times.first_from(stop_s) - 1
        if last < first:
            return (None,) * len(self._series)
        found = []
        for rank, (device, used, room) in enumerate(self._series):
            peak = max(used.changed(first, last), key=used.at)
            at = {*used.changed(first, last), *room.changed(first, last)}
            tightest = min(sorted(at), key=lambda sample, used=used, room=room: room.at(sample) - used.at(sample))  # type: ignore[misc]
            found.append(
                WindowMemory(
                    rank=rank,
                    device=device,
                    samples=last - first + 1,
                    first_used_bytes=used.at(first),
                    last_used_bytes=used.at(last),
                    peak_used_bytes=used.at(peak),
                    peak_at_s=times.at(peak),
                    least_free_bytes=room.at(tightest) - used.at(tightest),
                    least_free_at_s=times.at(tightest),
                )
            )
        return tuple(found)
