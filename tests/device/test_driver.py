"""Which driver is loaded, from trees as the kernel and the vendors' modules show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_kvbudget.device.driver import DriverKind, driver_version

NVRM = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
    "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
)
NVRM_OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build  (dvs-builder@U16)\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("kind", "files", "expected"),
    [
        ("amd", {"sys/module/amdgpu/version": "6.12.12\n"}, "amdgpu 6.12.12"),
        (
            "amd",
            {"sys/module/amdgpu/refcnt": "12\n", "proc/sys/kernel/osrelease": "6.8.0-60-generic\n"},
            "amdgpu in kernel 6.8.0-60-generic",
        ),
        ("nvidia", {"sys/module/nvidia/version": "550.54.15\n"}, "nvidia 550.54.15"),
        ("nvidia", {"proc/driver/nvidia/version": NVRM}, "nvidia 550.54.15"),
        ("nvidia", {"proc/driver/nvidia/version": NVRM_OPEN}, "nvidia 560.35.03"),
        ("neuron", {"sys/module/neuron/version": "2.22.2.0\n"}, "neuron 2.22.2.0"),
    ],
)
def test_a_loaded_driver_has_a_version(tmp_path: Path, kind: DriverKind, files: dict[str, str], expected: str) -> None:
    assert driver_version(kind, tree(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("amd", {"sys/module/nvidia/version": "550.54.15\n"}),
        ("nvidia", {"proc/driver/nvidia/version": "GCC version: gcc 12.3.0\n"}),
        # no release of these two is a part of a kernel, so that its release says nothing
        ("nvidia", {"sys/module/nvidia/refcnt": "1\n", "proc/sys/kernel/osrelease": "6.8.0\n"}),
        ("neuron", {"sys/module/neuron/version": "\n", "proc/sys/kernel/osrelease": "6.8.0\n"}),
        ("neuron", {}),
    ],
)
def test_what_nothing_tells_is_not_guessed(tmp_path: Path, kind: DriverKind, files: dict[str, str]) -> None:
    assert driver_version(kind, tree(tmp_path, files)) is None
