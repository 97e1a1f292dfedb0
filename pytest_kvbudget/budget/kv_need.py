"""What one request's KV cache needs, from a model's ``config.json``: attention, GQA, MLA, sliding window, state.

Layouts follow vLLM's KV-cache specifications (interface of 0.16 to 0.33). Only families whose layout is understood are
priced; for anything else the answer is `CannotPriceError`, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from pytest_kvbudget.budget.model import BudgetInputError

PLAIN_FAMILIES: Final = frozenset(
    {"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "gemma", "granite", "olmo2"}
)
"""Every layer is the same: full attention, or one sliding window throughout."""
WINDOWED_FAMILIES: Final = frozenset({"gemma2", "gemma3", "gemma3_text", "gpt_oss"})
"""Sliding and full layers in a pattern that the config states."""
MLA_FAMILIES: Final = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2"})
STATE_FAMILIES: Final = frozenset({"qwen3_next"})
"""Gated delta net: full attention and recurrent state in a pattern that the config states."""
_FOREIGN_KEYS: Final = (
    "attention_chunk_size",
    "cross_attention_layers",
    "hybrid_override_pattern",
    "index_topk",
    "layers_block_type",
    "mamba_d_state",
    "num_kv_shared_layers",
)
"""Keys that change the layout in a way that is not priced here."""
_DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "half": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


class CannotPriceError(BudgetInputError):
    """The config has something whose memory is not understood; the message names it."""


class LayerKind(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of one kind, per rank."""

    kind: Literal["full", "sliding", "mla", "state"]
    layers: int
    token_bytes: int = 0
    """Bytes of one token in one layer."""
    window_tokens: int | None = None
    state_bytes: int = 0
    """Bytes of one sequence's state in one layer."""


class KvNeed(msgspec.Struct, frozen=True, kw_only=True):
    """What one request of a full window needs on each rank."""

    block_tokens: int
    """Block size in force: hybrids raise it until an attention page holds a state page."""
    page_bytes: int
    """Bytes of one block in one layer."""
    groups: int
    layers_per_group: int
    blocks_per_request: int
    """Over all groups."""
    need_bytes: int
    """``blocks_per_request * page * layers_per_group``, padding layers included."""
    unpadded_bytes: int
    """Layer by layer, without the padding of unequal groups: what older releases check."""
    padding_layers: int
    kinds: tuple[LayerKind, ...]


