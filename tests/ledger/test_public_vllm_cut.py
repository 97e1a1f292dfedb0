"""vLLM logs of which people paste the last lines: what else in them says where the boot was, and what it means."""

from __future__ import annotations

import pytest

from pytest_kvbudget.verdict import Phase
from tests.ledger.support import MIB, lever_effects, read, read_bytes
from tests.ledger.variant import Facts, Variant, W, check, gib

CORE = "(EngineCore_DP0 pid=5) ERROR 01-02 10:00:00 [core.py:842] "
RANK0 = "(VllmWorker rank=0 pid=20) ERROR 01-02 10:00:00 [multiproc_executor.py:375] "
RANK1 = "(VllmWorker rank=1 pid=21) ERROR 01-02 10:00:00 [multiproc_executor.py:375] "
WARMING = (
    "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try lowering "
    "`max_num_seqs` or `gpu_memory_utilization` when initializing the engine."
)
NOT_ENOUGH = (
    "ValueError: Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization to free memory "
    "for weights, increasing --tensor-parallel-size, or using --quantization."
)
SMEM = (
    "RuntimeError: Bad StatusOr access: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in "
    "memory space smem. Used 1.00M of 1.00M smem. Exceeded smem capacity by 1.7K."
)
SEQS_DOWN = ("max_num_seqs", "lower")
UTIL_UP = ("gpu_memory_utilization", "raise")
UTIL_DOWN = ("gpu_memory_utilization", "lower")
CLEAN = ("device memory", "clean")


def oom(device: int = 0, free: str = "594.88 MiB", held: str = "Process 133 has 22.97 GiB memory in use. ") -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.74 GiB. GPU {device} has a total capacity "
        f"of 23.57 GiB of which {free} is free. {held}Of the allocated memory 20.21 GiB is allocated by PyTorch, and "
        "185.98 MiB is reserved by PyTorch but unallocated."
    )


def statistics(
    number: int, *, running: int = 12, waiting: int = 80, usage: float = 99.8, prompt: float = 0.0, tokens: float = 0.0
) -> str:
    return (
        f"(APIServer pid=1) INFO 01-02 10:0{number}:00 [loggers.py:123] Engine 000: Avg prompt throughput: {prompt} "
        f"tokens/s, Avg generation throughput: {tokens} tokens/s, Running: {running} reqs, Waiting: {waiting} reqs, "
        f"GPU KV cache usage: {usage}%, Prefix cache hit rate: 0.0%"
    )


def of_v0(number: int, waiting: int) -> str:
    return (
        f"INFO 01-02 10:00:{number:02} llm_engine.py:921] Avg prompt throughput: 0.0 tokens/s, Avg generation "
        f"throughput: 0.0 tokens/s, Running: 35 reqs, Swapped: 0 reqs, Pending: {waiting} reqs, GPU KV cache usage: "
        "99.4%, CPU KV cache usage: 0.0%"
    )


PREEMPTED = (
    "WARNING 01-02 10:00:00 scheduler.py:1754] Sequence group 221 is preempted by PreemptionMode.RECOMPUTE mode because"
    " there is not enough KV cache space. This can affect the end-to-end performance. Increase gpu_memory_utilization "
    "or tensor_parallel_size to provide more KV cache memory. total_num_cumulative_preemption=101"
)

