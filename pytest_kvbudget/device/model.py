"""What a memory probe and a lease speak about."""

from __future__ import annotations

from typing import Protocol

import msgspec


class ProbeError(Exception):
    """Device memory cannot be read; the message names the source, what was found and what was expected."""


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one device at one moment, in bytes, as the driver shows it."""

    device: str
    """The device as the target names it."""
    total_bytes: int
    used_bytes: int
    source: str
    """Where it was read: ``"sysfs"``."""

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody uses."""
        return self.total_bytes - self.used_bytes


class MemoryProbe(Protocol):
    """Reads the memory of a target's devices."""

    def read(self) -> tuple[DeviceMemory, ...]:
        """One reading per device, in the order the devices were named.

        Raises:
            ProbeError: when any of them cannot be read. A missing reading is never 0.
        """
        ...


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a lease: written beside the lock for messages and for `kvbudget reap`, never trusted as the lock."""

    device: str
    run: str
    pid: int
    start_ticks: int
    """Start time of ``pid`` in clock ticks since boot, field 22 of ``/proc/PID/stat``: pid and start name a process."""
    host: str
    since: str
    """ISO 8601, UTC."""
    purpose: str
    """Target and shape, for people."""
