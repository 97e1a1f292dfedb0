"""vLLM logs as they are pasted, shipped and cut: release families, prefixes and failures."""

from __future__ import annotations

import pytest

from pytest_kvbudget.verdict import Phase
from tests.ledger.support import GIB, MIB, read
from tests.ledger.variant import EI, IDLE, MAMBA, OOM, READY, W1, WE, WRAPPER, A, E, Variant, W, check, gib

VARIANTS: list[Variant] = [
    Variant(
        "state blocks after the wrapper's line",
        (
            A,
            E + "EngineCore failed to start.",
            E + "Traceback (most recent call last):",
            E + '  File "/v/vllm/v1/engine/core.py", line 9, in __init__',
            E + MAMBA,
            WRAPPER,
        ),
        "failed",
        Phase.KV_CHECK,
        "max_num_seqs_exceeds_state",
        {"max_num_seqs": 256, "state_blocks": 161},
        turn=(("max_num_seqs", "lower"),),
        leave=(("max_model_len", "lower"),),
    ),
    Variant(
        "state blocks, found while graphs were captured, quoted by the engine core",
        (
            A,
            W + "Available KV cache memory: 2.97 GiB",
            EI + "GPU KV cache size: 122,633 tokens, Maximum concurrency for 122,624 tokens per request: 1.00x",
            WE + "WorkerProc hit an exception.",
            WE + "Traceback (most recent call last):",
            WE + '  File "/v/vllm/v1/worker/gpu_worker.py", line 9, in capture_model',
            WE + MAMBA,
            E + "EngineCore failed to start.",
            E + f"RuntimeError: Worker failed with error '{MAMBA[12:]}', please check the stack trace above for the "
            f"root cause",
            E + "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.",
            WRAPPER,
        ),
        "failed",
        Phase.KV_CHECK,
        "max_num_seqs_exceeds_state",
        {"max_num_seqs": 256, "state_blocks": 161, "kv_tokens": 122633},
    ),
    Variant(
        "state blocks, wrapped within a record",
        (
            E + "EngineCore failed to start.",
            E + "ValueError: max_num_seqs (256) exceeds",
            E + "available Mamba cache blocks (161).",
        ),
        "failed",
        Phase.KV_CHECK,
        "max_num_seqs_exceeds_state",
        {"max_num_seqs": 256, "state_blocks": 161},
    ),
    Variant(
        "state blocks, only a warning up to 0.19",
        (
            W + "Available KV cache memory: 2.97 GiB",
            W + "max_num_seqs (256) exceeds available Mamba cache blocks (161). Capping cudagraph capture sizes from "
            "max 512 to "
            "160 to fit Mamba cache blocks (161)",
            W + "Graph capturing finished in 3 secs, took 0.20 GiB",
            READY,
        ),
        "booted",
        Phase.READY,
        None,
        {"state_blocks": 161, "graph_capture_bytes": gib(0.2)},
    ),
    Variant(
        "a wrapped refusal at start-up",
        (
            "ValueError: Free memory on device cuda:0 (67.24/79.25",
            "GiB) on startup is less than desired GPU memory utilization (0.9,",
            "71.33 GiB). Decrease GPU memory utilization or reduce GPU memory used",
            "by other processes.",
        ),
        "failed",
        Phase.WORKER_INIT,
        "foreign_process_memory",
        {
            "device": 0,
            "free_bytes": gib(67.24),
            "total_bytes": gib(79.25),
            "gpu_memory_utilization": 0.9,
            "requested_bytes": gib(71.33),
        },
        leave=(("gpu_memory_utilization", "lower"), ("max_model_len", "lower")),
    ),
    Variant(
        "a wrapped KV check, numbers broken by the terminal",
        (
            "ValueError: To serve at least one request with the model's max seq len (13",
            "1072), (1",
            "6.00 GiB KV cache is needed, which is larger than the available KV cache memory (9.1",
            "2 GiB). Based on the available memory, the estimated maximum model length is 746",
            "88.",
        ),
        "failed",
        Phase.KV_CHECK,
        "kv_check_short",
        {
            "max_model_len": 131072,
            "kv_needed_bytes": 16 * GIB,
            "available_kv_bytes": gib(9.12),
            "estimated_max_model_len": 74688,
        },
    ),
    Variant(
        "a wrapped out of memory",
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to",
            "allocate 136.00 MiB. GPU 0 has a total capacity of 22.36 GiB of which 120.88",
            "MiB is free.",
        ),
        "unknown",
        Phase.UNKNOWN,
        "request_oom",
        {"tried_alloc_bytes": 136 * MIB, "total_bytes": gib(22.36), "free_bytes": round(120.88 * MIB)},
    ),
    Variant(
        "0.8: no estimate",
        (
            E + "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache "
            "is "
            "needed, which is larger than the available KV cache memory (9.12 GiB). Based on the available memory, Try "
            "increasing `gpu_memory_utilization`",
        ),
        "failed",
        Phase.KV_CHECK,
        "kv_check_short",
        {"kv_needed_bytes": 16 * GIB, "available_kv_bytes": gib(9.12)},
        turn=(("max_model_len", "lower"),),
    ),
    Variant(
        "lines of one process out of order",
        (
            E
            + "ValueError: To serve at least one request with the model's max seq len (131072), (16.00 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (9.12 GiB).",
            EI + "Overriding num_gpu_blocks=1 with num_gpu_blocks_override=2",
            EI + "Maximum concurrency for 131,072 tokens per request: 0.57x",
        ),
        "failed",
        Phase.KV_CHECK,
        "kv_check_short",
        {"max_concurrency": 0.57},
    ),
    Variant(
        "graphs estimated at more than there is",
        (
            W + "Estimated CUDA graph memory: 118.65 GiB total",
            W + "Available KV cache memory: -43.11 GiB",
            E + "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when",
        ),
        "failed",
        Phase.KV_CHECK,
        "kv_budget_nonpositive",
        {"graph_estimated_bytes": gib(118.65), "available_kv_bytes": gib(-43.11)},
        turn=(("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "lower"),),
        leave=(("max_model_len", "lower"),),
    ),
    Variant(
        "one line of starvation and nothing else",
        (IDLE,),
        "booted",
        Phase.REQUEST,
        "request_starved",
        {"kv_usage_pct": 0.0},
        turn=(("max_model_len", "lower"), ("kv_cache_memory_bytes", "raise")),
    ),
    Variant(
        "a pool smaller than the window, starving",
        (
            EI + "GPU KV cache size: 76,640 tokens",
            EI + "Maximum concurrency for 262,144 tokens per request: 0.29x",
            READY,
            IDLE,
        ),
        "booted",
        Phase.REQUEST,
        "request_starved",
        {"kv_tokens": 76640, "max_model_len": 262144},
    ),
    Variant(
        "a request waits for a moment in an engine that it fits",
        (
            EI + "GPU KV cache size: 300,000 tokens, Maximum concurrency for 262,144 tokens per request: 1.14x",
            READY,
            IDLE,
        ),
        "booted",
        Phase.READY,
        None,
        {"kv_tokens": 300000},
    ),
    Variant(
        "V0 starving",
        (
            READY,
            *(
                "INFO 03-27 10:00:00 metrics.py:455] Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: "
                "0.0 "
                "tokens/s, Running: 0 reqs, Swapped: 0 reqs, Pending: 1 reqs, GPU KV cache usage: 0.5%, CPU KV cache "
                "usage: 0.0%."
                for _ in range(2)
            ),
        ),
        "booted",
        Phase.REQUEST,
        "request_starved",
        {"kv_usage_pct": 0.5},
    ),
    Variant(
        "utilization over 1",
        (
            A,
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for CacheConfig",
            "gpu_memory_utilization",
            "  Input should be less than or equal to 1 [type=less_than_equal, input_value=1.2, input_type=float]",
        ),
        "refused",
        Phase.ARGUMENT,
        "argument_rejected",
        {"gpu_memory_utilization": 1.2},
        turn=(("gpu_memory_utilization", "lower"),),
        leave=(("max_model_len", "lower"),),
    ),
    Variant(
        "descriptors ran out, and the driver calls it memory",
        (
            W + "Starting to load model m...",
            "RuntimeError: HIP error: out of memory",
            "OSError: [Errno 24] Too many open files",
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "host_memory_limit",
        {},
        turn=(("LimitNOFILE", "raise"),),
        leave=(("gpu_memory_utilization", "lower"),),
    ),
    Variant(
        "a segmentation fault",
        (A, W + "Starting to load model m...", "!!!!!!! Segfault encountered !!!!!!!"),
        "failed",
        Phase.WEIGHTS_LOAD,
        "engine_killed",
        {},
    ),
    Variant(
        "one line of a worker, without a size",
        (WE + "RuntimeError: HIP error: out of memory",),
        "unknown",
        Phase.UNKNOWN,
        "request_oom",
        {},
    ),
    Variant(
        "JSON, a traceback in one record",
        (
            '{"asctime": "10:00:00", "levelname": "INFO", "processName": "Worker_TP0", "process": 77, '
            '"message": "Available KV cache memory: 2.97 GiB"}',
            '{"asctime": "10:00:01", "levelname": "ERROR", "processName": "Worker_TP0", "process": 77, "message": '
            '"WorkerProc hit an exception.\\nTraceback (most recent call last):\\n  File '
            '\\"/v/vllm/v1/worker/gpu_worker.py\\", line 9, in capture_model\\n' + OOM + '"}',
        ),
        "failed",
        Phase.GRAPH_CAPTURE,
        "graph_capture_oom",
        {
            "available_kv_bytes": gib(2.97),
            "tried_alloc_bytes": 76 * MIB,
            "free_bytes": 0,
            "private_pool_bytes": 120 * MIB,
        },
    ),
    Variant(
        "compose and colour",
        (
            "vllm-1  | \x1b[1;36m(Worker_TP0 pid=7)\x1b[0;0m \x1b[32mINFO\x1b[0m 09-30 10:00:00 "
            "\x1b[90m[gpu_worker.py:349]\x1b[0m "
            "Available KV cache memory: 2.97 GiB\r",
            "vllm-1  | \x1b[1;36m(EngineCore_DP0 pid=5)\x1b[0;0m INFO 09-30 10:00:00 [kv_cache_utils.py:1229] GPU KV "
            "cache size: "
            "150,745 tokens\r",
        ),
        "booted",
        Phase.KV_ALLOC,
        None,
        {"available_kv_bytes": gib(2.97), "kv_tokens": 150745},
    ),
    Variant(
        "Kubernetes and journald, several spellings",
        (
            "2026-09-30T10:00:00.123456789Z stderr F " + W + "Available KV cache memory: 2.97 GiB",
            "[pod/vllm-0/vllm] (EngineCore_DP0 pid=5) INFO 09-30 10:00:00 [k.py:1] GPU KV cache size: 150,745 tokens",
            "Oct 03 10:00:05.123456 dank vllm.service[4242]: INFO 09-30 10:00:00 [k.py:1] Maximum concurrency for "
            "120,000 tokens "
            "per request: 2.48x",
            "2026-10-03T10:00:05+0200 dank podman[4242]: " + W1 + "Graph capturing finished in 5 secs, took -0.06 GiB",
        ),
        "booted",
        Phase.GRAPH_CAPTURE,
        None,
        {
            "available_kv_bytes": gib(2.97),
            "kv_tokens": 150745,
            "max_model_len": 120000,
            "max_concurrency": 2.48,
            "graph_capture_bytes": gib(-0.06),
        },
    ),
    Variant(
        "what a client wrote is in the log",
        (
            READY,
            f"(APIServer pid=1) INFO 10-03 10:00:00 [logger.py:43] Received request chatcmpl-1: prompt: 'why {OOM} "
            f"and GPU KV cache "
            "size: 1 tokens', params: SamplingParams(n=1), lora_request: None.",
        ),
        "booted",
        Phase.READY,
        None,
        {},
    ),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=[variant.name for variant in VARIANTS])
def test_a_variant_is_read_right(variant: Variant) -> None:
    check(variant)


def test_what_a_client_wrote_is_no_figure() -> None:
    (quoting,) = [variant for variant in VARIANTS if variant.name.startswith("what a client wrote")]
    assert not read(*quoting.lines).facts


def test_a_lone_engine_core_is_no_rank_and_unprefixed_lines_are_not_the_drivers() -> None:
    ledger = read(
        "(EngineCore_DP0 pid=5) INFO 09-30 10:00:00 [k.py:1] GPU KV cache size: 150,745 tokens",
        W + "Available KV cache memory: 2.97 GiB",
        "[ERROR] [NCC_EOOM002] Maximum peak HBM usage of 43.00GB exceeds HBM limit of 24.00GB for Trn2.",
    )
    assert ledger.ranks == {"available_kv_bytes": {"Worker_TP0": ledger.facts["available_kv_bytes"]}}


def test_replicas_are_ranks() -> None:
    size = "(EngineCore_DP{0} pid={0}) INFO 09-30 10:00:00 [k.py:1] GPU KV cache size: {1} tokens"
    ledger = read(size.format(0, "150,745"), size.format(1, "140,000"))
    assert ledger.get("kv_tokens") == 140_000
    assert {rank: value.value for rank, value in ledger.ranks["kv_tokens"].items()} == {
        "EngineCore_DP0": 150_745,
        "EngineCore_DP1": 140_000,
    }
