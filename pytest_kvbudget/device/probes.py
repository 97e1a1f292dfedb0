"""Which source of device memory to use: the best one that really answers, and why."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, Protocol, TypeVar, runtime_checkable

import msgspec

from pytest_kvbudget.device import amd_smi, neuron_ls, neuron_monitor, neuron_sysfs, nvidia_smi, nvml, rocm_smi
from pytest_kvbudget.device.amd import AmdGpu
from pytest_kvbudget.device.amd_smi import AmdSmiProbe
from pytest_kvbudget.device.cgroup import CgroupProbe
from pytest_kvbudget.device.command import DEADLINE_S, find_tool
from pytest_kvbudget.device.host import HostProbe
from pytest_kvbudget.device.model import DeviceHolder, DeviceMemory, MemoryProbe, ProbeError
from pytest_kvbudget.device.neuron import TOOL_FOLDERS
from pytest_kvbudget.device.neuron_monitor import NeuronMonitorProbe
from pytest_kvbudget.device.neuron_sysfs import NeuronSysfsProbe, neuron_folders
from pytest_kvbudget.device.nvidia_smi import NvidiaSmiProbe
from pytest_kvbudget.device.nvml import NvmlProbe
from pytest_kvbudget.device.rocm_smi import RocmSmiProbe
from pytest_kvbudget.device.sysfs import AmdSysfsProbe, amd_cards

_T = TypeVar("_T")

Kind = Literal["amd", "nvidia", "neuron", "host"]

_FAST_HZ: Final = 100.0
_TOOL_HZ: Final = 1.0
_SYSFS: Final = Path("/sys")
_NVIDIA_DRIVER: Final = Path("/proc/driver/nvidia/version")


@runtime_checkable
class HolderSource(Protocol):
    """Knows who has memory of a target's devices."""

    def holders(self) -> tuple[tuple[DeviceHolder, ...], ...]:
        """Holders of each device, in the order the devices were named.

        Raises:
            ProbeError: it cannot tell.
        """
        ...


class Choice:
    """The chosen source, as a probe with a deadline of its own.

    Attributes:
        source: its name, as readings carry it.
        reason: why this one: what was asked before it and did not answer.
        max_hz: how often it can be asked without being the load that is measured.
        direct: the source itself, for a caller that has a thread of its own for it (`sampler.MemorySampler`).
    """

    def __init__(
        self,
        source: str,
        probe: MemoryProbe,
        *,
        reason: str,
        max_hz: float,
        timeout_s: float,
        holders: HolderSource | None = None,
    ) -> None:
        self.source = source
        self.reason = reason
        self.max_hz = max_hz
        self.direct = probe
        self._timeout_s = timeout_s
        self._holders = holders

    def read(self) -> tuple[DeviceMemory, ...]:
        """One reading per device, in the order they were named.

        Raises:
            ProbeError: a device cannot be read, or not in time.
        """
        # Tools have this deadline for each command; a reading may need two of them.
        return within(2.5 * self._timeout_s, self.direct.read, f"{self.source}: reading device memory")

    def holders(self) -> tuple[tuple[DeviceHolder, ...], ...]:
        """Holders of each device, in the order they were named; empty where nothing tells.

        Raises:
            ProbeError: the source that should know does not answer.
        """
        if self._holders is None:
            return tuple(reading.holders for reading in self.read())
        return within(2.5 * self._timeout_s, self._holders.holders, f"{self.source}: asking who holds device memory")

    def read_with_holders(self) -> tuple[DeviceMemory, ...]:
        """As `read`, with holders where they are known: slower, for the moments that a message names them.

        Raises:
            ProbeError: a device cannot be read. Unknown holders are no error.
        """
        readings = self.read()
        try:
            holders = self.holders()
        except ProbeError as error:
            missing = f"holders unknown: {error}"
            return tuple(
                msgspec.structs.replace(reading, limits="; ".join(filter(None, (reading.limits, missing))))
                for reading in readings
            )
        return tuple(
            msgspec.structs.replace(reading, holders=those) for reading, those in zip(readings, holders, strict=True)
        )

    def close(self) -> None:
        """End what the source keeps running. A later reading starts it again."""
        close = getattr(self.direct, "close", None)
        if close is not None:
            close()


class _Candidate(msgspec.Struct, frozen=True):
    source: str
    make: Callable[[], MemoryProbe]
    max_hz: float
    holders: HolderSource | None = None


class _Asked(msgspec.Struct, frozen=True):
    """What `choose` was asked."""

    devices: tuple[str, ...]
    root: Path
    lnc: int | None
    pid: int | None
    timeout_s: float
    tools: bool


def choose(
    kind: Kind,
    devices: Sequence[str],
    *,
    sysfs: str | Path = "/sys",
    lnc: int | None = None,
    pid: int | None = None,
    timeout_s: float = DEADLINE_S,
    tools: bool | None = None,
) -> Choice:
    """The best source that shows the memory of these devices now.

    Args:
        kind: of the devices. ``"host"`` is what the memory control group of ``pid`` leaves of it, with a ``pid``.
        devices: as the target names them.
        sysfs: where the kernel's tree is; a simulated one is elsewhere.
        lnc: logical NeuronCore size that the engine runs with.
        pid: a process of the group in question: the engine's, or this one where the engine inherits its group.
        timeout_s: deadline of each command.
        tools: whether the vendor's tools may be asked. They show this host's devices, so they are not where ``sysfs``
            is another tree: real memory must never pass for simulated.

    Raises:
        ProbeError: no source answers; names each and what it said.
    """
    refused: list[str] = []
    may_ask_tools = Path(sysfs) == _SYSFS if tools is None else tools
    asked = _Asked(tuple(devices), Path(sysfs), lnc, pid, timeout_s, may_ask_tools)
    for candidate in _CANDIDATES[kind](asked):
        try:
            probe = within(timeout_s, candidate.make, f"{candidate.source}: starting")
        except ProbeError as error:
            refused.append(f"{candidate.source}: {error}")
            continue
        holders = candidate.holders or (probe if isinstance(probe, HolderSource) else None)
        choice = Choice(
            candidate.source,
            probe,
            reason=f"{candidate.source} answered" + (f"; not used: {'; '.join(refused)}" if refused else ""),
            max_hz=candidate.max_hz,
            timeout_s=timeout_s,
            holders=holders,
        )
        try:
            choice.read()
        except ProbeError as error:
            choice.close()
            refused.append(f"{candidate.source}: {error}")
            continue
        return choice
    raise ProbeError(f"no source shows the memory of {kind} devices {', '.join(devices)}: {'; '.join(refused)}")


