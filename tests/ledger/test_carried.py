"""Whatever carries a log (compose, kubelet, journald, a shipper, a paste) changes nothing of what it says."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_kvbudget import explain
from pytest_kvbudget.ledger.model import BootLedger
from tests.ledger.support import DATA, read
from tests.ledger.variant import OOM, READY, WRAPPER, A, E, N, R, W

TRACE = (
    W.replace("INFO", "ERROR") + "Traceback (most recent call last):",
    W.replace("INFO", "ERROR") + '  File "/v/vllm/v1/worker/gpu_worker.py", line 9, in capture_model',
)
LOGS: dict[str, tuple[str, ...]] = {
    "ranks, a traceback": (A, W + "Available KV cache memory: 2.97 GiB", *TRACE, TRACE[1][:34] + OOM, WRAPPER),
    "a wrapped sentence": (
        "(EngineCore_DP0 pid=9) (Worker_TP1 pid=78) [NCC_EOOM002] Maximum peak HBM usage of 43.00GB exceeds HBM",
        "(EngineCore_DP0 pid=9) (Worker_TP1 pid=78) limit of 24.00GB for Trn2. This consists of 1.50GB model constants",
    ),
    "Neuron's runtime and its list": (
        N + "Neuron HBM: 7.06 GiB used, 16.94 GiB free",
        R + "TDRV:log_dev_mem   Failed to allocate 512.000MB (usage: tensors) on ND 0:NC 1, current utilization:",
        "\t* total: 15.855GB",
        "\t* tensors: 15.000GB",
    ),
    "pydantic's lines": (
        "(APIServer pid=1) pydantic_core._pydantic_core.ValidationError: 1 validation error for CacheConfig",
        "(APIServer pid=1) gpu_memory_utilization",
        "(APIServer pid=1)   Input should be less than or equal to 1 [type=less_than_equal, input_value=1.2, "
        "input_type=float]",
    ),
    "serving": (A, E.replace("ERROR", "INFO") + "GPU KV cache size: 76,640 tokens", READY),
}
CARRIERS: dict[str, Callable[[str], str]] = {
    "compose": lambda line: "vllm-openai-1  | " + line,
    "compose, coloured": lambda line: "\x1b[36mvllm-openai-1  |\x1b[0m " + line,
    "kubelet": lambda line: "2026-01-05T10:00:01.123456789Z stdout F " + line,
    "docker logs -t": lambda line: "2026-01-05T10:00:01.123456789Z " + line,
    "journald": lambda line: "Jan 25 10:00:01 host1 vllm[4242]: " + line,
    "journald, podman": lambda line: "Jan 25 10:00:01 host1.local podman[4242]: " + line,
    "journald, short-iso": lambda line: "2026-01-25T10:00:01+0000 host1 vllm[4242]: " + line,
    "journald, JSON": lambda line: json.dumps({"_PID": "4242", "MESSAGE": line, "SYSLOG_IDENTIFIER": "vllm"}),
    "docker, JSON": lambda line: json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-01-05T10:00:01Z"}),
    "kubectl logs --prefix": lambda line: "[pod/vllm-0/vllm] " + line,
    "quoted in a thread": lambda line: "> " + line,
    "indented": lambda line: "    " + line,
    "CR LF": lambda line: line + "\r",
    "coloured": lambda line: f"\x1b[32m{line}\x1b[0m",
}


def told(ledger: BootLedger) -> tuple[object, ...]:
    """What the ledger says, without where."""
    facts = {name: value.value for name, value in ledger.facts.items()}
    ranks = {name: {rank: value.value for rank, value in by.items()} for name, by in ledger.ranks.items()}
    rank = None if ledger.cause is None else ledger.cause.rank
    return ledger.outcome, ledger.phase, ledger.failure_class, rank, facts, ranks


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("log", LOGS)
def test_what_carries_a_log_changes_nothing(log: str, carrier: str) -> None:
    lines = LOGS[log]
    assert told(read(*map(CARRIERS[carrier], lines))) == told(read(*lines))


@pytest.mark.parametrize("outer", ["[vllm-0] ", "vllm-0 vllm ", "[2026-01-05 10:00:01] ", "10:00:01.123 node7 out: "])
def test_ranks_are_found_behind_text_of_a_shipper_that_nobody_knows(outer: str) -> None:
    lines = LOGS["ranks, a traceback"][:-1]
    assert told(read(*(outer + line for line in lines))) == told(read(*lines))


@pytest.mark.parametrize("log", sorted((DATA / "boots").glob("*.log")), ids=lambda log: log.stem)
def test_whole_boots_carried_by_compose_say_the_same(log: Path) -> None:
    lines = log.read_bytes().decode("utf-8", "replace").split("\n")
    assert told(read(*("svc-1  | " + line for line in lines))) == told(read(*lines))


def test_a_cut_json_record_is_still_a_record() -> None:
    said = {"asctime": "2026-09-01 10:00:00", "levelname": "INFO", "name": "vllm", "processName": "EngineCore"}
    boot = json.dumps(said | {"process": 8, "message": "Available KV cache memory: 4.35 GiB"})
    talk = json.dumps(said | {"process": 8, "message": "not torch.OutOfMemoryError: CUDA out of memory. Tried to allo"})
    assert read(boot, talk[:-2]).cause is None


OTHERS = {
    "nginx": (
        "2026/05/01 10:00:00 [emerg] 1#1: bind() to 0.0.0.0:80 failed (98: Address already in use)",
        '127.0.0.1 - - [01/May/2026] "GET /health HTTP/1.1" 200',
    ),
    "the kernel": (
        "[12345.678] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=postgres,pid=4242",
        "[12345.679] Memory cgroup out of memory: Killed process 4242 (postgres) total-vm:100kB",
    ),
    "a test run": ("Traceback (most recent call last):", '  File "/x.py", line 1, in f', "KeyError: 'a'"),
    "another web server": (
        "INFO:     Started server process [1]",
        'INFO:     1.2.3.4:5 - "GET /health HTTP/1.1" 200 OK',
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_of_another_programs_log_nothing_is_claimed(name: str) -> None:
    data = ("\n".join(OTHERS[name]) + "\n").encode()
    out, page = io.StringIO(), io.StringIO()
    assert explain.run([], as_json=True, out=out, stdin=io.BytesIO(data)) == explain.UNSAID
    assert explain.run([], as_json=False, out=page, stdin=io.BytesIO(data)) == explain.UNSAID
    said = json.loads(out.getvalue())
    assert (said["engine"], said["outcome"], said["failure_class"]) == ("unknown", "unknown", None)
    assert (said["sentence"], said["levers"]) == (explain.NOT_OURS, [])
    assert page.getvalue().startswith(explain.NOT_OURS)
