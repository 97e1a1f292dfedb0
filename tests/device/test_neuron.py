"""Neuron: sysfs before and after driver 2.31, neuron-monitor, neuron-ls, and which cores share a stack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvbudget.device.model import DeviceHolder, ProbeError
from pytest_kvbudget.device.neuron import geometry_of, platform_of
from pytest_kvbudget.device.neuron_ls import parse_devices, read_devices
from pytest_kvbudget.device.neuron_monitor import NeuronMonitorProbe, parse_record
from pytest_kvbudget.device.neuron_sysfs import NeuronSysfsProbe
from tests.device.tools import Tools, recorded

TRN2_STACK = 25_769_803_776
TRN3_STACK = 38_654_705_664
GIB = 2**30
BEFORE_2_31 = "neuron_core{core}/stats/memory_usage/device_mem"
MOVED = "info/cores/core{core}/stats/memory/device_mem"
"""Not where driver 2.31 has them - nothing public says that - but somewhere else."""


def tree(
    root: Path, *, name: str, cores: int, devices: int = 1, layout: str = BEFORE_2_31, categories: bool = False
) -> Path:
    """A Neuron device tree whose physical core C of device D uses D * 100 + C + 1 bytes."""
    for device in range(devices):
        folder = root / "devices" / "virtual" / "neuron_device" / f"neuron{device}"
        (folder / "info" / "architecture").mkdir(parents=True)
        (folder / "info" / "architecture" / "device_name").write_text(f"{name}\n")
        (folder / "stats" / "memory_usage" / "host_mem" / "tensors").mkdir(parents=True)
        for core in range(cores):
            counter = folder / layout.format(core=core)
            used = device * 100 + core + 1
            parts = {"tensors": used - 1, "dma_rings": 1}
            for category, size in parts.items():
                (counter / category).mkdir(parents=True)
                (counter / category / "total").write_text(f"{size}\n")
                (counter / category / "present").write_text("7\n")
                (counter / category / "peak").write_text("999\n")
            if not categories:
                (counter / "total").write_text(f"{used}\n")
                (counter / "present").write_text("5\n")
        (folder / "subsystem").symlink_to(root)
    return root


@pytest.mark.parametrize("layout", [BEFORE_2_31, MOVED])
@pytest.mark.parametrize("categories", [False, True])
def test_two_physical_cores_of_a_logical_one_are_summed(tmp_path: Path, layout: str, categories: bool) -> None:
    root = tree(tmp_path, name="Trainium2", cores=8, devices=2, layout=layout, categories=categories)
    readings = NeuronSysfsProbe(["0", "3", "4"], root=root).read()
    assert [reading.used_bytes for reading in readings] == [1 + 2, 7 + 8, 101 + 102]
    assert {reading.total_bytes for reading in readings} == {TRN2_STACK}
    assert readings[0].source == "neuron-sysfs"


def test_siblings_at_lnc_1_have_one_stack(tmp_path: Path) -> None:
    root = tree(tmp_path, name="Trainium3", cores=8)
    first, second, third = NeuronSysfsProbe(["0", "1", "2"], root=root, lnc=1).read()
    assert first.used_bytes == second.used_bytes == 1 + 2
    assert third.used_bytes == 3 + 4
    assert first.total_bytes == TRN3_STACK
    assert "one HBM stack of cores 0, 1" in second.limits
    assert "one HBM stack of cores 2, 3" in third.limits


def test_a_core_of_trainium_1_has_a_stack_of_its_own(tmp_path: Path) -> None:
    root = tree(tmp_path, name="Trainium1", cores=2)
    (reading,) = NeuronSysfsProbe(["1"], root=root).read()
    assert (reading.used_bytes, reading.total_bytes) == (2, 16 * GIB)


def test_driver_that_moved_its_counters_away_is_named(tmp_path: Path) -> None:
    root = tree(tmp_path, name="Trainium2", cores=8, layout="neuron_core{core}/hbm/gone")
    (root / "module" / "neuron").mkdir(parents=True)
    (root / "module" / "neuron" / "version").write_text("2.31.12.0\n")
    with pytest.raises(ProbeError) as raised:
        NeuronSysfsProbe(["0"], root=root).read()
    assert "no device_mem counter of any core" in str(raised.value)
    assert "Neuron driver 2.31.12.0 may have moved it" in str(raised.value)
    assert "neuron_core0" in str(raised.value)


def test_no_driver_no_device_no_core(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="no Neuron device; expected neuron0"):
        NeuronSysfsProbe(["0"], root=tmp_path).read()
    root = tree(tmp_path, name="Trainium2", cores=8)
    with pytest.raises(ProbeError, match="core 4 is on neuron1, which is not there; expected one of 0"):
        NeuronSysfsProbe(["4"], root=root).read()
    with pytest.raises(ProbeError, match="'nc0' is no logical core"):
        NeuronSysfsProbe(["nc0"], root=root).read()
    with pytest.raises(ProbeError, match="NEURON_LOGICAL_NC_CONFIG is 3"):
        NeuronSysfsProbe(["0"], root=root, lnc=3).read()


@pytest.mark.parametrize("text", ["", "N/A", "-1", "18446744073709551000", str(TRN2_STACK + 1)])
def test_garbled_counter_is_an_error_and_the_next_reading_is_good_again(tmp_path: Path, text: str) -> None:
    root = tree(tmp_path, name="Trainium2", cores=8)
    probe = NeuronSysfsProbe(["0"], root=root)
    probe.read()
    counter = next(root.rglob("neuron_core1/**/device_mem/total"))
    counter.write_text(text)
    with pytest.raises(ProbeError, match="expected"):
        probe.read()
    counter.write_text("40\n")
    (reading,) = probe.read()
    assert reading.used_bytes == 1 + 40


def test_unknown_platform_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="called 'Trainium9'"):
        NeuronSysfsProbe(["0"], root=tree(tmp_path, name="Trainium9", cores=8)).read()
    assert platform_of("trainium2") == platform_of("Trainium2\n") == "trn2"


@given(st.sampled_from([("trn1", 2, 1), ("trn2", 8, 1), ("trn2", 8, 2), ("trn3", 8, 2), ("inf2", 2, 1)]), st.data())
def test_every_physical_core_belongs_to_one_stack(platform: tuple[str, int, int], data: st.DataObject) -> None:
    name, physical, lnc = platform
    geometry = geometry_of(name, physical_cores=physical, lnc=lnc)
    core = data.draw(st.integers(0, 200))
    device, cores = geometry.locate(core)
    assert device == core * lnc // physical
    assert set(range(core * lnc % physical, core * lnc % physical + lnc)) <= set(cores)
    assert all(geometry.locate(sibling) == (device, cores) for sibling in geometry.siblings(core))
    assert len(geometry.siblings(core)) * lnc == len(cores)


def test_neuron_ls_lists_devices_cores_and_holders(tools: Tools) -> None:
    tools.install("neuron-ls", {"-j": recorded("neuron-ls-trn2.json")})
    first, last = read_devices()
    assert (first.number, first.memory_bytes, first.lnc, first.cores) == (0, 103_079_215_104, 2, (0, 1, 2, 3))
    assert first.holders == (DeviceHolder(pid=113_985, name="neuron-bench exec --run-as-cc-neff --..."),)
    assert (last.number, last.cores, last.holders, last.numa_node) == (15, (60, 61, 62, 63), (), 1)


def test_neuron_ls_of_trainium_1_has_no_lnc_no_numa_and_no_processes() -> None:
    (device,) = parse_devices(recorded("neuron-ls-trn1.json"))
    assert (device.lnc, device.numa_node, device.holders, device.memory_bytes) == (1, None, (), 32 * GIB)


def test_neuron_ls_without_a_device_is_an_error(tools: Tools) -> None:
    tools.script("neuron-ls", "echo 'level=error msg=\"no neuron device found\"' >&2; exit 1")
    with pytest.raises(ProbeError, match=r"status 1 and said .*no neuron device found"):
        read_devices()
    with pytest.raises(ProbeError, match="names no device"):
        parse_devices("[]")


MONITOR_USED = 193_986_816 + 176_285_056 + 20_971_520


@pytest.fixture
def stream(tools: Tools) -> Path:
    return tools.stream("neuron-monitor")


def write(pipe: IO[str], line: str) -> None:
    pipe.write(line.strip() + "\n")
    pipe.flush()


def test_monitor_streams_memory_and_holders(stream: Path) -> None:
    probe = NeuronMonitorProbe(["0", "1", "2"])
    probe_reading = _in_thread(probe)
    with stream.open("w") as pipe:
        write(pipe, recorded("neuron-monitor-trn2.jsonl"))
        first, second, third = probe_reading()
        assert (first.total_bytes, first.used_bytes) == (TRN2_STACK, MONITOR_USED)
        assert first.holders == second.holders == (DeviceHolder(pid=5001, used_bytes=MONITOR_USED, name="5001"),)
        assert (third.used_bytes, third.holders) == (0, ())  # no runtime has anything there
        assert "reads low" in first.limits
        probe.close()


def test_monitor_that_ends_is_an_error_and_is_started_again(stream: Path) -> None:
    probe = NeuronMonitorProbe(["0"])
    for _ in range(2):
        reading = _in_thread(probe)
        stream.open("w").close()
        with pytest.raises(ProbeError, match=r"neuron-monitor: ended \(status"):
            reading()
    probe.close()
    reading = _in_thread(probe)
    with stream.open("w") as pipe:
        write(pipe, recorded("neuron-monitor-idle.jsonl"))
        assert reading()[0].used_bytes == 0
        probe.close()


def test_monitor_that_says_nothing_is_late(tools: Tools) -> None:
    tools.script("neuron-monitor", "exec sleep 600")
    probe = NeuronMonitorProbe(["0"], timeout_s=0.2)
    with pytest.raises(ProbeError, match=r"no record within 0\.2 s"):
        probe.read()
    probe.close()


def test_monitor_that_stalls_gives_no_old_value(tools: Tools) -> None:
    record = tools.folder / "record"
    record.write_text(recorded("neuron-monitor-idle.jsonl"))
    tools.script("neuron-monitor", f"cat {record}; exec sleep 600")
    probe = NeuronMonitorProbe(["0"], timeout_s=5.0, stale_s=3600)
    assert probe.read()[0].used_bytes == 0
    probe._stale_s, probe._timeout_s = 0.0, 0.1
    with pytest.raises(ProbeError, match="no record"):
        probe.read()
    probe.close()


def test_monitor_at_lnc_1_sums_siblings() -> None:
    document = json.loads(recorded("neuron-monitor-trn2.jsonl"))
    document["neuron_hardware_info"] |= {"neuroncore_per_device_count": 8, "logical_neuroncore_config": 1}
    record = parse_record(json.dumps(document))
    assert record.geometry.siblings(1) == (0, 1)
    assert record.geometry.stack_bytes == TRN2_STACK
    assert set(record.used) == {0, 1}


def change(path: str, value: object) -> str:
    """The recorded line with one value replaced."""
    document: Any = json.loads(recorded("neuron-monitor-trn2.jsonl"))
    part = document
    *parents, last = path.split("/")
    for name in parents:
        part = part[int(name) if name.isdecimal() and isinstance(part, list) else name]
    part[last] = value
    return json.dumps(document)


MEMORY = "neuron_runtime_data/0/report/memory_used"


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("garbage", "expected a line of JSON"),
        ("[]", "expected an object"),
        (change("neuron_runtime_data/0/error", "runtime is gone"), "runtime 5001 reports 'runtime is gone'"),
        (change(f"{MEMORY}/error", "cannot read"), "memory_used reports 'cannot read'"),
        (change("neuron_hardware_info/error", "driver not running"), "reports 'driver not running'"),
        (change("neuron_hardware_info/neuron_device_memory_size", "N/A"), "memory_size shows 'N/A'"),
        (change("neuron_hardware_info/neuroncore_per_device_count", 0), "shows 0 cores"),
        (change(f"{MEMORY}/neuron_runtime_used_bytes/usage_breakdown", None), "usage_breakdown is NoneType"),
        (change(f"{MEMORY}/neuron_runtime_used_bytes/usage_breakdown/neuroncore_memory_usage", {"0": {"a": -1}}), "-1"),
        ('{"neuron_hardware_info": null}', "neuron_hardware_info is NoneType"),
    ],
)
def test_record_that_is_no_reading(line: str, match: str) -> None:
    with pytest.raises(ProbeError, match=match):
        parse_record(line)


@given(st.text(max_size=50))
def test_any_line_is_a_record_or_an_error(line: str) -> None:
    with pytest.raises(ProbeError):
        parse_record(line)


def _in_thread(probe: NeuronMonitorProbe) -> Any:
    """Start a reading and return what waits for it: a FIFO opens only when both ends are there."""
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - only here

    pool = ThreadPoolExecutor(1)
    future = pool.submit(probe.read)

    def result() -> Any:
        try:
            return future.result(20)
        finally:
            pool.shutdown()

    return result
