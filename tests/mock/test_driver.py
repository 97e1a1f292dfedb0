"""The driver of the simulated cards: one per tree, the authority on memory, gone with its users."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from pytest_kvbudget.mock.driver import DriverClient, DriverError, ensure_driver, socket_name
from pytest_kvbudget.mock.spec import MockDevice
from pytest_kvbudget.units import GIB, MIB

from .harness import BASE, until

CARD = replace(BASE, free_at_start=9 * GIB)


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[bytes]]:
    """A process that a driver can belong to."""
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def running(tree: Path) -> bool:
    """Whether the tree's driver holds its socket."""
    name = socket_name(tree)[1:]
    return any(line.endswith(f"@{name}") for line in Path("/proc/net/unix").read_text(encoding="ascii").splitlines())


def shown(tree: Path, card: int, name: str) -> str:
    return (tree / f"class/drm/card{card}/device/{name}").read_text(encoding="ascii")


def test_tree_looks_like_amdgpus(tmp_path: Path, owner: subprocess.Popen[bytes]) -> None:
    ensure_driver(tmp_path, CARD, owner.pid, cards=2)
    for card in (0, 1):
        assert shown(tmp_path, card, "mem_info_vram_total") == "10737418240\n"
        assert shown(tmp_path, card, "mem_info_vram_used") == "1073741824\n"
        assert shown(tmp_path, card, "vendor") == "0x1002\n"
        assert int(shown(tmp_path, card, "mem_info_gtt_used")) == 0
        assert int(shown(tmp_path, card, "mem_info_gtt_total")) > 0
        assert (tmp_path / f"class/drm/card{card}-DP-1/status").exists()


def test_one_driver_serves_many_owners(tmp_path: Path, owner: subprocess.Popen[bytes]) -> None:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE) as other:
        ensure_driver(tmp_path, CARD, owner.pid, cards=1)
        ensure_driver(str(tmp_path), CARD, other.pid, cards=2)
        assert shown(tmp_path, 1, "mem_info_vram_used") == "1073741824\n"
        commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        assert sum(str(tmp_path) in command for command in commands) == 1
        owner.kill()
        owner.wait()
        client = DriverClient(tmp_path)
        assert client.free_bytes(0) == 9 * GIB
        client.close()
        other.kill()
        until("the driver's end", lambda: not running(tmp_path))


def test_memory_is_granted_refused_and_freed(tmp_path: Path, owner: subprocess.Popen[bytes]) -> None:
    ensure_driver(tmp_path, CARD, owner.pid, cards=1)
    first, second = DriverClient(tmp_path), DriverClient(tmp_path)
    assert first.alloc(0, 9 * GIB - MIB) == (True, MIB)
    assert second.alloc(0, MIB + 1) == (False, MIB)
    assert second.alloc(0, MIB) == (True, 0)
    assert shown(tmp_path, 0, "mem_info_vram_used") == "10737418240\n"
    first.free(0, GIB)
    assert second.free_bytes(0) == GIB
    # nobody can give back what is not his
    second.free(0, 5 * GIB)
    assert second.free_bytes(0) == GIB + MIB
    first.close()
    until("everything back", lambda: second.free_bytes(0) == 9 * GIB)
    second.close()
    assert shown(tmp_path, 0, "mem_info_vram_used") == "1073741824\n"


def test_killed_clients_memory_is_back(tmp_path: Path, owner: subprocess.Popen[bytes]) -> None:
    ensure_driver(tmp_path, CARD, owner.pid, cards=1)
    code = (
        "import sys; from pytest_kvbudget.mock.driver import DriverClient; client = DriverClient(sys.argv[1]);"
        "print(client.alloc(0, 2**30), flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"(True, 8589934592)\n"
        assert shown(tmp_path, 0, "mem_info_vram_used") == "2147483648\n"
        client.kill()
        until("the memory back", lambda: shown(tmp_path, 0, "mem_info_vram_used") == "1073741824\n")


def test_leaves_with_its_last_user_and_an_idle_tree(tmp_path: Path, owner: subprocess.Popen[bytes]) -> None:
    ensure_driver(tmp_path, CARD, owner.pid, cards=1)
    client = DriverClient(tmp_path)
    assert client.alloc(0, GIB)[0]
    owner.kill()
    owner.wait()
    assert client.free_bytes(0) == 8 * GIB
    client.close()
    until("the driver's end", lambda: not running(tmp_path))
    assert shown(tmp_path, 0, "mem_info_vram_used") == "1073741824\n"
    with pytest.raises(DriverError, match="no driver answers"):
        DriverClient(tmp_path)


def test_killed_drivers_tree_is_made_right_by_the_next(tmp_path: Path, owner: subprocess.Popen[bytes]) -> None:
    ensure_driver(tmp_path, CARD, owner.pid, cards=1)
    client = DriverClient(tmp_path)
    client.alloc(0, GIB)
    driver = next(
        process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in (process.info["cmdline"] or [])
    )
    driver.kill()
    until("the driver's end", lambda: not running(tmp_path))
    with pytest.raises(DriverError, match="went away"):
        client.free_bytes(0)
    client.close()
    assert shown(tmp_path, 0, "mem_info_vram_used") == "2147483648\n"
    ensure_driver(tmp_path, CARD, owner.pid, cards=1)
    assert shown(tmp_path, 0, "mem_info_vram_used") == "1073741824\n"


def test_other_cards_in_the_same_tree_are_refused(tmp_path: Path, owner: subprocess.Popen[bytes]) -> None:
    ensure_driver(tmp_path, CARD, owner.pid, cards=1)
    with pytest.raises(DriverError, match="simulates cards of 10737418240 bytes with 1073741824 in use when idle"):
        ensure_driver(tmp_path, replace(CARD, device_total=11 * GIB), owner.pid, cards=1)
    client = DriverClient(tmp_path)
    with pytest.raises(DriverError, match="has 1 cards; card 7 is not there"):
        client.free_bytes(7)
    client.close()


def test_tree_that_cannot_be_written_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DriverError, match=r"ended with status 1; is .*file/tree a writable folder"):
        ensure_driver(tmp_path / "file/tree", CARD, os.getpid(), cards=1)
    assert "NotADirectoryError" in capfd.readouterr().err


