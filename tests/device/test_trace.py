"""The memory trace: what is stored is what was sampled, gaps stay gaps, and figures agree with a plain list."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvbudget.device.model import DeviceMemory, ProbeError
from pytest_kvbudget.device.probes import Choice
from pytest_kvbudget.device.sampler import MemorySampler
from pytest_kvbudget.device.trace import (
    BEFORE,
    LAUNCH,
    TEARDOWN,
    MemoryTrace,
    between,
    changes,
    decode,
    encode,
    end_s,
    high_water,
    is_complete,
    leaks,
    phases,
    since,
)

MIB = 2**20
TOTAL = 1000 * MIB


def reading(used: int, device: str = "0", total: int = TOTAL) -> DeviceMemory:
    return DeviceMemory(device=device, total_bytes=total, used_bytes=used, source="sysfs", limits="whole bytes")


def replay(
    samples: Sequence[tuple[int, Sequence[int]] | tuple[int, str]],
    marks: Sequence[tuple[str, float]] = (),
    rate_hz: float = 10,
    devices: Sequence[str] = ("0", "1"),
) -> MemoryTrace:
    """A sampler that was given these readings (used bytes per device, or an error) at these ticks."""
    sampler = MemorySampler(_Never(), rate_hz=rate_hz)
    for tick, used in samples:
        if isinstance(used, str):
            sampler._fail(tick, ProbeError(used))
        else:
            sampler._take(tick, [reading(size, device) for size, device in zip(used, devices, strict=True)])
    for phase, at_s in marks:
        sampler.mark(phase, sampler._begun + at_s)
    return sampler.snapshot()


class _Never:
    def read(self) -> tuple[DeviceMemory, ...]:
        raise AssertionError("not asked")


LIFE = replay(
    [(0, (10, 20)), (1, (10, 20)), (2, (500, 40)), (3, (700, 40)), (4, "busy"), (5, "busy"), (6, (650, 90)),
     (7, (650, 90)), (9, (12, 20)), (10, (12, 20))],
    [(LAUNCH, 0.15), ("ready", 0.3), ("request", 0.55), (TEARDOWN, 0.75)],
)  # fmt: skip


def test_figures_of_a_life() -> None:
    assert [(phase.phase, phase.start_s) for phase in phases(LIFE)] == [
        (BEFORE, 0.0), (LAUNCH, 0.15), ("ready", 0.3), ("request", 0.55), (TEARDOWN, 0.75),
    ]  # fmt: skip
    peaks = [[device and device.peak_used_bytes for device in phase.devices] for phase in phases(LIFE)]
    assert peaks == [[10, 20], [500, 40], [700, 40], [650, 90], [12, 20]]
    first, second = high_water(LIFE)
    assert first is not None
    assert second is not None
    assert (first.peak_used_bytes, first.peak_at_s, first.least_free_bytes) == (700, 0.3, TOTAL - 700)
    assert (second.peak_used_bytes, second.peak_at_s, second.rank, second.device) == (90, 0.6, 1, "1")
    (grown, _) = since(LIFE, "ready")
    assert grown is not None
    assert (grown.samples, grown.growth_bytes) == (3, -50)
    assert end_s(LIFE) == 1.0


def test_gaps_are_told_and_never_filled_in() -> None:
    assert [(gap.start_s, gap.samples, gap.reason) for gap in LIFE.gaps] == [(0.4, 2, "busy")]
    assert between(LIFE, 0.4, 0.6) == (None, None)
    assert since(LIFE, "never marked") == (None, None)
    points = changes(LIFE, 0)
    assert [point.at_s for point in points] == [0.0, 0.2, 0.3, 0.6, 0.7, 0.9, 1.0]
    assert [point.used_bytes for point in points] == [10, 500, 700, 650, 650, 12, 12]


def test_leak_is_named_with_its_size() -> None:
    assert leaks(LIFE, 5) == (None, None)
    first, second = leaks(LIFE, 1)
    assert second is None
    assert first is not None
    assert (first.rank, first.device, first.leaked_bytes) == (0, "0", 2)
    assert is_complete(LIFE)


def test_a_trace_without_an_end_proves_no_clean_release() -> None:
    open_ended = replay([(0, (1, 1)), (1, (9, 9))], [(LAUNCH, 0.05)])
    assert leaks(open_ended, 0) == (None, None)
    assert not is_complete(open_ended)
    assert not is_complete(replay([], []))
    assert [phase.devices for phase in phases(replay([], []))] == [()]


def test_encoded_is_decoded() -> None:
    assert decode(encode(LIFE)) == LIFE
    assert (LIFE.source, LIFE.limits) == ("sysfs", "whole bytes")


def test_an_hour_of_eight_quiet_devices_is_small() -> None:
    devices = [str(device) for device in range(8)]
    quiet = replay([(tick, [5] * 8) for tick in range(36_000)], devices=devices)
    assert len(encode(quiet)) < 1000


ticks = st.lists(
    st.tuples(st.integers(1, 4), st.one_of(st.none(), st.integers(0, 50), st.integers(0, 2**40))), max_size=40
)


@given(ticks, st.integers(0, 120), st.integers(0, 120), st.sampled_from([1.0, 3.0, 10.0, 100.0]))
def test_windows_agree_with_a_plain_list(
    steps: list[tuple[int, int | None]], start: int, stop: int, rate_hz: float
) -> None:
    plain: dict[int, int] = {}
    samples: list[tuple[int, Sequence[int]] | tuple[int, str]] = []
    tick = -1
    for skip, used in steps:
        tick += skip
        if used is None:
            samples.append((tick, "no"))
        else:
            plain[tick] = used
            samples.append((tick, [used]))
    trace = decode(encode(replay(samples, rate_hz=rate_hz, devices=["0"])))
    inside = {at: used for at, used in plain.items() if start <= at < stop}
    found = between(trace, start / rate_hz, stop / rate_hz)
    if not plain:
        assert found == ()
        return
    (window,) = found
    if not inside:
        assert window is None
        return
    assert window is not None
    assert window.samples == len(inside)
    assert (window.first_used_bytes, window.last_used_bytes) == (inside[min(inside)], inside[max(inside)])
    assert window.peak_used_bytes == max(inside.values())
    assert round(window.peak_at_s * rate_hz) == next(at for at, used in inside.items() if used == max(inside.values()))
    assert window.least_free_bytes == TOTAL - max(inside.values())
    drawn = {round(point.at_s * rate_hz): point.used_bytes for point in changes(trace, 0)}
    assert drawn.items() <= plain.items()


class Scripted:
    """A probe that answers as told and says when it was asked."""

    def __init__(self, answer: Callable[[int], Sequence[int] | Exception]) -> None:
        self._answer = answer
        self.times: list[float] = []
        self.asked = threading.Condition()

    def read(self) -> tuple[DeviceMemory, ...]:
        with self.asked:
            self.times.append(time.monotonic())
            self.asked.notify_all()
            answer = self._answer(len(self.times) - 1)
        if isinstance(answer, Exception):
            raise answer
        return tuple(reading(used, str(device)) for device, used in enumerate(answer))

    def wait_for(self, count: int) -> None:
        with self.asked:
            assert self.asked.wait_for(lambda: len(self.times) >= count, 30)


def test_sampling_survives_errors_and_stays_on_its_ticks() -> None:
    def answer(number: int) -> Sequence[int] | Exception:
        if number == 3:
            return ProbeError("device is lost")
        return RuntimeError("bug") if number == 5 else (number, 2 * number)

    probe = Scripted(answer)
    sampler = MemorySampler(probe, rate_hz=100)
    sampler.start()
    assert len(probe.times) >= 1  # the baseline is there before anything is launched
    sampler.mark(LAUNCH)
    probe.wait_for(12)
    trace = sampler.stop()
    assert [gap.reason for gap in trace.gaps] == ["device is lost", "RuntimeError: bug"]
    assert is_complete(trace) is False
    (whole, _) = between(trace, 0.0, float("inf"))
    assert whole is not None
    assert (whole.first_used_bytes, whole.samples) == (0, len(probe.times) - 2)
    assert sampler.stop() == trace
    # No reading comes before its tick, however late those before it were.
    # the last sample is taken when the trace is stopped and stands on the next tick, less than one period early
    assert end_s(trace) <= probe.times[-1] - probe.times[0] + 0.02


def test_devices_that_change_are_a_gap() -> None:
    probe = Scripted(lambda number: (1, 2) if number != 1 else (1,))
    sampler = MemorySampler(probe, rate_hz=100)
    sampler.start()
    probe.wait_for(4)
    trace = sampler.stop()
    assert "expected ('0', '1')" in trace.gaps[0].reason
    assert [series.device for series in trace.series] == ["0", "1"]


def test_hanging_reading_keeps_nobody() -> None:
    release = threading.Event()

    def answer(number: int) -> Sequence[int]:
        if number == 2:
            release.wait(60)
        return (5,)

    class Hanging(Scripted):
        def read(self) -> tuple[DeviceMemory, ...]:
            self.times.append(0)
            used = answer(len(self.times) - 1)
            return (reading(used[0]),)

    probe = Hanging(answer)
    sampler = MemorySampler(probe, rate_hz=100)
    sampler.start()
    deadline = time.monotonic() + 30
    while len(probe.times) < 3:
        assert time.monotonic() < deadline
    begun = time.monotonic()
    trace = sampler.stop(wait_s=0.05)
    assert time.monotonic() - begun < 10
    assert trace.gaps[-1].reason == "a reading did not return"
    release.set()
    assert sampler._thread is not None
    sampler._thread.join(30)
    assert sampler.snapshot() == trace  # what comes after the stop is not taken


def test_first_reading_is_not_waited_for_for_ever() -> None:
    release = threading.Event()

    class Stuck:
        def read(self) -> tuple[DeviceMemory, ...]:
            release.wait(60)
            raise ProbeError("late")

    sampler = MemorySampler(Stuck())
    sampler.start(first_s=0.05)
    assert sampler.snapshot().series == ()
    release.set()
    sampler.stop()


def test_rate_is_bounded_and_no_faster_than_the_source() -> None:
    for rate in (0, 0.5, 101, float("nan")):
        with pytest.raises(ValueError, match="expected 1 to 100"):
            MemorySampler(_Never(), rate_hz=rate)
    choice = Choice("amd-smi", _Never(), reason="", max_hz=1, timeout_s=1)
    assert MemorySampler(choice).snapshot().rate_hz == 1


def test_many_gaps_are_counted() -> None:
    noisy: list[tuple[int, Sequence[int]] | tuple[int, str]] = []
    for tick in range(0, 300, 2):
        noisy += [(tick, "no"), (tick + 1, [1])]
    trace = replay(noisy, devices=["0"])
    assert (len(trace.gaps), trace.gaps_left_out) == (100, 50)
