"""Memory of AMD GPUs through ``rocm-smi --showmeminfo vram``: JSON, CSV and text."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from typing import Final

from pytest_kvbudget.device.amd import UNCHECKED_ORDER, discrete, pick
from pytest_kvbudget.device.amd_smi import Vram
from pytest_kvbudget.device.command import DEADLINE_S, json_in, run_tool
from pytest_kvbudget.device.fields import checked, table, whole
from pytest_kvbudget.device.model import DeviceHolder, DeviceMemory, ProbeError

SOURCE: Final = "rocm-smi"
_LIMITS: Final = f"one reading takes the tool about a second; {UNCHECKED_ORDER}"
_TOTAL: Final = "VRAM Total Memory (B)"
_USED: Final = "VRAM Total Used Memory (B)"
_CARD = re.compile(r"card(\d{1,6})", re.ASCII)
_TEXT = re.compile(
    r"\s*GPU\[(?P<number>[0-9]{1,6})\]\s*:\s*(?P<label>VRAM Total (?:Used )?Memory \(B\)):\s*(?P<value>.*?)\s*"
)
_PROCESS = re.compile(r"PID(\d{1,10})", re.ASCII)


def parse_memory(text: str) -> dict[int, Vram]:
    """Read what ``rocm-smi --showmeminfo vram`` printed, by GPU number: as ``--json``, ``--csv`` or text.

    Raises:
        ProbeError: it is none of these, or a value is missing or no number.
    """
    fields = _from_text(text) or _from_csv(text) or _from_json(text)
    found = {}
    for number, values in sorted(fields.items()):
        where = f"rocm-smi: card{number}"
        found[number] = Vram(
            total_bytes=whole(values.get(_TOTAL), f"{where} {_TOTAL}"),
            used_bytes=whole(values.get(_USED), f"{where} {_USED}"),
        )
    return found


def _from_json(text: str) -> dict[int, Mapping[str, object]]:
    document = table(json_in(text, SOURCE), SOURCE)
    found = {
        int(match[1]): table(values, f"rocm-smi: {name}")
        for name, values in document.items()
        if (match := _CARD.fullmatch(name))
    }
    if not found:
        raise ProbeError(f"rocm-smi: shows {sorted(document)[:4]}; expected card0, card1 ...")
    return found


def _from_text(text: str) -> dict[int, dict[str, object]]:
    """``GPU[0] : VRAM Total Memory (B): n``. The label is compared whole: the used one begins like the other."""
    found: dict[int, dict[str, object]] = {}
    for line in text.splitlines():
        match = _TEXT.fullmatch(line)
        if match is not None:
            found.setdefault(int(match["number"]), {})[match["label"]] = match["value"]
    return found


def _from_csv(text: str) -> dict[int, dict[str, object]]:
    lines = text.splitlines()
    head = next((number for number, line in enumerate(lines) if line.startswith("device,") and _TOTAL in line), None)
    if head is None:
        return {}
    try:
        parsed = list(csv.DictReader(lines[head:]))
    except csv.Error as error:
        raise ProbeError(f"rocm-smi: printed no CSV ({error}); expected {_TOTAL} and {_USED}") from None
    found: dict[int, dict[str, object]] = {}
    for row in parsed:
        match = _CARD.fullmatch(row.get("device") or "")
        if match is not None:
            found[int(match[1])] = {name: value for name, value in row.items() if isinstance(name, str)}
    return found


def parse_processes(text: str) -> tuple[DeviceHolder, ...]:
    """Read ``rocm-smi --showpids --json``: holders of any GPU; the tool counts a process' GPUs and names none.

    Raises:
        ProbeError: it is not that.
    """
    document = table(json_in(text, SOURCE), SOURCE)
    holders = []
    for name, value in table(document.get("system", {}), "rocm-smi: system").items():
        match = _PROCESS.fullmatch(name)
        if match is None or not isinstance(value, str):
            continue
        # Name, number of GPUs, VRAM, SDMA, occupancy: only a name may hold commas.
        parts = [part.strip() for part in value.rsplit(",", 4)]
        try:
            used_bytes = whole(parts[2], "rocm-smi: VRAM") if len(parts) == 5 else None
        except ProbeError:
            used_bytes = None
        holders.append(DeviceHolder(pid=int(match[1]), used_bytes=used_bytes, name=parts[0]))
    return tuple(holders)


class RocmSmiProbe:
    """Reads the memory of AMD GPUs. A device is the number of a GPU among those that are not integrated."""

    def __init__(self, devices: Sequence[str], *, tool: str = SOURCE, timeout_s: float = DEADLINE_S) -> None:
        self._devices = tuple(devices)
        self._tool = tool
        self._timeout_s = timeout_s
        self._gpus = 0

    def read(self) -> tuple[DeviceMemory, ...]:
        """One reading per device, in the order they were named.

        Raises:
            ProbeError: the tool is missing, late, or does not show a device's memory.
        """
        found = parse_memory(run_tool([self._tool, "--showmeminfo", "vram", "--json"], timeout_s=self._timeout_s))
        self._gpus = len(found)
        numbers = sorted(discrete({number: vram.total_bytes for number, vram in found.items()}))
        return tuple(self._reading(device, pick(device, numbers, SOURCE), found) for device in self._devices)

    def holders(self) -> tuple[tuple[DeviceHolder, ...], ...]:
        """Holders of each device, in the order they were named.

        With several GPUs the tool does not say whose memory a process has: it is named for all, without a figure.

        Raises:
            ProbeError: the tool cannot tell.
        """
        if not self._gpus:
            self.read()
        found = parse_processes(run_tool([self._tool, "--showpids", "--json"], timeout_s=self._timeout_s))
        if self._gpus > 1:
            found = tuple(DeviceHolder(pid=holder.pid, name=holder.name) for holder in found)
        return (found,) * len(self._devices)

    @staticmethod
    def _reading(device: str, number: int, found: Mapping[int, Vram]) -> DeviceMemory:
        vram = found[number]
        return checked(
            device=device,
            total_bytes=vram.total_bytes,
            used_bytes=vram.used_bytes,
            source=SOURCE,
            where=f"rocm-smi: card{number}",
            limits=_LIMITS,
        )
