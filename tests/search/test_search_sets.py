"""Ladders on device sets that differ: a failure on one of them says nothing about another."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pytest_kvbudget.ledger.model import Cause, Lever
from pytest_kvbudget.search.knobs import KNOBS
from pytest_kvbudget.search.ladder import Ask, Ladder
from pytest_kvbudget.search.model import Axis, Hint, Limit, SetBound, Trial
from pytest_kvbudget.search.noise import Noise
from pytest_kvbudget.search.predict import Predict
from pytest_kvbudget.search.sets import Words, bounds, notes
from pytest_kvbudget.search.strategies import Bisect
from pytest_kvbudget.search.sweep import Sweep
from pytest_kvbudget.units import GIB, MIB
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
        devices={"a": ("0",), "b": ("1",)}[there],
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
    assert "device sets differ, and this holds for devices 0 (a)" in finding.sentence


def known(ladder: Ladder, *boots: tuple[int, str]) -> None:
    for value, there in boots:
        ladder.know(boot(Ask(value=value, index=None, attempt=1, why="known"), there))
    while (ask := ladder.next()) is not None:
        ladder.tell(boot(ask, "a"))


def test_the_lesser_devices_are_named_with_the_largest_that_passed_there() -> None:
    ladder = Ladder(AXIS, Bisect(), noise=Noise(sigma_bytes=MIB, source="archive"))
    known(ladder, (77_824, "b"), (86_016, "b"), (90_112, "a"))
    finding = ladder.finding()
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, 90_112, 94_208)
    assert finding.sets == (
        SetBound(device_set="a", devices=("0",), passed=90_112, failed_at=94_208),
        SetBound(device_set="b", devices=("1",), passed=77_824, failed_at=86_016),
    )
    assert finding.notes[-2:] == (
        "device sets differ, and this holds for devices 0 (a)",
        "on devices 1 (b) max_model_len 86,016 failed: deploy at most 77,824 there, the largest that passed",
    )


def test_where_nothing_passed_on_the_lesser_devices_nothing_is_promised_for_them() -> None:
    ladder = Ladder(AXIS, Bisect(), noise=Noise(sigma_bytes=MIB, source="archive"))
    known(ladder, (86_016, "b"), (90_112, "a"))
    assert ladder.finding().notes[-1] == (
        "on devices 1 (b) max_model_len 86,016 failed, and nothing passed there: it needs a search of its own"
    )


def test_what_was_not_booted_elsewhere_is_said_and_so_is_what_passed() -> None:
    ladder = Ladder(AXIS, Bisect(), noise=Noise(sigma_bytes=MIB, source="archive"))
    known(ladder, (40_960, "b"), (94_208, "a"))
    assert ladder.finding().notes[-1] == "max_model_len 90,112 was not booted on devices 1 (b), where 40,960 passed"
    other = Ladder(replace(AXIS, ceiling=81_920), Bisect())
    known(other, (81_920, "b"), (77_824, "a"))
    assert other.finding().kind is FindingKind.CEILING_REACHED
    assert other.finding().notes[-2:] == (
        "device sets differ, and this holds for devices 1 (b)",
        "max_model_len 81,920 was not booted on devices 0 (a), where 77,824 passed",
    )


def test_nothing_passes_only_where_it_was_booted() -> None:
    """The floor fails on ``b``; on ``a`` only a larger window was booted."""
    axis = replace(AXIS, floor=86_016)
    ladder = Ladder(axis, Predict())
    for value, there in ((94_208, "a"), (86_016, "b")):
        ladder.know(boot(Ask(value=value, index=None, attempt=1, why="known"), there))
    assert ladder.next() is None
    finding = ladder.finding()
    assert finding.kind is FindingKind.EMPTY
    assert finding.notes[-2:] == (
        "device sets differ, and this holds for devices 1 (b)",
        "max_model_len 86,016 was not booted on devices 0 (a)",
    )


def test_many_kinds_of_lesser_devices_are_counted_and_the_weakest_named() -> None:
    sets = bounds(
        [boot(Ask(value=90_112, index=None, attempt=1, why="search"), "a")]
        + [trial for letter in "vwxyz" for trial in (
            Trial(value=86_016, verdict=Verdict.FAIL, device_set=letter),
            Trial(value=40_960 + 4096 * ord(letter) % 7, verdict=Verdict.PASS, device_set=letter),
        )],
        "a",
    )  # fmt: skip
    said = notes(sets, 90_112, 94_208, Words("max_model_len", AXIS.show))
    passed = sorted(bound.passed or 0 for bound in sets[1:])
    assert len(said) == 5
    assert f"deploy at most {passed[0]:,} there" in said[1]
    assert said[-1] == "it failed on 2 further kinds of device sets"


SHARE = Axis(name="gpu_memory_utilization", floor=8000, ceiling=9800, quantum=100, scale=10_000)
TOO_LITTLE = Cause(
    phase=Phase.KV_CHECK,
    failure_class="kv_check_short",
    sentence="one request does not fit",
    levers=(Lever("gpu_memory_utilization", "raise", "helps"),),
)


def share(value: int, there: str) -> Trial:
    """What passes: 0.85 to 0.95 on ``a``, 0.92 to 0.95 on ``b``."""
    cause = TOO_LITTLE if value < {"a": 8500, "b": 9200}[there] else CAPTURE if value > 9500 else None
    verdict = Verdict.PASS if cause is None else Verdict.FAIL
    return Trial(value=value, verdict=verdict, cause=cause, device_set=there)


def test_too_little_on_one_set_is_no_contradiction_of_a_pass_below_it_on_another() -> None:
    ladder = Ladder(SHARE, Bisect(), noise=Noise(sigma_bytes=0, source="archive"))
    for value, there in ((9000, "b"), (8900, "a")):
        ladder.know(share(value, there))
    while (ask := ladder.next()) is not None:
        ladder.tell(share(ask.value, ask.device_set or "b"))
    finding = ladder.finding()
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, 9500, 9600)
    assert (finding.sets[0].device_set, finding.sets[1].short_at) == ("a", 9000)


def test_too_little_above_a_pass_is_booted_again_before_it_is_a_contradiction() -> None:
    """On one set: each of the two once more, as a failure below a pass is."""
    ladder = Ladder(SHARE, Bisect(), noise=Noise(sigma_bytes=0, source="archive"))
    for trial in (share(9000, "b"), share(8900, "a")):
        ladder.know(replace(trial, device_set=None))
    asked = []
    while (ask := ladder.next()) is not None:
        asked.append((ask.value, ask.why))
        ladder.tell(replace(share(ask.value, "b" if ask.value == 9000 else "a"), device_set=None))
    finding = ladder.finding()
    assert asked == [(9000, "repeat"), (8900, "repeat")]
    assert finding.kind is FindingKind.NON_MONOTONE
    assert "gpu_memory_utilization 0.9 failed for want of more although 0.89 passed, each of them twice" in (
        finding.sentence
    )


HEADROOM = KNOBS["reserved_headroom"]
MINIMUM = Cause(phase=Phase.KV_CHECK, failure_class="min_kv_budget", sentence="less than the minimum")
ALLOCATION = Cause(phase=Phase.COMPILE, failure_class="compile_hbm_exceeded", sentence="more than the limit")
WINDOW = {"a": (5, 12), "b": (8, 12), "c": (3, 4)}
"""GiB of headroom between which a kind of device passes."""


def headroom(gib: float, there: str) -> Trial:
    low, high = WINDOW[there]
    cause = ALLOCATION if gib < low else MINIMUM if gib > high else None
    verdict = Verdict.PASS if cause is None else Verdict.FAIL
    return Trial(value=int(gib * GIB), verdict=verdict, cause=cause, device_set=there, devices=(there,))


def sweep(first: list[tuple[int, str]], rest: str, **more: Any) -> tuple[Sweep, int]:
    """A sweep that knows boots, and whose others are made on one set unless another is asked for."""
    search = Sweep(
        HEADROOM, lowest=0, highest=20 * GIB, confirm=0, noise=Noise(sigma_bytes=0, source="archive"), **more
    )
    for gib, there in first:
        search.know(headroom(gib, there))
    boots = 0
    while (ask := search.next()) is not None:
        boots += 1
        assert boots < 20
        search.tell(headroom(ask.value / GIB, ask.device_set or rest))
    return search, boots


def test_a_sweep_holds_for_the_devices_that_it_was_proven_on_and_names_the_lesser_ones() -> None:
    search, _ = sweep([(9, "b"), (6, "b"), (5, "a")], "a")
    finding = search.finding()
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, 5 * GIB, 4 * GIB)
    assert finding.sets[1] == SetBound(device_set="b", devices=("b",), passed=9 * GIB, failed_at=6 * GIB)
    assert (
        "on devices b (b) reserved_headroom 6.00 GiB failed for allocation: deploy at least 9.00 GiB there, "
        "the smallest that passed"
    ) in finding.notes


def test_a_winner_is_confirmed_where_it_passed() -> None:
    ladder = Ladder(AXIS, Bisect(), confirm=1)
    for value, there in ((90_112, "a"), (94_208, "a")):
        ladder.know(boot(Ask(value=value, index=None, attempt=1, why="known"), there))
    ask = ladder.next()
    assert ask is not None
    assert (ask.value, ask.why, ask.device_set) == (90_112, "confirm", "a")


def test_opposite_failures_on_two_sets_are_no_contradiction_of_a_sweep() -> None:
    """5 GiB are too much for ``c`` and 6 pass on ``a``."""
    search, _ = sweep([(5, "c"), (6, "a")], "a")
    finding = search.finding()
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, 5 * GIB, 4 * GIB)
    assert finding.short_at is None, "what failed for the opposite reason on another set bounds nothing here"
    assert finding.sets[1].short_at == 5 * GIB
    assert any("failed for too little KV cache, and nothing passed there" in note for note in finding.notes)


def test_a_finer_grid_stays_on_the_devices_of_the_coarse_one() -> None:
    search, _ = sweep([(6, "b"), (5, "a")], "b", fine_step=GIB // 2)
    finding = search.finding()
    assert (finding.kind, finding.step, finding.sets[0].device_set) == (FindingKind.PROVEN, GIB // 2, "a")
    assert finding.sets[1].failed_at == 6 * GIB


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


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    ends=st.dictionaries(st.sampled_from("abcd"), st.integers(0, 34), min_size=2),
    count=st.integers(1, 3),
    exact=st.booleans(),
)
def test_what_is_said_of_each_kind_of_set_is_so(
    data: st.DataObject, ends: dict[str, int], count: int, exact: bool
) -> None:
    """Whichever set a boot gets that names none; sets of a kind are always to be had."""
    ladder = Ladder(AXIS, Predict(), noise=None if exact else Noise(sigma_bytes=0, source="archive"))
    told: dict[tuple[int, str], bool] = {}
    boots = 0
    while asks := ladder.next_batch(count):
        ask = data.draw(st.sampled_from(asks))
        there = ask.device_set or data.draw(st.sampled_from(sorted(ends)))
        passed = told[ask.value, there] = ask.value <= 4096 * ends[there]
        verdict = Verdict.PASS if passed else Verdict.FAIL
        ladder.tell(Trial(value=ask.value, verdict=verdict, cause=None if passed else CAPTURE, device_set=there))
        boots += 1
        assert boots <= 60
    finding = ladder.finding()
    kinds = {there for _, there in told}
    assert {bound.device_set for bound in finding.sets} == kinds
    for bound in finding.sets:
        end = 4096 * ends[bound.device_set]
        assert bound.passed is None or (bound.passed <= end and told[bound.passed, bound.device_set])
        assert bound.failed_at is None or (bound.failed_at > end and not told[bound.failed_at, bound.device_set])
    first = 4096 * ends[finding.sets[0].device_set]
    if finding.kind is FindingKind.PROVEN:
        assert (finding.value, finding.failed_at) == (first, first + 4096)
    elif finding.kind is FindingKind.CEILING_REACHED:
        assert first >= AXIS.ceiling
    else:
        assert (finding.kind, finding.failed_at) == (FindingKind.EMPTY, AXIS.floor), finding.sentence
        assert first < AXIS.floor
    assert any(note.startswith("device sets differ, and this holds for ") for note in finding.notes) == (len(kinds) > 1)


def test_a_finer_grid_stays_on_the_set_that_its_ends_were_booted_on() -> None:
    """On ``b`` 13 GiB pass and 12 do not; ``a`` passes with nothing: its word on 12.5 says nothing of ``b``."""
    search = Sweep(
        HEADROOM, lowest=0, highest=20 * GIB, confirm=1, noise=Noise(sigma_bytes=0, source="archive"),
        fine_step=GIB // 2,
    )  # fmt: skip
    free = iter("babba")
    while (ask := search.next()) is not None:
        there = ask.device_set or next(free, "a")
        least, most = (0, 13) if there == "a" else (13, 13)
        gib = ask.value / GIB
        cause = ALLOCATION if gib < least else MINIMUM if gib > most else None
        verdict = Verdict.PASS if cause is None else Verdict.FAIL
        search.tell(Trial(value=ask.value, verdict=verdict, cause=cause, device_set=there))
    finding = search.finding()
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, 13 * GIB, 25 * GIB // 2)
    assert finding.sets[0].device_set == "b"


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    windows=st.dictionaries(
        st.sampled_from("abcd"), st.tuples(st.integers(0, 21), st.integers(-1, 21)), min_size=2, max_size=4
    ),
    count=st.integers(1, 3),
    fine=st.booleans(),
)
def test_a_sweep_is_right_for_the_kind_of_set_that_it_holds_for(
    data: st.DataObject, windows: dict[str, tuple[int, int]], count: int, fine: bool
) -> None:
    """From ``low`` to ``high`` GiB a kind of set passes; where that is nothing both failures meet."""
    windows = {name: (low, max(low - 1, high)) for name, (low, high) in windows.items()}
    search = Sweep(
        HEADROOM, lowest=0, highest=20 * GIB, confirm=1, noise=Noise(sigma_bytes=0, source="archive"),
        fine_step=GIB // 2 if fine else None,
    )  # fmt: skip
    boots = 0
    while asks := search.next_batch(count):
        ask = data.draw(st.sampled_from(asks))
        there = ask.device_set or data.draw(st.sampled_from(sorted(windows)))
        low, high = windows[there]
        gib = ask.value / GIB
        cause = ALLOCATION if gib < low else MINIMUM if gib > high else None
        verdict = Verdict.PASS if cause is None else Verdict.FAIL
        search.tell(Trial(value=ask.value, verdict=verdict, cause=cause, device_set=there))
        boots += 1
        assert boots <= 80
    finding = search.finding()
    low, high = windows[finding.sets[0].device_set]
    if finding.proven:
        assert finding.value == low * GIB, finding.sentence
        assert low <= high
        assert finding.failed_at in {None, low * GIB - finding.step}
    else:
        assert finding.kind in {FindingKind.EMPTY, FindingKind.EMPTY_WINDOW}, finding.sentence
        assert low > high or low > 20
    for bound in finding.sets:
        low, high = windows[bound.device_set]
        assert bound.passed is None or low * GIB <= bound.passed <= high * GIB
        assert bound.failed_at is None or bound.failed_at < low * GIB
        assert bound.short_at is None or bound.short_at > high * GIB


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
