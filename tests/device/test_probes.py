"""Memory probes on good and garbled trees."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvbudget.device.host import HostProbe, read_host
from pytest_kvbudget.device.model import ProbeError
from pytest_kvbudget.device.sysfs import AmdSysfsProbe

R9700_TOTAL = 34_208_743_424
"""Of a Radeon AI PRO R9700: 31.859375 GiB."""
R9700_IDLE = 27_856_896


def add_card(root: Path, number: int, *, vendor: str = "0x1002", total: str | None = None, used: str = "0") -> Path:
    device = root / "class" / "drm" / f"card{number}" / "device"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "mem_info_vram_total").write_text(f"{R9700_TOTAL}\n" if total is None else total)
    (device / "mem_info_vram_used").write_text(f"{used}\n")
    return device


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Another vendor's display controller, two AMD cards out of order, one without memory of its own, connectors."""
    add_card(tmp_path, 0, vendor="0x1a03", used="1")
    add_card(tmp_path, 10, used="3000")
    add_card(tmp_path, 2, used=str(R9700_IDLE))
    (add_card(tmp_path, 1) / "mem_info_vram_total").unlink()
    for name in ("card2-DP-1", "card2-HDMI-A-1", "renderD128", "version"):
        (tmp_path / "class" / "drm" / name).mkdir()
    return tmp_path


def test_a_card_says_which_node_of_the_host_it_is_on(tmp_path: Path) -> None:
    for number, text in enumerate(("1\n", "-1\n", None)):
        card = add_card(tmp_path, number)
        if text is not None:
            (card / "numa_node").write_text(text)
    assert [reading.numa_node for reading in AmdSysfsProbe(tmp_path, ["0", "1", "2"]).read()] == [1, None, None]


def test_devices_are_amd_cards_in_order_of_number(host: Path) -> None:
    first, second = AmdSysfsProbe(host, ["1", "0"]).read()
    assert (first.device, first.used_bytes) == ("1", 3000)
    assert (second.device, second.total_bytes, second.used_bytes) == ("0", R9700_TOTAL, R9700_IDLE)
    assert second.free_bytes == R9700_TOTAL - R9700_IDLE
    assert second.source == "sysfs"


def test_device_may_be_named_as_the_kernel_does(host: Path) -> None:
    (reading,) = AmdSysfsProbe(str(host), ["card10"]).read()
    assert (reading.device, reading.used_bytes) == ("card10", 3000)


@pytest.mark.parametrize("device", ["2", "card0", "card1", "card2-DP-1", "GPU-abc", "", "-1", "²"])
def test_unknown_device_is_named_with_what_there_is(host: Path, device: str) -> None:
    with pytest.raises(ProbeError) as raised:
        AmdSysfsProbe(host, [device]).read()
    assert f"no AMD card {device!r}; expected one of 0 (card2), 1 (card10)" in str(raised.value)


def test_availability(host: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    assert AmdSysfsProbe.available(host)
    assert not AmdSysfsProbe.available(empty)
    with pytest.raises(ProbeError, match="expected one of none"):
        AmdSysfsProbe(empty, ["0"]).read()


@pytest.mark.parametrize("text", ["", "\n", "N/A", "-1", "1.5e9", "0x10", "12 34", "१२", "1_000", "\xff"])
@pytest.mark.parametrize("name", ["mem_info_vram_total", "mem_info_vram_used"])
def test_garbled_value_is_an_error_never_a_number(host: Path, name: str, text: str) -> None:
    (host / "class" / "drm" / "card2" / "device" / name).write_text(text, encoding="utf-8")
    with pytest.raises(ProbeError, match=rf"{name}: shows .*; expected a number of bytes"):
        AmdSysfsProbe(host, ["0"]).read()


def test_missing_value_is_an_error(host: Path) -> None:
    (host / "class" / "drm" / "card2" / "device" / "mem_info_vram_used").unlink()
    with pytest.raises(ProbeError, match="mem_info_vram_used: cannot be read: No such file"):
        AmdSysfsProbe(host, ["1", "0"]).read()


@pytest.mark.parametrize(("total", "used"), [("0", "0"), ("100", "101")])
def test_impossible_values_are_an_error(tmp_path: Path, total: str, used: str) -> None:
    add_card(tmp_path, 0, total=total, used=used)
    with pytest.raises(ProbeError, match=rf"shows {used} bytes used of {total}"):
        AmdSysfsProbe(tmp_path, ["0"]).read()


def test_host_reading_agrees_with_psutil() -> None:
    memory = read_host()
    assert memory.total_bytes == psutil.virtual_memory().total
    assert memory.available_bytes == pytest.approx(psutil.virtual_memory().available, rel=0.1)
    (reading,) = HostProbe().read()
    assert (reading.device, reading.total_bytes, reading.source) == ("host", memory.total_bytes, "meminfo")


MEMINFO = "MemTotal:       24675436 kB\nMemFree:  23302988 kB\nMemAvailable:   24251748 kB\nMlocked:            28 kB\n"


def test_host_values_are_kibibytes(tmp_path: Path) -> None:
    path = tmp_path / "meminfo"
    path.write_text(MEMINFO)
    memory = read_host(path)
    assert (memory.total_bytes, memory.available_bytes, memory.locked_bytes) == (
        24675436 * 1024,
        24251748 * 1024,
        28 * 1024,
    )


@pytest.mark.parametrize("name", ["MemTotal", "MemAvailable", "Mlocked"])
def test_missing_host_value_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "meminfo"
    path.write_text(MEMINFO.replace(name, "Other"))
    with pytest.raises(ProbeError, match=rf"meminfo: {name} shows 'nothing'; expected a number of kB"):
        read_host(path)


def test_missing_meminfo_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match=r"meminfo: cannot be read"):
        read_host(tmp_path / "meminfo")


@given(st.binary(max_size=200))
def test_any_bytes_give_a_reading_or_an_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    root = tmp_path_factory.mktemp("tree")
    device = add_card(root, 0)
    (device / "mem_info_vram_used").write_bytes(data)
    try:
        (reading,) = AmdSysfsProbe(root, ["0"]).read()
    except ProbeError:
        return
    assert reading.used_bytes == int(data.strip())
