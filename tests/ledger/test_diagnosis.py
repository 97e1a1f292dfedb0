"""Every failure signature: class, phase, verdict, and what its levers say."""

from __future__ import annotations

import pytest

from pytest_kvbudget.ledger.classes import CLASSES, verdict_of
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
    (
        "Neuron minimum",
        (
            "RuntimeError: Computed KV cache budget is below minimum threshold. effective=0.00 GiB, minimum=1.00 GiB. "
            "Increase gpu_memory_utilization or lower VLLM_NEURON_MIN_KV_BUDGET_GIB.",
        ),
        "min_kv_budget",
        Phase.KV_CHECK,
        Verdict.FAIL,
        "failed",
    ),
    (
        "Neuron compiler over HBM",
        (
            "[ERROR] [NCC_EOOM002] Maximum peak HBM usage of 43.00GB exceeds HBM limit of 24.00GB for Trn2. This "
            "consists "
            "of 1.50GB model constants, 40.00GB I/O tensors, 1.40GB internal (scratchpad) tensors, 100.00MB DMA ring "
            "I/O, "
            "and 0B DMA ring spills",
        ),
        "compile_hbm_exceeded",
        Phase.COMPILE,
        Verdict.FAIL,
        "failed",
    ),
    (
        "Neuron compiler",
        ("RuntimeError: neuronx-cc compilation failed with 70. Check compiler logs.",),
        "compile_failed",
        Phase.COMPILE,
        Verdict.ERROR,
        "failed",
    ),
    (
        "Neuron load",
        (
            "(Worker_TP0 pid=7) [1/4] Warming up for prefill: bucket_size=512, kv_segment_size=2048",
            "2026-Oct-01 10:00:00.000001 7:7 ERROR  NRT:nrt_infodump   Failure: NRT_RESOURCE in nrt_load_util",
            "2026-Oct-01 10:00:00.000002 7:7 ERROR  TDRV:log_dev_mem   Failed to allocate 512.000MB (alignment: none, "
            "usage: shared scratchpad) on ND 0:NC 2",
            "RuntimeError: Could not load the model status=4 message=Allocation Failure",
        ),
        "runtime_hbm_oom",
        Phase.MODEL_LOAD,
        Verdict.FAIL,
        "failed",
    ),
    (
        "Neuron load, not memory",
        (
            "NRT:nrt_infodump   Failure: NRT_RESOURCE in nrt_load_util",
            "TDRV:x  tdrv_get_device_resource_va failed (ret=4) for event semaphore",
        ),
        "device_resource_exhausted",
        Phase.MODEL_LOAD,
        Verdict.ERROR,
        "failed",
    ),
    (
        "Neuron LNC",
        (
            "NRT:nrt_load_util  Mismatch detected between Runtime configuration and NEFF. Runtime is configured with "
            "NEURON_LOGICAL_NC_CONFIG=1 but NEFF was compiled with --lnc=2",
        ),
        "lnc_mismatch",
        Phase.MODEL_LOAD,
        Verdict.ERROR,
        "failed",
    ),
    (
        "Neuron cores busy",
        ("NRT:nrt_allocate_neuron_cores  NeuronCore(s) not available - Requested:4 Available:0",),
        "devices_busy",
        Phase.WORKER_INIT,
        Verdict.UNKNOWN,
        "failed",
    ),
    (
        "SGLang",
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: 0.5",),
        "kv_budget_nonpositive",
        Phase.KV_CHECK,
        Verdict.FAIL,
        "failed",
    ),
    (
        "missing model, offline",
        (
            "(APIServer pid=3) INFO 09-30 10:00:00 [a.py:1] vLLM API server version 0.23.0",
            "huggingface_hub.errors.OfflineModeIsEnabled: Cannot reach https://huggingface.co/api/models/x: offline "
            "mode is "
            "enabled.",
        ),
        "model_not_found",
        Phase.ARGUMENT,
        Verdict.ERROR,
        "refused",
    ),
    (
        "state blocks, passed on by the engine",
        (
            "(EngineCore_DP0 pid=5) RuntimeError: Worker failed with error 'max_num_seqs (1024) exceeds available "
            "Mamba cache "
            "blocks (600). Each decode sequence requires one', please check the stack trace above for the root cause",
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        ),
        "max_num_seqs_exceeds_state",
        Phase.KV_CHECK,
        Verdict.FAIL,
        "failed",
    ),
    (
        "Ray's memory monitor",
        (
            "(raylet) Memory on the node (IP: 10.0.0.2, ID: 708c) where the task (actor ID: 0dab, pid=308, memory "
            "used=11.15GB) was running was 12.49GB / 13.15GB (0.950003), which exceeds the memory usage threshold of "
            "0.95.",
        ),
        "host_oom_killed",
        Phase.UNKNOWN,
        Verdict.UNKNOWN,
        "failed",
    ),
    (
        "torch.compile",
        (
            W + "Dynamo bytecode transform time: 4.1 s",
            WE + "Traceback (most recent call last):",
            WE + "torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found",
        ),
        "compile_failed",
        Phase.COMPILE,
        Verdict.ERROR,
        "failed",
    ),
    (
        "Neuron compiler killed",
        ("[F137] neuronx-cc was forcibly killed - This most commonly occurs due to insufficient system memory.",),
        "host_oom_killed",
        Phase.COMPILE,
        Verdict.UNKNOWN,
        "failed",
    ),
    (
        "Neuron compiler, exit code -9",
        ("RuntimeError: neuronx-cc compilation failed with -9. Check compiler logs.",),
        "host_oom_killed",
        Phase.COMPILE,
        Verdict.UNKNOWN,
        "failed",
    ),
    (
        "Neuron compiler, 2.18",
        ("[XCG815]  Estimated peak HBM usage (22.839451) exceeds 16GB. Neff won't be able to load on chip",),
        "compile_hbm_exceeded",
        Phase.COMPILE,
        Verdict.FAIL,
        "failed",
    ),
    (
        "Neuron ranks out of step",
        (W + "Barrier: waiting for all ranks to finish compilation", WE + "RuntimeError: Operation timed out!"),
        "compile_desync",
        Phase.COMPILE,
        Verdict.UNKNOWN,
        "failed",
    ),
    (
        "Neuron tensors while loading",
        (
            W + "Loading model on NeuronWorker",
            "2026-Oct-01 10:00:00.000001 7:7 ERROR  TDRV:dmem_alloc_internal  Failed to allocate DEVICE memory "
            "(4294967296 "
            "bytes): memory allocation failed (ret=-12)",
            WE + "RuntimeError: nrt_tensor_allocate status=4",
        ),
        "runtime_hbm_oom",
        Phase.WEIGHTS_LOAD,
        Verdict.FAIL,
        "failed",
    ),
    (
        "Neuron tensors in warm-up",
        (
            W + "[1/4] Warming up for prefill: bucket_size=512, kv_segment_size=2048",
            "2026-Oct-01 10:00:00.000001 7:7 ERROR  TDRV:dmem_alloc_internal  Failed to allocate DEVICE memory "
            "(4294967296 "
            "bytes): memory allocation failed (ret=-12)",
            WE + "RuntimeError: Model warmup failed for prefill bucket 512. Error: nrt_tensor_allocate status=4",
        ),
        "runtime_hbm_oom",
        Phase.WARMUP,
        Verdict.FAIL,
        "failed",
    ),
    (
        "Neuron tensors while serving",
        (
            "INFO:     Application startup complete.",
            "2026-Oct-01 10:00:00.000001 7:7 ERROR  TDRV:dmem_alloc_internal  Failed to allocate DEVICE memory (989952 "
            "bytes): memory allocation failed (ret=-12)",
        ),
        "request_oom",
        Phase.REQUEST,
        Verdict.FAIL,
        "died_after_boot",
    ),
    (
        "SGLang capture",
        (
            "[2025-04-29 16:19:34 TP0] Capture cuda graph begin. This can take up to several minutes. avail mem=5.25 "
            "GB",
            "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total "
            "capacity "
            "of 79.11 GiB of which 500.00 MiB is free.",
        ),
        "graph_capture_oom",
        Phase.GRAPH_CAPTURE,
        Verdict.FAIL,
        "failed",
    ),
    (
        "llama.cpp compute buffers",
        (
            "llama_kv_cache_init:      CUDA0 KV buffer size =   379.23 MiB",
            "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 144.00 MiB on device 4: cudaMalloc failed: out of "
            "memory",
            "ggml_gallocr_reserve_n: failed to allocate CUDA4 buffer of size 150994944",
            "llama_new_context_with_model: failed to allocate compute buffers",
        ),
        "profile_oom",
        Phase.PROFILE,
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
    compiler = read("[NCC_EOOM002] Maximum peak HBM usage of 43.00GB exceeds HBM limit of 24.00GB for Trn2.")
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
