"""Memory of NVIDIA GPUs through NVML, where ``nvidia-ml-py`` is installed. It is never required."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

from pytest_kvbudget.device.fields import checked, whole
from pytest_kvbudget.device.model import DeviceHolder, DeviceMemory, ProbeError
from pytest_kvbudget.device.nvidia_smi import ORDER, find_gpu

SOURCE: Final = "nvml"
_MODULE: Final = "pynvml"


class NvmlProbe:
    """Reads the memory of NVIDIA GPUs. A device is a number or a UUID, as ``CUDA_VISIBLE_DEVICES`` takes them.

    Raises:
        ProbeError: the bindings are not installed, or the driver does not answer.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = tuple(devices)
        try:
            self._nvml: Any = import_module(_MODULE)
            self._nvml.nvmlInit()
        except Exception as error:  # noqa: BLE001 - a foreign extension module: whatever it raises, it is not there
            raise ProbeError(
                f"NVML: {type(error).__name__}: {error}; expected the package nvidia-ml-py and a running NVIDIA driver"
            ) from None
        self._handles = self._call("enumeration", self._find)

    def read(self) -> tuple[DeviceMemory, ...]:
        """One reading per device, in the order they were named.

        Raises:
            ProbeError: the driver does not show a device's memory.
        """
        return tuple(
            self._call(f"GPU {device} memory", self._read, device, handle)
            for device, handle in zip(self._devices, self._handles, strict=True)
        )

    def holders(self) -> tuple[tuple[DeviceHolder, ...], ...]:
        """Holders of each device, in the order they were named.

        Raises:
            ProbeError: the driver cannot tell.
        """
        return tuple(
            self._call(f"GPU {device} processes", self._processes, handle)
            for device, handle in zip(self._devices, self._handles, strict=True)
        )

    def _find(self) -> list[Any]:
        nvml = self._nvml
        handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        uuids = {number: _text(nvml.nvmlDeviceGetUUID(handle)) for number, handle in enumerate(handles)}
        return [handles[find_gpu(device, uuids, "NVML")] for device in self._devices]

    def _read(self, device: str, handle: Any) -> DeviceMemory:  # noqa: ANN401 - an opaque handle
        where = f"NVML: GPU {device}"
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        # Version 1 counts what the driver keeps back as used; version 2 shows it apart.
        memory = (
            self._nvml.nvmlDeviceGetMemoryInfo(handle)
            if version is None
            else self._nvml.nvmlDeviceGetMemoryInfo(handle, version=version)
        )
        return checked(
            device=device,
            total_bytes=whole(memory.total, f"{where} total"),
            used_bytes=whole(memory.used, f"{where} used"),
            reserved_bytes=whole(getattr(memory, "reserved", 0), f"{where} reserved"),
            source=SOURCE,
            where=where,
            limits=ORDER,
        )

    def _processes(self, handle: Any) -> tuple[DeviceHolder, ...]:  # noqa: ANN401 - an opaque handle
        return tuple(
            DeviceHolder(pid=process.pid, used_bytes=process.usedGpuMemory)
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        )

    def _call(self, what: str, function: Any, *arguments: Any) -> Any:  # noqa: ANN401 - untyped bindings
        try:
            return function(*arguments)
        except ProbeError:
            raise
        except Exception as error:  # noqa: BLE001 - NVMLError and what the bindings raise for an older driver
            raise ProbeError(f"NVML: {what}: {type(error).__name__}: {error}; expected a value") from None


def _text(value: object) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
