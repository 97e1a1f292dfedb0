"""Memory of Neuron devices through the stream of ``neuron-monitor``: what runtimes say of themselves, once a second.

There is no figure of free memory in it and it leaves out DMA rings, so it reads low (facts, section 6).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from pytest_kvbudget.device.command import DEADLINE_S
from pytest_kvbudget.device.fields import checked, index, rows, table, whole
from pytest_kvbudget.device.model import DeviceHolder, DeviceMemory, ProbeError
from pytest_kvbudget.device.neuron import Geometry, geometry_of, logical_cores, platform_of

SOURCE: Final = "neuron-monitor"
PERIOD_S: Final = 1.0
_STALE_S: Final = 5.0
"""A record older than this says nothing about now."""
_LIMITS: Final = "once a second; leaves out DMA rings and the driver's own memory, so it reads low"
_LONGEST: Final = 4 * 2**20
"""Bytes of one record; one of a device is about 1.5 KB."""
_CONFIG: Final = {
    "period": f"{PERIOD_S:g}s",
    "neuron_runtimes": [{"tag_filter": ".*", "metrics": [{"type": "memory_used"}]}],
    "system_metrics": [],
}


class MonitorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one record says about device memory."""

    geometry: Geometry
    used: dict[int, tuple[DeviceHolder, ...]]
    """By logical core: every runtime with memory there, and how much."""


def parse_record(line: str, lnc: int | None = None) -> MonitorRecord:
    """Read one line of the stream.

    Args:
        line: one JSON object.
        lnc: logical NeuronCore size, where the record does not tell (tools before SDK 2.21).

    Raises:
        ProbeError: it is not that, or it reports an error instead of a value.
    """
    try:
        document = table(json.loads(line), SOURCE)
    except (ValueError, RecursionError):
        raise ProbeError(f"{SOURCE}: printed {line.strip()[:80]!r}; expected a line of JSON") from None
    hardware = table(document.get("neuron_hardware_info"), f"{SOURCE}: neuron_hardware_info")
    _no_error(hardware, "neuron_hardware_info")
    size = index(hardware.get("logical_neuroncore_config", lnc or 1), f"{SOURCE}: logical_neuroncore_config")
    per_device = index(hardware.get("neuroncore_per_device_count"), f"{SOURCE}: neuroncore_per_device_count")
    geometry = geometry_of(
        platform_of(str(hardware.get("neuron_device_type", ""))),
        physical_cores=per_device * size,
        lnc=size,
        device_bytes=whole(hardware.get("neuron_device_memory_size"), f"{SOURCE}: neuron_device_memory_size"),
    )
    if "neuron_runtime_data" not in document:
        raise ProbeError(f"{SOURCE}: has no neuron_runtime_data; expected a list, empty on idle devices")
    used: dict[int, list[DeviceHolder]] = {}
    for runtime in rows(document["neuron_runtime_data"] or [], f"{SOURCE}: neuron_runtime_data"):
        for core, holder in _runtime(runtime).items():
            used.setdefault(core, []).append(holder)
    return MonitorRecord(geometry=geometry, used={core: tuple(holders) for core, holders in used.items()})


def _runtime(runtime: Mapping[str, object]) -> dict[int, DeviceHolder]:
    """One runtime's memory by logical core."""
    pid = index(runtime.get("pid"), f"{SOURCE}: pid")
    where = f"{SOURCE}: runtime {pid}"
    _no_error(runtime, f"runtime {pid}")
    memory = table(table(runtime.get("report"), where).get("memory_used"), f"{where} memory_used")
    _no_error(memory, f"runtime {pid} memory_used")
    total = table(memory.get("neuron_runtime_used_bytes"), f"{where} neuron_runtime_used_bytes")
    breakdown = table(total.get("usage_breakdown"), f"{where} usage_breakdown")
    cores = table(breakdown.get("neuroncore_memory_usage"), f"{where} neuroncore_memory_usage")
    name = str(runtime.get("neuron_runtime_tag") or "")
    return {
        index(core, f"{where} core"): DeviceHolder(
            pid=pid,
            used_bytes=sum(
                whole(size, f"{where} core {core} {category}")
                for category, size in table(parts, f"{where} core {core}").items()
            ),
            name=name,
        )
        for core, parts in cores.items()
    }


def _no_error(part: Mapping[str, object], what: str) -> None:
    error = part.get("error")
    if error:
        raise ProbeError(f"{SOURCE}: {what} reports {str(error)[:200]!r}; expected no error")


