"""Failure signatures of Neuron, SGLang, llama.cpp and Ray, and those that several engines share."""

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
