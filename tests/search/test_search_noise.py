"""Boots that differ: what is proven, what is flaky, what was only cold, and what a deploy may promise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import NormalDist
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvbudget.ledger.model import BootLedger, Cause, Evidence, Value
from pytest_kvbudget.search.bracket import boot_bound
from pytest_kvbudget.search.ladder import Ask, Ladder
from pytest_kvbudget.search.model import Axis, Hint, Limit, Prior, Trial
from pytest_kvbudget.search.noise import (
    ASSUMED_SIGMA_BYTES,
    OUTSIDE_TERM,
    PRINTED_SIGMA_BYTES,
    Noise,
    grain,
    ledger_grain,
    steady_terms,
)
from pytest_kvbudget.search.predict import Predict
from pytest_kvbudget.search.strategies import Bisect, Step
from pytest_kvbudget.units import GIB, MIB
from pytest_kvbudget.verdict import FindingKind, Phase, Verdict

AXIS = Axis(name="max_model_len", floor=4096, ceiling=131_072, quantum=4096)
KV = Cause(phase=Phase.KV_CHECK, failure_class="kv_check_short", sentence="0.12 GiB needed")
CAPTURE = Cause(phase=Phase.GRAPH_CAPTURE, failure_class="graph_capture_oom", sentence="76.00 MiB did not fit")
SIGMA = Noise(sigma_bytes=10 * MIB, source="archive")
"""An eighth of a quantum at 20 kB per token."""


def trial(value: int, passed: bool, margin: float | None = None, **more: object) -> Trial:
    """A boot at 20 kB per token that had so much left or was short of so much."""
    hint = Hint()
    if margin is not None:
        hint = Hint(limits=(Limit(name="device_memory", margin_bytes=margin, bytes_per_unit=20_000),))
    verdict = Verdict.PASS if passed else Verdict.FAIL
    arguments = {"cause": None if passed else CAPTURE, **more}
    return Trial(value=value, verdict=verdict, hint=hint, **arguments)  # type: ignore[arg-type]


def run(ladder: Ladder, device: Callable[[Ask], Trial], most: int = 60) -> list[Ask]:
    asks = []
    while (ask := ladder.next()) is not None:
        asks.append(ask)
        assert len(asks) <= most
        ladder.tell(device(ask))
    return asks


def scripted(verdicts: dict[int, str], margin: float | None = None) -> Callable[[Ask], Trial]:
    """Each value's verdicts in turn, ``P`` or ``F``; the last one again and again."""

    def device(ask: Ask) -> Trial:
        script = verdicts[ask.value]
        return trial(ask.value, script[min(ask.attempt, len(script)) - 1] == "P", margin)

    return device


def by_boundary(boundary: int, **others: str) -> dict[int, str]:
    """Scripts of a device on which values up to ``boundary`` pass; ``v40960`` sets one of its own."""
    scripts = {AXIS.value(index): "P" if AXIS.value(index) <= boundary else "F" for index in range(len(AXIS))}
    return scripts | {int(name[1:]): script for name, script in others.items()}


# -- sigma


def test_sigma_of_five_repeats_else_assumed() -> None:
    assert Noise.of([1.0, 2.0, 3.0, 4.0]) == Noise(sigma_bytes=64 * MIB, source="assumed")
    found = Noise.of([10.0, 12.0, 14.0, 16.0, 18.0])
    assert found.source == "archive"
    assert found.sigma_bytes == pytest.approx(10**0.5)


def test_an_assumption_gives_way_to_the_ladders_own_residuals() -> None:
    def boots(*loads: float) -> list[Trial]:
        return [trial(4096 * (n + 1), True, terms={OUTSIDE_TERM: load}) for n, load in enumerate(loads)]

    assert Noise().measured(boots(1e9)) == Noise()
    # of few boots the whole spread
    assert Noise().measured(boots(1e9, 1e9 + 30)) == Noise(sigma_bytes=30.0, source="residuals")
    assert Noise().measured(boots(1e9, 1e9, 1e9)).sigma_bytes == 0
    assert SIGMA.measured(boots(1e9, 2e9)) == SIGMA
    # what is printed alike, to two decimals of a GiB, may differ by what they hide
    printed = [trial(4096 * (n + 1), True, terms={"model_load_bytes": 5.0 * GIB}) for n in range(3)]
    assert Noise().measured(printed).sigma_bytes == pytest.approx(0.01 * GIB / 12**0.5)
    assert Noise().sigma_bytes == ASSUMED_SIGMA_BYTES == 64 * MIB


