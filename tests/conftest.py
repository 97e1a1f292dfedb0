"""A project of its own for each test that runs pytest: a simulated card, leases and archive nobody else sees."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import settings

from pytest_kvbudget.archive import read_attempt, read_finding
from pytest_kvbudget.records import AttemptRecord, FindingRecord, SweepRecord, as_used

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell's background job ignores Ctrl-C and hands that on; runs that are interrupted here must not
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("fixed", derandomize=True, deadline=None)
"""What a change must pass: the same examples on every machine. Without a profile every run tries new ones."""

POOL_TOKENS = 51_200
"""Tokens that the simulated card's pinned pool holds: 50 MiB at 1024 bytes per token."""

SAME_BODY = """
import pytest

@pytest.mark.knife_edge(prompt_tokens=64, max_tokens=64, hold=32, prefill=False)
@pytest.mark.kv_shape(max_model_len=4_096)
def test_deploy(kv_engine, kv_ledger):
    assert kv_ledger.kv_cache.tokens >= 4_096
    assert kv_engine.client.models()[0]["max_model_len"] == 4_096
    assert kv_engine.complete("Where did every GiB go?", max_tokens=8)["usage"]["completion_tokens"] == 8
"""
"""A test that must run unchanged on every target, simulated or real."""

CONFIG = """\
[target.card]
backend = "mock"
devices = [{devices}]

[target.card.shape]
model = "simulated"
kv_cache_memory_bytes = "50 MiB"
{shape}

[target.card.mock]
kv_bytes_per_token = 1024
sysfs = "sysfs"
{mock}

[target.card.limits]
release_seconds = 10
{limits}
"""


class Project:
    """A folder with a ``kvbudget.toml`` and tests, and what came of running pytest there."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.path = pytester.path

    def configure(self, *, devices: str = "0", shape: str = "", mock: str = "", limits: str = "") -> Path:
        """Write the configuration: one simulated card whose pool holds `POOL_TOKENS`."""
        text = CONFIG.format(devices=devices, shape=shape, mock=mock, limits=limits)
        path = self.path / "kvbudget.toml"
        path.write_text(text, encoding="utf-8")
        return path

    def tests(self, source: str, name: str = "test_it.py") -> Path:
        """Write a test module."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
        return path

    def run(self, *arguments: str, timeout: float = 60) -> pytest.RunResult:
        """Run pytest in a process of its own."""
        return self.pytester.runpytest_subprocess(*arguments, timeout=timeout)

    def attempts(self) -> list[AttemptRecord]:
        """Every boot's record, in the order of their starts."""
        found = [read_attempt(path) for path in self.path.rglob("attempt.json")]
        return sorted(found, key=lambda record: record.started)

    def used(self) -> list[AttemptRecord]:
        """As `attempts`, each as the last test that used it saw it: with the verdict of what that test asked."""
        return [as_used(record, record.uses[-1]) if record.uses else record for record in self.attempts()]

    def findings(self) -> list[FindingRecord]:
        """Every ladder's finding."""
        found = [read_finding(path) for path in sorted(self.path.rglob("finding.json"))]
        return [record for record in found if isinstance(record, FindingRecord)]

    def sweeps(self) -> list[SweepRecord]:
        """Every sweep's finding."""
        found = [read_finding(path) for path in sorted(self.path.rglob("finding.json"))]
        return [record for record in found if isinstance(record, SweepRecord)]

    def junit(self) -> dict[str, ET.Element]:
        """The cases of ``--junitxml=junit.xml`` by name."""
        cases = ET.parse(self.path / "junit.xml").getroot().iter("testcase")
        return {case.get("name", ""): case for case in cases}


def properties(case: ET.Element) -> dict[str, str]:
    """The properties of a JUnit case."""
    return {entry.get("name", ""): entry.get("value", "") for entry in case.iter("property")}


def rows(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Rungs in a terminal's lines: the value as text with its ``#N``, and the verdict."""
    found = []
    for line in lines:
        row = re.match(r"\S+=(\S+)\] (PASS|MARGINAL|FAIL|UNKNOWN|ERROR) ", line)
        if row is not None:
            found.append((row[1], row[2]))
    return found


@pytest.fixture
def project(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Project:
    """A project with a configuration, in the current folder; its leases are seen by nobody else."""
    leases = pytester.path / "leases"
    leases.mkdir(mode=0o700)
    monkeypatch.setenv("KVBUDGET_LEASE_DIR", str(leases))
    monkeypatch.setenv("COLUMNS", "300")
    # Every run here is a fresh process: with byte code of earlier ones it starts several times faster.
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path_factory.getbasetemp().parent / "bytecode"))
    for name in ("PYTEST_ADDOPTS", "CI", "BUILD_NUMBER", "PYTHONDONTWRITEBYTECODE"):
        monkeypatch.delenv(name, raising=False)
    project = Project(pytester)
    project.configure()
    return project
