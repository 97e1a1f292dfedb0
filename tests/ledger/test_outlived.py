"""Whether an engine went on after a failure: by its own later milestones, by lines of the whole engine, by serving."""

from __future__ import annotations

import pytest

from pytest_kvbudget.ledger.classes import verdict_of
from pytest_kvbudget.verdict import Phase, Verdict
from tests.ledger.support import GIB, read
from tests.ledger.variant import EI, OOM, READY, W1, WRAPPER, A, E, W

POST = 'INFO:     10.0.0.9:5 - "POST /v1/completions HTTP/1.1" 200 OK'
HEALTH = 'INFO:     10.0.0.9:5 - "GET /health HTTP/1.1" 200 OK'
SHORT = (
    "ValueError: To serve at least one request with the model's max seq len (262144), (24.0 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (3.18 GiB). Based on the available memory, the estimated "
    "maximum model length is 34736. Try increasing `gpu_memory_utilization`"
)
V0_SHORT = (
    "ERROR 11-25 10:02:16 engine.py:366] ValueError: The model's max seq len (29000) is larger than the maximum number "
    "of tokens that can be stored in KV cache (23648). Try increasing"
)
TRACE = "Traceback (most recent call last):"
BAR = "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  33%|###   | 1/3"


def frame(function: str, prefix: str = "") -> tuple[str, str]:
    return prefix + TRACE, f'{prefix}  File "/v/vllm/v1/worker/gpu_worker.py", line 9, in {function}'


AFTER_DEATH = {
    "a late record": ("INFO 11-25 10:02:17 model_runner.py:1400] Capturing cudagraphs for decoding. This may lead",),
    "the server's end": (
        "INFO 11-25 10:02:17 launcher.py:57] Shutting down FastAPI HTTP server.",
        "INFO:     Waiting for application shutdown.",
        "INFO:     Application shutdown complete.",
        "INFO:     Finished server process [1]",
    ),
    "the rest of a traceback": (*frame("main"), "ValueError: The model's max seq len (29000) is larger"),
    "a launcher": (
        "systemd[1]: vllm.service: Main process exited, code=exited, status=1/FAILURE",
        "systemd[1]: vllm.service: Scheduled restart job, restart counter is at 3.",
        "INFO 11-25 10:02:17 api_server.py:1] Starting vLLM API server on http://0.0.0.0:8000",
    ),
    "another service that starts": ("INFO:     Application startup complete.",),
    "another rank": ("(VllmWorkerProcess pid=9) INFO 11-25 10:02:17 m.py:1] Graph capturing finished in 3 secs.",),
}


@pytest.mark.parametrize("after", AFTER_DEATH)
def test_lines_after_a_check_that_raised_bring_nothing_back(after: str) -> None:
    ledger = read(
        "INFO 11-25 10:02:11 model_runner.py:1077] Loading model weights took 14.9888 GB",
        "INFO 11-25 10:02:16 gpu_executor.py:113] # GPU blocks: 1478, # CPU blocks: 2048",
        V0_SHORT,
        *AFTER_DEATH[after],
    )
    assert (ledger.outcome, ledger.phase, ledger.failure_class) == ("failed", Phase.KV_CHECK, "kv_check_short")
    assert ledger.cause is not None
    assert ledger.cause.evidence[0].line == 3


def test_another_boot_without_a_banner_does() -> None:
    ledger = read(
        "INFO 11-25 10:02:11 model_runner.py:1077] Loading model weights took 14.9888 GB",
        V0_SHORT,
        "INFO 11-25 10:04:11 model_runner.py:1077] Loading model weights took 14.9888 GB",
        "INFO 11-25 10:04:16 gpu_executor.py:113] # GPU blocks: 2478, # CPU blocks: 2048",
        READY,
    )
    assert (ledger.outcome, ledger.failure_class) == ("booted", None)


