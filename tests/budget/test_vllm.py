"""Mainline vLLM: lines that real engines printed, re-derived."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_kvbudget.budget.kv_need import CannotPriceError, kv_need, layer_kinds
from pytest_kvbudget.budget.model import BudgetInputError
from pytest_kvbudget.budget.utilization import requested_bytes
from pytest_kvbudget.budget.vllm import (
    concurrency,
    cpu_kv_bytes,
    cpu_refusal,
    default_utilization,
    estimated_max_model_len,
    kv_plan,
    printed_tokens,
    printed_tokens_by_group,
    suggestions,
    tokens_agree,
)
from pytest_kvbudget.units import GIB

CENT = 0.01 * GIB


def gib(value: float) -> int:
    return int(value * GIB)


@pytest.mark.parametrize(
    ("requested", "consumed", "peak", "available"),
    [
        pytest.param(30.9, 24.57, 1.46, 4.87, id="R9700 TP4"),
        pytest.param(72.91, 15.26, 1.44, 56.21, id="0.92 of 79.25 GiB"),
    ],
)
def test_available_closes(requested: float, consumed: float, peak: float, available: float) -> None:
    plan = kv_plan(
        total_bytes=gib(requested), utilization=1.0, consumed_bytes=gib(consumed), peak_activation_bytes=gib(peak)
    )
    assert abs(plan.left_bytes - available * GIB) <= 2 * CENT


def test_requested_is_a_ceiling() -> None:
    assert requested_bytes(10, 0.91) == 10
    assert requested_bytes(100, 0.5) == 50
    assert requested_bytes(gib(23.56), 0.935) / GIB == pytest.approx(22.03, abs=0.01)


@pytest.mark.parametrize(
    ("figures", "fit_bytes", "full_bytes"),
    [
        # free, requested, consumed (weights + non-torch), peak activation, captured graphs
        pytest.param((22.93, 22.03, 19.47, 0.6, 0.1), 1828800984, 2798683648, id="8x3090"),
        pytest.param((79.99, 73.6, 51.66, 2.4, 0.71), 20064085607, 26927570944, id="80 GiB"),
        pytest.param((139.21, 125.83, 74.28 + 1.38, 5.58, 2.37), 45175492096, 59540753920, id="0.11 wording"),
    ],
)
def test_suggestions_are_rederived(figures: tuple[float, ...], fit_bytes: int, full_bytes: int) -> None:
    free, requested, consumed, peak, graphs = (gib(figure) for figure in figures)
    suggested = suggestions(
        requested=requested,
        free_at_init_bytes=free,
        consumed_bytes=consumed,
        peak_activation_bytes=peak,
        graph_bytes=graphs,
    )
    # four printed figures of two decimals
    assert abs(suggested.fit_bytes - fit_bytes) <= 2.5 * CENT
    assert abs(suggested.full_bytes - full_bytes) <= 2.5 * CENT


def test_pinned_pool_ignores_utilization() -> None:
    plan = kv_plan(
        total_bytes=0, utilization=0.9, consumed_bytes=0, peak_activation_bytes=0, kv_cache_memory_bytes=52_428_800
    )
    assert plan.left_bytes == 52_428_800
    assert [term.name for term in plan.terms] == ["pinned pool"]
    assert plan.warnings


@pytest.mark.parametrize(
    ("version", "utilization"), [("0.19.1", 0.9), ("0.20.2", 0.92), ("0.32.0", 0.92), ("v0.20.1", 0.9)]
)
def test_default_utilization_by_release(version: str, utilization: float) -> None:
    assert default_utilization(version) == utilization


def test_unreadable_release_has_no_default() -> None:
    with pytest.raises(BudgetInputError, match="cannot be read"):
        default_utilization("nightly")


TINY = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "head_dim": 64,
    "torch_dtype": "bfloat16",
}
"""The model of the real CPU boots: 1,024 bytes a token."""


def need(config: dict[str, Any], **settings: Any) -> int:
    return kv_need(config, **{"max_model_len": 1, "block_tokens": 1, **settings}).need_bytes


def test_real_cpu_boots() -> None:
    whole = kv_need(TINY, max_model_len=131_072, block_tokens=128)
    assert whole.need_bytes == 134_217_728
    assert f"{whole.need_bytes / GIB:.2f}" == "0.12"  # b1: "0.12 GiB KV cache is needed"
    pinned, block = 50 * 2**20, 128 * 1024
    assert concurrency(pinned // block, kv_need(TINY, max_model_len=51_072, block_tokens=128).blocks_per_request) > 1

    def of(window: int) -> int:
        return need(TINY, max_model_len=window, block_tokens=128)

    # one of the 400 blocks is reserved: 51,072 is what the engine estimates, and 51,200 fails
    assert estimated_max_model_len(pinned, of, 131_072, reserved_bytes=block) == 51_072
    assert estimated_max_model_len(pinned, of, 131_072) == 51_200
    assert pinned // 1024 == 51_200  # h1: "CPU KV cache size: 51,200 tokens"


def test_estimate_is_zero_where_nothing_fits() -> None:
    assert estimated_max_model_len(10, lambda window: 1024 * window, 4096) == 0


def test_cpu_worker_at_utilization_0_05() -> None:
    # d2: 0.74 GiB requested, 0.55 consumed, 0.19 set, 196,992 tokens, 48.09x of 4,096
    kv_bytes = 196_992 * 1024
    assert kv_bytes / GIB == pytest.approx(0.19, abs=0.005)
    left = cpu_kv_bytes(total_bytes=gib(0.74 / 0.05), utilization=0.05, consumed_bytes=gib(0.55))
    assert abs(left - kv_bytes) <= 1.5 * CENT
    assert tokens_agree(196_992, 48.09, 4_096)
    # the line prints 14.96 GiB, of which 0.05 are 0.75 and not 0.74: the node's total moved between the two readings
    assert f"{14.96 * 0.05:.2f}" == "0.75"


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        # b2: 1000 GiB pinned, 14.96 of 16.46 available
        (
            {"total_bytes": gib(16.46), "available_bytes": gib(14.96), "utilization": 0.9, "pinned_bytes": 1000 * GIB},
            "lower --kv",
        ),
        ({"total_bytes": 18 * GIB, "available_bytes": gib(4.66), "utilization": 0.5}, "lower --gpu"),
        # a public log: 0.2 of 18.0 is 3.6, of which the worker leaves -0.39
        (
            {"total_bytes": 18 * GIB, "available_bytes": gib(4.66), "utilization": 0.2, "consumed_bytes": gib(3.99)},
            "raise --gpu",
        ),
    ],
)  # fmt: skip
def test_cpu_refusals(figures: dict[str, Any], words: str) -> None:
    refusal = cpu_refusal(**figures)
    assert refusal is not None
    assert refusal.advice.startswith(words)


def test_cpu_worker_is_not_refused_within_its_rules() -> None:
    node = {"total_bytes": gib(14.96), "available_bytes": gib(14.96)}
    assert cpu_refusal(**node, utilization=0.05) is None
    assert cpu_refusal(**node, utilization=0.05, consumed_bytes=gib(0.55)) is None
    assert cpu_refusal(**node, utilization=1.0, pinned_bytes=gib(14.96)) is None


GPT_OSS = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "torch_dtype": "bfloat16",
}
GEMMA_3_27B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "hidden_size": 5376,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
    },
}


@pytest.mark.parametrize(
    ("config", "window", "tokens", "times", "groups"),
    [
        pytest.param(GPT_OSS, 32_768, 993_760, 56.85, 2, id="gpt-oss"),
        pytest.param(GEMMA_3_27B, 29_000, 54_960, 8.09, 7, id="gemma-3"),
    ],
)
def test_hybrid_windows_explain_both_printed_figures(
    config: dict[str, Any], window: int, tokens: int, times: float, groups: int
) -> None:
    """Token line and concurrency of real logs (releases to 0.19), which contradict each other, from one block count."""
    price = kv_need(config, max_model_len=window, max_num_batched_tokens=2048)
    assert price.groups == groups
    blocks = tokens // price.block_tokens * groups
    assert printed_tokens_by_group(blocks, groups, price.block_tokens) == tokens
    # up to one block per group is lost in the token line
    low, high = (concurrency(blocks + lost, price.blocks_per_request) for lost in (0, groups - 1))
    assert low - 0.005 <= times <= high + 0.005
    assert not tokens_agree(tokens, times, window)


def test_token_line_from_0_20_2_is_an_identity() -> None:
    assert printed_tokens(460_496 / 131_072, 131_072) == 460_496
    assert tokens_agree(460_496, 3.51, 131_072)
    assert tokens_agree(79_953, 1.22, 65_536)


def test_rates_of_known_models() -> None:
    llama_8b = {
        **TINY,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "head_dim": 128,
    }
    assert need(llama_8b, max_model_len=131_072) == 16 * GIB
    assert need(llama_8b, max_model_len=131_072, tensor_parallel_size=2) == 8 * GIB
    assert need(llama_8b, max_model_len=131_072, kv_cache_dtype="fp8") == 8 * GIB
    # 16 ranks and 8 heads: every head is held twice
    assert need(llama_8b, max_model_len=131_072, tensor_parallel_size=16) == 2 * GIB
    deepseek = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "torch_dtype": "bfloat16",
    }
    assert need(deepseek) == 70_272
    assert need(deepseek, tensor_parallel_size=8) == 70_272  # latent attention is not split


QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 2048,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "torch_dtype": "bfloat16",
}


def test_hybrid_state() -> None:
    """A public boot of this model says 544 tokens of block and a state page padded by 1.49 %."""
    price = kv_need(QWEN3_NEXT, max_model_len=262_144)
    state = next(kind for kind in price.kinds if kind.kind == "state")
    assert price.block_tokens == 544
    assert (price.page_bytes - state.state_bytes) / state.state_bytes * 100 == pytest.approx(1.49, abs=0.005)
    assert (state.layers, price.groups, price.layers_per_group) == (36, 4, 12)
    assert price.blocks_per_request == 482 + 3  # ceil(262,144 / 544) and one state page per state group


def test_padding_layers_are_counted() -> None:
    price = kv_need(GEMMA_3_27B, max_model_len=29_000, max_num_batched_tokens=2048)
    assert price.padding_layers == 8  # 52 sliding layers in groups of 10
    assert price.need_bytes > price.unpadded_bytes


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "jamba"}, "jamba"),
        ({"model_type": "qwen3_5"}, "qwen3_5"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"index_topk": 2048}, "index_topk"),
        ({"is_encoder_decoder": True}, "encoder"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "its own KV"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"layer_types": ["full_attention", "mystery"]}, "layer_types"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear attention"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
    ],
)
def test_what_is_not_understood_is_not_priced(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CannotPriceError, match=named):
        layer_kinds({**TINY, **changes}, tensor_parallel_size=2)


def test_unknown_kv_dtype_is_not_priced() -> None:
    with pytest.raises(CannotPriceError, match="nvfp4"):
        need(TINY, kv_cache_dtype="nvfp4")


def test_sliding_window_needs_the_chunk() -> None:
    with pytest.raises(CannotPriceError, match="max_num_batched_tokens"):
        kv_need(GPT_OSS, max_model_len=32_768)


def test_one_window_throughout() -> None:
    mistral = {**TINY, "model_type": "mistral", "sliding_window": 4096}
    (kind,) = layer_kinds(mistral)
    assert (kind.kind, kind.window_tokens) == ("sliding", 4096)
    assert kv_need(mistral, max_model_len=32_768, max_num_batched_tokens=2048).blocks_per_request == 385
