"""Memory of AMD cards as amdgpu shows it in sysfs: bytes in ``class/drm/card<N>/device/mem_info_vram_{total,used}``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pytest_kvbudget.device.model import DeviceMemory, ProbeError

AMD_VENDOR: Final = "0x1002"
_CARD: Final = re.compile(r"card(\d+)")
"""A card; ``card0-DP-1`` is one of its connectors."""


def amd_cards(root: Path) -> tuple[Path, ...]:
    """Device folders of the AMD cards below a sysfs root that have memory of their own, by card number."""
    found: dict[int, Path] = {}
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
    return tuple(found[number] for number in sorted(found))


class AmdSysfsProbe:
    """Reads the memory of AMD cards. A device is the number of a card among the AMD ones, or a name like ``card1``."""

    def __init__(self, root: str | Path, devices: Sequence[str]) -> None:
        self._root = Path(root)
        self._devices = tuple(devices)

    @staticmethod
    def available(root: str | Path = "/sys") -> bool:
        """Whether there is any AMD card."""
        return bool(amd_cards(Path(root)))

    def read(self) -> tuple[DeviceMemory, ...]:
        """One reading per device, in the order they were named.

        Raises:
            ProbeError: a card is not there, or shows no sensible number of bytes.
        """
        cards = amd_cards(self._root)
        return tuple(self._read(device, self._find(device, cards)) for device in self._devices)

    def _find(self, device: str, cards: Sequence[Path]) -> Path:
        names = [card.parent.name for card in cards]
        if device in names:
            return cards[names.index(device)]
        if device.isdecimal() and int(device) < len(cards):
            return cards[int(device)]
        there = ", ".join(f"{number} ({name})" for number, name in enumerate(names)) or "none"
        raise ProbeError(
            f"{self._root}/class/drm: no AMD card {device!r}; expected one of {there}: check the target's devices"
        )

    def _read(self, device: str, card: Path) -> DeviceMemory:
        total, used = (_bytes(card / f"mem_info_vram_{kind}") for kind in ("total", "used"))
        if total <= 0 or used > total:
            raise ProbeError(f"{card}: mem_info_vram shows {used} bytes used of {total}; expected part of a total")
        return DeviceMemory(device=device, total_bytes=total, used_bytes=used, source="sysfs")


def _bytes(path: Path) -> int:
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        raise ProbeError(f"{path}: cannot be read: {error.strerror}; expected a number of bytes") from None
    if not (text.isascii() and text.isdecimal()):
        raise ProbeError(f"{path}: shows {text[:40]!r}; expected a number of bytes")
    return int(text)
