"""The examples: whole on the simulated device, as a dry run for the real one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_kvbudget.archive import read_finding
from pytest_kvbudget.records import FindingRecord
from pytest_kvbudget.verdict import FindingKind

EXAMPLES = Path(__file__).parent.parent / "conftest_examples"


class Example:
    """A copy of an example in a folder of its own, with leases that nobody else sees."""

    def __init__(self, name: str, folder: Path) -> None:
        self.path = folder / name
        shutil.copytree(EXAMPLES / name, self.path, ignore=shutil.ignore_patterns("__pycache__", "kvbudget-archive"))
        leases = folder / "leases"
        leases.mkdir(mode=0o700)
        dropped = ("PYTEST_ADDOPTS", "CI", "BUILD_NUMBER")
        self._environment = {name: value for name, value in os.environ.items() if name not in dropped}
        self._environment |= {"KVBUDGET_LEASE_DIR": str(leases), "COLUMNS": "300"}

    def run(self, *arguments: str) -> tuple[int, str]:
        """Exit status and output of pytest in the example's folder."""
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments],
            cwd=self.path,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "window", "failed_at"),
    [("r9700", 200_704, 204_800), ("trn3", 32_768, 49_152), ("simulated_r9700", 241_664, 245_760)],
)
def test_an_example_finds_its_window_on_the_simulated_device(
    name: str, window: int, failed_at: int, tmp_path: Path
) -> None:
    example = Example(name, tmp_path)
    status, output = example.run()
    assert status == 0, output
    assert "SIMULATED" in output
    records = map(read_finding, example.path.rglob("finding.json"))
    (finding,) = (record.finding for record in records if isinstance(record, FindingRecord))
    assert (finding.kind, finding.value) == (FindingKind.PROVEN, window)
    assert re.search(rf"max_model_len={failed_at}\] FAIL ", output)


def test_the_real_cards_are_shown_and_nothing_is_started(tmp_path: Path) -> None:
    example = Example("r9700", tmp_path)
    status, output = example.run("--kvbudget-target", "r9700", "--kvbudget-dry-run", "--kvbudget-require-hardware")
    assert status == 0, output
    assert (
        "vllm serve /models/qwen-flash-fp8 --max-model-len 200704 --max-num-seqs 3 --kv-cache-dtype fp8 "
        "--tensor-parallel-size 2 --gpu-memory-utilization 0.982 --kv-cache-memory-bytes 3166500000 "
        "--enable-expert-offload --expert-precise-memory"
    ) in output
    assert "env: HIP_VISIBLE_DEVICES=0,1" in output
    assert "env: VLLM_CUDAGRAPH_MEM_PER_GRAPH_MB=12" in output
    assert not list(example.path.rglob("attempt.json"))


def test_the_real_cores_are_shown_and_nothing_is_started(tmp_path: Path) -> None:
    example = Example("trn3", tmp_path)
    status, output = example.run("--kvbudget-target", "trn3", "--kvbudget-dry-run", "--kvbudget-require-hardware")
    assert status == 0, output
    assert "env: NEURON_VISIBLE_DEVICES=0,1,2,3,4,5,6,7" in output
    assert "env: VLLM_NEURON_RESERVED_HEADROOM_GIB=4" in output
    assert "env: NEURON_LOGICAL_NC_CONFIG=2" in output
    assert "vllm serve openai/gpt-oss-120b" in output
    assert not list(example.path.rglob("attempt.json"))


@pytest.mark.parametrize(("name", "target"), [("r9700", "r9700-simulated"), ("trn3", "trn3-simulated")])
def test_a_simulated_target_never_passes_for_hardware(name: str, target: str, tmp_path: Path) -> None:
    status, output = Example(name, tmp_path).run("--kvbudget-require-hardware")
    assert status == 4
    assert f"target {target} is simulated" in output
