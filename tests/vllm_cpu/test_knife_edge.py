"""A true "boots and dies" without a device: the CPU engine in a memory control group that is a little too small.

The figures are those of a boot that was tried by hand: KV pinned at 128 MiB, a window of 65,536, steps of 32,768
tokens; 1.4 GiB used once healthy; 120 MiB more are enough for small requests, a prompt of 32,000 tokens is killed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from pytest_kvbudget.verdict import Phase, Verdict
from tests.vllm_cpu.conftest import Project

pytestmark = pytest.mark.vllm_cpu

TEST = """
import pathlib
import pytest

GROUP = pathlib.Path({group!r})
ROOM = {room}

@pytest.mark.kv_shape(
    max_model_len=65_536, max_num_batched_tokens=32_768, kv_cache_memory_bytes="128 MiB", max_num_seqs=4
)
@pytest.mark.knife_edge(prompt_tokens=32_000, max_tokens=16, hold=8, prefill=False, timeout=600)
def test_survives(kv_engine):
    assert kv_engine.complete("small", max_tokens=8)
    (GROUP / "memory.force_empty").write_text("0")
    used = int((GROUP / "memory.usage_in_bytes").read_text())
    (GROUP / "memory.limit_in_bytes").write_text(str(used + ROOM))
    assert kv_engine.complete("small", max_tokens=8), "a small request is answered with the limit, too"
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory control group of its own."""
    parent = Path("/sys/fs/cgroup/memory")
    if not (parent / "memory.limit_in_bytes").exists() or not os.access(parent, os.W_OK):
        pytest.skip("no writable memory control groups (v1) on this host: the engine cannot be put into one")
    folder = parent / f"kvbudget-{uuid4().hex[:8]}"
    folder.mkdir()
    yield folder
    folder.rmdir()


def run(project: Project, group: Path, room: int) -> str:
    project.wrap("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
    process = project.pytest("-rA", test=TEST.format(group=str(group), room=room))
    output, _ = process.communicate()
    return output


def test_an_engine_that_boots_is_killed_by_its_largest_request(project: Callable[[], Project], group: Path) -> None:
    it = project()
    output = run(it, group, 120 * 2**20)
    ((_, record),) = it.attempts()
    assert record.timings.boot_s is not None, output
    assert record.verdict is Verdict.FAIL, output
    assert record.cause is not None
    assert record.cause.failure_class == "host_oom_killed", output
    assert record.cause.phase is Phase.REQUEST, output
    assert any("Killed process" in evidence.text for evidence in record.cause.evidence), output
    assert record.uses[-1].survival is not None
    assert [request.ended for request in record.uses[-1].survival.requests] == ["died"]


def test_with_a_looser_limit_it_survives(project: Callable[[], Project], group: Path) -> None:
    it = project()
    output = run(it, group, 3 * 2**30)
    ((_, record),) = it.attempts()
    assert record.verdict is Verdict.PASS, output
    assert record.uses[-1].survival is not None
    assert all(request.survived for request in record.uses[-1].survival.requests)
    margin = record.uses[-1].survival.least_host_free_bytes
    assert margin is not None
    assert 0 < margin < 3 * 2**30, "some of the room was taken, and what is left is the margin"
