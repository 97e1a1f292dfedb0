"""llama.cpp and its forks: the memory lines of a server's start."""

from __future__ import annotations

from typing import Final

from pytest_kvbudget.ledger.grammar.model import Failure, Row, Table, Tier
from pytest_kvbudget.verdict import Phase, Provenance

_D = Provenance.DERIVED
"""Fitting arithmetic of the engine: proposed, not allocated."""


RETRIED: Final = "retried"
"""The engine tries again with less after an allocation that failed; no failure of its own."""
_HOST: Final = r"(?:CPU(?:_\w+)?|\w+_Host)"
"""Buffers in the host's memory."""
UNPINNED: Final = "unpinned"
"""The host buffer is not pinned, for the reason that the next line gives; it is allocated all the same."""


def _fails(failure_class: str, phase: Phase | None = None, tier: Tier = Tier.ROOT, *, soft: bool = False) -> Failure:
    return Failure(failure_class=failure_class, phase=phase, tier=tier, soft=soft)


BOOT: Final = (
    Row(pattern=r"llama_server: initializing", phase=Phase.ARGUMENT, scope="api", event="start"),
    Row(pattern=r"load_model: loading model ", phase=Phase.WEIGHTS_LOAD),
    Row(
        pattern=r"params_fit_impl: projected to use {projected_bytes:mib}",
        needle="params_fit_impl: projected to use",
        phase=Phase.ARGUMENT,
        then=Phase.WEIGHTS_LOAD,
        provenance=_D,
        parts=(r"vs\. {free_bytes:mib} of free device memory", r"vs\. {host_total_bytes:mib} of total host memory"),
    ),
    Row(
        pattern=r"params_fit_impl: will leave {margin_left_bytes:mib_bare}(?: MiB)? [<>]=? {margin_required_bytes:mib}",
        needle="params_fit_impl: will leave",
        phase=Phase.ARGUMENT,
        then=Phase.WEIGHTS_LOAD,
        provenance=_D,
    ),
    Row(
        pattern=r"params_fit_impl: cannot meet free memory target of {margin_required_bytes:mib}",
        needle="cannot meet free memory target of",
        phase=Phase.ARGUMENT,
        then=Phase.WEIGHTS_LOAD,
        provenance=_D,
        parts=(r"need to reduce device memory by {margin_short_bytes:mib}",),
    ),
    Row(
        pattern=r"params_fit_impl: cannot fulfill margin of {margin_required_bytes:mib}",
        needle="cannot fulfill margin of",
        phase=Phase.ARGUMENT,
        then=Phase.WEIGHTS_LOAD,
        provenance=_D,
    ),
    Row(
        pattern=r"fit(?:_params)?: successfully fit params",
        needle="successfully fit params",
        phase=Phase.ARGUMENT,
        then=Phase.WEIGHTS_LOAD,
        provenance=_D,
    ),
    Row(pattern=r"load_tensors: loading model tensors", phase=Phase.WEIGHTS_LOAD),
    Row(
        pattern=r"using device {place:word} \(.*\) - {free_bytes:mib} free",
        needle="using device ",
        phase=Phase.ARGUMENT,
        then=Phase.WEIGHTS_LOAD,
    ),
    Row(
        pattern=r"- (?!CPU\b|RPC|BLAS){place:word}\s*: .*\({total_bytes:mib}, {free_bytes:mib} free\)",
        needle=" MiB free)",
        releases="device_info",
    ),
    Row(
        pattern=r"memory reporting free: {free_bytes:bytes} total: {total_bytes:bytes}",
        releases="Windows",
    ),
    Row(pattern=r"\bDevice \d+: .*, VRAM: {total_bytes:mib}", needle=", VRAM: "),
    Row(pattern=r"current device: {device:count}, in function ", needle="current device: "),
    Row(
        pattern=r"load_tensors:\s+{place:word}(?: model)? buffer size =\s+{weights_bytes:size}",
        needle=" buffer size =",
        phase=Phase.WEIGHTS_LOAD,
    ),
    Row(
        pattern=r"(?:llama_context|llama_new_context_with_model|llama_init_from_model): n_ctx\s+= {n_ctx:count}",
        needle=": n_ctx",
        phase=Phase.KV_ALLOC,
    ),
    # of all devices together
    Row(pattern=r"KV self size  =\s+{kv_in_use_bytes:size}", phase=Phase.KV_ALLOC),
    Row(
        pattern=r"\s{place:word} KV buffer size =\s+{kv_in_use_bytes:size}",
        needle=" KV buffer size =",
        phase=Phase.KV_ALLOC,
    ),
    Row(
        pattern=r"\s{place:word} compute buffer size =\s+{peak_activation_bytes:size}",
        needle=" compute buffer size =",
        phase=Phase.PROFILE,
        then=Phase.WARMUP,
    ),
    Row(pattern=r"n_slots = {n_slots:count}", phase=Phase.WARMUP, parts=(r"n_ctx_slot = {n_ctx_slot:count}\b",)),
    Row(pattern=r"warming up the model with an empty run", phase=Phase.WARMUP),
    Row(pattern=r"llama_server: model loaded|main: model loaded", needle=": model loaded", phase=Phase.WARMUP),
    Row(
        pattern=r"(?:llama_server: |server is |main: server is )listening on ",
        needle="listening on ",
        phase=Phase.READY,
        event="served",
    ),
    Row(pattern=r"\"system memory\" total=\"{host_total_bytes:size}\"", needle="system memory", releases="ollama"),
    Row(
        pattern=r"llama runner started in \d",
        needle="llama runner started in ",
        phase=Phase.READY,
        event="served",
        releases="ollama",
    ),
    *(
        Row(
            pattern=rf"\| 200 \|.*{said}",
            needle=said,
            event="alive",
            releases="ollama",
            known=False,
        )
        for said in ('POST     "/api/generate"', 'POST     "/v1/chat/completions"')
    ),
    *(
        Row(
            pattern=rf"{name}: id\s+\d+ ",
            needle=f"{name}: id",
            event="alive",
            parts=(r"n_ctx_slot = {n_ctx_slot:count}\b",),
        )
        for name in ("launch_slot_", "update_slots", "print_timing", "process_toke", "get_availabl")
    ),
    Row(pattern=r"cleaning up before exit", event="stopping"),
)

