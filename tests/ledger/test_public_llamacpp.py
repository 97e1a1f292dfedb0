"""llama.cpp, its forks and what wraps it, as people report it."""

from __future__ import annotations

import pytest

from pytest_kvbudget.verdict import Phase
from tests.ledger.support import MIB, read
from tests.ledger.variant import Variant, check

CUDA = "ggml_backend_cuda_buffer_type_alloc_buffer: allocating {} MiB on device {}: cudaMalloc failed: out of memory"
CTX_DOWN, LAYERS_DOWN = ("ctx_size", "lower"), ("n_gpu_layers", "lower")
KV_TYPE = ("cache_type_k", "none")
COMPUTE_DOWN = (("ubatch_size", "lower"), CTX_DOWN)
BUFFERS = "llama_init_from_model: failed to initialize the context: failed to allocate compute pp buffers"


def vulkan(loaded_mib: float) -> tuple[str, ...]:
    """llama.cpp#12817: 3.7 GiB are refused on a card of 8 GiB on which so much was loaded."""
    return (
        "llama_model_load_from_file_impl: using device Vulkan0 (AMD Radeon RX 6600M (RADV)) - 8176 MiB free",
        f"load_tensors:      Vulkan0 model buffer size =  {loaded_mib:.2f} MiB",
        "llama_context: n_ctx         = 8192",
        "ggml_vulkan: Device memory allocation of size 3959422976 failed.",
        "ggml_vulkan: vk::Device::allocateMemory: ErrorOutOfDeviceMemory",
        "ggml_gallocr_reserve_n: failed to allocate Vulkan0 buffer of size 3959422976",
        BUFFERS,
    )


