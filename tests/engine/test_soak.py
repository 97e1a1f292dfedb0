from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvbudget.engine.client import EngineClient
from pytest_kvbudget.engine.soak import PARTS, GrowthTrend, Soak, SoakResult, SoakSpec, trend
from pytest_kvbudget.judging import judge_soak, together
from pytest_kvbudget.ledger.model import Cause
from pytest_kvbudget.verdict import Phase, Verdict
from tests.engine.test_survival import Answer, error_instead, never, server, too_long

MIB = 2**20
HOUR_S = 3600.0


def soaked(seconds: float, *trends: GrowthTrend | None, sent: int = 10) -> SoakResult:
    return SoakResult(sent=sent, failed=0, seconds=seconds, trends=trends)


def level(rank: int = 0, *, plus_minus: float = 0) -> GrowthTrend:
    return GrowthTrend(rank=rank, bytes_per_hour=0, plus_minus=plus_minus)


def test_steady_growth_is_found_with_certainty() -> None:
    # 1 MiB more in every part of six minutes: 10 MiB an hour
    found = trend(0, [1000 * MIB + index * MIB for index in range(PARTS)], 360.0)
    assert found is not None
    assert found.bytes_per_hour == pytest.approx(10 * MIB)
    assert found.plus_minus == pytest.approx(0, abs=1)


def test_no_growth_is_no_growth() -> None:
    found = trend(0, [5 * MIB] * PARTS, 1.0)
    assert found is not None
    assert (found.bytes_per_hour, found.plus_minus) == (0, 0)


def test_noise_widens_the_interval_beyond_the_slope() -> None:
    noisy = [100 * MIB + (index % 2) * 50 * MIB for index in range(PARTS)]
    found = trend(0, noisy, 60.0)
    assert found is not None
    assert found.least < 0 < found.most


def test_a_part_that_was_not_seen_gives_no_trend() -> None:
    assert trend(0, [1, None, *([1] * (PARTS - 2))], 1.0) is None


@given(
    st.lists(st.integers(0, 2**35), min_size=PARTS, max_size=PARTS),
    st.integers(-(2**30), 2**30),
    st.floats(1, 1e5, allow_nan=False),
)
def test_a_constant_on_top_changes_no_trend(peaks: list[int], more: int, part_s: float) -> None:
    one, other = trend(0, peaks, part_s), trend(0, [peak + more for peak in peaks], part_s)
    assert one is not None
    assert other is not None
    assert other.bytes_per_hour == pytest.approx(one.bytes_per_hour, rel=1e-6, abs=1)
    assert one.least <= one.bytes_per_hour <= one.most


@pytest.mark.parametrize(("parts", "part_s"), [(PARTS - 1, 1.0), (PARTS, 0.0)])
def test_refuses_what_is_no_soak(parts: int, part_s: float) -> None:
    with pytest.raises(ValueError, match="expected 10 of a positive length"):
        trend(0, [1] * parts, part_s)


def test_a_soak_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="requests or seconds"):
        Soak(EngineClient("http://127.0.0.1:1"), SoakSpec(), window=10, alive=lambda: True)


@pytest.mark.parametrize("answer", [never, error_instead, too_long])
def test_a_server_that_gives_no_good_answer_is_unknown_and_ends_the_soak(answer: Answer) -> None:
    with server(answer, greets=False) as client:
        spec = SoakSpec(requests=1_000_000, seconds=0.2, request_s=0.3, concurrency=2)
        result = Soak(client, spec, window=4096, alive=lambda: True).run()
    assert 1 <= result.failed <= 2, "each of the two that were under way, and none after them"
    judged = judge_soak(result, None, sample_s=None)
    assert (judged[0], judged[1] is not None and judged[1].failure_class) == (Verdict.UNKNOWN, "request_failed")


def test_a_soak_that_sent_nothing_proves_nothing() -> None:
    judged = judge_soak(soaked(1.0, sent=0), None, sample_s=0.1)
    assert judged[0] is Verdict.UNKNOWN


def test_the_least_room_of_the_control_group_is_kept() -> None:
    rooms = iter([5, 3, *([4] * 1000)])
    with server(never, greets=False) as client:
        spec = SoakSpec(requests=1, request_s=0.5)
        result = Soak(client, spec, window=4096, alive=lambda: True, host_free=lambda: next(rooms)).run()
    assert result.least_host_free_bytes == 3


