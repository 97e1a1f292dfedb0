"""Neuron, SGLang, llama.cpp and Ray logs as they are pasted."""

from __future__ import annotations

import pytest

from pytest_kvbudget.verdict import Phase
from tests.ledger.support import GIB, MIB
from tests.ledger.variant import EI, N1, READY, N, R, S, Variant, check, gib

VARIANTS: list[Variant] = [
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
]


@pytest.mark.parametrize("variant", VARIANTS, ids=[variant.name for variant in VARIANTS])
def test_a_variant_is_read_right(variant: Variant) -> None:
    check(variant)
