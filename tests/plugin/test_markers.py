"""Arguments of markers are checked when tests are collected; marks of other people are left alone."""

from __future__ import annotations

import pytest

from tests.conftest import Project

DISTRIBUTIONS = pytest.mark.parametrize("how", [(), ("-n2",)], ids=["here", "n2"])

WRONG = {
    "unknown": (
        "@pytest.mark.ladder(start=4096, floor=1024, step=64)",
        "*@pytest.mark.ladder: unknown argument 'step'; accepted are axis, start, floor, quantum*",
    ),
    "missing": ("@pytest.mark.ladder(start=4096)", "*@pytest.mark.ladder: floor is missing*"),
    "bare": ("@pytest.mark.ladder", "*@pytest.mark.ladder: start is missing*"),
    "positional": ("@pytest.mark.ladder(4096, 1024)", "*@pytest.mark.ladder: takes keyword arguments only, got 4096*"),
    "axis": ("@pytest.mark.ladder(axis='model', start=2, floor=1)", "*ladder: axis='model'; accepted are *"),
    "order": ("@pytest.mark.ladder(start=1024, floor=4096)", "*ladder: start is 1024 and floor is 4096*"),
    "strategy": (
        "@pytest.mark.ladder(start=4096, floor=1024, strategy='luck')",
        "*ladder: strategy='luck'; accepted are *'predict'*",
    ),
    "pool": ("@pytest.mark.ladder(start=4096, floor=1024, pool='big')", "*@pytest.mark.ladder: *'big'*pool*"),
    "gate": ("@pytest.mark.boot_gate(window=2)", "*boot_gate: unknown argument 'window'; accepted are windows, min_t*"),
    "gate number": ("@pytest.mark.boot_gate(windows=0)", "*@pytest.mark.boot_gate: windows=0; expected a whole*"),
    "shape": (
        "@pytest.mark.kv_shape(max_model_length=1)",
        "*@pytest.mark.kv_shape: max_model_length: unknown key*max_num_seqs*",
    ),
    "size": (
        "@pytest.mark.kv_shape(kv_cache_memory_bytes='50 MB')",
        "*@pytest.mark.kv_shape: kv_cache_memory_bytes: '50 MB' has the unit 'MB'*",
    ),
}


@pytest.mark.parametrize(("mark", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_argument_is_a_collection_error_with_test_and_argument(
    project: Project, mark: str, message: str
) -> None:
    project.tests(f"import pytest\n{mark}\ndef test_window(kv_engine): pass\ndef test_other(): pass\n")

    result = project.run()

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"test_it.py::test_window: {message}"])
    assert project.attempts() == []


def test_a_wrong_argument_is_the_same_error_in_workers(project: Project) -> None:
    mark, message = WRONG["unknown"]
    project.tests(f"import pytest\n{mark}\ndef test_window(kv_engine): pass\n")

    result = project.run("-n2")

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([message])
    result.stdout.no_fnmatch_line("*INTERNALERROR*")


@pytest.mark.parametrize("place", ["class", "module"])
def test_marks_of_class_and_module_are_checked_too(project: Project, place: str) -> None:
    module = "pytestmark = pytest.mark.boot_gate(windows=0)" if place == "module" else ""
    mark = "@pytest.mark.boot_gate(windows=0)" if place == "class" else ""
    project.tests(f"import pytest\n{module}\n{mark}\nclass TestIt:\n    def test_it(self): pass\n")

    result = project.run()

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["test_it.py::TestIt::test_it: @pytest.mark.boot_gate: windows=0*"])


@DISTRIBUTIONS
def test_methods_of_test_cases_are_refused(project: Project, how: tuple[str, ...]) -> None:
    project.tests("""
import unittest
import pytest
class TestIt(unittest.TestCase):
    @pytest.mark.ladder(start=4096, floor=1024)
    def test_it(self): pass
""")

    result = project.run(*how)

    result.stdout.fnmatch_lines(["*test_it.py::TestIt::test_it: is a method of unittest.TestCase*"])
    result.assert_outcomes(errors=1)


def test_marks_of_other_people_are_left_alone(project: Project) -> None:
    project.tests("""
import pytest

pytestmark = pytest.mark.ladder

@pytest.fixture
def kv_engine():
    return "theirs"

@pytest.mark.ladder(7, rungs=3)
@pytest.mark.boot_gate
def test_theirs(kv_engine):
    assert kv_engine == "theirs"
""")

    result = project.run("--strict-markers")

    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("kvbudget*")
    assert not (project.path / "kvbudget-archive").exists()


def test_markers_are_registered(project: Project) -> None:
    result = project.run("--markers")

    for name in ("ladder", "boot_gate", "kv_shape"):
        result.stdout.fnmatch_lines([f"@pytest.mark.{name}(*"])
