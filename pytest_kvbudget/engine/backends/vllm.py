"""``vllm serve`` as it is: CUDA, ROCm and CPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from pytest_kvbudget.config import ConfigError, LoadedTarget
from pytest_kvbudget.device.model import MemoryProbe
from pytest_kvbudget.engine.backends.common import build_command, slots_of, vllm_flags
from pytest_kvbudget.engine.model import Command
from pytest_kvbudget.shape import Shape

CPU_DEVICE: Final = "cpu"
_VISIBLE: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


class VllmBackend:
    """Runs ``vllm serve``. ``devices = ["cpu"]`` (the default) is the CPU engine; numbers are GPUs."""

    name = "vllm"
    grammar = "vllm"
    simulated = False
    critical = r"^VLLM::(EngineCore|Worker)"

    def check(self, loaded: LoadedTarget) -> None:
        """Check what only this backend can check.

        Raises:
            ConfigError: for a missing model, keys of another backend, or a mixture of CPU and GPUs.
        """
        target = loaded.target
        if target.mock is not None:
            raise ConfigError(f"{loaded.origin} mock: is for backend 'mock'; this target's backend is 'vllm'")
        if target.shape.model is None:
            raise ConfigError(f"{loaded.origin} shape.model: is missing; expected a model name or folder")
        for key in ("reserved_headroom", "lnc"):
            if getattr(target.shape, key) is not None:
                raise ConfigError(f"{loaded.origin} shape.{key}: is a Neuron setting; backend 'vllm' has none")
        devices = [str(device) for device in target.devices]
        if CPU_DEVICE in devices and len(devices) > 1:
            raise ConfigError(f"{loaded.origin} devices: {devices} mixes the CPU with GPUs; expected one or the other")

    def slots(self, loaded: LoadedTarget, shape: Shape) -> tuple[tuple[str, ...], ...]:
        """The CPU is one slot; GPUs are cut into sets of ``tensor_parallel_size``."""
        devices = loaded.target.devices or (CPU_DEVICE,)
        if str(devices[0]) == CPU_DEVICE:
            return ((CPU_DEVICE,),)
        return slots_of(devices, shape.tensor_parallel_size or 1)

    def lease_names(self, loaded: LoadedTarget, devices: Sequence[str]) -> tuple[str, ...]:
        """GPUs are leased by the number that the driver gives them on this host."""
        return tuple(CPU_DEVICE if device == CPU_DEVICE else f"gpu-{device}" for device in devices)

    def probe(self, loaded: LoadedTarget, devices: Sequence[str]) -> MemoryProbe | None:
        """AMD cards are read through sysfs; a CPU target has no device memory of its own."""
        from pytest_kvbudget.device.sysfs import AmdSysfsProbe  # noqa: PLC0415 - only where a boot needs it

        if tuple(devices) == (CPU_DEVICE,) or not AmdSysfsProbe.available():
            return None
        return AmdSysfsProbe("/sys", devices)

    def render(self, loaded: LoadedTarget, shape: Shape, devices: Sequence[str], port: int) -> Command:
        """``vllm serve MODEL FLAGS --host H --port P`` with the visible devices of both GPU vendors set."""
        target = loaded.target
        added = {} if tuple(devices) == (CPU_DEVICE,) else dict.fromkeys(_VISIBLE, ",".join(devices))
        argv = (
            *(target.command or ("vllm", "serve")),
            *((shape.model,) if shape.model is not None else ()),
            *vllm_flags(shape),
            "--host",
            target.host,
            "--port",
            str(port),
        )
        return build_command(loaded, shape, argv=argv, added=added, port=port)

    def session(self, loaded: LoadedTarget) -> AbstractContextManager[None]:
        """Nothing has to be there beside the engine."""
        return nullcontext()
