"""Memory of the host: what CPU engines, pinned experts and offloaded layers live on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec
import psutil

from pytest_kvbudget.device.fields import decimal
from pytest_kvbudget.device.model import DeviceMemory, ProbeError

HOST: Final = "host"
_MEMINFO: Final = Path("/proc/meminfo")
_KIB: Final = 1024
_NODE = re.compile(r"node(\d+)", re.ASCII)


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The host's memory at one moment, in bytes, as ``/proc/meminfo`` says."""

    total_bytes: int
    available_bytes: int
    """The kernel's estimate of what a new process could use without swapping (``MemAvailable``)."""
    locked_bytes: int
    """Held by ``mlock`` (``Mlocked``): offloaded weights that an engine left behind show here."""


class NumaMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one NUMA node at one moment, in bytes: vLLM's CPU engine lives on one of them."""

    node: int
    total_bytes: int
    free_bytes: int
    """Without page cache that would be given up: less than what a process can have."""


class TreeMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory of a process and everything below it at one moment, in bytes."""

    pss_bytes: int
    """Proportional: a page that N processes share counts an Nth for each, so that the sum counts it once."""
    processes: int
    unreadable: int
    """Processes whose memory another user's rights hide: the sum is short by them."""


def read_host(meminfo: Path = _MEMINFO) -> HostMemory:
    """Read the host's memory.

    Raises:
        ProbeError: the file cannot be read or lacks a value. A missing value is never 0.
    """
    fields = _fields(meminfo, "")
    return HostMemory(
        total_bytes=_value(fields, "MemTotal", meminfo),
        available_bytes=_value(fields, "MemAvailable", meminfo),
        locked_bytes=_value(fields, "Mlocked", meminfo),
    )


def read_numa(root: Path = Path("/sys")) -> tuple[NumaMemory, ...]:
    """Read the memory of every NUMA node, by number.

    Raises:
        ProbeError: there is none, or one cannot be read.
    """
    nodes = root / "devices" / "system" / "node"
    numbers = sorted(int(match[1]) for entry in nodes.glob("node*") if (match := _NODE.fullmatch(entry.name)))
    found = []
    for number in numbers:
        path = nodes / f"node{number}" / "meminfo"
        fields = _fields(path, f"Node {number} ")
        found.append(
            NumaMemory(
                node=number,
                total_bytes=_value(fields, "MemTotal", path),
                free_bytes=_value(fields, "MemFree", path),
            )
        )
    if not found:
        raise ProbeError(f"{nodes}: has no node; expected node0")
    return tuple(found)


def numa_node_of(device: Path) -> int | None:
    """Node that a PCI device's folder in sysfs says it is attached to; ``None`` where it does not (-1: no NUMA)."""
    try:
        return decimal((device / "numa_node").read_text(encoding="ascii", errors="replace").strip())
    except OSError:
        return None


def read_tree(pid: int, proc: Path = Path("/proc"), below: Iterable[int] | None = None) -> TreeMemory:
    """Read the memory of a process and of everything below it.

    Args:
        pid: the process on top.
        proc: where the kernel shows processes.
        below: the processes below it, where the caller knows them; otherwise they are looked up.

    Raises:
        ProbeError: not one of them could be read.
    """
    if below is None:
        try:
            below = [child.pid for child in psutil.Process(pid).children(recursive=True)]
        except psutil.Error:
            below = ()
    total = processes = unreadable = 0
    for member in (pid, *below):
        path = proc / str(member) / "smaps_rollup"
        try:
            total += _value(_fields(path, ""), "Pss", path)
            processes += 1
        except ProbeError:
            # A process that ended meanwhile has no folder; one whose memory map is not ours to see has.
            unreadable += (proc / str(member)).exists()
    if not processes:
        raise ProbeError(f"{proc}/{pid}/smaps_rollup: cannot be read; expected a living process of this user")
    return TreeMemory(pss_bytes=total, processes=processes, unreadable=unreadable)


def _fields(path: Path, prefix: str) -> Mapping[str, str]:
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError as error:
        raise ProbeError(f"{path}: cannot be read: {error.strerror}") from None
    return dict(line.removeprefix(prefix).partition(":")[::2] for line in lines)


def _value(fields: Mapping[str, str], name: str, path: Path) -> int:
    text = fields.get(name, "").split()
    number = decimal(text[0]) if len(text) == 2 and text[1] == "kB" else None
    if number is None:
        shown = " ".join(text) or "nothing"
        raise ProbeError(f"{path}: {name} shows {shown!r}; expected a number of kB")
    return number * _KIB


class HostProbe:
    """The host's memory as a device: used is what is not available."""

    def read(self) -> tuple[DeviceMemory, ...]:
        """One reading.

        Raises:
            ProbeError: it cannot be read.
        """
        memory = read_host()
        used = memory.total_bytes - memory.available_bytes
        return (DeviceMemory(device=HOST, total_bytes=memory.total_bytes, used_bytes=used, source="meminfo"),)