FAILURES: Final = (
    Row(
        pattern=r"^error: invalid argument: ",
        needle="error: invalid argument: ",
        scope="api",
        failure=_fails("argument_rejected", Phase.ARGUMENT),
    ),
    Row(pattern=r"couldn't bind HTTP server socket", scope="api", failure=_fails("port_in_use")),
    Row(pattern=r"exiting due to HTTP server error", scope="api", failure=_fails("unexplained", None, Tier.WRAPPER)),
    Row(
        pattern=r"(?:gguf_init_from_file|llama_model_load\w*|load_model): failed to open",
        needle="failed to open",
        failure=_fails("model_not_found", Phase.WEIGHTS_LOAD),
    ),
    Row(
        pattern=r"allocating {tried_alloc_bytes:size} on device {device:count}: \w+ failed: out of memory",
        needle=": out of memory",
        failure=_fails("ggml_oom"),
    ),
    Row(
        pattern=r"ggml_gallocr_reserve_n\w*: failed to allocate",
        needle="ggml_gallocr_reserve_n",
        failure=_fails("profile_oom", Phase.PROFILE, Tier.KILLED),
    ),
    Row(
        pattern=r"_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size {tried_alloc_bytes:bytes}",
        needle="_cpu_buffer_type_alloc_buffer: ",
        failure=_fails("ggml_host_oom"),
    ),
    Row(
        pattern=rf"(?<!cpu_buffer_type_alloc_buffer: )failed to allocate (?!{_HOST} )(?:\w+ )?"
        r"buffer of size {tried_alloc_bytes:bytes}",
        needle=" buffer of size ",
        failure=_fails("ggml_oom"),
    ),
    Row(
        pattern=rf"failed to allocate {_HOST} buffer of size {{tried_alloc_bytes:bytes}}",
        needle=" buffer of size ",
        failure=_fails("ggml_host_oom"),
    ),
    Row(
        pattern=r"_buffer_type_alloc_buffer: failed to allocate {tried_alloc_bytes:mib}",
        needle="_buffer_type_alloc_buffer: failed to allocate ",
        failure=_fails("ggml_oom"),
    ),
    Row(
        pattern=r"error loading model: failed to allocate buffer",
        needle="error loading model",
        failure=_fails("weights_oom", Phase.WEIGHTS_LOAD, Tier.KILLED),
    ),
    Row(
        pattern=r"[Dd]evice memory allocation of size {tried_alloc_bytes:bytes} failed",
        needle="emory allocation of size ",
        failure=_fails("ggml_vulkan_oom"),
    ),
    Row(
        pattern=r"error loading model: .*ErrorOutOfDeviceMemory",
        needle="error loading model: ",
        failure=_fails("weights_oom", Phase.WEIGHTS_LOAD, Tier.KILLED),
    ),
    Row(
        pattern=r"ggml_vulkan: Failed to allocate pinned memory\.",
        failure=_fails(UNPINNED, None, Tier.KILLED, soft=True),
    ),
    Row(
        pattern=r"(?<!pinned memory \(vk::Device::allocateMemory: )ErrorOutOfDeviceMemory",
        needle="ErrorOutOfDeviceMemory",
        failure=_fails("ggml_oom", None, Tier.KILLED),
    ),
    Row(
        pattern=r"(?<!pinned memory \(vk::Device::allocateMemory: )ErrorOutOfHostMemory",
        needle="ErrorOutOfHostMemory",
        failure=_fails("host_memory_short"),
    ),
    Row(
        pattern=r"radv/amdgpu:\s+size\s+: {tried_alloc_bytes:bytes} bytes",
        needle="radv/amdgpu: ",
        failure=_fails("ggml_oom", None, Tier.KILLED),
    ),
    Row(pattern=r"kIOGPUCommandBufferCallbackErrorOutOfMemory", failure=_fails("oom")),
    Row(
        pattern=r"error loading model(?: \w+)*: "
        r"(?!.*(?:unable to allocate|OutOf|out of memory|failed to alloc|bad_alloc))",
        needle="error loading model",
        failure=_fails("engine_exception", Phase.WEIGHTS_LOAD, Tier.KILLED),
    ),
    Row(
        pattern=r"compute buffer allocation failed, retrying without pipeline parallelism",
        failure=_fails(RETRIED, Phase.PROFILE, Tier.KILLED, soft=True),
    ),
    Row(
        pattern=r"(?:exceeds|larger than) (?:the )?(?:maxMemoryAllocationSize|max(?:imum)? allocation size)",
        needle="llocation",
        failure=_fails("single_alloc_limit"),
    ),
    Row(
        pattern=r"GGML_ASSERT\(.*\) failed",
        needle="GGML_ASSERT(",
        failure=_fails("engine_exception", None, Tier.KILLED),
    ),
    *(
        Row(pattern=pattern, failure=_fails("device_fault", None, Tier.KILLED))
        for pattern in (r"ErrorDeviceLost", r"VK_ERROR_DEVICE_LOST")
    ),
    *(
        Row(pattern=pattern, failure=_fails("single_alloc_limit"))
        for pattern in (r"exceeds device memory allocation limit", r"exceeds device buffer size limit")
    ),
    Row(pattern=r"failed to allocate buffer for kv cache", failure=_fails("kv_alloc_oom", Phase.KV_ALLOC, Tier.KILLED)),
    Row(
        pattern=r"llama_kv_cache_update_impl: failed to allocate compute",
        failure=_fails("request_oom", Phase.REQUEST, Tier.KILLED),
    ),
    Row(
        pattern=r"(?<!update_impl: )failed to allocate compute (?:pp |tg )?buffers",
        needle="failed to allocate compute ",
        failure=_fails("profile_oom", Phase.PROFILE, Tier.KILLED),
    ),
    Row(
        pattern=rf"unable to allocate (?!{_HOST} )\S+ buffer",
        needle="unable to allocate ",
        failure=_fails("weights_oom", Phase.WEIGHTS_LOAD, Tier.KILLED),
    ),
    Row(
        pattern=rf"unable to allocate {_HOST} buffer",
        needle="unable to allocate ",
        failure=_fails("host_memory_short", Phase.WEIGHTS_LOAD, Tier.KILLED),
    ),
    *(
        Row(pattern=pattern, needle=needle, failure=_fails("engine_killed", None, Tier.DEATH), releases="ollama")
        for pattern, needle in (
            (r"llama runner process has terminated: signal: killed", "llama runner process has terminated: "),
            (r"\"llama runner terminated\" error=\"signal: killed\"", "llama runner terminated"),
        )
    ),
    Row(
        pattern=r"\"llama runner terminated\" error=\"(?!signal: killed)",
        needle="llama runner terminated",
        failure=_fails("unexplained", None, Tier.WRAPPER),
        releases="ollama",
    ),
    Row(
        pattern=r"model requires more system memory \({projected_host_bytes:size}\) "
        r"than is available \({host_mem_available_bytes:size}\)",
        needle="model requires more system memory",
        failure=_fails("host_memory_short", Phase.ARGUMENT),
        releases="ollama",
    ),
    Row(
        pattern=r"llama runner process (?:has terminated|no longer running): (?!signal: killed)",
        needle="llama runner process ",
        failure=_fails("unexplained", None, Tier.WRAPPER),
        releases="ollama",
    ),
    Row(
        pattern=r"failed to load model|failed to create context with model|"
        r"failed to initialize the context(?!.*this warning is normal)",
        needle="failed to ",
        failure=_fails("unexplained", None, Tier.WRAPPER),
    ),
)

ORDER: Final = (
    Phase.UNKNOWN,
    Phase.ARGUMENT,
    Phase.WORKER_INIT,
    Phase.WEIGHTS_LOAD,
    Phase.KV_CHECK,
    Phase.KV_ALLOC,
    Phase.PROFILE,
    Phase.COMPILE,
    Phase.MODEL_LOAD,
    Phase.GRAPH_CAPTURE,
    Phase.WARMUP,
    Phase.READY,
    Phase.REQUEST,
    Phase.SHUTDOWN,
)

TABLE: Final = Table(family="llama.cpp", rows=(*BOOT, *FAILURES), order=ORDER)