def test_a_trend_along_the_axis_is_no_noise() -> None:
    """A model's tables grow with the window: three boots tell that from noise, and two say nothing beyond 64 MiB."""

    def boots(*loads: tuple[int, float]) -> list[Trial]:
        return [trial(value, True, terms={"model_load_bytes": load * MIB}) for value, load in loads]

    assert Noise().measured(boots((4096, 5000), (69_632, 5100))) == Noise()
    line = [(4096, 5000.0), (69_632, 5100.0), (135_168, 5200.0)]
    assert Noise().measured(boots(*line)).sigma_bytes == PRINTED_SIGMA_BYTES
    # two boots of one rung have no trend: the spread is theirs
    assert Noise().measured(boots((4096, 5000), (4096, 5100))).sigma_bytes == 100 * MIB
    # 5,160 is 60 above the middle of its neighbours: residuals -20, 40, -20
    found = Noise().measured(boots((4096, 5000), (69_632, 5160), (135_168, 5200)))
    assert found.sigma_bytes == pytest.approx(60 * MIB)
    assert found.source == "residuals"


def test_what_being_cold_costs_is_no_noise() -> None:
    def boots(*told: tuple[bool | None, float]) -> list[Trial]:
        return [
            trial(4096 * (number + 1), True, warm=warm, terms={OUTSIDE_TERM: term * MIB})
            for number, (warm, term) in enumerate(told)
        ]

    assert Noise().measured(boots((False, 1800), (True, 2500), (True, 2502))).sigma_bytes == 2 * MIB
    assert Noise().measured(boots((False, 1800), (None, 2500), (True, 2503))).sigma_bytes == 3 * MIB
    assert Noise().measured(boots((False, 1800), (False, 1801), (True, 2500))).sigma_bytes == 1 * MIB
    assert Noise().measured(boots((False, 1800), (True, 2500))) == Noise()


def test_steady_terms_of_a_ledger() -> None:
    facts = {
        name: Value(value=value, unit="bytes", evidence=Evidence(1, name))
        for name, value in (("model_load_bytes", 5.0 * GIB), ("available_kv_bytes", GIB), ("non_torch_bytes", MIB))
    }
    terms = steady_terms(BootLedger(family="vllm", facts=facts), "max_model_len")
    assert terms == {"model_load_bytes": 5.0 * GIB, "non_torch_bytes": float(MIB)}


def test_an_expert_arena_is_no_noise() -> None:
    """It gets what the plan leaves beside the window's reserve: each rung loads another number of experts."""
    facts = {
        name: Value(value=value, unit="bytes", evidence=Evidence(1, name))
        for name, value in (
            ("model_load_bytes", 5.0 * GIB),
            ("consumed_bytes", 6.0 * GIB),
            ("non_torch_bytes", MIB),
            ("plan_expert_cache_bytes", 3.0 * GIB),
        )
    }
    terms = steady_terms(BootLedger(family="rdna4", facts=facts), "max_model_len")
    assert terms == {"non_torch_bytes": float(MIB)}


# -- effective quantum


