"""Choosing a source of device memory: the best that answers, why, and never later than its deadline."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pytest_kvbudget.device.model import DeviceHolder, DeviceMemory, ProbeError
from pytest_kvbudget.device.probes import Choice, choose, detect, within
from tests.device.test_neuron import tree
from tests.device.tools import Tools, recorded

R9700_TOTAL = 34_208_743_424


def cards(root: Path, addresses: dict[str, tuple[str, int]]) -> Path:
    """A sysfs root with R9700 cards (name, PCI address, bytes used), each with a render node."""
    (root / "class" / "drm").mkdir(parents=True)
    for number, (name, (address, used)) in enumerate(addresses.items()):
        device = root / "devices" / "pci" / address
        (device / "drm" / f"renderD{128 + number}").mkdir(parents=True)
        (device / "vendor").write_text("0x1002\n")
        (device / "mem_info_vram_total").write_text(f"{R9700_TOTAL}\n")
        (device / "mem_info_vram_used").write_text(f"{used}\n")
        (root / "class" / "drm" / name).mkdir()
        (root / "class" / "drm" / name / "device").symlink_to(device)
    return root


TWO = {"card1": ("0000:03:00.0", 111), "card2": ("0000:c3:00.0", 222)}


def test_amd_numbers_are_hip_ordinals_where_amd_smi_tells(tmp_path: Path, tools: Tools) -> None:
    tools.install("amd-smi", {"list -e --json": recorded("amd-smi-list.json")})
    root = cards(tmp_path / "sys", TWO)
    choice = choose("amd", ["0", "1", "card1"], sysfs=root, tools=True)
    # HIP's 0 is at c3, its 1 at 03.
    assert [reading.used_bytes for reading in choice.read()] == [222, 111, 111]
    assert {reading.limits for reading in choice.read()} == {""}
    assert (choice.source, choice.reason) == ("sysfs", "sysfs answered")
    with pytest.raises(ProbeError, match="no AMD card '2'"):
        choose("amd", ["2"], sysfs=root, tools=True)


def test_amd_order_that_was_not_checked_is_said(tmp_path: Path) -> None:
    choice = choose("amd", ["0"], sysfs=cards(tmp_path, TWO))
    (reading,) = choice.read()
    assert reading.used_bytes == 111
    assert "not checked" in reading.limits


def test_integrated_gpu_is_no_device_beside_real_cards(tmp_path: Path) -> None:
    root = cards(tmp_path, {"card0": ("0000:74:00.0", 17), **TWO})
    (root / "devices" / "pci" / "0000:74:00.0" / "mem_info_vram_total").write_text(f"{512 * 2**20}\n")
    assert [reading.used_bytes for reading in choose("amd", ["0", "1"], sysfs=root).read()] == [111, 222]
    with pytest.raises(ProbeError, match=r"expected one of 0 \(card1\), 1 \(card2\)"):
        choose("amd", ["2"], sysfs=root)


def test_amd_holders_come_from_the_compute_driver(tmp_path: Path) -> None:
    root = cards(tmp_path, TWO)
    kfd = root / "class" / "kfd" / "kfd"
    for node, (gpu, minor) in enumerate(
        [("0", ""), ("51000", "drm_render_minor 128\n"), ("64000", "drm_render_minor 129\n")]
    ):
        folder = kfd / "topology" / "nodes" / str(node)
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{gpu}\n")
        (folder / "properties").write_text(f"cpu_cores_count 16\n{minor}")
    for pid, sizes in (("4211", (5, 0)), ("977", (9, 7))):
        (kfd / "proc" / pid).mkdir(parents=True)
        (kfd / "proc" / pid / "vram_51000").write_text(f"{sizes[0]}\n")
        (kfd / "proc" / pid / "vram_64000").write_text(f"{sizes[1]}\n")
    first, second = choose("amd", ["0", "1"], sysfs=root).read_with_holders()
    assert [(holder.pid, holder.used_bytes) for holder in first.holders] == [(977, 9), (4211, 5)]
    assert [(holder.pid, holder.used_bytes) for holder in second.holders] == [(977, 7)]


def test_amd_falls_back_and_says_why(tmp_path: Path, tools: Tools) -> None:
    tools.install("amd-smi", {"metric -m --json": recorded("amd-smi-metric-na.json")})
    tools.install("rocm-smi", {"--showmeminfo vram --json": recorded("rocm-smi-vram.json")})
    choice = choose("amd", ["0"], sysfs=tmp_path, tools=True)
    assert choice.source == "rocm-smi"
    assert choice.read()[0].used_bytes == 27_856_896
    assert "sysfs: " in choice.reason
    assert "shows 'N/A'" in choice.reason
    assert choice.max_hz == 1


def test_another_tree_is_never_answered_by_this_host_s_tools(tmp_path: Path, tools: Tools) -> None:
    tools.install("rocm-smi", {"--showmeminfo vram --json": recorded("rocm-smi-vram.json")})
    with pytest.raises(ProbeError) as raised:
        choose("amd", ["0"], sysfs=tmp_path)
    assert "rocm-smi" not in str(raised.value)


def test_nothing_that_answers_is_an_error_with_every_reason(tmp_path: Path, tools: Tools) -> None:
    tools.script("nvidia-smi", "echo 'No devices were found'; exit 6")
    tools.hang("neuron-monitor")
    with pytest.raises(ProbeError, match=r"nvml: .*; nvidia-smi: .*status 6 and said 'No devices were found'"):
        choose("nvidia", ["0"])
    with pytest.raises(ProbeError, match=r"neuron-sysfs: .*neuron-monitor: .*no record within 0\.3 s"):
        choose("neuron", ["0"], sysfs=tmp_path, tools=True, timeout_s=0.3)


def test_nvidia_by_nvidia_smi_with_holders(tools: Tools) -> None:
    tools.install(
        "nvidia-smi",
        {
            "--query-gpu=index,uuid,memory.total,memory.used,memory.free --format=csv,noheader,nounits": recorded(
                "nvidia-smi-gpus.csv"
            ),
            "--query-compute-apps=gpu_uuid,pid,process_name,used_memory --format=csv,noheader,nounits": recorded(
                "nvidia-smi-apps.csv"
            ),
        },
    )
    (reading,) = choose("nvidia", ["1"]).read_with_holders()
    assert (reading.source, reading.holders[0].pid) == ("nvidia-smi", 4211)


def test_neuron_by_sysfs_with_holders_of_neuron_ls(tmp_path: Path, tools: Tools) -> None:
    root = tree(tmp_path / "sys", name="Trainium2", cores=8)
    choice = choose("neuron", ["1"], sysfs=root, tools=True)
    (reading,) = choice.read_with_holders()
    assert (reading.used_bytes, reading.holders) == (3 + 4, ())
    assert "holders unknown: neuron-ls" in reading.limits
    tools.install("neuron-ls", {"-j": recorded("neuron-ls-trn2.json")})
    assert choice.read_with_holders()[0].holders == (
        DeviceHolder(pid=113_985, name="neuron-bench exec --run-as-cc-neff --..."),
    )


def test_neuron_falls_back_to_the_monitor_and_closes_it(tmp_path: Path, tools: Tools) -> None:
    record = tools.folder / "record"
    record.write_text(recorded("neuron-monitor-trn2.jsonl"))
    tools.script("neuron-monitor", f"cat {record}; exec sleep 600")
    choice = choose("neuron", ["0"], sysfs=tmp_path, tools=True)
    assert choice.source == "neuron-monitor"
    assert [holder.pid for holder in choice.read_with_holders()[0].holders] == [5001]
    choice.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvbudget-neuron-monitor"]


def test_host_is_its_group_or_all_of_it() -> None:
    assert choose("host", ["host"]).read()[0].source == "meminfo"
    choice = choose("host", ["host"], pid=2**22 + 1)
    assert choice.source == "meminfo"
    assert "expected a living process" in choice.reason


def test_kind_of_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert detect(cards(tmp_path / "amd", TWO)) == "amd"
    assert detect(tree(tmp_path / "neuron", name="Trainium2", cores=8)) == "neuron"
    if not Path("/proc/driver/nvidia/version").exists():
        assert detect(tmp_path) == "host"


def test_a_source_that_hangs_in_the_driver_is_late() -> None:
    release = threading.Event()

    class Hanging:
        def read(self) -> tuple[DeviceMemory, ...]:
            release.wait(30)
            return ()

    choice = Choice("sysfs", Hanging(), reason="", max_hz=1, timeout_s=0.05)
    with pytest.raises(ProbeError, match=r"sysfs: reading device memory did not return within 0\.125 s"):
        choice.read()
    release.set()


def test_within_hands_errors_and_values_on() -> None:
    assert within(10, lambda: 5, "it") == 5
    with pytest.raises(ZeroDivisionError):
        within(10, lambda: 1 // 0, "it")


def test_card_that_comes_back_under_another_number_is_found_again(tmp_path: Path) -> None:
    root = cards(tmp_path, TWO)
    choice = choose("amd", ["0"], sysfs=root)
    (root / "class" / "drm" / "card1").rename(tmp_path / "gone")
    used = root / "devices" / "pci" / "0000:03:00.0" / "mem_info_vram_used"
    with pytest.raises(ProbeError, match="cannot be read"):
        choice.read()
    (tmp_path / "gone").rename(root / "class" / "drm" / "card0")
    used.write_text("333\n")
    assert choice.read()[0].used_bytes == 333