def kv_need(
    config: Mapping[str, Any],
    *,
    max_model_len: int,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
    block_tokens: int = 16,
    max_num_batched_tokens: int | None = None,
) -> KvNeed:
    """Price one request of ``max_model_len`` tokens, without prefix caching of state and without speculation.

    Args:
        config: the model's ``config.json``; a ``text_config`` inside is used.
        max_model_len: tokens of the window.
        tensor_parallel_size: ranks that share the KV heads.
        kv_cache_dtype: as the flag; ``"auto"`` is the model's own.
        block_tokens: the engine's block size (16 on GPUs, 128 on CPU).
        max_num_batched_tokens: needed for sliding windows: they hold a chunk beyond the window.

    Raises:
        CannotPriceError: the config has something that is not understood.
    """
    kinds = layer_kinds(config, tensor_parallel_size=tensor_parallel_size, kv_cache_dtype=kv_cache_dtype)
    state_bytes = max((kind.state_bytes for kind in kinds), default=0)
    rates = {kind.token_bytes for kind in kinds if kind.token_bytes}
    if len(rates) != 1:
        raise CannotPriceError(f"cannot price layers of {sorted(rates)} bytes per token together; expected one rate")
    rate = rates.pop()
    if state_bytes:
        # the attention block is raised, in its own steps, until its page holds a state page
        block_tokens *= -(-state_bytes // (block_tokens * rate))
    counts = [kind.layers for kind in kinds]
    group_layers = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    groups, blocks, padding, unpadded_blocks = 0, 0, 0, 0
    for kind in kinds:
        parts = -(-kind.layers // group_layers)
        per_layer = _blocks(kind, max_model_len, block_tokens, max_num_batched_tokens)
        groups, blocks = groups + parts, blocks + parts * per_layer
        padding += parts * group_layers - kind.layers
        unpadded_blocks += kind.layers * per_layer
    page_bytes = block_tokens * rate
    return KvNeed(
        block_tokens=block_tokens,
        page_bytes=page_bytes,
        groups=groups,
        layers_per_group=group_layers,
        blocks_per_request=blocks,
        need_bytes=blocks * page_bytes * group_layers,
        unpadded_bytes=unpadded_blocks * page_bytes,
        padding_layers=padding,
        kinds=kinds,
    )


def _blocks(kind: LayerKind, max_model_len: int, block_tokens: int, batched_tokens: int | None) -> int:
    if kind.kind == "state":
        return 1
    if kind.window_tokens is None:
        return -(-max_model_len // block_tokens)
    if batched_tokens is None:
        raise CannotPriceError("cannot price a sliding window without max_num_batched_tokens: it holds a chunk too")
    held = min(kind.window_tokens - 1 + batched_tokens, max_model_len)
    # one more: a window need not begin at a block's first token
    return -(-held // block_tokens) + 1


def layer_kinds(
    config: Mapping[str, Any], *, tensor_parallel_size: int = 1, kv_cache_dtype: str = "auto"
) -> tuple[LayerKind, ...]:
    """The layers of a model by kind, per rank.

    Raises:
        CannotPriceError: the config has something that is not understood.
    """
    text = config.get("text_config") or config
    family = text.get("model_type")
    if text.get("is_encoder_decoder"):
        raise CannotPriceError("cannot price an encoder-decoder model")
    for key in _FOREIGN_KEYS:
        if text.get(key):
            raise CannotPriceError(f"cannot price {family!r} with {key} = {text[key]!r}")
    dtype_bytes = _dtype_bytes(text, kv_cache_dtype)
    layers = _integer(text, "num_hidden_layers")
    if family in MLA_FAMILIES:
        rate = (_integer(text, "kv_lora_rank") + _integer(text, "qk_rope_head_dim")) * dtype_bytes
        return (LayerKind(kind="mla", layers=layers, token_bytes=rate),)
    if family not in PLAIN_FAMILIES | WINDOWED_FAMILIES | STATE_FAMILIES:
        raise CannotPriceError(f"cannot price model_type {family!r}: its KV layout is not known here")
    rate = 2 * _kv_heads(text, tensor_parallel_size) * _head_size(text) * dtype_bytes
    types = _layer_types(text, str(family), layers)
    kinds = []
    if full := types.count("full_attention"):
        kinds.append(LayerKind(kind="full", layers=full, token_bytes=rate))
    if sliding := types.count("sliding_attention"):
        window = _integer(text, "sliding_window")
        kinds.append(LayerKind(kind="sliding", layers=sliding, token_bytes=rate, window_tokens=window))
    if state := types.count("linear_attention"):
        kinds.append(LayerKind(kind="state", layers=state, state_bytes=_gated_delta_bytes(text, tensor_parallel_size)))
    return tuple(kinds)


def _layer_types(text: Mapping[str, Any], family: str, layers: int) -> list[str]:
    stated = text.get("layer_types")
    if stated is not None:
        if len(stated) != layers or not set(stated) <= {"full_attention", "sliding_attention", "linear_attention"}:
            raise CannotPriceError(
                f"cannot price layer_types {sorted(set(stated))} of {len(stated)} in {layers} layers"
            )
        if "linear_attention" in stated and family not in STATE_FAMILIES:
            raise CannotPriceError(f"cannot price the linear attention of model_type {family!r}")
        return list(stated)
    if family in STATE_FAMILIES:
        interval = _integer(text, "full_attention_interval")
        return ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(layers)]
    if family in WINDOWED_FAMILIES:
        if "sliding_window_pattern" not in text:
            raise CannotPriceError(f"cannot price {family!r} without layer_types or sliding_window_pattern")
        pattern = _integer(text, "sliding_window_pattern")
        return ["sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(layers)]
    if text.get("use_sliding_window"):
        raise CannotPriceError("cannot price use_sliding_window without layer_types: which layers slide is not stated")
    slides = text.get("sliding_window") is not None and text.get("use_sliding_window") is None
    return ["sliding_attention" if slides else "full_attention"] * layers


def _gated_delta_bytes(text: Mapping[str, Any], tensor_parallel_size: int) -> int:
    """Convolution and recurrent state of one sequence in one layer, in the model's dtype."""
    key_heads, key_size = _integer(text, "linear_num_key_heads"), _integer(text, "linear_key_head_dim")
    value_heads, value_size = _integer(text, "linear_num_value_heads"), _integer(text, "linear_value_head_dim")
    kernel = _integer(text, "linear_conv_kernel_dim")
    if value_heads % tensor_parallel_size or key_heads % tensor_parallel_size:
        raise CannotPriceError(f"cannot split {key_heads} and {value_heads} state heads over {tensor_parallel_size}")
    if text.get("mamba_ssm_dtype") not in {None, _model_dtype(text)}:
        raise CannotPriceError(f"cannot price a state in {text['mamba_ssm_dtype']} beside {_model_dtype(text)}")
    convolution = (2 * key_heads * key_size + value_heads * value_size) // tensor_parallel_size * (kernel - 1)
    recurrent = value_heads // tensor_parallel_size * key_size * value_size
    return (convolution + recurrent) * _dtype_bytes(text, "auto")


def _model_dtype(text: Mapping[str, Any]) -> str:
    return str(text.get("dtype") or text.get("torch_dtype"))


def _dtype_bytes(text: Mapping[str, Any], kv_cache_dtype: str) -> int:
    name = _model_dtype(text) if kv_cache_dtype == "auto" else kv_cache_dtype
    if kv_cache_dtype == "auto":
        quantized = text.get("quantization_config") or {}
        if any(quantized.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo")):
            raise CannotPriceError("cannot price kv_cache_dtype auto: the checkpoint brings its own KV quantization")
    if name not in _DTYPE_BYTES:
        raise CannotPriceError(f"cannot price kv_cache_dtype {name!r}; expected one of {', '.join(_DTYPE_BYTES)}")
    return _DTYPE_BYTES[name]


def _kv_heads(text: Mapping[str, Any], tensor_parallel_size: int) -> int:
    heads = _integer(text, "num_key_value_heads" if text.get("num_key_value_heads") else "num_attention_heads")
    larger, smaller = max(heads, tensor_parallel_size), min(heads, tensor_parallel_size)
    if larger % smaller:
        raise CannotPriceError(f"cannot split {heads} KV heads over {tensor_parallel_size} ranks")
    return max(1, heads // tensor_parallel_size)


def _head_size(text: Mapping[str, Any]) -> int:
    if text.get("head_dim"):
        return _integer(text, "head_dim")
    return _integer(text, "hidden_size") // _integer(text, "num_attention_heads")


def _integer(text: Mapping[str, Any], key: str) -> int:
    value = text.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CannotPriceError(f"cannot price a config with {key} = {value!r}; expected a whole number above 0")
    return value