def detect(sysfs: str | Path = "/sys") -> Kind:
    """What kind of accelerator this host has; ``"host"`` where it has none that is known."""
    root = Path(sysfs)
    if neuron_folders(root):
        return "neuron"
    if amd_cards(root):
        return "amd"
    if _NVIDIA_DRIVER.exists() or find_tool(nvidia_smi.SOURCE) is not None:
        return "nvidia"
    return "host"


def _amd(asked: _Asked) -> Iterator[_Candidate]:
    """Sources of a kind, the best first: what costs least to ask, then what says most."""
    devices, timeout_s = asked.devices, asked.timeout_s
    yield _Candidate("sysfs", lambda: AmdSysfsProbe(asked.root, devices, _amd_order(asked)), _FAST_HZ)
    if asked.tools:
        tool = _tool(amd_smi.SOURCE, amd_smi.TOOL_FOLDERS)
        yield _Candidate(amd_smi.SOURCE, lambda: AmdSmiProbe(devices, tool=tool, timeout_s=timeout_s), _TOOL_HZ)
        old = _tool(rocm_smi.SOURCE, amd_smi.TOOL_FOLDERS)
        yield _Candidate(rocm_smi.SOURCE, lambda: RocmSmiProbe(devices, tool=old, timeout_s=timeout_s), _TOOL_HZ)


def _amd_order(asked: _Asked) -> tuple[AmdGpu, ...]:
    """HIP's order where ``amd-smi`` tells it; asked only where there is more than one card to confuse."""
    if not asked.tools or len(amd_cards(asked.root)) < 2:
        return ()
    try:
        return amd_smi.read_order(_tool(amd_smi.SOURCE, amd_smi.TOOL_FOLDERS), timeout_s=asked.timeout_s)
    except ProbeError:
        return ()  # the readings then say that the order was not checked


def _nvidia(asked: _Asked) -> Iterator[_Candidate]:
    if asked.tools:
        devices, timeout_s = asked.devices, asked.timeout_s
        yield _Candidate(nvml.SOURCE, lambda: NvmlProbe(devices), _FAST_HZ)
        yield _Candidate(nvidia_smi.SOURCE, lambda: NvidiaSmiProbe(devices, timeout_s=timeout_s), _TOOL_HZ)


def _neuron(asked: _Asked) -> Iterator[_Candidate]:
    devices, lnc, timeout_s = asked.devices, asked.lnc, asked.timeout_s
    holders = _NeuronHolders(devices, timeout_s) if asked.tools else None
    yield _Candidate(
        neuron_sysfs.SOURCE, lambda: NeuronSysfsProbe(devices, root=asked.root, lnc=lnc), _FAST_HZ, holders
    )
    if asked.tools:
        tool = _tool(neuron_monitor.SOURCE, TOOL_FOLDERS)
        yield _Candidate(
            neuron_monitor.SOURCE,
            lambda: NeuronMonitorProbe(devices, tool=tool, lnc=lnc, timeout_s=timeout_s),
            1 / neuron_monitor.PERIOD_S,
        )


def _host(asked: _Asked) -> Iterator[_Candidate]:
    pid = asked.pid
    if pid is not None:
        yield _Candidate("cgroup", lambda: CgroupProbe(pid), _FAST_HZ)
    yield _Candidate("meminfo", HostProbe, _FAST_HZ)


_CANDIDATES: Final[dict[Kind, Callable[[_Asked], Iterator[_Candidate]]]] = {
    "amd": _amd,
    "nvidia": _nvidia,
    "neuron": _neuron,
    "host": _host,
}


def _tool(name: str, folders: Sequence[str]) -> str:
    return find_tool(name, folders) or name


class _NeuronHolders:
    """Who has the devices of these logical cores open, from ``neuron-ls``."""

    def __init__(self, devices: Sequence[str], timeout_s: float) -> None:
        self._devices = tuple(devices)
        self._timeout_s = timeout_s

    def holders(self) -> tuple[tuple[DeviceHolder, ...], ...]:
        found = neuron_ls.read_devices(_tool(neuron_ls.SOURCE, TOOL_FOLDERS), timeout_s=self._timeout_s)
        by_core = {str(core): device.holders for device in found for core in device.cores}
        return tuple(by_core.get(device, ()) for device in self._devices)


def within(timeout_s: float, call: Callable[[], _T], what: str) -> _T:
    """Call something that may hang where nothing can interrupt it: a driver, a library.

    A call that is late keeps its thread, which ends with it or with this process.

    Raises:
        ProbeError: it did not return in time; or whatever it raised.
    """
    done: list[_T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(call())
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run, name="kvbudget-probe", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failed:
        raise failed[0]
    if done:
        return done[0]
    raise ProbeError(f"{what} did not return within {timeout_s:g} s; expected a reading. The driver may hang")
