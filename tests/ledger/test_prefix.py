"""What log shippers, terminals and people put around a line of an engine, as public logs show it."""

from __future__ import annotations

import pytest

from pytest_kvbudget.ledger.prefix import LONGEST_KNOWN, Text, clean
from tests.ledger.support import GIB, read

FRAME = '  File "/x/gpu_worker.py", line 538, in initialize_kv_cache'

LINES: dict[str, Text] = {
    "vllm_a.1.x7k2@node1    | ValueError: x": Text("ValueError: x", service="vllm_a.1.x7k2@node1"),
    "[pod/vllm-7d9f-x2x/engine] ValueError: x": Text("ValueError: x", service="vllm-7d9f-x2x/engine"),
    "Oct 03 10:00:00 host1 vllm-a[12]: ValueError: x": Text("ValueError: x", service="host1 vllm-a"),
    "2025-10-03T10:00:00+0200 host1 vllm-a[12]: ValueError: x": Text("ValueError: x", service="host1 vllm-a"),
    'a-1  | {"log": "ValueError: x\\n", "stream": "stderr"}': Text("ValueError: x", service="a-1"),
    "2026-05-08 11:50:14.753 [Info] (Process) (EngineCore pid=3043) ValueError: x": Text(
        "ValueError: x", "EngineCore", 3043
    ),
    f"2026-05-08 11:50:14.753 [Info] (Process) (EngineCore pid=3043) {FRAME}": Text(FRAME, "EngineCore", 3043),
    "  | [2025-03-10T15:07:20Z] ERROR 03-10 08:07:20 [core.py:302] ValueError: x": Text(
        "ValueError: x", record=True, header="ERROR 03-10 08:07:20 [core.py:302] "
    ),
    "2025-03-10T15:07:20.1234567Z ValueError: x": Text("ValueError: x"),
    "2024-04-27 10:13:05 | ERROR | stderr | ValueError: x": Text("ValueError: x"),
    "vLLM STDERR: ValueError: x": Text("ValueError: x"),
    "INFO 2025-11-19T20:16:36.096675816Z [resource.labels.containerName: vllm] ValueError: x": Text("ValueError: x"),
    f"2024-11-18T16:43:45,497 [INFO ] W-9000-model_1.0-stdout MODEL_LOG - {FRAME}": Text(FRAME),
    "[INFO ] PyProcess - W-2-m-stdout: #033[1;36m(VllmWorkerProcess pid=240)#033[0;0m INFO 02-14 08:23:15 a.py:2] x": (
        Text("x", "VllmWorkerProcess", 240, record=True, header="INFO 02-14 08:23:15 a.py:2] ")
    ),
    "0s0n9esxgd0u45[error]worker exited with exit code 136": Text("worker exited with exit code 136"),
    "2025-06-12 20:49:44 ValueError: x": Text("ValueError: x"),
    f"(APIServer pid=2640) ERROR 11-03 23:14 [serving_chat.py:1145] {FRAME}": Text(
        FRAME, "APIServer", 2640, record=True, header="ERROR 11-03 23:14 [serving_chat.py:1145] "
    ),
    "\u258e ValueError: x": Text("ValueError: x"),
    "# INFO 05-21 18:17:01 [worker.py:267] x": Text("x", record=True, header="INFO 05-21 18:17:01 [worker.py:267] "),
    '<font color="#2AA1B3"><b>(Worker_TP0 pid=12)</b></font> INFO 01-01 10:00:00 [a.py:1] x': Text(
        "x", "Worker_TP0", 12, record=True, header="INFO 01-01 10:00:00 [a.py:1] "
    ),
    "2025-11-30 10:00:00,123 - INFO - vllm.a:12 - x": Text(
        "x", record=True, header="2025-11-30 10:00:00,123 - INFO - vllm.a:12 - "
    ),
    "2025-11-30 10:00:00.000001:  77  ERROR ||CC||: x": Text("2025-11-30 10:00:00.000001:  77  ERROR ||CC||: x"),
}


@pytest.mark.parametrize("line", LINES)
def test_what_is_around_a_line_is_taken_off(line: str) -> None:
    assert list(clean(line.encode())) == [LINES[line]]
    assert list(clean(line.encode() + b" " * LONGEST_KNOWN)) == [LINES[line]], "layouts that are not remembered too"


def test_a_line_that_goes_on_behind_a_backslash() -> None:
    ledger = read(
        "Free memory on device (14.51/15.77 GiB) on \\",
        "startup is less than desired GPU memory utilization (0.95, 14.98 GiB).",
    )
    assert ledger.get("free_bytes") == round(14.51 * GIB)
    assert ledger.failure_class == "startup_free_below_request"


def test_requests_that_wait_in_the_words_of_old_releases() -> None:
    """``Pending`` is what V0 called waiting; the first usage is the accelerator's."""
    statistics = (
        "INFO 09-18 16:{}:03 metrics.py:351] Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 0.4 "
        "tokens/s, Running: {} reqs, Swapped: 0 reqs, Pending: {} reqs, GPU KV cache usage: {}%, CPU KV cache usage: "
        "0.0%."
    )
    ledger = read(
        statistics.format(10, 2, 0, 0.1), statistics.format(11, 2, 0, 7.5), *[statistics.format(12, 0, 22, 0.0)] * 2
    )
    assert (ledger.outcome, ledger.phase, ledger.failure_class) == ("booted", "request", "request_starved")
    assert ledger.get("kv_usage_pct") == 7.5
