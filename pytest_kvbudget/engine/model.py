"""What backends, launchers and the attempt that uses them agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from pytest_kvbudget.config import LoadedTarget
from pytest_kvbudget.device.model import MemoryProbe
from pytest_kvbudget.shape import Shape


class LaunchError(Exception):
    """The engine could not be started at all: no such command, no permission. A harness fault, never a verdict."""


class EngineControlError(Exception):
    """A running engine could not be ended or handed over; says which processes are left. Never a verdict."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A shape rendered for one engine: exactly what is started."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """The whole environment."""
    env_added: Mapping[str, str]
    """What of it was added to this process' environment by target, shape and devices: shown in records and dry runs."""
    cwd: str
    host: str
    port: int


class EngineEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to the engine's processes, noticed by the keeper."""

    kind: Literal["started", "critical_exited", "exited", "gone", "failed"]
    """``started``: root process runs. ``critical_exited``: a process without which the engine cannot serve is gone.
    ``exited``: the root process is gone. ``gone``: no process of the engine is left. ``failed``: never started."""
    at: float
    """Seconds on the system-wide monotonic clock (`time.monotonic`) when the keeper noticed."""
    pid: int = 0
    title: str = ""
    """Process title, for ``critical_exited``."""
    status: int | None = None
    """Exit status, negative for a signal; ``None`` where nobody could wait for the process. It proves nothing."""
    message: str = ""


class EngineProcess(Protocol):
    """A started engine, whatever started it. Its log is a file that is complete without this process."""

    @property
    def log_path(self) -> Path:
        """Standard output and standard error of every engine process, together."""
        ...

    @property
    def root_pid(self) -> int:
        """Process id of the engine's first process."""
        ...

    def fileno(self) -> int:
        """A descriptor that becomes readable when `events` has something."""
        ...

    def events(self) -> Sequence[EngineEvent]:
        """Events since the last call, without waiting."""
        ...

    def pids(self) -> Sequence[int]:
        """Every living process of the engine."""
        ...

    def stop(self, grace_s: float) -> None:
        """End the engine: SIGTERM, again later, SIGKILL after ``grace_s`` seconds; returns when all are gone.

        Raises:
            EngineControlError: when processes are left that nothing ends.
        """
        ...

    def leave(self) -> None:
        """Hand the engine over: it lives on when this process ends, and is never ended by us again.

        Raises:
            EngineControlError: when there is no engine to hand over any more.
        """
        ...


class Launcher(Protocol):
    """One way to start and watch an engine."""

    name: str

    def launch(
        self, command: Command, *, log_path: Path, state_path: Path, lease_descriptors: Sequence[int], critical: str
    ) -> EngineProcess:
        """Start the engine.

        Args:
            command: what to start.
            log_path: file that receives its output.
            state_path: JSON file that says what was started (pids and start times), for `kvbudget reap`.
            lease_descriptors: locked descriptors to hand down, so that the devices are free when the last process is.
            critical: regular expression over process titles; a match that exits is a ``critical_exited`` event.

        Raises:
            LaunchError: when nothing could be started.
        """
        ...


class Backend(Protocol):
    """What knows one engine family."""

    name: str
    grammar: str
    """Name of the grammar tables that read its log."""
    simulated: bool
    critical: str
    """Regular expression over titles of processes without which the engine cannot serve."""

    def check(self, loaded: LoadedTarget) -> None:
        """Check what only this backend can check.

        Raises:
            ConfigError: naming file, key, what was found and what was expected.
        """
        ...

    def slots(self, loaded: LoadedTarget, shape: Shape) -> tuple[tuple[str, ...], ...]:
        """Sets of devices that an engine of this shape could run on, each a tuple of device names of the target."""
        ...

    def lease_names(self, loaded: LoadedTarget, devices: Sequence[str]) -> tuple[str, ...]:
        """Machine-wide names of these devices: equal for equal hardware, whatever target names it."""
        ...

    def probe(self, loaded: LoadedTarget, devices: Sequence[str]) -> MemoryProbe | None:
        """Reads these devices' memory; ``None`` where the target has no device memory of its own (CPU)."""
        ...

    def min_free_bytes(self, loaded: LoadedTarget) -> int | None:
        """Device memory per rank that a survivor must leave free where nobody asks for more; ``None`` for no limit."""
        ...

    def render(self, loaded: LoadedTarget, shape: Shape, devices: Sequence[str], port: int) -> Command:
        """The exact command line and environment for a shape."""
        ...

    def session(self, loaded: LoadedTarget) -> AbstractContextManager[None]:
        """What must be there while engines of this target run; a simulated device's driver, nothing for real ones."""
        ...