def test_inherits_nothing(tmp_path: Path, owner: subprocess.Popen[bytes]) -> None:
    # a lease's descriptor is handed down to engines; a driver that kept it would keep the lease
    with (tmp_path / "lease").open("w") as lease:
        os.set_inheritable(lease.fileno(), True)
        ensure_driver(tmp_path / "tree", CARD, owner.pid, cards=1)
        driver = next(
            process
            for process in psutil.process_iter(["cmdline"])
            if str(tmp_path / "tree") in (process.info["cmdline"] or [])
        )
        assert driver.open_files() == []


def test_neuron_tree_shows_cores_and_their_categories(tmp_path: Path, owner: subprocess.Popen[bytes]) -> None:
    ensure_driver(tmp_path, MockDevice(dialect="neuron"), owner.pid, cards=5)
    devices = tmp_path / "devices/virtual/neuron_device"
    # five logical cores of two physical ones are on two devices of eight
    assert sorted(path.name for path in devices.iterdir()) == ["neuron0", "neuron1"]
    assert (devices / "neuron0/info/architecture/device_name").read_text(encoding="ascii") == "Trainium2\n"
    memory = devices / "neuron1/neuron_core1/stats/memory_usage/device_mem"

    def numbers(name: str) -> tuple[int, ...]:
        return tuple(int((memory / name / what).read_text(encoding="ascii")) for what in ("total", "present", "peak"))

    client = DriverClient(tmp_path)
    assert client.alloc(9, 3 * MIB, "tensors") == (True, 24 * GIB - 3 * MIB)
    assert client.alloc(9, MIB, "model_code")[0]
    assert (numbers("tensors"), numbers("")) == ((3 * MIB, 3 * MIB, 3 * MIB), (4 * MIB, MIB, 4 * MIB))
    client.free(9, 2 * MIB, "tensors")
    assert (numbers("tensors"), numbers("")) == ((MIB, -2 * MIB, 3 * MIB), (2 * MIB, -2 * MIB, 4 * MIB))
    assert client.kinds(8) == {(9, "tensors"): MIB, (9, "model_code"): MIB}
    client.close()
    until("the memory back", lambda: numbers("")[0] == 0)


def test_cores_of_a_stack_share_its_memory(tmp_path: Path, owner: subprocess.Popen[bytes]) -> None:
    ensure_driver(tmp_path, MockDevice(dialect="neuron", device_skew=GIB), owner.pid, cards=4)
    client = DriverClient(tmp_path)
    assert client.alloc(0, 20 * GIB, "tensors")[0]
    assert client.alloc(1, 5 * GIB, "tensors") == (False, 4 * GIB)
    assert client.free_bytes(2) == 23 * GIB
    # what the runtime cannot give is there all the same
    assert client.alloc(2, 2 * GIB + 1, "tensors", 3 * GIB) == (False, 23 * GIB)
    assert client.alloc(2, 2 * GIB, "tensors", 3 * GIB) == (True, 21 * GIB)
    client.close()


def test_core_is_claimed_until_its_process_is_gone(tmp_path: Path, owner: subprocess.Popen[bytes]) -> None:
    ensure_driver(tmp_path, MockDevice(dialect="neuron"), owner.pid, cards=1)
    first, second = DriverClient(tmp_path), DriverClient(tmp_path)
    assert first.claim(0)
    assert first.claim(0)
    assert not second.claim(0)
    assert second.claim(1)
    first.close()
    until("the core", lambda: second.claim(0))
    second.close()


def test_each_card_may_have_less_than_the_one_before(tmp_path: Path, owner: subprocess.Popen[bytes]) -> None:
    ensure_driver(tmp_path, replace(CARD, device_skew=MIB), owner.pid, cards=3)
    assert [int(shown(tmp_path, card, "mem_info_vram_used")) - GIB for card in range(3)] == [0, MIB, 2 * MIB]
    with pytest.raises(DriverError, match="simulates cards"):
        ensure_driver(tmp_path, CARD, owner.pid, cards=3)
