"""The command line as a shell runs it: what cannot be written, and terminals that lack characters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_kvbudget import cli
from pytest_kvbudget.cli import EXIT_TROUBLE, main

LOG = Path(__file__).parent / "ledger" / "data" / "boots" / "m2_refused_131072.log"
PLAN = ("plan", "--policy", "vllm", "--total", "80 GiB", "--weights", "40 GiB", "--utilization", "0.9")
FULL = Path("/dev/full")

COMMANDS = pytest.mark.parametrize(
    "words", [("explain", str(LOG)), ("explain", "--json", str(LOG)), PLAN, ("schema",), ("audit", str(LOG))]
)


def run(*words: str, shell: str = '"$@"', **environ: str) -> subprocess.CompletedProcess[bytes]:
    command = ["sh", "-c", shell, "sh", sys.executable, "-m", "pytest_kvbudget.cli", *words]
    return subprocess.run(command, capture_output=True, check=False, timeout=60, env={**os.environ, **environ})


@COMMANDS
def test_output_that_cannot_be_written_is_said_and_is_no_finding(words: tuple[str, ...]) -> None:
    if not FULL.exists():
        pytest.skip("no device that is always full")
    found = run(*words, shell=f'"$@" > {FULL}')
    assert found.returncode == EXIT_TROUBLE
    assert found.stderr == f"kvbudget {words[0]}: No space left on device\n".encode()


def test_nothing_can_be_written_anywhere() -> None:
    if not FULL.exists():
        pytest.skip("no device that is always full")
    assert run("explain", str(LOG), shell=f'"$@" > {FULL} 2>&1').returncode == EXIT_TROUBLE


@COMMANDS
def test_a_reader_that_went_away_is_no_traceback(words: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "pytest_kvbudget.cli", *words]
    try:
        found = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False, timeout=60)
    finally:
        os.close(writer)
    assert (found.returncode, found.stderr) == (EXIT_TROUBLE, b"")


def test_a_closed_output_leaves_the_answer_in_the_status() -> None:
    found = run("explain", str(LOG), shell='"$@" >&-')
    assert (found.returncode, found.stderr) == (1, b"")


def test_a_terminal_without_the_characters_gets_their_numbers() -> None:
    found = run("explain", str(LOG), PYTHONIOENCODING="ascii")
    assert (found.returncode, found.stderr) == (1, b"")
    assert b"\\u2026" in found.stdout


def test_a_crash_is_not_the_status_of_a_failure_that_was_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> int:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(cli, "_schema", broken)
    assert main(["schema"]) == EXIT_TROUBLE
    assert "RuntimeError: a bug of ours" in capsys.readouterr().err
