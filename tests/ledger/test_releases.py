"""One boot per release family, each with the prefixes of its time: phase, class, rank, figures, levers."""

from __future__ import annotations

import json

import pytest

from pytest_kvbudget.verdict import Phase
from tests.ledger.support import MIB, read
from tests.ledger.variant import READY, Variant, check, gib


def oom(tried: str, device: int = 1, free: str = "20.00 MiB", pools: str = "") -> str:
    """torch 2.5 and later."""
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU {device} has a total capacity of "
        f"31.86 GiB of which {free} is free. Including non-PyTorch memory, this process has 31.00 GiB memory in use. "
        f"Of the allocated memory 30.43 GiB is allocated by PyTorch, {pools}and 310.00 MiB is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF"
    )


def trace(prefix: str, *functions: str) -> tuple[str, ...]:
    """A traceback, its frames outermost first."""
    frames = (f'{prefix}  File "/v/vllm/v1/worker/gpu_worker.py", line 9, in {name}' for name in functions)
    return (prefix + "Traceback (most recent call last):", *frames)


def record(level: str, message: str, name: str = "EngineCore", pid: int = 8) -> str:
    """JSON logging, 0.31 and later."""
    row = {"asctime": "2026-09-01 10:00:00", "levelname": level, "name": "vllm", "processName": name, "process": pid}
    return json.dumps(row | {"message": message})


I0 = "INFO 08-06 10:00:01 "
V0 = "(VllmWorkerProcess pid=91) "
V0E = V0 + "ERROR 12-20 20:25:49 multiproc_worker_utils.py:236] "
PROFILED = (
    "worker.py:241] the current vLLM instance can use total_gpu_memory (15.77GiB) x gpu_memory_utilization (0.95) = "
    "14.98GiB\r",
    "worker.py:241] model weights take 7.51GiB; non_torch_memory takes 0.39GiB; PyTorch activation peak memory takes "
    "2.53GiB; the rest of the memory reserved for KV Cache is 4.55GiB.\r",
)
NEED = (
    "ValueError: To serve at least one request with the {} max seq len (131072), (16.0 {} KV cache is needed, which is "
    "larger than the available KV cache memory (4.35 {}). {}Try increasing `gpu_memory_utilization`"
)
ESTIMATE = "Based on the available memory, the estimated maximum model length is 34736. "
BLUE, END = "\x1b[1;36m", "\x1b[0;0m "
RAY = "(RayWorkerWrapper pid=146, ip=10.0.0.2) "
BAR = "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):   0%|   | 0/51\r" + (
    "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  10%|#  | 5/51"
)
UTIL_UP, UTIL_DOWN = ("gpu_memory_utilization", "raise"), ("gpu_memory_utilization", "lower")
LEN_DOWN = ("max_model_len", "lower")

