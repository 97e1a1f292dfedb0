"""From a shape to a process: a port, the command, what the record keeps of both, and the launch itself."""

from __future__ import annotations

from typing import NamedTuple

from pytest_kvbudget.config import LoadedTarget
from pytest_kvbudget.device.leases import Lease
from pytest_kvbudget.engine.kernel import KernelLog
from pytest_kvbudget.engine.model import Backend, Command, EngineProcess, Launcher, LaunchError
from pytest_kvbudget.engine.ports import Ports
from pytest_kvbudget.engine.reap import STATE_FILE
from pytest_kvbudget.identity import identity_of
from pytest_kvbudget.judging import launch_failed
from pytest_kvbudget.memory import AttemptMemory
from pytest_kvbudget.recording import Recording
from pytest_kvbudget.records import LOG_FILE, BootIdentity
from pytest_kvbudget.redact import command_without_secrets, without_secrets
from pytest_kvbudget.request import BootRequest


class Site(NamedTuple):
    """Where and how an engine is started."""

    loaded: LoadedTarget
    backend: Backend
    launcher: Launcher
    lease: Lease
    ports: Ports


class Launched(NamedTuple):
    """An engine that was started."""

    command: Command
    process: EngineProcess
    kernel: KernelLog
    """Opened before the launch: what was killed earlier is none of ours."""
    at: float
    """When, on the monotonic clock; every time of the record counts from here."""


def launch(site: Site, request: BootRequest, recording: Recording, memory: AttemptMemory) -> Launched | None:
    """Start the engine of a boot; ``None`` where nothing could be started, and the record then says why."""
    target = site.loaded.target
    try:
        port = target.port or site.ports.take(target.host)
    except OSError as error:
        said = f"host {target.host!r} is no address of this machine: {error.strerror or error}"
        recording.decide(*launch_failed(said))
        return None
    command = site.backend.render(site.loaded, request.shape, site.lease.devices, port)
    recording.record.command = command_without_secrets(command.argv)
    recording.record.environment = without_secrets(command.env_added)
    recording.record.identity = _identity(site, request, recording, command)
    log_path = recording.folder / LOG_FILE
    try:
        log_path.touch()
    except OSError as error:
        site.ports.give_back(port)
        recording.decide(*launch_failed(f"{log_path} cannot be written: {error.strerror or error}"))
        return None
    recording.save()
    at = memory.start()
    kernel = KernelLog()
    try:
        process = site.launcher.launch(
            command,
            log_path=log_path,
            state_path=recording.folder / STATE_FILE,
            lease_descriptors=site.lease.descriptors,
            critical=site.backend.critical,
        )
    except LaunchError as error:
        site.ports.give_back(port)
        recording.decide(*launch_failed(str(error)))
        return None
    return Launched(command, process, kernel, at)


def _identity(site: Site, request: BootRequest, recording: Recording, command: Command) -> BootIdentity:
    """What the boot is a boot of, so that it may stand for one of a later run."""
    idle = [reading.devices for reading in recording.record.memory if reading.moment == "idle"]
    return identity_of(
        site.loaded,
        site.backend,
        request.shape,
        command,
        site.lease.devices,
        host=recording.record.run.host,
        asked=request.asked or None,
        readings=idle[0] if idle and not site.backend.simulated else (),
    )
