"""Memory of Neuron devices as their driver shows it in sysfs, wherever this driver's version has the counters.

Up to driver 2.30 they are in ``neuron<D>/neuron_core<C>/stats/memory_usage/device_mem/total``: one folder per
*physical* core, bytes, ``total`` being what is in use now and ``present`` the last change (driver 2.24.7,
``neuron_sysfs_metrics.c``). Driver 2.31 moved nodes without saying where to in anything public, so the counters are
looked for by name below each device, and what is found must be plausible.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from pytest_kvbudget.device.fields import checked, read_number
from pytest_kvbudget.device.model import DeviceMemory, ProbeError
from pytest_kvbudget.device.neuron import TABLE_TOTAL, Geometry, geometry_of, logical_cores, platform_of

SOURCE: Final = "neuron-sysfs"
_COUNTER: Final = "device_mem"
_TREES: Final = ("devices/virtual/neuron_device", "class/neuron_device")
_DEVICE = re.compile(r"neuron(\d+)", re.ASCII)
_CORE = re.compile(r"[a-z_]*core_?(\d+)", re.ASCII)
_DEPTH: Final = 10


def neuron_folders(root: Path) -> dict[int, Path]:
    """Folders of the Neuron devices below a sysfs root, by number."""
    found: dict[int, Path] = {}
    for tree in _TREES:
        for entry in (root / tree).glob("neuron*"):
            match = _DEVICE.fullmatch(entry.name)
            if match is not None:
                found.setdefault(int(match[1]), entry)
    return dict(sorted(found.items()))


def driver_version(root: Path) -> str:
    """The driver's version; ``"of unknown version"`` where it does not say."""
    try:
        return (root / "module" / "neuron" / "version").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return "of unknown version"


class NeuronSysfsProbe:
    """Reads the memory of HBM stacks. A device is a logical core; its reading is that of the stack it is on.

    Args:
        devices: logical cores, as ``NEURON_VISIBLE_DEVICES`` names them.
        root: where sysfs is.
        lnc: logical NeuronCore size that the engine runs with; ``None`` takes the platform's default.
        stack_bytes: size of one stack where something better than the platform's table said it.

    Raises:
        ProbeError: at `read`, where a device, a counter or a platform is not found.
    """

    def __init__(
        self,
        devices: Sequence[str],
        *,
        root: str | Path = "/sys",
        lnc: int | None = None,
        stack_bytes: int | None = None,
    ) -> None:
        self._devices = tuple(devices)
        self._root = Path(root)
        self._lnc = lnc
        self._stack_bytes = stack_bytes
        self._plan: tuple[tuple[str, tuple[str, ...], str], ...] | None = None
        """Per device: its files, and what its reading leaves out."""
        self._size = 0

    def read(self) -> tuple[DeviceMemory, ...]:
        """One reading per device, in the order they were named.

        Raises:
            ProbeError: a device or its counters are not there, or show no sensible number of bytes.
        """
        try:
            if self._plan is None:
                self._plan = self._look()
            return tuple(
                checked(
                    device=device,
                    total_bytes=self._size,
                    used_bytes=sum(read_number(path) for path in paths),
                    source=SOURCE,
                    where=f"Neuron core {device}",
                    limits=limits,
                )
                for device, paths, limits in self._plan
            )
        except ProbeError:
            self._plan = None
            raise

    def _look(self) -> tuple[tuple[str, tuple[str, ...], str], ...]:
        folders = neuron_folders(self._root)
        geometry: Geometry | None = None
        plan = []
        for device, core in zip(self._devices, logical_cores(self._devices), strict=True):
            if geometry is None:
                geometry = self._geometry(folders)
                self._size = self._stack_bytes or geometry.stack_bytes
            number, physical = geometry.locate(core)
            if number not in folders:
                raise ProbeError(
                    f"{self._root}/{_TREES[0]}: core {device} is on neuron{number}, which is not there; expected one "
                    f"of {', '.join(map(str, folders)) or 'none'}: check the target's devices and its LNC"
                )
            counters = _find(folders[number], self._root)
            limits = TABLE_TOTAL if self._stack_bytes is None else ""
            siblings = geometry.siblings(core)
            if len(siblings) > 1:
                limits = "; ".join(filter(None, (f"one HBM stack of cores {', '.join(map(str, siblings))}", limits)))
            plan.append((device, tuple(path for which in physical for path in counters[which]), limits))
        return tuple(plan)

    def _geometry(self, folders: dict[int, Path]) -> Geometry:
        if not folders:
            raise ProbeError(f"{self._root}/{_TREES[0]}: no Neuron device; expected neuron0: is the driver loaded?")
        first = next(iter(folders.values()))
        cores = _find(first, self._root)
        if sorted(cores) != list(range(len(cores))):
            raise ProbeError(f"{first}: counters of cores {sorted(cores)}; expected cores from 0 without gaps")
        name = next((path for path in first.rglob("device_name") if path.is_file()), None)
        if name is None:
            raise ProbeError(f"{first}: no device_name; expected the architecture's name below it")
        platform = platform_of(name.read_text(encoding="ascii", errors="replace"))
        return geometry_of(platform, physical_cores=len(cores), lnc=self._lnc)


def _find(folder: Path, root: Path) -> dict[int, tuple[str, ...]]:
    """By physical core, the files below a device's folder whose numbers are summed."""
    counters: dict[int, tuple[str, ...]] = {}
    for path in _folders(folder):
        if path.name != _COUNTER:
            continue
        cores = [match for part in path.relative_to(folder).parts if (match := _CORE.fullmatch(part))]
        files = _files(path)
        if cores and files:
            counters[int(cores[-1][1])] = files
    if not counters:
        shown = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) if folder.is_dir() else "nothing"
        raise ProbeError(
            f"{folder}: no {_COUNTER} counter of any core below it (it has {shown}); expected "
            f"neuron_core0/stats/memory_usage/{_COUNTER}/total or its like. Neuron driver {driver_version(root)} may "
            "have moved it: neuron-monitor shows it as well"
        )
    return counters


def _folders(folder: Path) -> Iterator[Path]:
    """Folders below a device, links not followed: sysfs links back into itself."""
    for base, names, _ in os.walk(folder):
        if len(Path(base).relative_to(folder).parts) >= _DEPTH:
            names.clear()
        yield from (Path(base, name) for name in names)


def _files(counter: Path) -> tuple[str, ...]:
    """The sum the driver keeps, or where it keeps none those of all categories."""
    if (counter / "total").is_file():
        return (str(counter / "total"),)
    return tuple(sorted(str(entry / "total") for entry in counter.iterdir() if (entry / "total").is_file()))
