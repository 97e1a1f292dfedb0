"""llama.cpp and its forks: the memory lines of a server's start."""

from __future__ import annotations

from typing import Final

from pytest_kvbudget.ledger.grammar.model import Failure, Row, Table, Tier
from pytest_kvbudget.verdict import Phase, Provenance

_D = Provenance.DERIVED
"""Fitting arithmetic of the engine: proposed, not allocated."""


def _fails(failure_class: str, phase: Phase | None = None, tier: Tier = Tier.ROOT) -> Failure:
    return Failure(failure_class=failure_class, phase=phase, tier=tier)


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
        pattern=r"fit(?:_params)?: successfully fit params",
        needle="successfully fit params",
        phase=Phase.ARGUMENT,
        then=Phase.WEIGHTS_LOAD,
        provenance=_D,
    ),
    Row(pattern=r"load_tensors: loading model tensors", phase=Phase.WEIGHTS_LOAD),
    Row(
        pattern=r"load_tensors:\s+{place:word}(?: model)? buffer size =\s+{weights_bytes:size}",
        needle=" buffer size =",
        phase=Phase.WEIGHTS_LOAD,
        then=Phase.KV_ALLOC,
    ),
    Row(pattern=r"llama_context: n_ctx\s+= {n_ctx:count}", needle="llama_context: n_ctx", phase=Phase.KV_ALLOC),
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
    Row(pattern=r"launch_slot_: id\s+\d+ ", needle="launch_slot_: id", event="alive"),
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
        pattern=r"failed to allocate \w+ buffer of size {tried_alloc_bytes:bytes}",
        needle=" buffer of size ",
        failure=_fails("ggml_oom"),
    ),
    Row(
        pattern=r"[Dd]evice memory allocation of size {tried_alloc_bytes:bytes} failed",
        needle="emory allocation of size ",
        failure=_fails("ggml_vulkan_oom"),
    ),
    Row(pattern=r"ErrorOutOfDeviceMemory", failure=_fails("ggml_oom", None, Tier.KILLED)),
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
    Row(pattern=r"exceeds device memory allocation limit", failure=_fails("single_alloc_limit")),
    Row(pattern=r"failed to allocate buffer for kv cache", failure=_fails("kv_alloc_oom", Phase.KV_ALLOC, Tier.KILLED)),
    Row(
        pattern=r"failed to allocate compute (?:pp |tg )?buffers",
        needle="failed to allocate compute ",
        failure=_fails("profile_oom", Phase.PROFILE, Tier.KILLED),
    ),
    Row(
        pattern=r"unable to allocate \S+ buffer",
        needle="unable to allocate ",
        failure=_fails("weights_oom", Phase.WEIGHTS_LOAD, Tier.KILLED),
    ),
    Row(
        pattern=r"failed to load model|failed to create context with model|failed to initialize the context",
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