@pytest.mark.parametrize("end", [(), (E + "EngineCore failed to start.", WRAPPER)])
def test_a_bare_progress_bar_may_be_another_ranks(end: tuple[str, ...]) -> None:
    """From 0.31 tracebacks and bars name no process: one rank is dead while the bar of another moves."""
    ledger = read(
        A,
        W + "Available KV cache memory: 2.97 GiB",
        *frame("initialize_from_config"),
        OOM,
        BAR,
        *end,
    )
    assert (ledger.outcome, ledger.phase, ledger.failure_class) == ("failed", Phase.KV_ALLOC, "kv_alloc_oom")


def test_a_line_of_the_whole_engine_shows_that_every_rank_went_on() -> None:
    tried = (A, W1 + "Starting to load model m...", W1.replace("INFO", "ERROR") + "autotuner: " + OOM)
    assert read(*tried).outcome == "failed"
    assert read(*tried, W + "Available KV cache memory: 2.97 GiB").outcome == "failed"
    assert read(*tried, EI + "GPU KV cache size: 76,640 tokens").outcome == "recovered"


def test_not_of_another_replica() -> None:
    dead = "(Worker_DP0_TP0 pid=7) ERROR 09-30 10:00:00 [m.py:1] "
    other = "(EngineCore_DP1 pid=6) INFO 09-30 10:00:01 [core.py:1] "
    ledger = read(
        A,
        "(Worker_DP0_TP0 pid=7) INFO 09-30 10:00:00 [m.py:1] Available KV cache memory: 2.97 GiB",
        *frame("initialize_from_config", dead),
        dead + OOM,
        other + "GPU KV cache size: 76,640 tokens",
        other + "init engine (profile, create kv cache, warmup model) took 20 s",
    )
    assert (ledger.outcome, ledger.failure_class) == ("failed", "kv_alloc_oom")
    assert ledger.cause is not None
    assert ledger.cause.rank == "Worker_DP0_TP0"


def test_a_segfault_is_not_outlived_by_other_ranks() -> None:
    ledger = read(
        A,
        W + "Starting to load model m...",
        "!!!!!!! Segfault encountered !!!!!!!",
        W1 + "Model loading took 20.1 GiB memory and 5.1 seconds",
    )
    assert (ledger.outcome, ledger.failure_class) == ("failed", "engine_killed")
    assert verdict_of("engine_killed") is Verdict.UNKNOWN


def test_an_exception_that_somebody_caught_is_no_failure_while_the_boot_goes_on() -> None:
    caught = (A, W + "Starting to load model m...", TRACE, '  File "/x.py", line 9, in f', "ValueError: optional")
    went_on = (*caught, W + "Model loading took 20.1 GiB memory and 5.1 seconds")
    assert read(*caught).failure_class == "engine_exception"
    assert (read(*went_on).outcome, read(*went_on).cause) == ("unknown", None)
    ended = read(*went_on, E + "EngineCore failed to start.")
    assert (ended.outcome, ended.failure_class) == ("failed", "engine_exception")


def test_an_answer_while_the_engine_dies_does_not_hide_why() -> None:
    ledger = read(
        A,
        READY,
        *frame("execute_model", W.replace("INFO", "ERROR")),
        W.replace("INFO", "ERROR") + OOM,
        POST,
        HEALTH,
        HEALTH,
        E + "EngineCore encountered a fatal error.",
        'INFO:     10.0.0.9:5 - "GET /health HTTP/1.1" 503 Service Unavailable',
    )
    assert (ledger.outcome, ledger.phase, ledger.failure_class) == ("died_after_boot", Phase.REQUEST, "request_oom")


@pytest.mark.parametrize(
    ("lines", "outcome"),
    [((), "died_after_boot"), ((HEALTH,), "died_after_boot"), ((HEALTH, HEALTH), "recovered"), ((POST,), "recovered")],
)
def test_an_engine_that_answers_on_has_outlived_a_requests_failure(lines: tuple[str, ...], outcome: str) -> None:
    failed = "(APIServer pid=1) ERROR 09-30 10:00:00 [serving.py:1] " + OOM
    assert read(A, READY, failed, *lines).outcome == outcome


