"""vLLM on AWS Neuron: ``vllm serve`` on logical NeuronCores, with the budget's variables.

A target names logical cores, as ``NEURON_VISIBLE_DEVICES`` does; the worker sets ``NEURON_RT_VISIBLE_CORES`` itself and
refuses one that somebody set (facts, section 3). With ``VLLM_NEURON_CPU_MODE`` or ``VLLM_NEURON_CPU_COMPILE`` in its
environment a target needs no device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final

from pytest_kvbudget.budget.model import BudgetInputError
from pytest_kvbudget.budget.neuron import HEADROOM_VARIABLE, LNC_VARIABLE, default_lnc, logical_cores_per_stack
from pytest_kvbudget.budget.neuron_env import (
    CPU_COMPILE_VARIABLE,
    CPU_MODE_VARIABLE,
    PLATFORM_VARIABLE,
    read_knobs,
)
from pytest_kvbudget.config import ConfigError, LoadedTarget
from pytest_kvbudget.device.model import MemoryProbe, ProbeError
from pytest_kvbudget.engine.backends.common import (
    CRITICAL,
    build_command,
    check_served,
    chosen_probe,
    serve_command,
    slots_of,
    vllm_flags,
)
from pytest_kvbudget.engine.model import Command
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import GIB

CPU_DEVICE: Final = "cpu"
VISIBLE_VARIABLE: Final = "NEURON_VISIBLE_DEVICES"
RUNTIME_VARIABLE: Final = "NEURON_RT_VISIBLE_CORES"
_CORES_OF_A_STACK: Final = 2
"""Physical cores on an HBM stack where the platform is not known: as on trn2 and trn3."""


class NeuronBackend:
    """Runs ``vllm serve`` on the logical NeuronCores that the target names."""

    name = "neuron"
    grammar = "neuron"
    simulated = False
    critical = CRITICAL

    def check(self, loaded: LoadedTarget) -> None:
        """Check what only this backend can check.

        Raises:
            ConfigError: for keys of another backend, devices that are no logical cores, a logical core size that the
                platform does not have, variables of the budget that the worker cannot read.
        """
        why = (
            "is not read by the Neuron worker, which sizes the pool from its budget; expected reserved_headroom or "
            "gpu_memory_utilization"
        )
        check_served(loaded, foreign={"kv_cache_memory_bytes": why}, variables=(VISIBLE_VARIABLE, RUNTIME_VARIABLE))
        if RUNTIME_VARIABLE in os.environ:
            raise ConfigError(
                f"{loaded.origin}: {RUNTIME_VARIABLE} is set in the environment of this process; expected it unset: "
                "the worker sets it itself and refuses another's"
            )
        shape, environ = loaded.target.shape, {**loaded.environment, **loaded.target.shape.env}
        try:
            # what the worker itself would refuse is the argument gate's, which can be switched off
            knobs = read_knobs(environ)
            lnc = shape.lnc or knobs.lnc
            if knobs.platform is not None and lnc is not None:
                logical_cores_per_stack(knobs.platform, lnc)
        except BudgetInputError as error:
            raise ConfigError(f"{loaded.origin} env: {error}") from None
        if lnc not in {None, 1, 2}:
            raise ConfigError(f"{loaded.origin} shape.lnc: {lnc} is no logical core size; expected 1 or 2")
        for field, value, variable in (
            ("lnc", shape.lnc, LNC_VARIABLE),
            ("reserved_headroom", shape.reserved_headroom, HEADROOM_VARIABLE),
        ):
            if value is not None and variable in environ:
                raise ConfigError(
                    f"{loaded.origin} shape.{field}: is set and so is {variable} in the environment; expected one"
                )
        if not _on_cpu(environ):
            for device in loaded.target.devices:
                if not str(device).isdecimal():
                    raise ConfigError(
                        f"{loaded.origin} devices: {device!r} is no logical core; expected numbers from 0"
                    )

    def slots(self, loaded: LoadedTarget, shape: Shape) -> tuple[tuple[str, ...], ...]:
        """Logical cores cut into sets of ``tensor_parallel_size``; no HBM stack is in two sets.

        At LNC 1 two logical cores share a stack: an engine beside another on one stack would be no measurement.
        """
        if _on_cpu(_environment(loaded, shape)):
            return ((CPU_DEVICE,),)
        width = shape.tensor_parallel_size or 1
        found: list[tuple[str, ...]] = []
        taken: set[int] = set()
        for slot in slots_of(loaded.target.devices or range(width), width):
            stacks = {_stack(device, _environment(loaded, shape), shape.lnc) for device in slot}
            if stacks.isdisjoint(taken):
                taken |= stacks
                found.append(slot)
        return tuple(found)

    def lease_names(self, loaded: LoadedTarget, devices: Sequence[str]) -> tuple[str, ...]:
        """What is leased is the HBM stack that a logical core is on, whatever the logical core size."""
        shape = loaded.target.shape
        environ = _environment(loaded, shape)
        return tuple(
            CPU_DEVICE if device == CPU_DEVICE else f"neuron-hbm-{_stack(device, environ, shape.lnc)}"
            for device in devices
        )

    def probe(self, loaded: LoadedTarget, devices: Sequence[str]) -> MemoryProbe | None:
        """The best source of HBM stacks' memory that answers; nothing where the engine runs on the CPU."""
        if tuple(devices) == (CPU_DEVICE,):
            return None
        return chosen_probe("neuron", devices, lnc=_lnc(_environment(loaded, Shape()), loaded.target.shape.lnc))

    def min_free_bytes(self, loaded: LoadedTarget) -> int | None:
        """No margin is published: what a compiled program needs is taken when it is loaded."""
        return None

    def render(self, loaded: LoadedTarget, shape: Shape, devices: Sequence[str], port: int) -> Command:
        """``vllm serve MODEL FLAGS --host H --port P`` with visible cores, headroom and logical core size set."""
        # fields of the shape win over variables of the target: a sweep turns them
        shape = shape.merged(env=shape_variables(shape))
        added = {} if tuple(devices) == (CPU_DEVICE,) else {VISIBLE_VARIABLE: ",".join(devices)}
        argv = serve_command(loaded, shape, vllm_flags(shape), port)
        return build_command(loaded, shape, argv=argv, added=added, port=port)

    def session(self, loaded: LoadedTarget) -> AbstractContextManager[None]:
        """Nothing has to be there beside the engine."""
        return nullcontext()


