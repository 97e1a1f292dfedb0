"""Leases between real processes."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_kvbudget.device import leases
from pytest_kvbudget.device.leases import Lease, LeaseError, LeaseTimeoutError, acquire, holders_of, wanted
from pytest_kvbudget.device.model import Holder
from tests.engine.support import wait_for

HOLDER = Path(__file__).with_name("holder.py")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "leases"
    monkeypatch.setenv("KVBUDGET_LEASE_DIR", str(path))
    return path


@pytest.fixture
def hold() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process that holds leases."""
    made: list[subprocess.Popen[str]] = []

    def start(*names: str) -> subprocess.Popen[str]:
        process = subprocess.Popen((sys.executable, str(HOLDER), ",".join(names)), stdout=subprocess.PIPE, text=True)
        made.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in made:
        process.kill()
        process.wait(20)
        assert process.stdout is not None
        process.stdout.close()


Hold = Callable[..., "subprocess.Popen[str]"]


def take(
    *candidates: str, timeout_s: float = 0.0, on_wait: Callable[[tuple[Holder, ...]], None] | None = None
) -> Lease:
    """Candidates as comma-separated names; the device of a name is its last character."""
    sets = [tuple(candidate.split(",")) for candidate in candidates]
    asked = [(tuple(name[-1] for name in names), names) for names in sets]
    return acquire(asked, run="run-1", purpose="a test", timeout_s=timeout_s, on_wait=on_wait)


def test_lease_is_exclusive_between_processes_and_names_its_holder(hold: Hold) -> None:
    process = hold("card-0")
    with pytest.raises(LeaseTimeoutError, match="devices_busy") as raised:
        take("card-0")
    (holder,) = raised.value.holders
    assert (holder.device, holder.run, holder.pid) == ("card-0", "other-run", process.pid)
    for part in ("card-0", "other-run", str(process.pid), "max_model_len=262144", "kvbudget reap"):
        assert part in str(raised.value)
    assert "gone" not in str(raised.value)


def test_who_waits_is_seen_by_who_holds_and_only_while_it_waits(hold: Hold) -> None:
    hold("card-1")
    own = take("card-0")
    assert not wanted(["card-0"])
    waiter = threading.Thread(target=lambda: take("card-0", "card-1", timeout_s=20).close())
    waiter.start()
    wait_for("the wish for both", lambda: wanted(["card-2", "card-1"]) and wanted(["card-0"]))
    assert not wanted(["card-2"])
    own.close()
    waiter.join()
    assert not wanted(["card-0", "card-1"])


def test_a_look_that_does_not_wait_wants_nothing(hold: Hold) -> None:
    hold("card-0")
    with pytest.raises(LeaseTimeoutError):
        take("card-0", timeout_s=0)
    assert not wanted(["card-0"])


def test_lease_is_exclusive_within_a_process() -> None:
    first = take("card-0")
    with pytest.raises(LeaseTimeoutError):
        take("card-0")
    first.close()
    first.close()
    take("card-0").close()


def test_killed_holder_frees_its_lease_whatever_its_record_says(hold: Hold) -> None:
    process = hold("card-0")
    process.kill()
    process.wait(20)
    lease = take("card-0")
    (holder,) = holders_of(["card-0"])
    assert (holder.run, holder.pid) == ("run-1", os.getpid())
    lease.close()
    assert holders_of(["card-0"]) == ()


def test_first_free_candidate_is_taken(hold: Hold) -> None:
    hold("card-0")
    lease = take("card-0", "card-1", "card-2")
    assert (lease.devices, lease.names) == (("1",), ("card-1",))
    lease.close()


def test_set_is_leased_whole_or_not_at_all(hold: Hold) -> None:
    hold("card-2")
    with pytest.raises(LeaseTimeoutError):
        take("card-0,card-1,card-2")
    rest = take("card-0,card-1")
    assert [os.fstat(number).st_nlink for number in rest.descriptors] == [1, 1]
    rest.close()


def test_names_keep_their_order_and_their_descriptors(folder: Path) -> None:
    lease = take("card-1,card-0")
    assert lease.names == ("card-1", "card-0")
    found = [Path(f"/proc/self/fd/{number}").readlink().name for number in lease.descriptors]
    assert found == ["card-1.lock", "card-0.lock"]
    assert not any(os.get_inheritable(number) for number in lease.descriptors)
    lease.close()


def test_waiting_gets_the_lease_when_its_holder_dies(hold: Hold) -> None:
    process = hold("card-0")
    told: list[tuple[Holder, ...]] = []

    def on_wait(holders: tuple[Holder, ...]) -> None:
        told.append(holders)
        process.kill()

    take("card-0", timeout_s=20, on_wait=on_wait).close()
    assert [holder.run for holder in told[0]] == ["other-run"]


