"""Every wording that carries a figure, one line per release family, with what it says."""

from __future__ import annotations

import pytest

from pytest_kvbudget.verdict import Phase, Provenance
from tests.ledger.support import GIB, MIB, read

Facts = dict[str, int | float | str | bool]

P = "(Worker_TP0 pid=11) INFO 09-30 10:00:00 [gpu_worker.py:400] "


def gib(value: float) -> int:
    return round(value * GIB)


WORDINGS: list[tuple[str, str, Facts]] = [
    (
        "0.9.2+ arguments",
        "non-default args: {'model': '/m', 'max_model_len': 200704, 'max_num_seqs': 3, 'gpu_memory_utilization': "
        "0.982, "
        "'kv_cache_memory_bytes': 3166500000, 'tensor_parallel_size': 2}",
        {
            "max_model_len": 200704,
            "max_num_seqs": 3,
            "gpu_memory_utilization": 0.982,
            "kv_cache_memory_bytes": 3166500000,
            "tensor_parallel_size": 2,
        },
    ),
    ("0.9+", "Using max model len 131072", {"max_model_len": 131072}),
    (
        "0.7+",
        "Chunked prefill is enabled with max_num_batched_tokens=8192.",
        {"max_num_batched_tokens": 8192},
    ),
    (
        "V1 engine",
        "Initializing a V1 LLM engine (v0.23.0) with config: model='/m', max_seq_len=32768, tensor_parallel_size=4, x",
        {"max_model_len": 32768, "tensor_parallel_size": 4},
    ),
    ("<= 0.7.2", "Loading model weights took 14.9888 GB", {"weights_bytes": 16094101452}),
    (
        "0.7.3",
        "Model loading took 14.2487 GB and 5.123456 seconds",
        {"model_load_bytes": gib(14.2487), "model_load_secs": 5.123456},
    ),
    (
        "0.8.5 - 0.11",
        "Model loading took 14.2487 GiB and 5.123456 seconds",
        {"model_load_bytes": gib(14.2487), "model_load_secs": 5.123456},
    ),
    (
        "0.12 - 0.13",
        "Model loading took 14.2487 GiB memory and 5.123456 seconds",
        {"model_load_bytes": gib(14.2487), "model_load_secs": 5.123456},
    ),
    (
        "0.14+",
        "Model loading took 30.9 GiB memory and 5.123456 seconds",
        {"model_load_bytes": gib(30.9), "model_load_secs": 5.123456},
    ),
    (
        "V0 record, line 2",
        "the current vLLM instance can use total_gpu_memory (15.77GiB) x gpu_memory_utilization (0.95) = 14.98GiB",
        {"total_bytes": gib(15.77), "gpu_memory_utilization": 0.95, "requested_bytes": gib(14.98)},
    ),
    (
        "V0 record, line 3",
        "model weights take 7.25GiB; non_torch_memory takes 0.06GiB; PyTorch activation peak memory takes 0.48GiB; "
        "the rest of the memory reserved for KV Cache is 7.19GiB.",
        {
            "weights_bytes": gib(7.25),
            "non_torch_bytes": gib(0.06),
            "peak_activation_bytes": gib(0.48),
            "available_kv_bytes": gib(7.19),
        },
    ),
    (
        "0.6.4",
        "Memory profiling results: total_gpu_memory=23.58GiB initial_memory_usage=15.34GiB peak_torch_memory=17.98GiB "
        "memory_usage_post_profile=15.35GiB non_torch_memory=0.35GiB kv_cache_size=2.89GiB gpu_memory_utilization=0.90",
        {
            "total_bytes": gib(23.58),
            "initial_usage_bytes": gib(15.34),
            "peak_torch_bytes": gib(17.98),
            "post_profile_bytes": gib(15.35),
            "non_torch_bytes": gib(0.35),
            "available_kv_bytes": gib(2.89),
            "gpu_memory_utilization": 0.9,
        },
    ),
    (
        "V1 DEBUG, before",
        "Initial free memory: 31.29 GiB; Requested memory: 0.98 (util), 31.22 GiB",
        {"free_bytes": gib(31.29), "gpu_memory_utilization": 0.98, "requested_bytes": gib(31.22)},
    ),
    (
        "V1 DEBUG <= 0.26",
        "Memory profiling takes 3.21 seconds. Total non KV cache memory: 8.3GiB; torch peak memory increase: 1.46GiB; "
        "non-torch forward increase memory: 0.2GiB; weights memory: 6.64GiB.",
        {"peak_activation_bytes": gib(1.46), "non_torch_bytes": gib(0.2), "weights_bytes": gib(6.64)},
    ),
    (
        "V1 DEBUG 0.27+",
        "Memory profiling takes 3.21 seconds. Total non KV cache memory: 26.03GiB; torch peak memory increase: "
        "1.46GiB; "
        "total consumed (from mem_get_info): 24.57GiB; weights memory: 22.64GiB.",
        {"peak_activation_bytes": gib(1.46), "consumed_bytes": gib(24.57), "weights_bytes": gib(22.64)},
    ),
    (
        "fork",
        "memory after profile: torch reserved 29.10 GiB, torch allocated 27.33 GiB, non-torch 1.45 GiB (before load: "
        "non-torch 0.57 GiB)",
        {"torch_reserved_bytes": gib(29.1), "torch_allocated_bytes": gib(27.33), "non_torch_bytes": gib(1.45)},
    ),
    ("0.18+", "Estimated CUDA graph memory: 0.58 GiB total", {"graph_estimated_bytes": gib(0.58)}),
    ("0.9+", "Available KV cache memory: 4.87 GiB", {"available_kv_bytes": gib(4.87)}),
    ("0.14+, zero dropped", "Available KV cache memory: 30.9 GiB", {"available_kv_bytes": gib(30.9)}),
    (
        "0.10.2+, pinned",
        "Initial free memory 31.29 GiB, reserved 2.95 GiB memory for KV Cache as specified by kv_cache_memory_bytes "
        "config "
        "and skipped memory profiling. This does not respect the gpu_memory_utilization config.",
        {"free_bytes": gib(31.29), "available_kv_bytes": gib(2.95)},
    ),
    (
        "pinned, no space",
        "Initial free memory 31.29 GiB, reserved 2.95GiB memory for KV Cache as specified by kv_cache_memory_bytes "
        "config "
        "and skipped memory profiling. This does does not respect the gpu_memory_utilization config.",
        {"free_bytes": gib(31.29), "available_kv_bytes": gib(2.95)},
    ),
    (
        "0.18+ advisory",
        "CUDA graph memory profiling is enabled (default since v0.21.0). The current --gpu-memory-utilization=0.9000 "
        "is "
        "equivalent to --gpu-memory-utilization=0.8755 without CUDA graph memory profiling. To maintain the same "
        "effective "
        "KV cache size as before, increase --gpu-memory-utilization to 0.9245.",
        {
            "gpu_memory_utilization": 0.9,
            "utilization_without_graph_profile": 0.8755,
            "utilization_equivalent": 0.9245,
        },
    ),
    (
        "0.26+ start-up plan",
        "Applying persisted startup plan (fingerprint ab12): kv_cache_memory_bytes=3166500000 (2.95 GiB), recorded "
        "free-memory baseline 31.29 GiB, current 31.3 GiB. Memory profiling will be skipped.",
        {"available_kv_bytes": 3166500000, "free_bytes": gib(31.29), "current_free_bytes": gib(31.3)},
    ),
    (
        "0.29+ ROCm",
        "Free memory grew by 0.46 GiB during profiling (initial 188.29 GiB, current 188.75 GiB). Sizing the KV cache "
        "from "
        "the 20.1 GiB torch reserved instead",
        {"free_bytes": gib(188.29), "current_free_bytes": gib(188.75), "torch_reserved_bytes": gib(20.1)},
    ),
    ("V0 blocks", "# GPU blocks: 1478, # CPU blocks: 2048", {"gpu_blocks": 1478, "cpu_blocks": 2048}),
    ("0.7 - 0.10 V0 blocks", "# rocm blocks: 1478, # CPU blocks: 2048", {"gpu_blocks": 1478, "cpu_blocks": 2048}),
    ("V1 0.7.3 blocks", "# GPU blocks: 1478", {"gpu_blocks": 1478}),
    ("0.8 - 0.27", "GPU KV cache size: 75,840 tokens", {"kv_tokens": 75840}),
    (
        "0.8 - 0.27, second line",
        "Maximum concurrency for 120,000 tokens per request: 2.48x",
        {"max_model_len": 120000, "max_concurrency": 2.48},
    ),
    (
        "0.28+, one line",
        "GPU KV cache size: 401,408 tokens, Maximum concurrency for 200,704 tokens per request: 2.00x",
        {"kv_tokens": 401408, "max_model_len": 200704, "max_concurrency": 2.0},
    ),
    (
        "0.30+, other device",
        "CPU KV cache size: 51,200 tokens, Maximum concurrency for 51,072 tokens per request: 1.00x",
        {"kv_tokens": 51200, "max_model_len": 51072, "max_concurrency": 1.0},
    ),
    (
        "0.30+, with host",
        "GPU + host KV cache size: 51,200 tokens, Maximum concurrency for 51,072 tokens per request: 1.00x",
        {"kv_tokens": 51200},
    ),
    (
        "0.9+",
        "Add 1 padding layers, may waste at most 5.00% KV cache memory",
        {"padding_layers": 1, "padding_waste_pct": 5.0},
    ),
    (
        "0.14+",
        "Auto-fit max_model_len: full model context length 131072 fits in available GPU memory",
        {"max_model_len": 131072, "auto_fit": True},
    ),
    (
        "0.14+",
        "Auto-fit max_model_len: reduced from 40960 to 27120 to fit in available GPU memory (1.65 GiB available for KV "
        "cache)",
        {"configured_max_model_len": 40960, "max_model_len": 27120, "auto_fit": True, "available_kv_bytes": gib(1.65)},
    ),
    (
        "0.33",
        "Auto-fit max_model_len: reduced from 40960 to 27120 to fit in available KV cache memory (1.65 GiB GPU + 4.0 "
        "GiB "
        "host)",
        {"configured_max_model_len": 40960, "max_model_len": 27120, "available_kv_bytes": gib(1.65)},
    ),
    (
        "<= 0.5",
        "Graph capturing finished in 14 secs.",
        {"graph_capture_secs": 14},
    ),
    (
        "0.6+",
        "Graph capturing finished in 14 secs, took 0.31 GiB",
        {"graph_capture_secs": 14, "graph_capture_bytes": gib(0.31)},
    ),
    (
        "0.6+, negative",
        "Graph capturing finished in 1 secs, took -0.06 GiB",
        {"graph_capture_secs": 1, "graph_capture_bytes": -gib(0.06)},
    ),
    (
        "0.18+",
        "CUDA graph pool memory: 0.1 GiB (actual), 0.58 GiB (estimated), difference: 0.47 GiB (457.5%).",
        {"graph_actual_bytes": gib(0.1), "graph_estimated_bytes": gib(0.58)},
    ),
    (
        "0.10.2 - 0.26, summary",
        "Free memory on device (31.29/31.86 GiB) on startup. Desired GPU memory utilization is (0.98, 31.22 GiB). "
        "Actual "
        "usage is 20.1 GiB for weight, 1.46 GiB for peak activation, 0.57 GiB for non-torch memory, and 0.31 GiB for "
        "CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=9250000000` (8.61 GiB) to fit "
        "into requested memory, or `--kv-cache-memory=9330000000` (8.69 GiB) to fully utilize gpu memory. Current kv "
        "cache "
        "memory in use is 9.09 GiB.",
        {
            "free_bytes": gib(31.29),
            "total_bytes": gib(31.86),
            "gpu_memory_utilization": 0.98,
            "requested_bytes": gib(31.22),
            "weights_bytes": gib(20.1),
            "peak_activation_bytes": gib(1.46),
            "non_torch_bytes": gib(0.57),
            "graph_actual_bytes": gib(0.31),
            "kv_suggest_fit_bytes": 9250000000,
            "kv_suggest_full_bytes": 9330000000,
            "kv_in_use_bytes": gib(9.09),
        },
    ),
    (
        "0.27+, summary",
        "Free memory on device (31.5/31.86 GiB) on startup. Desired GPU memory utilization is (0.97, 30.9 GiB). Actual "
        "usage is 24.57 GiB for consumed memory (weights + non-torch), 1.46 GiB for peak activation, and 0.31 GiB for "
        "CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=4739000000` (4.41 GiB) to fit",
        {"consumed_bytes": gib(24.57), "peak_activation_bytes": gib(1.46), "kv_suggest_fit_bytes": 4739000000},
    ),
    (
        "<= 0.19",
        "init engine (profile, create kv cache, warmup model) took 38.12 seconds",
        {"init_engine_secs": 38.12},
    ),
    (
        "0.20+",
        "init engine (profile, create kv cache, warmup model) took 38.12 s (compilation: 24.5 s)",
        {"init_engine_secs": 38.12, "compile_secs": 24.5},
    ),
    (
        "0.28+ CPU",
        "Auto set (0.19/14.96) GiB for KV cache on node 0, with 0.74 GiB requested memory for the worker. 0.55 GiB "
        "memory "
        "was consumed by non-kv usages.",
        {
            "available_kv_bytes": gib(0.19),
            "total_bytes": gib(14.96),
            "requested_bytes": gib(0.74),
            "consumed_bytes": gib(0.55),
        },
    ),
    ("0.28+ CPU", "Explicitly set (0.25/11.21) GiB for KV cache on node 0.", {"available_kv_bytes": gib(0.25)}),
    (
        "serving",
        "Engine 000: Avg prompt throughput: 84.6 tokens/s, Avg generation throughput: 8.1 tokens/s, Running: 1 reqs, "
        "Waiting: 0 reqs, GPU KV cache usage: 12.5%, Prefix cache hit rate: 0.0%",
        {"kv_usage_pct": 12.5},
    ),
    ("fork", "PLE offload: locked 38.74 GiB of PLE weights in RAM", {"ple_locked_bytes": gib(38.74)}),
    (
        "fork, plan check",
        "expert offload plan check (this rank): runtime overhead planned 5.25 GiB, measured 2.51 GiB (-2.74)",
        {
            "plan_overhead_planned_bytes": gib(5.25),
            "plan_overhead_measured_bytes": gib(2.51),
            "plan_overhead_delta_bytes": -gib(2.74),
        },
    ),
    (
        "fork, later plan check",
        "expert offload plan check: runtime overhead planned 5.25 GiB, measured 5.75 GiB (+0.50); KV planned 9190 "
        "B/token, "
        "measured 7701 B/token (-1489)",
        {
            "plan_overhead_delta_bytes": gib(0.5),
            "plan_kv_b_per_token": 9190,
            "measured_kv_b_per_token": 7701,
            "kv_b_per_token_delta": -1489,
        },
    ),
    (
        "Neuron 0.21, 0.24",
        "Neuron HBM: 7.06 GiB used, 16.94 GiB free",
        {"hbm_total_used_bytes": gib(7.06), "free_bytes": gib(16.94)},
    ),
    (
        "Neuron DEBUG",
        "KV cache heuristic: user_budget=8.81 GiB, cap=6.48 GiB (total_budget=21.60 GiB, total_hbm=24.00 GiB, "
        "bytes_used=12.79 GiB, cap_fraction=0.30), effective=6.48 GiB",
        {"total_bytes": gib(24), "weights_bytes": gib(12.79), "effective_kv_bytes": gib(6.48)},
    ),
    (
        "Neuron DEBUG",
        "KV cache memory: 24.00 GiB total × 90.0% gpu_memory_utilization - 12.79 GiB used = 8.81 GiB user budget, 6.48 "
        "GiB "
        "available",
        {"total_bytes": gib(24), "weights_bytes": gib(12.79), "available_kv_bytes": gib(6.48)},
    ),
    (
        "Neuron fork",
        "KV cache need: 3.125 GiB for 4 sequence(s) of 8192 tokens (per rank)",
        {"kv_needed_bytes": gib(3.125)},
    ),
    ("0.10", "vllm cache_config_info with initialization after num_gpu_blocks is: 8192", {"gpu_blocks": 8192}),
    (
        "SGLang",
        "[2026-01-02 03:04:05 TP0] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=79.72 GB, "
        "mem "
        "usage=15.15 GB.",
        {"available_after_weights_bytes": gib(79.72), "weights_bytes": gib(15.15)},
    ),
    (
        "SGLang",
        "[2026-01-02 03:04:05] max_total_num_tokens=450000, chunked_prefill_size=8192, max_running_requests=2048, "
        "context_len=131072, available_gpu_mem=22.50 GB",
        {"max_total_tokens": 450000, "max_model_len": 131072, "free_bytes": gib(22.5)},
    ),
    (
        "0.18, advisory",
        "In v0.19, CUDA graph memory profiling will be enabled by default "
        "(VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1). To "
        "try it now, set it and increase --gpu-memory-utilization from 0.7000 to 0.7021 to maintain the KV cache size.",
        {"gpu_memory_utilization": 0.7, "utilization_equivalent": 0.7021},
    ),
    (
        "0.18 - 0.19, capped",
        "Capping cudagraph capture sizes from max 512 to 352 to fit Mamba cache blocks (361 blocks available).",
        {"state_blocks": 361},
    ),
    (
        "Neuron 2.33, by label",
        "Neuron memory: logical-core HBM 36.00 GiB, model weights 8.00 GiB, reserved headroom 4.00 GiB, KV cache "
        "budget "
        "24.00 GiB",
        {
            "total_bytes": gib(36),
            "weights_bytes": gib(8),
            "reserved_headroom_bytes": gib(4),
            "available_kv_bytes": gib(24),
        },
    ),
    (
        "llama.cpp",
        "srv    load_model: initializing, n_slots = 4, n_ctx_slot = 32768, kv_unified = 'false'",
        {"n_slots": 4, "n_ctx_slot": 32768},
    ),
    (
        "llama.cpp",
        "llama_kv_cache:        CPU KV buffer size =    32.00 MiB",
        {"kv_in_use_bytes": 32 * MIB},
    ),
]