PLACED: list[Variant] = [
    Variant(
        "the exception that was raised from it says what ran",
        (CORE + oom(), CORE + "The above exception was the direct cause of:", CORE + WARMING),
        "failed",
        Phase.WARMUP,
        "warmup_oom",
        {"tried_alloc_bytes": gib(1.74), "max_num_seqs": 1024},
        (SEQS_DOWN,),
    ),
    Variant(
        "another rank's does",
        (RANK1 + oom(1, "605.88 MiB"), RANK0 + oom(), RANK0 + WARMING),
        "failed",
        Phase.WARMUP,
        "warmup_oom",
        {"device": 0, "free_bytes": round(594.88 * MIB), "process_in_use_bytes": gib(22.97)},
        (SEQS_DOWN,),
    ),
    Variant(
        "the engine's word for its worker does",
        (
            "(Worker_TP0 pid=6) ERROR 01-02 10:00:00 [multiproc_executor.py:822] " + oom(),
            f"(EngineCore_DP0 pid=5) RuntimeError: Worker failed with error '{WARMING[14:]}', please check the stack "
            "trace above for the root cause",
        ),
        "failed",
        Phase.WARMUP,
        "warmup_oom",
        {},
        (SEQS_DOWN,),
    ),
    Variant(
        "further on than the last milestone",
        (W + "Graph capturing finished in 5 secs, took 0.26 GiB", W.replace("INFO", "ERROR") + oom(), CORE + WARMING),
        "failed",
        Phase.WARMUP,
        "warmup_oom",
        {},
        (SEQS_DOWN,),
    ),
    Variant(
        "the loader says that it was loading",
        (CORE + oom(), CORE + NOT_ENOUGH),
        "failed",
        Phase.WEIGHTS_LOAD,
        "weights_oom",
        {},
    ),
    Variant(
        "the server's reader of answers fails only once there was an engine",
        (oom(), "(APIServer pid=1) ERROR 01-02 10:00:00 [async_llm.py:480] AsyncLLM output_handler failed."),
        "died_after_boot",
        Phase.REQUEST,
        "request_oom",
        {},
    ),
    Variant(
        "the frame that captures a graph is torch's",
        (
            RANK0 + '  File "/p/torch/cuda/graphs.py", line 186, in __exit__',
            RANK0 + "    self.cuda_graph.capture_end()",
            RANK0 + "RuntimeError: CUDA error: out of memory",
        ),
        "failed",
        Phase.GRAPH_CAPTURE,
        "graph_capture_oom",
        {},
    ),
    Variant(
        "a model is built",
        (
            CORE + '  File "/p/vllm/model_executor/models/llama.py", line 362, in __init__',
            CORE + "    self.start_layer, self.end_layer, self.layers = make_layers(",
            CORE + oom(),
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "weights_oom",
        {},
    ),
    Variant(
        "the progress of loading is written after it, from another buffer",
        (
            "(EngineCore_DP0 pid=5) " + oom(),
            "Loading safetensors checkpoint shards:   3% Completed | 1/37 [00:02<01:39,  2.77s/it]",
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "weights_oom",
        {},
    ),
    Variant(
        "a notebook's frames",
        (
            "File [~/v/worker/cache_engine.py:49], in CacheEngine.__init__(self, cache_config)",
            '---> 49 self.gpu_cache = self._allocate_kv_cache(self.num_gpu_blocks, "cuda")',
            "File [~/v/worker/cache_engine.py:64], in CacheEngine._allocate_kv_cache(self, num_blocks, device)",
            "---> 64         torch.empty(kv_cache_shape,",
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 642.00 MiB. GPU",
        ),
        "failed",
        Phase.KV_ALLOC,
        "kv_alloc_oom",
        {"tried_alloc_bytes": 642 * MIB},
    ),
    Variant(
        "a model's parameters are moved to a card that others fill",
        (
            '  File "/p/torch/nn/modules/module.py", line 1050, in <lambda>',
            "    return self._apply(lambda t: t.cuda(device))",
            oom(
                free="264.00 MiB",
                held="Process 20 has 419.48 MiB memory in use. Including non-PyTorch memory, this process has 8.04 "
                "GiB memory in use. Process 27 has 14.85 GiB memory in use. ",
            ),
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "foreign_process_memory",
        {"process_in_use_bytes": gib(8.04)},
        (CLEAN,),
        (UTIL_DOWN,),
    ),
    Variant(
        "all that a pool has is taken, and nothing moves",
        tuple(of_v0(number, 115 + number) for number in (0, 5, 10)),
        "booted",
        Phase.REQUEST,
        "request_starved",
        {"kv_usage_pct": 99.4},
        (SEQS_DOWN,),
    ),
    Variant(
        "the same of V1",
        (statistics(1), statistics(2)),
        "booted",
        Phase.REQUEST,
        "request_starved",
        {"kv_usage_pct": 99.8},
        (SEQS_DOWN,),
    ),
    Variant("preempted", (PREEMPTED,), "booted", Phase.REQUEST, None, {}),
    Variant("preempted, with statistics", (PREEMPTED, statistics(1, tokens=30)), "booted", Phase.REQUEST, None, {}),
    Variant(
        "a program that is larger than a TPU",
        (
            "RESOURCE_EXHAUSTED: TPU TensorCore Hbm usage: 34.82G, SparseCore Hbm usage 174.10G, exceeding available "
            "bytes: 95.74G",
        ),
        "failed",
        Phase.COMPILE,
        "compile_hbm_exceeded",
        {"hbm_limit_bytes": gib(95.74)},
    ),
    Variant(
        "a TPU that is full before its KV cache",
        (
            "(EngineCore_DP0 pid=5) ValueError: total_hbm_used_gb=647.4GiB exceeds total_hbm_limit_gb=606.37GiB by "
            "41.02GiB. Please consider increasing --gpu-memory-utilization from 0.8 to a larger value.",
        ),
        "failed",
        Phase.KV_CHECK,
        "kv_budget_nonpositive",
        {"gpu_memory_utilization": 0.8, "consumed_bytes": gib(647.4)},
        (UTIL_UP,),
    ),
    Variant(
        "scalar memory holds the block tables",
        (SMEM,),
        "failed",
        Phase.COMPILE,
        "compile_failed",
        {},
        (("max_model_len", "lower"),),
    ),
]


@pytest.mark.parametrize("variant", PLACED, ids=lambda variant: variant.name)
def test_what_stands_around_it_places_it(variant: Variant) -> None:
    check(variant)


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param((oom(),), id="nothing else"),
        pytest.param(
            (oom(), "Loading safetensors checkpoint shards:   0% Completed | 0/37 [00:00<?, ?it/s]"),
            id="another boot begins to load",
        ),
        pytest.param((oom(), "", "", "", "", *PLACED[8].lines[1:]), id="far from it"),
    ],
)
def test_an_allocation_that_nothing_places_stays_unknown(lines: tuple[str, ...]) -> None:
    assert read(*lines).outcome == "unknown"


def test_what_others_hold_is_no_verdict_on_a_boot_that_is_not_seen() -> None:
    """It may have served, and what died there is not known to be a start."""
    crowd = (
        "Including non-PyTorch memory, this process has 8.04 GiB memory in use. Process 2 has 14.85 GiB memory in use. "
    )
    ledger = read(oom(free="264.00 MiB", held=crowd))
    assert (ledger.outcome, ledger.failure_class) == ("unknown", "foreign_process_memory")
    half = crowd.replace("8.04", "20.04").replace("14.85", "2.85")
    assert read(oom(free="264.00 MiB", held=half)).failure_class == "request_oom"


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param((statistics(1),), id="one line"),
        pytest.param((statistics(1), statistics(2), statistics(3, tokens=20.5)), id="it went on"),
        pytest.param((statistics(1, prompt=800.5), statistics(2, prompt=800.5)), id="a prompt is read"),
        pytest.param((statistics(1, usage=99.1), statistics(2, usage=99.4)), id="a prompt fills it"),
        pytest.param((statistics(1, waiting=0), statistics(2, waiting=0)), id="none waits"),
        pytest.param((statistics(1, usage=60.0), statistics(2, usage=60.0)), id="there is room"),
        pytest.param((statistics(1), statistics(2).replace("Engine 000", "Engine 001")), id="one line of each engine"),
    ],
)
def test_a_busy_pool_is_not_taken_for_a_stuck_one(lines: tuple[str, ...]) -> None:
    ledger = read(*lines)
    assert (ledger.outcome, ledger.failure_class) == ("booted", None)