VARIANTS: list[Variant] = [
    Variant(
        "llama.cpp#26297: it tries again with less, and goes on",
        (
            "1.06.520.077 E " + CUDA.format("51748.72", 1),
            "1.06.520.084 E ggml_gallocr_reserve_n_impl: failed to allocate CUDA1 buffer of size 54262464512",
            "1.06.520.086 E graph_reserve: failed to allocate compute buffers",
            "1.06.520.107 W sched_reserve: compute buffer allocation failed, retrying without pipeline parallelism",
            "1.07.304.130 I srv    load_model: initializing, n_slots = 1, n_ctx_slot = 50176, kv_unified = 'false'",
        ),
        "recovered",
        Phase.PROFILE,
        "profile_oom",
        {"tried_alloc_bytes": 54262464512, "device": 1, "n_slots": 1, "n_ctx_slot": 50176},
        turn=COMPUTE_DOWN,
        leave=(KV_TYPE,),
    ),
    Variant(
        "llama.cpp#16748: it tries again with less, in vain",
        (
            CUDA.format("12710.31", 0),
            "ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 13327728640",
            "graph_reserve: failed to allocate compute buffers",
            "llama_context: compute buffer allocation failed, retrying without pipeline parallelism",
            CUDA.format("9000.00", 0),
            BUFFERS,
        ),
        "failed",
        Phase.PROFILE,
        "profile_oom",
        {"tried_alloc_bytes": 13327728640},
        turn=(CTX_DOWN,),
    ),
    Variant(
        "llama.cpp#11476: a shift of the cache, while it serves",
        (
            "svc-1  | " + CUDA.format("9866.00", 1),
            "svc-1  | ggml_gallocr_reserve_n: failed to allocate CUDA1 buffer of size 10345253120",
            "svc-1  | llama_kv_cache_update_impl: failed to allocate compute buffers",
        ),
        "died_after_boot",
        Phase.REQUEST,
        "request_oom",
        {"tried_alloc_bytes": 10345253120, "device": 1},
    ),
    Variant(
        "llama.cpp#13085: the first request",
        (
            "slot update_slots: id  0 | task 0 | new prompt, n_ctx_slot = 65536, n_keep = 0, n_prompt_tokens = 32",
            "CUDA error: out of memory",
            "  current device: 1, in function alloc at ggml-cuda.cu:472",
        ),
        "died_after_boot",
        Phase.REQUEST,
        "request_oom",
        {"n_ctx_slot": 65536, "device": 1},
    ),
    Variant(
        "the same built for ROCm",
        (
            "slot update_slots: id  2 | task 10391 | prompt processing progress, n_tokens = 2048, progress = 0.113",
            "ROCm error: out of memory",
            "  current device: 0, in function alloc at ggml-cuda.cu:450",
        ),
        "died_after_boot",
        Phase.REQUEST,
        "request_oom",
        {"device": 0},
    ),
    Variant(
        "warm-up",
        (
            "0.13.230.736 W common_init_from_params: warming up the model with an empty run - please wait ...",
            "CUDA error: out of memory",
            "  current device: 0, in function alloc at ggml-cuda.cu:450",
        ),
        "failed",
        Phase.WARMUP,
        "warmup_oom",
        {"device": 0},
    ),
    Variant(
        "llama.cpp#18160: the limit of one buffer, in newer words",
        (
            "ggml_vulkan: Requested buffer size exceeds device buffer size limit: ErrorOutOfDeviceMemory",
            "ggml_gallocr_reserve_n_impl: failed to allocate Vulkan0 buffer of size 8753520640",
            BUFFERS,
        ),
        "failed",
        Phase.PROFILE,
        "single_alloc_limit",
        {"tried_alloc_bytes": 8753520640},
        turn=COMPUTE_DOWN,
        leave=(LAYERS_DOWN, KV_TYPE),
    ),
    Variant(
        "llama.cpp#12817: refused below what is free",
        vulkan(260.86),
        "failed",
        Phase.PROFILE,
        "single_alloc_limit",
        {"free_bytes": 8176 * MIB, "tried_alloc_bytes": 3959422976},
        turn=COMPUTE_DOWN,
        leave=(LAYERS_DOWN, KV_TYPE),
    ),
    Variant(
        "what was free before the weights were loaded is not what is free",
        vulkan(6260.86),
        "failed",
        Phase.PROFILE,
        "profile_oom",
        {"tried_alloc_bytes": 3959422976},
        turn=(CTX_DOWN, LAYERS_DOWN),
    ),
    Variant(
        "llama.cpp#8101: a cache in host memory",
        (
            "llama_new_context_with_model: n_ctx      = 1048576",
            "ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 137438953504",
            "llama_kv_cache_init: failed to allocate buffer for kv cache",
        ),
        "failed",
        Phase.KV_ALLOC,
        "kv_alloc_oom",
        {"tried_alloc_bytes": 137438953504, "n_ctx": 1048576},
        turn=(CTX_DOWN,),
    ),
    Variant(
        "the weights, by the exception's own words",
        ("llama_model_load: error loading model: vk::Device::allocateMemory: ErrorOutOfDeviceMemory",),
        "failed",
        Phase.WEIGHTS_LOAD,
        "weights_oom",
        {},
        turn=(LAYERS_DOWN,),
    ),
    Variant(
        "a file that the release does not know is no lack of memory",
        (
            "llama_model_load: error loading model: error loading model architecture: unknown model architecture: 'x'",
            "llama_model_load_from_file_impl: failed to load model",
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "engine_exception",
        {},
        leave=(LAYERS_DOWN,),
    ),
    Variant(
        "RADV's own words",
        (
            "radv/amdgpu: Failed to allocate a buffer:",
            "radv/amdgpu:    size      : 4269813760 bytes",
            "radv/amdgpu:    domains   : 2",
        ),
        "unknown",
        Phase.UNKNOWN,
        "request_oom",
        {"tried_alloc_bytes": 4269813760},
        turn=(CTX_DOWN, LAYERS_DOWN),
    ),
    Variant(
        "llama.cpp#12817: an allocation, and nothing that says of what",
        ("ggml_vulkan: Device memory allocation of size 3959422976 failed.",),
        "unknown",
        Phase.UNKNOWN,
        "request_oom",
        {"tried_alloc_bytes": 3959422976},
        turn=(*COMPUTE_DOWN, LAYERS_DOWN),
    ),
    Variant(
        "an allocation of a context, of what nothing says",
        (
            "ggml_vulkan: Device memory allocation of size 3959422976 failed.",
            "common_init_result: failed to create context with model '/m.gguf'",
        ),
        "failed",
        Phase.UNKNOWN,
        "device_oom",
        {"tried_alloc_bytes": 3959422976},
        turn=(*COMPUTE_DOWN, LAYERS_DOWN),
    ),
    Variant(
        "an allocation of a model, by what could not be loaded",
        (
            "ggml_vulkan: Device memory allocation of size 3959422976 failed.",
            "llama_model_load_from_file_impl: failed to load model",
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "weights_oom",
        {"tried_alloc_bytes": 3959422976},
        turn=(LAYERS_DOWN,),
        leave=(CTX_DOWN,),
    ),
    Variant(
        "a buffer over the limit, of what nothing says",
        (
            "ggml_vulkan: Device memory allocation of size 4200595456 failed.",
            "ggml_vulkan: Requested buffer size exceeds device buffer size limit: ErrorOutOfDeviceMemory",
        ),
        "failed",
        Phase.UNKNOWN,
        "single_alloc_limit",
        {"tried_alloc_bytes": 4200595456},
        turn=(("backend", "none"),),
        leave=(CTX_DOWN, LAYERS_DOWN),
    ),
    Variant(
        "ik_llama.cpp#749: compute buffers, and the KV cache of all devices",
        (
            "llama_kv_cache_init:      CUDA0 KV buffer size =   379.23 MiB",
            "llama_kv_cache_init:     CUDA10 KV buffer size =    16.49 MiB",
            "llama_new_context_with_model: KV self size  = 1005.79 MiB, c^KV (f16): 1005.79 MiB, kv^T (f16):    0.00 "
            "MiB",
            CUDA.format("279356.51", 0),
            "ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 292926534144",
            "llama_new_context_with_model: failed to allocate compute buffers",
        ),
        "failed",
        Phase.PROFILE,
        "profile_oom",
        {"tried_alloc_bytes": 292926534144, "kv_in_use_bytes": round(1005.79 * MIB), "device": 0},
        turn=COMPUTE_DOWN,
        leave=(KV_TYPE,),
    ),
    Variant(
        "llama.cpp#16653: what is asked for does not fit",
        (
            "llama_params_fit_impl: projected to use 410593 MiB of device memory vs. 97017 MiB of free device memory",
            "llama_params_fit_impl: cannot fulfill margin of 1024 MiB on all devices, need to use 316493 MiB less in "
            "total",
        ),
        "booted",
        Phase.ARGUMENT,
        None,
        {"projected_bytes": 410593 * MIB, "free_bytes": 97017 * MIB, "margin_required_bytes": 1024 * MIB},
    ),
    Variant(
        "ollama#7673: the runner is up, and a request takes too much",
        (
            'time=2024-11-17T18:03:24.575-03:00 level=INFO source=server.go:601 msg="llama runner started in 1.76 '
            'seconds"',
            "CUDA error: out of memory",
            "  current device: 0, in function alloc at ggml-cuda.cu:406",
        ),
        "died_after_boot",
        Phase.REQUEST,
        "request_oom",
        {"device": 0},
    ),
    Variant(
        "ollama#8271: it answers",
        (
            "llama_kv_cache_init:      CUDA0 KV buffer size =   896.00 MiB",
            '[GIN] 2024/12/31 - 01:58:01 | 200 |  1.386181264s |       127.0.0.1 | POST     "/api/generate"',
        ),
        "booted",
        Phase.READY,
        None,
        {"kv_in_use_bytes": 896 * MIB},
    ),
    Variant(
        "another page of the server says nothing of the model",
        (
            "llama_kv_cache_init:      CUDA0 KV buffer size =   896.00 MiB",
            '[GIN] 2024/12/31 - 01:58:01 | 200 |  1.386181264s |       127.0.0.1 | POST     "/api/show"',
        ),
        "booted",
        Phase.KV_ALLOC,
        None,
        {"kv_in_use_bytes": 896 * MIB},
    ),
    Variant(
        "ollama#11090: the runner was killed",
        (
            'time=2025-06-27T14:42:08.637Z level=ERROR source=server.go:415 msg="llama runner terminated" '
            'error="signal: killed"',
            'time=2025-06-27T14:42:14.690Z level=INFO source=server.go:153 msg="system memory" total="125.2 GiB" '
            'free="116.6 GiB" free_swap="2.0 GiB"',
        ),
        "failed",
        Phase.UNKNOWN,
        "engine_killed",
        {"host_total_bytes": round(125.2 * 1024 * MIB)},
    ),
    Variant(
        "ollama#10920: refused for want of host memory",
        ("Error: model requires more system memory (164.8 GiB) than is available (13.4 GiB)",),
        "refused",
        Phase.ARGUMENT,
        "host_memory_short",
        {
            "host_mem_available_bytes": round(13.4 * 1024 * MIB),
            "projected_host_bytes": round(164.8 * 1024 * MIB),
        },
        leave=(LAYERS_DOWN,),
    ),
    Variant(
        "Metal",
        (
            "ggml_metal_synchronize: error: command buffer 0 failed with status 5",
            "error: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        ),
        "unknown",
        Phase.UNKNOWN,
        "request_oom",
        {},
    ),
    Variant(
        "llama.cpp#9629: memory that cannot be pinned is taken as it is",
        (
            "ggml_cuda_host_malloc: failed to allocate 1900,00 MiB of pinned memory: invalid argument",
            "llm_load_tensors:      CUDA0 buffer size =  8294.05 MiB",
        ),
        "booted",
        Phase.WEIGHTS_LOAD,
        None,
        {"weights_bytes": round(8294.05 * MIB)},
    ),
    Variant(
        "llama.cpp#9271: a host buffer that Vulkan does not pin",
        (
            "ggml_vulkan: Found 1 Vulkan devices:",
            "llm_load_tensors: ggml ctx size =    0.14 MiB",
            "ggml_vulkan: Failed to allocate pinned memory.",
            "ggml_vulkan: vk::Device::allocateMemory: ErrorOutOfDeviceMemory",
            "llm_load_tensors:    Vulkan0 buffer size =  8137.64 MiB",
        ),
        "booted",
        Phase.WEIGHTS_LOAD,
        None,
        {"weights_bytes": round(8137.64 * MIB)},
    ),
    Variant(
        "a host buffer that Vulkan does not pin, in one line",
        (
            "load_tensors: loading model tensors, this can take a while... (mmap = false)",
            "ggml_vulkan: Failed to allocate pinned memory (vk::Device::allocateMemory: ErrorOutOfDeviceMemory)",
            "load_tensors:      Vulkan0 model buffer size =  8137.64 MiB",
        ),
        "booted",
        Phase.WEIGHTS_LOAD,
        None,
        {"weights_bytes": round(8137.64 * MIB)},
    ),
    Variant(
        "a host buffer that is not pinned, and a device that is full",
        (
            "ggml_vulkan: Failed to allocate pinned memory.",
            "ggml_vulkan: vk::Device::allocateMemory: ErrorOutOfDeviceMemory",
            "ggml_vulkan: Device memory allocation of size 3959422976 failed.",
            "ggml_vulkan: vk::Device::allocateMemory: ErrorOutOfDeviceMemory",
            "ggml_gallocr_reserve_n: failed to allocate Vulkan0 buffer of size 3959422976",
            BUFFERS,
        ),
        "failed",
        Phase.PROFILE,
        "profile_oom",
        {"tried_alloc_bytes": 3959422976},
        turn=(CTX_DOWN,),
    ),
    Variant(
        "llamacpp-rocm#79: the buffers of the weights are there, the next one is not",
        (
            "llama_params_fit: failed to fit params to free device memory: n_gpu_layers already set by user to 9, ab",
            "load_tensors:        ROCm0 model buffer size = 15254.83 MiB",
            CUDA.format("2048.00", 0),
            "alloc_tensor_range: failed to allocate ROCm0 buffer of size 2147483648",
        ),
        "failed",
        Phase.KV_ALLOC,
        "kv_alloc_oom",
        {"tried_alloc_bytes": 2147483648},
        turn=(CTX_DOWN,),
    ),
    Variant(
        "llama.cpp#17583: the driver fails while tensors are copied into their buffers",
        (
            "load_tensors:        ROCm1 model buffer size =  2526.30 MiB",
            "......................ROCm error: context is destroyed",
            "  current device: 1, in function ggml_backend_cuda_buffer_set_tensor at /app/ggml-cuda/ggml-cuda.cu:625",
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "kernel_fault",
        {"device": 1},
    ),
    Variant(
        "llama-cpp-rdna-boosts#33: behind a router, without the lines before",
        (
            "[38327] 2.41.894.173 E ROCm error: out of memory",
            "[38327] 2.41.894.175 E   current device: 0, in function fattn_stage_get at /app/ggml-cuda/common.cuh:1661",
        ),
        "unknown",
        Phase.UNKNOWN,
        "request_oom",
        {"device": 0},
        turn=(LAYERS_DOWN, CTX_DOWN),
    ),
    Variant(
        "llama.cpp#20509: host memory, with the lines of a service",
        (
            "slot get_availabl: id  0 | task -1 | selected slot by LRU, t_last = 71783813801",
            "srv   prompt_save:  - saving prompt with length 28960, total state size = 3462.850 MiB",
            "A process of this unit has been killed by the OOM killer.",
        ),
        "died_after_boot",
        Phase.READY,
        "host_oom_killed",
        {},
    ),
    Variant(
        "ollama#12634: the buffer on the host",
        (
            "load_tensors: loading model tensors, this can take a while... (mmap = false)",
            "ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 437944320",
            "alloc_tensor_range: failed to allocate CPU buffer of size 437944320",
            "llama_model_load: error loading model: unable to allocate CPU buffer",
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "host_memory_short",
        {"tried_alloc_bytes": 437944320},
        turn=(("n_gpu_layers", "raise"),),
        leave=(LAYERS_DOWN,),
    ),
    Variant(
        "llama.cpp#5057: OpenCL",
        (
            "ggml_backend_opencl_buffer_type_alloc_buffer: failed to allocate 1048.51 MiB",
            "llama_model_load: error loading model: failed to allocate buffer",
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "weights_oom",
        {"tried_alloc_bytes": round(1048.51 * MIB)},
        turn=(LAYERS_DOWN,),
    ),
    Variant(
        "ollama#17951: a draft that is only measured",
        (
            "srv    load_model: loading model '/data/m.gguf'",
            "llama_init_from_model: failed to initialize the context: Gemma4Assistant requires ctx_other to be set "
            "(this warning is normal during memory fitting)",
            "main: server is listening on http://127.0.0.1:8080 - starting the main loop",
        ),
        "booted",
        Phase.READY,
        None,
        {},
    ),
    Variant(
        "what a device has, in the list of devices",
        (
            "0.00.228.419 I   - CUDA0   : NVIDIA GeForce RTX 3090 (24123 MiB, 23755 MiB free)",
            "0.00.228.426 I   - CPU     : CPU (31169 MiB, 31169 MiB free)",
            "load_tensors: loading model tensors, this can take a while... (mmap = true)",
        ),
        "booted",
        Phase.WEIGHTS_LOAD,
        None,
        {"total_bytes": 24123 * MIB, "free_bytes": 23755 * MIB},
    ),
    Variant(
        "ollama, killed by somebody",
        ("Error: llama runner process has terminated: signal: killed",),
        "failed",
        Phase.UNKNOWN,
        "engine_killed",
        {},
    ),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=[variant.name for variant in VARIANTS])
def test_a_public_report_of_llama_cpp_is_read(variant: Variant) -> None:
    check(variant)


def test_a_phase_that_no_line_shows_is_not_in_the_sentence() -> None:
    ledger = read("radv/amdgpu:    size      : 4269813760 bytes")
    assert ledger.cause is not None
    assert "weights" not in ledger.cause.sentence


def test_what_reserves_compute_buffers_is_no_profile_run() -> None:
    ledger = read(
        CUDA.format("144.00", 4),
        "ggml_gallocr_reserve_n: failed to allocate CUDA4 buffer of size 150995968",
        "llama_new_context_with_model: failed to allocate compute buffers",
    )
    assert ledger.cause is not None
    assert "compute buffers" in ledger.cause.sentence
    assert "profile run" not in ledger.cause.sentence


@pytest.mark.parametrize(
    ("fitted", "said"),
    [("", False), ("llama_params_fit_impl: projected to use 17422 MiB of device memory vs. 27335 MiB of free", True)],
)
def test_memory_is_called_free_where_a_line_says_so(fitted: str, said: bool) -> None:
    free = fitted and f"{fitted} device memory"
    ledger = read(
        free,
        "ggml_vulkan: Device memory allocation of size 4200595456 failed.",
        "ggml_vulkan: Requested buffer size exceeds device buffer size limit: ErrorOutOfDeviceMemory",
    )
    assert ledger.failure_class == "single_alloc_limit"
    assert ledger.cause is not None
    assert any("memory was free" in lever.why for lever in ledger.cause.levers) is said