VARIANTS: list[Variant] = [
    Variant(
        "0.5.4, weights, torch 2.4",
        (
            I0 + "api_server.py:339] vLLM API server version 0.5.4",
            I0 + "api_server.py:340] args: Namespace(max_model_len=8192, gpu_memory_utilization=0.95)",
            I0 + "llm_engine.py:174] Initializing an LLM engine (v0.5.4) with config: max_seq_len=8192",
            I0 + "model_runner.py:720] Starting to load model m...",
            *trace("[rank0]: ", "load_model"),
            "[rank0]: torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB. GPU 0 has a total "
            "capacity of 23.64 GiB of which 183.81 MiB is free. Process 1234 has 23.40 GiB memory in use. Of the "
            "allocated memory 23.00 GiB is allocated by PyTorch, and 8.11 MiB is reserved by PyTorch but unallocated.",
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "weights_oom",
        {"tried_alloc_bytes": 224 * MIB, "total_bytes": gib(23.64), "max_model_len": 8192},
        turn=(("tensor_parallel_size", "raise"),),
        leave=(LEN_DOWN, UTIL_DOWN),
    ),
    Variant(
        "0.6.6, capture inside initialize_cache",
        (
            I0 + "api_server.py:712] vLLM API server version 0.6.6",
            *(prefix + I0 + line for prefix in ("", V0) for line in PROFILED),
            I0 + "distributed_gpu_executor.py:57] # GPU blocks: 4661, # CPU blocks: 4096",
            I0 + "distributed_gpu_executor.py:61] Maximum concurrency for 40000 tokens per request: 1.86x",
            V0 + I0 + "model_runner.py:1413] Capturing cudagraphs for decoding. If out-of-memory error occurs",
            *trace(V0E, "initialize_cache", "_warm_up_model", "capture_model"),
            V0E + oom("26.00 MiB"),
            "RuntimeError: Engine process failed to start. See stack trace for the root cause.",
        ),
        "failed",
        Phase.GRAPH_CAPTURE,
        "graph_capture_oom",
        {"weights_bytes": gib(7.51), "available_kv_bytes": gib(4.55), "gpu_blocks": 4661, "max_concurrency": 1.86},
        turn=(UTIL_DOWN,),
        leave=(UTIL_UP, LEN_DOWN),
    ),
    Variant(
        "0.7.3, GB, no estimate",
        (
            I0 + "core.py:50] Initializing a V1 LLM engine (v0.7.3) with config: max_seq_len=131072",
            I0 + "gpu_model_runner.py:1060] Model loading took 14.9889 GB and 4.123 seconds",
            "ERROR 02-20 10:00:00 core.py:291] EngineCore hit an exception: Traceback (most recent call last):",
            "ERROR 02-20 10:00:00 core.py:291] " + NEED.format("models's", "GB", "GB", ""),
            "CRITICAL 02-20 10:00:00 core_client.py:191] Got fatal signal from worker processes, shutting down.",
            "Killed",
        ),
        "failed",
        Phase.KV_CHECK,
        "kv_check_short",
        {"kv_needed_bytes": gib(16), "available_kv_bytes": gib(4.35), "model_load_bytes": gib(14.9889)},
        turn=(LEN_DOWN,),
    ),
    Variant(
        "0.8.5, coloured, somebody else's memory",
        (
            I0 + "[api_server.py:1043] vLLM API server version 0.8.5.post1",
            f"{BLUE}(VllmWorker rank=1 pid=12){END}ERROR 04-09 20:31:10 [multiproc_executor.py:435] ValueError: Free "
            "memory on device (12.10/23.64 GiB) on startup is less than desired GPU memory utilization (0.9, 21.28 "
            "GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        ),
        "failed",
        Phase.WORKER_INIT,
        "foreign_process_memory",
        {"free_bytes": gib(12.10), "requested_bytes": gib(21.28)},
        turn=(("device memory", "clean"),),
        leave=(UTIL_DOWN, LEN_DOWN),
    ),
    Variant(
        "0.8.2 on Ray",
        (
            I0 + "[api_server.py:1] vLLM API server version 0.8.2",
            RAY
            + I0
            + "[worker.py:267] model weights take 20.64GiB; non_torch_memory takes 0.28GiB; PyTorch activation "
            "peak memory takes 1.52GiB; the rest of the memory reserved for KV Cache is 21.20GiB. [repeated 30x across "
            "cluster]",
            *trace(RAY + "ERROR 03-27 10:29:31 [worker_base.py:620] ", "determine_num_available_blocks", "profile_run"),
            RAY + "ERROR 03-27 10:29:31 [worker_base.py:620] " + oom("1.50 GiB", 6) + " [repeated 3x across cluster]",
            "ray.exceptions.RayTaskError(OutOfMemoryError): ray::RayWorkerWrapper.execute_method() (pid=146)",
        ),
        "failed",
        Phase.PROFILE,
        "profile_oom",
        {"device": 6, "tried_alloc_bytes": gib(1.5), "weights_bytes": gib(20.64)},
        turn=(("max_num_batched_tokens", "lower"),),
        leave=(LEN_DOWN,),
    ),
    Variant(
        "0.12, nothing left",
        (
            "(APIServer pid=1) INFO 12-01 10:00:01 [utils.py:253] non-default args: {'max_model_len': 65536, "
            "'gpu_memory_utilization': 0.55}",
            "(EngineCore_DP0 pid=8) INFO 12-01 10:00:01 [m.py:1] Model loading took 18.2000 GiB memory and 9.5 seconds",
            "(EngineCore_DP0 pid=8) INFO 12-01 10:00:01 [m.py:1] Available KV cache memory: -1.72 GiB",
            "(EngineCore_DP0 pid=8) ERROR 12-01 10:00:01 [core.py:843] EngineCore failed to start.",
            *trace("(EngineCore_DP0 pid=8) ERROR 12-01 10:00:01 [core.py:843] ", "run_engine_core"),
            "(EngineCore_DP0 pid=8) ERROR 12-01 10:00:01 [core.py:843] ValueError: No available memory for the cache "
            "blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
        ),
        "failed",
        Phase.KV_CHECK,
        "kv_budget_nonpositive",
        {"available_kv_bytes": -gib(1.72), "gpu_memory_utilization": 0.55, "max_model_len": 65536},
        turn=(UTIL_UP,),
        leave=(LEN_DOWN,),
    ),
    Variant(
        "0.13, sampler, a negative capture",
        (
            "(EngineCore_DP0 pid=8) INFO 01-05 10:00:01 [kv_cache_utils.py:1291] GPU KV cache size: 993,760 tokens",
            "(EngineCore_DP0 pid=8) INFO 01-05 10:00:01 [m.py:1] Maximum concurrency for 32,768 tokens per request: "
            "56.85x",
            "(EngineCore_DP0 pid=8) INFO 01-05 10:00:03 [m.py:1] Graph capturing finished in 5 secs, took -0.42 GiB",
            "(EngineCore_DP0 pid=8) ERROR 01-05 10:00:03 [core.py:866] RuntimeError: CUDA out of memory occurred when "
            "warming up sampler with 1024 dummy requests. Please try lowering `max_num_seqs`",
        ),
        "failed",
        Phase.WARMUP,
        "warmup_oom",
        {"max_num_seqs": 1024, "graph_capture_bytes": -gib(0.42), "max_concurrency": 56.85, "kv_tokens": 993760},
        turn=(("max_num_seqs", "lower"),),
        leave=(UTIL_UP, LEN_DOWN),
    ),
    Variant(
        "0.14, the device is named",
        (
            "(Worker_TP1 pid=43) ERROR 01-25 10:00:01 [multiproc_executor.py:772] ValueError: Free memory on device "
            "cuda:1 (31.23/31.86 GiB) on startup is less than desired GPU memory utilization (0.99, 31.54 GiB).",
        ),
        "failed",
        Phase.WORKER_INIT,
        "startup_free_below_request",
        {"device": 1, "free_bytes": gib(31.23)},
        turn=(UTIL_DOWN,),
        leave=(LEN_DOWN,),
    ),
    Variant(
        "0.19, state blocks are only a warning",
        (
            "(EngineCore pid=3) WARNING 03-08 16:44:29 [compilation.py:1233] Capping cudagraph capture sizes from max "
            "512 to 352 to fit Mamba cache blocks (361 blocks available). To increase this limit, reduce max_num_seqs",
            "(EngineCore pid=3) 2026-03-08 16:44:29,692 - INFO - autotuner.py:262 - flashinfer.jit: starts",
            "(EngineCore pid=3) INFO 03-08 16:45:29 [core.py:282] init engine (profile, create kv cache, warmup model) "
            "took 60.50 seconds",
            READY,
        ),
        "booted",
        Phase.READY,
        None,
        {"state_blocks": 361, "init_engine_secs": 60.5},
    ),
    Variant(
        "0.22, the model's",
        ("(EngineCore pid=5) ERROR 09-30 10:00:00 [core.py:1] " + NEED.format("model's", "GiB", "GiB", ESTIMATE),),
        "failed",
        Phase.KV_CHECK,
        "kv_check_short",
        {"estimated_max_model_len": 34736, "max_model_len": 131072},
        turn=(LEN_DOWN, UTIL_UP),
        leave=(("max_num_seqs", "lower"),),
    ),
    Variant(
        "0.25, JSON",
        (
            record("INFO", "vLLM API server version 0.25.0", "APIServer", 1),
            record("INFO", "Available KV cache memory: 4.35 GiB"),
            record(
                "ERROR",
                "EngineCore failed to start.\nTraceback (most recent call last):\n"
                + NEED.format("model's", "GiB", "GiB", ESTIMATE),
            ),
        ),
        "failed",
        Phase.KV_CHECK,
        "kv_check_short",
        {"estimated_max_model_len": 34736, "available_kv_bytes": gib(4.35)},
        turn=(LEN_DOWN,),
    ),
    Variant(
        "0.26, a startup plan is applied",
        (
            "(Worker_TP0 pid=7) INFO 09-30 10:00:00 [m.py:1] Applying persisted startup plan (fingerprint ab12): "
            "kv_cache_memory_bytes=3166500000 (2.95 GiB), recorded free-memory baseline 31.29 GiB, current 31.25 GiB. "
            "Memory profiling will be skipped.",
        ),
        "booted",
        Phase.PROFILE,
        None,
        {"available_kv_bytes": 3166500000, "free_bytes": gib(31.29), "current_free_bytes": gib(31.25)},
    ),
    Variant(
        "0.29, runner V2 captures twice, then a request",
        (
            "(EngineCore pid=5) INFO 09-30 10:00:00 [m.py:1] Graph capturing finished in 3 secs, took 0.46 GiB",
            "(EngineCore pid=5) INFO 09-30 10:00:00 [m.py:1] Available KV cache memory: 11.43 GiB",
            "(EngineCore pid=5) INFO 09-30 10:00:00 [m.py:1] GPU KV cache size: 150,745 tokens, Maximum concurrency "
            "for 124,000 tokens per request: 1.22x",
            "(EngineCore pid=5) INFO 09-30 10:00:00 [m.py:1] Graph capturing finished in 4 secs, took 0.61 GiB",
            READY,
            'INFO:     10.0.0.9:5 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
            *trace("(EngineCore pid=5) ERROR 09-30 10:05:00 [core.py:1] ", "run_busy_loop", "execute_model"),
            "(EngineCore pid=5) ERROR 09-30 10:05:00 [core.py:1] " + oom("52.00 MiB", 0, "42.00 MiB"),
            "(EngineCore pid=5) ERROR 09-30 10:05:00 [core.py:1] EngineCore encountered a fatal error.",
            "INFO:     Shutting down",
            "INFO:     Application shutdown complete.",
        ),
        "died_after_boot",
        Phase.REQUEST,
        "request_oom",
        {"graph_capture_bytes": gib(0.61), "free_bytes": 42 * MIB, "kv_tokens": 150745},
        turn=(UTIL_DOWN,),
        leave=(UTIL_UP, LEN_DOWN),
    ),
    Variant(
        "0.32, bare traceback in capture",
        (
            "(Worker_TP0 pid=7) INFO 09-30 10:00:00 [gpu_worker.py:1] Available KV cache memory: 2.97 GiB",
            BAR,
            *trace("", "worker_main", "capture_model"),
            oom("20.00 MiB", pools="with 120.00 MiB allocated in private pools (e.g., CUDA Graphs), "),
        ),
        "failed",
        Phase.GRAPH_CAPTURE,
        "graph_capture_oom",
        {"private_pool_bytes": 120 * MIB, "device": 1, "available_kv_bytes": gib(2.97)},
        leave=(LEN_DOWN, UTIL_UP),
    ),
    Variant(
        "0.32, no process of the engine left",
        (
            "(Worker_TP0 pid=7) INFO 09-30 10:00:00 [m.py:1] Starting to load model m...",
            "(APIServer pid=1) ERROR 09-30 10:00:00 [x.py:1] engine core exited unexpectedly; starting cleanup",
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "engine_killed",
        {},
        leave=(UTIL_DOWN,),
    ),
    Variant(
        "0.33, weights of another process are excluded",
        (
            "(Worker_TP0 pid=7) ERROR 09-30 10:00:00 [m.py:1] ValueError: Free memory on device cuda:0 (20.10/31.86 "
            "GiB) on startup is less than the engine's budget after excluding external process's weights (22.50 GiB).",
        ),
        "failed",
        Phase.WORKER_INIT,
        "foreign_process_memory",
        {"requested_bytes": gib(22.5), "total_bytes": gib(31.86)},
        turn=(("device memory", "clean"),),
    ),
    Variant(
        "no window fits",
        (
            "(EngineCore pid=5) ERROR 09-30 10:00:00 [core.py:1] ValueError: Cannot auto-fit max_model_len: not enough "
            "GPU memory available to serve even a single token.",
        ),
        "failed",
        Phase.KV_CHECK,
        "kv_check_short",
        {"auto_fit": True},
        turn=(UTIL_UP,),
        leave=(LEN_DOWN,),
    ),
    Variant(
        "R9700, no size in the text",
        (
            "(Worker_TP1 pid=8) INFO 09-30 10:00:00 [m.py:1] Available KV cache memory: 4.87 GiB",
            "Capturing CUDA graphs (decode, FULL):   0%|          | 0/35",
            *trace("(Worker_TP1 pid=8) ERROR 09-30 10:00:00 [m.py:1] ", "compile_or_warm_up_model", "capture_end"),
            "(Worker_TP1 pid=8) ERROR 09-30 10:00:00 [m.py:1] torch.AcceleratorError: HIP error: out of memory",
        ),
        "failed",
        Phase.GRAPH_CAPTURE,
        "graph_capture_oom",
        {"available_kv_bytes": gib(4.87)},
        turn=(UTIL_DOWN,),
    ),
    Variant(
        "a kernel wants more shared memory than the card has",
        (
            "Capturing CUDA graphs (decode, FULL):   0%|          | 0/35",
            "(Worker_TP0 pid=7) ERROR 09-30 10:00:00 [m.py:1] triton.runtime.errors.OutOfResources: out of resource: "
            "shared memory, Required: 147456, Hardware limit: 65536. Reducing block sizes or `num_stages` may help.",
        ),
        "failed",
        Phase.GRAPH_CAPTURE,
        "kernel_fault",
        {},
        leave=(UTIL_DOWN, LEN_DOWN),
    ),
    Variant(
        "a library that gets no memory, without the words",
        (
            "(Worker_TP0 pid=7) INFO 09-30 10:00:00 [m.py:1] Model loading took 18.2 GiB memory and 9.5 seconds",
            *trace("(Worker_TP0 pid=7) ERROR 09-30 10:00:00 [m.py:1] ", "determine_available_memory", "profile_run"),
            "(Worker_TP0 pid=7) ERROR 09-30 10:00:00 [m.py:1] RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED "
            "when calling `cublasCreate(handle)`",
        ),
        "failed",
        Phase.PROFILE,
        "profile_oom",
        {},
    ),
    Variant(
        "collectives that get no memory",
        (
            "(Worker_TP1 pid=8) INFO 09-30 10:00:00 [m.py:1] Starting to load model m...",
            "(Worker_TP1 pid=8) ERROR 09-30 10:00:00 [m.py:1] Last error:",
            "(Worker_TP1 pid=8) ERROR 09-30 10:00:00 [m.py:1] Cuda failure 2 'out of memory'",
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "weights_oom",
        {},
    ),
    Variant(
        "no device",
        (
            "(APIServer pid=1) INFO 09-30 10:00:00 [a.py:1] vLLM API server version 0.23.0",
            "(APIServer pid=1) RuntimeError: Failed to infer device type, please set the environment variable",
        ),
        "refused",
        Phase.ARGUMENT,
        "device_missing",
        {},
    ),
    Variant(
        "an argument that cannot be read",
        ("vllm serve: error: argument --max-model-len: invalid human_readable_int_or_auto value: '32x'",),
        "refused",
        Phase.ARGUMENT,
        "argument_rejected",
        {},
        turn=(("--max-model-len", "none"),),
        leave=(UTIL_DOWN,),
    ),
    Variant(
        "0.8, an exception that the grammar does not know",
        (
            I0 + "[kv_cache_utils.py:537] GPU KV cache size: 17,328 tokens",
            "ERROR 03-26 08:41:09 [core.py:340] EngineCore hit an exception: Traceback (most recent call last):",
            'ERROR 03-26 08:41:09 [core.py:340]   File "/v/vllm/v1/engine/core.py", line 332, in run_engine_core',
            'ERROR 03-26 08:41:09 [core.py:340]   File "/v/vllm/v1/worker/m.py", line 3, in initialize_kv_cache',
            "ERROR 03-26 08:41:09 [core.py:340] ValueError: Block size must be a multiple of 16.",
            "CRITICAL 03-26 08:41:09 [core_client.py:269] Got fatal signal from worker processes, shutting down.",
        ),
        "failed",
        Phase.KV_ALLOC,
        "engine_exception",
        {"kv_tokens": 17328},
    ),
    Variant(
        "0.8, only the word of the client",
        (
            I0 + "[gpu_model_runner.py:537] Starting to load model m...",
            "CRITICAL 03-26 08:41:09 [core_client.py:269] Got fatal signal from worker processes, shutting down.",
            "Killed",
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "unexplained",
        {},
    ),
    Variant(
        "0.10.1, what was asked of the engine is dumped beside its death",
        (
            READY,
            "(EngineCore_0 pid=309) ERROR 09-02 08:04:02 [dump_input.py:69] Dumping input data for V1 LLM engine "
            "(v0.10.1.1) with config: model='x', max_seq_len=10000, tensor_parallel_size=2",
            "(EngineCore_0 pid=309) ERROR 09-02 08:04:02 [core.py:634] EngineCore encountered a fatal error.",
            "(EngineCore_0 pid=309) ERROR 09-02 08:04:02 [core.py:634] RuntimeError: Worker failed with error 'CUDA "
            "error: an illegal memory access was encountered', please check the stack trace above for the root cause",
        ),
        "died_after_boot",
        Phase.REQUEST,
        "kernel_fault",
        {},
        leave=(UTIL_DOWN, LEN_DOWN),
    ),
    Variant(
        "a step that never came back",
        (
            READY,
            *trace("(EngineCore pid=5) ERROR 09-30 10:05:00 [core.py:1] ", "execute_model"),
            "(EngineCore pid=5) ERROR 09-30 10:05:00 [core.py:1] TimeoutError: RPC call to sample_tokens timed out.",
            "(EngineCore pid=5) ERROR 09-30 10:05:00 [core.py:1] EngineCore encountered a fatal error.",
        ),
        "died_after_boot",
        Phase.REQUEST,
        "engine_hung",
        {},
    ),
    Variant(
        "records with the logger's name",
        (
            "2025-11-02 13:17:04,315 - vllm.v1.worker - INFO - Available KV cache memory: 3.18 GiB",
            "2025-11-02 13:17:04,315 - vllm.v1.worker - WARNING - not torch.OutOfMemoryError: CUDA out of memory. "
            "Tried to allocate 1.00 GiB.",
            READY,
            "2025-11-02 13:17:04,315 - vllm.v1.engine.core_client - ERROR - Engine core proc EngineCore_DP0 died "
            "unexpectedly, shutting down client.",
            "2025-11-02 13:17:04,315 - vllm.v1.executor - INFO - Parent process exited, terminating worker",
        ),
        "died_after_boot",
        Phase.READY,
        "engine_killed",
        {"available_kv_bytes": gib(3.18)},
    ),
    Variant(
        "SGLang, only the wrapper",
        (
            "[2026-05-01 10:00:03 TP0] Load weight begin. avail mem=78.60 GB",
            "[2026-05-01 10:00:13] Received sigquit from a child process. It usually means the child failed.",
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "unexplained",
        {},
    ),
    Variant(
        "SGLang, killed while it loads",
        (
            "[2026-05-01 10:00:03 TP0] Load weight begin. avail mem=78.60 GB",
            "[2026-05-01 10:00:13] Rank 0 scheduler is dead. Please check if there are relevant logs.",
            "[2026-05-01 10:00:13] Exit code: -9",
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "host_oom_killed",
        {"free_bytes": gib(78.6)},
        leave=(UTIL_DOWN,),
    ),
    Variant(
        "SGLang, a rank that did not come",
        (
            "[2026-05-01 10:00:03 TP0] Load weight end. type=X, avail mem=18.20 GB, mem usage=60.40 GB.",
            "ValueError: TP rank 0 could finish the model loading, but there are other ranks that didn't finish "
            "loading. It is likely due to unexpected failures (e.g., OOM) or a slow node.",
            "[2026-05-01 10:00:13] Exit code: -11",
        ),
        "failed",
        Phase.PROFILE,
        "engine_killed",
        {"weights_bytes": gib(60.4)},
        leave=(UTIL_DOWN,),
    ),
    Variant(
        "llama.cpp, an assertion",
        (
            "load_tensors:      CUDA0 model buffer size = 18000.00 MiB",
            "/src/ggml/src/ggml-cuda/mmq.cu:20: GGML_ASSERT(ne00 % 256 == 0) failed",
            "Aborted (core dumped)",
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "engine_exception",
        {},
    ),
    Variant(
        "llama.cpp, the device is lost",
        (
            "main: server is listening on http://127.0.0.1:8080 - starting the main loop",
            "slot launch_slot_: id  0 | task 0 | processing task",
            "terminate called after throwing an instance of 'vk::DeviceLostError'",
            "  what():  vk::Queue::submit: ErrorDeviceLost",
        ),
        "died_after_boot",
        Phase.REQUEST,
        "device_fault",
        {},
    ),
    Variant(
        "SGLang, a prefill",
        (
            "[2026-05-01 10:00:11] The server is fired up and ready to roll!",
            "[2026-05-01 10:00:12 TP0] Prefill batch. #new-seq: 1, #new-token: 8192, #running-req: 3, #queue-req: 2,",
            "[2026-05-01 10:00:12 TP0] Scheduler hit an exception: Traceback (most recent call last):",
            '  File "/sgl/model_runner.py", line 2, in forward_batch_generation',
            oom("1.16 GiB", 0),
            "[2026-05-01 10:00:13] Received sigquit from a child process. It usually means the child failed.",
        ),
        "died_after_boot",
        Phase.REQUEST,
        "request_oom",
        {"tried_alloc_bytes": gib(1.16)},
        turn=(("mem_fraction_static", "lower"),),
        leave=(("mem_fraction_static", "raise"),),
    ),
    Variant(
        "llama.cpp, a request",
        (
            "main: server is listening on http://127.0.0.1:8080 - starting the main loop",
            "slot launch_slot_: id  0 | task 0 | processing task",
            "CUDA error: out of memory",
            "Aborted (core dumped)",
        ),
        "died_after_boot",
        Phase.REQUEST,
        "request_oom",
        {},
    ),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=[variant.name for variant in VARIANTS])
def test_an_engine_of_its_time_is_read(variant: Variant) -> None:
    check(variant)


def test_ranks_of_0_10_1_are_told_apart() -> None:
    ledger = read(
        *(
            f"{BLUE}(VllmWorker TP{rank} pid={20 + rank}){END}INFO 08-26 09:12:24 [gpu_worker.py:276] Available KV "
            f"cache memory: {3 + rank}.50 GiB"
            for rank in (0, 1)
        )
    )
    assert {rank: value.value for rank, value in ledger.ranks["available_kv_bytes"].items()} == {
        "VllmWorker TP0": gib(3.5),
        "VllmWorker TP1": gib(4.5),
    }
    assert ledger.get("available_kv_bytes") == gib(3.5)


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_a_healthy_json_record_that_names_a_failure_is_none(level: str) -> None:
    said = "falling back after torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB."
    boot = record("INFO", "Available KV cache memory: 4.35 GiB")
    assert read(boot, record(level, said)).cause is None
    assert read(boot, record("ERROR", said)).failure_class == "kv_alloc_oom"
