"""The clean gate: device and host memory are back at their idle level before a boot is measured, and after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from threading import Lock
from typing import Final

from pytest_kvbudget.cancel import Cancellation
from pytest_kvbudget.config import Limits
from pytest_kvbudget.device.host import HostMemory
from pytest_kvbudget.device.leases import other_holders
from pytest_kvbudget.device.model import DeviceMemory, MemoryProbe, ProbeError
from pytest_kvbudget.device.probes import Choice
from pytest_kvbudget.units import format_size

_PAUSE_S: Final = 0.02


class CleanGate:
    """Knows the idle level of every device that it has seen, and of the host, and waits for them. Any thread may ask.

    Args:
        limits: how long to wait, and how exact a clean level is.
        host: reads the host's memory; ``None`` for engines that are simulated and use none of it.
        leased: names of the leases that this process holds: those without an engine take no memory of the host.
    """

    def __init__(
        self,
        limits: Limits,
        host: Callable[[], HostMemory] | None = None,
        *,
        leased: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._limits = limits
        self._host = host
        self._leased = leased
        self._lock = Lock()
        self._occupied: set[str] = set()
        """Leases whose devices an engine of ours has, or is about to have."""
        self._idle_used: dict[str, int] = {}
        self._idle_host: HostMemory | None = None

    def wait(
        self, probe: MemoryProbe | None, lease_names: Sequence[str], *, cancellation: Cancellation | None = None
    ) -> tuple[DeviceMemory, ...]:
        """Wait until everything is at its idle level, at most ``release_seconds``; returns the devices as they were.

        A device's idle level is the lowest use that this run saw; before its first boot, at most ``idle_used``. The
        host's is what was there before the first boot, and is waited for only while no other engine is on this host:
        beside one, of ours or anybody's, what is missing says nothing. From here on the devices count as occupied,
        until `vacated`.

        Raises:
            CancelledError: the boot was called off.
            TimeoutError: naming what is not idle, what it shows, what was expected, and who holds it where that is
                known.
            ProbeError: when a device cannot be read.
        """
        deadline = time.monotonic() + self._limits.release_seconds
        cancellation = cancellation or Cancellation()
        while True:
            readings = () if probe is None else probe.read()
            # Looking at the host and being in its way is one step: no engine starts between the two.
            with self._lock:
                busy = [*self._busy_devices(lease_names, readings), *self._busy_host(lease_names)]
                if not busy:
                    for name, reading in zip(lease_names, readings, strict=probe is not None):
                        self._idle_used[name] = min(reading.used_bytes, self._idle_used.get(name, reading.used_bytes))
                    self._occupied.update(lease_names)
                    return readings
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{'; '.join(busy)}, for {self._limits.release_seconds:g} s{_held_by(probe)}; another process "
                    "holds the memory: end it, or raise limits.idle_used or limits.host_tolerance if this is idle"
                )
            cancellation.pause(_PAUSE_S)

    def vacated(self, lease_names: Sequence[str]) -> None:
        """No engine of ours has these devices any more."""
        with self._lock:
            self._occupied.difference_update(lease_names)

    def _busy_devices(self, names: Sequence[str], readings: Sequence[DeviceMemory]) -> Iterator[str]:
        for name, reading in zip(names, readings, strict=False):
            allowed = self._limits.idle_used
            if name in self._idle_used:
                allowed = self._idle_used[name] + self._limits.release_tolerance
            if reading.used_bytes > allowed:
                yield (
                    f"device {reading.device} shows {format_size(reading.used_bytes)} used, expected at most "
                    f"{format_size(allowed)}"
                )

    def _busy_host(self, own: Sequence[str]) -> Iterator[str]:
        if self._host is None:
            return
        if not self._occupied.issubset(own) or other_holders([*own, *self._leased()]):
            # Engines on other devices of this host come and go: what they take is nobody's left-over.
            return
        now = self._host()
        idle = self._idle_host
        if idle is None:
            self._idle_host = now
            return
        least = idle.available_bytes - self._limits.host_tolerance
        most = idle.locked_bytes + self._limits.host_tolerance
        if now.available_bytes < least:
            yield (
                f"the host has {format_size(now.available_bytes)} of memory available, expected at least "
                f"{format_size(least)}"
            )
        if now.locked_bytes > most:
            yield (f"{format_size(now.locked_bytes)} of host memory are locked, expected at most {format_size(most)}")


def _held_by(probe: MemoryProbe | None) -> str:
    if not isinstance(probe, Choice):
        return ""
    try:
        held = [
            f"pid {holder.pid} ({holder.name}) on device {reading.device}"
            + ("" if holder.used_bytes is None else f" with {format_size(holder.used_bytes)}")
            for reading in probe.read_with_holders()
            for holder in reading.holders
        ]
    except ProbeError:
        return ""
    return f"; held by {', '.join(held)}" if held else ""
