from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from pytest_kvbudget.archive import iter_records
from pytest_kvbudget.records import AttemptRecord, FindingRecord, SweepRecord

ROOT: Final = Path(__file__).parents[2]
KV_POOL_BYTES: Final = 52_428_800  # 50M to vLLM, which reads it as 50 * 2^20

CONFIG: Final = """
[target.vllm-cpu]
backend = "vllm"
command = {command}
[target.vllm-cpu.env]
{env}
[target.vllm-cpu.shape]
model = {model!r}
max_model_len = 4096
kv_cache_memory_bytes = "50 MiB"
enforce_eager = true
extra_args = ["--load-format", "dummy"]
[target.vllm-cpu.limits]
boot_seconds = 600
"""


@pytest.fixture(scope="session")
def recipe() -> dict[str, Any]:
    """Where the real engine is, as ``ci/vllm_cpu.py`` says."""
    command = [sys.executable, str(ROOT / "ci" / "vllm_cpu.py"), "path"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode == 75:
        pytest.skip(f"no real vLLM on this host: {done.stderr.strip()[-300:]}")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class Project:
    """A folder with tests and a configuration of the real engine."""

    def __init__(self, folder: Path, recipe: dict[str, Any]) -> None:
        self.folder = folder
        self._recipe = recipe
        self.wrap()

    def wrap(self, *before: str) -> None:
        """Configure the engine, its command run by ``before``."""
        recipe = self._recipe
        env = "\n".join(f"{name} = {json.dumps(value)}" for name, value in recipe["env"].items())
        command = json.dumps([*before, recipe["vllm"], "serve"])
        text = CONFIG.format(command=command, model=recipe["model"], env=env)
        (self.folder / "kvbudget.toml").write_text(text)

    def pytest(self, *arguments: str, test: str) -> subprocess.Popen[str]:
        """Start pytest on a test file of this text."""
        (self.folder / "test_it.py").write_text(test)
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--kvbudget-archive", "runs", *arguments],
            cwd=self.folder,
            env={**os.environ, "KVBUDGET_LEASE_DIR": str(self.folder / "leases")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def attempts(self) -> list[tuple[Path, AttemptRecord]]:
        """Attempts in the order in which they started."""
        found = [
            (path, record) for path, record in iter_records(self.folder / "runs") if isinstance(record, AttemptRecord)
        ]
        return sorted(found, key=lambda item: item[1].started)

    def finding(self) -> FindingRecord:
        """The only finding of a ladder."""
        (found,) = self.findings()
        return found

    def findings(self) -> list[FindingRecord]:
        """What ladders found."""
        return [record for _, record in iter_records(self.folder / "runs") if isinstance(record, FindingRecord)]

    def sweeps(self) -> list[SweepRecord]:
        """What sweeps found."""
        return [record for _, record in iter_records(self.folder / "runs") if isinstance(record, SweepRecord)]


@pytest.fixture
def project(tmp_path: Path, recipe: dict[str, Any]) -> Callable[[], Project]:
    return lambda: Project(tmp_path, recipe)