@pytest.mark.parametrize(
    ("result", "limit", "verdict", "failure_class"),
    [
        # 2 MiB, the smallest step that torch's allocator takes, in an hour: below 4 MiB, not below 1 MiB an hour
        (soaked(HOUR_S, level()), 4 * MIB, Verdict.PASS, None),
        (soaked(HOUR_S, level()), 1 * MIB, Verdict.UNKNOWN, "soak_too_short"),
        # the same level seen for a minute only: 120 MiB an hour could hide in it
        (soaked(60.0, level()), 119 * MIB, Verdict.UNKNOWN, "soak_too_short"),
        (soaked(60.0, level()), 120 * MIB, Verdict.PASS, None),
        (soaked(HOUR_S, level(), None), 64 * MIB, Verdict.UNKNOWN, "memory_unseen"),
        (soaked(HOUR_S), 64 * MIB, Verdict.UNKNOWN, "memory_unseen"),
        # ten parts of two samples each, ten a second: two seconds
        (soaked(1.9, None), 64 * MIB, Verdict.UNKNOWN, "soak_too_short"),
        (soaked(2.0, None), 64 * MIB, Verdict.UNKNOWN, "memory_unseen"),
        (
            soaked(HOUR_S, level(), GrowthTrend(rank=1, bytes_per_hour=100.0 * MIB, plus_minus=8.0 * MIB)),
            *(80 * MIB, Verdict.FAIL, "memory_grows"),
        ),
        # what is certain, 100 - 8 - 2 MiB an hour, is not above the limit
        (
            soaked(HOUR_S, GrowthTrend(rank=0, bytes_per_hour=100.0 * MIB, plus_minus=8.0 * MIB)),
            *(90 * MIB, Verdict.UNKNOWN, "soak_too_short"),
        ),
    ],
)
def test_growth_counts_only_where_it_is_certain(
    result: SoakResult, limit: int, verdict: Verdict, failure_class: str | None
) -> None:
    judged = judge_soak(result, limit, sample_s=0.1)
    assert (judged[0], None if judged[1] is None else judged[1].failure_class) == (verdict, failure_class)
    if verdict is Verdict.UNKNOWN:
        assert "INCONCLUSIVE" in judged[2]


def test_without_a_probe_a_short_soak_is_unseen() -> None:
    judged = judge_soak(soaked(0.5), 64 * MIB, sample_s=None)
    assert judged[1] is not None
    assert judged[1].failure_class == "memory_unseen"


SURVIVED = (Verdict.PASS, None, "survived")
THIN = (Verdict.MARGINAL, Cause(phase=Phase.REQUEST, failure_class="min_free_missed", sentence="thin"), "thin")
SHORT = (Verdict.UNKNOWN, Cause(phase=Phase.REQUEST, failure_class="soak_too_short", sentence="short"), "short")
GREW = (Verdict.FAIL, Cause(phase=Phase.REQUEST, failure_class="memory_grows", sentence="grew"), "grew")


@pytest.mark.parametrize(
    ("checks", "verdict", "failure_class", "said"),
    [
        ([SURVIVED], Verdict.PASS, None, "survived"),
        ([SURVIVED, SURVIVED], Verdict.PASS, None, "survived"),
        ([SURVIVED, (Verdict.PASS, None, "soaked")], Verdict.PASS, None, "survived; soaked"),
        ([SURVIVED, SHORT], Verdict.UNKNOWN, "soak_too_short", "short; PASS: survived"),
        ([THIN, SHORT], Verdict.UNKNOWN, "soak_too_short", "short; MARGINAL: thin"),
        ([THIN, SURVIVED], Verdict.MARGINAL, "min_free_missed", "thin; PASS: survived"),
        ([SHORT, GREW], Verdict.FAIL, "memory_grows", "grew; UNKNOWN: short"),
    ],
)
def test_several_checks_are_one_verdict_and_none_is_forgotten(
    checks: list[tuple[Verdict, Cause | None, str]], verdict: Verdict, failure_class: str | None, said: str
) -> None:
    found, cause, text = together(checks)
    assert (found, None if cause is None else cause.failure_class, text) == (verdict, failure_class, said)


def test_no_checks_are_no_verdict() -> None:
    with pytest.raises(ValueError, match="no checks"):
        together([])


@pytest.mark.parametrize(
    ("result", "sample_s", "said"),
    [
        (soaked(0.1), 0.1, "0.1 s are too short to see growth: 10 parts of two samples each take 2 s"),
        (soaked(60.0, level(), None), 0.1, "the memory of a rank was not seen throughout the 60.0 s"),
        (soaked(60.0), None, "nobody can read this target's device memory"),
    ],
)
def test_growth_that_cannot_be_told_is_no_pass_though_no_limit_was_asked_for(
    result: SoakResult, sample_s: float | None, said: str
) -> None:
    verdict, _, sentence = judge_soak(result, None, sample_s=sample_s)
    assert verdict is Verdict.UNKNOWN
    assert "INCONCLUSIVE" in sentence
    assert said in sentence


def test_growth_is_told_with_its_confidence_though_no_limit_was_asked_for() -> None:
    grows = GrowthTrend(rank=0, bytes_per_hour=100.0 * MIB, plus_minus=8.0 * MIB)
    # a step of 2 MiB may be under way at either end of the hour
    verdict, cause, sentence = judge_soak(soaked(HOUR_S, grows), None, sample_s=0.1)
    assert (verdict, cause) == (Verdict.PASS, None)
    assert "rank 0 grew by 100.00 MiB ± 10.00 MiB per hour in 3600.0 s" in sentence
