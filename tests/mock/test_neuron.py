"""The Neuron dialect as processes: cores and stacks in sysfs, cores that are taken, the compile cache, LNC."""

from __future__ import annotations

import pytest
import requests
from msgspec.structs import replace

from pytest_kvbudget.device.neuron_sysfs import NeuronSysfsProbe
from pytest_kvbudget.mock.spec import ColdSeconds, Faults, PhaseSeconds
from pytest_kvbudget.units import GIB, MIB

from .harness import Host, until
from .rehearsing import CORE, HEADROOM, WINDOW, core

# weights 5 GiB, runtime 0.5, KV cache 15 (24 less weights and headroom), scratchpad 1, two programs, activation
SERVING = (5 + 15 + 1) * GIB + 512 * MIB + 2 * 4 * MIB + 64 * MIB
QUICK_END = PhaseSeconds(linger=0.05)


def used(host: Host, *cores: int, lnc: int = 2) -> list[int]:
    probe = NeuronSysfsProbe([str(core) for core in cores], root=host.tree, lnc=lnc)
    return [reading.used_bytes for reading in probe.read()]


def category(host: Host, physical: int, name: str, what: str = "total") -> int:
    folder = f"devices/virtual/neuron_device/neuron0/neuron_core{physical}/stats/memory_usage/device_mem"
    return int((host.tree / folder / name / what).read_text(encoding="ascii"))


def test_probe_of_a_real_device_reads_the_tree(host: Host) -> None:
    engine = host.start(replace(CORE, ranks=2, seconds=QUICK_END), *WINDOW, env=HEADROOM).wait_ready()
    assert used(host, 0, 1, 2) == [SERVING, SERVING, 0]
    (reading,) = NeuronSysfsProbe(["0"], root=host.tree).read()
    assert reading.total_bytes == 24 * GIB
    # everything is booked on the first physical core of a logical one
    assert category(host, 0, "tensors") == 20 * GIB + 64 * MIB
    assert category(host, 0, "model_code") == 8 * MIB
    assert category(host, 0, "model_shared_scratchpad") == 1 * GIB
    assert category(host, 0, "runtime_memory") == 512 * MIB
    assert category(host, 1, "tensors") == 0
    for rank in (0, 1):
        worker = engine.wait_titled(f"VLLM::Worker_TP{rank}")
        assert f"(Worker_TP{rank} pid={worker.pid}) 20" in engine.log()
    metrics = requests.get(engine.url("/metrics"), timeout=5).text
    assert f'vllm_neuron:model_load_size_bytes{{engine="0",model_name="sim"}} {10.0 * GIB}' in metrics
    engine.process.terminate()
    engine.wait_exit()
    until("the memory back", lambda: used(host, 0, 1) == [0, 0])
    assert category(host, 0, "tensors", "peak") == 20 * GIB + 64 * MIB


def test_core_belongs_to_one_process(host: Host) -> None:
    first = host.start(replace(CORE, seconds=QUICK_END), *WINDOW).wait_ready()
    second = host.start(CORE, *WINDOW)
    assert second.wait_exit() == 1
    assert "Logical Neuron Core(s) not available - Requested:1 Available:0" in second.log()
    assert "RuntimeError: The PyTorch Neuron Runtime could not be initialized" in second.log()
    host.start(CORE, *WINDOW, env={"NEURON_VISIBLE_DEVICES": "1-3"}).wait_ready()
    first.process.terminate()
    first.wait_exit()
    host.start(CORE, *WINDOW).wait_ready()


def test_leaked_worker_keeps_its_core(host: Host) -> None:
    engine = host.start(replace(CORE, seconds=QUICK_END, faults=Faults(leave_orphan=True)), *WINDOW).wait_ready()
    engine.process.terminate()
    engine.wait_exit()
    assert host.start(CORE, *WINDOW).wait_exit() == 1
    assert used(host, 0)[0] > 5 * GIB


def test_siblings_at_lnc_1_share_a_stack(host: Host) -> None:
    spec = replace(CORE, ranks=2, weights=2 * GIB, seconds=QUICK_END)
    env = {"NEURON_LOGICAL_NC_CONFIG": "1", "VLLM_NEURON_RESERVED_HEADROOM_GIB": "4"}
    host.start(spec, *WINDOW, env=env).wait_ready()
    # each: 2 + 6 (12 - 2 - 4) + 1 GiB and what else CORE takes
    each = 9 * GIB + 512 * MIB + 8 * MIB + 64 * MIB
    assert used(host, 0, 1, 2, lnc=1) == [2 * each, 2 * each, 0]


