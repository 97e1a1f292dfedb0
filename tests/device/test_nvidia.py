"""nvidia-smi and NVML."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvbudget.device.model import DeviceHolder, ProbeError
from pytest_kvbudget.device.nvidia_smi import NvidiaSmiProbe, parse_apps, parse_gpus
from pytest_kvbudget.device.nvml import NvmlProbe
from tests.device.tools import Tools, recorded

GPUS = "--query-gpu=index,uuid,memory.total,memory.used,memory.free --format=csv,noheader,nounits"
APPS = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory --format=csv,noheader,nounits"
MIB = 2**20


def test_readings_are_mebibytes_and_keep_the_reserve_apart(tools: Tools) -> None:
    tools.install("nvidia-smi", {GPUS: recorded("nvidia-smi-gpus.csv")})
    idle, busy = NvidiaSmiProbe(["0", "GPU-9f8e7d6c"]).read()
    assert (idle.total_bytes, idle.used_bytes, idle.free_bytes) == (81_559 * MIB, 0, 81_004 * MIB)
    assert idle.reserved_bytes == 555 * MIB
    assert (busy.device, busy.used_bytes, busy.free_bytes) == ("GPU-9f8e7d6c", 70_213 * MIB, 10_791 * MIB)


def test_holders_are_those_of_the_device(tools: Tools) -> None:
    tools.install("nvidia-smi", {GPUS: recorded("nvidia-smi-gpus.csv"), APPS: recorded("nvidia-smi-apps.csv")})
    assert NvidiaSmiProbe(["1", "0"]).holders() == (
        (
            DeviceHolder(pid=4211, used_bytes=70_144 * MIB, name="VLLM::Worker_TP0"),
            DeviceHolder(pid=977, used_bytes=None, name="/usr/bin/python3"),
        ),
        (),
    )


@pytest.mark.parametrize("device", ["2", "GPU-", "GPU-x", "cpu", ""])
def test_unknown_or_ambiguous_device_is_named_with_what_there_is(tools: Tools, device: str) -> None:
    tools.install("nvidia-smi", {GPUS: recorded("nvidia-smi-gpus.csv")})
    with pytest.raises(ProbeError, match=r"no device .*; expected one of 0 \(GPU-5a1c2b3d.*\), 1 \(GPU-9f8e7d6c"):
        NvidiaSmiProbe([device]).read()


@pytest.mark.parametrize(
    ("output", "match"),
    [
        ("", "names no GPU"),
        ("No devices were found\n", "expected index, uuid"),
        ("0, GPU-a, [N/A], [N/A], [N/A]\n", r"memory.total shows '\[N/A\]'"),
        ("0, GPU-a, 81559, 0\n", "expected index, uuid"),
        ("0, GPU-a, 100, 90, 90\n", "expected parts of a total"),
        ("0, GPU-a, 0, 0, 0\n", "expected part of a total"),
        ("x" * 200_000, "printed no CSV"),
    ],
)
def test_what_is_no_reading(tools: Tools, output: str, match: str) -> None:
    tools.install("nvidia-smi", {GPUS: output})
    with pytest.raises(ProbeError, match=match):
        NvidiaSmiProbe(["0"]).read()


def test_driver_failure_is_told(tools: Tools) -> None:
    tools.script("nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    with pytest.raises(ProbeError, match="status 18 and said 'Failed to initialize NVML"):
        NvidiaSmiProbe(["0"]).read()


@given(st.text(max_size=60))
def test_any_text_gives_readings_or_an_error(text: str) -> None:
    for parse in (parse_gpus, parse_apps):
        try:
            parse(text)
        except ProbeError:
            continue


class FakeNvml:
    """The few calls of nvidia-ml-py that the probe makes, for two GPUs."""

    nvmlMemory_v2 = 33_554_472  # noqa: N815 - its name there

    def __init__(self, **memory: Any) -> None:
        self.memory = memory
        self.versions: list[object] = []

    def nvmlInit(self) -> None:  # noqa: N802
        return None

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:  # noqa: N802
        return number

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:  # noqa: N802
        return b"GPU-" + bytes([97 + handle])

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: object = None) -> object:  # noqa: N802
        self.versions.append((handle, version))
        if not self.memory:
            raise RuntimeError("GPU is lost")
        return SimpleNamespace(**self.memory)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[object]:  # noqa: N802
        return [SimpleNamespace(pid=7 + handle, usedGpuMemory=None)]


def nvml(monkeypatch: pytest.MonkeyPatch, fake: object) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake)


def test_nvml_takes_the_figures_that_keep_the_reserve_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml(total=81_559 * MIB, used=0, reserved=555 * MIB, free=81_004 * MIB)
    nvml(monkeypatch, fake)
    probe = NvmlProbe(["GPU-b"])
    (reading,) = probe.read()
    assert (reading.device, reading.free_bytes, reading.source) == ("GPU-b", 81_004 * MIB, "nvml")
    assert fake.versions == [(1, 33_554_472)]
    assert probe.holders() == ((DeviceHolder(pid=8),),)


def test_nvml_error_and_absence_are_probe_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(monkeypatch, FakeNvml())
    with pytest.raises(ProbeError, match="GPU 0 memory: RuntimeError: GPU is lost"):
        NvmlProbe(["0"]).read()
    with pytest.raises(ProbeError, match="no device '2'"):
        NvmlProbe(["2"])
    nvml(monkeypatch, None)
    with pytest.raises(ProbeError, match="expected the package nvidia-ml-py"):
        NvmlProbe(["0"])
