"""Several boots at once on one pool: side by side for real, cut short without a false verdict, on the set asked for."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pytest_kvbudget.archive import RunArchive, read_attempt
from pytest_kvbudget.attempt import Attempt
from pytest_kvbudget.booting import Booting
from pytest_kvbudget.config import Limits, LoadedTarget, Target
from pytest_kvbudget.device.leases import Lease, acquire, wanted
from pytest_kvbudget.engine.reap import STATE_FILE
from pytest_kvbudget.engine.state import read_state
from pytest_kvbudget.mock.spec import MockDevice
from pytest_kvbudget.pool import EnginePool, PoolError
from pytest_kvbudget.progress import Snapshot
from pytest_kvbudget.records import AttemptRecord, RunInfo
from pytest_kvbudget.request import BootRequest
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import MIB
from pytest_kvbudget.verdict import Verdict
from tests.engine.support import wait_for

DOORMAN = Path(__file__).with_name("doorman.py")
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 50.00 MiB. GPU 0 has a total capacity of 31.86 GiB "
    "of which 0 bytes is free."
)
SHAPE = Shape(model="simulated", max_model_len=4096)
CARDS = (0, 1, 2, 3)
SKEW_BYTES = 256 * MIB
"""More than one label's worth of idle memory, and little enough for four cards to pass for idle."""


