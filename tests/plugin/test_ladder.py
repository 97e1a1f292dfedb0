"""A ladder in pytest: one row per rung, one finding that alone decides."""

from __future__ import annotations

import pytest

from pytest_kvbudget.verdict import FindingKind, Verdict
from tests.conftest import POOL_TOKENS, Project, properties, rows

LADDER = """
import pytest

@pytest.mark.ladder(start=65_536, floor=16_384)
def test_window(kv_engine, kv_ledger, kv_rung):
    assert kv_ledger.kv_cache.tokens == 51_200
    assert kv_engine.shape.max_model_len == int(kv_rung)

def test_other():
    pass
"""
WINNER, ABOVE = 49_152, 53_248
"""The rungs of 4096 from 65,536 around what the pool holds."""

assert WINNER <= POOL_TOKENS < ABOVE

DISTRIBUTIONS = pytest.mark.parametrize("how", [(), ("-n2",)], ids=["here", "n2"])


@DISTRIBUTIONS
def test_each_rung_is_a_row_and_only_the_finding_is_a_test(project: Project, how: tuple[str, ...]) -> None:
    project.tests(LADDER)

    result = project.run(*how, "--junitxml=junit.xml")

    result.assert_outcomes(passed=2)
    assert result.ret == 0
    shown = rows(result.outlines)
    assert shown == [(str(record.shape.max_model_len), str(record.verdict)) for record in project.attempts()]
    assert (str(WINNER), "PASS") in shown
    assert (str(ABOVE), "FAIL") in shown
    result.stdout.fnmatch_lines([f"test_it.py::test_window[[]max_model_len={ABOVE}[]] FAIL*simulated)"])
    assert "%" in result.stdout.str()
    assert "200%" not in result.stdout.str()

    (finding,) = project.findings()
    assert finding.finding.kind is FindingKind.PROVEN
    assert (finding.finding.value, finding.finding.failed_at) == (WINNER, ABOVE)

    cases = project.junit()
    assert set(cases) == {"test_window", "test_other", *(f"test_window[max_model_len={value}]" for value, _ in shown)}
    row = properties(cases[f"test_window[max_model_len={ABOVE}]"])
    assert row["kvbudget.verdict"] == "FAIL"
    assert row["kvbudget.simulated"] == "true"
    assert row["kvbudget.record"].endswith("attempt.json")
    assert properties(cases["test_window"])["kvbudget.value"] == str(WINNER)
    assert properties(cases["test_window"])["kvbudget.simulated"] == "true"
    boots = [properties(cases[f"test_window[max_model_len={value}]"])["kvbudget.boot"] for value, _ in shown]
    assert boots == ["1", "2", "3"][: len(shown)]
    assert not any(case.find("failure") is not None or case.find("error") is not None for case in cases.values())


@DISTRIBUTIONS
def test_the_end_of_the_session_sums_up_each_finding(project: Project, how: tuple[str, ...]) -> None:
    project.tests(LADDER)

    result = project.run(*how)

    result.stdout.fnmatch_lines(["*= kvbudget =*", "test_it.py::test_window:", f"*{WINNER:,}*", "page:*.html"])
    result.stdout.fnmatch_lines(["one rung again: pytest test_it.py::test_window --kvbudget-rung VALUE"])
    page = next(line for line in result.outlines if line.startswith("page:")).split()[-1]
    assert project.path.joinpath(page).is_file()


@DISTRIBUTIONS
def test_a_ladder_on_which_nothing_passes_fails_its_test_with_cause_and_record(
    project: Project, how: tuple[str, ...]
) -> None:
    project.tests(
        """
        import pytest
        @pytest.mark.ladder(start=65_536, floor=57_344)
        def test_window(kv_engine):
            pass
    """.replace("\n        ", "\n")
    )

    result = project.run(*how)

    result.assert_outcomes(failed=1)
    assert result.ret == 1
    assert {verdict for _, verdict in rows(result.outlines)} == {"FAIL"}
    result.stdout.fnmatch_lines(
        ["nothing passes*", "bracket on max_model_len: nothing passed*", "finding: *finding.json"]
    )
    result.stdout.fnmatch_lines(["the deciding boot:", "FAIL max_model_len=57344 *", "  evidence  line *"])


def test_no_row_stops_the_run_at_the_first_failure(project: Project) -> None:
    project.tests(LADDER)

    project.run("-x").assert_outcomes(passed=2)


def test_a_failed_finding_stops_the_run_at_the_first_failure(project: Project) -> None:
    project.tests(LADDER.replace("floor=16_384", "floor=61_440"))

    project.run("-x").assert_outcomes(failed=1)


@DISTRIBUTIONS
def test_last_failed_runs_the_ladder_whose_finding_failed(project: Project, how: tuple[str, ...]) -> None:
    project.tests(LADDER.replace("floor=16_384", "floor=61_440"))
    project.run(*how).assert_outcomes(failed=1, passed=1)
    project.tests(LADDER)

    result = project.run(*how, "--lf")

    result.assert_outcomes(passed=1)
    assert (str(WINNER), "PASS") in rows(result.outlines)


def test_output_of_a_body_belongs_to_its_rung(project: Project) -> None:
    project.tests("""
import pytest
@pytest.mark.ladder(start=65_536, floor=16_384, strategy="step")
def test_window(kv_rung, capfd):
    print("in", int(kv_rung))
    assert capfd.readouterr().out == f"in {int(kv_rung)}\\n"
""")

    project.run("-s").assert_outcomes(passed=1)


