"""The whole product on a real engine. A boot takes about a minute; what is asked and answered is in `CASES`."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import pytest

from pytest_kvbudget.engine.processes import alive, descendants, wait_until_gone
from pytest_kvbudget.records import AttemptRecord
from pytest_kvbudget.verdict import FindingKind, Verdict
from tests.conftest import SAME_BODY
from tests.vllm_cpu.conftest import KV_POOL_BYTES, Project

pytestmark = pytest.mark.vllm_cpu

LADDER = """
import pytest

@pytest.mark.ladder(axis="max_model_len", start=131_072, floor=4_096, quantum=128, pool="fixed")
def test_window(kv_engine, kv_ledger):
    assert kv_ledger.kv_cache.tokens == 51_200
    assert kv_engine.complete("hello", max_tokens=4)
"""

WITHOUT_PLAN = """
from pytest_kvbudget.plugin import quest
quest.plan_prior = lambda *arguments: None
"""

SWEEP = """
import pytest

@pytest.mark.kv_shape(max_model_len=16_384)
@pytest.mark.headroom_sweep(knob="kv_cache_memory_bytes", ceiling="256 MiB", confirm=0)
def test_pool(kv_engine):
    assert kv_engine.complete("hello", max_tokens=4)
"""

BAD_FLAG = """
import pytest

@pytest.mark.kv_shape(extra_args=("--no-such-flag",))
@pytest.mark.ladder(axis="max_model_len", start=131_072, floor=4_096, quantum=128)
def test_window(kv_engine): ...
"""

NO_MODEL = """
import pytest

@pytest.mark.kv_shape(model="/no/such/model")
@pytest.mark.ladder(axis="max_model_len", start=131_072, floor=4_096, quantum=128)
def test_window(kv_engine): ...
"""


def finish(project: Project, *arguments: str, test: str) -> str:
    run = project.pytest("-m", "ladder", *arguments, test=test)
    output, _ = run.communicate()
    return f"exit status {run.returncode}\n{output}"


def test_proves_the_largest_window_of_a_pinned_pool(project: Callable[[], Project]) -> None:
    # 50 MiB are 400 blocks of 128 tokens at 1 KiB a token; one block is reserved, so 399 * 128 = 51,072 fit
    # and 51,200 do not: what the real engine said when asked by hand (b1_kv_too_small: estimate 51072).
    it = project()
    output = finish(it, test=WITHOUT_PLAN + LADDER)
    assert output.startswith("exit status 0"), output
    found = it.finding().finding
    assert (found.kind, found.value, found.failed_at) == (FindingKind.PROVEN, 51_072, 51_200), output
    assert found.boots <= 3, output
    assert "51,072" in output

    for path, record in it.attempts():
        log = (path.parent / record.log).read_text(encoding="utf-8", errors="replace")
        check_numbers(record, log)


def test_a_plan_needs_no_boot_but_the_proofs_and_a_resumed_run_none(project: Callable[[], Project]) -> None:
    it = project()
    output = finish(it, test=LADDER)
    assert output.startswith("exit status 0"), output
    found = it.finding().finding
    assert (found.kind, found.value, found.failed_at) == (FindingKind.PROVEN, 51_072, 51_200), output
    assert found.boots == 2, output

    again = finish(it, "--kvbudget-resume", test=LADDER)
    assert again.startswith("exit status 0"), again
    assert len(it.attempts()) == 2, again
    assert again.count("not booted: taken over from run") == 2, again
    (resumed,) = [record.finding for record in it.findings() if record.finding.reused]
    assert (resumed.kind, resumed.value, resumed.failed_at) == (FindingKind.PROVEN, 51_072, 51_200)
    assert (resumed.boots, resumed.reused) == (0, 2)


def test_a_sweep_proves_the_smallest_pool_that_serves_a_window(project: Callable[[], Project]) -> None:
    # 16,384 tokens are 128 blocks of 128 KiB, and one block is reserved: 16.125 MiB, so 17 MiB in steps of 1 MiB
    it = project()
    run = it.pytest("-m", "headroom_sweep", test=SWEEP)
    output, _ = run.communicate()
    assert run.returncode == 0, output
    (found,) = [record.finding for record in it.sweeps()]
    assert (found.kind, found.value, found.failed_at) == (FindingKind.PROVEN, 17 * 2**20, 16 * 2**20), output
    assert found.bounded_by is not None
    assert found.bounded_by.failure_class == "kv_check_short"
    assert found.boots <= 4, output
    assert "kv_cache_memory_bytes 17.00 MiB passed and 16.00 MiB failed for too little KV cache" in output


def check_numbers(record: AttemptRecord, log: str) -> None:
    """The numbers in the record are the ones in the engine's log."""
    assert record.ledger is not None
    if record.verdict is Verdict.PASS:
        size = re.search(r"KV cache size: ([\d,]+) tokens, Maximum concurrency for ([\d,]+) tokens.*: ([\d.]+)x", log)
        assert size is not None
        assert record.ledger.number("kv_tokens") == int(size[1].replace(",", ""))
        assert record.ledger.number("max_model_len") == int(size[2].replace(",", "")) == record.shape.max_model_len
        assert record.ledger.number("max_concurrency") == float(size[3])
    else:
        short = re.search(r"\(([\d.]+) GiB KV cache is needed.*memory \(([\d.]+) GiB\).*length is (\d+)\.", log)
        assert short is not None
        assert record.ledger.number("kv_needed_bytes") == pytest.approx(float(short[1]) * 2**30, abs=1)
        assert record.ledger.number("available_kv_bytes") == pytest.approx(float(short[2]) * 2**30, abs=1)
        assert record.ledger.number("estimated_max_model_len") == int(short[3]) == 51_072
        assert record.cause is not None
        assert record.cause.failure_class == "kv_check_short"
    assert record.shape.kv_cache_memory_bytes == KV_POOL_BYTES


