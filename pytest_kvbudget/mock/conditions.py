"""What one boot meets that its shape does not say: noise, a cold compile cache, how often it was tried.

Files below the device tree carry what boots leave behind: ``mock/attempts``, one line a boot, and
``mock/compile_cache``, one folder a compile key.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
from pathlib import Path
from typing import Final

import msgspec

from pytest_kvbudget.mock.arguments import Arguments
from pytest_kvbudget.mock.spec import MockDevice

_NAMES: Final = ("host", "port", "served_model_name")
"""Arguments that say where an engine is reached, not what it takes."""
_VARIABLES: Final = ("VLLM_NEURON_", "VLLM_CUDAGRAPH_", "NEURON_LOGICAL_", "NEURON_CC_", "NEURON_RT_VIRTUAL_")
"""Beginnings of variables that move memory; where caches lie or which devices are visible does not."""
DONE: Final = ".compilation_complete"


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """One boot's own."""

    boot: int = 1
    """Number of the boot among all of this device tree, from 1."""
    noise_bytes: int = 0
    """What this boot takes more than others of its shape, or less."""


def shape_key(arguments: Arguments, environ: dict[str, str]) -> str:
    """Digest of everything that was asked for and may move memory."""
    given = {name: value for name, value in arguments.given.items() if name not in _NAMES}
    variables = {name: value for name, value in environ.items() if name.startswith(_VARIABLES)}
    return digest(arguments.model, sorted(given.items()), sorted(variables.items()))


def digest(*parts: object) -> str:
    """32 hexadecimal digits, the form of the names in a compile cache."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def normal(*parts: object) -> float:
    """A draw from the standard normal distribution, the same for the same parts on every machine and Python."""
    number = hashlib.sha256(repr(parts).encode()).digest()
    # Box-Muller, with the first uniform number above 0
    first = (int.from_bytes(number[:8]) + 1) / 2**64
    second = int.from_bytes(number[8:16]) / 2**64
    return math.sqrt(-2 * math.log(first)) * math.cos(2 * math.pi * second)


def boot_noise(spec: MockDevice, key: str, attempt: int) -> int:
    """Bytes that the ``attempt``-th boot of a shape takes more than the shape does."""
    return round(spec.noise_boot * normal(spec.seed, "boot", key, attempt)) if spec.noise_boot else 0


def shape_noise(spec: MockDevice, key: str) -> int:
    """Bytes that a shape takes more than arithmetic says."""
    return round(spec.noise_shape * normal(spec.seed, "shape", key)) if spec.noise_shape else 0


def begin(spec: MockDevice, key: str, sysfs: str) -> Conditions:
    """Count a boot, where it matters which one it is, and draw what it meets."""
    if not spec.noise_boot and spec.estimate != "alternating":
        return Conditions()
    path = Path(sysfs, "mock", "attempts")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        keys = [*file.read().split(), key]
        file.write(f"{key}\n")
    return Conditions(boot=len(keys), noise_bytes=boot_noise(spec, key, keys.count(key)))


def cache_folder(sysfs: str, key: str) -> Path:
    """Where everything of a compile key is kept."""
    return Path(sysfs, "mock", "compile_cache", key)


class CompileCache:
    """The compile cache of one device tree."""

    def __init__(self, sysfs: str) -> None:
        self._sysfs = sysfs

    def has(self, key: str) -> bool:
        """Whether everything of a key is compiled."""
        return (cache_folder(self._sysfs, key) / DONE).exists()

    def fill(self, key: str) -> None:
        """Everything of a key is compiled now."""
        folder = cache_folder(self._sysfs, key)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / DONE).touch()
