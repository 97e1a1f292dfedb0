"""A run that does not use us pays for one light module and sees nothing of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
