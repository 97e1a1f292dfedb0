"""SGLang as people report it."""

from __future__ import annotations

import pytest

from pytest_kvbudget.ledger.reader import LedgerReader
from pytest_kvbudget.verdict import Phase
from tests.ledger.support import MIB, read
from tests.ledger.variant import S, Variant, check, gib

OOM = (
    "CUDA out of memory. Tried to allocate 594.00 MiB. GPU 0 has a total capacity of 31.36 GiB of which 493.75 MiB is "
    "free."
)
FRACTION_UP, FRACTION_DOWN = ("mem_fraction_static", "raise"), ("mem_fraction_static", "lower")

READY_LINE = "The server is fired up and ready to roll!"
STILL = (
    S + "Decode batch. #running-req: 30, #token: 46000, token usage: {}, gen throughput (token/s): 0.00, "
    "#queue-req: {},"
)


def frames(*functions: str) -> tuple[str, ...]:
    """The last lines of a traceback through SGLang."""
    return tuple(f'  File "/v/sglang/srt/model_executor/model_runner.py", line 9, in {name}' for name in functions)


VARIANTS: list[Variant] = [
    Variant(
        "sglang#7227: no room for graphs",
        (
            S + "Load weight end. type=M, dtype=torch.bfloat16, avail mem=21.96 GB, mem usage=8.81 GB.",
            S + "KV Cache is allocated. #tokens: 132681, K size: 9.11 GB, V size: 9.11 GB",
            S + "Capture cuda graph begin. This can take up to several minutes. avail mem=2.85 GB",
            S + "Scheduler hit an exception: Traceback (most recent call last):",
            *frames("init_cuda_graphs"),
            "Exception: Capture cuda graph failed: " + OOM,
            "1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)",
        ),
        "failed",
        Phase.GRAPH_CAPTURE,
        "graph_capture_oom",
        {"weights_bytes": gib(8.81), "available_after_weights_bytes": gib(21.96), "tried_alloc_bytes": 594 * MIB},
        turn=(FRACTION_DOWN, ("cuda_graph_max_bs", "lower"), ("disable_cuda_graph", "none")),
        leave=(FRACTION_UP, ("chunked_prefill_size", "lower")),
    ),
    Variant(
        "sglang#1467: a fault while graphs are captured is no lack of memory, whatever the advice below says",
        (
            "Exception: Capture cuda graph failed: Triton Error [CUDA]: an illegal memory access was encountered",
            "Possible solutions:",
            "2. set --mem-fraction-static to a smaller value",
        ),
        "failed",
        Phase.GRAPH_CAPTURE,
        "kernel_fault",
        {},
        leave=(FRACTION_DOWN,),
    ),
    Variant(
        "sglang#4205: another rank is gone",
        ("Exception: Capture cuda graph failed: [/g/gloo/transport/tcp/pair.cc:534] Connection closed by peer",),
        "failed",
        Phase.GRAPH_CAPTURE,
        "engine_killed",
        {},
        leave=(FRACTION_DOWN,),
    ),
    Variant(
        "sglang#5389: a kernel that cannot be built",
        ("Exception: Capture cuda graph failed: Ninja build failed. Ninja output:",),
        "failed",
        Phase.GRAPH_CAPTURE,
        "engine_exception",
        {},
        leave=(FRACTION_DOWN,),
    ),
    Variant(
        "graphs of an NPU, of a draft model",
        (
            S + "Capture draft npu graph begin. This can take up to several minutes. avail mem=2.85 GB",
            "Exception: Capture npu graph failed: NPU out of memory. Tried to allocate 72.00 MiB",
        ),
        "failed",
        Phase.GRAPH_CAPTURE,
        "graph_capture_oom",
        {"free_bytes": gib(2.85), "tried_alloc_bytes": 72 * MIB},
    ),
    Variant(
        "sglang#7691: nothing is left, and the engine says so by a negative number first",
        (
            "[2025-07-02 07:41:58 DP0 TP0] Load weight end. type=M, avail mem=21.73 GB, mem usage=166.59 GB.",
            "[2025-07-02 07:41:59 DP0 TP0] max_total_tokens=131072 is larger than the profiled value -561981. Use the "
            "profiled value instead.",
        ),
        "failed",
        Phase.KV_CHECK,
        "kv_budget_nonpositive",
        {"max_total_tokens": 131072, "profiled_tokens": -561981, "weights_bytes": gib(166.59)},
        turn=(FRACTION_UP,),
        leave=(FRACTION_DOWN, ("context_length", "lower")),
    ),
    Variant(
        "a smaller pool than asked for is no failure",
        (S + "max_total_tokens=131072 is larger than the profiled value 100000. Use the profiled value instead.",),
        "booted",
        Phase.KV_CHECK,
        None,
        {"max_total_tokens": 131072, "profiled_tokens": 100000},
    ),
    Variant(
        "sglang#445: the first release, by the frame",
        (*frames("load_model"), "torch.cuda.OutOfMemoryError: " + OOM),
        "failed",
        Phase.WEIGHTS_LOAD,
        "weights_oom",
        {"tried_alloc_bytes": 594 * MIB},
        turn=(("tp_size", "raise"),),
        leave=(FRACTION_DOWN, ("context_length", "lower")),
    ),
    Variant(
        "InferenceX#2128: newer words for the same, with what was set",
        (
            S + "Load weight end. quant=fp8, fmt=e4m3, avail mem=12.25 GB, mem usage=125.65 GB.",
            "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.88. Raise "
            "--mem-fraction-static above 0.912 (minimum viable = 1 - available/pre = 0.9113).",
        ),
        "failed",
        Phase.KV_CHECK,
        "kv_budget_nonpositive",
        {"mem_fraction_static": 0.88, "available_after_weights_bytes": gib(12.25)},
        turn=(FRACTION_UP,),
        leave=(FRACTION_DOWN, ("context_length", "lower")),
    ),
    Variant(
        "a state cache that gets nothing",
        (
            S + "Scheduler hit an exception: Traceback (most recent call last):",
            "RuntimeError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache. Computed "
            "max_mamba_cache_size=0 (total_rest_memory=-1.23 GB, mamba_cache_per_req=73.69 MB).",
        ),
        "failed",
        Phase.KV_CHECK,
        "kv_budget_nonpositive",
        {},
        turn=(FRACTION_UP,),
    ),
    Variant(
        "a state cache for less than one request",
        (
            S + "Scheduler hit an exception: Traceback (most recent call last):",
            "RuntimeError: Hybrid (mamba/linear-attention) state cache is too small to serve any requests. "
            "max_mamba_cache_size=2, mamba_ratio=3, resulting max_num_reqs=0.",
        ),
        "failed",
        Phase.KV_CHECK,
        "max_num_seqs_exceeds_state",
        {},
        turn=(("max_running_requests", "lower"), FRACTION_UP),
    ),
    Variant(
        "an exception of a scheduler is not one of the arguments",
        (
            S + "Scheduler hit an exception: Traceback (most recent call last):",
            '  File "/v/sglang/srt/managers/scheduler.py", line 9, in __init__',
            "RuntimeError: something else",
        ),
        "failed",
        Phase.WORKER_INIT,
        "engine_exception",
        {},
    ),
    Variant(
        "sglang#24011: a capture on ROCm, then the parent's words",
        (
            S + "Capture cuda graph begin. This can take up to several minutes. avail mem=20.11 GB",
            "Process group watchdog thread terminated with exception: HIP error: operation not permitted on an event "
            "last recorded in a capturing stream",
            S + "Scheduler or DataParallelController 1234 terminated with -6",
        ),
        "failed",
        Phase.GRAPH_CAPTURE,
        "kernel_fault",
        {},
    ),
    Variant(
        "only the parent's words",
        (
            S + "Load weight begin. avail mem=78.5 GB",
            S + "Scheduler or DataParallelController 848532 terminated with -9",
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "host_oom_killed",
        {},
    ),
    Variant(
        "sglang#6027: a batch, by the frame of an older thread",
        (*frames("forward_thread_func"), "torch.OutOfMemoryError: " + OOM),
        "died_after_boot",
        Phase.REQUEST,
        "request_oom",
        {},
        turn=(FRACTION_DOWN,),
    ),
    Variant(
        "the pool itself",
        (*frames("init_memory_pool"), "torch.OutOfMemoryError: " + OOM),
        "failed",
        Phase.KV_ALLOC,
        "kv_alloc_oom",
        {},
        turn=(FRACTION_DOWN,),
        leave=(("gpu_memory_utilization", "lower"),),
    ),
    Variant(
        "sglang#9646: a batch, by the frame of a thread",
        (
            *frames("forward_thread_func_"),
            "RuntimeError: NPU out of memory. Tried to allocate 1.75 GiB (NPU 1; 61.28 GiB",
        ),
        "died_after_boot",
        Phase.REQUEST,
        "request_oom",
        {"tried_alloc_bytes": gib(1.75)},
        turn=(FRACTION_DOWN,),
    ),
    Variant(
        "sglang#7353: the pool of tokens is full, not the card",
        (
            S + "Prefill batch. #new-seq: 14, #new-token: 8192, #cached-token: 0, token usage: 0.92, #queue-req: 105, ",
            S + "Prefill out of memory. Try to lower your batch size.",
            "Try to allocate 8192 tokens.",
            "Available tokens: 6208",
        ),
        "died_after_boot",
        Phase.REQUEST,
        "request_oom",
        {"kv_usage_pct": 92},
        turn=(("max_running_requests", "lower"), FRACTION_UP),
        leave=(FRACTION_DOWN,),
    ),
    Variant(
        "requests are put back, and the engine serves on",
        (
            S + "Decode batch. #running-req: 57, #token: 297729, token usage: 0.97, #queue-req: 68",
            S + "Decode out of memory happened. #retracted_reqs: 1, #new_token_ratio: 0.5713 -> 0.6713",
            S + "Decode batch. #running-req: 56, #token: 290000, token usage: 0.94, #queue-req: 69",
        ),
        "booted",
        Phase.REQUEST,
        None,
        {"kv_usage_pct": 97},
    ),
    Variant(
        "requests are put back, in newer words",
        (
            S + "KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 646",
            S + "Decode batch, #running-req: 62, #token: 87001, token usage: 0.99, cuda graph: False, gen throughput "
            "(token/s): 2467.25, #queue-req: 18",
            S + "Decode batch, #running-req: 60, #token: 87429, token usage: 1.00, cuda graph: False, gen throughput "
            "(token/s): 2391.98, #queue-req: 20",
            S + "Decode batch, #running-req: 60, #token: 80000, token usage: 0.92, cuda graph: False, gen throughput "
            "(token/s): 2391.98, #queue-req: 20",
        ),
        "booted",
        Phase.REQUEST,
        None,
        {"kv_usage_pct": 100},
    ),
    Variant(
        "a hybrid model: how full the pool of full attention is",
        (
            S + "Decode batch, #running-req: 24, #full token: 3118656, full token usage: 0.99, mamba num: 48, mamba "
            "usage: 0.01, cuda graph: True, gen throughput (token/s): 625.38, #queue-req: 8",
            S + "Decode batch, #running-req: 24, #full token: 9, full token usage: 0.50, #swa token: 9, swa token "
            "usage: 1.00, gen throughput (token/s): 625.38, #queue-req: 8",
        ),
        "booted",
        Phase.READY,
        None,
        {"kv_usage_pct": 99},
    ),
    Variant(
        "a full pool, requests that run and wait, and nothing is generated",
        (
            S + "max_total_num_tokens=46611, chunked_prefill_size=2048, context_len=131072",
            READY_LINE,
            STILL.format("0.99", 128),
            STILL.format("1.00", 128),
        ),
        "booted",
        Phase.REQUEST,
        "request_starved",
        {"kv_usage_pct": 100},
        turn=(("max_running_requests", "lower"), FRACTION_UP),
        leave=(FRACTION_DOWN,),
    ),
    *(
        Variant(
            f"nothing is generated, and that proves nothing: {why}",
            (READY_LINE, *lines),
            "booted",
            Phase.READY,
            None,
            {},
        )
        for why, lines in (
            ("once", (STILL.format("1.00", 128),)),
            ("there is room", (STILL.format("0.50", 128), STILL.format("0.50", 128))),
            ("nobody waits", (STILL.format("1.00", 0), STILL.format("1.00", 0))),
            (
                "it went on between",
                (
                    STILL.format("1.00", 128),
                    STILL.format("1.00", 128).replace(": 0.00,", ": 99.00,"),
                    STILL.format("1.00", 128),
                ),
            ),
        )
    ),
    Variant(
        "sglang#4048: a request that is too long, and what it does to the scheduler",
        (
            S + "Input length (160062 tokens) exceeds the maximum allowed length (59862 tokens). Use a shorter input",
            S + "Scheduler hit an exception: Traceback (most recent call last):",
            '  File "/v/sglang/srt/managers/scheduler.py", line 1796, in run_scheduler_process',
            "TypeError: '>' not supported between instances of 'NoneType' and 'int'",
        ),
        "died_after_boot",
        Phase.REQUEST,
        "engine_exception",
        {},
    ),
    *(
        Variant(
            f"the loop of the scheduler, by the line of code: {loop}",
            (
                "Traceback (most recent call last):",
                '  File "/v/sglang/srt/managers/scheduler.py", line 1796, in run_scheduler_process',
                f"    scheduler.{loop}()",
                raised,
            ),
            "died_after_boot",
            Phase.REQUEST,
            failure_class,
            {},
        )
        for loop, raised, failure_class in (
            ("event_loop_overlap", "TypeError: '>' not supported between 'NoneType' and 'int'", "engine_exception"),
            (
                "event_loop_normal",
                "RuntimeError: Failed to allocate memory for batch_prefill_tmp_v with size 435814400 and alignment 16 "
                "in AlignedAllocator",
                "workspace_locked",
            ),
        )
    ),
    Variant(
        "sglang#2102: FlashInfer's workspace has a fixed size",
        (
            *frames("forward_batch_generation"),
            "RuntimeError: Failed to allocate memory for batch_prefill_tmp_v with size 435814400 and alignment 16 in "
            "AlignedAllocator",
        ),
        "died_after_boot",
        Phase.REQUEST,
        "workspace_locked",
        {"tried_alloc_bytes": 435814400},
        turn=(("SGLANG_FLASHINFER_WORKSPACE_SIZE", "raise"),),
        leave=(FRACTION_DOWN,),
    ),
    Variant(
        "the scheduler was killed",
        (
            "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), "
            "a common cause is the OS OOM killer.",
        ),
        "failed",
        Phase.UNKNOWN,
        "host_oom_killed",
        {},
    ),
    Variant(
        "sglang#25118: it died otherwise; the advice below is no exit code",
        (
            "RuntimeError: Rank 0 scheduler died during initialization (exit code: -3). If exit code is -9 (SIGKILL), "
            "a common cause is the OS OOM killer.",
        ),
        "failed",
        Phase.UNKNOWN,
        "engine_killed",
        {},
    ),
    Variant(
        "sglang#22537: how long the weights took",
        (S + "Load weight end. elapsed=112.68 s, type=M, avail mem=160.78 GB, mem usage=15.50 GB.",),
        "booted",
        Phase.WEIGHTS_LOAD,
        None,
        {"model_load_secs": 112.68, "weights_bytes": gib(15.5)},
    ),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=[variant.name for variant in VARIANTS])
def test_a_public_report_of_sglang_is_read(variant: Variant) -> None:
    check(variant)


def test_frames_tell_the_engine() -> None:
    # sglang#465: it once used layers of vLLM
    ledger = read(
        *frames("__init__"),
        '  File "/v/vllm/model_executor/layers/linear.py", line 81, in create_weights',
        "torch.cuda.OutOfMemoryError: " + OOM,
    )
    assert ledger.family == "sglang"


def test_a_full_pool_is_not_said_to_be_a_full_card() -> None:
    ledger = read(S + "Decode out of memory. Try to lower your batch size.")
    assert ledger.cause is not None
    assert "no room for the tokens" in ledger.cause.sentence


def served_for_hours(*between: str) -> LedgerReader:
    """A settled engine, read in blocks, with lines of note among thousands that say nothing new."""
    calm = S + "Decode batch. #running-req: 3, #token: 900, token usage: 0.10, gen throughput (token/s): 99.00, "
    lines = [calm + "#queue-req: 0,"] * 3000
    reader = LedgerReader()
    reader.feed(f"{READY_LINE}\n{lines[0]}\n".encode())
    reader.feed("".join(f"{line}\n" for line in (*lines, *between, *(lines if len(between) < 2 else ()))).encode())
    reader.close()
    return reader


def test_the_fullest_moment_of_hours_is_found() -> None:
    reader = served_for_hours(S + "Prefill batch. #new-seq: 1, #new-token: 9, token usage: 0.80, #queue-req: 0,")
    ledger = reader.ledger()
    assert ledger.get("kv_usage_pct") == 80
    assert ledger.facts["kv_usage_pct"].evidence.line == 3003


def test_a_pool_that_gets_full_after_hours_is_found() -> None:
    reader = served_for_hours(*[STILL.format("1.00", 128)] * 2)
    assert reader.ledger().failure_class == "request_starved"