def test_ranks_in_files_of_their_own_may_come_before_the_server() -> None:
    """What a rank says of a request is later than the start of the server, wherever its file stands."""
    ledger = read(
        W + "Available KV cache memory: 2.97 GiB",
        *frame("execute_model", W.replace("INFO", "ERROR")),
        W.replace("INFO", "ERROR") + OOM,
        "(APIServer pid=1) INFO 09-30 10:00:00 [a.py:1] Resolved architecture: X",
        READY,
    )
    assert (ledger.outcome, ledger.phase, ledger.failure_class) == ("died_after_boot", Phase.REQUEST, "request_oom")


def test_a_rank_is_as_far_as_the_engine_says_all_are() -> None:
    """The capture's bar is rank 0's alone."""
    ledger = read(
        A,
        W1 + "Available KV cache memory: 2.97 GiB",
        "(Worker_TP0 pid=7) Capturing CUDA graphs (decode, FULL):   0%|      | 0/3",
        W1.replace("INFO", "ERROR") + OOM,
    )
    assert (ledger.phase, ledger.failure_class) == (Phase.GRAPH_CAPTURE, "graph_capture_oom")


def test_who_reports_a_death_is_not_who_died() -> None:
    ledger = read(
        A,
        "(EngineCore_DP0 pid=8) INFO 09-30 10:00:00 [m.py:1] Starting to load model m...",
        "(APIServer pid=1) ERROR 09-30 10:00:09 [core_client.py:562] Engine core proc EngineCore_DP0 died unexpectedly,"
        " shutting down client.",
    )
    assert (ledger.phase, ledger.failure_class) == (Phase.WEIGHTS_LOAD, "engine_killed")


@pytest.mark.parametrize(
    ("line", "failure_class"),
    [
        ("vllm-1 exited with code 137", "host_oom_killed"),
        ("    Reason:       OOMKilled", "host_oom_killed"),
        ("systemd[1]: vllm.service: A process of this unit has been killed by the OOM killer.", "host_oom_killed"),
        ("systemd[1]: vllm.service: Main process exited, code=killed, status=9/KILL", "host_oom_killed"),
        ("systemd[1]: vllm.service: Main process exited, code=dumped, status=6/ABRT", "engine_killed"),
        ("vllm-1 exited with code 139", "engine_killed"),
    ],
)
def test_what_a_launcher_says_of_a_death(line: str, failure_class: str) -> None:
    ledger = read(A, W + "Starting to load model m...", line)
    assert (ledger.outcome, ledger.phase, ledger.failure_class) == ("failed", Phase.WEIGHTS_LOAD, failure_class)
    assert verdict_of(failure_class) is Verdict.UNKNOWN


@pytest.mark.parametrize(
    "line",
    [
        '"OOMKilled": false,',
        "systemd[1]: vllm.service: Main process exited, code=exited, status=1/FAILURE",
        "systemd[1]: vllm.service: Main process exited, code=killed, status=15/TERM",
        "vllm-1 exited with code 1",
    ],
)
def test_an_end_that_says_nothing_of_a_kill(line: str) -> None:
    assert read(A, W + "Starting to load model m...", line).cause is None


def test_llama_tries_again_with_less() -> None:
    ledger = read(
        "load_tensors:      CUDA0 model buffer size = 18000.00 MiB",
        "llama_kv_cache:      CUDA0 KV buffer size =  4096.00 MiB",
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 2048.00 MiB on device 0: cudaMalloc failed: out of "
        "memory",
        "ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 2147483648",
        "graph_reserve: failed to allocate compute buffers",
        "sched_reserve: compute buffer allocation failed, retrying without pipeline parallelism",
        "srv    load_model: initializing slots, n_slots = 1",
        "main: server is listening on http://127.0.0.1:8080 - starting the main loop",
    )
    assert (ledger.outcome, ledger.failure_class) == ("recovered", "profile_oom")
    assert ledger.get("tried_alloc_bytes") == 2 * GIB
