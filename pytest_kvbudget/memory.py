"""Device memory over one attempt: the clean gate before it, the trace during it, what came back after it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pytest_kvbudget.cancel import Cancellation
from pytest_kvbudget.clean import CleanGate
from pytest_kvbudget.device.gates import GateResult, MemoryGates, judge_memory
from pytest_kvbudget.device.model import DeviceMemory, MemoryProbe
from pytest_kvbudget.device.probes import Choice
from pytest_kvbudget.device.sampler import MemorySampler
from pytest_kvbudget.device.trace import (
    LAUNCH,
    TEARDOWN,
    Leak,
    MemoryTrace,
    PhaseMemory,
    WindowMemory,
    between,
    encode,
    end_s,
    leaks,
    phases,
    since,
)
from pytest_kvbudget.engine.soak import PARTS, GrowthTrend, trend

READY = "ready"
REQUEST = "request"
SOAK = "soak"


class TraceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a record keeps of a memory trace; the trace itself is a file beside it."""

    file: str
    source: str
    limits: str
    """What the source leaves out or assumes."""
    phases: tuple[PhaseMemory, ...]
    leaks: tuple[Leak, ...] = ()
    """Devices whose memory did not come back."""


class AttemptMemory:
    """Reads, waits for and traces the memory of an attempt's devices. Without a probe it knows nothing and says so."""

    def __init__(
        self, probe: MemoryProbe | None, clean: CleanGate, lease_names: Sequence[str], *, rate_hz: float
    ) -> None:
        self._probe = probe
        self._clean = clean
        self._names = tuple(lease_names)
        self._rate_hz = rate_hz
        self._sampler: MemorySampler | None = None

    @property
    def visible(self) -> bool:
        """The target has device memory that somebody can read."""
        return self._probe is not None

    @property
    def period_s(self) -> float | None:
        """Time from one sample to the next; ``None`` where nothing is sampled."""
        trace = self.snapshot()
        return None if trace is None else 1 / trace.rate_hz

    def wait_clean(self, cancellation: Cancellation | None = None) -> tuple[DeviceMemory, ...]:
        """Wait until devices and host are at their idle level.

        Raises:
            CancelledError: the boot was called off.
            TimeoutError: naming each that is not.
            ProbeError: a device cannot be read.
        """
        return self._clean.wait(self._probe, self._names, cancellation=cancellation)

    def read(self) -> tuple[DeviceMemory, ...]:
        """One reading per device; none without a probe.

        Raises:
            ProbeError: a device cannot be read.
        """
        return () if self._probe is None else self._probe.read()

    def start(self) -> float:
        """Begin the trace; its first sample is the baseline. Returns when the launch is, on the monotonic clock."""
        if self._probe is not None:
            self._sampler = MemorySampler(self._probe, rate_hz=self._rate_hz)
            self._sampler.start()
        launched = time.monotonic()
        self.mark(LAUNCH, launched)
        return launched

    def mark(self, phase: str, at: float | None = None) -> None:
        """A phase began now, or at ``at`` on the monotonic clock."""
        if self._sampler is not None:
            self._sampler.mark(phase, at)

    def await_sample(self) -> None:
        """Wait for a reading that begins from now on, for what is left of something that was over between two ticks."""
        if self._sampler is not None:
            self._sampler.await_sample()

    def snapshot(self) -> MemoryTrace | None:
        """The trace so far."""
        return None if self._sampler is None else self._sampler.snapshot()

    def since(self, phase: str) -> tuple[WindowMemory | None, ...]:
        """Memory of every rank since a phase began; ``None`` for a rank that was not seen, empty without a probe."""
        trace = self.snapshot()
        if trace is None:
            return ()
        return since(trace, phase)

    def trends(self, phase: str) -> tuple[GrowthTrend | None, ...]:
        """Growth of every rank's use from a phase until now; empty without a probe."""
        trace = self.snapshot()
        start = None if trace is None else _last_mark(trace, phase)
        if trace is None or start is None or end_s(trace) <= start:
            return ()
        part_s = (end_s(trace) - start) / PARTS
        parts = [between(trace, start + part_s * index, start + part_s * (index + 1)) for index in range(PARTS)]
        ranks = range(len(trace.series))
        peaks = [[None if (seen := part[rank]) is None else seen.peak_used_bytes for part in parts] for rank in ranks]
        return tuple(trend(rank, peaks[rank], part_s) for rank in ranks)

    def judge(self, gates: MemoryGates, *, since: str, host_free_bytes: int | None = None) -> tuple[GateResult, ...]:
        """Judge every gate that is asked for, from a phase's last mark on; growth is always counted from ready.

        The last: an engine that several tests share is sent requests for each of them.

        Without device memory the engine's memory is the host's, and the least room that its control group left it
        (``host_free_bytes``) stands for what was free. What was used there is not known, and stays so.
        """
        trace = self.snapshot()
        start = None if trace is None else _last_mark(trace, since)
        ranks = self.since(since) if trace is None or start is None else between(trace, start, float("inf"))
        free = ranks if self.visible or host_free_bytes is None else (_host_window(host_free_bytes),)
        nothing = MemoryGates()
        asked = (
            (free, msgspec.structs.replace(nothing, min_free_bytes=gates.min_free_bytes)),
            (ranks, msgspec.structs.replace(nothing, max_used_bytes=gates.max_used_bytes)),
            (self.since(READY), msgspec.structs.replace(nothing, max_growth_bytes=gates.max_growth_bytes)),
        )
        return tuple(result for windows, gate in asked for result in judge_memory(windows, gate))

    def teardown(self) -> None:
        """The engine is being ended: memory from here on says what comes back."""
        self.mark(TEARDOWN)

    def finish(self, path: Path, *, tolerance_bytes: int) -> TraceSummary | None:
        """End the trace and write it to ``path``; ``None`` where nothing was traced.

        Raises:
            OSError: it cannot be written.
        """
        if self._sampler is None:
            return None
        trace = self._sampler.stop()
        path.write_bytes(encode(trace))
        return TraceSummary(
            file=path.name,
            source=trace.source,
            limits=trace.limits,
            phases=phases(trace),
            leaks=tuple(leak for leak in leaks(trace, tolerance_bytes) if leak is not None),
        )

    def close(self) -> None:
        """End what the probe keeps running; the devices are anybody's."""
        self._clean.vacated(self._names)
        if self._sampler is not None:
            self._sampler.stop()
        if isinstance(self._probe, Choice):
            self._probe.close()

    def problems(self) -> tuple[str, ...]:
        """Why parts of the trace are missing, each reason once."""
        trace = self.snapshot()
        return () if trace is None else tuple(dict.fromkeys(gap.reason for gap in trace.gaps))


def _last_mark(trace: MemoryTrace, phase: str) -> float | None:
    return next((mark.at_s for mark in reversed(trace.marks) if mark.phase == phase), None)


def _host_window(least_free_bytes: int) -> WindowMemory:
    """The host as a rank of its own, of which only what was free is known."""
    return WindowMemory(
        rank=0,
        device="host",
        samples=1,
        first_used_bytes=0,
        last_used_bytes=0,
        peak_used_bytes=0,
        peak_at_s=0.0,
        least_free_bytes=least_free_bytes,
        least_free_at_s=0.0,
    )
