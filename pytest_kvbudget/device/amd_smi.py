"""Memory of AMD GPUs through ``amd-smi``, whose "MB" are MiB and whose JSON has two shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from pytest_kvbudget.device.amd import UNCHECKED_ORDER, AmdGpu, discrete, pick
from pytest_kvbudget.device.command import DEADLINE_S, json_in, run_tool
from pytest_kvbudget.device.fields import checked, index, measured, rows, table
from pytest_kvbudget.device.model import DeviceHolder, DeviceMemory, ProbeError

SOURCE: Final = "amd-smi"
TOOL_FOLDERS: Final = ("/opt/rocm/bin",)
_LIMITS: Final = "whole MiB; one reading takes the tool about a second"
_NO_PROCESSES: Final = "no running processes"


class Vram(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one GPU in bytes."""

    total_bytes: int
    used_bytes: int


def _gpus(text: str, source: str) -> dict[int, Mapping[str, object]]:
    """Entries by GPU number: a bare list, or below ``gpu_data`` as ROCm 7 prints it."""
    document = json_in(text, source)
    if isinstance(document, dict):
        document = document.get("gpu_data", document)
    found: dict[int, Mapping[str, object]] = {}
    for entry in rows(document, source):
        number = index(entry.get("gpu"), f"{source}: gpu")
        if number in found:
            raise ProbeError(f"{source}: names gpu {number} twice; expected every GPU once")
        found[number] = entry
    if not found:
        raise ProbeError(f"{source}: names no GPU; expected at least one")
    return found


def parse_metric(text: str) -> dict[int, Vram]:
    """Read ``amd-smi metric -m --json``: memory by the tool's GPU number.

    Raises:
        ProbeError: it is not that, or a value is ``N/A``.
    """
    found = {}
    for number, entry in _gpus(text, "amd-smi metric").items():
        where = f"amd-smi metric: gpu {number} mem_usage"
        usage = table(entry.get("mem_usage"), where)
        found[number] = Vram(
            total_bytes=measured(usage.get("total_vram"), f"{where}.total_vram"),
            used_bytes=measured(usage.get("used_vram"), f"{where}.used_vram"),
        )
    return found


def parse_list(text: str) -> tuple[AmdGpu, ...]:
    """Read ``amd-smi list -e --json``: which GPU has which address and which ordinal in HIP.

    Raises:
        ProbeError: it is not that.
    """
    found = []
    for number, entry in _gpus(text, "amd-smi list").items():
        fields = {name.lower(): value for name, value in entry.items()}
        hip = fields.get("hip_id")
        seen = isinstance(hip, int) or (isinstance(hip, str) and hip.strip().isdecimal())
        found.append(
            AmdGpu(
                number=number,
                address=str(fields.get("bdf", "")).lower(),
                hip=index(hip, f"amd-smi list: gpu {number} hip_id") if seen else None,
            )
        )
    return tuple(found)


def parse_processes(text: str) -> dict[int, tuple[DeviceHolder, ...]]:
    """Read ``amd-smi process --json``: holders by the tool's GPU number.

    A process whose memory is ``N/A`` is named without it.

    Raises:
        ProbeError: it is not that.
    """
    found = {}
    for number, entry in _gpus(text, "amd-smi process").items():
        listed = entry.get("process_list", [])
        holders = []
        for row in rows(listed, f"amd-smi process: gpu {number} process_list"):
            info = row.get("process_info")
            if isinstance(info, str) and info.lower().startswith(_NO_PROCESSES):
                continue
            holders.append(_holder(table(info, f"amd-smi process: gpu {number} process_info"), number))
        found[number] = tuple(holders)
    return found


def _holder(info: Mapping[str, object], number: int) -> DeviceHolder:
    where = f"amd-smi process: gpu {number}"
    usage = info.get("memory_usage")
    try:
        used_bytes = measured(table(usage, where).get("vram_mem"), where)
    except ProbeError:
        used_bytes = None
    return DeviceHolder(
        pid=index(info.get("pid"), f"{where} pid"), used_bytes=used_bytes, name=str(info.get("name", ""))
    )


def read_order(tool: str = SOURCE, *, timeout_s: float = DEADLINE_S) -> tuple[AmdGpu, ...]:
    """Ask ``amd-smi list -e`` which GPU is which.

    Raises:
        ProbeError: the tool is missing, too old for ``-e``, late, or prints something else.
    """
    return parse_list(run_tool([tool, "list", "-e", "--json"], timeout_s=timeout_s))


class AmdSmiProbe:
    """Reads the memory of AMD GPUs. A device is HIP's ordinal where ``amd-smi list -e`` tells it.

    Where it does not, a device is the number of a GPU among those that are not integrated, and the reading says so.
    """

    def __init__(self, devices: Sequence[str], *, tool: str = SOURCE, timeout_s: float = DEADLINE_S) -> None:
        self._devices = tuple(devices)
        self._tool = tool
        self._timeout_s = timeout_s
        self._numbers: dict[str, int] | None = None
        self._limits = _LIMITS

    def read(self) -> tuple[DeviceMemory, ...]:
        """One reading per device, in the order they were named.

        Raises:
            ProbeError: the tool is missing, late, or does not show a device's memory.
        """
        found = parse_metric(run_tool([self._tool, "metric", "-m", "--json"], timeout_s=self._timeout_s))
        if self._numbers is None:
            self._numbers = self._find(found)
        return tuple(self._reading(device, number, found) for device, number in self._numbers.items())

    def holders(self) -> tuple[tuple[DeviceHolder, ...], ...]:
        """Holders of each device, in the order they were named.

        Raises:
            ProbeError: the tool cannot tell.
        """
        if self._numbers is None:
            self.read()
        found = parse_processes(run_tool([self._tool, "process", "--json"], timeout_s=self._timeout_s))
        return tuple(found.get(number, ()) for number in (self._numbers or {}).values())

    def _find(self, found: Mapping[int, Vram]) -> dict[str, int]:
        try:
            order = {str(gpu.hip): gpu.number for gpu in read_order(self._tool, timeout_s=self._timeout_s)}
        except ProbeError:
            order = {}
        order.pop("None", None)
        if order:
            ordinals = list(order)
            return {device: order[pick(device, ordinals, SOURCE, ordinals)] for device in self._devices}
        self._limits = f"{_LIMITS}; {UNCHECKED_ORDER}"
        numbers = sorted(discrete({number: vram.total_bytes for number, vram in found.items()}))
        return {device: pick(device, numbers, SOURCE) for device in self._devices}

    def _reading(self, device: str, number: int, found: Mapping[int, Vram]) -> DeviceMemory:
        where = f"amd-smi metric: gpu {number}"
        if number not in found:
            raise ProbeError(f"{where} is not there any more; expected device {device!r}")
        vram = found[number]
        return checked(
            device=device,
            total_bytes=vram.total_bytes,
            used_bytes=vram.used_bytes,
            source=SOURCE,
            where=where,
            limits=self._limits,
        )
