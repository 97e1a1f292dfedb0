"""Neuron devices: which physical cores and which HBM stack a logical core has.

The budget belongs to an HBM stack. A target names logical cores, as ``NEURON_VISIBLE_DEVICES`` does. At LNC 2 a
logical core is the two physical cores of one stack, at LNC 1 two logical cores share one: in both cases the cores of
the stack are summed and set against its size (facts, section 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from pytest_kvbudget.budget.model import BudgetInputError
from pytest_kvbudget.budget.neuron import default_lnc, hbm_stack_bytes, logical_cores_per_stack
from pytest_kvbudget.device.fields import decimal
from pytest_kvbudget.device.model import ProbeError

TOOL_FOLDERS: Final = ("/opt/aws/neuron/bin",)
"""Where AWS' package puts its tools; a login shell has it on PATH, a service or a CI job mostly not."""
TABLE_TOTAL: Final = "the total is the platform's table, a few MiB above what the runtime can have"

_PLATFORMS: Final = {
    "trainium": "trn1",
    "trainium1": "trn1",
    "trainium2": "trn2",
    "trainium3": "trn3",
    "inferentia2": "inf2",
}


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """Cores and memory of every Neuron device of a host."""

    lnc: int
    """Physical cores of a logical one."""
    physical_cores: int
    """Of one device."""
    cores_per_stack: int
    """Physical cores that share one HBM stack."""
    stack_bytes: int

    def locate(self, core: int) -> tuple[int, tuple[int, ...]]:
        """The Neuron device of a logical core, and the physical cores there that share its stack."""
        device, first = divmod(core * self.lnc, self.physical_cores)
        stack = first // self.cores_per_stack
        return device, tuple(range(stack * self.cores_per_stack, (stack + 1) * self.cores_per_stack))

    def siblings(self, core: int) -> tuple[int, ...]:
        """Logical cores that share a core's stack, itself included."""
        share = self.cores_per_stack // self.lnc
        return tuple(range(core // share * share, (core // share + 1) * share))


def platform_of(device_name: str) -> str:
    """Platform of a device's name as driver and tools show it: ``trn2`` of ``Trainium2``.

    Raises:
        ProbeError: the name is not known.
    """
    name = device_name.strip().lower().replace(" ", "")
    if name not in _PLATFORMS:
        raise ProbeError(f"Neuron device is called {device_name.strip()!r}; expected one of {', '.join(_PLATFORMS)}")
    return _PLATFORMS[name]


def geometry_of(platform: str, *, physical_cores: int, lnc: int | None, device_bytes: int | None = None) -> Geometry:
    """Geometry of a platform's devices.

    Args:
        platform: ``trn1``, ``trn2``, ``trn3``, ``inf2``.
        physical_cores: of one device.
        lnc: logical NeuronCore size; ``None`` takes the platform's default.
        device_bytes: memory of one device where a tool said it; ``None`` takes the platform's table.

    Raises:
        ProbeError: the platform has no such logical cores, or the device no such cores.
    """
    size = default_lnc(platform) if lnc is None else lnc
    try:
        per_stack = logical_cores_per_stack(platform, size) * size
        stack_bytes = hbm_stack_bytes(platform)
    except BudgetInputError as error:
        raise ProbeError(f"Neuron: {error}") from None
    if physical_cores <= 0 or physical_cores % per_stack:
        raise ProbeError(f"Neuron: a device of {platform} shows {physical_cores} cores; expected pairs on HBM stacks")
    if device_bytes is not None:
        stack_bytes = device_bytes * per_stack // physical_cores
    return Geometry(lnc=size, physical_cores=physical_cores, cores_per_stack=per_stack, stack_bytes=stack_bytes)


def logical_cores(devices: Sequence[str]) -> tuple[int, ...]:
    """The target's devices as numbers of logical cores.

    Raises:
        ProbeError: one is no number.
    """
    cores = []
    for device in devices:
        core = decimal(device)
        if core is None:
            raise ProbeError(f"Neuron: device {device!r} is no logical core; expected numbers from 0")
        cores.append(core)
    return tuple(cores)
