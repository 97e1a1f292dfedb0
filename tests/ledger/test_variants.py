"""Logs as they are pasted, shipped and cut: release families, prefixes and failures, with what an expert answers."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from pytest_kvbudget.ledger.model import Outcome
from pytest_kvbudget.verdict import Phase
from tests.ledger.support import GIB, MIB, lever_effects, read

Facts = dict[str, int | float | str | bool]

A = "(APIServer pid=1) INFO 09-30 10:00:00 [api_server.py:1896] vLLM API server version 0.23.0"
E = "(EngineCore pid=5) ERROR 09-30 10:00:09 [core.py:770] "
EI = "(EngineCore pid=5) INFO 09-30 10:00:09 [core.py:770] "
W = "(Worker_TP0 pid=7) INFO 09-30 10:00:00 [gpu_worker.py:1] "
W1 = "(Worker_TP1 pid=8) INFO 09-30 10:00:00 [gpu_worker.py:1] "
WE = "(Worker_TP0 pid=7) ERROR 09-30 10:00:00 [multiproc_executor.py:1] "
N = "(Worker_TP0 pid=77) 2026-09-01 10:00:00,123 - INFO - neuron_worker.py:500 - "
N1 = "(Worker_TP1 pid=78) 2026-09-01 10:00:00,123 - INFO - neuron_worker.py:500 - "
R = "2026-Oct-01 10:00:00.000001 77:77 ERROR  "
S = "[2026-01-02 03:04:05 TP0] "
READY = "INFO:     Application startup complete."
WRAPPER = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
MAMBA = (
    "ValueError: max_num_seqs (256) exceeds available Mamba cache blocks (161). Each decode request needs one Mamba "
    "cache block, so CUDA graph capture cannot proceed. Please lower max_num_seqs to at most 161 or increase "
    "gpu_memory_utilization."
)
IDLE = (
    "(APIServer pid=1) INFO 09-30 10:01:00 [loggers.py:1] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg "
    "generation "
    "throughput: 0.0 tokens/s, Running: 0 reqs, Waiting: 1 reqs, GPU KV cache usage: 0.0%, Prefix cache hit rate: 0.0%"
)
OOM = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 76.00 MiB. GPU 0 has a total capacity of 31.86 GiB "
    "of which 0 bytes is free. Of the allocated memory 30.43 GiB is allocated by PyTorch, with 120.00 MiB allocated in "
    "private pools (e.g., HIP Graphs), and 310.00 MiB is reserved by PyTorch but unallocated."
)


def gib(number: float) -> int:
    return round(number * GIB)


class Variant(NamedTuple):
    name: str
    lines: tuple[str, ...]
    outcome: Outcome
    phase: Phase
    failure_class: str | None
    facts: Facts
    turn: tuple[tuple[str, str], ...] = ()
    leave: tuple[tuple[str, str], ...] = ()


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
        "SGLang starving",
        (
            S + "The server is fired up and ready to roll!",
            *(S + "Decode batch. #running-req: 0, #token: 0, token usage: 0.00, #queue-req: 1," for _ in range(2)),
        ),
        "booted",
        Phase.REQUEST,
        "request_starved",
        {},
        turn=(("mem_fraction_static", "raise"),),
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
        leave=(("gpu_memory_utilization", "lower"),),
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
            '{"asctime": "10:00:00", "levelname": "INFO", "processName": "Worker_TP0", "process": 77, "message": "Available KV '
            'cache memory: 2.97 GiB"}',
            '{"asctime": "10:00:01", "levelname": "ERROR", "processName": "Worker_TP0", "process": 77, "message": "WorkerProc '
            'hit an exception.\\nTraceback (most recent call last):\\n  File \\"/v/vllm/v1/worker/gpu_worker.py\\", line 9, in '
            "capture_model\\n" + OOM + '"}',
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
        "Ray killed a worker for want of host memory",
        (
            "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
            "Memory on the node (IP: 10.0.0.2, ID: ab) where the task (actor ID: x, name=RayWorkerWrapper.__init__, "
            "pid=1, memory "
            "used=12.5GB) was running was 120.13GB / 125.64GB (0.956155), which exceeds the memory usage threshold "
            "of 0.95.",
        ),
        "failed",
        Phase.UNKNOWN,
        "host_oom_killed",
        {"host_used_bytes": gib(120.13), "host_total_bytes": gib(125.64)},
        leave=(("gpu_memory_utilization", "lower"), ("max_model_len", "lower")),
    ),
    Variant(
        "Neuron 0.24, a whole boot",
        (
            N + "Initialized NeuronWorker with rank 0, local_rank 0",
            N + "Loading model on NeuronWorker",
            N + "Neuron HBM: 7.06 GiB used, 16.94 GiB free",
            N1 + "Neuron HBM: 7.16 GiB used, 16.84 GiB free",
            EI + "GPU KV cache size: 424,672 tokens",
            EI + "Maximum concurrency for 4,096 tokens per request: 103.68x",
            N + "Compilation complete in 301.22 seconds",
            N + "Model warmup completed: 4 num_batched_tokens_buckets, 2 num_seqs_buckets",
            EI + "init engine (profile, create kv cache, warmup model) took 480.21 s (compilation: 301.22 s)",
            READY,
        ),
        "booted",
        Phase.READY,
        None,
        {
            "hbm_total_used_bytes": gib(7.16),
            "free_bytes": gib(16.84),
            "kv_tokens": 424672,
            "compile_secs": 301.22,
            "init_engine_secs": 480.21,
        },
    ),
    Variant(
        "Neuron 2.33, the four quantities by label",
        (
            N + "Neuron memory: HBM per logical core=36.00 GiB model_weights=8.00 GiB reserved_headroom=4.00 GiB "
            "kv_cache_budget=24.00 GiB",
        ),
        "booted",
        Phase.KV_CHECK,
        None,
        {
            "total_bytes": 36 * GIB,
            "weights_bytes": 8 * GIB,
            "reserved_headroom_bytes": 4 * GIB,
            "available_kv_bytes": 24 * GIB,
        },
    ),
    Variant(
        "Neuron compiler, no worker's prefix",
        (
            N + "Neuron HBM: 7.06 GiB used, 16.94 GiB free",
            "[ERROR] [NCC_EOOM002] Maximum peak HBM usage of 43.00GB exceeds HBM limit of 24.00GB for Trn2. This "
            "consists of 0B of "
            "model constants, 43.00GB of I/O tensors, 1.01MB of internal (scratchpad) tensors, 0B of DMA ring I/O, "
            "and 0B of "
            "DMA ring spills",
            "(Worker_TP0 pid=77) RuntimeError: neuronx-cc compilation failed with 70. Check compiler logs.",
        ),
        "failed",
        Phase.COMPILE,
        "compile_hbm_exceeded",
        {
            "code": "NCC_EOOM002",
            "arch": "Trn2",
            "peak_hbm_bytes": 43 * GIB,
            "hbm_limit_bytes": 24 * GIB,
            "constants_bytes": 0,
            "io_tensors_bytes": 43 * GIB,
            "dma_ring_bytes": 0,
            "status": 70,
        },
        turn=(("VLLM_NEURON_RESERVED_HEADROOM_GIB", "raise"), ("tensor_parallel_size", "raise")),
        leave=(("gpu_memory_utilization", "raise"),),
    ),
    Variant(
        "Neuron out of memory, a table with one head line",
        (
            R + "TDRV:log_dev_mem  Failed to allocate 4.000GB (alignment: none, usage: tensors) on ND 0:NC 4",
            R + "TDRV:log_dev_mem_usage_table  Displaying Current Memory Utilization:",
            "              | TOTAL | Model Code | Model Constants | Tensors | DMA Rings IO |",
            " ND 0 HBM 0   | 20.188GB | 192.102MB | n/a | 20.000GB | 0.000B |",
            "   \\_NC 4     | 20.094GB | 96.065MB | 58.344KB | 20.000GB | 0.000B |",
        ),
        "failed",
        Phase.UNKNOWN,
        "runtime_hbm_oom",
        {
            "tried_alloc_bytes": 4 * GIB,
            "alloc_usage": "tensors",
            "nd": 0,
            "nc": 4,
            "hbm_total_used_bytes": gib(20.188),
            "hbm_model_code_bytes": round(192.102 * MIB),
            "hbm_tensors_bytes": 20 * GIB,
            "hbm_dma_rings_io_bytes": 0,
        },
    ),
    Variant(
        "Neuron events ran out, not memory",
        (
            R + "TDRV:x tdrv_get_device_resource_va failed (ret=4) for event semaphore",
            R + "NRT:nrt_infodump Failure: NRT_RESOURCE in nrt_load_util",
        ),
        "failed",
        Phase.MODEL_LOAD,
        "device_resource_exhausted",
        {"ret": 4},
        leave=(("VLLM_NEURON_RESERVED_HEADROOM_GIB", "raise"),),
    ),
    Variant(
        "llama.cpp, several devices",
        (
            "load_tensors: loading model tensors, this can take a while... (mmap = true)",
            "load_tensors:        CUDA0 model buffer size =  4096.00 MiB",
            "load_tensors:   CPU_Mapped model buffer size =   512.00 MiB",
            "llama_kv_cache_unified:      CUDA0 KV buffer size =  1024.00 MiB",
            "llama_context:      CUDA0 compute buffer size =   560.00 MiB",
            "llama_context:  CUDA_Host compute buffer size =    24.01 MiB",
            "main: server is listening on http://127.0.0.1:8080 - starting the main loop",
        ),
        "booted",
        Phase.READY,
        None,
        {"weights_bytes": 4096 * MIB, "kv_in_use_bytes": 1024 * MIB, "peak_activation_bytes": 560 * MIB},
    ),
    Variant(
        "llama.cpp, weights",
        (
            "load_tensors: loading model tensors, this can take a while... (mmap = true)",
            "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 40960.00 MiB on device 0: cudaMalloc failed: out "
            "of memory",
            "alloc_tensor_range: failed to allocate CUDA0 buffer of size 42949672960",
            "llama_model_load: error loading model: unable to allocate CUDA0 buffer",
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "weights_oom",
        {"tried_alloc_bytes": 42949672960, "device": 0},
        turn=(("n_gpu_layers", "lower"),),
        leave=(("ctx_size", "lower"),),
    ),
    Variant(
        "llama.cpp, a limit for one allocation is named",
        (
            "ggml_vulkan: Device memory allocation of size 4404019200 failed.",
            "ggml_vulkan: Requested buffer size exceeds device memory allocation limit: ErrorOutOfDeviceMemory",
            "llama_model_load: error loading model: unable to allocate Vulkan0 buffer",
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "single_alloc_limit",
        {"tried_alloc_bytes": 4404019200},
    ),
    Variant(
        "llama.cpp, fitting",
        (
            "llama_params_fit_impl: projected to use 33422 MiB of device memory vs. 27335 MiB of free device memory",
            "llama_params_fit_impl: cannot meet free memory target of 1024 MiB, need to reduce device memory by 7111 "
            "MiB",
        ),
        "booted",
        Phase.ARGUMENT,
        None,
        {"projected_bytes": 33422 * MIB, "free_bytes": 27335 * MIB, "margin_required_bytes": 1024 * MIB},
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
    ledger = read(*variant.lines)
    assert (ledger.outcome, ledger.phase, ledger.failure_class) == (
        variant.outcome,
        variant.phase,
        variant.failure_class,
    )
    assert {name: ledger.get(name) for name in variant.facts} == variant.facts
    if variant.name.startswith("what a client wrote"):
        assert not ledger.facts
    effects = lever_effects(ledger) if ledger.cause is not None else {}
    for lever in variant.turn:
        assert effects.get(lever) == "helps"
    for lever in variant.leave:
        assert effects.get(lever) != "helps"


@pytest.mark.parametrize("variant", VARIANTS, ids=[variant.name for variant in VARIANTS])
def test_evidence_is_in_the_line_that_it_names(variant: Variant) -> None:
    ledger = read(*variant.lines)
    lines = "\n".join(variant.lines).split("\n")
    for value in ledger.facts.values():
        shown = lines[value.evidence.line - 1]
        assert value.evidence.text.strip()[:20] in shown or shown.startswith("{")


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