@pytest.mark.parametrize(
    ("release", "line", "facts"), WORDINGS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_line_says_its_figures(release: str, line: str, facts: Facts) -> None:
    ledger = read(P + line)
    assert {name: ledger.get(name) for name in facts} == facts, release
    for name in facts:
        assert ledger.facts[name].evidence.line == 1
    assert ledger.outcome != "failed"


@pytest.mark.parametrize(
    ("release", "line", "facts"), WORDINGS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_no_prefix_changes_what_a_line_says(release: str, line: str, facts: Facts) -> None:
    prefixes = (
        "",
        "INFO 11-25 10:02:11 model_runner.py:1077] ",
        "\x1b[1;36m(VllmWorker rank=0 pid=7)\x1b[0;0m INFO 05-01 10:00:00 [gpu_worker.py:1] ",
        "vllm-1  | (EngineCore_DP0 pid=5) INFO 05-01 10:00:00 [core.py:1] ",
        "2026-09-30T10:00:00.123456789Z stdout F (Worker_PP1_TP3 pid=7) INFO 05-01 10:00:00 [a.py:1] ",
        "Sep 30 10:00:00 host podman[99]: (Worker_TP0 pid=7) INFO 05-01 10:00:00 [a.py:1] ",
    )
    for prefix in prefixes:
        ledger = read(prefix + line)
        assert {name: ledger.get(name) for name in facts} == facts, f"{release} after {prefix!r}"


def test_the_plan_table_of_the_fork_reads_in_both_layouts() -> None:
    table = read(
        "budget (total x util)                          31.29 GiB",
        "non-expert weights                              6.35",
        "KV reserve (one max-model-len request +8%)      1.85     registry 9190 B/token",
        "CUDA graphs                                     0.07",
        "runtime overhead                                5.25",
        "expert cache space 17.77 GiB 7,762 slots",
    )
    assert table.family == "rdna4"
    assert table.get("plan_budget_bytes") == gib(31.29)
    assert table.get("plan_non_expert_bytes") == gib(6.35)
    assert table.get("plan_kv_reserve_bytes") == gib(1.85)
    assert table.get("plan_registry_b_per_token") == 9190
    assert table.get("plan_graphs_bytes") == gib(0.07)
    assert table.get("plan_overhead_bytes") == gib(5.25)
    assert table.get("plan_expert_cache_bytes") == gib(17.77)
    assert table.get("plan_slots") == 7762
    assert table.facts["plan_budget_bytes"].provenance is Provenance.ASSUMED


@pytest.mark.parametrize(
    "line",
    [
        "Capturing cudagraphs for decoding. This may lead to unexpected consequences if the model is not static. To "
        "run the "
        "model in eager mode, set 'enforce_eager=True' or use '--enforce-eager' in the CLI. If out-of-memory error "
        "occurs "
        "during cudagraph capture, consider decreasing `gpu_memory_utilization` or switching to eager mode.",
        "CUDA graph memory profiling is enabled (default since v0.21.0). The current --gpu-memory-utilization=0.9000 "
        "is "
        "equivalent to --gpu-memory-utilization=0.8755 without it; to keep the KV cache, increase "
        "--gpu-memory-utilization to 0.9245.",
        "Found ulimit of 20000 and failed to automatically increase with error current limit exceeds maximum limit. "
        "This "
        "can cause fd limit errors like `OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n",
        "Free memory on device (22.93/23.56 GiB) on startup. Desired GPU memory utilization is (0.935, 22.03 GiB). "
        "Actual",
    ],
)
def test_advice_in_a_healthy_line_is_no_failure(line: str) -> None:
    ledger = read(P + line)
    assert ledger.cause is None
    assert ledger.outcome in {"booted", "unknown"}


def test_a_release_that_prints_a_size_and_no_more_leaves_the_rest_missing() -> None:
    ledger = read(P + "GPU KV cache size: 150,745 tokens, Maximum concurrency for 124,000 tokens")
    assert ledger.get("kv_tokens") == 150745
    assert "max_concurrency" not in ledger.facts
    assert ledger.states["max_concurrency"] == "absent"


def test_pinned_bytes_suppress_the_profile_lines() -> None:
    ledger = read(
        P
        + "Initial free memory 31.29 GiB, reserved 2.95 GiB memory for KV Cache as specified by kv_cache_memory_bytes "
        "config and skipped memory profiling."
    )
    assert ledger.states["graph_estimated_bytes"] == "suppressed"
    assert ledger.states["kv_tokens"] == "absent"


def test_a_figure_of_one_rank_among_several_is_marked() -> None:
    worker = "(Worker_TP{0} pid={0}) INFO 09-30 10:00:00 [m.py:1] {1}"
    ledger = read(
        worker.format(0, "Starting to load model /m..."),
        worker.format(1, "Starting to load model /m..."),
        worker.format(0, "Available KV cache memory: 2.97 GiB"),
    )
    assert ledger.states["available_kv_bytes"] == "rank 0 only"


def test_the_binding_rank_is_the_heavier_use_and_the_least_room() -> None:
    worker = "(Worker_TP{0} pid={0}) INFO 09-30 10:00:00 [m.py:1] {1}"
    ledger = read(
        worker.format(0, "Available KV cache memory: 2.97 GiB"),
        worker.format(1, "Available KV cache memory: 2.31 GiB"),
        worker.format(0, "Graph capturing finished in 2 secs, took 0.31 GiB"),
        worker.format(1, "Graph capturing finished in 2 secs, took 0.17 GiB"),
    )
    assert ledger.get("available_kv_bytes") == gib(2.31)
    assert ledger.facts["available_kv_bytes"].rank == "Worker_TP1"
    assert ledger.get("graph_capture_bytes") == gib(0.31)
    assert {rank: value.value for rank, value in ledger.ranks["graph_capture_bytes"].items()} == {
        "Worker_TP0": gib(0.31),
        "Worker_TP1": gib(0.17),
    }


def test_a_capture_line_printed_twice_counts_the_last_time() -> None:
    line = "(Worker_TP0 pid=7) INFO [model_runner.py]  Graph capturing finished in {} secs, took {} GiB"
    ledger = read(line.format(3, "0.50"), line.format(2, "0.31"))
    assert ledger.get("graph_capture_bytes") == gib(0.31)
    assert ledger.facts["graph_capture_bytes"].evidence.line == 2


def test_the_usage_is_the_peak() -> None:
    line = "Engine 000: Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: {}%, Prefix cache hit rate: 0.0%"
    assert read(line.format(3.5), line.format(97.5), line.format(0.0)).get("kv_usage_pct") == 97.5


def test_precision_is_half_a_unit_of_the_last_digit_and_a_dropped_zero_is_no_digit_less() -> None:
    assert read("Available KV cache memory: 30.9 GiB").facts["available_kv_bytes"].precision == pytest.approx(
        0.005 * GIB
    )
    assert read("Loading model weights took 14.9888 GB").facts["weights_bytes"].precision == pytest.approx(5e-5 * GIB)


def test_json_records_say_what_text_records_say() -> None:
    record = (
        '{"asctime": "09-30 10:00:00", "levelname": "INFO", "name": "vllm", "processName": "Worker_TP1", '
        '"process": 77, "message": "Available KV cache memory: 2.97 GiB"}'
    )
    ledger = read(record)
    assert ledger.facts["available_kv_bytes"].rank == "Worker_TP1"
    assert ledger.facts["available_kv_bytes"].evidence.text == "Available KV cache memory: 2.97 GiB"


def test_a_progress_bar_does_not_hide_what_follows_it_in_the_line() -> None:
    ledger = read(
        "(Worker_TP0 pid=7) Capturing CUDA graphs (decode, FULL):   0%|  | 0/3\rCapturing CUDA graphs (decode, FULL): "
        "100%|"
        "##| 3/3\r(Worker_TP0 pid=7) INFO [m.py:1] Graph capturing finished in 2 secs, took 0.31 GiB",
        "(Worker_TP0 pid=7) INFO [m.py:1] Available KV cache memory: 2.97 GiB",
    )
    assert ledger.facts["graph_capture_bytes"].evidence.line == 1
    assert ledger.facts["available_kv_bytes"].evidence.line == 2
    assert ledger.phase is Phase.GRAPH_CAPTURE


def test_a_neuron_table_with_columns_reads_its_overall_row() -> None:
    ledger = read(
        "2025-May-15 20:58:33.895937 224822:224822 ERROR  TDRV:print_lnc_hbm_details   LNC size is 1. Neuron Cores "
        "using "
        "this HBM: NC 4 and NC 5",
        "2025-May-15 20:58:33.897479 224822:224822 ERROR  TDRV:log_dev_mem   Failed to allocate 4.000GB (alignment: "
        "none, "
        "usage: tensors) on ND 0:NC 4",
        "              |          |  Model   |  Model   |          |  Shared  |DMA Rings |",
        "              |  TOTAL   |   Code   |Constants | Tensors  |Scratchpad|    IO    |",
        "ND 0 Overall  | 20.188GB |192.102MB | 82.344KB | 20.000GB |  0.000B  |   n/a    |",
        "\\_NC 4        | 20.094GB | 96.065MB | 58.344KB | 20.000GB |  0.000B  |179.000KB |",
    )
    assert ledger.failure_class == "runtime_hbm_oom"
    assert ledger.get("tried_alloc_bytes") == 4 * GIB
    assert ledger.get("alloc_usage") == "tensors"
    assert (ledger.get("nd"), ledger.get("nc")) == (0, 4)
    assert "alloc_alignment_bytes" not in ledger.facts
    assert ledger.get("hbm_total_used_bytes") == round(20.188 * GIB)
    assert ledger.get("hbm_model_code_bytes") == round(192.102 * MIB)
    assert ledger.get("hbm_constants_bytes") == round(82.344 * 1024)
    assert ledger.get("hbm_tensors_bytes") == 20 * GIB
    assert ledger.get("hbm_shared_scratchpad_bytes") == 0
    assert "hbm_dma_rings_io_bytes" not in ledger.facts


def test_a_size_that_one_line_rounds_and_another_states_is_the_stated_one() -> None:
    ledger = read(
        "load_tensors: loading model tensors, this can take a while... (mmap = true, direct_io = false)",
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 144817.04 MiB on device 0: cudaMalloc failed: out of "
        "memory",
        "alloc_tensor_range: failed to allocate CUDA0 buffer of size 151851674624",
        "llama_model_load: error loading model: unable to allocate CUDA0 buffer",
    )
    assert ledger.failure_class == "weights_oom"
    assert ledger.phase is Phase.WEIGHTS_LOAD
    assert ledger.get("tried_alloc_bytes") == 151851674624


def test_the_rank_without_a_prefix_is_named_beside_the_others() -> None:
    ledger = read(
        "INFO 08-19 07:51:03 model_runner.py:732] Loading model weights took 2.3463 GB",
        "(VllmWorkerProcess pid=13105) INFO 08-19 07:51:03 model_runner.py:732] Loading model weights took 2.4463 GB",
        "(VllmWorkerProcess pid=13106) INFO 08-19 07:51:03 model_runner.py:732] Loading model weights took 2.3463 GB",
    )
    assert set(ledger.ranks["weights_bytes"]) == {
        "driver",
        "VllmWorkerProcess pid=13105",
        "VllmWorkerProcess pid=13106",
    }
    assert ledger.facts["weights_bytes"].rank == "VllmWorkerProcess pid=13105"