def test_siblings_of_a_release_that_divides_nothing_do_not_fit(host: Host) -> None:
    spec = replace(CORE, ranks=2, weights=2 * GIB, release="0.24")
    env = {"NEURON_LOGICAL_NC_CONFIG": "1", "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION": "0.6"}
    engine = host.start(spec, *WINDOW, env=env)
    assert engine.wait_exit() == 1
    assert "RuntimeError: nrt_tensor_allocate status=4" in engine.log()
    assert "LNC size is 1. Neuron Cores using this HBM: NC 0 and NC 1" in engine.log()


def test_headroom_is_a_compile_key(host: Host) -> None:
    spec = replace(CORE, seconds=PhaseSeconds(linger=0.05, cold=ColdSeconds(compile=0.02)))

    def compiled(headroom: str) -> bool:
        engine = host.start(spec, *WINDOW, env={"VLLM_NEURON_RESERVED_HEADROOM_GIB": headroom}).wait_ready()
        engine.process.terminate()
        engine.wait_exit()
        assert ("Compiled HLO" in engine.log()) is ("(compilation: 0.02 s)" in engine.log())
        return "Compiled HLO" in engine.log()

    assert [compiled(headroom) for headroom in ("4", "4", "5", "4")] == [True, False, True, False]


@pytest.mark.parametrize(("missing", "cold"), [(0, False), (3 * MIB, True)])
def test_compiling_without_a_device_fills_the_cache_for_one_of_the_same_size(
    host: Host, missing: int, cold: bool
) -> None:
    spec = replace(CORE, device_total=24 * GIB - missing, seconds=QUICK_END)
    env = {"VLLM_NEURON_CPU_COMPILE": "1", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}
    first = host.start(spec, *WINDOW, env=env | HEADROOM)
    assert first.wait_exit() == 1
    assert "CPUCompilationComplete" in first.log()
    assert used(host, 0) == [0]
    assert ("Compiled HLO" in host.start(spec, *WINDOW, env=HEADROOM).wait_ready().log()) is cold


def test_cache_miss_is_an_error_where_compiling_is_forbidden(host: Host) -> None:
    env = {"VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1"}
    engine = host.start(CORE, *WINDOW, env=env)
    assert engine.wait_exit() == 1
    assert "VLLM_NEURON_DISABLE_WARMUP_COMPILE" in engine.log()


def test_large_request_kills_a_booted_engine(host: Host) -> None:
    spec = replace(CORE, request_peak_per_token=4 * MIB, seconds=QUICK_END)
    engine = host.start(spec, *WINDOW, env=HEADROOM).wait_ready()
    # of 24 GiB 2,488 MiB are left
    assert engine.complete(10, 612).status_code == 200
    assert used(host, 0) == [24 * GIB]
    assert engine.complete(10, 613).status_code == 500
    assert engine.wait_exit() == 0
    assert "Failed to allocate DEVICE memory (4194304 bytes): memory allocation failed (ret=-12)" in engine.log()
    assert "EngineCore encountered a fatal error." in engine.log()


def test_headroom_note_follows_allocation_failures_of_2_33_only(host: Host) -> None:
    for release, noted in (("2.33", True), ("0.24", False)):
        engine = host.start(replace(core(scratch_base=6 * GIB), release=release), *WINDOW, env=HEADROOM)
        if noted:
            assert engine.wait_exit() == 1
        else:
            engine.wait_ready()
        assert ("increase it in steps of 1 GiB" in engine.log()) is noted


def test_override_of_blocks_defeats_the_budget(host: Host) -> None:
    flags = (*WINDOW, "--num-gpu-blocks-override", "5000", "--block-size", "32")
    log = host.start(CORE, *flags).wait_ready().log()
    assert "Overriding num_gpu_blocks=3391 with num_gpu_blocks_override=5000" in log
    assert "GPU KV cache size: 160,000 tokens\n" in log


@pytest.mark.parametrize(("version", "release"), [("0.21.0", "0.21"), ("0.24.0", "0.24"), ("0.27.1", "2.33")])
def test_version_is_the_releases(host: Host, version: str, release: str) -> None:
    engine = host.start(replace(CORE, release=release), "--max-model-len", "262145")
    engine.wait_exit()
    assert f"version {version}" in engine.log()
    assert "Platform plugin neuron is activated" in engine.log()