class NeuronMonitorProbe:
    """Reads the memory of HBM stacks. A device is a logical core; its reading is that of the stack it is on.

    ``neuron-monitor`` runs from the first reading to `close`. It ends by itself, at its next record, when this
    process is gone: nobody reads its pipe then.
    """

    def __init__(
        self,
        devices: Sequence[str],
        *,
        tool: str = SOURCE,
        lnc: int | None = None,
        timeout_s: float = DEADLINE_S,
        stale_s: float = _STALE_S,
    ) -> None:
        self._devices = tuple(devices)
        self._tool = tool
        self._lnc = lnc
        self._timeout_s = timeout_s
        self._stale_s = stale_s
        self._lock = threading.Lock()
        self._stream: _Stream | None = None

    def read(self) -> tuple[DeviceMemory, ...]:
        """One reading per device, in the order they were named, no older than a few seconds.

        Raises:
            ProbeError: the tool is missing, ended, is late, or does not show a device's memory.
        """
        cores = logical_cores(self._devices)
        record = parse_record(self._running().latest(self._timeout_s, self._stale_s), self._lnc)
        return tuple(_reading(device, core, record) for device, core in zip(self._devices, cores, strict=True))

    def close(self) -> None:
        """End the tool. Calling it again does nothing; a later reading starts it again."""
        with self._lock:
            self._end()

    def _running(self) -> _Stream:
        """The stream, started where there is none that lives. A sampler and a gate may ask at the same time."""
        with self._lock:
            if self._stream is None or self._stream.ended:
                self._end()
                self._stream = _Stream(self._tool)
            return self._stream

    def _end(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def _reading(device: str, core: int, record: MonitorRecord) -> DeviceMemory:
    siblings = record.geometry.siblings(core)
    found: dict[int, DeviceHolder] = {}
    for sibling in siblings:
        for holder in record.used.get(sibling, ()):
            before = found.get(holder.pid)
            so_far = (before.used_bytes or 0) if before else 0
            found[holder.pid] = msgspec.structs.replace(holder, used_bytes=so_far + (holder.used_bytes or 0))
    shared = f"one HBM stack of cores {', '.join(map(str, siblings))}; " if len(siblings) > 1 else ""
    return checked(
        device=device,
        total_bytes=record.geometry.stack_bytes,
        used_bytes=sum(holder.used_bytes or 0 for holder in found.values()),
        source=SOURCE,
        where=f"{SOURCE}: core {device}",
        holders=tuple(found.values()),
        limits=shared + _LIMITS,
    )


class _Stream:
    """The running tool, and its latest line: read as it comes, so that what is taken is never an old one."""

    def __init__(self, tool: str) -> None:
        descriptor, path = tempfile.mkstemp(prefix="kvbudget-", suffix=".json")
        self._config = Path(path)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            json.dump(_CONFIG, file)
        try:
            self._process = subprocess.Popen(
                [tool, "-c", path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self._config.unlink(missing_ok=True)
            raise ProbeError(f"{SOURCE}: cannot be run: {error.strerror}; expected the tool on PATH") from None
        self._changed = threading.Condition()
        self._line = b""
        self._at = -1.0
        self._over = False
        self._thread = threading.Thread(target=self._follow, name="kvbudget-neuron-monitor", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """The tool prints no more."""
        return self._over

    def latest(self, timeout_s: float, stale_s: float) -> str:
        """The last line, waited for where there is none that is fresh.

        Raises:
            ProbeError: none came in time, or the tool ended.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._over and (self._at < 0 or time.monotonic() - self._at > stale_s):
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise ProbeError(f"{SOURCE}: no record within {timeout_s:g} s; expected one a second")
            if self._over:
                status = self._process.poll()
                raise ProbeError(f"{SOURCE}: ended (status {status}); expected a stream of records")
            return self._line.decode("utf-8", "replace")

    def close(self) -> None:
        """End the tool."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._thread.join(1.0)
        if self._process.stdout is not None and not self._thread.is_alive():
            self._process.stdout.close()
        self._config.unlink(missing_ok=True)

    def _follow(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        with contextlib.suppress(OSError, ValueError):
            while line := pipe.readline(_LONGEST):
                if line.strip():
                    with self._changed:
                        self._line, self._at = line, time.monotonic()
                        self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()
