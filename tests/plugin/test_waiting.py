"""A busy device is waited for, and that is said under -q and from workers too, with who holds it and how to end it."""

from __future__ import annotations

import os

import pytest

from pytest_kvbudget.config import load
from pytest_kvbudget.device.leases import acquire
from pytest_kvbudget.engine.backends.mock import MockBackend
from tests.conftest import Project

TEST = """
import pytest

@pytest.mark.boot_gate
@pytest.mark.kv_shape(max_model_len=4096)
def test_boots(kv_engine): ...
"""


@pytest.mark.parametrize("arguments", [(), ("-q",), ("-q", "-n1")], ids=["plain", "quiet", "worker"])
def test_waiting_is_said_and_names_the_holder(project: Project, arguments: tuple[str, ...]) -> None:
    project.configure(limits="lease_seconds = 0.2")
    project.tests(TEST)
    loaded = load(project.path / "kvbudget.toml").pick(None)
    names = MockBackend().lease_names(loaded, ["0"])
    lease = acquire([(("0",), names)], run="other-run", purpose="a deploy", timeout_s=1)
    try:
        lease.tell(run="other-run", purpose="card, left serving; to end it: kill 4711")
        result = project.run(*arguments)
    finally:
        lease.close()
    output = result.stdout.str() + result.stderr.str()
    assert "waiting for devices of target card" in output
    assert f"pid {os.getpid()}" in output
    assert "to end it: kill 4711" in output
    result.assert_outcomes(errors=1)
    assert "no lease on" in output
