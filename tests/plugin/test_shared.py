"""Tests that share one engine: each keeps what it asked and what came of it, in record, report and pages."""

from __future__ import annotations

import pytest

from pytest_kvbudget.cli import main
from pytest_kvbudget.records import UseRecord
from pytest_kvbudget.verdict import Verdict
from tests.conftest import Project, properties


def used(project: Project) -> dict[str, UseRecord]:
    """What the tests of the project's one boot asked of it, by name."""
    (record,) = project.attempts()
    return {use.test.rpartition("::")[2]: use for use in record.uses}


def report(project: Project, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of ``kvbudget report`` that name a test, from the test's name on."""
    capsys.readouterr()
    main(["report", str(project.path / "kvbudget-archive")])
    return [line.rpartition("::")[2] for line in capsys.readouterr().out.splitlines() if "::" in line]


def test_a_verdict_lands_on_the_test_that_asked_for_it(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.configure(shape="max_model_len = 4096")
    project.tests("""
import pytest

@pytest.mark.boot_gate
def test_before(kv_ledger): ...

@pytest.mark.knife_edge(hold=8, max_used="1 GiB")
def test_knife(kv_engine): ...
""")
    result = project.run("-v", "--junitxml=junit.xml")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*test_before: boot_gate PASS: the KV cache holds 51,200 tokens*"])
    (record,) = project.attempts()
    assert record.verdict is Verdict.PASS, "the boot's own verdict stays the boot's"
    uses = used(project)
    assert (uses["test_before"].verdict, uses["test_before"].survival) == (Verdict.PASS, None)
    gate = uses["test_before"].boot_gate
    assert gate is not None
    assert (gate.verdict, gate.tokens) == (Verdict.PASS, 51_200)
    assert uses["test_knife"].verdict is Verdict.FAIL
    cases = project.junit()
    assert properties(cases["test_before"])["kvbudget.verdict"] == "PASS"
    assert properties(cases["test_knife"])["kvbudget.verdict"] == "FAIL"
    before, knife = report(project, capsys)
    assert before.startswith("test_before: PASS: ready after ")
    assert knife.startswith("test_knife: FAIL: max_used: ")


def test_a_gate_that_is_missed_is_no_pass_and_its_engine_serves_the_next_test(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.configure(shape="max_model_len = 4096")
    project.tests("""
import pytest

@pytest.mark.boot_gate(min_tokens=1_000_000)
def test_gate_only(): ...

@pytest.mark.boot_gate(windows=2)
def test_enough(): ...
""")
    result = project.run("--junitxml=junit.xml")
    result.assert_outcomes(errors=1, passed=1)
    uses = used(project)
    assert (uses["test_gate_only"].verdict, uses["test_enough"].verdict) == (Verdict.FAIL, Verdict.PASS)
    assert properties(project.junit()["test_gate_only"])["kvbudget.verdict"] == "FAIL"
    missed, enough = report(project, capsys)
    assert missed == (
        "test_gate_only: FAIL: boot_gate: the KV cache holds 51,200 tokens by the engine's own count, 1,000,000 are "
        "needed (min_tokens)"
    )
    assert enough.startswith("test_enough: PASS: ")


def test_nothing_is_overwritten_and_nothing_leaks_to_other_tests(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.configure(shape="max_model_len = 4096", limits="trace_hz = 50")
    project.tests("""
import pytest

@pytest.mark.kv_soak(minutes=0.04, requests=100_000)
def test_first(kv_engine): ...

@pytest.mark.knife_edge(hold=8, max_growth="1 GiB")
def test_surv(kv_engine): ...

@pytest.mark.kv_soak(requests=100_000, minutes=0.04)
@pytest.mark.knife_edge(hold=8)
def test_both(kv_engine): ...

def test_plain(kv_engine): ...
""")
    project.run().assert_outcomes(passed=4)
    uses = used(project)
    assert [use.soak is not None for use in uses.values()] == [True, False, True, False]
    assert [use.survival is not None for use in uses.values()] == [False, True, True, False]
    assert [gate.gate for gate in uses["test_surv"].gates] == ["max_growth"]
    assert not uses["test_both"].gates, "a limit of another test"
    lines = report(project, capsys)
    assert [("answered" in line, "survived" in line) for line in lines] == [
        *((True, False), (False, True), (True, True), (False, False)),
    ]


def test_an_engine_that_died_under_one_test_had_passed_the_one_before(project: Project) -> None:
    project.configure(shape="max_model_len = 4096", mock="request_peak_per_token = 10_000_000")
    project.tests("""
import pytest

def test_before(kv_engine): ...

@pytest.mark.knife_edge
def test_knife(kv_engine): ...
""")
    project.run().assert_outcomes(passed=1, failed=1)
    (record,) = project.attempts()
    assert record.verdict is Verdict.FAIL, "the engine that it is the record of died"
    uses = used(project)
    assert (uses["test_before"].verdict, uses["test_knife"].verdict) == (Verdict.PASS, Verdict.FAIL)


def test_a_rung_is_one_test_and_passes_only_if_it_survives(project: Project) -> None:
    project.tests("""
import pytest

@pytest.mark.ladder(start=8192, floor=4096)
@pytest.mark.knife_edge(hold=8, max_used="1 GiB")
def test_window(kv_engine): ...
""")
    project.run().assert_outcomes(failed=1)
    for record in project.attempts():
        (use,) = record.uses
        assert use.survival is not None
        assert (record.verdict, record.message) == (Verdict.FAIL, use.message)


def test_an_engine_of_a_fixture_is_its_own(project: Project) -> None:
    project.configure(devices="0", shape="max_model_len = 4096")
    project.tests("""
import pytest

@pytest.fixture(scope="session")
def shared(kv_serve):
    return kv_serve()

def test_one(shared): ...
def test_two(shared): ...
""")
    project.run().assert_outcomes(passed=2)
    (record,) = project.attempts()
    assert [use.test for use in record.uses] == ["kv_serve"]
