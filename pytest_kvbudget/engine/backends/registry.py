"""Backends and launchers by name: ours, and others from entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Final

from pytest_kvbudget.config import ConfigError, LoadedTarget
from pytest_kvbudget.engine.model import Backend, Launcher

GROUP: Final = "pytest_kvbudget.backends"
BUILT_IN: Final = ("mock", "neuron", "rdna4", "vllm")


def backend_of(loaded: LoadedTarget) -> Backend:
    """The target's backend, after it checked the target.

    Raises:
        ConfigError: for an unknown backend, or whatever the backend finds wrong.
    """
    name = loaded.target.backend
    backend: Backend
    if name == "vllm":
        from pytest_kvbudget.engine.backends.vllm import VllmBackend  # noqa: PLC0415 - one backend per run

        backend = VllmBackend()
    elif name == "rdna4":
        from pytest_kvbudget.engine.backends.rdna4 import Rdna4Backend  # noqa: PLC0415 - one backend per run

        backend = Rdna4Backend()
    elif name == "neuron":
        from pytest_kvbudget.engine.backends.neuron import NeuronBackend  # noqa: PLC0415 - one backend per run

        backend = NeuronBackend()
    elif name == "mock":
        from pytest_kvbudget.engine.backends.mock import MockBackend  # noqa: PLC0415 - one backend per run

        backend = MockBackend()
    else:
        found = {entry.name: entry for entry in entry_points(group=GROUP)}
        if name not in found:
            known = ", ".join(sorted({*BUILT_IN, *found}))
            raise ConfigError(f"{loaded.origin} backend: no backend {name!r}; expected one of {known}")
        backend = found[name].load()()
    backend.check(loaded)
    return backend


def launcher_of(loaded: LoadedTarget, *, run: str) -> Launcher:
    """The target's launcher, for engines of this run.

    Raises:
        ConfigError: for an unknown one.
    """
    if loaded.target.launcher != "process":
        raise ConfigError(f"{loaded.origin} launcher: no launcher {loaded.target.launcher!r}; expected 'process'")
    from pytest_kvbudget.engine.launchers.process import ProcessLauncher  # noqa: PLC0415 - one launcher per run

    return ProcessLauncher(run)
