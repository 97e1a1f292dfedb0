"""With other plugins: pytest-xdist's crashes, pytest-html, rerunfailures, and the debugger."""

from __future__ import annotations

import html
import json
import re
import time

import pytest

from pytest_kvbudget.verdict import Verdict
from tests.conftest import Project, rows
from tests.plugin.terminal import pytest_on_a_terminal

DISTRIBUTIONS = pytest.mark.parametrize("how", [(), ("-n2",)], ids=["here", "n2"])

LADDER = """
import os
import signal
import pytest

@pytest.mark.ladder(start=53_248, floor=40_960, strategy="step")
def test_window(kv_rung):
    {body}
"""


@DISTRIBUTIONS
def test_pytest_html_has_a_row_with_verdict_and_links_for_each_rung(project: Project, how: tuple[str, ...]) -> None:
    project.tests(LADDER.format(body="pass") + "def test_boots(kv_engine): pass\n")
    project.configure(shape="max_model_len = 4096")

    project.run(*how, "--html=out/report.html", "--self-contained-html").assert_outcomes(passed=2)

    page = (project.path / "out" / "report.html").read_text()
    assert "display: none }</style>" not in page
    blob = re.search(r'data-jsonblob="([^"]*)"', page)
    assert blob is not None
    cases = json.loads(html.unescape(blob[1]))["tests"]
    logs = {name: case["log"] for name, (case, *_) in cases.items()}
    refused = logs["test_it.py::test_window[max_model_len=53248]"]
    assert refused.startswith("FAIL: kv_check: one request of 53,248 tokens needs "), refused
    column = {
        name: next(cell for cell in case["resultsTableRow"] if "col-kvbudget" in cell)
        for name, (case, *_) in cases.items()
    }
    verdicts = {
        "test_it.py::test_window[max_model_len=53248]": "FAIL",
        "test_it.py::test_window[max_model_len=40960]": "PASS",
        "test_it.py::test_window[max_model_len=45056]": "PASS",
        "test_it.py::test_window[max_model_len=49152]": "PASS",
        "test_it.py::test_window": "Proven",
        "test_it.py::test_boots": "PASS",
    }
    assert column == {
        name: f'<td class="col-kvbudget">{verdict} (simulated)</td>' for name, verdict in verdicts.items()
    }
    for name, (case, *_) in cases.items():
        links = {extra["name"]: extra["content"] for extra in case["extras"]}
        assert set(links) == ({"record", "page"} if name.endswith("::test_window") else {"record", "log", "page"})
        for link in links.values():
            assert (project.path / "out" / link).is_file(), link
            assert link.startswith("../kvbudget-archive/")


def test_pytest_html_says_sizes_of_rungs_that_count_in_bytes(project: Project) -> None:
    project.tests("""
import pytest

@pytest.mark.headroom_sweep(knob="kv_cache_memory_bytes", start="48 MiB", step="16 MiB", floor="16 MiB")
@pytest.mark.kv_shape(max_model_len=4096)
def test_pool(kv_ledger): ...
""")
    project.run("--html=report.html", "--self-contained-html")
    page = html.unescape(html.unescape((project.path / "report.html").read_text()))
    assert re.search(r"col-testId[^<>]*>test_it.py::test_pool\[kv_cache_memory_bytes=50331648\] \(48[.0]* MiB\)<", page)


@DISTRIBUTIONS
def test_reruns_do_not_repeat_rungs(project: Project, how: tuple[str, ...]) -> None:
    project.tests(LADDER.format(body="assert False"))

    result = project.run(*how, "--reruns=2")

    result.assert_outcomes(failed=1)
    assert len(project.attempts()) == len(rows(result.outlines)) == 2


