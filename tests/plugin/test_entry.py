"""A run that does not use us pays for one light module and sees nothing of it."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from pytest_kvbudget import plugin
from pytest_kvbudget.cli import main
from tests.conftest import Project

MODULES = """
import sys

def test_modules():
    with open("modules.txt", "w") as file:
        file.write("\\n".join(sys.modules))
"""


@pytest.mark.parametrize("where", ["unit", "project"])
def test_an_unused_plugin_loads_nothing_but_its_entry_module(project: Project, where: str) -> None:
    if where == "unit":
        (project.path / "kvbudget.toml").unlink()
    project.tests(MODULES)

    def modules(*options: str) -> set[str]:
        project.run(*options).assert_outcomes(passed=1)
        return set(Path("modules.txt").read_text().split())

    assert modules() - modules("-p", "no:kvbudget") == {"pytest_kvbudget", "pytest_kvbudget.plugin"}


def test_the_package_imports_nothing() -> None:
    code = "import sys; before = set(sys.modules); import pytest_kvbudget; print(*sorted(set(sys.modules) - before))"

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert result.stdout.split() == ["pytest_kvbudget"]


@pytest.mark.parametrize("how", [(), ("-n2",)], ids=["here", "n2"])
def test_a_run_that_does_not_use_us_does_not_speak_of_us(project: Project, how: tuple[str, ...]) -> None:
    (project.path / "kvbudget.toml").unlink()
    project.tests("def test_plain(): pass\n")

    result = project.run(*how, "--html=report.html", "--self-contained-html")

    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("kvbudget*")
    assert ".col-kvbudget { display: none }" in (project.path / "report.html").read_text()


def test_collecting_does_not_start_us(project: Project) -> None:
    project.tests("def test_boots(kv_engine): pass\n")

    result = project.run("--collect-only", "-q")

    assert result.outlines[0] == "test_it.py::test_boots"
    result.stdout.no_fnmatch_line("kvbudget:*")


def test_strict_pytest_is_content(project: Project) -> None:
    (project.path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers --strict-config\n")
    project.tests("""
import pytest
@pytest.mark.boot_gate
@pytest.mark.kv_shape(max_model_len=4096)
def test_boots(kv_engine): pass
""")

    project.run("-W", "error").assert_outcomes(passed=1)


def test_without_the_plugin_nothing_of_it_is_there(project: Project) -> None:
    project.tests("def test_boots(kv_engine): pass\n")

    result = project.run("-p", "no:kvbudget")

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*fixture 'kv_engine' not found*"])


def test_the_documentation_names_every_mark_fixture_and_option() -> None:
    here = Path(__file__).parent.parent.parent
    readme = (here / "README.md").read_text()
    fixtures = (here / "docs" / "fixtures.md").read_text()
    source = Path(str(plugin.__file__)).read_text()
    for name in plugin.MARKERS:
        assert f"`{name}" in readme
    options = re.findall(r'"(--kvbudget-[a-z-]+)"', source)
    assert options
    assert [option for option in options if f"`{option}" not in readme] == []
    named = re.findall(r"def (kv_[a-z]+)\(", source)
    assert "kv_engine" in named
    for name in named:
        assert f"| `{name}` |" in fixtures
    ledger = "".join(path.read_text() for path in (here / "pytest_kvbudget" / "ledger").rglob("*.py"))
    table = fixtures.partition("| fact of a vLLM boot |")[2].partition("\n\n")[0]
    facts = re.findall(r"`([a-z_]+)`", table)
    assert "kv_tokens" in facts
    assert [fact for fact in facts if fact not in ledger] == []


def test_the_command_says_which_release_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kvbudget {version('pytest-kvbudget')}\n"
