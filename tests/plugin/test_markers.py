"""Arguments of markers are checked when tests are collected; marks of other people are left alone."""

from __future__ import annotations

import pytest

from pytest_kvbudget.verdict import Verdict
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
    "pool": (
        "@pytest.mark.ladder(start=4096, floor=1024, pool='big')",
        "*ladder: pool='big'; accepted are 'fixed', 'scaled'",
    ),
    "first": ("@pytest.mark.ladder(start=4096, floor=1024, first=4096)", "*ladder: first=4096; accepted are 'ceiling'"),
    "verify": (
        "@pytest.mark.ladder(start=4096, floor=1024, verify=True)",
        "*ladder: verify=True; accepted are 'neighbours'",
    ),
    "fine step": (
        "@pytest.mark.headroom_sweep(knob='reserved_headroom', step='1 GiB', fine_step='300 MiB')",
        "*headroom_sweep: fine_step is *, and step is *; expected a whole number of fine steps in a step*",
    ),
    "gate": ("@pytest.mark.boot_gate(window=2)", "*boot_gate: unknown argument 'window'; accepted are windows, min_t*"),
    "gate number": ("@pytest.mark.boot_gate(windows=0)", "*@pytest.mark.boot_gate: windows=0; expected a whole*"),
    "shape": (
        "@pytest.mark.kv_shape(max_model_length=1)",
        "*@pytest.mark.kv_shape: max_model_length: unknown key*max_num_seqs*",
    ),
    "shape of a ladder's axis": (
        "@pytest.mark.ladder(start=8192, floor=4096)\n@pytest.mark.kv_shape(max_model_len=4096)",
        "*@pytest.mark.kv_shape sets max_model_len, and @pytest.mark.ladder moves it*",
    ),
    "two promises": (
        "@pytest.mark.ladder(start=8192, floor=4096, windows=1)\n@pytest.mark.boot_gate(windows=2)",
        "*@pytest.mark.ladder(windows=1) and @pytest.mark.boot_gate(windows=2)*give it once",
    ),
    "flag of the shape": (
        "@pytest.mark.kv_shape(extra_args=['--max-num-seqs', '4'])",
        "*@pytest.mark.kv_shape: extra_args: --max-num-seqs would override the shape's max_num_seqs*",
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
def test_theirs(kv_engine):
    assert kv_engine == "theirs"
""")

    result = project.run("--strict-markers")

    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("kvbudget*")
    assert not (project.path / "kvbudget-archive").exists()


def test_a_bare_boot_gate_boots_whatever_the_test_asks_for(project: Project) -> None:
    project.configure(shape="max_model_len = 4096")
    project.tests("import pytest\n@pytest.mark.boot_gate\ndef test_boots(): pass\n")

    project.run().assert_outcomes(passed=1)

    assert [record.verdict for record in project.attempts()] == [Verdict.PASS]


UNHEARD = {
    "boot_gate(window=2)": "*boot_gate: unknown argument 'window'; accepted are windows, min_tokens*",
    "boot_gate(2)": "*boot_gate: takes keyword arguments only, got 2*windows=1, min_tokens=None*",
    "ladder('max_model_len', 262144, 131072)": "*ladder: takes keyword arguments only, got 'max_model_len'*start*",
    "ladder(262144)": "*ladder: takes keyword arguments only, got 262144*",
    "ladder(strat=7, flor=3)": "*ladder: unknown argument 'strat'; accepted are axis, start, floor*",
    "ladder(high=262144, low=131072)": "*ladder: unknown argument 'high'; accepted are axis, start, floor*",
    "ladder(window=2)": "*ladder: unknown argument 'window'; accepted are axis*",
    "knife_edge(tokens=3)": "*knife_edge: tokens: unknown key*",
    "knife_edge(4096)": "*knife_edge: takes keyword arguments only*",
    "kv_soak": "*kv_soak: neither requests nor minutes*",
    "kv_shape(max_model_len=4096)": "*kv_shape: nothing of this test boots an engine; add @pytest.mark.boot_gate*",
}


@pytest.mark.parametrize(("mark", "message"), UNHEARD.items(), ids=UNHEARD.keys())
def test_a_mark_that_would_boot_nothing_is_a_collection_error_and_no_pass(
    project: Project, mark: str, message: str
) -> None:
    project.tests(f"import pytest\n@pytest.mark.{mark}\ndef test_it(): pass\n")

    result = project.run()

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"test_it.py::test_it: {message}"])
    assert project.attempts() == []


def test_a_shape_of_the_whole_module_meets_tests_that_need_none(project: Project) -> None:
    project.tests("""
import pytest
pytestmark = pytest.mark.kv_shape(max_model_len=4096)
def test_plain(): pass
def test_boots(kv_engine): pass
""")

    project.run().assert_outcomes(passed=2)


@DISTRIBUTIONS
def test_two_marks_of_a_name_on_one_test_are_refused(project: Project, how: tuple[str, ...]) -> None:
    project.tests("""
import pytest
@pytest.mark.ladder(start=4096, floor=1024)
@pytest.mark.ladder(start=8192, floor=1024)
def test_window(kv_engine): pass

@pytest.mark.boot_gate
@pytest.mark.boot_gate(min_tokens=1)
def test_gates(kv_engine): pass

@pytest.mark.ladder(start=4096, floor=1024)
@pytest.mark.headroom_sweep(knob="kv_cache_memory_bytes", ceiling="64 MiB")
def test_both(kv_engine): pass

@pytest.mark.ladder(start=4096, floor=1024)
@pytest.mark.ladder(axis="max_num_seqs", start=4, floor=1)
class TestClass:
    def test_window(self, kv_engine): pass
""")

    result = project.run(*how)

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [
            "*test_it.py::test_window: @pytest.mark.ladder: 2 ladders move max_model_len; ladders on one function*",
            "*test_it.py::test_gates: 2 marks @pytest.mark.boot_gate; one test has one*",
            "*test_it.py::test_both: @pytest.mark.ladder and @pytest.mark.headroom_sweep on one test; write*",
        ]
    )
    assert project.attempts() == []


def test_a_mark_of_the_test_replaces_that_of_its_class(project: Project) -> None:
    project.configure(shape="max_model_len = 4096")
    project.tests("""
import pytest
@pytest.mark.boot_gate(min_tokens=100_000)
class TestIt:
    @pytest.mark.boot_gate(min_tokens=1)
    def test_it(self): pass
""")

    project.run().assert_outcomes(passed=1)


def test_markers_are_registered(project: Project) -> None:
    result = project.run("--markers")

    for name in ("ladder", "boot_gate", "knife_edge", "kv_soak", "kv_shape"):
        result.stdout.fnmatch_lines([f"@pytest.mark.{name}(*"])


IMPOSSIBLE = {
    "longer than the window": (
        "@pytest.mark.kv_shape(max_model_len=4096)\n@pytest.mark.knife_edge(prompt_tokens=4096)",
        "*prompt_tokens=4,096 and one token of an answer do not fit into a window of 4,096 tokens (max_model_len)",
    ),
    "longer with its answer": (
        "@pytest.mark.kv_shape(max_model_len=4096)\n@pytest.mark.knife_edge(prompt_tokens=4000, max_tokens=97)",
        "*prompt_tokens=4,000 and max_tokens=97 do not fit into a window of 4,096 tokens (max_model_len)",
    ),
    "longer than the lowest rung": (
        "@pytest.mark.ladder(start=8192, floor=4096)\n@pytest.mark.knife_edge(prompt_tokens=5000)",
        "*do not fit into a window of 4,096 tokens (the ladder's floor)",
    ),
}


@DISTRIBUTIONS
@pytest.mark.parametrize(("marks", "message"), IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_what_cannot_be_is_said_before_anything_boots(
    project: Project, how: tuple[str, ...], marks: str, message: str
) -> None:
    project.tests(f"import pytest\n{marks}\ndef test_it(kv_engine): pass\n")

    result = project.run(*how)

    text = (result.stderr if not how else result.stdout).str()
    assert result.ret == (pytest.ExitCode.USAGE_ERROR if not how else pytest.ExitCode.TESTS_FAILED)
    (result.stderr if not how else result.stdout).fnmatch_lines([f"*test_it.py::test_it: {message}"])
    assert "INTERNALERROR" not in text
    assert project.attempts() == []


def test_a_shape_of_a_conftest_may_make_room(project: Project) -> None:
    project.tests(
        "import pytest\n@pytest.fixture\ndef kv_shape(kv_shape): return kv_shape.merged(max_model_len=8192)",
        "conftest.py",
    )
    marks, _ = IMPOSSIBLE["longer than the window"]
    project.tests(f"import pytest\n{marks}\ndef test_it(kv_engine): pass\n")

    project.run().assert_outcomes(passed=1)


@pytest.mark.parametrize("field", ["lnc=2", "reserved_headroom='4 GiB'"])
def test_a_mark_that_the_targets_engine_does_not_read_is_refused(project: Project, field: str) -> None:
    (project.path / "kvbudget.toml").write_text(
        "[target.gpu]\nbackend = 'vllm'\ndevices = [0]\n[target.gpu.shape]\nmodel = 'm'\n"
    )
    project.tests(f"import pytest\n@pytest.mark.kv_shape({field})\ndef test_it(kv_engine): pass\n")

    result = project.run()

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    name = field.partition("=")[0]
    result.stderr.fnmatch_lines(
        [f"*test_it: @pytest.mark.kv_shape on target gpu: shape.{name}: is a Neuron setting; backend 'vllm' has none"]
    )


def test_a_misspelt_field_in_a_conftest_shows_the_conftest_and_nothing_of_the_plugin(project: Project) -> None:
    project.tests(
        "import pytest\n@pytest.fixture\ndef kv_shape(kv_shape): return kv_shape.merged(max_modle_len=8)", "conftest.py"
    )
    project.tests("import pytest\n@pytest.mark.boot_gate\ndef test_a(): pass\ndef test_b(kv_engine, kv_ledger): pass\n")

    result = project.run()

    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["E *max_modle_len: unknown key; did you mean 'max_model_len'? expected model, *"])
    result.stdout.no_fnmatch_line("*pytest_kvbudget/*.py:[0-9]*")