@pytest.mark.parametrize(("test", "failure_class"), [(BAD_FLAG, "argument_rejected"), (NO_MODEL, "model_not_found")])
def test_another_reason_than_memory_ends_the_ladder_at_its_first_boot(
    project: Callable[[], Project], test: str, failure_class: str
) -> None:
    it = project()
    output = finish(it, test=test)
    assert output.startswith("exit status 1"), output
    found = it.finding().finding
    assert (found.kind, found.boots) == (FindingKind.ERROR, 1), output
    assert failure_class in output


def test_a_killed_run_leaves_no_process_of_the_engine(project: Callable[[], Project]) -> None:
    it = project()
    run = it.pytest("-s", test=LADDER)
    assert run.stdout is not None
    workers: dict[int, int] = {}
    for line in run.stdout:
        # plain progress lines name the phase; from the weights on all processes of the engine are there
        if "weights_load" in line or "kv_check" in line:
            (record_path, _), *_ = it.attempts()
            state = record_path.with_name("keeper.json").read_text()
            keeper = int(re.findall(r'"keeper": \{\s*"pid": (\d+)', state)[0])
            workers = {process.pid: process.start_ticks for process in descendants(keeper)}
            break
    assert len(workers) >= 2, "a real engine is a tree of processes"
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()
    left = wait_until_gone(workers, 2.0)
    assert not left, [(pid, alive(pid, ticks)) for pid, ticks in left.items()]
    (_, record), *_ = it.attempts()
    assert record.verdict is Verdict.UNKNOWN
    assert record.message.startswith("interrupted")


def test_the_body_that_runs_on_simulated_cards_runs_here(project: Callable[[], Project]) -> None:
    it = project()
    run = it.pytest("-rA", test=SAME_BODY)
    output, _ = run.communicate()
    ((_, record),) = it.attempts()
    assert run.returncode == 0, output
    assert record.verdict is Verdict.PASS
    assert record.uses[-1].survival is not None
    assert all(request.survived for request in record.uses[-1].survival.requests)
