"""Who holds memory of an AMD card, as its compute driver shows: ``class/kfd/kfd/proc/<pid>/vram_<gpu id>`` in sysfs.

Layout: the Linux kernel's ``drivers/gpu/drm/amd/amdkfd/kfd_process.c`` and ``kfd_topology.c``.
"""

from __future__ import annotations

from pathlib import Path

from pytest_kvbudget.device.fields import decimal
from pytest_kvbudget.device.model import DeviceHolder


def kfd_holders(root: Path, card: Path) -> tuple[DeviceHolder, ...]:
    """Processes with compute memory on a card, most first; empty where the driver does not tell.

    Args:
        root: where sysfs is.
        card: the card's device folder.
    """
    kfd = root / "class" / "kfd" / "kfd"
    gpu = _gpu_id(kfd / "topology" / "nodes", {entry.name for entry in (card / "drm").glob("renderD*")})
    if gpu is None:
        return ()
    holders = []
    for process in (kfd / "proc").glob("[0-9]*"):
        pid, used_bytes = decimal(process.name), decimal(_text(process / f"vram_{gpu}"))
        if pid is not None and used_bytes:
            name = _text(Path("/proc") / process.name / "comm")
            holders.append(DeviceHolder(pid=pid, used_bytes=used_bytes, name=name))
    return tuple(sorted(holders, key=lambda holder: -(holder.used_bytes or 0)))


def _gpu_id(nodes: Path, renders: set[str]) -> str | None:
    """The compute driver's name for the GPU that has this render node."""
    for node in nodes.glob("*"):
        properties = dict(line.split(maxsplit=1) for line in _text(node / "properties").splitlines() if " " in line)
        if f"renderD{properties.get('drm_render_minor', '').strip()}" in renders:
            return _text(node / "gpu_id") or None
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
