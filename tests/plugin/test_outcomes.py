"""What the test body does to a rung, and what a boot's failure does to a test."""

from __future__ import annotations

import pytest

from pytest_kvbudget.verdict import FindingKind, Phase, Verdict
from tests.conftest import Project, properties, rows

DISTRIBUTIONS = pytest.mark.parametrize("how", [(), ("-n2",)], ids=["here", "n2"])

BODY = """
import time
import pytest

@pytest.mark.ladder(start=49_152, floor=40_960)
def test_window(kv_rung):
    {body}
"""


@pytest.mark.parametrize(
    "refusal", ["assert int(kv_rung) < 49_152, 'too slow'", "if int(kv_rung) == 49_152: pytest.fail('too slow')"]
)
@DISTRIBUTIONS
def test_a_body_that_refuses_a_rung_bounds_the_window_and_is_never_called_memory(
    project: Project, refusal: str, how: tuple[str, ...]
) -> None:
    project.tests(BODY.format(body=refusal))

    result = project.run(*how, "--junitxml=junit.xml")

    result.assert_outcomes(passed=1)
    (finding,) = project.findings()
    assert (finding.finding.value, finding.finding.failed_at) == (45_056, 49_152)
    assert finding.finding.bounded_by is not None
    assert finding.finding.bounded_by.by_gate
    (refused,) = [record for record in project.attempts() if record.verdict is Verdict.FAIL]
    assert refused.cause is not None
    assert refused.cause.by_gate
    assert "too slow" in refused.cause.sentence
    skipped = project.junit()["test_window[max_model_len=49152]"].find("skipped")
    assert skipped is not None
    assert "too slow" in str(skipped.get("message"))
    assert "memory" not in str(skipped.get("message"))


def test_the_boots_own_verdict_is_there_before_the_body_runs(project: Project) -> None:
    project.tests(BODY.format(body="assert kv_engine.record.verdict == 'PASS'").replace("(kv_rung", "(kv_engine"))

    project.run().assert_outcomes(passed=1)


@DISTRIBUTIONS
def test_a_body_that_raises_ends_the_ladder_as_error_after_one_boot(project: Project, how: tuple[str, ...]) -> None:
    project.tests(BODY.format(body="raise RuntimeError('no such metric')"))

    result = project.run(*how)

    result.assert_outcomes(failed=1)
    assert [verdict for _, verdict in rows(result.outlines)] == ["ERROR"]
    (finding,) = project.findings()
    assert finding.finding.kind is FindingKind.ERROR
    result.stdout.fnmatch_lines(["*no such metric*", "bracket on max_model_len: nothing passed, nothing failed"])


@DISTRIBUTIONS
def test_a_body_that_pytest_cannot_run_is_an_error_and_no_gate(project: Project, how: tuple[str, ...]) -> None:
    project.tests(BODY.format(body="pass").replace("def test_window", "async def test_window"))

    result = project.run(*how)

    result.assert_outcomes(failed=1)
    assert [verdict for _, verdict in rows(result.outlines)] == ["ERROR"]
    (finding,) = project.findings()
    assert finding.finding.kind is FindingKind.ERROR
    result.stdout.fnmatch_lines(["*async def functions are not natively supported*"])


@pytest.mark.parametrize("how", ["skip", "xfail"])
def test_a_search_that_its_body_ends_says_so(project: Project, how: str) -> None:
    project.tests(BODY.format(body=f"pytest.{how}('not today')"))

    project.run()

    (record,) = project.findings()
    assert record.finding.kind is FindingKind.UNDECIDED
    assert f"the test body called pytest.{how}: not today" in record.finding.sentence


MADE_BY_THE_TEST = {
    "error": ("1 / 0", "ERROR", "    1 / 0", "E   ZeroDivisionError: division by zero"),
    "gate": ("held(kv_rung)", "FAIL", "    assert int(rung) < 0, 'too few'", "E   AssertionError: too few"),
}


