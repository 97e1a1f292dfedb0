from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from pytest_kvbudget.cancel import Cancellation, CancelledError
from pytest_kvbudget.clean import CleanGate
from pytest_kvbudget.config import Limits
from pytest_kvbudget.device.host import HostMemory
from pytest_kvbudget.device.leases import acquire
from pytest_kvbudget.device.model import DeviceMemory, ProbeError

GIB = 2**30
LIMITS = Limits(release_seconds=0.1, idle_used=2 * GIB, release_tolerance=GIB // 4, host_tolerance=8 * GIB)


@pytest.fixture(autouse=True)
def _leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBUDGET_LEASE_DIR", str(tmp_path))


class Probe:
    """A device that shows these bytes as used, one reading after the other, the last one for ever."""

    def __init__(self, *used_bytes: int) -> None:
        self._readings: Iterator[int] = iter(used_bytes)
        self._last = 0

    def read(self) -> tuple[DeviceMemory, ...]:
        self._last = next(self._readings, self._last)
        return (DeviceMemory(device="0", total_bytes=32 * GIB, used_bytes=self._last, source="test"),)


class Host:
    def __init__(self, *available_gib: int, locked_gib: int = 0) -> None:
        self._readings = iter(available_gib)
        self._last = 0
        self.locked_gib = locked_gib

    def show(self, *available_gib: int) -> None:
        self._readings = iter(available_gib)

    def __call__(self) -> HostMemory:
        self._last = next(self._readings, self._last)
        return HostMemory(total_bytes=256 * GIB, available_bytes=self._last * GIB, locked_bytes=self.locked_gib * GIB)


def test_waits_until_memory_is_back() -> None:
    gate = CleanGate(LIMITS)
    gate.wait(Probe(GIB), ["a"])
    (reading,) = gate.wait(Probe(20 * GIB, 10 * GIB, GIB), ["a"])
    assert reading.used_bytes == GIB


def test_the_first_boot_accepts_what_an_idle_device_may_show_and_no_more() -> None:
    CleanGate(LIMITS).wait(Probe(2 * GIB), ["a"])
    with pytest.raises(TimeoutError, match=r"device 0 shows 3\.00 GiB used, expected at most 2\.00 GiB"):
        CleanGate(LIMITS).wait(Probe(3 * GIB), ["a"])


def test_later_boots_compare_with_the_lowest_level_seen() -> None:
    gate = CleanGate(LIMITS)
    gate.wait(Probe(GIB // 2), ["a"])
    gate.wait(Probe(GIB // 2 + GIB // 4), ["a"])
    with pytest.raises(TimeoutError, match=r"expected at most 768\.00 MiB"):
        gate.wait(Probe(GIB), ["a"])


def test_levels_are_kept_per_device() -> None:
    gate = CleanGate(LIMITS)
    gate.wait(Probe(GIB // 2), ["a"])
    gate.wait(Probe(2 * GIB), ["b"])


def test_host_memory_has_to_come_back_too() -> None:
    gate = CleanGate(LIMITS, Host(200, 193, 150))
    gate.wait(None, ["cpu"])
    gate.wait(None, ["cpu"])
    with pytest.raises(TimeoutError, match=r"the host has 150\.00 GiB of memory available, expected at least 192"):
        gate.wait(None, ["cpu"])


def test_locked_memory_has_to_be_let_go() -> None:
    host = Host(200, 200)
    gate = CleanGate(LIMITS, host)
    gate.wait(None, ["cpu"])
    host.locked_gib = 38
    with pytest.raises(TimeoutError, match=r"38\.00 GiB of host memory are locked, expected at most 8"):
        gate.wait(None, ["cpu"])


def test_engines_on_other_devices_explain_missing_host_memory() -> None:
    gate = CleanGate(LIMITS, Host(200, 150))
    gate.wait(None, ["a"])
    lease = acquire([(("1",), ("b",))], run="other", purpose="other", timeout_s=1)
    try:
        gate.wait(None, ["a"])
    finally:
        lease.close()


def test_an_engine_of_ours_on_other_devices_explains_missing_host_memory_until_it_is_gone() -> None:
    gate = CleanGate(LIMITS, Host(200, 150))
    gate.wait(None, ["a"])
    gate.wait(None, ["b"])
    gate.vacated(["a"])
    with pytest.raises(TimeoutError, match=r"150\.00 GiB of memory available, expected at least 192"):
        gate.wait(None, ["b"])


def test_what_the_host_shows_beside_an_engine_is_not_its_idle_level() -> None:
    host = Host(100)
    gate = CleanGate(LIMITS, host)
    lease = acquire([(("1",), ("b",))], run="other", purpose="other", timeout_s=1)
    gate.wait(None, ["a"])
    lease.close()
    host.show(200)
    gate.wait(None, ["a"])
    host.show(150)
    with pytest.raises(TimeoutError, match=r"expected at least 192"):
        gate.wait(None, ["a"])


def test_a_lease_of_ours_without_an_engine_takes_no_memory() -> None:
    lease = acquire([(("1",), ("b",))], run="ours", purpose="the next boot", timeout_s=1)
    gate = CleanGate(LIMITS, Host(200, 150), leased=lambda: lease.names)
    gate.wait(None, ["a"])
    with pytest.raises(TimeoutError, match=r"expected at least 192"):
        gate.wait(None, ["a"])
    lease.close()


def test_gates_of_many_threads_let_each_other_pass() -> None:
    # Whoever is first finds the host idle; beside its engine all others find 100 GiB missing.
    gate = CleanGate(LIMITS, Host(200, 100))
    start = Barrier(8)

    def boot(name: str) -> int:
        start.wait()
        (reading,) = gate.wait(Probe(GIB), [name])
        return reading.used_bytes

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(boot, "abcdefgh")) == [GIB] * 8


def test_a_boot_that_is_called_off_waits_no_longer() -> None:
    cancellation = Cancellation()

    class Busy(Probe):
        def read(self) -> tuple[DeviceMemory, ...]:
            cancellation.ask()
            return super().read()

    patient = Limits(release_seconds=3600, idle_used=2 * GIB)
    with pytest.raises(CancelledError):
        CleanGate(patient).wait(Busy(30 * GIB), ["a"], cancellation=cancellation)


def test_an_unreadable_device_is_no_idle_device() -> None:
    class Broken:
        def read(self) -> tuple[DeviceMemory, ...]:
            raise ProbeError("card0: gone")

    with pytest.raises(ProbeError, match="gone"):
        CleanGate(LIMITS).wait(Broken(), ["a"])
