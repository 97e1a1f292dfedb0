"""Ladders on device sets that differ: a failure on one of them says nothing about another."""

from __future__ import annotations

from pytest_kvbudget.ledger.model import Cause
from pytest_kvbudget.search.ladder import Ask, Ladder
from pytest_kvbudget.search.model import Axis, Hint, Limit, Trial
from pytest_kvbudget.search.noise import Noise
from pytest_kvbudget.search.predict import Predict
from pytest_kvbudget.search.strategies import Bisect
from pytest_kvbudget.units import MIB
from pytest_kvbudget.verdict import FindingKind, Phase, Verdict

AXIS = Axis(name="max_model_len", floor=4096, ceiling=131_072, quantum=4096)
CAPTURE = Cause(phase=Phase.GRAPH_CAPTURE, failure_class="graph_capture_oom", sentence="76.00 MiB did not fit")
BOUNDARY = {"a": 90_112, "b": 81_920}
"""Largest window of two kinds of device."""


def boot(ask: Ask, device_set: str) -> Trial:
    """At 20 kB a token, on the set that was asked for or on the one that is free."""
    there = ask.device_set or device_set
    margin = (BOUNDARY[there] + 2048 - ask.value) * 20_000.0
    return Trial(
        value=ask.value,
        verdict=Verdict.PASS if margin >= 0 else Verdict.FAIL,
        cause=None if margin >= 0 else CAPTURE,
        hint=Hint(limits=(Limit(name="device_memory", margin_bytes=margin, bytes_per_unit=20_000),)),
        device_set=there,
    )


def climb(free: dict[int, str]) -> tuple[Ladder, list[Ask]]:
    """A ladder whose rungs boot on these sets, and on ``a`` everywhere else."""
    ladder = Ladder(AXIS, Bisect(), noise=Noise(sigma_bytes=MIB, source="archive"))
    asks = []
    while (ask := ladder.next()) is not None:
        asks.append(ask)
        assert len(asks) < 20
        ladder.tell(boot(ask, free.get(ask.value, "a")))
    return ladder, asks


def test_a_neighbour_that_passes_on_the_winners_devices_is_no_end_of_the_search() -> None:
    """90,112 fails on ``b`` and passes on ``a``, where the winner below it was booted: the search goes on there."""
    ladder, asks = climb({90_112: "b"})
    finding = ladder.finding()
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, 90_112, 94_208)
    assert any((ask.value, ask.why, ask.device_set) == (90_112, "pair", "a") for ask in asks)
    assert "device sets differ; only boots on one with a count" in finding.sentence


def test_a_failure_below_a_pass_on_other_devices_is_no_contradiction() -> None:
    ladder = Ladder(AXIS, Bisect(), noise=Noise(sigma_bytes=MIB, source="archive"))
    for value, there in ((86_016, "b"), (90_112, "a")):
        ladder.know(boot(Ask(value=value, index=None, attempt=1, why="known"), there))
    while (ask := ladder.next()) is not None:
        ladder.tell(boot(ask, "a"))
    finding = ladder.finding()
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, 90_112, 94_208)


def test_where_the_winners_devices_are_the_lesser_ones_its_neighbour_fails_there_too() -> None:
    ladder, _ = climb({81_920: "b"})
    finding = ladder.finding()
    assert finding.kind is FindingKind.PROVEN
    assert finding.value in BOUNDARY.values()


def test_devices_that_cannot_be_had_twice_leave_it_undecided() -> None:
    """What is asked for on ``a`` boots on ``b``: it counts nowhere, and is not asked for without end."""
    ladder = Ladder(AXIS, Bisect(), noise=Noise(sigma_bytes=MIB, source="archive"))
    for value, there in ((86_016, "b"), (90_112, "a")):
        ladder.know(boot(Ask(value=value, index=None, attempt=1, why="known"), there))
    boots = 0
    while (ask := ladder.next()) is not None:
        boots += 1
        ladder.tell(boot(Ask(value=ask.value, index=None, attempt=1, why="known"), "b"))
    finding = ladder.finding()
    assert (finding.kind, finding.value, boots) == (FindingKind.UNDECIDED, 90_112, 2)
    assert "device sets differ, and no further boot on a was to be had" in finding.sentence


def test_an_error_on_one_set_calls_the_boots_on_all_others_off() -> None:
    ladder = Ladder(AXIS, Predict())
    first, *others = ladder.next_batch(4)
    assert others
    ladder.tell(Trial(value=first.value, verdict=Verdict.ERROR))
    assert set(ladder.moot()) == {ask.value for ask in others}
    for value in ladder.moot():
        ladder.drop(value)
    assert ladder.next_batch(4) == ()
    assert ladder.finding().kind is FindingKind.ERROR