def test_a_pool_gets_stuck_in_the_middle_of_a_long_log() -> None:
    """Lines that say nothing new are not read; these are, in whatever blocks they come."""
    busy = "".join(statistics(number % 10, tokens=30.5) + "\n" for number in range(2000))
    stuck = "".join(statistics(number) + "\n" for number in (1, 2, 3))
    assert read_bytes((busy + stuck).encode()).failure_class == "request_starved"
    assert read_bytes((busy + stuck + busy).encode()).failure_class is None


def test_preemption_is_seen_in_an_engine_that_has_long_served() -> None:
    serving = [statistics(number % 10, waiting=0, usage=50.0, tokens=30.5) for number in range(50)]
    assert read(*serving).phase is Phase.READY
    assert read(*serving, PREEMPTED, *serving).phase is Phase.REQUEST


FIGURES: list[tuple[str, tuple[str, ...], Facts]] = [
    (
        "the profile as a table, one figure a line",
        tuple(
            f"INFO 12-13 10:00:00 worker.py:243] {row}"
            for row in (
                "Memory profiling results:",
                "duration     0.75 seconds",
                "total_gpu_memory     79.22GiB",
                "gpu_memory_utilization       0.90",
                "the current vLLM instance can use    71.29GiB",
                "model weights take   14.96GiB",
                "non_torch_memory     1.79GiB",
                "PyTorch activation peak memory       1.26GiB",
                "available_kv_cache_memory    53.29GiB",
            )
        ),
        {
            "total_bytes": gib(79.22),
            "gpu_memory_utilization": 0.9,
            "requested_bytes": gib(71.29),
            "weights_bytes": gib(14.96),
            "non_torch_bytes": gib(1.79),
            "peak_activation_bytes": gib(1.26),
            "available_kv_bytes": gib(53.29),
        },
    ),
    (
        "two records on a line",
        (statistics(1, usage=91.6, tokens=30.5) + statistics(2, usage=91.9, tokens=30.5),),
        {"kv_usage_pct": 91.9},
    ),
    (
        "a line that is cut behind the device",
        (CORE + "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 192.00 GiB. GPU 3 has a tota",),
        {"device": 3, "tried_alloc_bytes": gib(192)},
    ),
    (
        "an NPU's words for the share that was used",
        (
            W + "Free memory on device (60.86/61.27 GiB) on startup. Desired GPU memory utilization is (0.9, 55.14 "
            "GiB). Actual usage: 1.14 GiB for weights, 0.22 GiB for peak activation, 0.13 GiB for non-torch memory, "
            "0.04 GiB for NPU graph memory.",
        ),
        {"weights_bytes": gib(1.14), "graph_actual_bytes": gib(0.04), "peak_activation_bytes": gib(0.22)},
    ),
]


@pytest.mark.parametrize(("lines", "facts"), [case[1:] for case in FIGURES], ids=[case[0] for case in FIGURES])
def test_figures(lines: tuple[str, ...], facts: Facts) -> None:
    ledger = read(*lines)
    assert {fact: ledger.get(fact) for fact in facts} == facts


def test_of_several_processes_none_is_taken_for_this_one() -> None:
    ledger = read(oom(held="Process 5 has 2.00 GiB memory in use. Process 6 has 20.97 GiB memory in use. "))
    assert ledger.get("process_in_use_bytes") is None


def test_requests_that_wait_alone_are_another_matter() -> None:
    """Fewer sequences help those that share a full pool, not one that does not fit alone."""
    alone = read(statistics(1, running=0, usage=0.0), statistics(2, running=0, usage=0.0))
    assert lever_effects(alone)[SEQS_DOWN] == "useless"


def test_a_pool_of_virtual_memory_fails_for_want_of_memory_or_not() -> None:
    line = "ggml_cuda.cu:648: HipVMM Failure: "
    assert read(line + "invalid argument").failure_class == "kernel_fault"
    assert read(line + "out of memory").failure_class != "kernel_fault"
