"""Every failure signature of vLLM and the fork: class, phase, verdict and outcome."""

from __future__ import annotations

import pytest

from pytest_kvbudget.ledger.classes import verdict_of
from pytest_kvbudget.verdict import Phase, Verdict
from tests.ledger.support import read

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


CASES: list[Case] = [
    (
        "unknown flag",
        ("usage: vllm serve [-h]", "vllm: error: unrecognized arguments: --enable-expert-offload"),
        "argument_rejected",
        Phase.ARGUMENT,
        Verdict.ERROR,
        "refused",
    ),
    (
        "old entry point",
        ("api_server.py: error: unrecognized arguments: --enable-expert-offload",),
        "argument_rejected",
        Phase.ARGUMENT,
        Verdict.ERROR,
        "refused",
    ),
    (
        "utilization over 1",
        (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for CacheConfig",
            "gpu_memory_utilization",
            "  Input should be less than or equal to 1 [type=less_than_equal, input_value=1.2, input_type=float]",
        ),
        "argument_rejected",
        Phase.ARGUMENT,
        Verdict.ERROR,
        "refused",
    ),
    (
        "window over the model's",
        (
            "ValueError: User-specified max_model_len (300000) is greater than the derived max_model_len "
            "(max_position_embeddings=131072 or model_max_length=None in model's config.json).",
        ),
        "argument_rejected",
        Phase.ARGUMENT,
        Verdict.ERROR,
        "refused",
    ),
    (
        "DCP 0.12 - 0.26",
        (
            "AssertionError: tensor parallel size 2 must be greater than total num kv heads 2 when enable decode "
            "context "
            "parallel for GQA/MQA",
        ),
        "parallelism_refused",
        Phase.ARGUMENT,
        Verdict.ERROR,
        "refused",
    ),
    (
        "DCP 0.27+",
        (
            "ValueError: Decode context parallelism for GQA/MQA requires `--tensor-parallel-size` (2) to be greater "
            "than "
            "the model's total number of KV heads (2).",
        ),
        "parallelism_refused",
        Phase.ARGUMENT,
        Verdict.ERROR,
        "refused",
    ),
    (
        "fork planner",
        (
            "ExpertPlanError: SomeArch has no get_kv_cache_layers_from_config; the v2 plan sizes KV from the model's "
            "config-time specs and does not guess",
        ),
        "plan_refused",
        Phase.ARGUMENT,
        Verdict.ERROR,
        "refused",
    ),
    (
        "busy port",
        (
            "(APIServer pid=3) INFO 09-30 10:00:00 [a.py:1] vLLM API server version 0.23.0",
            "(APIServer pid=3) Traceback (most recent call last):",
            "(APIServer pid=3) OSError: [Errno 98] Address already in use",
        ),
        "port_in_use",
        Phase.ARGUMENT,
        Verdict.ERROR,
        "refused",
    ),
    (
        "busy port, uvicorn",
        (
            "(APIServer pid=3) INFO 09-30 10:00:00 [a.py:1] vLLM API server version 0.23.0",
            W + "Available KV cache memory: 2.97 GiB",
            "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address already in "
            "use",
        ),
        "port_in_use",
        Phase.KV_CHECK,
        Verdict.ERROR,
        "failed",
    ),
    (
        "missing model, hub",
        (
            "(APIServer pid=3) INFO 09-30 10:00:00 [a.py:1] vLLM API server version 0.23.0",
            "OSError: nosuch/model is not a local folder and is not a valid model identifier listed on "
            "'https://huggingface.co/models'",
        ),
        "model_not_found",
        Phase.ARGUMENT,
        Verdict.ERROR,
        "refused",
    ),
    (
        "missing model, path",
        (
            "(APIServer pid=3) INFO 09-30 10:00:00 [a.py:1] vLLM API server version 0.23.0",
            "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or "
            "'namespace/repo_name': "
            "'/no/such/model'. Use `repo_type` argument if needed.",
        ),
        "model_not_found",
        Phase.ARGUMENT,
        Verdict.ERROR,
        "refused",
    ),
    (
        "missing model, config",
        (
            "(APIServer pid=3) INFO 09-30 10:00:00 [a.py:1] vLLM API server version 0.23.0",
            "OSError: Can't load the configuration of '/no/such/model'. If you were trying to load it from the hub, "
            "make "
            "sure you don't have a local directory with the same name.",
        ),
        "model_not_found",
        Phase.ARGUMENT,
        Verdict.ERROR,
        "refused",
    ),
    (
        "command missing",
        ("bash: line 1: vllm: command not found",),
        "command_not_found",
        Phase.ARGUMENT,
        Verdict.ERROR,
        "refused",
    ),
    (
        "utilization 1.0 on an R9700",
        (
            "(Worker_TP1 pid=8) ERROR [x.py:1] ValueError: Free memory on device cuda:1 (31.29/31.86 GiB) on startup "
            "is "
            "less than desired GPU memory utilization (1.0, 31.86 GiB). Decrease GPU memory utilization or reduce GPU "
            "memory used by other processes.",
        ),
        "startup_free_below_request",
        Phase.WORKER_INIT,
        Verdict.FAIL,
        "failed",
    ),
    (
        "memory of an earlier engine",
        (
            "ValueError: Free memory on device (27.28/31.86 GiB) on startup is less than desired GPU memory "
            "utilization "
            "(0.97, 30.9 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        ),
        "foreign_process_memory",
        Phase.WORKER_INIT,
        Verdict.UNKNOWN,
        "failed",
    ),
    (
        "weights",
        (
            W + "Starting to load model /m...",
            *frames("load_model"),
            WE + OOM,
            E + "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        ),
        "weights_oom",
        Phase.WEIGHTS_LOAD,
        Verdict.FAIL,
        "failed",
    ),
    (
        "weights, 0.13+",
        (
            "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization to free memory for "
            "weights, increasing --tensor-parallel-size. (original error: HIP out of memory)",
        ),
        "weights_oom",
        Phase.WEIGHTS_LOAD,
        Verdict.FAIL,
        "failed",
    ),
    (
        "host out of memory",
        (
            W + "Starting to load model /m...",
            E + "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.",
        ),
        "host_oom_killed",
        Phase.WEIGHTS_LOAD,
        Verdict.UNKNOWN,
        "failed",
    ),
    (
        "V0, host out of memory",
        (
            "(VllmWorkerProcess pid=9) INFO 09-30 10:00:00 model_runner.py:1] Starting to load model /m...",
            "ERROR 09-30 10:00:00 multiproc_worker_utils.py:124] Worker VllmWorkerProcess pid 9 died, exit code: -9",
        ),
        "host_oom_killed",
        Phase.WEIGHTS_LOAD,
        Verdict.UNKNOWN,
        "failed",
    ),
    (
        "worker gone, no status",
        (
            W + "Starting to load model /m...",
            E + "Worker proc VllmWorker-1 died unexpectedly, shutting down executor.",
        ),
        "engine_killed",
        Phase.WEIGHTS_LOAD,
        Verdict.UNKNOWN,
        "failed",
    ),
    (
        "memlock",
        (W + "Starting to load model /m...", "PLE offload: locked 0.0 GiB, FAILED to lock 38.74 GiB"),
        "host_memory_limit",
        Phase.WEIGHTS_LOAD,
        Verdict.ERROR,
        "failed",
    ),
    (
        "profile run",
        (
            W + "Model loading took 20.1 GiB memory and 5.1 seconds",
            *frames("determine_available_memory", "profile_run"),
            WE + OOM,
        ),
        "profile_oom",
        Phase.PROFILE,
        Verdict.FAIL,
        "failed",
    ),
    (
        "disturbed",
        (
            "AssertionError: Error in memory profiling. Initial free memory 82.94 GiB, current free memory 90.17 GiB. "
            "This "
            "happens when other processes sharing the same container release GPU memory while vLLM is profiling.",
        ),
        "profile_disturbed",
        Phase.PROFILE,
        Verdict.UNKNOWN,
        "failed",
    ),
    (
        "disturbed, raw bytes",
        (
            "AssertionError: Error in memory profiling. Initial free memory 84000000000, current free memory "
            "90000000000. "
            "This happens when the GPU memory was not properly cleaned up before initializing the vLLM instance.",
        ),
        "profile_disturbed",
        Phase.PROFILE,
        Verdict.UNKNOWN,
        "failed",
    ),
    (
        "nothing left",
        (E + "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when",),
        "kv_budget_nonpositive",
        Phase.KV_CHECK,
        Verdict.FAIL,
        "failed",
    ),
    (
        "V0 window",
        (
            "ValueError: The model's max seq len (29000) is larger than the maximum number of tokens that can be "
            "stored in "
            "KV cache (23648). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.",
        ),
        "kv_check_short",
        Phase.KV_CHECK,
        Verdict.FAIL,
        "failed",
    ),
    (
        "V1 window",
        (
            E
            + "ValueError: To serve at least one request with the models's max seq len (262144), (24.0 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (3.18 GiB). Based on the available memory, the "
            "estimated maximum model length is 34736. Try increasing",
        ),
        "kv_check_short",
        Phase.KV_CHECK,
        Verdict.FAIL,
        "failed",
    ),
    (
        "state blocks",
        (
            E + "ValueError: max_num_seqs (256) exceeds available Mamba cache blocks (161). Each decode request needs "
            "one; lower max_num_seqs to at most 161",
        ),
        "max_num_seqs_exceeds_state",
        Phase.KV_CHECK,
        Verdict.FAIL,
        "failed",
    ),
    (
        "pinned pool over free",
        (
            W + "Initial free memory 31.29 GiB, reserved 10.28 GiB memory for KV Cache as specified by "
            "kv_cache_memory_bytes config and skipped memory profiling.",
            *frames("initialize_from_config", "initialize_kv_cache", "_allocate_kv_cache_tensors"),
            WE
            + "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 10.28 GiB. GPU 0 has a total capacity of "
            "31.86 GiB of which 9.46 GiB is free.",
        ),
        "kv_alloc_oom",
        Phase.KV_ALLOC,
        Verdict.FAIL,
        "failed",
    ),
    (
        "capture, frames",
        (
            W + "Available KV cache memory: 2.97 GiB",
            *frames("compile_or_warm_up_model", "capture_model", "_capture_cudagraphs", "_dummy_run"),
            WE + OOM,
        ),
        "graph_capture_oom",
        Phase.GRAPH_CAPTURE,
        Verdict.FAIL,
        "failed",
    ),
    (
        "capture, no size",
        (
            "(Worker_TP0 pid=7) Capturing CUDA graphs (decode, FULL):  66%|██    | 2/3",
            *frames("capture_end"),
            WE + "RuntimeError: HIP error: out of memory",
        ),
        "graph_capture_oom",
        Phase.GRAPH_CAPTURE,
        Verdict.FAIL,
        "failed",
    ),
    (
        "sampler",
        (
            "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try "
            "lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
        ),
        "warmup_oom",
        Phase.WARMUP,
        Verdict.FAIL,
        "failed",
    ),
    (
        "Triton arange in capture",
        (
            "(Worker_TP0 pid=7) Capturing CUDA graphs (decode, FULL):   0%|      | 0/3",
            WE + "ValueError: arange's range must be a power of 2",
        ),
        "kernel_fault",
        Phase.GRAPH_CAPTURE,
        Verdict.ERROR,
        "failed",
    ),
    (
        "dies on a request",
        (
            "INFO:     Application startup complete.",
            *frames("execute_model"),
            WE + OOM,
            E + "EngineCore encountered a fatal error.",
            "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for "
            "the "
            "root cause.",
        ),
        "request_oom",
        Phase.REQUEST,
        Verdict.FAIL,
        "died_after_boot",
    ),
    (
        "workspace",
        (
            "INFO:     Application startup complete.",
            WE + "AssertionError: Workspace is locked but allocation from 'fused_moe.py:900:apply' requires 8.12 MB, "
            "current size is 0.76 MB. Workspace growth is not allowed after locking.",
            E + "EngineCore encountered a fatal error.",
        ),
        "workspace_locked",
        Phase.REQUEST,
        Verdict.ERROR,
        "died_after_boot",
    ),
    (
        "killed while serving",
        (
            "INFO:     Application startup complete.",
            "(APIServer pid=3) ERROR 09-30 10:00:00 [c.py:1] Engine core proc EngineCore_DP0 died unexpectedly, "
            "shutting "
            "down client.",
        ),
        "engine_killed",
        Phase.READY,
        Verdict.UNKNOWN,
        "died_after_boot",
    ),
    (
        "CPU pool over the machine",
        (
            WE
            + "ValueError: Available memory on node 0 (14.96/16.46 GiB) on kv cache allocation is less than requested "
            "memory for kv (1000.0 GiB). Decrease --kv-cache-memory-bytes",
        ),
        "kv_alloc_oom",
        Phase.KV_ALLOC,
        Verdict.FAIL,
        "failed",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_a_failure_is_named(case: Case) -> None:
    name, lines, failure_class, phase, verdict, outcome = case
    ledger = read(*lines)
    assert ledger.failure_class == failure_class, name
    assert ledger.phase is phase
    assert ledger.outcome == outcome
    assert verdict_of(failure_class) is verdict
    assert ledger.cause is not None
    assert ledger.cause.evidence[0].text
    assert ledger.cause.sentence
