"""Causes and what their levers say."""

from __future__ import annotations

import pytest

from pytest_kvbudget.ledger.classes import CLASSES, verdict_of, verdict_on
from pytest_kvbudget.ledger.levers import levers_for
from pytest_kvbudget.verdict import Phase, Verdict
from tests.ledger.support import GIB, lever_effects, read

E = "(EngineCore_DP0 pid=5) ERROR 09-30 10:00:00 [core.py:770] "
W = "(Worker_TP0 pid=7) INFO 09-30 10:00:00 [gpu_worker.py:1] "
WE = "(Worker_TP0 pid=7) ERROR 09-30 10:00:00 [multiproc_executor.py:1] "
OOM = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 76.00 MiB. GPU 0 has a total capacity of 31.86 GiB "
    "of "
    "which 0 bytes is free. Of the allocated memory 30.43 GiB is allocated by PyTorch, with 120.00 MiB allocated in "
    "private "
    "pools (e.g., HIP Graphs), and 310.00 MiB is reserved by PyTorch but unallocated."
)
Case = tuple[str, tuple[str, ...], str, Phase, Verdict, str]


def frames(*functions: str) -> tuple[str, ...]:
    return (
        WE + "Traceback (most recent call last):",
        *(WE + f'  File "/v/vllm/v1/worker/gpu_worker.py", line 9, in {name}' for name in functions),
    )


@pytest.mark.parametrize("failure_class", sorted(CLASSES))
def test_no_class_is_a_pass_and_each_can_be_said(failure_class: str) -> None:
    assert verdict_of(failure_class) in {Verdict.FAIL, Verdict.ERROR, Verdict.UNKNOWN}
    for family in ("vllm", "rdna4", "neuron", "sglang", "llama.cpp"):
        levers = levers_for(failure_class, family, Phase.UNKNOWN)
        turned = [(lever.name, lever.direction) for lever in levers]
        assert len(set(turned)) == len(turned), f"{failure_class} on {family} says one thing twice"


def test_a_class_outside_the_vocabulary_is_an_error() -> None:
    with pytest.raises(KeyError, match="no failure class"):
        verdict_of("oom")


def test_the_wrapper_is_never_the_cause() -> None:
    ledger = read(
        E + "EngineCore failed to start.",
        E + "Traceback (most recent call last):",
        E + "ValueError: No available memory for the cache blocks.",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    )
    assert ledger.failure_class == "kv_budget_nonpositive"
    assert [evidence.line for evidence in ledger.cause.evidence] == [3] if ledger.cause else False


def test_an_unknown_exception_is_an_error_and_quoted() -> None:
    ledger = read(
        W + "Starting to load model /m...",
        WE + "Traceback (most recent call last):",
        WE + '  File "/v/vllm/v1/worker/gpu_worker.py", line 9, in load_model',
        WE + "KeyError: 'model.layers.0.weird'",
        E + "EngineCore failed to start.",
    )
    assert ledger.failure_class == "engine_exception"
    assert ledger.phase is Phase.WEIGHTS_LOAD
    assert ledger.cause is not None
    assert "model.layers.0.weird" in ledger.cause.sentence


def test_more_headroom_harms_a_minimum_and_helps_a_compiler() -> None:
    minimum = read(
        "RuntimeError: Computed KV cache budget is below minimum threshold. effective=0.00 GiB, minimum=1.00 GiB."
    )
    compiler = read(
        "Loading model on NeuronWorker",
        "[NCC_EOOM002] Maximum peak HBM usage of 43.00GB exceeds HBM limit of 24.00GB for Trn2.",
    )
    assert lever_effects(minimum)["VLLM_NEURON_RESERVED_HEADROOM_GIB", "raise"] == "harms"
    assert lever_effects(compiler)["VLLM_NEURON_RESERVED_HEADROOM_GIB", "raise"] == "helps"


