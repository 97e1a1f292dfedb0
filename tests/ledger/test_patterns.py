"""Lines that a user adds to the grammar, from the configuration."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from pytest_kvbudget import cli, explain
from pytest_kvbudget.config import ConfigError, load, load_patterns
from tests.ledger.support import DATA, GIB

TARGET = '[target.trn3]\nbackend = "mock"\n'
BUDGET = """
[[pattern]]
line = "Budget of this core: HBM {total_bytes:gib}, model {weights_bytes:gib}, reserve {reserved_headroom_bytes:gib}"
phase = "kv_check"
"""
REFUSED = """
[[pattern]]
line = "Budget {effective_kv_bytes:gib} does not reach {min_kv_bytes:gib}"
phase = "kv_check"
failure_class = "min_kv_budget"
"""
LOG = (
    "(Worker_TP0 pid=7) INFO Budget of  this core: HBM 36.00 GiB, model 8.00 GiB, reserve 28.00 GiB\n"
    "(Worker_TP0 pid=7) ERROR RuntimeError: Budget 0.00 GiB does not reach 1.00 GiB\n"
)


def written(folder: Path, text: str) -> Path:
    path = folder / "kvbudget.toml"
    path.write_text(text)
    return path


def test_a_line_of_a_configuration_is_read(tmp_path: Path) -> None:
    out = io.StringIO()
    config = written(tmp_path, BUDGET + REFUSED)
    assert explain.run([], as_json=True, config=config, out=out, stdin=io.BytesIO(LOG.encode())) == 1
    said = json.loads(out.getvalue())
    assert said["facts"] == {
        "total_bytes": 36 * GIB,
        "weights_bytes": 8 * GIB,
        "reserved_headroom_bytes": 28 * GIB,
        "effective_kv_bytes": 0,
        "min_kv_bytes": GIB,
    }
    assert (said["phase"], said["failure_class"]) == ("kv_check", "min_kv_budget")
    assert said["evidence"]["facts"]["total_bytes"]["line"] == 1


def test_boots_of_a_target_read_it_too(tmp_path: Path) -> None:
    loaded = load(written(tmp_path, TARGET + BUDGET)).pick("trn3")
    assert [row.pattern for row in loaded.patterns] == [
        row.pattern for row in load_patterns(tmp_path / "kvbudget.toml")
    ]
    assert load(written(tmp_path, TARGET)).pick("trn3").patterns == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[pattern]]\nlines = 'x'\n", "lines: unknown key; did you mean 'line'"),
        ("[[pattern]]\nphase = 'kv_check'\n", "line: is missing; expected text"),
        ("[[pattern]]\nline = 'pool {kv:gigs}'\n", "has no such kind; known: gib"),
        ("[[pattern]]\nline = '{kv:gib}'\n", "no plain text"),
        ("[[pattern]]\nline = 'pool'\nphase = 'checking'\n", "expected one of argument, worker_init"),
        ("[[pattern]]\nline = 'pool'\nfailure_class = 'kv_short'\n", "did you mean 'kv_check_short'"),
        ("[pattern]\nline = 'pool'\n", "expected [[pattern]] tables"),
        ("[[patterns]]\nline = 'pool'\n", "unknown key patterns"),
    ],
)
def test_what_is_wrong_with_a_pattern_is_said(tmp_path: Path, text: str, message: str) -> None:
    config = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_patterns(config)
    assert message in str(caught.value)
    assert str(config) in str(caught.value)
    out = io.StringIO()
    assert explain.run([], as_json=False, config=config, out=out, stdin=io.BytesIO(b"")) == 2
    assert message in out.getvalue()


def test_the_command_line_follows_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = (DATA / "boots" / "b1_kv_too_small.log").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert cli.main(["explain", "--follow", "-"]) == 1
    said = capsys.readouterr().out
    assert said.index("weights_load") < said.index("FAILED in kv_check")


@pytest.mark.parametrize("options", [["--json", "x"], ["--boot", "1", "x"], ["x", "y"]])
def test_following_takes_one_log_and_no_choice(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--follow", *options]) == 2
    assert "--follow takes one log" in capsys.readouterr().err


def test_a_wrapper_alone_does_not_end_the_following(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    whole = (DATA / "boots" / "b1_kv_too_small.log").read_bytes()
    half = whole.index(b"ValueError: To serve")
    log.write_bytes(whole[:half])
    out, pauses = io.StringIO(), 0

    def grow() -> bool:
        nonlocal pauses
        pauses += 1
        if pauses == 3:
            log.write_bytes(whole)
        return True

    assert explain.follow(str(log), out=out, wait=grow) == 1
    assert pauses == 3
    assert "FAILED in kv_check" in out.getvalue()
    log.write_bytes(whole[:half])
    assert explain.follow(str(log), out=out, wait=lambda: True) == 1
    assert "FAILED in kv_check" in out.getvalue()