@pytest.mark.parametrize("made", MADE_BY_THE_TEST.values(), ids=MADE_BY_THE_TEST.keys())
@DISTRIBUTIONS
def test_what_the_body_did_wrong_is_shown_with_line_traceback_and_output(
    project: Project, how: tuple[str, ...], made: tuple[str, str, str, str]
) -> None:
    body, verdict, code, error = made
    project.tests(f"""
import sys
import pytest

def held(rung):
    assert int(rung) < 0, 'too few'

@pytest.mark.ladder(start=49_152, floor=49_152)
def test_window(kv_rung):
    print("said", int(kv_rung))
    print("complained", file=sys.stderr)
    {body}
""")
    line = 6 if "held" in body else 12

    result = project.run(*how)

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"test_it.py::test_window[[]max_model_len=49152[]] {verdict} *(test_it.py:{line})*"])
    result.stdout.fnmatch_lines(["the test's own code:", f"test_it.py:{line}: in *", code, error])
    result.stdout.fnmatch_lines(
        ["*Captured stdout call of max_model_len=49152*", "said 49152", "*Captured stderr call*", "complained"]
    )
    result.stdout.no_fnmatch_line("*of its log*")
    (record,) = project.attempts()
    assert f"(test_it.py:{line})" in record.message


def test_output_of_both_halves_of_the_proof_is_shown_where_it_is_asked_for(project: Project) -> None:
    project.tests(BODY.format(body="print('said', int(kv_rung)); assert int(kv_rung) < 49_152"))

    quiet, told = project.run(), project.run("-rP")

    quiet.stdout.no_fnmatch_line("said *")
    told.stdout.fnmatch_lines(["*Captured stdout call of max_model_len=45056*", "said 45056"])
    told.stdout.fnmatch_lines(["*Captured stdout call of max_model_len=49152*", "said 49152"])


@pytest.mark.parametrize("mock", ["faults = { die_in = 'weights_load' }", ""], ids=["silent", "said"])
def test_the_end_of_the_log_is_shown_where_no_line_of_it_says_why(project: Project, mock: str) -> None:
    project.configure(mock=mock)
    project.tests("""
import pytest
@pytest.mark.kv_shape(max_model_len=65_536)
def test_boots(kv_engine): pass
""")

    output = project.run().stdout.str()

    assert ("log ends" in output) is bool(mock)
    assert ("evidence " in output) is not bool(mock)


@DISTRIBUTIONS
def test_a_body_that_expects_to_fail_is_xfail_of_the_test_and_no_refusal(
    project: Project, how: tuple[str, ...]
) -> None:
    project.tests(BODY.format(body="pytest.xfail('known')"))

    result = project.run(*how, "-rx")

    result.assert_outcomes(xfailed=1)
    result.stdout.fnmatch_lines(["XFAIL test_it.py::test_window - known"])
    assert [record.verdict for record in project.attempts()] == [Verdict.UNKNOWN], "it judged nothing"


@DISTRIBUTIONS
def test_a_body_that_skips_skips_the_test(project: Project, how: tuple[str, ...]) -> None:
    project.tests(BODY.format(body="pytest.skip('not today')"))

    result = project.run(*how, "-rs")

    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*test_it.py:5: not today"])


@pytest.mark.parametrize("settings", ["--timeout=0.4", "--timeout=0.4 -o timeout_func_only=true"])
def test_a_body_that_runs_out_of_time_is_unknown_and_asked_once_more(project: Project, settings: str) -> None:
    project.tests(BODY.format(body="time.sleep(30)"))

    result = project.run(*settings.split())

    result.assert_outcomes(failed=1)
    value = rows(result.outlines)[0][0]
    assert rows(result.outlines) == [(value, "UNKNOWN"), (f"{value}#2", "UNKNOWN")]
    (finding,) = project.findings()
    assert finding.finding.kind is FindingKind.UNDECIDED


def test_a_boot_is_not_charged_to_the_tests_timeout(project: Project) -> None:
    project.configure(mock="seconds = { weights_load = 1.2 }")
    project.tests("""
import pytest
@pytest.mark.ladder(start=49_152, floor=49_152)
def test_window(kv_engine): pass

@pytest.mark.kv_shape(max_model_len=40_960)
def test_plain(kv_engine): pass
""")

    project.run("--timeout=1").assert_outcomes(passed=2)


