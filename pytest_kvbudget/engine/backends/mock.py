"""The simulated engine on simulated devices."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

import msgspec

from pytest_kvbudget.config import ConfigError, LoadedTarget
from pytest_kvbudget.device.model import MemoryProbe
from pytest_kvbudget.device.neuron_sysfs import NeuronSysfsProbe
from pytest_kvbudget.device.sysfs import AmdSysfsProbe
from pytest_kvbudget.engine.backends.common import (
    CRITICAL,
    RDNA4_MIN_FREE_BYTES,
    build_command,
    check_numbers,
    check_words,
    slots_of,
    vllm_flags,
)
from pytest_kvbudget.engine.backends.neuron import shape_variables
from pytest_kvbudget.engine.model import Command
from pytest_kvbudget.mock.driver import ensure_driver
from pytest_kvbudget.mock.spec import MockDevice
from pytest_kvbudget.shape import Shape


class MockBackend:
    """Starts ``python -m pytest_kvbudget.mock`` on cards that a driver process simulates."""

    name = "mock"
    grammar = "vllm"
    simulated = True
    critical = CRITICAL

    def check(self, loaded: LoadedTarget) -> None:
        """Check what only this backend can check.

        Raises:
            ConfigError: for devices that are no card numbers or too few of them, and flags that the shape renders.
        """
        check_words(loaded)
        check_numbers(loaded, map(str, loaded.target.devices), what="card")
        width = loaded.target.shape.tensor_parallel_size or _spec(loaded).ranks
        if loaded.target.devices and len(loaded.target.devices) < width:
            raise ConfigError(
                f"{loaded.origin} devices: {len(loaded.target.devices)} for {width} ranks; expected at least {width}"
            )

    def slots(self, loaded: LoadedTarget, shape: Shape) -> tuple[tuple[str, ...], ...]:
        """Cards cut into sets of as many as the shape has ranks."""
        width = shape.tensor_parallel_size or _spec(loaded).ranks
        return slots_of(loaded.target.devices or range(width), width)

    def lease_names(self, loaded: LoadedTarget, devices: Sequence[str]) -> tuple[str, ...]:
        """A simulated card is the tree it is in and its number."""
        tree = sha256(os.fsencode(_tree(loaded))).hexdigest()[:12]
        return tuple(f"mock-{tree}-{device}" for device in devices)

    def probe(self, loaded: LoadedTarget, devices: Sequence[str]) -> MemoryProbe:
        """The probe of the real device that is simulated, reading the simulated tree."""
        if _spec(loaded).dialect == "neuron":
            return NeuronSysfsProbe(devices, root=_tree(loaded), lnc=loaded.target.shape.lnc)
        return AmdSysfsProbe(_tree(loaded), devices)

    def min_free_bytes(self, loaded: LoadedTarget) -> int | None:
        """As for the engine that is simulated."""
        return RDNA4_MIN_FREE_BYTES if _spec(loaded).dialect == "rdna4" else None

    def render(self, loaded: LoadedTarget, shape: Shape, devices: Sequence[str], port: int) -> Command:
        """The simulated engine takes the flags of ``vllm serve``; its device comes through the environment."""
        target, spec = loaded.target, _spec(loaded)
        if spec.dialect == "neuron":
            shape = shape.merged(env=shape_variables(shape))
        argv = (
            *(target.command or (sys.executable, "-m", "pytest_kvbudget.mock", "serve")),
            shape.model or "simulated",
            *vllm_flags(shape),
            "--host",
            target.host,
            "--port",
            str(port),
        )
        added = {
            "KVBUDGET_MOCK_DEVICE": msgspec.json.encode(spec).decode(),
            "KVBUDGET_MOCK_VISIBLE": ",".join(devices),
            "KVBUDGET_MOCK_SYSFS": str(_tree(loaded)),
        }
        return build_command(loaded, shape, argv=argv, added=added, port=port)

    def session(self, loaded: LoadedTarget) -> AbstractContextManager[None]:
        """The driver of the simulated cards; it ends by itself when this process and the last engine are gone."""
        return _driver(loaded)


@contextmanager
def _driver(loaded: LoadedTarget) -> Iterator[None]:
    ensure_driver(_tree(loaded), _spec(loaded), owner_pid=os.getpid(), cards=_cards(loaded))
    yield


def _cards(loaded: LoadedTarget) -> int:
    """How many cards the tree needs, so that every named one exists."""
    named = max((int(device) for device in loaded.target.devices), default=-1) + 1
    return max(named, loaded.target.shape.tensor_parallel_size or 1, _spec(loaded).ranks)


def _spec(loaded: LoadedTarget) -> MockDevice:
    return loaded.target.mock or MockDevice()


def _tree(loaded: LoadedTarget) -> Path:
    """The device tree: as configured, else one per user, configuration and target."""
    spec = _spec(loaded)
    if spec.sysfs is not None:
        return Path(loaded.folder, spec.sysfs).absolute()
    digest = sha256(os.fsencode(f"{loaded.origin} {Path(loaded.folder).absolute()}")).hexdigest()[:12]
    return Path(tempfile.gettempdir(), f"kvbudget-mock-{os.getuid()}", f"{quote(loaded.name, safe='')}-{digest}")
