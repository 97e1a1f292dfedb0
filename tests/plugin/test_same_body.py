"""One test body, whatever it runs on; the real vLLM runs it in ``tests/vllm_cpu``."""

from __future__ import annotations

import pytest

from pytest_kvbudget.verdict import Verdict
from tests.conftest import SAME_BODY, Project

TRN3 = """
[target.trn3]
backend = "mock"
devices = [0]
[target.trn3.shape]
model = "simulated"
max_num_seqs = 2
reserved_headroom = "4 GiB"
lnc = 2
[target.trn3.mock]
dialect = "neuron"
platform = "trn3"
weights = "8 GiB"
non_torch = "512 MiB"
kv_bytes_per_token = 36_864
sysfs = "sysfs"
"""
R9700 = """
[target.r9700]
backend = "mock"
devices = [0]
[target.r9700.shape]
model = "simulated"
gpu_memory_utilization = 0.9
[target.r9700.mock]
dialect = "rdna4"
kv_bytes_per_token = 7_701
sysfs = "sysfs"
"""


@pytest.mark.parametrize("config", [TRN3, R9700], ids=["trn3", "r9700"])
def test_runs_unchanged_on_every_simulated_target(project: Project, config: str) -> None:
    (project.path / "kvbudget.toml").write_text(config)
    project.tests(SAME_BODY)
    project.run().assert_outcomes(passed=1)
    (record,) = project.attempts()
    assert record.verdict is Verdict.PASS
    assert record.uses[-1].survival is not None
    assert [request.ended for request in record.uses[-1].survival.requests] == ["held"]
    assert record.trace is not None
    assert record.trace.leaks == ()
