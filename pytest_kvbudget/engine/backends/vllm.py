"""``vllm serve`` as it is: CUDA, ROCm and CPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from pytest_kvbudget.config import ConfigError, LoadedTarget
from pytest_kvbudget.device.model import MemoryProbe
from pytest_kvbudget.engine.backends.common import (
    CRITICAL,
    GPU_VARIABLES,
    build_command,
    check_numbers,
    check_served,
    chosen_probe,
    serve_command,
    slots_of,
    vllm_flags,
)
from pytest_kvbudget.engine.model import Command
from pytest_kvbudget.shape import Shape

CPU_DEVICE: Final = "cpu"


class VllmBackend:
    """Runs ``vllm serve``. ``devices = ["cpu"]`` (the default) is the CPU engine; numbers are GPUs."""

    name = "vllm"
    grammar = "vllm"
    simulated = False
    critical = CRITICAL

    def check(self, loaded: LoadedTarget) -> None:
        """Check what only this backend can check.

        Raises:
            ConfigError: for a missing model, keys of another backend, or a mixture of CPU and GPUs.
        """
        devices = [str(device) for device in loaded.target.devices] or [CPU_DEVICE]
        on_cpu = CPU_DEVICE in devices
        foreign = dict.fromkeys(("reserved_headroom", "lnc"), "is a Neuron setting; backend 'vllm' has none")
        check_served(loaded, foreign=foreign, variables=GPU_VARIABLES)
        check_numbers(loaded, [device for device in devices if device != CPU_DEVICE], what="GPU")
        if on_cpu and len(devices) > 1:
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
        """GPUs are read through the best source of this host.

        A CPU target has no device memory of its own: the host's is everybody's, and no gate could wait for it.
        """
        from pytest_kvbudget.device.probes import detect  # noqa: PLC0415 - only where a boot needs it

        if tuple(devices) == (CPU_DEVICE,):
            return None
        kind = detect()
        return chosen_probe(kind, devices) if kind in {"amd", "nvidia"} else None

    def min_free_bytes(self, loaded: LoadedTarget) -> int | None:
        """No limit that every GPU would have; a CPU target has no device memory."""
        return None

    def render(self, loaded: LoadedTarget, shape: Shape, devices: Sequence[str], port: int) -> Command:
        """``vllm serve MODEL FLAGS --host H --port P`` with the visible devices of both GPU vendors set."""
        # a lease of the CPU is no lease of whatever GPU this host may have
        visible = "" if tuple(devices) == (CPU_DEVICE,) else ",".join(devices)
        added = dict.fromkeys(GPU_VARIABLES, visible)
        argv = serve_command(loaded, shape, vllm_flags(shape), port)
        return build_command(loaded, shape, argv=argv, added=added, port=port)

    def session(self, loaded: LoadedTarget) -> AbstractContextManager[None]:
        """Nothing has to be there beside the engine."""
        return nullcontext()
