"""Memory of the host: what CPU engines, pinned experts and offloaded layers live on."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from pytest_kvbudget.device.model import DeviceMemory, ProbeError

HOST: Final = "host"
_MEMINFO: Final = Path("/proc/meminfo")
_KIB: Final = 1024


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The host's memory at one moment, in bytes, as ``/proc/meminfo`` says."""

    total_bytes: int
    available_bytes: int
    """The kernel's estimate of what a new process could use without swapping (``MemAvailable``)."""
    locked_bytes: int
    """Held by ``mlock`` (``Mlocked``): offloaded weights that an engine left behind show here."""


def read_host(meminfo: Path = _MEMINFO) -> HostMemory:
    """Read the host's memory.

    Raises:
        ProbeError: the file cannot be read or lacks a value. A missing value is never 0.
    """
    try:
        lines = meminfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError as error:
        raise ProbeError(f"{meminfo}: cannot be read: {error.strerror}") from None
    fields = dict(line.partition(":")[::2] for line in lines)

    def value(name: str) -> int:
        text = fields.get(name, "").split()
        if len(text) != 2 or text[1] != "kB" or not text[0].isdecimal():
            shown = " ".join(text) or "nothing"
            raise ProbeError(f"{meminfo}: {name} shows {shown!r}; expected a number of kB")
        return int(text[0]) * _KIB

    return HostMemory(
        total_bytes=value("MemTotal"), available_bytes=value("MemAvailable"), locked_bytes=value("Mlocked")
    )


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