def test_a_shorter_window_does_not_cure_an_underpriced_reserve() -> None:
    ledger = read(
        "expert offload plan check: runtime overhead planned 5.25 GiB, measured 4.09 GiB (-1.16); KV planned 8937 "
        "B/token, "
        "measured 10125 B/token (+1188)",
        "ValueError: To serve at least one request with the model's max seq len (32768), (0.31 GiB KV cache is needed, "
        "which "
        "is larger than the available KV cache memory (0.28 GiB). Based on the available memory, the estimated maximum "
        "model "
        "length is 28800. Try increasing",
    )
    assert ledger.failure_class == "kv_reserve_underpriced"
    assert lever_effects(ledger)["max_model_len", "lower"] == "useless"


def test_a_price_within_the_reserve_stays_a_short_pool() -> None:
    ledger = read(
        "expert offload plan check: runtime overhead planned 5.25 GiB, measured 4.09 GiB (-1.16); KV planned 9190 "
        "B/token, "
        "measured 7701 B/token (-1489)",
        "ValueError: To serve at least one request with the model's max seq len (32768), (0.31 GiB KV cache is needed, "
        "which "
        "is larger than the available KV cache memory (0.28 GiB). Based on the available memory, the estimated maximum "
        "model "
        "length is 28800. Try increasing",
    )
    assert ledger.failure_class == "kv_check_short"


def test_utilization_moves_nothing_where_bytes_are_pinned() -> None:
    line = (
        "ValueError: To serve at least one request with the model's max seq len (131072), (0.12 GiB KV cache is "
        "needed, which "
        "is larger than the available KV cache memory (0.05 GiB). Based on the available memory, the estimated maximum "
        "model "
        "length is 51072. Try increasing"
    )
    free = read(line)
    pinned = read("non-default args: {'max_model_len': 131072, 'kv_cache_memory_bytes': 52428800}", line)
    assert lever_effects(free)["gpu_memory_utilization", "raise"] == "helps"
    assert lever_effects(pinned)["gpu_memory_utilization", "raise"] == "useless"
    assert lever_effects(pinned)["kv_cache_memory_bytes", "raise"] == "helps"


def test_a_wrapped_sentence_is_read_whole() -> None:
    ledger = read(
        E + "ValueError: To serve at least one request with the models's max seq len (262144), (24.0 GiB KV",
        "cache is needed, which is larger than the available KV cache memory",
        "(3.18 GiB). Based on the available memory, the estimated maximum model length is",
        "34736. Try increasing `gpu_memory_utilization`",
    )
    assert ledger.get("max_model_len") == 262144
    assert ledger.get("kv_needed_bytes") == 24 * GIB
    assert ledger.get("available_kv_bytes") == round(3.18 * GIB)
    assert ledger.get("estimated_max_model_len") == 34736


def test_a_sentence_without_its_number_states_no_number() -> None:
    ledger = read(
        "ValueError: To serve at least one request with the models's max seq len (32768), (4.00 GiB KV cache is "
        "needed, which "
        "is larger than the available KV cache memory (3.18 GiB). Based on the available memory, Try increasing"
    )
    assert "estimated_max_model_len" not in ledger.facts


def test_the_rank_whose_traceback_says_so_gives_the_phase() -> None:
    ledger = read(
        "(Worker_TP1 pid=8) INFO 09-30 10:00:00 [m.py:1] Starting to load model /m...",
        "(Worker_TP0 pid=7) INFO 09-30 10:00:00 [m.py:1] Available KV cache memory: 2.97 GiB",
        "(Worker_TP1 pid=8) ERROR 09-30 10:00:00 [m.py:1] " + OOM,
    )
    assert ledger.failure_class == "weights_oom"
    assert ledger.cause is not None
    assert ledger.cause.rank == "Worker_TP1"


