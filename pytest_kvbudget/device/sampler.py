"""The thread that samples device memory from before a launch to after its teardown."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from pytest_kvbudget.device.model import DeviceMemory, MemoryProbe, ProbeError
from pytest_kvbudget.device.probes import Choice
from pytest_kvbudget.device.trace import Gap, MemoryTrace, PhaseMark, Series

DEFAULT_HZ: Final = 10.0
SLOWEST_HZ: Final = 1.0
FASTEST_HZ: Final = 100.0
_FIRST_S: Final = 5.0
_STOP_S: Final = 1.0
_MOST_GAPS: Final = 100


class MemorySampler:
    """Samples a probe at a fixed rate until it is stopped.

    Ticks are counted from the start on the monotonic clock, so that lateness does not add up; a tick that passes while
    a reading is under way is left out. A failed reading is a gap. The thread is a daemon: a reading that hangs in the
    driver keeps neither `stop` nor the process.

    Args:
        probe: asked from the sampler's thread alone; of a `Choice`, its ``direct`` source, no faster than it can.
        rate_hz: samples per second, from 1 to 100.

    Raises:
        ValueError: the rate is out of range.
    """

    def __init__(self, probe: MemoryProbe | Choice, *, rate_hz: float = DEFAULT_HZ) -> None:
        if not SLOWEST_HZ <= rate_hz <= FASTEST_HZ:
            raise ValueError(f"{rate_hz:g} samples per second; expected {SLOWEST_HZ:g} to {FASTEST_HZ:g}")
        self._probe = probe.direct if isinstance(probe, Choice) else probe
        self._rate_hz = min(rate_hz, probe.max_hz) if isinstance(probe, Choice) else rate_hz
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._first = threading.Event()
        self._thread: threading.Thread | None = None
        self._begun = 0.0
        self._started = ""
        self._source = self._limits = ""
        self._used: list[_Column] = []
        self._room: list[_Column] = []
        self._devices: tuple[str, ...] = ()
        self._runs: list[int] = []
        self._next_tick = 0
        """The tick after the last sample."""
        self._samples = 0
        self._marks: list[PhaseMark] = []
        self._gaps: list[Gap] = []
        self._left_out = 0
        self._failing = False
        self._seen = 0
        self._seen_one = threading.Condition(self._lock)
        self._over = False
        """The trace was handed out: a reading that returns now is too late."""

    def start(self, *, first_s: float = _FIRST_S) -> None:
        """Start sampling; returns after the first reading, good or bad, or after ``first_s`` seconds."""
        if self._thread is not None:
            raise RuntimeError("the sampler was started before")
        self._begun = time.monotonic()
        self._started = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._thread = threading.Thread(target=self._run, name="kvbudget-memory", daemon=True)
        self._thread.start()
        self._first.wait(first_s)

    def mark(self, phase: str, at: float | None = None) -> None:
        """A phase began now, or at ``at`` on the monotonic clock (when its log line was read)."""
        at_s = max(0.0, (time.monotonic() if at is None else at) - self._begun)
        with self._lock:
            self._marks.append(PhaseMark(phase=phase, at_s=round(at_s, 6)))

    def await_sample(self, *, wait_s: float = _FIRST_S) -> None:
        """Wait for a reading that begins from now on, good or bad, ``wait_s`` seconds at most.

        What was over between two ticks is judged by the level that it left.
        """
        with self._seen_one:
            # one reading may be under way, and began before
            wanted = self._seen + 2
            self._seen_one.wait_for(lambda: self._seen >= wanted or self._over or self._stop.is_set(), wait_s)

    def snapshot(self) -> MemoryTrace:
        """What was sampled so far."""
        with self._lock:
            return MemoryTrace(
                source=self._source,
                limits=self._limits,
                rate_hz=self._rate_hz,
                started=self._started,
                runs=tuple(self._runs),
                marks=tuple(sorted(self._marks, key=lambda mark: mark.at_s)),
                gaps=tuple(self._gaps),
                gaps_left_out=self._left_out,
                series=tuple(
                    Series(device=device, used=used.pairs(), room=room.pairs())
                    for device, used, room in zip(self._devices, self._used, self._room, strict=True)
                ),
            )

    def stop(self, *, wait_s: float = _STOP_S) -> MemoryTrace:
        """Stop sampling and return the trace. Calling it again returns the same.

        A reading that is under way is waited for, ``wait_s`` seconds at most; then the trace ends without it.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join(wait_s)
            if self._thread.is_alive():
                late = Gap(start_s=self._next_tick / self._rate_hz, samples=1, reason="a reading did not return")
                with self._lock:
                    if late not in self._gaps:
                        self._gaps.append(late)
        with self._lock:
            self._over = True
        return self.snapshot()

    def _run(self) -> None:
        tick = 0
        while not self._stop.wait(max(0.0, self._begun + tick / self._rate_hz - time.monotonic())):
            self._sample(tick)
            self._first.set()
            tick = max(tick + 1, math.ceil((time.monotonic() - self._begun) * self._rate_hz))
        # The end of the trace is what tells a leak: it is seen, however close to a tick it falls.
        self._sample(max(tick, math.ceil((time.monotonic() - self._begun) * self._rate_hz)))
        self._first.set()

    def _sample(self, tick: int) -> None:
        try:
            readings = self._probe.read()
            with self._lock:
                if not self._over:
                    self._take(tick, readings)
        except Exception as error:  # noqa: BLE001 - a source that breaks must not end the trace
            with self._lock:
                if not self._over:
                    self._fail(tick, error)
        with self._seen_one:
            self._seen += 1
            self._seen_one.notify_all()

    def _take(self, tick: int, readings: Sequence[DeviceMemory]) -> None:
        devices = tuple(reading.device for reading in readings)
        if not self._devices:
            self._devices = devices
            self._source = ", ".join(dict.fromkeys(reading.source for reading in readings))
            self._limits = "; ".join(dict.fromkeys(reading.limits for reading in readings if reading.limits))
            self._used = [_Column() for _ in readings]
            self._room = [_Column() for _ in readings]
        if devices != self._devices:
            raise ProbeError(f"devices {devices} were read; expected {self._devices}")
        for reading, used, room in zip(readings, self._used, self._room, strict=True):
            used.add(self._samples, reading.used_bytes)
            room.add(self._samples, reading.used_bytes + reading.free_bytes)
        if self._runs and tick == self._next_tick:
            self._runs[-1] += 1
        else:
            self._runs += (tick - self._next_tick, 1)
        self._samples += 1
        self._next_tick = tick + 1
        self._failing = False

    def _fail(self, tick: int, error: Exception) -> None:
        if self._failing and self._gaps:
            last = self._gaps[-1]
            self._gaps[-1] = Gap(start_s=last.start_s, samples=last.samples + 1, reason=last.reason)
        elif len(self._gaps) < _MOST_GAPS:
            said = str(error) if isinstance(error, ProbeError) else f"{type(error).__name__}: {error}"
            self._gaps.append(Gap(start_s=tick / self._rate_hz, samples=1, reason=said))
        elif not self._failing:
            self._left_out += 1
        self._failing = True


class _Column:
    """One value over the samples, kept where it changes."""

    __slots__ = ("_pairs", "_sample", "_value")

    def __init__(self) -> None:
        self._pairs: list[int] = []
        self._sample = 0
        self._value = 0

    def add(self, sample: int, value: int) -> None:
        if value != self._value or not self._pairs:
            self._pairs += (sample - self._sample, value - self._value)
            self._sample, self._value = sample, value

    def pairs(self) -> tuple[int, ...]:
        return tuple(self._pairs)