def test_a_pools_grain_is_a_block() -> None:
    """50 MiB of the real CPU engine are 400 blocks of 128 tokens at 1 KiB a token: 128 KiB each."""
    facts = {"kv_cache_memory_bytes": 50 * MIB, "kv_tokens": 51_200, "block_size": 128}
    ledger = BootLedger(
        family="vllm",
        facts={name: Value(value=value, unit="count", evidence=Evidence(1, name)) for name, value in facts.items()},
    )
    assert ledger_grain(ledger, "kv_cache_memory_bytes") == 128 * 1024
    facts["kv_cache_memory_bytes"] += 5000
    longer = BootLedger(
        family="vllm",
        facts={name: Value(value=value, unit="count", evidence=Evidence(1, name)) for name, value in facts.items()},
    )
    found = ledger_grain(longer, "kv_cache_memory_bytes")
    assert found is not None
    assert 0.99 * 128 * 1024 < found <= 128 * 1024, "never more than a block is"
    assert ledger_grain(ledger, "max_model_len") == 128
    assert ledger_grain(ledger, "max_num_seqs") is None
    assert ledger_grain(BootLedger(family="vllm"), "kv_cache_memory_bytes") is None


def test_a_grain_of_blocks_and_arena_slots() -> None:
    """Hybrids: blocks of 272 to 2,096 tokens; an fp8 expert of 2.34375 MiB at 7,701 B per token is 320 tokens."""
    assert grain(block_tokens=2096) == 2096
    assert grain(slot_bytes=2_457_600, bytes_per_token=7701) == 320
    assert grain(block_tokens=272, slot_bytes=2_457_600, bytes_per_token=7701) == 320
    assert grain() is None


def test_the_grain_that_a_ledger_states() -> None:
    """The RDNA4 document's shape G: 17.77 GiB in 7,762 slots; 9,190 B/token reserved with 8 % on top."""
    facts: dict[str, float] = {
        "plan_expert_cache_bytes": 17.77 * GIB, "plan_slots": 7762, "plan_registry_b_per_token": 9190, "block_size": 16
    }  # fmt: skip
    values = {name: Value(value=value, unit="bytes", evidence=Evidence(1, name)) for name, value in facts.items()}
    assert ledger_grain(BootLedger(family="vllm", facts=values), "max_model_len") == 248  # 2.344 MiB at 9,925 B
    assert ledger_grain(BootLedger(family="vllm", facts=values), "max_num_seqs") is None
    assert ledger_grain(BootLedger(family="vllm"), "max_model_len") is None


def test_a_quantum_below_the_kv_block_is_raised_and_said() -> None:
    axis = Axis(name="max_model_len", floor=4096, ceiling=131_072, quantum=256)
    ladder = Ladder(axis, Predict())
    run(ladder, lambda ask: trial(ask.value, ask.value <= 50_000, grain=2096))
    finding = ladder.finding()
    assert finding.axis.quantum == 2304  # the next multiple of 256
    assert finding.failed_at is not None
    assert finding.value is not None
    assert finding.failed_at - finding.value == 2304
    assert "quantum raised from 256 to 2,304: below 2,096, a KV block or an arena slot" in finding.sentence


def test_a_quantum_below_three_sigma_is_raised_and_said() -> None:
    noise = Noise(sigma_bytes=60 * MIB, source="archive")  # 3,146 tokens at 20 kB
    ladder = Ladder(AXIS, Predict(), noise=noise)
    run(ladder, lambda ask: trial(ask.value, ask.value <= 70_000, abs(70_000 - ask.value) * 20_000.0))
    finding = ladder.finding()
    assert finding.axis.quantum == 12_288
    assert (
        "quantum raised from 4,096 to 12,288: three sigma (sigma 60.00 MiB, from repeated boots in the archive)"
        in finding.sentence
    )


def test_noise_below_a_third_of_a_quantum_leaves_it() -> None:
    ladder = Ladder(AXIS, Predict(), noise=SIGMA)
    run(ladder, lambda ask: trial(ask.value, ask.value <= 70_000, (70_000 - ask.value) * 20_000.0))
    assert ladder.finding().axis.quantum == 4096