def shape_variables(shape: Shape) -> dict[str, str]:
    """Variables that carry fields of a shape: the reserve in GiB, exact to the byte, and the logical core size."""
    found = {}
    if shape.reserved_headroom is not None:
        found[HEADROOM_VARIABLE] = gib_text(shape.reserved_headroom)
    if shape.lnc is not None:
        found[LNC_VARIABLE] = str(shape.lnc)
    return found


def gib_text(size_bytes: int) -> str:
    """Bytes as the number of GiB that reads back as the same bytes: ``4``, ``4.5``, ``3.000000001``."""
    whole, rest = divmod(size_bytes, GIB)
    return str(whole) if rest == 0 else repr(size_bytes / GIB)


def platform_of(loaded: LoadedTarget, shape: Shape) -> str | None:
    """The platform: as overridden in the environment, else as the driver of this host names it; ``None`` unknown."""
    named = _environment(loaded, shape).get(PLATFORM_VARIABLE)
    if named is not None:
        return named
    from pytest_kvbudget.device import neuron, neuron_sysfs  # noqa: PLC0415 - only where nobody named it

    for folder in neuron_sysfs.neuron_folders(Path("/sys")).values():
        name = next((path for path in folder.rglob("device_name") if path.is_file()), None)
        if name is not None:
            try:
                return neuron.platform_of(name.read_text(encoding="ascii", errors="replace"))
            except (OSError, ProbeError):
                return None
    return None


def _environment(loaded: LoadedTarget, shape: Shape) -> dict[str, str]:
    return {**loaded.environment, **loaded.target.shape.env, **shape.env}


def _on_cpu(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name, "0").strip() not in {"", "0"} for name in (CPU_MODE_VARIABLE, CPU_COMPILE_VARIABLE))


def _lnc(environ: Mapping[str, str], lnc: int | None) -> int | None:
    raw = environ.get(LNC_VARIABLE, "").strip()
    return lnc or (int(raw) if raw in {"1", "2"} else None)


def _stack(device: str, environ: Mapping[str, str], lnc: int | None) -> int:
    """The HBM stack of a logical core, counted over the whole host."""
    platform, size = environ.get(PLATFORM_VARIABLE), _lnc(environ, lnc)
    try:
        if platform is not None:
            return int(device) // logical_cores_per_stack(platform, size or default_lnc(platform))
    except BudgetInputError:
        pass  # a platform or a size that nobody knows: as on trn2 and trn3
    return int(device) * (size or _CORES_OF_A_STACK) // _CORES_OF_A_STACK
