from __future__ import annotations

import pytest

from pytest_kvbudget.verdict import Verdict
from tests.conftest import Project

TEST = """
import pytest

@pytest.mark.kv_soak({arguments})
def test_soak(kv_engine): ...
"""


def soak(project: Project, arguments: str, *, mock: str = "") -> pytest.RunResult:
    project.configure(shape="max_model_len = 4096", mock=mock)
    project.tests(TEST.format(arguments=arguments))
    return project.run()


def test_mixed_traffic_is_sent_and_recorded(project: Project) -> None:
    # ten samples a second: growth is told from two seconds on
    soak(project, "minutes=0.04").assert_outcomes(passed=1)
    (record,) = project.used()
    assert record.verdict is Verdict.PASS
    assert record.uses[-1].soak is not None
    assert record.uses[-1].soak.failed == 0
    assert f"{record.uses[-1].soak.sent:,} requests were answered; rank 0 grew by 0 B ± " in record.message


def test_requests_that_are_answered_at_once_tell_no_growth(project: Project) -> None:
    result = soak(project, "requests=3")
    result.assert_outcomes(failed=1)
    (record,) = project.used()
    assert record.cause is not None
    assert (record.verdict, record.cause.failure_class) == (Verdict.UNKNOWN, "soak_too_short")
    result.stdout.fnmatch_lines(["*INCONCLUSIVE: 3 requests were answered, and *are too short to see growth*"])


def test_memory_that_stays_passes_its_limit(project: Project) -> None:
    # what stays level for 2.4 s may still grow by 3 GiB an hour, in steps of 2 MiB
    soak(project, "minutes=0.04, max_growth_per_hour='4 GiB'").assert_outcomes(passed=1)
    (record,) = project.used()
    assert record.uses[-1].soak is not None
    (trend,) = record.uses[-1].soak.trends
    assert trend is not None
    assert trend.bytes_per_hour == 0


def test_growth_beyond_the_limit_is_not_a_pass(project: Project) -> None:
    # every request beyond the largest so far takes more and keeps it: growth while the mix is still new
    result = soak(
        project, "requests=12, max_growth_per_hour='1 MiB', concurrency=1", mock="request_peak_per_token = 1_000_000"
    )
    result.assert_outcomes(failed=1)
    (record,) = project.used()
    assert record.verdict in {Verdict.FAIL, Verdict.UNKNOWN}
    assert record.cause is not None
    assert record.cause.failure_class in {"memory_grows", "soak_too_short", "memory_unseen"}


def test_an_engine_that_dies_under_it_is_judged_from_its_log(project: Project) -> None:
    result = soak(project, "requests=40", mock="request_peak_per_token = 10_000_000")
    result.assert_outcomes(failed=1)
    (record,) = project.used()
    assert record.cause is not None
    assert (record.verdict, record.cause.failure_class) == (Verdict.FAIL, "request_oom")


def test_a_soak_that_is_too_short_says_how_long_it_takes(project: Project) -> None:
    result = soak(project, "minutes=0.04, max_growth_per_hour='64 MiB'")
    result.assert_outcomes(failed=1)
    (record,) = project.used()
    assert record.cause is not None
    assert (record.verdict, record.cause.failure_class) == (Verdict.UNKNOWN, "soak_too_short")
    # 2 MiB in 64 MiB an hour: 112.5 s
    result.stdout.fnmatch_lines(
        ["*INCONCLUSIVE: * requests were answered; rank 0 grew by *even memory that stays level takes 1.9 minutes*"]
    )


@pytest.mark.parametrize(
    ("edge", "verdict"), [("hold=8", Verdict.PASS), ("hold=8, min_free='31 GiB'", Verdict.MARGINAL)]
)
def test_an_inconclusive_soak_is_unknown_and_keeps_what_was_survived(
    project: Project, edge: str, verdict: Verdict
) -> None:
    project.configure(shape="max_model_len = 4096")
    project.tests(f"""
import pytest

@pytest.mark.knife_edge({edge})
@pytest.mark.kv_soak(requests=2, max_growth_per_hour="1 MiB")
def test_both(kv_engine): ...

def test_next(kv_engine): ...
""")
    result = project.run()
    result.assert_outcomes(failed=1, passed=1)
    record = project.used()[0]
    assert record.cause is not None
    assert (record.verdict, record.cause.failure_class) == (Verdict.UNKNOWN, "soak_too_short")
    assert record.uses[-1].survival is not None
    assert record.uses[-1].soak is not None
    assert (record.uses[-1].survival.verdict, record.uses[-1].soak.verdict) == (verdict, Verdict.UNKNOWN)
    assert record.uses[-1].survival.sentence in record.message
    result.stdout.fnmatch_lines([f"*INCONCLUSIVE*; {verdict}: *"])


def test_a_content_soak_leaves_the_survival_as_it_was(project: Project) -> None:
    project.configure(shape="max_model_len = 4096")
    project.tests("""
import pytest

@pytest.mark.knife_edge(hold=8, min_free="31 GiB")
@pytest.mark.kv_soak(minutes=0.04)
def test_both(kv_engine): ...
""")
    result = project.run()
    result.assert_outcomes(passed=1)
    (record,) = project.used()
    assert record.cause is not None
    assert (record.verdict, record.cause.failure_class) == (Verdict.MARGINAL, "min_free_missed")
    assert "requests were answered; rank 0 grew by 0 B" in record.message


def test_gates_of_the_target_hold_under_a_soak(project: Project) -> None:
    # 12 GiB are used for 1 MiB a token of the mix' largest request: nothing of it is there before the soak
    project.configure(
        shape="max_model_len = 4096", mock="request_peak_per_token = 1_048_576", limits='max_growth = "256 MiB"'
    )
    project.tests("import pytest\n\n@pytest.mark.kv_soak(requests=40)\ndef test_soak(kv_engine): ...\n")
    project.run().assert_outcomes(failed=1)
    (record,) = project.used()
    assert record.cause is not None
    assert (record.verdict, record.cause.failure_class) == (Verdict.FAIL, "max_growth_missed")


@pytest.mark.parametrize("arguments", [(), ("-n2",)], ids=["plain", "n2"])
@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ("", "neither requests nor minutes"),
        ("minutes=0", "minutes: "),
        ("hours=1", "hours: unknown key"),
    ],
)
def test_wrong_arguments_are_collection_errors(
    project: Project, arguments: tuple[str, ...], marker: str, said: str
) -> None:
    project.tests(TEST.format(arguments=marker))
    result = project.run(*arguments)
    assert said in result.stdout.str()
    result.assert_outcomes(errors=1)
