"""SGLang: the memory lines of a boot. Its ``GB`` is 2^30."""

from __future__ import annotations

from typing import Final

from pytest_kvbudget.ledger.grammar.model import Failure, Row, Table, Tier
from pytest_kvbudget.verdict import Phase, Provenance

_C = Provenance.CONFIGURED

ROWS: Final = (
    Row(
        pattern=r"server_args=ServerArgs\(",
        phase=Phase.ARGUMENT,
        scope="api",
        event="start",
        provenance=_C,
        parts=(
            r"\bmem_fraction_static={mem_fraction_static:fraction}\b",
            r"\btp_size={tensor_parallel_size:count}\b",
            r"\bcontext_length={max_model_len:count}\b",
            r"\bmax_running_requests={max_num_seqs:count}\b",
        ),
    ),
    Row(
        pattern=r"Init torch distributed (?:begin|ends)",
        needle="Init torch distributed ",
        phase=Phase.WORKER_INIT,
        scope="rank",
        parts=(r"avail mem={free_bytes:gib}",),
    ),
    Row(pattern=r"Load weight begin\.", phase=Phase.WEIGHTS_LOAD, scope="rank", parts=(r"avail mem={free_bytes:gib}",)),
    Row(
        pattern=r"Load weight end\.",
        phase=Phase.WEIGHTS_LOAD,
        then=Phase.PROFILE,
        scope="rank",
        parts=(r"avail mem={available_after_weights_bytes:gib}", r"mem usage={weights_bytes:gib}"),
    ),
    Row(
        pattern=r"KV Cache is allocated\.",
        phase=Phase.KV_ALLOC,
        scope="rank",
        parts=(
            r"#tokens: {kv_tokens:tokens}\b",
            r"K size: {kv_k_bytes:gib}",
            r"V size: {kv_v_bytes:gib}",
            r"KV size: {kv_in_use_bytes:gib}",
        ),
    ),
    Row(pattern=r"Memory pool end\.", phase=Phase.KV_ALLOC, scope="rank", parts=(r"avail mem={free_bytes:gib}",)),
    Row(
        pattern=r"max_total_tokens={max_total_tokens:count} is larger than the profiled value "
        r"{profiled_tokens:signed_count}",
        phase=Phase.KV_CHECK,
        scope="rank",
    ),
    Row(
        pattern=r"max_total_num_tokens={max_total_tokens:count}\b",
        phase=Phase.KV_ALLOC,
        scope="rank",
        parts=(
            r"max_running_requests={max_num_seqs:count}\b",
            r"context_len={max_model_len:count}\b",
            r"available_gpu_mem={free_bytes:gib}",
        ),
    ),
    Row(
        pattern=r"Capture cuda graph begin\.",
        phase=Phase.GRAPH_CAPTURE,
        scope="rank",
        parts=(r"avail mem={free_bytes:gib}",),
    ),
    Row(
        pattern=r"Capturing batches \(.*avail_mem={free_bytes:gib}",
        needle="Capturing batches (",
        phase=Phase.GRAPH_CAPTURE,
        scope="rank",
    ),
    Row(
        pattern=r"Capture cuda graph end\.",
        phase=Phase.GRAPH_CAPTURE,
        then=Phase.WARMUP,
        scope="rank",
        parts=(
            r"Time elapsed: {graph_capture_secs:secs} s",
            r"mem usage={graph_capture_bytes:gib}",
            r"avail mem={free_bytes:gib}",
        ),
    ),
    Row(pattern=r"The server is fired up and ready to roll", phase=Phase.READY, scope="api", event="served"),
    Row(
        pattern=r"#running-req: {running:count}, .*#queue-req: {waiting:count}",
        needle="#queue-req: ",
        scope="rank",
        event="alive",
    ),
    Row(
        pattern=r"Not enough memory\. Please try (?:to increase|increasing) --mem-fraction-static",
        needle="Not enough memory",
        scope="rank",
        parts=(r"mem_fraction_static={mem_fraction_static:fraction}", r"Current value: {mem_fraction_static:fraction}"),
        failure=Failure(failure_class="kv_budget_nonpositive", phase=Phase.KV_CHECK),
    ),
    Row(
        pattern=r"The memory capacity is unbalanced",
        scope="rank",
        failure=Failure(failure_class="foreign_process_memory", phase=Phase.WORKER_INIT),
    ),
    Row(
        pattern=r"Capture cuda graph failed: ",
        scope="rank",
        failure=Failure(failure_class="graph_capture_oom", phase=Phase.GRAPH_CAPTURE),
    ),
    Row(
        pattern=r"(?:Prefill|Decode) out of memory\.",
        needle=" out of memory. Try to lower",
        scope="rank",
        failure=Failure(failure_class="request_oom", phase=Phase.REQUEST),
    ),
    Row(
        pattern=r"KV cache pool is full\. Retract requests",
        scope="rank",
        failure=Failure(failure_class="request_oom", phase=Phase.REQUEST, soft=True),
    ),
)

DEATHS: Final = (
    Row(
        pattern=r"^Exit code: -9\b",
        needle="Exit code: -9",
        known=False,
        failure=Failure(failure_class="host_oom_killed", tier=Tier.KILLED),
    ),
    Row(
        pattern=r"^Exit code: -(?!9\b)\d+",
        needle="Exit code: -",
        known=False,
        failure=Failure(failure_class="engine_killed", tier=Tier.DEATH),
    ),
)

WRAPPERS: Final = tuple(
    Row(pattern=pattern, needle=needle, failure=Failure(failure_class="unexplained", tier=Tier.WRAPPER))
    for pattern, needle in (
        (r"Scheduler hit an exception", ""),
        (r"Received sigquit from a child process", ""),
        (r"scheduler is dead\. Please check", ""),
        (r"there are other ranks that didn't finish loading", "other ranks that didn't finish loading"),
        (r"Detokenizer ?Manager hit an exception|TokenizerManager hit an exception", "Manager hit an exception"),
    )
)

TABLE: Final = Table(family="sglang", rows=(*ROWS, *DEATHS, *WRAPPERS))
