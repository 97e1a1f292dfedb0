"""Memory of a process' control group, v1 and v2: the limit that binds it, what is used, and who was killed for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Final, Literal

import msgspec

from pytest_kvbudget.device.fields import decimal, read_number, whole
from pytest_kvbudget.device.host import HOST, read_host
from pytest_kvbudget.device.model import DeviceMemory, ProbeError

SOURCE: Final = "cgroup"
_PROC: Final = Path("/proc")
_UNLIMITED: Final = 2**60
"""v1 shows "no limit" as the largest multiple of a page below 2^63."""
_FILES: Final = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control"),
    2: ("memory.max", "memory.current", "inactive_file", "memory.events"),
}
"""Limit, use, field of ``memory.stat`` with page cache that is given up first, and where kills are counted."""


class CgroupMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one control group at one moment, in bytes."""

    version: Literal[1, 2]
    path: str
    """Folder of the group that binds: of all from the process' own up, the one with the least room."""
    limit_bytes: int | None
    """``None`` where none of them has a limit."""
    usage_bytes: int
    """Of that group, page cache included."""
    reclaimable_bytes: int
    """Page cache in it that the kernel gives up before it kills."""
    oom_kills: int | None
    """Processes of the process' own group that the kernel killed for memory; ``None`` before Linux 4.13."""

    @property
    def needed_bytes(self) -> int:
        """What is used and cannot be given up."""
        return max(0, self.usage_bytes - self.reclaimable_bytes)


class MemoryCgroup:
    """The memory control group of a process. It is looked up once, so that it can be read after the process' death.

    Raises:
        ProbeError: the process is gone, or there is no memory controller.
    """

    def __init__(self, pid: int, proc: Path = _PROC) -> None:
        self.version, self.folders = _locate(proc / str(pid))

    def read(self) -> CgroupMemory:
        """One reading of the group that binds.

        Raises:
            ProbeError: it is gone, or shows no sensible numbers.
        """
        limit_name, usage_name, cache_field, _ = _FILES[self.version]
        binding: CgroupMemory | None = None
        room = 0
        kills = self.oom_kills()
        for folder in self.folders:
            if not (folder / usage_name).exists():
                continue  # the root of a hierarchy has no use of its own in v2
            limit_bytes = _limit(folder / limit_name)
            memory = CgroupMemory(
                version=self.version,
                path=str(folder),
                limit_bytes=limit_bytes,
                usage_bytes=read_number(str(folder / usage_name)),
                reclaimable_bytes=_field(folder / "memory.stat", cache_field) or 0,
                oom_kills=kills,
            )
            left = _UNLIMITED if limit_bytes is None else limit_bytes - memory.needed_bytes
            if binding is None or left < room:
                binding, room = memory, left
        if binding is None:
            raise ProbeError(
                f"{self.folders[0]}: has no {usage_name}; expected a control group with the memory controller, not the "
                "root of all"
            )
        return binding

    def oom_kills(self) -> int | None:
        """How many of the group's processes the kernel has killed for memory; ``None`` where it does not count."""
        return _field(self.folders[0] / _FILES[self.version][3], "oom_kill")


class CgroupProbe:
    """The memory control group of a process as a device: what it cannot give up is used, what it could have is free.

    Free is the room under the limit, or what the host has available where that is less or there is no limit.
    """

    def __init__(self, pid: int, *, proc: Path = _PROC, device: str = HOST) -> None:
        self._cgroup = MemoryCgroup(pid, proc)
        self._meminfo = proc / "meminfo"
        self._device = device

    def read(self) -> tuple[DeviceMemory, ...]:
        """One reading.

        Raises:
            ProbeError: the group is gone or cannot be read.
        """
        memory = self._cgroup.read()
        available = read_host(self._meminfo).available_bytes
        room = available if memory.limit_bytes is None else min(available, memory.limit_bytes - memory.needed_bytes)
        return (
            DeviceMemory(
                device=self._device,
                # A limit that was lowered under what is used leaves no room, not a negative one.
                total_bytes=memory.needed_bytes + max(0, room),
                used_bytes=memory.needed_bytes,
                source=f"{SOURCE}-v{memory.version}",
                limits=f"{memory.path}: page cache that the kernel gives up is not counted",
            ),
        )


def room_of(pid: int) -> Callable[[], int | None]:
    """Reads what the memory control group of a process leaves it, in bytes; ``None`` without a limit or a reading."""
    try:
        group = MemoryCgroup(pid)
    except ProbeError:
        return lambda: None

    def room() -> int | None:
        try:
            memory = group.read()
        except ProbeError:
            return None
        return None if memory.limit_bytes is None else memory.limit_bytes - memory.needed_bytes

    return room


def _locate(process: Path) -> tuple[Literal[1, 2], tuple[Path, ...]]:
    """Version and folders of the group, from the process' own up to where the hierarchy is mounted."""
    try:
        groups = (process / "cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
        mounts = (process / "mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ProbeError(f"{process}: cannot be read: {error.strerror}; expected a living process") from None
    for line in groups:
        parts = line.split(":", 2)
        if len(parts) == 3 and "memory" in parts[1].split(","):
            return 1, _folders(parts[2], mounts, "cgroup", "memory", process)
    for line in groups:
        if line.startswith("0::"):
            return 2, _folders(line[3:], mounts, "cgroup2", "", process)
    raise ProbeError(f"{process}/cgroup: names no memory controller; expected cgroup v1 memory or v2")


def _folders(group: str, mounts: list[str], kind: str, option: str, process: Path) -> tuple[Path, ...]:
    for line in mounts:
        fields, separator, rest = line.partition(" - ")
        mount, options = fields.split(), rest.split()
        if not separator or len(mount) < 5 or len(options) < 3 or options[0] != kind:
            continue
        if option and option not in options[2].split(","):
            continue
        # A container sees its own group as the mount's root: what is above it is not visible from here.
        root, point = PurePosixPath(_plain(mount[3])), Path(_plain(mount[4]))
        inside = PurePosixPath(group)
        below = inside.relative_to(root) if inside.is_relative_to(root) else PurePosixPath()
        own = point / below
        return (own, *(folder for folder in own.parents if folder.is_relative_to(point)))
    raise ProbeError(f"{process}/mountinfo: no {kind} with the memory controller; expected it mounted")


def _plain(text: str) -> str:
    """A path of ``mountinfo`` without its octal escapes."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ProbeError(f"{path}: cannot be read: {error.strerror}; expected a limit") from None
    if text == "max" or (decimal(text) or 0) >= _UNLIMITED:
        return None
    return whole(text, f"{path}:")


def _field(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(" ")
        if key == name:
            return decimal(value.strip())
    return None
