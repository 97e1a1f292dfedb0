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
    soak(project, "requests=30").assert_outcomes(passed=1)
    (record,) = project.attempts()
    assert record.verdict is Verdict.PASS
    assert record.soak is not None
    assert (record.soak.sent, record.soak.failed) == (30, 0)


def test_memory_that_stays_passes_its_limit(project: Project) -> None:
    soak(project, "minutes=0.04, max_growth_per_hour='64 MiB'").assert_outcomes(passed=1)
    (record,) = project.attempts()
    assert record.soak is not None
    (trend,) = record.soak.trends
    assert trend is not None
    assert trend.bytes_per_hour == 0


def test_growth_beyond_the_limit_is_not_a_pass(project: Project) -> None:
    # every request beyond the largest so far takes more and keeps it: growth while the mix is still new
    result = soak(
        project, "requests=12, max_growth_per_hour='1 MiB', concurrency=1", mock="request_peak_per_token = 1_000_000"
    )
    result.assert_outcomes(failed=1)
    (record,) = project.attempts()
    assert record.verdict in {Verdict.FAIL, Verdict.UNKNOWN}
    assert record.cause is not None
    assert record.cause.failure_class in {"memory_grows", "soak_too_short", "memory_unseen"}


def test_an_engine_that_dies_under_it_is_judged_from_its_log(project: Project) -> None:
    result = soak(project, "requests=40", mock="request_peak_per_token = 10_000_000")
    result.assert_outcomes(failed=1)
    (record,) = project.attempts()
    assert record.cause is not None
    assert (record.verdict, record.cause.failure_class) == (Verdict.FAIL, "request_oom")


@pytest.mark.parametrize("arguments", [(), ("-n2",)], ids=["plain", "n2"])
@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ("", "neither requests nor minutes"),
        ("minutes=0", "minutes: Expected `float` > 0"),
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
