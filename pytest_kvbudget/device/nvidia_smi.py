"""Memory of NVIDIA GPUs through ``nvidia-smi --query-gpu``: MiB, where used and free are less than the total."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from pytest_kvbudget.device.command import DEADLINE_S, run_tool
from pytest_kvbudget.device.fields import checked, decimal, index, whole
from pytest_kvbudget.device.model import DeviceHolder, DeviceMemory, ProbeError

SOURCE: Final = "nvidia-smi"
ORDER: Final = "numbers are PCI order; CUDA's are the same with CUDA_DEVICE_ORDER=PCI_BUS_ID or equal GPUs"
_LIMITS: Final = f"whole MiB; {ORDER}"
_GPU_FIELDS: Final = ("index", "uuid", "memory.total", "memory.used", "memory.free")
_APP_FIELDS: Final = ("gpu_uuid", "pid", "process_name", "used_memory")
_ROUNDING_BYTES: Final = 3 * 2**20
"""Three figures, each rounded to a MiB."""


class NvidiaGpu(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one GPU in bytes. ``total - used - free`` is kept back by the driver."""

    number: int
    uuid: str
    total_bytes: int
    used_bytes: int
    free_bytes: int

    def reading(self, device: str) -> DeviceMemory:
        """As a reading of the target's device.

        Raises:
            ProbeError: the parts are more than the total.
        """
        where = f"nvidia-smi: GPU {self.number}"
        reserved = self.total_bytes - self.used_bytes - self.free_bytes
        if reserved < -_ROUNDING_BYTES:
            raise ProbeError(
                f"{where}: shows {self.used_bytes} bytes used and {self.free_bytes} free of {self.total_bytes}; "
                "expected parts of a total"
            )
        return checked(
            device=device,
            total_bytes=self.total_bytes,
            used_bytes=self.used_bytes,
            reserved_bytes=max(0, reserved),
            source=SOURCE,
            where=where,
            limits=_LIMITS,
        )


def _rows(text: str, fields: Sequence[str]) -> list[dict[str, str]]:
    found = []
    try:
        parsed = list(csv.reader(text.splitlines(), skipinitialspace=True))
    except csv.Error as error:
        raise ProbeError(f"nvidia-smi: printed no CSV ({error}); expected {', '.join(fields)}") from None
    for row in parsed:
        if len(row) == len(fields):
            found.append({name: value.strip() for name, value in zip(fields, row, strict=True)})
        elif any(value.strip() for value in row):
            raise ProbeError(f"nvidia-smi: printed {', '.join(row)[:80]!r}; expected {', '.join(fields)}")
    return found


def parse_gpus(text: str) -> dict[int, NvidiaGpu]:
    """Read ``--query-gpu=index,uuid,memory.total,memory.used,memory.free --format=csv,noheader,nounits``.

    Raises:
        ProbeError: it is not that, or a value is ``[N/A]``.
    """
    found = {}
    for row in _rows(text, _GPU_FIELDS):
        number = index(row["index"], "nvidia-smi: index")
        total, used, free = (
            whole(row[f"memory.{name}"], f"nvidia-smi: GPU {number} memory.{name}", "MiB")
            for name in ("total", "used", "free")
        )
        found[number] = NvidiaGpu(number=number, uuid=row["uuid"], total_bytes=total, used_bytes=used, free_bytes=free)
    if not found:
        raise ProbeError("nvidia-smi: names no GPU; expected at least one")
    return found


def parse_apps(text: str) -> dict[str, tuple[DeviceHolder, ...]]:
    """Read ``--query-compute-apps=gpu_uuid,pid,process_name,used_memory``: holders by the GPU's UUID.

    ``[N/A]`` memory (WDDM, containers without the host's pid space) leaves the holder without a figure.

    Raises:
        ProbeError: it is not that.
    """
    found: dict[str, list[DeviceHolder]] = {}
    for row in _rows(text, _APP_FIELDS):
        try:
            used_bytes = whole(row["used_memory"], "nvidia-smi: used_memory", "MiB")
        except ProbeError:
            used_bytes = None
        holder = DeviceHolder(pid=index(row["pid"], "nvidia-smi: pid"), used_bytes=used_bytes, name=row["process_name"])
        found.setdefault(row["gpu_uuid"], []).append(holder)
    return {uuid: tuple(holders) for uuid, holders in found.items()}


def find_gpu(device: str, gpus: Mapping[int, str], source: str) -> int:
    """Number of the GPU that a target's device names by number or by (the beginning of) its UUID.

    Raises:
        ProbeError: there is none, or more than one.
    """
    ordinal = decimal(device)
    if ordinal is not None and ordinal in gpus:
        return ordinal
    begins = [number for number, uuid in gpus.items() if device.startswith("GPU-") and uuid.startswith(device)]
    if len(begins) == 1:
        return begins[0]
    there = ", ".join(f"{number} ({uuid})" for number, uuid in gpus.items()) or "none"
    raise ProbeError(f"{source}: no device {device!r}; expected one of {there}: check the target's devices")


class NvidiaSmiProbe:
    """Reads the memory of NVIDIA GPUs. A device is a number or a UUID, as ``CUDA_VISIBLE_DEVICES`` takes them."""

    def __init__(self, devices: Sequence[str], *, tool: str = SOURCE, timeout_s: float = DEADLINE_S) -> None:
        self._devices = tuple(devices)
        self._tool = tool
        self._timeout_s = timeout_s

    def read(self) -> tuple[DeviceMemory, ...]:
        """One reading per device, in the order they were named.

        Raises:
            ProbeError: the tool is missing, late, or does not show a device's memory.
        """
        return tuple(gpu.reading(device) for device, gpu in self._gpus())

    def holders(self) -> tuple[tuple[DeviceHolder, ...], ...]:
        """Holders of each device, in the order they were named.

        Raises:
            ProbeError: the tool cannot tell.
        """
        apps = parse_apps(self._query("compute-apps", _APP_FIELDS))
        return tuple(apps.get(gpu.uuid, ()) for _, gpu in self._gpus())

    def _gpus(self) -> list[tuple[str, NvidiaGpu]]:
        found = parse_gpus(self._query("gpu", _GPU_FIELDS))
        uuids = {number: gpu.uuid for number, gpu in found.items()}
        return [(device, found[find_gpu(device, uuids, SOURCE)]) for device in self._devices]

    def _query(self, what: str, fields: Sequence[str]) -> str:
        argv = [self._tool, f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
        return run_tool(argv, timeout_s=self._timeout_s)