def test_a_fixture_that_fails_before_any_boot_fails_the_test_in_its_own_words(project: Project) -> None:
    project.tests("""
import pytest
@pytest.fixture
def broken():
    raise OSError("no disk")

@pytest.mark.ladder(start=49_152, floor=40_960)
def test_window(broken, kv_engine): pass
""")

    result = project.run()

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["no boot at max_model_len=*", "*OSError: no disk*"])
    assert project.attempts() == []


def test_a_teardown_that_fails_is_an_error_of_its_rung(project: Project) -> None:
    project.tests("""
import pytest
@pytest.fixture
def untidy(kv_engine):
    yield
    raise OSError("no disk")

@pytest.mark.ladder(start=49_152, floor=40_960)
def test_window(untidy): pass
""")

    result = project.run()

    result.assert_outcomes(failed=1)
    assert [verdict for _, verdict in rows(result.outlines)] == ["ERROR"]


@DISTRIBUTIONS
def test_a_fault_that_is_not_memory_ends_the_ladder_with_one_boot(project: Project, how: tuple[str, ...]) -> None:
    project.configure(mock="faults = { error_in = 'weights_load' }")
    project.tests(BODY.format(body="pass"))

    result = project.run(*how)

    result.assert_outcomes(failed=1)
    assert [verdict for _, verdict in rows(result.outlines)] == ["ERROR"]
    assert [record.verdict for record in project.attempts()] == [Verdict.ERROR]


@DISTRIBUTIONS
def test_a_silent_death_is_unknown_and_asked_once_more(project: Project, how: tuple[str, ...]) -> None:
    project.configure(mock="faults = { die_in = 'weights_load' }")
    project.tests(BODY.format(body="pass"))

    result = project.run(*how)

    result.assert_outcomes(failed=1)
    assert [verdict for _, verdict in rows(result.outlines)] == ["UNKNOWN", "UNKNOWN"]
    result.stdout.fnmatch_lines(["*gave no verdict twice*", "bracket on max_model_len: nothing passed*"])


@DISTRIBUTIONS
def test_a_failed_boot_of_a_plain_test_is_a_setup_error_without_traceback(
    project: Project, how: tuple[str, ...]
) -> None:
    project.tests("""
import pytest
@pytest.mark.kv_shape(max_model_len=65_536)
def test_boots(kv_engine): pass
""")

    result = project.run(*how, "--junitxml=junit.xml")

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["FAIL *", "*kv_check*", "  evidence  line *"])
    result.stdout.no_fnmatch_line("*session.py*")
    (record,) = project.attempts()
    assert record.verdict is Verdict.FAIL
    told = properties(project.junit()["test_boots"])
    assert told["kvbudget.verdict"] == "FAIL"
    assert "max_model_len=65536" in told["kvbudget.shape"]
    assert told["kvbudget.record"].endswith("attempt.json")


@DISTRIBUTIONS
def test_a_boot_gate_holds_the_engines_own_count_against_windows_and_tokens(
    project: Project, how: tuple[str, ...]
) -> None:
    project.tests("""
import pytest
pytestmark = pytest.mark.kv_shape(max_model_len=20_480)

@pytest.mark.boot_gate(windows=2, min_tokens=51_200)
def test_holds(): pass

@pytest.mark.boot_gate(windows=3)
def test_windows(kv_engine): pass

@pytest.mark.boot_gate(min_tokens=51_201)
def test_tokens(kv_ledger): pass
""")

    result = project.run(*how)

    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines_random(
        ["boot_gate: *51,200*61,440*3 windows*", "boot_gate: *51,200*51,201*min_tokens*"]
    )


def test_a_boot_gate_on_a_ladder_is_a_gate_of_its_rungs(project: Project) -> None:
    project.tests("""
import pytest
@pytest.mark.boot_gate(windows=2)
@pytest.mark.ladder(start=32_768, floor=16_384)
def test_window(): pass
""")

    project.run().assert_outcomes(passed=1)

    (finding,) = project.findings()
    assert finding.finding.value == 24_576  # 2 * 24,576 tokens fit 51,200, 2 * 28,672 do not
    assert finding.finding.bounded_by is not None
    assert finding.finding.bounded_by.by_gate


