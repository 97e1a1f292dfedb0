"""What a memory probe and a lease speak about."""

from __future__ import annotations

from typing import Protocol

import msgspec


class ProbeError(Exception):
    """Device memory cannot be read; the message names the source, what was found and what was expected."""


class DeviceHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that has memory of a device."""

    pid: int
    used_bytes: int | None = None
    """``None`` where the source names the process and not its share; never 0 for that."""
    name: str = ""
    """As the source shows it; empty where it does not."""


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one device at one moment, in bytes, as the driver shows it."""

    device: str
    """The device as the target names it."""
    total_bytes: int
    used_bytes: int
    source: str
    """Where it was read: ``"sysfs"``."""
    reserved_bytes: int = 0
    """Bytes that no process uses and none can have, as NVIDIA's driver keeps them back."""
    holders: tuple[DeviceHolder, ...] = ()
    """Who has how much of it, as far as the source says; empty where it does not."""
    limits: str = ""
    """What the source leaves out or assumes, for people."""
    numa_node: int | None = None
    """Node of the host that the device is attached to; ``None`` where the source does not tell."""

    @property
    def free_bytes(self) -> int:
        """Bytes that a process could still have."""
        return self.total_bytes - self.used_bytes - self.reserved_bytes


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
