"""The line that shows what boots are doing."""

from __future__ import annotations

import pytest

from tests.conftest import Project
from tests.plugin.terminal import pytest_on_a_terminal

SHOW = """
import pytest
from pytest_kvbudget.plugin.progress import ProgressLine
from pytest_kvbudget.progress import Snapshot
from pytest_kvbudget.verdict import Phase

def snapshot(label, phase, elapsed_s):
    return Snapshot(label=label, phase=phase, elapsed_s=elapsed_s, text="what it said last")

def test_shows(pytestconfig, capfd):
    line = ProgressLine(pytestconfig, silent=False)
    one = snapshot("w=1", Phase.PROFILE, 3.0)
    line.show(one)
    line.show(one, snapshot("w=2", Phase.WEIGHTS_LOAD, 12.4))
    line.show(snapshot("w=3", Phase.UNKNOWN, 1.0))
    line.end()
    line.close()
    assert capfd.readouterr().out == ""
"""


@pytest.fixture
def showing(project: Project) -> Project:
    project.tests(SHOW)
    return project


def test_several_boots_share_one_line(showing: Project) -> None:
    with pytest_on_a_terminal(showing.path, "test_it.py") as terminal:
        terminal.expect(r"\rw=1: profile 3 s  what it said last\x1b\[K")
        terminal.expect(r"^\rw=1: profile 3 s  \|  w=2: weights_load 12 s\x1b\[K\rw=3: starting 1 s")
        terminal.expect("1 passed")


def test_without_a_terminal_nothing_is_said_of_what_was_said_a_moment_ago(showing: Project) -> None:
    result = showing.run("test_it.py")
    assert not [line for line in result.outlines if line.startswith("w=1")]
    result.assert_outcomes(passed=1)
