"""What backends share: flags from a shape, device slots, a command's environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_kvbudget.config import ConfigError, LoadedTarget, engine_environment
from pytest_kvbudget.device.model import DeviceMemory, MemoryProbe, ProbeError
from pytest_kvbudget.engine.backends.flags import SHAPE_FLAGS, check_command, check_extra_args
from pytest_kvbudget.engine.model import Command
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import MIB

if TYPE_CHECKING:
    from pytest_kvbudget.device.probes import Kind

CRITICAL: Final = r"^VLLM::(EngineCore|Worker)"
"""Titles of the processes without which ``vllm serve`` cannot serve, on every platform."""
GPU_VARIABLES: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Both are set: a build for AMD reads either, and refuses two that differ."""

RDNA4_MIN_FREE_BYTES: Final = 512 * MIB
"""Between the margins that the RDNA4 budget document measured: a shape with 0.13 GiB free died, one with 0.89 lived."""


def vllm_flags(shape: Shape) -> tuple[str, ...]:
    """The flags of ``vllm serve`` for a shape, only what was asked for, in a fixed order; ``extra_args`` last."""
    flags: list[str] = []
    for name in SHAPE_FLAGS:
        value = getattr(shape, name)
        if value is not None:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    if shape.enforce_eager:
        flags.append("--enforce-eager")
    return (*flags, *shape.extra_args)


def serve_command(loaded: LoadedTarget, shape: Shape, flags: Sequence[str], port: int) -> tuple[str, ...]:
    """``vllm serve MODEL FLAGS --host H --port P``, or the target's own command in place of ``vllm serve``."""
    target = loaded.target
    model = () if shape.model is None else (shape.model,)
    return (*(target.command or ("vllm", "serve")), *model, *flags, "--host", target.host, "--port", str(port))


def check_served(loaded: LoadedTarget, *, foreign: Mapping[str, str], variables: Iterable[str]) -> None:
    """Check what every backend that runs ``vllm serve`` wants.

    Args:
        loaded: the target.
        foreign: fields of the shape that this backend cannot pass on, and why.
        variables: of the environment, that the devices of a lease decide.

    Raises:
        ConfigError: naming the key, what was found and what was expected.
    """
    target, backend = loaded.target, loaded.target.backend
    if target.mock is not None:
        raise ConfigError(f"{loaded.origin} mock: is for backend 'mock'; this target's backend is {backend!r}")
    if target.shape.model is None:
        raise ConfigError(f"{loaded.origin} shape.model: is missing; expected a model name or folder")
    check_words(loaded)
    for key, why in foreign.items():
        if getattr(target.shape, key) is not None:
            raise ConfigError(f"{loaded.origin} shape.{key}: {why}")
    for name in variables:
        for where, environ in (("env", loaded.environment), ("shape.env", target.shape.env)):
            if name in environ:
                raise ConfigError(
                    f"{loaded.origin} {where}.{name}: is {environ[name]!r}; expected it unset: an engine gets the "
                    "devices that were leased for it, name them with devices"
                )


def check_words(loaded: LoadedTarget) -> None:
    """Check that neither command nor further flags of a target set what its shape sets.

    Raises:
        ConfigError: naming the key, the flag and where it belongs.
    """
    check_command(loaded.target.command or (), where=f"{loaded.origin} command")
    check_extra_args(loaded.target.shape.extra_args, where=f"{loaded.origin} shape.extra_args")


def check_numbers(loaded: LoadedTarget, devices: Iterable[str], *, what: str) -> None:
    """Check that devices are plain numbers: two spellings of one device would be two leases.

    Raises:
        ConfigError: naming the device and what was expected.
    """
    for device in devices:
        if not (device.isascii() and device.isdecimal() and str(int(device)) == device):
            raise ConfigError(f"{loaded.origin} devices: {device!r} is no {what}; expected numbers from 0")


class _Unreadable:
    """Device memory that no source shows: every reading says why."""

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def read(self) -> tuple[DeviceMemory, ...]:
        raise ProbeError(self._problem)


def chosen_probe(kind: Kind, devices: Sequence[str], *, lnc: int | None = None) -> MemoryProbe:
    """The best source that shows these devices now; where none does, a probe whose readings say why.

    A boot is not refused for it: telemetry that is missing changes no verdict.
    """
    from pytest_kvbudget.device.probes import choose  # noqa: PLC0415 - only where a boot needs it

    try:
        return choose(kind, devices, lnc=lnc)
    except ProbeError as error:
        return _Unreadable(str(error))


def slots_of(devices: Iterable[int | str], width: int) -> tuple[tuple[str, ...], ...]:
    """Cut a target's devices into sets of ``width``, in order; a rest that makes no whole set is not used."""
    names = [str(device) for device in devices]
    return tuple(tuple(names[start : start + width]) for start in range(0, len(names) - width + 1, width))


def _passed(text: str) -> str:
    """Text of a configuration, which is UTF-8, as this process hands the same bytes on, whatever its locale is."""
    return text if text.isascii() else os.fsdecode(text.encode("utf-8", "surrogateescape"))


def build_command(
    loaded: LoadedTarget, shape: Shape, *, argv: Sequence[str], added: Mapping[str, str], port: int
) -> Command:
    """Put a command together: environment of this process, then ``added``, then target's and shape's."""
    own = {name: _passed(value) for name, value in {**added, **loaded.environment, **shape.env}.items()}
    return Command(
        argv=tuple(map(_passed, argv)),
        env={**engine_environment(loaded, shape), **own},
        env_added=own,
        cwd=str(Path(loaded.folder).absolute()),
        host=loaded.target.host,
        port=port,
    )
