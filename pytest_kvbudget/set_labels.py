"""What a device set is called: equal for sets on which one boot is the same as on the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Final

import msgspec

from pytest_kvbudget.device.model import DeviceMemory
from pytest_kvbudget.units import MIB

IDLE_FREE_STEP_BYTES: Final = 16 * MIB
"""Idle free memory that differs by no more is the same.

What drivers hold on idle cards of one kind differs by single MiB from look to look. 16 MiB is a quarter of the sigma
that a ladder takes boots to differ by where nobody measured it (64 MiB), and less than the 32 MiB of 4,096 tokens at
8 KiB each: sets of one label give the same answer within what their boots differ by anyhow.
"""


class IdleDevice(msgspec.Struct, frozen=True, kw_only=True):
    """What decides how a boot ends on a device, beside the boot. Sizes in bytes."""

    total_bytes: int
    free_bytes: int
    node_bytes: int | None = None
    """All memory of the device's NUMA node; ``None`` where the host is not divided."""

    def __str__(self) -> str:
        free_mib = round(self.free_bytes / IDLE_FREE_STEP_BYTES) * IDLE_FREE_STEP_BYTES // MIB
        node = "" if self.node_bytes is None else f", NUMA node of {self.node_bytes} B"
        return f"{self.total_bytes} B, {free_mib} MiB free when idle{node}"

    def is_like(self, other: IdleDevice) -> bool:
        """A boot cannot tell one from the other."""
        same = (self.total_bytes, self.node_bytes) == (other.total_bytes, other.node_bytes)
        return same and abs(self.free_bytes - other.free_bytes) <= IDLE_FREE_STEP_BYTES


IdleSet = tuple[IdleDevice, ...]


def idle_set(readings: Sequence[DeviceMemory], node_bytes: Mapping[int, int]) -> IdleSet | None:
    """What these readings of a set's idle devices amount to; ``None`` where something that decides is not known.

    Args:
        readings: of every device of the set, in order; none where nothing shows their memory.
        node_bytes: total memory of the host's NUMA nodes by number. The control group that engines inherit is this
            process' own, and so the same for all its sets.
    """
    divided = len(node_bytes) > 1
    if not readings or (divided and any(reading.numa_node not in node_bytes for reading in readings)):
        return None
    return tuple(
        IdleDevice(
            total_bytes=reading.total_bytes,
            free_bytes=reading.free_bytes,
            node_bytes=node_bytes[reading.numa_node] if divided and reading.numa_node is not None else None,
        )
        for reading in readings
    )


def label_of(devices: Sequence[str], found: IdleSet | None) -> str:
    """A set in words; by its devices' names where it is not known to be like another."""
    if found is None:
        return f"devices {'+'.join(devices)}"
    parts = [str(device) for device in found]
    return f"{len(parts)} x ({parts[0]})" if len(parts) > 1 and len(set(parts)) == 1 else " + ".join(parts)


class SetLabels:
    """The labels of a target's device sets: a set that is like one seen before has that one's.

    A set keeps its first label: else a boot that is repeated on the very set of its neighbour could still count as one
    on another. Any thread may ask.

    Args:
        node_bytes: reads the total memory of the host's NUMA nodes by number.
    """

    def __init__(self, node_bytes: Callable[[], Mapping[int, int]]) -> None:
        self._read_nodes = node_bytes
        self._nodes: Mapping[int, int] | None = None
        self._kinds: list[tuple[IdleSet, str]] = []
        self._known: dict[tuple[str, ...], str] = {}
        self._lock = Lock()

    def known(self, devices: tuple[str, ...]) -> str | None:
        """The label of a set that has one."""
        with self._lock:
            return self._known.get(devices)

    def look(self, devices: tuple[str, ...], readings: Sequence[DeviceMemory]) -> str:
        """The set's label, or what these readings would make it."""
        with self._lock:
            return self._look(devices, readings)[0]

    def learn(self, devices: tuple[str, ...], readings: Sequence[DeviceMemory]) -> str:
        """The set's label; these idle readings decide it where it has none."""
        with self._lock:
            label, found = self._look(devices, readings)
            if devices not in self._known:
                self._known[devices] = label
                if found is not None:
                    self._kinds.append((found, label))
            return label

    def _look(self, devices: tuple[str, ...], readings: Sequence[DeviceMemory]) -> tuple[str, IdleSet | None]:
        """Label of a set, and what it is where that is new."""
        if self._nodes is None:
            self._nodes = self._read_nodes()
        if devices in self._known:
            return self._known[devices], None
        found = idle_set(readings, self._nodes)
        if found is not None:
            for kind, label in self._kinds:
                if len(kind) == len(found) and all(map(IdleDevice.is_like, kind, found)):
                    return label, None
        return label_of(devices, found), found
