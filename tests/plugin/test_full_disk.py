"""A disk that fills up: whose record is lost is told so in one line, and no engine outlives it."""

from __future__ import annotations

import pytest

from tests.conftest import Project

FULL = """
import errno
import os

import pytest_kvbudget.archive as archive

written = [0]
write = archive._write


def full(path, record):
    written[0] += 1
    if {condition}:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(path, record)


archive._write = full
"""
PIDS = """
    with open("pids", "w") as file:
        file.write(" ".join(map(str, kv_engine.pids())))
"""


def disk(project: Project, condition: str) -> None:
    project.tests(FULL.format(condition=condition), "conftest.py")


def test_a_boot_whose_verdict_cannot_be_kept_is_an_error_of_its_test(project: Project) -> None:
    disk(project, "getattr(record, 'verdict', None) == 'PASS' and 'test_lost' in str(path)")
    project.tests("""
import pytest

@pytest.mark.kv_shape(max_model_len=4096)
def test_lost(kv_engine): ...

@pytest.mark.kv_shape(max_model_len=8192)
def test_next(kv_engine): ...
""")
    result = project.run("-v")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*test_lost ERROR*", "*test_next PASSED*"])
    assert "Traceback" not in result.stdout.str()
    said = [line for line in result.outlines if line.startswith("no engine for ")]
    assert len(said) == 1
    assert said[0].endswith("attempt.json: the record of a boot cannot be written: No space left on device")


def test_what_is_lost_after_the_boot_is_an_error_of_the_test_that_asked(project: Project) -> None:
    disk(project, "any(use.survival is not None for use in getattr(record, 'uses', ()))")
    project.configure(shape="max_model_len = 4096")
    project.tests(f"""
import pytest

@pytest.mark.knife_edge(hold=8)
def test_lost(kv_engine):{PIDS}

def test_next(kv_engine): ...
""")
    result = project.run("-v")
    result.stdout.fnmatch_lines(["*test_lost FAILED*", "*test_next *", "*No space left on device*"])
    assert "Traceback" not in result.stdout.str()
    for pid in (project.path / "pids").read_text().split():
        assert not alive(int(pid))


@pytest.mark.parametrize(
    "condition",
    ["getattr(record, 'settled', False)", "record.kind == 'finding'", "written[0] > 1"],
    ids=["record", "finding", "everything"],
)
def test_a_ladder_ends_with_one_line_and_the_session_goes_on(project: Project, condition: str) -> None:
    disk(project, condition)
    project.tests("""
import pytest

@pytest.mark.ladder(start=8192, floor=4096)
def test_window(kv_engine): ...

def test_plain(): ...
""")
    result = project.run()
    result.assert_outcomes(failed=1, passed=1)
    assert "INTERNALERROR" not in result.stdout.str()
    result.stdout.fnmatch_lines(["*No space left on device*"])


def test_an_end_that_cannot_be_kept_is_said(project: Project) -> None:
    disk(project, "getattr(record, 'timings', None) is not None and record.timings.teardown_s is not None")
    project.configure(shape="max_model_len = 4096")
    project.tests("def test_a(kv_engine): ...\n")
    result = project.run()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["kvbudget: *attempt.json: the record of a boot cannot be written: No space left*"])
    (record,) = project.attempts()
    assert record.uses[0].verdict == "PASS", "what was known before is there, and whole"


def alive(pid: int) -> bool:
    """A process that has not ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:  # noqa: PTH123 - a path of the kernel's
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
