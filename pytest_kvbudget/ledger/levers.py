"""What moves a cause, which way, and what does not: the answers of an expert, per failure class."""

from __future__ import annotations

from typing import Final

import msgspec

from pytest_kvbudget.ledger.model import Direction, Effect, Lever
from pytest_kvbudget.verdict import Phase


def _lever(name: str, direction: Direction, effect: Effect, why: str = "") -> Lever:
    return Lever(name, direction, effect, why)


_UTIL_DOWN = _lever("gpu_memory_utilization", "lower", "helps", "leaves more of the card outside the KV cache")
_UTIL_UP = _lever("gpu_memory_utilization", "raise", "helps", "a larger share of the card goes to the KV cache")
_LEN_DOWN = _lever("max_model_len", "lower", "helps", "one request then needs less KV cache")
_LEN_USELESS = _lever("max_model_len", "lower", "useless", "the pool takes what is left, whatever the window is")

NO_LIMIT: Final = _lever("gpu_memory_utilization", "lower", "useless", "no memory limit was hit")

_HEADROOM_DOWN: Final = _lever(
    "VLLM_NEURON_RESERVED_HEADROOM_GIB", "lower", "helps", "the headroom is taken from the same share"
)
_HEADROOM_UP: Final = _lever(
    "VLLM_NEURON_RESERVED_HEADROOM_GIB", "raise", "harms", "leaves still less for the KV cache"
)
_CAP_UP: Final = _lever(
    "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION", "raise", "helps", "where the cap is less than what the weights leave"
)