def test_a_worker_that_is_killed_loses_no_earlier_row_and_names_its_records(project: Project) -> None:
    project.tests(LADDER.format(body="os.kill(os.getpid(), signal.SIGKILL)"))

    result = project.run("-n2", "--max-worker-restart=0")

    assert result.ret != 0
    assert rows(result.outlines) == [("53248", "FAIL")]
    result.stdout.fnmatch_lines(["*worker * crashed while running *test_window*", "no verdict; records of its boots*"])
    result.stdout.fnmatch_lines(["  *max_model_len=40960/attempt.json"])
    verdicts = {record.shape.max_model_len: record.verdict for record in project.attempts()}
    assert verdicts[53_248] is Verdict.FAIL


def test_two_ladders_on_two_cards_run_side_by_side(project: Project) -> None:
    project.configure(devices="0, 1", mock="seconds = { weights_load = 0.3 }")
    for name in ("a", "b"):
        project.tests(LADDER.format(body="pass"), f"test_{name}.py")

    result = project.run("-n2")

    result.assert_outcomes(passed=2)
    assert {finding.finding.value for finding in project.findings()} == {49_152}
    assert {record.target.devices for record in project.attempts()} == {("0",), ("1",)}
    assert len({record.run.worker for record in project.attempts()}) == 2


def test_the_debugger_opens_at_a_gate_and_the_ladder_goes_on(project: Project) -> None:
    project.tests(LADDER.format(body="assert int(kv_rung) < 49_152"))

    with pytest_on_a_terminal(project.path, "--pdb", "test_it.py") as terminal:
        terminal.expect(r"\(Pdb\) ")
        terminal.send("p 'rung', int(kv_rung)")
        terminal.expect(r"'rung', 49152")
        terminal.send("c")
        terminal.expect(r"1 passed")

    assert {finding.finding.value for finding in project.findings()} == {45_056}


def test_the_debugger_opens_once_and_leaving_it_keeps_what_was_found(project: Project) -> None:
    project.tests(LADDER.format(body="assert int(kv_rung) < 0"))

    with pytest_on_a_terminal(project.path, "--pdb", "test_it.py") as terminal:
        terminal.expect(r"\(Pdb\) ")
        terminal.send("q")
        terminal.expect("= kvbudget =")
        terminal.expect("53,248  FAIL")
        terminal.expect("40,960  UNKNOWN  interrupted")

    assert [record.verdict for record in project.attempts()] == [Verdict.FAIL, Verdict.UNKNOWN]


def test_the_debugger_does_not_open_at_the_finding(project: Project) -> None:
    project.tests(LADDER.format(body="pass").replace("40_960", "53_248"))

    with pytest_on_a_terminal(project.path, "--pdb", "test_it.py") as terminal:
        terminal.expect("nothing passes")
        terminal.expect("1 failed")


def test_a_terminal_shows_the_phase_while_a_boot_runs(project: Project) -> None:
    project.configure(mock="seconds = { weights_load = 0.5 }")
    project.tests("""
import pytest
@pytest.mark.kv_shape(max_model_len=4096)
def test_boots(kv_engine, capfd):
    assert "max_model_len" not in capfd.readouterr().out
""")

    with pytest_on_a_terminal(project.path, "test_it.py") as terminal:
        terminal.expect(r"\n\rtest_it\.py::test_[a-z]+: [a-z_]+ \d+ s [^\r\n]*\x1b\[K")
        terminal.expect(r"\r\x1b\[K[^\r\n]*\.")
        terminal.expect(r"1 passed")


def test_without_a_terminal_only_a_long_boot_says_where_it_is(project: Project) -> None:
    project.configure(mock="seconds = { weights_load = 2.5 }")
    project.tests(LADDER.replace("53_248, floor=40_960", "49_152, floor=49_152").format(body="pass"))

    begun = time.monotonic()
    result = project.run()

    assert time.monotonic() - begun > 2.5
    lines = [line for line in result.outlines if re.match(r"max_model_len=49152: \w+ \d+ s", line)]
    assert lines
    assert len(lines) <= 3
    assert "\x1b[K" not in result.stdout.str()
