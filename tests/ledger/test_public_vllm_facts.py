"""Figures of vLLM logs in the wording of releases, and in the shape, in which people paste them."""

from __future__ import annotations

import pytest

from tests.ledger.support import GIB, MIB, read
from tests.ledger.variant import Facts, W, gib

SUGGESTED = (
    W
    + "Free memory on device (78.66/79.19 GiB) on startup. Desired GPU memory utilization is (0.9, 71.27 GiB). Actual "
    "usage is 14.08 GiB for weight, 1.97 GiB for peak activation, 0.07 GiB for non-torch memory, and 0.67 GiB for "
    "CUDAGraph memory. Replace gpu_memory_utilization config with {fit} to fit into requested memory, or {full} to "
    "fully utilize gpu memory. Current kv cache memory in use is {now}."
)
SUGGESTIONS: Facts = {"kv_suggest_fit_bytes": 58333988249, "kv_suggest_full_bytes": 66273897472}

LINES: list[tuple[str, str, Facts]] = [
    (
        "torch 2.1 writes capacity without an i (vllm#2140)",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.50 GiB. GPU 0 has a total capacty of "
        "23.69 GiB of which 3.09 GiB is free. Including non-PyTorch memory, this process has 20.57 GiB memory in use.",
        {"device": 0, "total_bytes": gib(23.69), "free_bytes": gib(3.09), "process_in_use_bytes": gib(20.57)},
    ),
    (
        "before 0.4 the engine names no version (vllm#2269)",
        "INFO 12-26 10:00:00 llm_engine.py:73] Initializing an LLM engine with config: model='m', max_seq_len=4096, "
        "tensor_parallel_size=4, quantization=None, seed=0)",
        {"max_model_len": 4096, "tensor_parallel_size": 4},
    ),
    (
        "0.10.2 and 0.11 suggest bytes alone",
        SUGGESTED.format(
            fit="`--kv-cache-memory=58333988249`", full="`--kv-cache-memory=66273897472`", now="59212694937 bytes"
        ),
        SUGGESTIONS | {"kv_in_use_bytes": 59212694937, "weights_bytes": gib(14.08), "non_torch_bytes": gib(0.07)},
    ),
    (
        "backticks that a thread took for its own",
        SUGGESTED.format(
            fit="--kv-cache-memory=58333988249 (54.33 GiB)",
            full="--kv-cache-memory=66273897472 (61.72 GiB)",
            now="55.15 GiB",
        ),
        SUGGESTIONS | {"kv_in_use_bytes": gib(55.15)},
    ),
    (
        "a # that a thread took for a heading (vllm#10517)",
        "GPU blocks: 1952, # CPU blocks: 2048",
        {"gpu_blocks": 1952, "cpu_blocks": 2048},
    ),
    (
        "V0 on a CPU counts its own blocks",
        "INFO 12-26 10:00:00 cpu_executor.py:1] # CPU blocks: 682",
        {"gpu_blocks": 682},
    ),
    (
        "quotation marks that a forum made beautiful",
        "INFO 09-13 10:00:00 [cli_args.py:261] non-default args: {‘host’: ‘0.0.0.0’, ‘max_model_len’: 16384, "
        "‘max_num_batched_tokens’: 200000, ‘max_num_seqs’: 200}",
        {"max_model_len": 16384, "max_num_batched_tokens": 200000, "max_num_seqs": 200},
    ),
    (
        "memory that did not come back, in bytes (ms-swift#3241)",
        "AssertionError: Error in memory profiling. Initial free memory 62277025792, current free memory 62277025792. "
        "This happens when the GPU memory was not properly cleaned up.",
        {"free_bytes": 62277025792, "current_free_bytes": 62277025792},
    ),
    (
        "0.7.3 prints every digit, and no space (vllm#14574)",
        "ValueError: To serve at least one request with the models's max seq len (131072), (16.0 GB KV cache isneeded, "
        "which is larger than the available KV Cache memory (8.283203125 GB). Try increasing",
        {"max_model_len": 131072, "kv_needed_bytes": 16 * GIB, "available_kv_bytes": round(8.283203125 * GIB)},
    ),
    (
        "tpu-inference",
        "(EngineCore pid=5) INFO 06-03 10:00:00 [tpu_worker.py:437] Memory statistics | total_hbm_limit_gb=94.75GiB | "
        "total_hbm_limit_cap_gb=80.53GiB | total_hbm_used_gb=16.58GiB | total_hbm_avail_gb=63.95GiB",
        {
            "total_bytes": gib(94.75),
            "requested_bytes": gib(80.53),
            "consumed_bytes": gib(16.58),
            "available_kv_bytes": gib(63.95),
        },
    ),
    (
        "a device of a TPU's runtime",
        "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 2.00G. That was not possible. "
        "There are 1.50G free.; (0x0x0_HBM0)",
        {"tried_alloc_bytes": 2 * GIB, "free_bytes": gib(1.5)},
    ),
    (
        "an allocation on the host",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 234881024 bytes. Error code 12 (Cannot allocate memory)",
        {"tried_alloc_bytes": 234881024},
    ),
    (
        "what V0 worked out for its KV cache may be negative",
        "INFO 02-14 10:00:00 worker.py:266] model weights take 17.00GiB; non_torch_memory takes 0.10GiB; PyTorch "
        "activation peak memory takes 3.56GiB; the rest of the memory reserved for KV Cache is -0.69GiB.",
        {"weights_bytes": gib(17), "peak_activation_bytes": gib(3.56), "available_kv_bytes": -gib(0.69)},
    ),
]