DURING = {
    "body": """
@pytest.mark.ladder(start=65_536, floor=16_384, strategy="step")
def test_window(kv_rung):
    os.kill(os.getpid(), signal.SIGINT)
""",
    "boot": """
@pytest.fixture
def kv_shape(kv_shape):
    if kv_shape.max_model_len < 65_536:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    return kv_shape

@pytest.mark.ladder(start=65_536, floor=16_384, strategy="step")
def test_window(kv_rung): pass
""",
}


@pytest.mark.parametrize("source", DURING.values(), ids=DURING.keys())
def test_an_interrupt_ends_engines_and_keeps_what_was_found(project: Project, source: str) -> None:
    if "Timer" in source:
        # seconds after the refusal that comes first: in the middle of the second boot
        project.configure(mock="seconds = { graph_capture = 20 }")
    project.tests(f"import os, signal, threading\nimport pytest\n{source}")

    result = project.run()

    assert result.ret == pytest.ExitCode.INTERRUPTED
    (record,) = project.findings()
    assert record.finding.kind is FindingKind.UNDECIDED
    assert record.finding.failed_at == 65_536
    *_, last = project.attempts()
    assert last.verdict is Verdict.UNKNOWN
    assert last.message.startswith("interrupted: ")
    assert last.memory[-1].moment == "released"
    assert last.memory[-1].devices[0].used_bytes == last.memory[0].devices[0].used_bytes
    assert len(record.attempts) == 2
    result.stdout.fnmatch_lines(["*= kvbudget =*", "test_it.py::test_window:", "*65,536 failed*"])
    result.stdout.fnmatch_lines(["   1  65,536  FAIL *", "   2  49,152  UNKNOWN  interrupted*"])
    result.stdout.fnmatch_lines(["page:*ladder.html", "kvbudget: SIMULATED target card*"])
    (page,) = project.path.rglob("ladder.html")
    assert "interrupted" in page.read_text()
    assert (page.parent / record.attempts[-1]).with_name("rung.html").is_file()


def test_an_engine_that_dies_under_the_body_is_memory_and_not_the_bodys_error(project: Project) -> None:
    project.configure(mock='request_peak_per_token = "2 MiB"')
    project.tests("""
import pytest
@pytest.mark.ladder(start=16_384, floor=4096, strategy="bisect")
def test_window(kv_engine):
    kv_engine.complete("word " * 100, kv_engine.shape.max_model_len - 200)
""")

    project.run().assert_outcomes(passed=1)

    (finding,) = project.findings()
    assert finding.finding.value is not None
    assert finding.finding.bounded_by is not None
    assert not finding.finding.bounded_by.by_gate
    assert finding.finding.bounded_by.phase is Phase.REQUEST


def test_a_plain_test_whose_engine_died_says_so(project: Project) -> None:
    project.configure(mock='request_peak_base = "30 GiB"')
    project.tests("""
import time
import pytest
from pytest_kvbudget.engine.client import ClientError

@pytest.mark.kv_shape(max_model_len=4096)
def test_answers(kv_engine):
    with pytest.raises(ClientError):
        kv_engine.complete("hello", 10)
    while kv_engine.alive:
        time.sleep(0.01)
    raise AssertionError("no answer")
""")

    result = project.run("--junitxml=junit.xml")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*AssertionError: no answer*", "*Engine died during the test*", "FAIL *"])
    assert properties(project.junit()["test_answers"])["kvbudget.verdict"] == "FAIL"


@pytest.mark.parametrize(
    ("changes", "verdict"), [("extra_args=['--no-such-flag']", "ERROR"), ("max_model_len=65_536", "FAIL")]
)
def test_only_a_memory_failure_of_another_engine_is_the_bodys_refusal(
    project: Project, changes: str, verdict: str
) -> None:
    project.configure(devices="0, 1")
    project.tests(f"""
import pytest
@pytest.mark.ladder(start=4096, floor=4096)
def test_window(kv_engine, kv_serve):
    kv_serve({changes})
""")

    result = project.run()

    result.assert_outcomes(failed=1)
    assert rows(result.outlines) == [("4096", verdict)]