def test_waiting_may_give_up_own_leases() -> None:
    idle = take("card-0")
    take("card-0", timeout_s=20, on_wait=lambda _: idle.close()).close()


def test_nobody_is_told_where_nobody_waits() -> None:
    told: list[object] = []
    take("card-0", on_wait=told.append).close()
    assert told == []


def test_overlapping_sets_in_any_order_do_not_wait_for_each_other() -> None:
    """Two threads each want both cards, named in opposite order, many times over."""
    got: list[str] = []

    def work(names: str) -> None:
        for _ in range(50):
            take(names, timeout_s=20).close()
            got.append(names)

    threads = [threading.Thread(target=work, args=(names,)) for names in ("card-0,card-1", "card-1,card-0")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(got) == ["card-0,card-1"] * 50 + ["card-1,card-0"] * 50


def test_handed_down_lease_is_held_until_its_last_holder_is_gone() -> None:
    lease = take("card-0")
    with subprocess.Popen(("/bin/sleep", "1000"), pass_fds=lease.descriptors) as heir:
        lease.close()
        with pytest.raises(LeaseTimeoutError):
            take("card-0")
        heir.kill()
    take("card-0").close()


def test_forked_child_holds_nothing() -> None:
    lease = take("card-0")
    child = os.fork()
    if child == 0:
        signal.pause()
    lease.close()
    try:
        take("card-0", timeout_s=20).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_message_says_that_the_recorded_holder_is_gone(hold: Hold) -> None:
    process = hold("card-0")
    record = holders_of(["card-0"])
    assert "gone" not in leases.describe(record[0])
    process.kill()
    process.wait(20)
    assert f"pid {process.pid} on {record[0].host} - gone" in leases.describe(record[0])


def test_folder_and_files_are_for_every_user(folder: Path) -> None:
    take("card-0").close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert stat.S_IMODE((folder / "card-0.lock").stat().st_mode) == 0o666


def test_names_cannot_leave_the_folder(folder: Path) -> None:
    take("../../etc/passwd", "x").close()
    assert [path.name for path in folder.iterdir()] == ["..%2F..%2Fetc%2Fpasswd.lock"]


@pytest.mark.parametrize("record", [b"", b"{", b"\xff" * 100, b'{"pid": "x"}'])
def test_garbled_record_of_a_held_lease_is_left_out(hold: Hold, folder: Path, record: bytes) -> None:
    hold("card-0")
    (folder / "card-0.lock").write_bytes(record)
    with pytest.raises(LeaseTimeoutError, match="a process that left no record"):
        take("card-0")


def test_removed_lock_file_protects_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cleaner of temporary files removes the file after it was opened and before it was locked."""
    opened: list[Path] = []
    real = leases._open

    def open_and_lose(path: Path) -> object:
        lock = real(path)
        if not opened:
            path.unlink()
        opened.append(path)
        return lock

    monkeypatch.setattr(leases, "_open", open_and_lose)
    lease = take("card-0")
    assert len(opened) >= 2
    there = (folder / "card-0.lock").stat()
    assert os.fstat(lease.descriptors[0]).st_ino == there.st_ino
    lease.close()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to be two users")
def test_lease_is_exclusive_between_users(folder: Path, tmp_path: Path) -> None:
    lease = take("card-0")
    for path in (tmp_path, *tmp_path.parents[:3]):
        path.chmod(path.stat().st_mode | 0o005)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            take("card-0")
        except LeaseTimeoutError as error:
            os.write(write, f"{error.holders[0].run} holds it".encode())
        take("card-1")
        os.write(write, b", card-1 is mine")
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read() == "run-1 holds it, card-1 is mine"
    assert (folder / "card-1.lock").stat().st_uid == 65534
    take("card-1").close()
    lease.close()


def test_no_candidates_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="no set of devices"):
        acquire([], run="r", purpose="p", timeout_s=0.0)


def test_target_without_devices_has_an_empty_lease() -> None:
    lease = acquire([((), ())], run="r", purpose="p", timeout_s=0.0)
    assert (lease.devices, lease.descriptors) == ((), ())
    lease.close()


def test_folder_that_is_a_file_is_named(folder: Path) -> None:
    folder.write_text("")
    with pytest.raises(LeaseError, match=rf"{folder}: is no folder; .*KVBUDGET_LEASE_DIR"):
        take("card-0")


def test_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVBUDGET_LEASE_DIR", str(tmp_path / "file" / "leases"))
    with pytest.raises(LeaseError, match=r"file/leases: cannot be made: Not a directory"):
        take("card-0")


def test_link_in_place_of_a_lock_file_is_refused(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    (folder / "card-0.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LeaseError, match=r"card-0.lock: cannot be opened"):
        take("card-0")
    assert not (tmp_path / "elsewhere").exists()