def test_a_failed_allocation_that_the_engine_outlives_is_recovered() -> None:
    ledger = read(
        "(Worker_TP0 pid=7) Capturing CUDA graphs (decode, FULL):   0%|      | 0/3",
        "[rank0]:[W930 10:00:00.1 CUDACachingAllocator.cpp:2] expandable_segments: memory mapping failed with OOM on "
        "device "
        "0 while trying to map 20971520 bytes (free: 12582912, total: 25297357373).",
        W + "Graph capturing finished in 2 secs, took 0.31 GiB",
        "INFO:     Application startup complete.",
    )
    assert ledger.outcome == "recovered"
    assert ledger.get("tried_alloc_bytes") == 20971520
    assert ledger.get("free_bytes") == 12582912


def test_a_window_that_waits_for_ever_is_starved_and_booted() -> None:
    line = "Engine 000: Avg prompt throughput: 0.0 tokens/s, Running: 0 reqs, Waiting: 1 reqs, GPU KV cache usage: 0.0%"
    ledger = read(
        "GPU KV cache size: 76,640 tokens",
        "Maximum concurrency for 262,144 tokens per request: 0.29x",
        "INFO:     Application startup complete.",
        line,
    )
    assert (ledger.outcome, ledger.phase, ledger.failure_class) == ("booted", Phase.REQUEST, "request_starved")


def test_a_request_that_waits_a_moment_is_not_starved() -> None:
    line = "Engine 000: Running: {} reqs, Waiting: {} reqs, GPU KV cache usage: 1.0%"
    ledger = read("INFO:     Application startup complete.", line.format(0, 1), line.format(1, 0))
    assert ledger.cause is None


def test_an_orderly_end_is_no_failure() -> None:
    ledger = read(
        "INFO:     Application startup complete.",
        "(APIServer pid=3) INFO 09-30 10:00:00 [launcher.py:254] [shutdown] API server: shutdown triggered",
        "(EngineCore pid=5) INFO 09-30 10:00:00 [core.py:1] [shutdown] EngineCore: trigger received signal=SIGTERM",
        "(EngineCore pid=5) ERROR 09-30 10:00:00 [core.py:1] Worker proc VllmWorker-0 died unexpectedly (exit code: 0)",
    )
    assert (ledger.outcome, ledger.phase) == ("booted", Phase.READY)


def test_a_boot_that_stops_in_the_middle_is_unknown() -> None:
    ledger = read(
        "(APIServer pid=3) INFO 09-30 10:00:00 [a.py:1] vLLM API server version 0.23.0", W + "Starting to load model x"
    )
    assert (ledger.outcome, ledger.phase) == ("unknown", Phase.WEIGHTS_LOAD)


def test_a_log_of_another_program_is_unknown() -> None:
    ledger = read("nginx: [emerg] bind() to 0.0.0.0:80 failed (98: Address already in use)", "ERROR: worker 7 exited")
    assert ledger.family == "unknown"


def test_a_killed_worker_of_a_serving_engine_died_on_its_request() -> None:
    ledger = read(
        "INFO:     Application startup complete.",
        'INFO:     127.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200 OK',
        E + "Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor.",
        'INFO:     127.0.0.1:5 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error',
    )
    assert (ledger.outcome, ledger.phase, ledger.failure_class) == ("died_after_boot", Phase.REQUEST, "host_oom_killed")


def test_how_far_to_turn_is_said_where_the_log_says_it() -> None:
    ledger = read(E + "ValueError: max_num_seqs (256) exceeds available Mamba cache blocks (161). Lower it")
    assert ledger.cause is not None
    (lever,) = [lever for lever in ledger.cause.levers if lever.name == "max_num_seqs"]
    assert lever.why.startswith("to at most 161")


def test_the_sentence_takes_the_figures_of_the_failing_line() -> None:
    ledger = read(
        "[2025-04-29 16:19:34 TP0] Capture cuda graph begin. avail mem=5.25 GB",
        "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total "
        "capacity of "
        "79.11 GiB of which 500.00 MiB is free.",
    )
    assert ledger.cause is not None
    assert "500.00 MiB of 79.11 GiB was free" in ledger.cause.sentence
    assert ledger.get("free_bytes") == 500 * 2**20


