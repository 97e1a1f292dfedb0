"""SGLang: the memory lines of a boot. Its ``GB`` is 2^30."""

from __future__ import annotations

from typing import Final

from pytest_kvbudget.ledger.grammar.model import Failure, Row, Table, Tier
from pytest_kvbudget.verdict import Phase, Provenance

TOKENS: Final = "token_pool_full"
"""The KV cache has no slots for a batch's tokens; no allocation on the card failed."""
_C = Provenance.CONFIGURED
_NO_MEMORY: Final = r"out of memory|OutOfMemory|ALLOC_FAILED|MemoryAllocation"
_FAULT: Final = (
    r"illegal memory access|misaligned address|launch failure|kernel image|device function|device-side assert"
)
_GONE: Final = r"[Cc]onnection (?:closed|reset) by peer"
"""What stopped the capture of graphs: the message passes on whatever was raised."""

STANDS_STILL: Final = "gen throughput (token/s): 0.00,"
"""Nothing was generated since the line before."""
_USAGE: Final = r"(?<!swa )token usage: {kv_usage_pct:share}(?=,|\s|$)"

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
        parts=(
            r"elapsed={model_load_secs:secs} s",
            r"avail mem={available_after_weights_bytes:gib}",
            r"mem usage={weights_bytes:gib}",
        ),
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
        pattern=r"is larger than the profiled value (?:-[1-9]|0\b)",
        needle="is larger than the profiled value ",
        scope="rank",
        failure=Failure(failure_class="kv_budget_nonpositive", phase=Phase.KV_CHECK, tier=Tier.KILLED),
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
        pattern=r"Capture (?:\w+ ){1,3}graph begin\.",
        needle=" graph begin.",
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
        pattern=r"Capture (?:\w+ ){1,3}graph end\. Time elapsed",
        needle=" graph end. Time elapsed",
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
        parts=(_USAGE,),
    ),
    Row(pattern=rf"\bbatch[.,] .*{_USAGE}", needle="token usage: ", scope="rank", event="asked"),
    Row(
        pattern=r"\bscheduler\.event_loop_\w+\(\)",
        needle="scheduler.event_loop_",
        phase=Phase.REQUEST,
        scope="rank",
        releases="the line of code in a traceback: the scheduler serves",
    ),
    Row(
        pattern=r"Input length \(\d+ tokens\) exceeds the maximum allowed length",
        needle=" exceeds the maximum allowed length",
        phase=Phase.REQUEST,
        scope="rank",
        event="asked",
    ),
    *(
        # requests are put back into the queue: nothing on the card failed
        Row(pattern=pattern, needle=needle, phase=Phase.REQUEST, scope="rank", event="asked")
        for pattern, needle in (
            (r"KV cache pool is full\. Retract requests", "KV cache pool is full. Retract"),
            (r"Decode out of memory happened\. #retracted_reqs", "Decode out of memory happened. "),
        )
    ),
    Row(
        pattern=r"Not enough memory\. Please try (?:to increase|increasing) --mem-fraction-static",
        needle="Not enough memory",
        scope="rank",
        parts=(r"mem_fraction_static={mem_fraction_static:fraction}", r"Current value: {mem_fraction_static:fraction}"),
        failure=Failure(failure_class="kv_budget_nonpositive", phase=Phase.KV_CHECK),
    ),
    Row(
        pattern=r"Loaded weights leave no GPU memory for the KV cache",
        scope="rank",
        parts=(r"--mem-fraction-static={mem_fraction_static:fraction}",),
        failure=Failure(failure_class="kv_budget_nonpositive", phase=Phase.KV_CHECK),
    ),
    Row(
        pattern=r"Not enough GPU memory for hybrid \(mamba/linear-attention\) state cache",
        needle="Not enough GPU memory for hybrid ",
        scope="rank",
        failure=Failure(failure_class="kv_budget_nonpositive", phase=Phase.KV_CHECK),
    ),
    Row(
        pattern=r"state cache is too small to serve any requests",
        scope="rank",
        failure=Failure(failure_class="max_num_seqs_exceeds_state", phase=Phase.KV_CHECK),
    ),
    Row(
        pattern=r"The memory capacity is unbalanced",
        scope="rank",
        parts=(r"pre_model_load_memory={free_bytes:gib_bare}",),
        failure=Failure(failure_class="foreign_process_memory", phase=Phase.WORKER_INIT),
    ),
    *(
        Row(
            pattern=rf"Capture (?:\w+ ){{1,3}}graph failed: {says}",
            needle=" graph failed: ",
            scope="rank",
            failure=Failure(failure_class=failure_class, phase=Phase.GRAPH_CAPTURE, tier=tier),
        )
        for says, failure_class, tier in (
            (rf".*(?:{_NO_MEMORY})", "graph_capture_oom", Tier.ROOT),
            (rf"(?!.*(?:{_NO_MEMORY})).*(?:{_FAULT})", "kernel_fault", Tier.ROOT),
            (rf"(?!.*(?:{_NO_MEMORY}|{_FAULT}|{_GONE}))", "engine_exception", Tier.KILLED),
            (rf"(?!.*(?:{_NO_MEMORY}|{_FAULT})).*(?:{_GONE})", "engine_killed", Tier.DEATH),
        )
    ),
    Row(
        pattern=r"\[torch_memory_saver\.cpp\] CUresult error:?\s+(?:result=)?2\b",
        needle="CUresult error",
        scope="rank",
        failure=Failure(failure_class="oom"),
    ),
    Row(
        pattern=r"(?:Prefill|Decode) out of memory\.",
        needle=" out of memory. Try to lower",
        scope="rank",
        failure=Failure(failure_class=TOKENS, phase=Phase.REQUEST),
    ),
)

DEATHS: Final = (
    Row(
        pattern=r"scheduler died during initialization \(exit code: -9\)",
        needle="scheduler died during initialization",
        failure=Failure(failure_class="host_oom_killed", tier=Tier.KILLED),
    ),
    Row(
        pattern=r"scheduler died during initialization \(exit code: (?!-9\))",
        needle="scheduler died during initialization",
        failure=Failure(failure_class="engine_killed", tier=Tier.DEATH),
    ),
    Row(
        pattern=r"Scheduler or DataParallelController \d+ terminated with -9\b",
        needle="Scheduler or DataParallelController ",
        failure=Failure(failure_class="host_oom_killed", tier=Tier.KILLED),
    ),
    Row(
        pattern=r"Scheduler or DataParallelController \d+ terminated with (?!-9\b|-15\b|0\b)",
        needle="Scheduler or DataParallelController ",
        failure=Failure(failure_class="engine_killed", tier=Tier.DEATH),
    ),
    Row(
        pattern=r"Watchdog timeout \(self\.watchdog_timeout=",
        needle="Watchdog timeout (",
        scope="rank",
        failure=Failure(failure_class="engine_hung", tier=Tier.KILLED),
    ),
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
        (r"Initialization failed\. Please see the error messages above", "Initialization failed. "),
        (r"Initialization failed\. \w+ error: ", "Initialization failed. "),
        (r"Received sigquit from a child process", ""),
        (r"scheduler is dead\. Please check", ""),
        (r"there are other ranks that didn't finish loading", "other ranks that didn't finish loading"),
        (r"Detokenizer ?Manager hit an exception|TokenizerManager hit an exception", "Manager hit an exception"),
    )
)

TABLE: Final = Table(family="sglang", rows=(*ROWS, *DEATHS, *WRAPPERS))
