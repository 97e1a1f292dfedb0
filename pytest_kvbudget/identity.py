"""What a boot is a boot of: everything that must be equal before an earlier one may stand for it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec

from pytest_kvbudget.config import LoadedTarget
from pytest_kvbudget.device.driver import NO_DRIVER, SIMULATED, DriverKind, driver_version
from pytest_kvbudget.device.model import DeviceMemory, ProbeError
from pytest_kvbudget.device.probes import detect
from pytest_kvbudget.engine.identity import engine_build
from pytest_kvbudget.engine.installed import tree_digest
from pytest_kvbudget.engine.model import Backend, Command
from pytest_kvbudget.records import SCHEMA_VERSION, BootIdentity
from pytest_kvbudget.shape import Shape

CPU_DEVICE: Final = "cpu"
VERDICT_LIMITS: Final = ("min_free", "max_used", "max_growth", "trace_hz")
"""Limits of a target that decide a verdict; the others say how long to wait and for what before a boot."""
INHERITED: Final = (
    "VLLM_",
    "SGLANG_",
    "SGL_",
    "NEURON_",
    "NKI_",
    "FI_",
    "HIP_",
    "HSA_",
    "ROCR_",
    "ROCM_",
    "AMD_",
    "GPU_",
    "MIOPEN_",
    "AITER_",
    "CUDA_",
    "CUBLAS_",
    "NVIDIA_",
    "NCCL_",
    "RCCL_",
    "PYTORCH_",
    "TORCH",
    "TRITON_",
    "FLASHINFER_",
    "XLA_",
    "HF_",
    "HUGGINGFACE_",
    "TRANSFORMERS_",
    "SAFETENSORS_",
    "OMP_",
    "MKL_",
    "MALLOC_",
    "LD_",
    # of Python's own only those by which something else is imported or run
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONSAFEPATH",
    "PYTHONNOUSERSITE",
    "PYTHONUSERBASE",
    "PYTHONMALLOC",
    "PYTHONHASHSEED",
    "PYTHONOPTIMIZE",
    "XDG_CACHE_HOME",
)
"""Beginnings of variables that engines, their libraries and their allocators read, wherever they were set."""
MODEL_FILES: Final = ("config.json", "adapter_config.json", "params.json")
"""One of them is in the folder of every model or adapter."""
HUB_VARIABLES: Final = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
_DIGITS: Final = 32


def identity_of(
    loaded: LoadedTarget,
    backend: Backend,
    shape: Shape,
    command: Command,
    devices: Sequence[str],
    *,
    host: str,
    asked: str | None,
    readings: Sequence[DeviceMemory] = (),
    root: Path = Path("/"),
) -> BootIdentity:
    """The identity of a boot that was not made yet.

    Args:
        loaded: the target.
        backend: its backend.
        shape: what will be booted.
        command: the shape as the backend renders it for these devices; its host and port do not count.
        devices: the set of the target's devices that it would run on.
        host: name of this machine, as the run's records have it.
        asked: digest of what the test asks of the boot; ``None`` where that cannot be told, and nothing is reused.
        readings: memory of these devices (`device_readings`, or the attempt's own), for their totals. Of simulated
            devices the configuration counts, and readings do not.
        root: the file system's root, for the driver's version; other than ``/`` in tests.
    """
    return BootIdentity(
        schema_version=SCHEMA_VERSION,
        plugin_version=version("pytest-kvbudget"),
        host=host,
        devices=_devices(backend.lease_names(loaded, devices), () if backend.simulated else readings),
        driver=_driver(loaded, backend, devices, root),
        engine=engine_build(command),
        target=_target(loaded, shape, command),
        shape=_shape(loaded, shape, command),
        asked=asked,
    )


def device_readings(loaded: LoadedTarget, backend: Backend, devices: Sequence[str]) -> tuple[DeviceMemory, ...]:
    """Memory of a device set, for its identity before it is leased; empty where nobody can read it, or simulated."""
    probe = None if backend.simulated else backend.probe(loaded, devices)
    if probe is None:
        return ()
    try:
        return probe.read()
    except ProbeError:
        return ()
    finally:
        close = getattr(probe, "close", None)
        if close is not None:
            close()


def _devices(names: Sequence[str], readings: Sequence[DeviceMemory]) -> tuple[str, ...]:
    if len(readings) != len(names):
        return tuple(names)
    return tuple(f"{name} {reading.total_bytes}" for name, reading in zip(names, readings, strict=True))


def _driver(loaded: LoadedTarget, backend: Backend, devices: Sequence[str], root: Path) -> str | None:
    if backend.simulated:
        return SIMULATED
    if tuple(devices) == (CPU_DEVICE,):
        return NO_DRIVER
    kinds: dict[str, DriverKind] = {"rdna4": "amd", "neuron": "neuron"}
    kind = kinds.get(loaded.target.backend)
    if kind is None:
        found = detect()
        kind = None if found == "host" else found
    return None if kind is None else driver_version(kind, root)


def _target(loaded: LoadedTarget, shape: Shape, command: Command) -> str:
    """What the configuration and the environment of this process decide, whatever the shape."""
    target = loaded.target
    limits = {name: getattr(target.limits, name) for name in VERDICT_LIMITS}
    # what the backend sets goes by device set and shape; what a shape overrides is the same on every rung
    decided = command.env_added.keys() - loaded.environment.keys() - shape.env.keys()
    inherited = {
        name: value for name, value in os.environ.items() if name.startswith(INHERITED) and name not in decided
    }
    return digest_of(
        [target.backend, target.launcher, target.command, target.mock, limits, loaded.patterns],
        _variables(loaded.environment),
        _variables(inherited),
    )


def _shape(loaded: LoadedTarget, shape: Shape, command: Command) -> str:
    """The shape, and what the files that its command line names are now: a model can change under its name."""
    words = [*command.argv[1:], *(word.partition("=")[2] for word in command.argv[1:] if "=" in word)]
    named = (word for word in dict.fromkeys(words) if word == shape.model or "/" in word or Path(word).suffix)
    files = [(word, tree_digest(path)) for word in named if (path := _read_by_engine(command.cwd, word)) is not None]
    return digest_of(shape.key(), files, _revision(shape, command))


def _read_by_engine(cwd: str, word: str) -> Path | None:
    """The file, or the folder of a model or an adapter, that a word names; other folders are for engines to write."""
    path = Path(cwd, word)
    try:
        found = path.is_file() or any((path / name).is_file() for name in MODEL_FILES)
    except (OSError, ValueError):
        return None  # too long for a name, or no name at all
    return path if found else None


def _revision(shape: Shape, command: Command) -> str | None:
    """The commit of a model that is named as on the Hugging Face hub, as its cache knows it."""
    if shape.model is None or shape.model.count("/") != 1:
        return None
    environ = command.env
    cache = next((Path(environ[name]) for name in HUB_VARIABLES if environ.get(name)), None)
    if cache is None:
        home = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/"), ".cache"))
        cache = Path(environ.get("HF_HOME") or home / "huggingface") / "hub"
    refs = cache / f"models--{shape.model.replace('/', '--')}" / "refs"
    try:
        return repr(sorted((path.name, path.read_text(encoding="utf-8")) for path in refs.iterdir()))
    except (OSError, UnicodeDecodeError):
        return None


def _variables(environ: Mapping[str, str]) -> list[str]:
    """Names with the digests of their values: what is secret among them is not looked for."""
    return [f"{name} {_hashed(f'{name}={value}')}" for name, value in sorted(environ.items())]


def digest_of(*parts: object) -> str:
    """A digest of builtins and structs, the same in every process."""
    return _hashed(msgspec.json.encode(parts, order="sorted"))


def _hashed(data: str | bytes) -> str:
    raw = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
    return sha256(raw).hexdigest()[:_DIGITS]
