"""What a hostile reviewer found: each of these once gave a pass, a proof or a crash that was not one."""

from __future__ import annotations

import pytest

from pytest_kvbudget.verdict import FindingKind, Verdict
from tests.conftest import Project

DIES = "request_peak_base = 64_000_000_000\n[target.card.mock.seconds]\nlinger = 2.0"
POST = """
import pytest, requests

def ask(engine):
    requests.post(engine.url + "/v1/completions", json={"model": "simulated", "prompt": "hi", "max_tokens": 8})
"""


def test_a_rung_whose_engine_dies_unnoticed_by_its_body_is_no_pass(project: Project) -> None:
    project.configure(mock=DIES)
    project.tests(POST + "\n@pytest.mark.ladder(start=8192, floor=4096)\ndef test_w(kv_engine): ask(kv_engine)\n")
    project.run().assert_outcomes(failed=1)
    (finding,) = project.findings()
    assert finding.finding.kind is FindingKind.EMPTY
    assert {record.verdict for record in project.attempts()} == {Verdict.FAIL}


@pytest.mark.parametrize("mark", ["", "@pytest.mark.boot_gate\n"])
def test_a_plain_test_whose_engine_dies_unnoticed_fails(project: Project, mark: str) -> None:
    project.configure(shape="max_model_len = 4096", mock=DIES)
    project.tests(POST + f"\n{mark}def test_w(kv_engine): ask(kv_engine)\n")
    result = project.run()
    result.assert_outcomes(failed=1)
    assert result.stdout.str().count("request_oom: an allocation") == 1, "it is said once"


def test_a_rerun_gets_an_engine_of_its_own(project: Project) -> None:
    project.configure(shape="max_model_len = 4096")
    project.tests(
        """
tries = []

def test_y(kv_engine, kv_serve):
    tries.append(kv_engine.url)
    kv_engine.client.complete("x", max_tokens=2)
    assert len(tries) > 1
"""
    )
    result = project.run("--reruns", "1")
    result.assert_outcomes(passed=1)
    assert result.ret == 0


def test_a_rerun_after_the_engine_died_boots_again(project: Project) -> None:
    project.configure(shape="max_model_len = 4096")
    project.tests(
        """
import os, signal
tries = []

def test_y(kv_engine):
    tries.append(kv_engine.url)
    if len(tries) == 1:
        os.kill(kv_engine.pids()[0], signal.SIGKILL)
        assert False
    kv_engine.client.complete("x", max_tokens=2)
"""
    )
    project.run("--reruns", "1").assert_outcomes(passed=1)
    assert len(project.attempts()) == 2


def test_a_body_that_skips_proves_nothing(project: Project) -> None:
    project.tests(
        """
import pytest

@pytest.mark.ladder(start=4096, floor=4096)
def test_skip(kv_engine): pytest.skip("not judged")
"""
    )
    project.run().assert_outcomes(skipped=1)
    assert all(not finding.finding.proven for finding in project.findings())


@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ("start=10**30, floor=1, quantum=1", "start=1000000000000000000000000000000"),
        ("axis='max_num_seqs', start=4, floor=1, pool='scaled'", "pool='scaled'"),
    ],
)
def test_absurd_ladders_are_refused_in_words(project: Project, marker: str, said: str) -> None:
    project.tests(f"import pytest\n\n@pytest.mark.ladder({marker})\ndef test_w(kv_engine): ...\n")
    result = project.run()
    output = result.stdout.str()
    assert "INTERNALERROR" not in output
    assert said in output
    assert result.ret in {1, 2}


@pytest.mark.parametrize("text", ["[target.a]\nbackend = 'mock'\ncommand = \"python 'x\"\n"])
def test_configuration_that_no_shell_could_split_is_a_usage_error(project: Project, text: str) -> None:
    (project.path / "kvbudget.toml").write_text(text)
    project.tests("def test_w(kv_engine): ...\n")
    result = project.run()
    assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()
    assert "cannot be split" in result.stdout.str() + result.stderr.str()


def test_no_setuponly_plugin_is_needed(project: Project) -> None:
    project.tests("import pytest\n\n@pytest.mark.ladder(start=4096, floor=4096)\ndef test_w(kv_engine): ...\n")
    project.run("-p", "no:setuponly").assert_outcomes(passed=1)


def test_a_timeout_comes_back_after_a_boot_that_failed_in_the_body(project: Project) -> None:
    project.configure(shape="max_model_len = 4096")
    project.tests(
        """
import threading

def test_t(kv_engine, kv_serve):
    try:
        kv_serve(max_model_len=8192)
    except Exception:
        pass
    threading.Event().wait(30)
"""
    )
    result = project.run("--timeout", "2")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*Timeout*"])


@pytest.mark.parametrize("value", ["abc", "a-longer-one"])
def test_a_secret_that_the_engine_prints_back_is_in_no_record_page_or_terminal(project: Project, value: str) -> None:
    project.tests(f"""
import pytest
@pytest.mark.kv_shape(max_model_len=4096, extra_args=["--no-such-flag", "--api-key", "{value}"])
def test_boots(kv_engine): pass
""")

    result = project.run("--junitxml=junit.xml")

    result.assert_outcomes(errors=1)
    (record,) = project.attempts()
    assert "unrecognized arguments: --no-such-flag --api-key <removed>" in record.message
    (folder,) = (path.parent for path in project.path.rglob("attempt.json"))
    assert f"--api-key {value}" in (folder / "engine.log").read_text()  # the engine's own words stay as they are
    for text in (result.stdout.str(), *(path.read_text() for path in (*folder.glob("*.json"), *folder.glob("*.html")))):
        assert f"--api-key {value}" not in text


def test_a_folder_and_a_model_with_letters_that_the_locale_lacks(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project.path / "bü"
    project.configure(shape='env = { NAME = "ü" }')
    folder.mkdir()
    text = (project.path / "kvbudget.toml").read_text().replace('"simulated"', '"modell-ü"')
    (folder / "kvbudget.toml").write_text(text)
    (project.path / "kvbudget.toml").unlink()
    project.tests(
        "import pytest\n@pytest.mark.ladder(start=53_248, floor=49_152)\ndef test_w(kv_engine): pass", "bü/test_w.py"
    )
    monkeypatch.chdir(folder)
    for name, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)

    result = project.run("test_w.py")

    result.assert_outcomes(passed=1)
    (first, _) = project.attempts()
    assert (first.shape.model, first.shape.env["NAME"]) == ("modell-ü", "ü")
    assert "modell-ü" in first.command
    assert str(folder / "kvbudget.toml") in first.target.origin
    assert list(folder.rglob("ladder.html"))
