"""Memory of AMD cards as amdgpu shows it in sysfs: bytes in ``class/drm/card<N>/device/mem_info_vram_{total,used}``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from pytest_kvbudget.device.amd import UNCHECKED_ORDER, AmdGpu, discrete
from pytest_kvbudget.device.fields import decimal, read_number
from pytest_kvbudget.device.host import numa_node_of
from pytest_kvbudget.device.kfd import kfd_holders
from pytest_kvbudget.device.model import DeviceHolder, DeviceMemory, ProbeError

AMD_VENDOR: Final = "0x1002"
SOURCE: Final = "sysfs"
_CARD: Final = re.compile(r"card(\d+)")
"""A card; ``card0-DP-1`` is one of its connectors."""


def amd_cards(root: Path) -> tuple[Path, ...]:
    """Device folders of the AMD cards below a sysfs root that have memory of their own, by card number.

    An integrated GPU beside a real card is left out.
    """
    found: dict[int, Path] = {}
    totals: dict[int, int] = {}
    for entry in (root / "class" / "drm").glob("card*"):
        match = _CARD.fullmatch(entry.name)
        if match is None:
            continue
        device = entry / "device"
        try:
            vendor = (device / "vendor").read_text(encoding="ascii", errors="replace").strip()
        except OSError:
            continue
        if vendor == AMD_VENDOR and (device / "mem_info_vram_total").exists():
            found[int(match[1])] = device
            try:
                totals[int(match[1])] = read_number(f"{device}/mem_info_vram_total")
            except ProbeError:
                continue  # whether it is a real card cannot be told: reading it says why
    integrated = totals.keys() - set(discrete(totals))
    return tuple(found[number] for number in sorted(found) if number not in integrated)


class AmdSysfsProbe:
    """Reads the memory of AMD cards. A device is the number of a card among the AMD ones, or a name like ``card1``.

    Args:
        root: where sysfs is: ``/sys``.
        devices: as the target names them.
        order: HIP's order (`amd_smi.read_order`), where it is known: a number is then HIP's ordinal.
    """

    def __init__(self, root: str | Path, devices: Sequence[str], order: Sequence[AmdGpu] = ()) -> None:
        self._root = Path(root)
        self._devices = tuple(devices)
        self._addresses = {str(gpu.hip): gpu.address for gpu in order if gpu.hip is not None}
        self._limits = ""
        self._found: Mapping[str, Path] | None = None
        """Looked up once, not at each reading: that would cost ten times the reading."""
        self._nodes: dict[str, int | None] = {}

    @staticmethod
    def available(root: str | Path = "/sys") -> bool:
        """Whether there is any AMD card."""
        return bool(amd_cards(Path(root)))

    def read(self) -> tuple[DeviceMemory, ...]:
        """One reading per device, in the order they were named.

        Raises:
            ProbeError: a card is not there, or shows no sensible number of bytes.
        """
        try:
            return tuple(self._read(device, card) for device, card in self._cards().items())
        except ProbeError:
            self._found = None  # a card that went away and came back may have another number
            raise

    def holders(self) -> tuple[tuple[DeviceHolder, ...], ...]:
        """Holders of each device's memory, as the compute driver (amdkfd) lists them beside; empty without it.

        Raises:
            ProbeError: a card is not there.
        """
        return tuple(kfd_holders(self._root, card) for card in self._cards().values())

    def _cards(self) -> Mapping[str, Path]:
        if self._found is None:
            cards = amd_cards(self._root)
            found = {device: self._find(device, cards) for device in self._devices}
            self._nodes = {device: numa_node_of(card) for device, card in found.items()}
            self._limits = UNCHECKED_ORDER if len(cards) > 1 and not self._addresses else ""
            self._found = found
            return found
        return self._found

    def _find(self, device: str, cards: Sequence[Path]) -> Path:
        names = [card.parent.name for card in cards]
        if device in names:
            return cards[names.index(device)]
        if device in self._addresses:
            at = [card for card in cards if card.resolve().name.lower() == self._addresses[device]]
            if at:
                return at[0]
        elif not self._addresses and (number := decimal(device)) is not None and number < len(cards):
            return cards[number]
        there = ", ".join(f"{position} ({name})" for position, name in enumerate(names)) or "none"
        raise ProbeError(
            f"{self._root}/class/drm: no AMD card {device!r}; expected one of {there}: check the target's devices"
        )

    def _read(self, device: str, card: Path) -> DeviceMemory:
        total, used = (read_number(f"{card}/mem_info_vram_{kind}") for kind in ("total", "used"))
        if total <= 0 or used > total:
            raise ProbeError(f"{card}: mem_info_vram shows {used} bytes used of {total}; expected part of a total")
        return DeviceMemory(
            device=device,
            total_bytes=total,
            used_bytes=used,
            source=SOURCE,
            limits=self._limits,
            numa_node=self._nodes[device],
        )