def test_arithmetic_on_a_pinned_pool_has_no_noise() -> None:
    """The real CPU engine: 51,072 of 128-token quanta, whatever sigma is assumed, in three boots."""
    axis = Axis(name="max_model_len", floor=1024, ceiling=131_072, quantum=128)

    def boot(ask: Ask) -> Trial:
        margin = (51_200 - 128 - ask.value) * 1024.0
        limit = Limit(name="kv_check", margin_bytes=margin, bytes_per_unit=1024, exact=True)
        verdict = Verdict.PASS if margin >= 0 else Verdict.FAIL
        return Trial(value=ask.value, verdict=verdict, cause=None if margin >= 0 else KV, hint=Hint(limits=(limit,)))

    ladder = Ladder(axis, Predict(), noise=Noise())
    asks = run(ladder, boot)
    finding = ladder.finding()
    assert (finding.kind, finding.value, finding.axis.quantum) == (FindingKind.PROVEN, 51_072, 128)
    assert len(asks) <= 3
    assert finding.repeats == 0
    assert finding.deploy_value == 51_072


# -- proven


def test_a_winner_with_two_sigma_left_needs_no_repetition() -> None:
    ladder = Ladder(AXIS, Bisect(), noise=SIGMA)
    asks = run(ladder, lambda ask: trial(ask.value, ask.value <= 69_632, (72_000 - ask.value) * 20_000.0))
    assert all(ask.why == "search" for ask in asks)
    finding = ladder.finding()
    assert (finding.kind, finding.value, finding.repeats) == (FindingKind.PROVEN, 69_632, 0)
    assert (finding.sigma_bytes, finding.sigma_source) == (10 * MIB, "archive")
    assert finding.deploy_value == 68_059  # 69,632 - 3 * 10 MiB / 20,000
    assert "deploy 68,059, three sigma below" in finding.sentence


@pytest.mark.parametrize("margin", [None, 19.0 * MIB])
def test_a_winner_without_is_booted_until_it_passed_three_times(margin: float | None) -> None:
    ladder = Ladder(AXIS, Bisect(), noise=SIGMA)
    asks = run(ladder, scripted(by_boundary(69_632), margin))
    assert [(ask.value, ask.why, ask.attempt) for ask in asks[-2:]] == [(69_632, "repeat", 2), (69_632, "repeat", 3)]
    finding = ladder.finding()
    assert (finding.kind, finding.repeats) == (FindingKind.PROVEN, 2)
    assert f"{finding.boots} boots, 2 of them repeated" in finding.sentence


def test_three_cold_passes_are_not_enough() -> None:
    ladder = Ladder(AXIS, Bisect(), noise=SIGMA)
    asks = run(ladder, lambda ask: trial(ask.value, ask.value <= 69_632, warm=ask.attempt > 3))
    assert [ask.attempt for ask in asks if ask.value == 69_632] == [1, 2, 3, 4]


def test_a_mixed_winner_counts_as_bad() -> None:
    ladder = Ladder(AXIS, Bisect(), noise=SIGMA)
    run(ladder, scripted(by_boundary(65_536, v69632="PF"), 5.0 * MIB))
    finding = ladder.finding()
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, 65_536, 69_632)


def test_rungs_above_the_proof_are_said_not_to_be_booted() -> None:
    ladder = Ladder(AXIS, Predict(prior=Prior(value=70_000, relative=0.01)))
    assert len(run(ladder, lambda ask: trial(ask.value, ask.value <= 69_632))) == 2
    assert "rungs above 73,728 were not booted" in ladder.finding().sentence
    above = Ladder(AXIS, Step())
    run(above, lambda ask: trial(ask.value, ask.value <= 69_632))
    assert "were not booted" not in above.finding().sentence


# -- cold boots


def test_a_cold_failure_is_booted_again_warm_and_the_warm_verdict_counts() -> None:
    """Cold boots take 120 MiB more: a rung that is short of 50 MiB only when cold serves."""

    def device(ask: Ask) -> Trial:
        warm = ask.attempt > 1
        margin = (75_000 - ask.value) * 20_000.0 - (0 if warm else 120 * MIB)
        return trial(ask.value, margin >= 0, margin, warm=warm)

    ladder = Ladder(AXIS, Predict(), cold_extra_bytes=150 * MIB)
    asks = run(ladder, device)
    finding = ladder.finding()
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, 73_728, 77_824)
    assert "warm" in [ask.why for ask in asks]
    assert "73,728 failed on a first, cold boot and passed with a warm cache" in finding.sentence


