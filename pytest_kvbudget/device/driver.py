"""The kernel driver of a host's devices, by version: what of a boot changes when a driver is replaced."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, Literal

DriverKind = Literal["amd", "nvidia", "neuron"]

NO_DRIVER: Final = "none"
"""An engine on the CPU has no device driver."""
SIMULATED: Final = "simulated"
"""The driver of simulated devices is a part of this package, whose version an identity has anyway."""
_MODULES: Final[dict[DriverKind, str]] = {"amd": "amdgpu", "nvidia": "nvidia", "neuron": "neuron"}
_NVIDIA_PROC: Final = "proc/driver/nvidia/version"
_NVRM: Final = re.compile(r"^NVRM version:.*?\s(\d+(?:\.\d+)+)\s", re.MULTILINE)
"""``NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024``; open modules write
``NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build``."""


def driver_version(kind: DriverKind, root: Path = Path("/")) -> str | None:
    """The loaded driver: ``"amdgpu 6.12.12"``, ``"nvidia 550.54.15"``, ``"amdgpu in kernel 6.8.0-60"``.

    An amdgpu that states no version was built with the kernel and has its release.

    Args:
        kind: whose devices.
        root: the file system's root, other than ``/`` for tests.

    Returns:
        ``None`` where no such driver is loaded or nothing tells its version.
    """
    module = _MODULES[kind]
    stated = _text(root / "sys" / "module" / module / "version")
    if stated is None and kind == "nvidia":
        found = _NVRM.search(_text(root / _NVIDIA_PROC) or "")
        stated = None if found is None else found[1]
    if stated is not None:
        return f"{module} {stated}"
    if kind != "amd" or not (root / "sys" / "module" / module).is_dir():
        return None
    release = _text(root / "proc" / "sys" / "kernel" / "osrelease") or os.uname().release
    return f"{module} in kernel {release}"


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None