def test_an_exception_of_one_request_is_no_death() -> None:
    ledger = read(
        "INFO:     Application startup complete.",
        "(APIServer pid=3) ERROR 09-30 10:00:00 [serving.py:1] Error in preprocessing prompt inputs",
        "(APIServer pid=3) ERROR 09-30 10:00:00 [serving.py:1] Traceback (most recent call last):",
        "(APIServer pid=3) ERROR 09-30 10:00:00 [serving.py:1] ValueError: prompt is longer than the window",
        "  Input should be greater than or equal to 1 [type=greater_than_equal, input_value=0, input_type=int]",
        'INFO:     127.0.0.1:5 - "POST /v1/completions HTTP/1.1" 400 Bad Request',
    )
    assert (ledger.outcome, ledger.phase, ledger.cause) == ("booted", Phase.READY, None)


def test_an_exception_that_ends_a_serving_engine_is_a_death() -> None:
    ledger = read(
        "INFO:     Application startup complete.",
        E + "Traceback (most recent call last):",
        E + "IndexError: list index out of range",
        E + "EngineCore encountered a fatal error.",
    )
    assert (ledger.outcome, ledger.failure_class) == ("died_after_boot", "engine_exception")


def test_thousands_of_outlived_exceptions_do_not_hide_the_death() -> None:
    lines = ["INFO:     Application startup complete."]
    for number in range(1000):
        lines += [
            f"(ApiWorker pid={number}) Traceback (most recent call last):",
            f"(ApiWorker pid={number}) ValueError: bad request {number}",
            'INFO:     127.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200 OK',
        ]
    ledger = read(*lines, *frames("execute_model"), WE + OOM, E + "EngineCore encountered a fatal error.")
    assert (ledger.outcome, ledger.failure_class) == ("died_after_boot", "request_oom")


@pytest.mark.parametrize(
    ("said", "verdict", "window"),
    [
        ("expert cache space holds 2,041 slots; the resident layers need at least 4,449", Verdict.FAIL, "helps"),
        (
            "host-backed experts of all ranks take 41.24 GiB of host memory; usable are 41.20 GiB",
            Verdict.FAIL,
            "helps",
        ),
        (
            "SomeArch has no get_kv_cache_layers_from_config; the v2 plan sizes KV from the model's config-time specs "
            "and does not guess",
            Verdict.ERROR,
            "useless",
        ),
    ],
)
def test_a_plan_that_lacks_room_is_a_matter_of_memory_and_one_without_specs_is_not(
    said: str, verdict: Verdict, window: str
) -> None:
    """Slots are what the budget leaves after the reserve of one window (RDNA4 budget document, section 1).

    Experts that get no slot stay on the host.
    """
    cause = read(
        "(APIServer pid=3) INFO 09-30 10:00:00 [a.py:1] vLLM API server version 0.23.0",
        f"(APIServer pid=3) ExpertPlanError: {said}",
    ).cause
    assert cause is not None
    assert (cause.failure_class, cause.phase) == ("plan_refused", Phase.ARGUMENT)
    assert verdict_on(cause) is verdict
    assert {lever.effect for lever in cause.levers if lever.name == "max_model_len"} == {window}


@pytest.mark.parametrize("failure_class", ["kv_check_short", "max_num_seqs_exceeds_state"])
def test_a_pinned_pool_that_is_too_small_is_raised_itself(failure_class: str) -> None:
    levers = {
        lever.name: (lever.direction, lever.effect)
        for lever in levers_for(failure_class, "vllm", Phase.KV_CHECK, pinned=True)
    }
    assert levers["kv_cache_memory_bytes"] == ("raise", "helps")
    assert levers["gpu_memory_utilization"] == ("raise", "useless")
