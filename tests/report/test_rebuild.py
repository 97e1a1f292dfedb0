"""What ``kvbudget report`` writes and says."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_kvbudget.cli import main
from pytest_kvbudget.records import UseRecord
from pytest_kvbudget.verdict import Verdict
from tests.report.building import RUN, attempt, write_attempt, write_ladder


def said(root: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = main(["report", str(root)])
    written = capsys.readouterr()
    return status, written.out, written.err


def test_a_record_that_is_cut_off_is_named_and_the_others_have_their_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = write_attempt(tmp_path, attempt(4_096, test="a.py::test_first", rung=None))
    broken.write_bytes(broken.read_bytes()[:100])
    whole = write_attempt(tmp_path, attempt(4_096, test="z.py::test_last", rung=None))

    status, out, err = said(tmp_path, capsys)

    assert status == 2
    assert str(broken) in err
    assert whole.with_name("rung.html").is_file()
    assert "z.py::test_last: PASS: Booted and held its window." in out
    assert out.endswith("1 page written\n")


def test_plain_boots_are_listed_with_run_and_time_and_rungs_are_their_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_ladder(tmp_path, [attempt(241_664), attempt(245_760, Verdict.FAIL)])
    write_attempt(tmp_path, attempt(4_096, test="test_boots.py::test_boots", rung=None))

    status, out, _ = said(tmp_path, capsys)

    assert status == 0
    lines = out.splitlines()
    heads = [line for line in lines[:-1] if not line.startswith(" ")]
    assert heads == [
        "tests/test_window.py::test_window: The largest window that serves is 241,664 tokens; 245,760 tokens failed in "
        "graph capture, 76.00 MiB short.",
        "test_boots.py::test_boots: PASS: Booted and held its window.",
    ]
    assert lines[1] == f"  run {RUN.run}, 2026-10-05 02:15:03 UTC"
    assert lines.count(lines[1]) == 2


def test_every_line_of_a_simulated_device_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_ladder(tmp_path, [attempt(241_664, simulated=True)], simulated=True)
    write_attempt(tmp_path, attempt(4_096, test="test_boots.py::test_boots", rung=None, simulated=True))

    _, out, _ = said(tmp_path, capsys)

    heads = [line for line in out.splitlines()[:-1] if not line.startswith(" ")]
    assert len(heads) == 2
    assert all(line.startswith("SIMULATED ") for line in heads)


def test_tests_that_shared_a_boot_are_listed_each_with_its_own_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uses = (
        UseRecord(test="a.py::test_before", verdict=Verdict.PASS, message="ready after 41 s"),
        UseRecord(test="a.py::test_knife", verdict=Verdict.FAIL, message="max_used: rank 0 used 31.00 GiB"),
    )
    write_attempt(tmp_path, attempt(4_096, test="a.py::test_before", rung=None, uses=uses))
    _, out, _ = said(tmp_path, capsys)
    assert [line for line in out.splitlines() if "::" in line] == [
        "a.py::test_before: PASS: ready after 41 s",
        "a.py::test_knife: FAIL: max_used: rank 0 used 31.00 GiB",
    ]


def test_a_boot_that_was_called_off_is_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    off = "interrupted: this boot was called off before it had a verdict"
    write_attempt(tmp_path, attempt(4_096, Verdict.UNKNOWN, message=off, cause=None))
    status, out, _ = said(tmp_path, capsys)
    assert (status, out) == (0, "1 page written\n")


def test_an_empty_archive_is_trouble(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = said(tmp_path, capsys)
    assert (status, out) == (2, "")
    assert "no records below" in err