@pytest.mark.parametrize(("name", "line", "facts"), LINES, ids=[name for name, *_ in LINES])
def test_a_line_says_its_figures(name: str, line: str, facts: Facts) -> None:
    ledger = read(line)
    assert {fact: ledger.get(fact) for fact in facts} == facts, name


WRAPPED: list[tuple[str, Facts]] = [
    (
        W + "Free memory on device (78.66/79.19 GiB) on startup. Desired GPU memory utilization is (0.9, 71.27 GiB). "
        "Actual usage is 14.08 GiB for weight, 1.97 GiB for peak activation, and 0.67 GiB for CUDAGraph memory.",
        {"free_bytes": gib(78.66), "requested_bytes": gib(71.27), "graph_actual_bytes": gib(0.67)},
    ),
    (
        "INFO 11-25 10:00:00 worker.py:232] Memory profiling results: total_gpu_memory=23.58GiB "
        "initial_memory_usage=15.34GiB peak_torch_memory=17.98GiB memory_usage_post_profile=15.35GiB "
        "non_torch_memory=0.35GiB kv_cache_size=2.89GiB gpu_memory_utilization=0.90",
        {"total_bytes": gib(23.58), "available_kv_bytes": gib(2.89), "gpu_memory_utilization": 0.9},
    ),
    (
        W + "GPU KV cache size: 394,633 tokens, Maximum concurrency for 10,240 tokens per request: 38.54x",
        {"kv_tokens": 394633, "max_model_len": 10240, "max_concurrency": 38.54},
    ),
    (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 136.00 MiB. GPU 1 has a total capacity of "
        "23.57 GiB of which 61.44 MiB is free.",
        {"tried_alloc_bytes": 136 * MIB, "device": 1, "total_bytes": gib(23.57), "free_bytes": round(61.44 * MIB)},
    ),
    (
        "ValueError: User-specified max_model_len (40000) is greater than the derived max_model_len "
        "(max_position_embeddings=32768 or model_max_length=None in model's config.json).",
        {"max_model_len": 40000, "native_max_model_len": 32768},
    ),
]


@pytest.mark.parametrize("line", range(len(WRAPPED)))
@pytest.mark.parametrize("width", [100, 110, 120, 133, 160])
def test_a_terminal_broke_the_line(line: int, width: int) -> None:
    """It breaks within words and numbers; a figure is whole or missing, never its first digits."""
    text, facts = WRAPPED[line]
    ledger = read(*(text[start : start + width] for start in range(0, len(text), width)))
    assert {fact: ledger.get(fact) for fact in facts} == facts


def test_the_class_of_an_exception_is_enough() -> None:
    """The width of a terminal leaves no more than that of its first line."""
    for width in range(len("torch.OutOfMemoryError:"), 80):
        text = WRAPPED[3][0]
        ledger = read(*(text[start : start + width] for start in range(0, len(text), width)))
        assert ledger.failure_class == "request_oom", width
        assert ledger.get("tried_alloc_bytes") == 136 * MIB, width


def test_host_blocks_are_not_the_devices() -> None:
    """A line that was broken before its first figure."""
    ledger = read("INFO # GPU", " blocks: 50231, # CPU blocks: 8192")
    assert ledger.get("gpu_blocks") in {None, 50231}