class Pools:
    """Makes pools of one target whose engines are let in by a doorman."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[EnginePool] = []
        self.shown: list[tuple[threading.Thread, tuple[Snapshot, ...]]] = []
        self.on_show: Callable[[tuple[str, ...]], None] = lambda _: None
        """Told the labels that are shown."""

    def make(
        self, *, cards: Sequence[int] = CARDS, port: int = 0, lease_seconds: float = 20, skew: int = 0,
        on_wait: Callable[[str], None] | None = None,
    ) -> EnginePool:  # fmt: skip
        target = Target(
            backend="mock", devices=tuple(cards), port=port, shape=SHAPE, command=(sys.executable, str(DOORMAN)),
            limits=Limits(release_seconds=10, settle_seconds=3, lease_seconds=lease_seconds, boot_seconds=60),
            mock=MockDevice(sysfs=str(self.folder / "sysfs"), kv_bytes_per_token=1024, device_skew=skew),
        )  # fmt: skip
        loaded = LoadedTarget(name="t", target=target, origin="test", folder=str(self.folder), environment={})
        info = RunInfo(run="r", host="h", plugin_version="0", python_version="3")
        archive = RunArchive(self.folder / "archive", info)
        pool = EnginePool(loaded, archive, progress=self._show, on_wait=on_wait)
        self.made.append(pool)
        return pool

    def _show(self, *boots: Snapshot) -> None:
        self.shown.append((threading.current_thread(), boots))
        self.on_show(tuple(boot.label for boot in boots))

    def request(
        self, name: str, *waits_for: str, window: int = 4096, last_words: str = "", rung: str | None = None
    ) -> BootRequest:
        environment = {
            "DOORMAN_FOLDER": str(self.folder),
            "DOORMAN_NAME": name,
            "DOORMAN_WAITS_FOR": ",".join(waits_for),
            "DOORMAN_LAST_WORDS": last_words,
        }
        shape = SHAPE.merged(max_model_len=window, env=environment, kv_cache_memory_bytes=50 * MIB)
        return BootRequest(test="t", shape=shape, rung=rung or name)

    def came(self, *names: str) -> bool:
        return all((self.folder / name).exists() for name in names)


@pytest.fixture
def pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pools]:
    monkeypatch.setenv("KVBUDGET_LEASE_DIR", str(tmp_path / "leases"))
    pools = Pools(tmp_path)
    yield pools
    for pool in pools.made:
        pool.close()


def device(attempt: Attempt) -> str:
    (name,) = attempt.record.target.devices
    return name


def on_disk(attempt: Attempt) -> AttemptRecord:
    return read_attempt(attempt.record_path)


def lease_of(pool: EnginePool, *devices: str, timeout_s: float = 0) -> Lease:
    """A lease of other people on these cards of a pool."""
    names = pool.backend.lease_names(pool.loaded, devices)
    return acquire([(devices, names)], run="other", purpose="other", timeout_s=timeout_s)


def check_gone(attempt: Attempt) -> None:
    """Nothing of the engine is left, as its keeper says that has to know."""
    state = read_state(attempt.folder / STATE_FILE)
    assert state.gone
    assert not attempt.pids()


# -- side by side


def test_boots_that_wait_for_each_other_come_up(pools: Pools) -> None:
    pool = pools.make()
    assert pool.reserve(SHAPE, 2) == 2
    one = pool.start(pools.request("one", "two"))
    two = pool.start(pools.request("two", "one"))

    attempts = [pool.finish(one), pool.finish(two)]

    assert [attempt.record.verdict for attempt in attempts] == [Verdict.PASS] * 2
    assert all(attempt.serving for attempt in attempts)
    assert len({attempt.url for attempt in attempts}) == 2
    assert {device(attempt) for attempt in attempts} == {"0", "1"}
    for attempt in attempts:
        assert {reading.device for moment in attempt.record.memory for reading in moment.devices} == {device(attempt)}
        trace = attempt.memory_trace()
        assert trace is not None
        assert [series.device for series in trace.series] == [device(attempt)]


def test_the_first_with_a_verdict_is_had_while_another_still_boots(pools: Pools) -> None:
    pool = pools.make()
    pool.reserve(SHAPE, 2)
    late = pool.start(pools.request("late", "let it in"))
    early = pool.start(pools.request("early"))

    assert pool.first_of([late, early]) is early
    assert not late.done
    assert pool.finish(early).record.verdict is Verdict.PASS
    (pools.folder / "let it in").touch()
    assert pool.finish(late).record.verdict is Verdict.PASS


def test_everything_shown_comes_from_the_thread_that_waits_and_names_every_boot(pools: Pools) -> None:
    def let_them_in_once_both_were_shown(labels: tuple[str, ...]) -> None:
        if labels == ("one", "two"):
            (pools.folder / "shown").touch()

    pools.on_show = let_them_in_once_both_were_shown
    pool = pools.make()
    pool.reserve(SHAPE, 2)
    for boot in [pool.start(pools.request(name, "shown")) for name in ("one", "two")]:
        assert pool.finish(boot).record.verdict is Verdict.PASS

    assert {thread for thread, _ in pools.shown} == {threading.main_thread()}


def test_a_boot_in_this_thread_goes_on_beside_those_in_others(pools: Pools) -> None:
    pool = pools.make()
    pool.reserve(SHAPE, 1)
    beside = pool.start(pools.request("beside", "here"))
    here = pool.boot(pools.request("here"), reuse=False)
    assert here.record.verdict is Verdict.PASS
    assert pool.finish(beside).record.verdict is Verdict.PASS
    assert device(here) != device(beside.attempt)


def test_a_failure_beside_a_pass_is_a_failure(pools: Pools) -> None:
    pool = pools.make()
    pool.reserve(SHAPE, 2)
    fits = pool.start(pools.request("fits", "large"))
    large = pool.start(pools.request("large", "fits", window=200_000))
    assert pool.finish(large).record.verdict is Verdict.FAIL
    assert pool.finish(fits).record.verdict is Verdict.PASS


# -- cut short


def hanging(pools: Pools, pool: EnginePool, *names: str, last_words: str = "") -> list[Booting]:
    """Boots that never come up, launched."""
    assert pool.reserve(SHAPE, len(names)) == len(names)
    boots = [pool.start(pools.request(name, "nobody", last_words=last_words)) for name in names]
    wait_for("all launches", lambda: pools.came(*names))
    return boots


def test_a_boot_that_is_called_off_is_ended_and_no_failure(pools: Pools) -> None:
    pool = pools.make()
    (hangs,) = hanging(pools, pool, "hangs", last_words=OUT_OF_MEMORY)
    stays = pool.finish(pool.start(pools.request("stays")))

    pool.call_off(hangs.attempt)

    assert OUT_OF_MEMORY in hangs.attempt.log_path.read_text()
    record = on_disk(hangs.attempt)
    assert (record.verdict, record.cause) == (Verdict.UNKNOWN, None)
    assert record.message == "interrupted: this boot was called off before it had a verdict"
    check_gone(hangs.attempt)
    assert pool.cancelled == [hangs.attempt]
    assert pool.cut_short is None
    assert stays.serving
    assert stays.record.verdict is Verdict.PASS
    pool.release()
    lease_of(pool, device(hangs.attempt)).close()


def test_what_is_raised_while_waiting_ends_every_boot(pools: Pools) -> None:
    class StopError(BaseException):
        """What a signal handler raises: an interrupt, a timeout."""

    def raise_it(*_: object) -> None:
        raise StopError

    pool = pools.make()
    boots = hanging(pools, pool, "one", "two", "three", last_words=OUT_OF_MEMORY)
    interrupt = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGUSR1))
    pools.on_show = lambda _: None if interrupt.ident else interrupt.start()
    before = signal.signal(signal.SIGUSR1, raise_it)
    try:
        with pytest.raises(StopError):
            pool.finish(boots[1])
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert pool.cut_short is boots[1].attempt
    assert pool.cancelled == [boots[0].attempt, boots[2].attempt]
    for boot in boots:
        record = on_disk(boot.attempt)
        assert (record.verdict, record.cause) == (Verdict.UNKNOWN, None)
        assert record.message.startswith("interrupted")
        check_gone(boot.attempt)
    pool.release()
    lease_of(pool, "0", "1", "2").close()


def test_closing_the_pool_ends_what_boots_and_frees_the_devices(pools: Pools) -> None:
    pool = pools.make()
    boots = hanging(pools, pool, "one", "two")
    pool.close()
    for boot in boots:
        record = on_disk(boot.attempt)
        assert record.verdict is Verdict.UNKNOWN
        assert record.message == "interrupted: the run ended before this boot had a verdict", "nobody called it off"
        check_gone(boot.attempt)
    assert pool.cancelled == [boot.attempt for boot in boots]
    lease_of(pool, "0", "1", "2", "3").close()


def test_a_boot_that_is_called_off_before_its_device_is_clean_starts_nothing(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = pools.make(cards=(0,)).boot(pools.request("foreign"))
    monkeypatch.setenv("KVBUDGET_LEASE_DIR", str(pools.folder / "leases of people who do not see ours"))
    pool = pools.make(cards=(0,))
    waits = pool.start(pools.request("waits"))

    pool.call_off(waits.attempt)

    record = on_disk(waits.attempt)
    assert (record.verdict, record.message) == (
        Verdict.UNKNOWN,
        "interrupted: this boot was called off before it had a verdict",
    )
    assert not record.command
    assert not pools.came("waits")
    assert foreign.serving


def test_an_engine_that_served_and_was_judged_by_no_body_is_no_pass(pools: Pools) -> None:
    pool = pools.make()
    pool.reserve(SHAPE, 1)
    boot = pool.start(pools.request("serves"))
    assert pool.first_of([boot]) is boot
    assert boot.attempt.record.verdict is Verdict.PASS
    pool.retire(boot.attempt)
    record = on_disk(boot.attempt)
    assert record.verdict is Verdict.UNKNOWN
    assert record.cause is not None
    assert record.cause.failure_class == "interrupted"


def test_a_failure_that_nobody_asked_for_stays_one(pools: Pools) -> None:
    pool = pools.make()
    pool.reserve(SHAPE, 1)
    boot = pool.start(pools.request("large", window=200_000))
    pool.first_of([boot])
    pool.retire(boot.attempt)
    assert on_disk(boot.attempt).verdict is Verdict.FAIL


def test_what_a_boot_raises_comes_out_where_its_verdict_is_asked_for(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: Attempt) -> None:
        raise MemoryError(self.request.rung)

    monkeypatch.setattr(Attempt, "run", run)
    pool = pools.make()
    boot = pool.start(pools.request("breaks"))
    with pytest.raises(MemoryError, match="breaks"):
        pool.finish(boot)
    assert pool.cut_short is boot.attempt
    assert pool.cancelled == []


# -- devices


def test_only_free_sets_are_reserved_and_no_more_than_asked(pools: Pools) -> None:
    pool = pools.make()
    taken = lease_of(pool, "0", "2")
    assert pool.reserve(SHAPE, 4) == 2
    assert pool.reserve(SHAPE, 1) == 1
    taken.close()
    assert pool.reserve(SHAPE, 4) == 4


def test_beside_running_boots_nothing_is_waited_for(pools: Pools) -> None:
    pool = pools.make(cards=(0, 1))
    boots = hanging(pools, pool, "one", "two")
    assert pool.reserve(SHAPE, 2) == 0
    pool.retire(boots[0].attempt)
    assert pool.reserve(SHAPE, 2) == 1


def test_a_fixed_port_serves_one_engine_at_a_time(pools: Pools) -> None:
    pool = pools.make(port=18_734)
    assert pool.reserve(SHAPE, 4) == 1
    hanging(pools, pool, "one")
    assert pool.reserve(SHAPE, 4) == 0


def test_idle_engines_make_room(pools: Pools) -> None:
    pool = pools.make(cards=(0,))
    idle = pool.boot(pools.request("idle"))
    pool.done(idle)
    assert idle.serving
    assert pool.reserve(SHAPE, 2) == 1
    assert not idle.serving


def test_no_set_in_time_names_who_holds_it(pools: Pools) -> None:
    waiting: list[str] = []
    pool = pools.make(cards=(0,), lease_seconds=0.2, on_wait=waiting.append)
    lease = lease_of(pool, "0")
    with pytest.raises(PoolError, match="run other"):
        pool.reserve(SHAPE, 2)
    assert "run other" in waiting[0]
    lease.close()


def test_who_waits_for_a_first_set_goes_before_anybodys_second(pools: Pools) -> None:
    pool = pools.make(cards=(0, 1, 2))
    assert pool.reserve(SHAPE, 3) == 3
    got: list[Lease] = []
    waiter = threading.Thread(target=lambda: got.append(lease_of(pool, "1", timeout_s=20)))
    waiter.start()
    wait_for("a set that is given up", lambda: pool.reserve(SHAPE, 3) == 2)
    waiter.join()
    assert pool.reserve(SHAPE, 3) == 2
    got[0].close()
    assert pool.reserve(SHAPE, 3) == 3


def test_equal_cards_make_equal_sets_and_skewed_ones_do_not(pools: Pools) -> None:
    for skew, labels in ((0, 1), (1 * MIB, 1), (SKEW_BYTES, 2)):
        pools.folder = pools.folder / f"skew{skew}"
        pools.folder.mkdir()
        pool = pools.make(skew=skew)
        pool.reserve(SHAPE, 2)
        boots = [pool.start(pools.request(name)) for name in ("one", "two")]
        found = [pool.finish(boot).record.device_set for boot in boots]
        assert None not in found
        assert len(set(found)) == labels, (skew, found)
        pool.close()


def test_a_target_with_one_set_needs_no_label(pools: Pools) -> None:
    assert pools.make(cards=(0,)).boot(pools.request("one")).record.device_set is None


def test_a_boot_goes_to_the_set_that_it_asks_for(pools: Pools) -> None:
    pool = pools.make(skew=SKEW_BYTES)
    pool.reserve(SHAPE, 4)
    boots = [pool.finish(pool.start(pools.request(f"first{number}"))) for number in range(3)]
    for boot in boots:
        pool.retire(boot)
    asked = boots[2]
    again = pool.finish(pool.start(pools.request("again"), device_set=asked.record.device_set))
    assert (device(again), again.record.device_set) == (device(asked), asked.record.device_set)


def test_the_set_of_an_earlier_runs_label_is_found_by_looking(pools: Pools) -> None:
    earlier = pools.make(skew=SKEW_BYTES)
    earlier.reserve(SHAPE, 4)
    boots = [earlier.finish(earlier.start(pools.request(f"earlier{number}"))) for number in range(3)]
    earlier.close()

    pool = pools.make(skew=SKEW_BYTES)
    again = pool.finish(pool.start(pools.request("again"), device_set=boots[2].record.device_set))
    assert device(again) == device(boots[2])


def test_the_set_that_is_asked_for_is_waited_for_where_others_hold_it(pools: Pools) -> None:
    told: list[str] = []
    pool = pools.make(cards=(0, 1), skew=SKEW_BYTES, on_wait=told.append)
    first = pool.finish(pool.start(pools.request("first")))
    pool.retire(first)
    pool.release()
    others = lease_of(pool, device(first))

    def give_way() -> None:
        wait_for("somebody who waits", lambda: wanted(others.names))
        others.close()

    giver = threading.Thread(target=give_way)
    giver.start()
    again = pool.finish(pool.start(pools.request("again"), device_set=first.record.device_set))
    giver.join()
    assert device(again) == device(first)
    assert "run other" in told[0]


def test_any_set_does_where_the_one_asked_for_is_not_to_be_had(pools: Pools) -> None:
    pool = pools.make(cards=(0, 1), skew=SKEW_BYTES)
    attempt = pool.finish(pool.start(pools.request("one"), device_set="no set of that name"))
    assert attempt.record.verdict is Verdict.PASS
    assert attempt.record.device_set not in {None, "no set of that name"}