_LEVERS: Final[dict[str, tuple[Lever, ...]]] = {
    "argument_rejected": (
        _lever("argument", "none", "helps", "correct or drop what the message names, or use an image that knows it"),
        NO_LIMIT,
    ),
    "command_not_found": (
        _lever("command", "none", "helps", "name the engine's executable, or activate its environment"),
    ),
    "install_broken": (_lever("installation", "none", "helps", "repair the packages that the message names"),),
    "model_not_found": (
        _lever("model", "none", "helps", "a folder that exists here, or a repository that can be reached"),
    ),
    "plan_refused": (
        _lever("model", "none", "helps", "another image or model: the planner does not guess"),
        _lever("max_model_len", "lower", "useless", "the plan was refused before sizes mattered"),
    ),
    "program_load_failed": (
        _lever("compile cache", "clean", "helps", "compile again with the release that loads the program"),
        _lever("Neuron runtime and driver", "none", "helps", "as new as the compiler"),
        _lever("VLLM_NEURON_RESERVED_HEADROOM_GIB", "raise", "useless", "no memory limit was hit"),
    ),
    "parallelism_refused": (
        _lever("tensor_parallel_size", "raise", "helps", "more ranks than KV heads, or a divisor of the heads"),
        _lever("decode_context_parallel_size", "lower", "helps", "1 switches it off"),
    ),
    "port_in_use": (_lever("port", "none", "helps", "another port, or end what listens there"),),
    "startup_free_below_request": (
        _lever("gpu_memory_utilization", "lower", "helps", "at most free / total, rounded down"),
        _lever("device memory", "clean", "helps", "what other processes hold counts against the share"),
        _lever("max_model_len", "lower", "useless", "refused before anything is sized"),
        _lever("kv_cache_memory_bytes", "lower", "useless", "refused before anything is sized"),
        _lever("enforce_eager", "none", "useless", "refused before anything is sized"),
    ),
    "foreign_process_memory": (
        _lever("device memory", "clean", "helps", "find and end what holds it, then boot the same shape again"),
        _lever("gpu_memory_utilization", "lower", "useless", "fits around a stranger, and proves nothing of the shape"),
        _lever("max_model_len", "lower", "useless", "refused before anything is sized"),
    ),
    "devices_busy": (
        _lever(
            "devices", "clean", "helps", "workers of an earlier try still hold them; then boot the same shape again"
        ),
        _lever("gpu_memory_utilization", "lower", "useless", "no memory was asked for yet"),
    ),
    "host_memory_limit": (
        _lever("LimitMEMLOCK", "raise", "helps", "infinity in the unit, or ulimit -l"),
        _lever("LimitNOFILE", "raise", "helps", "leaked descriptors read as out of memory on some releases"),
        _lever("gpu_memory_utilization", "lower", "useless", "host memory is missing, not the card's"),
    ),
    "host_oom_killed": (
        _lever("host memory", "raise", "helps", "more RAM or swap, fewer loaders or compilers at once"),
        _lever("gpu_memory_utilization", "lower", "useless", "host memory ran out, not the card's"),
        _lever("max_model_len", "lower", "useless", "host memory ran out, not the card's"),
    ),
    "host_memory_short": (
        _lever("host memory", "raise", "helps", "more RAM, or less offloaded to it"),
        _lever("gpu_memory_utilization", "lower", "useless", "host memory is missing, not the card's"),
    ),
    "device_oom": (
        _lever("gpu_memory_utilization", "lower", "helps", "where the KV cache or graphs took too much"),
        _lever("max_num_batched_tokens", "lower", "helps", "where activations were too large"),
        _lever("quantization", "none", "helps", "where the weights were too large"),
    ),
    "disk_full": (_lever("disk", "clean", "helps", "or move the cache of models and programs to another"), NO_LIMIT),
    "weights_oom": (
        _lever("tensor_parallel_size", "raise", "helps", "each rank then holds less of the model"),
        _lever("quantization", "none", "helps", "smaller weights"),
        _lever("cpu_offload_gb", "raise", "helps", "weights move to the host"),
        _lever("max_model_len", "lower", "useless", "no KV cache exists yet"),
        _lever("kv_cache_memory_bytes", "lower", "useless", "no KV cache exists yet"),
    ),
    "profile_oom": (
        _lever("max_num_batched_tokens", "lower", "helps", "the profile run's activations scale with it"),
        _lever("max_num_seqs", "lower", "helps", "the sampler's buffers scale with it"),
        _lever("max_model_len", "lower", "useless", "the profile run is not as long as the window"),
    ),
    "profile_disturbed": (
        _lever("device memory", "clean", "helps", "wait until it is stable, then boot the same shape again"),
        _lever("gpu_memory_utilization", "lower", "useless", "this says nothing about the shape"),
    ),
    "kv_budget_nonpositive": (
        _UTIL_UP,
        _lever("max_num_batched_tokens", "lower", "helps", "less activation, more for the KV cache"),
        _lever("cudagraph_capture_sizes", "lower", "helps", "the graph estimate is charged before the KV cache"),
        _lever("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "lower", "helps", "0 charges no estimate of graphs at all"),
        _LEN_USELESS,
    ),
    "kv_check_short": (
        _LEN_DOWN,
        _UTIL_UP,
        _lever("kv_cache_memory_bytes", "raise", "helps", "where the pool is pinned, it is the pool"),
        _lever("kv_cache_dtype", "none", "helps", "fp8 halves the bytes per token"),
        _lever("max_num_seqs", "lower", "useless", "the check is about one request"),
    ),
    "kv_reserve_underpriced": (
        _lever("kv_cache_memory_bytes", "raise", "helps", "a pinned pool is not capped at the plan's reserve"),
        _lever("registry B/token", "raise", "helps", "the price in the image is too low for this model"),
        _lever(
            "max_model_len", "lower", "useless", "the reserve shrinks with the window: need and pool keep their ratio"
        ),
        _lever("enforce_eager", "none", "useless", "what graphs free goes to the expert cache"),
        _lever("gpu_memory_utilization", "raise", "useless", "what it frees goes to the expert cache"),
    ),
    "min_kv_budget": (
        _UTIL_UP,
        _HEADROOM_DOWN,
        _CAP_UP,
        _lever("tensor_parallel_size", "raise", "helps", "less weight per core"),
        _HEADROOM_UP,
        _LEN_USELESS,
    ),
    "max_num_seqs_exceeds_state": (
        _lever("max_num_seqs", "lower", "helps", "each sequence needs a state block"),
        _lever("gpu_memory_utilization", "raise", "helps", "more state blocks"),
        _lever("max_model_len", "lower", "useless", "state does not depend on the window"),
    ),
    "kv_alloc_oom": (
        _lever("kv_cache_memory_bytes", "lower", "helps", "the pool asked for is larger than what is free"),
        _lever("gpu_memory_utilization", "lower", "helps", "where the pool is not pinned"),
        _lever("max_model_len", "lower", "useless", "a pinned pool keeps its size"),
    ),
    "single_alloc_limit": (_lever("backend", "none", "helps", "another one, or buffers split into smaller ones"),),
    "compile_hbm_exceeded": (
        _lever(
            "VLLM_NEURON_RESERVED_HEADROOM_GIB", "raise", "helps", "leaves more for the program, less for the KV cache"
        ),
        _lever("VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION", "lower", "helps", "the same in default mode"),
        _lever("tensor_parallel_size", "raise", "helps", "where weights alone are over the limit"),
        _lever("gpu_memory_utilization", "raise", "harms", "a larger KV cache makes the program larger"),
    ),
    "compile_failed": (
        _lever("compiler", "none", "helps", "read the compiler's own log"),
        _lever("compile cache", "clean", "helps", "it keeps programs that failed: --retry_failed_compilation"),
        _lever("VLLM_NEURON_RESERVED_HEADROOM_GIB", "raise", "useless", "no memory limit was hit"),
    ),
    "compile_desync": (
        _lever("compile cache", "none", "helps", "start again with the cache that is now warm"),
        _lever("VLLM_NEURON_RESERVED_HEADROOM_GIB", "raise", "useless", "no memory limit was hit"),
    ),
    "runtime_hbm_oom": (
        _lever("tensor_parallel_size", "raise", "helps", "each core then holds less"),
        _lever("VLLM_NEURON_RESERVED_HEADROOM_GIB", "raise", "helps", "programs need room beside the KV cache"),
        _lever("VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION", "lower", "helps", "the same in default mode"),
        _lever("gpu_memory_utilization", "raise", "harms", "a larger KV cache leaves less for programs"),
    ),
    "compile_cache_miss": (
        _lever("compile cache", "none", "helps", "compile this very shape first, or share the cache that has it"),
        _lever("VLLM_NEURON_DISABLE_WARMUP_COMPILE", "lower", "helps", "0 compiles what is missing"),
        _lever("VLLM_NEURON_RESERVED_HEADROOM_GIB", "raise", "useless", "every KV shape is a program of its own"),
    ),
    "lnc_mismatch": (
        _lever("NEURON_LOGICAL_NC_CONFIG", "none", "helps", "must be what the program was compiled with"),
        _lever("VLLM_NEURON_RESERVED_HEADROOM_GIB", "raise", "useless", "no memory limit was hit"),
    ),
    "profiler_reserve": (_lever("NEURON_RT_INSPECT_DEVICE_PROFILE", "none", "helps", "switch device profiling off"),),
    "device_resource_exhausted": (
        _lever("num_batched_tokens_buckets", "lower", "helps", "fewer programs are loaded at once"),
        _lever("VLLM_NEURON_RESERVED_HEADROOM_GIB", "raise", "useless", "events ran out, not memory"),
    ),
    "graph_capture_oom": (
        _UTIL_DOWN,
        _lever("cudagraph_capture_sizes", "lower", "helps", "fewer graphs take less"),
        _lever("enforce_eager", "none", "helps", "no graphs at all, at the price of speed"),
        _lever("kv_cache_memory_bytes", "lower", "helps", "where the pool is pinned"),
        _lever("gpu_memory_utilization", "raise", "harms", "leaves still less for the capture"),
        _lever("max_model_len", "lower", "useless", "the pool takes what is left, whatever the window is"),
    ),
    "warmup_oom": (
        _lever("max_num_seqs", "lower", "helps", "the sampler's logits scale with it and the vocabulary"),
        _UTIL_DOWN,
        _lever("gpu_memory_utilization", "raise", "harms", "leaves still less for warm-up"),
        _LEN_USELESS,
    ),
    "request_oom": (
        _UTIL_DOWN,
        _lever("kv_cache_memory_bytes", "lower", "helps", "where the pool is pinned"),
        _lever("max_num_batched_tokens", "lower", "helps", "a prefill step's activations scale with it"),
        _lever("gpu_memory_utilization", "raise", "harms", "leaves still less outside the KV cache"),
        _LEN_USELESS,
    ),
    "workspace_locked": (
        _lever("VLLM release", "none", "helps", "a defect of the engine: warm-up did not cover a real request"),
        _lever("enforce_eager", "none", "helps", "the published way round, at the price of speed"),
        _lever("gpu_memory_utilization", "lower", "useless", "memory was free"),
        _lever("max_model_len", "lower", "useless", "memory was free"),
    ),
    "request_starved": (
        _lever("kv_cache_memory_bytes", "raise", "helps", "the pool must hold the largest request"),
        _LEN_DOWN,
        _lever("max_num_seqs", "lower", "useless", "the first request does not fit alone"),
    ),
    "engine_killed": (
        _lever(
            "gpu_memory_utilization", "lower", "useless", "nothing says that memory ran out; look in the kernel log"
        ),
    ),
    "engine_hung": (
        _lever("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "raise", "helps", "if a step takes that long"),
        _lever("gpu_memory_utilization", "lower", "useless", "nothing says that memory ran out"),
    ),
    "ready_timeout": (_lever("VLLM_ENGINE_READY_TIMEOUT_S", "raise", "helps", "if it was still making progress"),),
    "kernel_fault": (
        _lever("engine release", "none", "helps", "a fault in a kernel, not a lack of memory"),
        _lever("max_model_len", "lower", "useless", "memory did not run out"),
        _lever("gpu_memory_utilization", "lower", "useless", "memory did not run out"),
    ),
    "device_fault": (_lever("device", "clean", "helps", "reset it, or use another; the shape is not the cause"),),
    "device_stats_unusable": (_lever("device", "clean", "helps", "reset it; the shape is not the cause"),),
    "device_missing": (_lever("devices", "none", "helps", "driver, container flags and permissions"),),
}

_SGLANG_OOM: Final[dict[str, tuple[Lever, ...]]] = {
    name: (
        _lever("mem_fraction_static", "lower", "helps", "leaves more of the card outside weights and KV cache"),
        _lever("chunked_prefill_size", "lower", "helps", "a prefill step then needs less"),
        _lever("mem_fraction_static", "raise", "harms", "leaves still less outside the pool"),
    )
    for name in ("request_oom", "warmup_oom")
}
_SGLANG: Final[dict[str, tuple[Lever, ...]]] = _SGLANG_OOM | {
    "graph_capture_oom": (
        _lever("mem_fraction_static", "lower", "helps", "leaves more of the card outside weights and KV cache"),
        _lever("cuda_graph_max_bs", "lower", "helps", "fewer graphs take less"),
        _lever("disable_cuda_graph", "none", "helps", "no graphs at all, at the price of speed"),
        _lever("mem_fraction_static", "raise", "harms", "leaves still less for the capture"),
        _lever("context_length", "lower", "useless", "the pool takes what is left, whatever the window is"),
    ),
    "weights_oom": (
        _lever("tp_size", "raise", "helps", "each rank then holds less of the model"),
        _lever("quantization", "none", "helps", "smaller weights"),
        _lever("cpu_offload_gb", "raise", "helps", "weights move to the host"),
        _lever("mem_fraction_static", "lower", "useless", "no KV cache exists yet"),
        _lever("context_length", "lower", "useless", "no KV cache exists yet"),
    ),
    "kv_alloc_oom": (
        _lever("mem_fraction_static", "lower", "helps", "a smaller pool is asked for"),
        _lever("max_total_tokens", "lower", "helps", "it sizes the pool where it is less than what is profiled"),
        _lever("mem_fraction_static", "raise", "harms", "a larger pool is asked for"),
        _lever("context_length", "lower", "useless", "the pool takes what is left, whatever the window is"),
    ),
    "kv_budget_nonpositive": (
        _lever("mem_fraction_static", "raise", "helps", "a larger share goes to the KV cache"),
        _lever("tp_size", "raise", "helps", "each rank then holds less of the model"),
        _lever("quantization", "none", "helps", "smaller weights"),
        _lever("mem_fraction_static", "lower", "harms", "leaves still less for the KV cache"),
        _lever("context_length", "lower", "useless", "the pool takes what is left, whatever the window is"),
    ),
    "token_pool_full": (
        _lever("max_running_requests", "lower", "helps", "fewer requests share the pool"),
        _lever("chunked_prefill_size", "lower", "helps", "a prefill step then asks for fewer tokens of the pool"),
        _lever("mem_fraction_static", "raise", "helps", "a larger pool, where the card has room"),
        _lever("mem_fraction_static", "lower", "harms", "the pool of tokens is full, not the card"),
    ),
    "workspace_locked": (
        _lever("SGLANG_FLASHINFER_WORKSPACE_SIZE", "raise", "helps", "the workspace has a fixed size"),
        _lever("chunked_prefill_size", "lower", "helps", "a step then needs less workspace"),
        _lever("attention_backend", "none", "helps", "another one has no such workspace"),
        _lever("mem_fraction_static", "lower", "useless", "memory of the card was free"),
    ),
    "request_starved": (
        _lever("mem_fraction_static", "raise", "helps", "the pool must hold the largest request"),
        _lever("context_length", "lower", "helps", "one request then needs less KV cache"),
        _lever("max_running_requests", "lower", "useless", "the first request does not fit alone"),
    ),
}

_TORCH: Final = (
    _lever("gpu_memory_utilization", "lower", "helps", "vLLM: leaves more of the card outside the KV cache"),
    _lever("mem_fraction_static", "lower", "helps", "SGLang: leaves more of the card outside the pool"),
    _lever("gpu_memory_utilization", "raise", "harms", "leaves still less outside the pool"),
    _lever("mem_fraction_static", "raise", "harms", "leaves still less outside the pool"),
)

_LLAMA_KV: Final = (
    _lever("ctx_size", "lower", "helps", "the KV cache is allocated for the whole context at once"),
    _lever("cache_type_k", "none", "helps", "a smaller KV type"),
)
_LLAMA_COMPUTE: Final = (
    _lever("ubatch_size", "lower", "helps", "a compute buffer scales with the tokens of a step"),
    _lever("ctx_size", "lower", "helps", "a compute buffer scales with the context that a step attends to"),
)
_ROOMY: Final = (
    _lever("context size", "lower", "useless", "enough memory was free"),
    _lever("gpu layers", "lower", "useless", "enough memory was free"),
)
"""Of one buffer that is too large although there is room for it."""
_LLAMA: Final[dict[str, tuple[Lever, ...]]] = {
    "kv_alloc_oom": (*_LLAMA_KV, _lever("n_gpu_layers", "lower", "helps", "layers stay on the host")),
    "profile_oom": (
        *_LLAMA_COMPUTE,
        _lever("n_gpu_layers", "lower", "helps", "weights that stay on the host leave room for compute buffers"),
    ),
    "device_oom": (
        _lever("n_gpu_layers", "lower", "helps", "layers stay on the host"),
        _lever("ctx_size", "lower", "helps", "where KV cache or compute buffers were too large"),
        _lever("ubatch_size", "lower", "helps", "where compute buffers were too large"),
        _lever("quantization", "none", "helps", "where the weights were too large"),
    ),
    "weights_oom": (
        _lever("n_gpu_layers", "lower", "helps", "layers stay on the host"),
        _lever("quantization", "none", "helps", "smaller weights"),
        _lever("ctx_size", "lower", "useless", "no KV cache exists yet"),
    ),
    "host_memory_short": (
        _lever("host memory", "raise", "helps", "more RAM"),
        _lever("n_gpu_layers", "raise", "helps", "less stays on the host"),
        _lever("n_gpu_layers", "lower", "harms", "still more stays on the host"),
    ),
    "request_oom": (
        _lever("n_gpu_layers", "lower", "helps", "layers stay on the host"),
        _lever("ctx_size", "lower", "helps", "a smaller KV cache leaves room for what a batch takes"),
        _lever("ubatch_size", "lower", "helps", "a batch then takes less"),
    ),
}

_NAMES: Final[dict[str, dict[str, str]]] = {
    "sglang": {
        "gpu_memory_utilization": "mem_fraction_static",
        "kv_cache_memory_bytes": "max_total_tokens",
        "max_model_len": "context_length",
        "max_num_seqs": "max_running_requests",
        "max_num_batched_tokens": "chunked_prefill_size",
        "tensor_parallel_size": "tp_size",
        "enforce_eager": "disable_cuda_graph",
    },
    "llama.cpp": {"gpu_memory_utilization": "", "max_model_len": "ctx_size"},
}
"""vLLM's settings as another engine calls them; nothing where it has no such setting."""

_VLLM: Final[dict[str, tuple[Lever, ...]]] = {
    "compile_hbm_exceeded": (
        _lever("max_num_batched_tokens", "lower", "helps", "the program's temporaries scale with it"),
        _lever("max_num_seqs", "lower", "helps", "the program's temporaries scale with it"),
        _lever("gpu_memory_utilization", "lower", "helps", "where the KV cache is an argument of the program"),
        _lever("tensor_parallel_size", "raise", "helps", "where weights alone are over the limit"),
        _lever("gpu_memory_utilization", "raise", "harms", "a larger KV cache leaves less for the program"),
    ),
    "compile_failed": (_lever("compiler", "none", "helps", "read its message; no memory of the device ran out"),),
}
"""TPU."""

_NEURON: Final[dict[str, tuple[Lever, ...]]] = {
    "parallelism_refused": (
        _lever("tensor_parallel_size", "none", "helps", "a number of cores that the message names"),
        _lever("VLLM_NEURON_RESERVED_HEADROOM_GIB", "raise", "useless", "no memory limit was hit"),
    ),
    "kv_check_short": (
        _LEN_DOWN,
        _HEADROOM_DOWN,
        _CAP_UP,
        _UTIL_UP,
        _lever("tensor_parallel_size", "raise", "helps", "less weight and less KV cache per core"),
        _HEADROOM_UP,
        _lever("max_num_seqs", "lower", "useless", "the check is about one request"),
    ),
    "kv_budget_nonpositive": (
        _UTIL_UP,
        _HEADROOM_DOWN,
        _lever("tensor_parallel_size", "raise", "helps", "less weight per core"),
        _HEADROOM_UP,
        _LEN_USELESS,
    ),
    "request_oom": (
        _lever("max_num_seqs", "lower", "helps", "state and scratchpad scale with the batch"),
        _lever("gpu_memory_utilization", "lower", "helps", "a smaller KV cache leaves room"),
        _lever("VLLM_NEURON_RESERVED_HEADROOM_GIB", "raise", "helps", "room beside the KV cache"),
        _lever("gpu_memory_utilization", "raise", "harms", "leaves still less beside the KV cache"),
    ),
}

_NEURON_WEIGHTS: Final = (
    _lever("tensor_parallel_size", "raise", "helps", "each core then holds less of the model"),
    _lever("quantization", "none", "helps", "smaller weights"),
    _lever("VLLM_NEURON_RESERVED_HEADROOM_GIB", "raise", "useless", "no KV cache exists yet"),
    _lever("scratchpad and DMA rings", "lower", "useless", "weights fill the memory"),
)


SHARED_MEMORY: Final = (
    _lever("shm_size", "raise", "helps", "docker's --shm-size or --ipc=host, a memory-backed /dev/shm in Kubernetes"),
    _lever("gpu_memory_utilization", "lower", "useless", "shared memory of the host is missing, not the card's"),
    _lever("max_model_len", "lower", "useless", "shared memory of the host is missing, not the card's"),
)
"""Of a host whose /dev/shm is full."""

PLAN_CAPPED: Final = (
    _lever("kv_cache_memory_bytes", "raise", "helps", "a pinned pool is not capped at the plan's reserve"),
    _lever("plan overhead", "raise", "helps", "what is measured above the planned figure is taken from the KV cache"),
    _lever("max_model_len", "lower", "useless", "the plan's reserve, which caps the pool, shrinks with the window"),
    _lever("gpu_memory_utilization", "raise", "useless", "what it frees goes to the expert cache"),
    _lever("enforce_eager", "none", "useless", "what graphs free goes to the expert cache"),
)
"""Of a KV cache that an expert plan caps at its own reserve."""

STUCK: Final = (
    _lever("kv_cache_memory_bytes", "raise", "helps", "the pool must hold what the requests that run need"),
    _lever("gpu_memory_utilization", "raise", "helps", "a larger share of the card goes to the KV cache"),
    _lever("max_num_seqs", "lower", "helps", "fewer requests then share the pool"),
    _lever("max_model_len", "lower", "useless", "the pool keeps its size, and the requests theirs"),
)
"""Of requests of vLLM that run and get nothing, because the pool that they share is full."""

PLAN_SHORT: Final = (
    _lever("gpu_memory_utilization", "raise", "helps", "within its law; the arena is what the budget leaves"),
    _lever("max_model_len", "lower", "helps", "the plan reserves the KV of one window"),
    _lever("VLLM_CUDAGRAPH_MEM_PER_GRAPH_MB", "lower", "helps", "down to what a boot captured"),
    _lever("expert_resident_layers", "lower", "helps", "they are the floor of the slots"),
    _lever("kv_cache_memory_bytes", "lower", "useless", "a pinned pool is no term of the plan"),
)
"""Of an expert plan that has too few slots (RDNA4 document, sections 1 and 3)."""


def with_own(levers: tuple[Lever, ...], own: Lever) -> tuple[Lever, ...]:
    """The levers with what a refusal is about in front, by its own name."""
    return (own, *(lever for lever in levers if lever.name not in {own.name, "argument"}))


def with_limits(levers: tuple[Lever, ...], limits: dict[tuple[str, str], str]) -> tuple[Lever, ...]:
    """The levers with how far to turn them, by name and direction, in front of the reason."""
    return tuple(
        msgspec.structs.replace(lever, why=f"{limit}; {lever.why}" if lever.why else limit)
        if lever.effect == "helps" and (limit := limits.get((lever.name, lever.direction)))
        else lever
        for lever in levers
    )


_TOO_SMALL: Final = frozenset({"kv_check_short", "kv_budget_nonpositive", "max_num_seqs_exceeds_state"})
_POOL_CLASSES: Final = _TOO_SMALL | {"kv_alloc_oom", "graph_capture_oom", "warmup_oom", "request_oom"}
"""Classes in which the utilization matters because it sizes the pool: too small a one, or too large."""


def levers_for(
    failure_class: str,
    family: str,
    phase: Phase,
    *,
    pinned: bool = False,
    reserved: bool = False,
    fitted: bool = False,
    roomy: bool = False,
    vllm: bool = True,
) -> tuple[Lever, ...]:
    """What moves this cause on this engine, the best first, then what does not and what makes it worse.

    Args:
        failure_class: a word of the vocabulary.
        family: engine family, as `BootLedger.family` names it.
        phase: where the boot ended.
        pinned: the KV cache's bytes are pinned: then the utilization sizes nothing.
        reserved: a Neuron headroom is set: then the engine counts with the whole share, whatever the utilization.
        fitted: the engine looked for a window that fits, and found none.
        roomy: a line states how much memory was free.
        vllm: vLLM runs; else its variables for Neuron turn nothing.
    """
    levers = _levers(failure_class, family, phase)
    if failure_class == "single_alloc_limit":
        # what is too large for one buffer gets smaller by what it is sized by
        sized = {Phase.PROFILE: _LLAMA_COMPUTE, Phase.KV_ALLOC: _LLAMA_KV}.get(phase, _ROOMY if roomy else ())
        levers = (*levers, *sized)
    if family == "neuron" and not vllm:
        levers = tuple(lever for lever in levers if not lever.name.startswith("VLLM_"))
    if reserved:
        levers = _useless(levers, "gpu_memory_utilization", "with a headroom set it is taken as 1")
        levers = _useless(levers, "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION", "with a headroom set there is no cap")
    if fitted:
        levers = _useless(levers, "max_model_len", "no window fits: the engine tried")
    if not pinned or failure_class not in _POOL_CLASSES:
        return levers
    kept = [lever for lever in levers if lever.name not in {"gpu_memory_utilization", "kv_cache_memory_bytes"}]
    direction: Direction = "raise" if failure_class in _TOO_SMALL else "lower"
    pool = _lever("kv_cache_memory_bytes", direction, "helps", "the pool is pinned to it")
    useless = _lever("gpu_memory_utilization", direction, "useless", "pinned KV bytes ignore it")
    if failure_class != "max_num_seqs_exceeds_state":
        return (pool, *kept, useless)
    # fewer sequences cost nothing; a larger pool is taken from everybody else
    helping = [lever for lever in kept if lever.effect == "helps"]
    return (*helping, pool, *(lever for lever in kept if lever.effect != "helps"), useless)


def _useless(levers: tuple[Lever, ...], name: str, why: str) -> tuple[Lever, ...]:
    """The levers with one that these settings switch off, after those that help."""
    off = tuple(
        msgspec.structs.replace(lever, effect="useless", why=why)
        for lever in levers
        if lever.name == name and lever.effect != "useless"
    )
    kept = [lever for lever in levers if lever.name != name or lever.effect == "useless"]
    first = next((place for place, lever in enumerate(kept) if lever.effect != "helps"), len(kept))
    return (*kept[:first], *off, *kept[first:])


def _levers(failure_class: str, family: str, phase: Phase) -> tuple[Lever, ...]:
    special = {"vllm": _VLLM, "torch": _VLLM, "sglang": _SGLANG, "llama.cpp": _LLAMA, "neuron": _NEURON}.get(
        family, {}
    ).get(failure_class)
    if special is not None:
        return special
    if family == "torch" and failure_class == "request_oom":
        return _TORCH
    if failure_class == "runtime_hbm_oom" and phase in {Phase.WEIGHTS_LOAD, Phase.UNKNOWN}:
        return _NEURON_WEIGHTS if phase is Phase.WEIGHTS_LOAD else _LEVERS[failure_class]
    levers = _LEVERS.get(failure_class, ())
    names = _NAMES.get(family, {})
    called = (msgspec.structs.replace(lever, name=names.get(lever.name, lever.name)) for lever in levers)
    return tuple(lever for lever in called if lever.name)