def test_step_visits_the_rungs_of_its_document_in_order(project: Project) -> None:
    project.tests(LADDER.replace("floor=16_384", "floor=16_384, strategy='step'"))

    result = project.run()

    # Down by 16,384 on a failure, up by 4096 after each pass, no rung twice.
    assert rows(result.outlines) == [("65536", "FAIL"), ("49152", "PASS"), ("53248", "FAIL")]


@DISTRIBUTIONS
def test_parametrised_ladders_name_both_parameter_and_rung(project: Project, how: tuple[str, ...]) -> None:
    project.tests("""
import pytest
@pytest.mark.parametrize("kind", ["a", "b"])
@pytest.mark.ladder(start=53_248, floor=49_152)
def test_window(kv_engine, kind):
    assert kind in "ab"
""")

    result = project.run(*how)

    result.assert_outcomes(passed=2)
    for kind in "ab":
        result.stdout.fnmatch_lines([f"test_it.py::test_window[[]{kind}-max_model_len=49152[]] PASS*"])
    assert len(project.findings()) == 2


def test_a_rung_has_fixtures_and_an_instance_of_its_own_and_shares_wider_ones(project: Project) -> None:
    project.tests("""
import pytest
events = []

@pytest.fixture(scope="module")
def module():
    events.append("module up")
    yield
    events.append("module down")

@pytest.fixture
def function(module):
    events.append("function up")
    yield
    events.append("function down")

class TestWindow:
    count = 0

    def setup_method(self):
        self.count += 1

    @pytest.mark.ladder(start=53_248, floor=45_056, strategy="step")
    def test_window(self, function, kv_rung, tmp_path):
        assert self.count == 1
        assert not list(tmp_path.iterdir())
        (tmp_path / "used").touch()
        events.append(int(kv_rung))

def test_events(module):
    assert [event for event in events if isinstance(event, str)][:3] == ["module up", "function up", "function down"]
    assert events.count("module up") == 1
    assert "module down" not in events
    assert events.count("function up") == events.count("function down") > 1
    assert events[-1] == "function down"
""")

    project.run().assert_outcomes(passed=2)


def test_marks_of_the_test_hold_for_its_finding(project: Project) -> None:
    project.tests("""
import pytest

@pytest.mark.skip(reason="no card today")
@pytest.mark.ladder(start=65_536, floor=16_384)
def test_skipped(kv_engine): pass

@pytest.mark.xfail(reason="known", run=False)
@pytest.mark.ladder(start=65_536, floor=16_384)
def test_not_run(kv_engine): pass

@pytest.mark.xfail(reason="known", strict=True)
@pytest.mark.ladder(start=65_536, floor=57_344)
def test_expected(kv_engine): pass
""")

    result = project.run("-rsx")

    result.assert_outcomes(skipped=1, xfailed=2)
    result.stdout.fnmatch_lines(["SKIPPED*test_it.py:4*no card today"])
    assert {record.test for record in project.attempts()} == {"test_it.py::test_expected"}


def test_a_rung_alone_is_booted_once_and_proves_no_boundary(project: Project) -> None:
    project.tests(LADDER)

    passing = project.run("--kvbudget-rung", str(WINNER))
    failing = project.run("--kvbudget-rung", str(ABOVE))

    passing.assert_outcomes(passed=2)
    failing.assert_outcomes(passed=1, failed=1)
    said = "it proves nothing about other rungs"
    passing.stdout.fnmatch_lines([f"rung max_model_len={WINNER}: PASS; {said}", "record: *attempt.json"])
    failing.stdout.fnmatch_lines([f"rung max_model_len={ABOVE}: FAIL; {said}", "  record *attempt.json"])
    assert rows(passing.outlines) == [(str(WINNER), "PASS")]
    assert [record.verdict for record in project.attempts()] == [Verdict.PASS, Verdict.FAIL]
    assert project.findings() == []


@pytest.mark.parametrize("rung", [f"{WINNER:,}", f"max_model_len={WINNER:,}"])
def test_a_rung_is_taken_as_tables_write_it(project: Project, rung: str) -> None:
    project.tests(LADDER)

    project.run("--kvbudget-rung", rung).assert_outcomes(passed=2)

    (record,) = project.attempts()
    assert record.shape.max_model_len == WINNER


def test_what_kv_shape_is_overridden_to_is_what_rungs_boot(project: Project) -> None:
    project.tests("""
import pytest
@pytest.fixture
def kv_shape(kv_shape):
    return kv_shape.merged(env={"EXTRA": "1"})

@pytest.mark.kv_shape(max_num_seqs=3)
@pytest.mark.ladder(start=53_248, floor=49_152)
def test_window(kv_rung): pass
""")

    project.run().assert_outcomes(passed=1)

    for record in project.attempts():
        assert record.environment["EXTRA"] == "1"
        assert record.shape.max_num_seqs == 3


ALONE = {"floor": "4096", "start": "131072", "between": "50000"}


@pytest.mark.parametrize("rung", ALONE.values(), ids=ALONE.keys())
def test_a_rung_that_the_ladder_has_not_is_an_error_that_names_it(project: Project, rung: str) -> None:
    project.tests(LADDER)

    here = project.run("--kvbudget-rung", rung)
    workers = project.run("-n2", "--kvbudget-rung", rung)

    said = (
        f"--kvbudget-rung {rung} is no rung of test_it.py::test_window: max_model_len from 65536 down to 16384 by 4096"
    )
    assert here.ret == pytest.ExitCode.USAGE_ERROR
    here.stderr.fnmatch_lines([f"ERROR: kvbudget: {said}; the nearest is *"])
    workers.assert_outcomes(passed=1, failed=1)
    workers.stdout.fnmatch_lines([f"{said}*"])
    assert project.attempts() == []