@settings(deadline=None)
@given(st.integers(3, 33), st.integers(1, 30), st.sampled_from((None, 400.0 * MIB)))
def test_cold_failures_that_were_none_are_halved(boundary: int, cold_quanta: int, extra: float | None) -> None:
    """Every rung compiles anew, and cold boots take some quanta more: the warm boundary is proven without a walk."""

    def device(ask: Ask) -> Trial:
        warm = ask.attempt > 1
        passed = ask.value <= (boundary - (0 if warm else cold_quanta)) * AXIS.quantum
        return trial(ask.value, passed, warm=warm)

    ladder = Ladder(AXIS, Predict(), cold_extra_bytes=extra)
    asks = run(ladder, device, most=3 * boot_bound(AXIS))
    finding = ladder.finding()
    best = min(boundary * AXIS.quantum, AXIS.ceiling)
    assert finding.value == best
    assert finding.kind is (FindingKind.CEILING_REACHED if best == AXIS.ceiling else FindingKind.PROVEN)
    # nothing but the doubted rungs is booted twice
    assert all(ask.attempt <= 2 for ask in asks)


@pytest.mark.parametrize(
    ("cause", "deficit", "extra", "again"),
    [
        (CAPTURE, 50.0 * MIB, 100.0 * MIB, True),
        (CAPTURE, 150.0 * MIB, 100.0 * MIB, False),
        (CAPTURE, None, 100.0 * MIB, True),
        (CAPTURE, 150.0 * MIB, None, True),
        (CAPTURE, 50.0 * MIB, 0.0, False),
        # vLLM compiles before it sizes the KV cache, Neuron after: there such a boot is not known to be cold
        (KV, 50.0 * MIB, 100.0 * MIB, True),
        (KV, 150.0 * MIB, 100.0 * MIB, False),
    ],
)
def test_which_cold_failures_prove(cause: Cause, deficit: float | None, extra: float | None, again: bool) -> None:
    """A deficit beyond what being cold costs."""

    def device(ask: Ask) -> Trial:
        good = ask.value <= 69_632
        return trial(
            ask.value, good, None if good or deficit is None else -deficit,
            cause=None if good else cause, warm=ask.why == "warm",
        )  # fmt: skip

    ladder = Ladder(AXIS, Bisect(), cold_extra_bytes=extra)
    assert ("warm" in [ask.why for ask in run(ladder, device)]) is again
    assert ladder.finding().value == 69_632


# -- device sets


def test_winner_and_neighbour_are_booted_on_one_set() -> None:
    ladder = Ladder(AXIS, Bisect())
    asks = run(
        ladder,
        lambda ask: trial(ask.value, ask.value <= 69_632, device_set=ask.device_set or "ab"[ask.value > 69_632]),
    )
    assert (asks[-1].value, asks[-1].why, asks[-1].device_set) == (73_728, "pair", "a")
    assert ladder.finding().kind is FindingKind.PROVEN


# -- no clean answer


def test_three_mixed_rungs_are_flaky_and_the_ends_that_held_are_given() -> None:
    scripts = by_boundary(61_440, v69632="PF", v65536="PPF", v61440="PPF", v57344="P", v73728="F")
    ladder = Ladder(AXIS, Bisect(), noise=SIGMA)
    run(ladder, scripted(scripts, 5.0 * MIB))
    finding = ladder.finding()
    assert finding.kind is FindingKind.FLAKY
    assert (finding.steady_value, finding.refused_at) == (57_344, 73_728)
    assert finding.sentence.startswith(
        "flaky: 3 rungs passed and failed; max_model_len 57,344 passed three of three, 73,728 failed two of two"
    )
    assert not finding.proven


class Script:
    """A strategy that follows a list, as a search over several sets may."""

    name = "script"

    def __init__(self, values: Iterable[int]) -> None:
        self._values = list(values)

    def next_index(self, axis: Axis, history: tuple[Trial, ...]) -> int | None:
        return axis.index_at_or_below(self._values[len(history)])


