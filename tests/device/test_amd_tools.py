"""rocm-smi and amd-smi: every recorded format, and what is no reading."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvbudget.device.amd import AmdGpu, discrete, pick
from pytest_kvbudget.device.amd_smi import AmdSmiProbe, Vram, parse_list, parse_metric, parse_processes, read_order
from pytest_kvbudget.device.model import DeviceHolder, ProbeError
from pytest_kvbudget.device.rocm_smi import RocmSmiProbe, parse_memory
from tests.device.tools import Tools, recorded

R9700_TOTAL = 34_208_743_424
METRIC = "metric -m --json"
LIST = "list -e --json"
PROCESS = "process --json"
MEMORY = "--showmeminfo vram --json"
PIDS = "--showpids --json"


@pytest.mark.parametrize("name", ["rocm-smi-vram.json", "rocm-smi-vram.csv", "rocm-smi-vram.txt"])
def test_rocm_smi_formats(tools: Tools, name: str) -> None:
    tools.install("rocm-smi", {MEMORY: recorded(name)})
    (reading,) = RocmSmiProbe(["0"]).read()
    assert (reading.total_bytes, reading.used_bytes) == (R9700_TOTAL, 27_856_896)
    assert (reading.device, reading.source) == ("0", "rocm-smi")


def test_rocm_smi_warns_before_its_json_and_counts_an_integrated_gpu(tools: Tools) -> None:
    tools.install("rocm-smi", {MEMORY: recorded("rocm-smi-vram-warned.json"), PIDS: recorded("rocm-smi-pids.json")})
    probe = RocmSmiProbe(["1", "0"])
    second, first = probe.read()
    assert (second.device, second.used_bytes) == ("1", 33_000_000_000)
    assert (first.device, first.used_bytes) == ("0", 27_856_896)
    assert "not checked" in first.limits
    unattributed = (DeviceHolder(pid=4211, name="VLLM::Worker_TP0, rank"), DeviceHolder(pid=977, name="python3"))
    assert probe.holders() == (unattributed, unattributed)
    with pytest.raises(ProbeError, match="no device '2'; expected one of 0, 1"):
        RocmSmiProbe(["2"]).read()


def test_rocm_smi_holders_of_a_single_gpu_have_their_bytes(tools: Tools) -> None:
    tools.install("rocm-smi", {MEMORY: recorded("rocm-smi-vram.json"), PIDS: recorded("rocm-smi-pids.json")})
    ((first, second),) = RocmSmiProbe(["0"]).holders()
    assert (first.pid, first.used_bytes) == (4211, 29_695_672_320)
    assert (second.pid, second.used_bytes) == (977, None)


@pytest.mark.parametrize(
    ("output", "match"),
    [
        ("WARNING: No JSON data to report\n", "expected JSON"),
        ('{"card0": {"VRAM Total Memory (B)": "N/A", "VRAM Total Used Memory (B)": "1"}}', "shows 'N/A'"),
        ('{"card0": {"VRAM Total Memory (B)": "34208743424"}}', "Used Memory .B. shows None"),
        ('{"card0": {"VRAM Total Memory (B)": "10", "VRAM Total Used Memory (B)": "18446744073709547520"}}', "shows"),
        ('{"card0": {"VRAM Total Memory (B)": "10", "VRAM Total Used Memory (B)": "11"}}', "11 bytes used"),
        ('{"card0": "N/A"}', "expected an object"),
        ('{"system": {}}', "expected card0"),
        ("[]", "expected an object"),
        ("GPU[0]\t\t: VRAM Total Used Memory (B): 27856896\n", "Total Memory .B. shows None"),
        ("device,VRAM Total Memory (B),VRAM Total Used Memory (B)\ncard0,34208743424\n", "shows None"),
        ("device,VRAM Total Memory (B),VRAM Total Used Memory (B)\ncard0," + "1" * 200_000, "printed no CSV"),
    ],
)
def test_what_rocm_smi_may_print_that_is_no_reading(tools: Tools, output: str, match: str) -> None:
    tools.install("rocm-smi", {MEMORY: output})
    with pytest.raises(ProbeError, match=match):
        RocmSmiProbe(["0"]).read()


def test_amd_smi_bare_list(tools: Tools) -> None:
    tools.install("amd-smi", {METRIC: recorded("amd-smi-metric-list.json")})
    (reading,) = AmdSmiProbe(["0"]).read()
    assert (reading.total_bytes, reading.used_bytes) == (R9700_TOTAL, 27 * 2**20)
    assert "not checked" in reading.limits  # this one refuses "list -e"


def test_amd_smi_of_rocm_7_with_hip_ordinals(tools: Tools) -> None:
    tools.install(
        "amd-smi",
        {
            METRIC: recorded("amd-smi-metric-gpu-data.json"),
            LIST: recorded("amd-smi-list.json"),
            PROCESS: recorded("amd-smi-process.json"),
        },
    )
    probe = AmdSmiProbe(["0", "1"])
    first, second = probe.read()
    # HIP's 0 is the tool's GPU 2, its 1 is GPU 1; GPU 0 is integrated and HIP does not see it.
    assert (first.device, first.used_bytes, second.device, second.used_bytes) == ("0", 27 * 2**20, "1", 28320 * 2**20)
    assert "not checked" not in first.limits
    assert probe.holders() == (
        (),
        (
            DeviceHolder(pid=4211, used_bytes=29_695_672_320, name="VLLM::Worker_TP0"),
            DeviceHolder(pid=977, used_bytes=None, name="N/A"),
        ),
    )
    with pytest.raises(ProbeError, match="no device '2'"):
        AmdSmiProbe(["2"]).read()


def test_amd_smi_order_names_addresses(tools: Tools) -> None:
    tools.install("amd-smi", {LIST: recorded("amd-smi-list.json")})
    assert read_order() == (
        AmdGpu(number=0, address="0000:74:00.0", hip=None),
        AmdGpu(number=1, address="0000:03:00.0", hip=1),
        AmdGpu(number=2, address="0000:c3:00.0", hip=0),
    )


def test_amd_smi_gpu_that_vanishes_is_an_error(tools: Tools) -> None:
    tools.install("amd-smi", {METRIC: recorded("amd-smi-metric-gpu-data.json"), LIST: recorded("amd-smi-list.json")})
    probe = AmdSmiProbe(["0"])
    probe.read()
    tools.install("amd-smi", {METRIC: recorded("amd-smi-metric-list.json")})
    with pytest.raises(ProbeError, match="gpu 2 is not there any more"):
        probe.read()
    (tools.folder / "amd-smi").unlink()
    with pytest.raises(ProbeError, match="cannot be run"):
        probe.read()


@pytest.mark.parametrize(
    "output",
    [
        recorded("amd-smi-metric-na.json"),
        '[{"gpu": 0, "mem_usage": "N/A"}]',
        '[{"gpu": 0}]',
        '[{"gpu": 0, "mem_usage": {"total_vram": {"value": "N/A", "unit": "MB"}, "used_vram": {"value": 1}}}]',
        '[{"gpu": "N/A"}]',
        "[]",
        '{"gpu_data": {}}',
        "Traceback (most recent call last):",
        '[{"gpu": 0, "mem_usage": {}}, {"gpu": 0, "mem_usage": {}}]',
    ],
)
def test_what_amd_smi_may_print_that_is_no_reading(tools: Tools, output: str) -> None:
    tools.install("amd-smi", {METRIC: output})
    with pytest.raises(ProbeError, match="amd-smi metric"):
        AmdSmiProbe(["0"]).read()


def test_hanging_amd_smi_ends_in_time(tools: Tools) -> None:
    tools.hang("amd-smi")
    with pytest.raises(ProbeError, match=r"did not end within 0\.2 s"):
        AmdSmiProbe(["0"], timeout_s=0.2).read()


def test_integrated_gpu_is_left_out_only_beside_a_real_card() -> None:
    assert discrete({0: 512 * 2**20, 1: R9700_TOTAL, 2: R9700_TOTAL // 4}) == (1, 2)
    assert discrete({0: 512 * 2**20}) == (0,)
    assert discrete({}) == ()


@given(st.dictionaries(st.integers(0, 20), st.integers(1, 2**40)))
def test_the_largest_card_is_never_left_out(totals: dict[int, int]) -> None:
    kept = discrete(totals)
    assert set(kept) <= set(totals)
    if totals:
        assert max(totals, key=lambda card: totals[card]) in kept


@pytest.mark.parametrize("device", ["", "-1", "²", "1.0", "card9"])
def test_device_that_is_none(device: str) -> None:
    with pytest.raises(ProbeError, match="expected one of 0, card0"):
        pick(device, ["a"], "smi", ["card0"])


values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["gpu", "mem_usage", "total_vram", "used_vram", "value", "unit"]), inner)
    ),
    max_leaves=12,
)


@given(values)
def test_any_json_gives_readings_or_an_error(document: Any) -> None:
    text = json.dumps(document)
    for parse in (parse_metric, parse_list, parse_processes, parse_memory):
        try:
            found = parse(text)
        except ProbeError:
            continue
        assert found


@given(st.integers(0, 2**39 // 2**20), st.integers(0, 2**20), st.sampled_from(["MB", "KB", "B", "GB"]))
def test_amd_smi_values_are_read_exactly(total: int, used: int, unit: str) -> None:
    factor = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}[unit]
    entry = {"gpu": 3, "mem_usage": {"total_vram": {"value": total, "unit": unit}, "used_vram": used}}
    assert parse_metric(json.dumps([entry])) == {3: Vram(total_bytes=total * factor, used_bytes=used)}


@given(st.integers(0, 2**50), st.integers(0, 2**50))
def test_rocm_smi_text_keeps_used_and_total_apart(total: int, used: int) -> None:
    text = f"GPU[4]\t\t: VRAM Total Used Memory (B): {used}\nGPU[4]\t\t: VRAM Total Memory (B): {total}\n"
    assert parse_memory(text) == {4: Vram(total_bytes=total, used_bytes=used)}
