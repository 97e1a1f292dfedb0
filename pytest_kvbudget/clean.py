"""The clean gate: device memory is back at its idle level before a boot is measured and after it is torn down."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from pytest_kvbudget.config import Limits
from pytest_kvbudget.device.model import DeviceMemory, MemoryProbe
from pytest_kvbudget.units import format_size

_PAUSE_S: Final = 0.02


class CleanGate:
    """Knows the idle level of every device it has seen, in bytes used, and waits for it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._idle_used: dict[str, int] = {}

    def wait(self, probe: MemoryProbe, lease_names: Sequence[str]) -> tuple[DeviceMemory, ...]:
        """Wait until every device is at its idle level, at most ``release_seconds``; returns the reading that was.

        The idle level is the lowest that this run saw; before its first boot, at most ``idle_used``.

        Raises:
            TimeoutError: naming each device that is not idle, what it shows and what was expected.
            ProbeError: when a device cannot be read.
        """
        deadline = time.monotonic() + self._limits.release_seconds
        while True:
            readings = probe.read()
            busy = [
                f"device {reading.device} shows {format_size(reading.used_bytes)} used, expected at most "
                f"{format_size(self._allowed(name))}"
                for name, reading in zip(lease_names, readings, strict=True)
                if reading.used_bytes > self._allowed(name)
            ]
            if not busy:
                for name, reading in zip(lease_names, readings, strict=True):
                    self._idle_used[name] = min(reading.used_bytes, self._idle_used.get(name, reading.used_bytes))
                return readings
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"devices_busy: {'; '.join(busy)}, for {self._limits.release_seconds:g} s; "
                    "another process holds the memory: end it, or raise limits.idle_used if this is the idle level"
                )
            time.sleep(_PAUSE_S)

    def _allowed(self, name: str) -> int:
        if name in self._idle_used:
            return self._idle_used[name] + self._limits.release_tolerance
        return self._limits.idle_used