def test_a_contradiction_that_repeats_is_no_single_boundary() -> None:
    """vllm#10517: 20k and 35k booted, 29k did not; each is booted once more before it is said."""
    axis = Axis(name="max_model_len", floor=20_000, ceiling=45_000, quantum=1000)
    ladder = Ladder(axis, Script((20_000, 35_000, 29_000)), noise=SIGMA)
    asks = run(ladder, lambda ask: trial(ask.value, ask.value != 29_000))
    assert [(ask.value, ask.why) for ask in asks[3:]] == [(29_000, "repeat"), (35_000, "repeat")]
    finding = ladder.finding()
    assert finding.kind is FindingKind.NON_MONOTONE
    assert "max_model_len 29,000 failed although 35,000 passed, each of them twice" in finding.sentence


def test_a_contradiction_that_flips_is_flaky() -> None:
    axis = Axis(name="max_model_len", floor=20_000, ceiling=45_000, quantum=1000)
    ladder = Ladder(axis, Script((20_000, 35_000, 29_000)), noise=SIGMA)
    run(ladder, lambda ask: trial(ask.value, ask.value != 29_000 or ask.attempt > 1))
    assert ladder.finding().kind is FindingKind.FLAKY


def test_neighbours_can_be_asked_for() -> None:
    ladder = Ladder(AXIS, Predict(first=69_632), verify="neighbours", noise=Noise(sigma_bytes=0, source="archive"))
    asks = run(ladder, lambda ask: trial(ask.value, ask.value <= 69_632))
    verified = [ask.value for ask in asks if ask.why == "verify"]
    assert set(verified) <= {65_536, 77_824}
    assert {65_536, 77_824} <= {ask.value for ask in asks}
    assert ladder.finding().kind is FindingKind.PROVEN


@pytest.mark.parametrize(("deficit", "boots"), [(5.0 * MIB, 2), (25.0 * MIB, 1), (None, 2)])
def test_a_floor_that_is_short_of_little_is_booted_twice(deficit: float | None, boots: int) -> None:
    def short(ask: Ask) -> Trial:
        """By 20 kB more with each token: the axis is the lever."""
        more = 20_000 * (ask.value - AXIS.floor)
        return trial(ask.value, False, margin=None if deficit is None else -deficit - more)

    ladder = Ladder(AXIS, Bisect(), noise=SIGMA)
    asks = run(ladder, short)
    assert sum(ask.value == AXIS.floor for ask in asks) == boots
    assert ladder.finding().kind is FindingKind.EMPTY


def test_a_second_unknown_and_an_error_end_it_with_noise_too() -> None:
    ladder = Ladder(AXIS, Bisect(), noise=SIGMA)
    asks = run(ladder, lambda ask: Trial(value=ask.value, verdict=Verdict.UNKNOWN))
    assert [ask.why for ask in asks] == ["search", "retry"]
    assert ladder.finding().kind is FindingKind.UNDECIDED


# -- what was booted before


def test_finished_boots_of_an_earlier_run_are_not_repeated() -> None:
    """Stopped after any boot, and taken up again: the same finding, and nothing is booted twice."""

    def device(ask: Ask) -> Trial:
        return trial(ask.value, ask.value <= 69_632, (71_000 - ask.value) * 20_000.0)

    whole = Ladder(AXIS, Predict(), noise=SIGMA)
    order = [ask.value for ask in run(whole, device)]
    for stop in range(len(order) + 1):
        first = Ladder(AXIS, Predict(), noise=SIGMA)
        known = []
        for _ in range(stop):
            ask = first.next()
            assert ask is not None
            known.append(device(ask))
            first.tell(known[-1])
        second = Ladder(AXIS, Predict(), noise=SIGMA, known=known)
        assert [ask.value for ask in run(second, device)] == order[stop:]
        finding = second.finding()
        assert (finding.kind, finding.value) == (whole.finding().kind, whole.finding().value)
        assert (finding.reused, finding.boots) == (stop, len(order) - stop)


# -- properties


@settings(max_examples=200, deadline=None)
@given(
    boundary=st.integers(5_000, 130_000),
    sigma=st.floats(0.001, 0.2),
    draws=st.lists(st.floats(0.001, 0.999), min_size=5, max_size=40),
)
def test_a_noisy_ladder_ends_and_claims_only_what_was_booted(boundary: int, sigma: float, draws: list[float]) -> None:
    sigma_bytes = sigma * AXIS.quantum * 20_000
    told: list[Trial] = []

    def device(ask: Ask) -> Trial:
        extra = NormalDist(0, sigma_bytes).inv_cdf(draws[len(told) % len(draws)])
        margin = (boundary - ask.value) * 20_000 + extra
        told.append(trial(ask.value, margin >= 0, margin))
        return told[-1]

    ladder = Ladder(AXIS, Predict(), noise=Noise(sigma_bytes=sigma_bytes, source="archive"))
    run(ladder, device)
    finding = ladder.finding()
    assert finding.kind in {
        FindingKind.PROVEN, FindingKind.CEILING_REACHED, FindingKind.EMPTY, FindingKind.FLAKY, FindingKind.NON_MONOTONE
    }  # fmt: skip
    if finding.proven:
        mine = [boot for boot in told if boot.value == finding.value]
        assert all(boot.passed for boot in mine)
        assert len(mine) >= 3 or mine[-1].hint.limits[0].margin_bytes >= 2 * sigma_bytes
        assert not any(not boot.passed and boot.value <= (finding.value or 0) for boot in told)
    if finding.kind is FindingKind.PROVEN:
        assert any(not boot.passed and boot.value == finding.failed_at for boot in told)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), sets=st.integers(1, 4), verify=st.sampled_from((None, "neighbours")))
def test_random_verdicts_end(data: st.DataObject, sets: int, verify: Literal["neighbours"] | None) -> None:
    """Whatever devices do, a ladder over several sets ends and keeps its books."""
    axis = Axis(name="max_model_len", floor=4096, ceiling=69_632, quantum=4096)
    ladder = Ladder(axis, Predict(), noise=SIGMA, cold_extra_bytes=None, verify=verify, confirm=1)
    told = 0
    while asks := ladder.next_batch(sets):
        assert len(asks) <= sets
        ask = data.draw(st.sampled_from(asks))
        verdict = data.draw(st.sampled_from((True, False)))
        warm = data.draw(st.sampled_from((None, True, False)))
        ladder.tell(trial(ask.value, verdict, warm=warm))
        told += 1
        assert told < 200
    finding = ladder.finding()
    assert finding.boots + finding.confirmations + finding.neighbours == told


@settings(max_examples=100, deadline=None)
@given(
    boundary=st.integers(4, 60),
    raised=st.integers(2, 7),
    strategy=st.sampled_from((Predict(), Bisect(), Step())),
    when=st.integers(1, 6),
)
def test_what_was_booted_on_the_finer_grid_counts(
    boundary: int, raised: int, strategy: Predict | Bisect | Step, when: int
) -> None:
    """The quantum is raised once a boot tells of its grain: no pass or failure before that is forgotten."""
    axis = Axis(name="max_model_len", floor=4096, ceiling=262_144, quantum=4096)
    ladder = Ladder(axis, strategy)
    told: dict[int, bool] = {}
    while (ask := ladder.next()) is not None:
        low = max((value for value, passed in told.items() if passed), default=0)
        high = min((value for value, passed in told.items() if not passed), default=math.inf)
        assert low < ask.value < high, "what is known already is not booted"
        told[ask.value] = ask.value <= boundary * 4096
        ladder.tell(trial(ask.value, told[ask.value], grain=raised * 4096 if len(told) >= when else None))
    finding = ladder.finding()
    assert finding.kind is FindingKind.PROVEN
    assert finding.value == max(value for value, passed in told.items() if passed)
    assert finding.failed_at == min(value for value, passed in told.items() if not passed)
    assert finding.failed_at - finding.value <= (raised if len(told) >= when else 1) * 4096
