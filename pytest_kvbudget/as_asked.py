"""Whether an engine runs with the values that were asked of it: what it proves otherwise is of another shape."""

from __future__ import annotations

from typing import Final

import msgspec

from pytest_kvbudget.judgement import Judgement, reason
from pytest_kvbudget.ledger.model import BootLedger, Lever, Value
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import format_gib, format_size
from pytest_kvbudget.verdict import Verdict

_SIZED_FOR: Final = "KV cache need:"
"""Begins a line whose numbers are of the request that a pool must hold, not of the engine."""
_ARGUMENTS: Final = ("non-default args: ", "args: Namespace(")
"""What the lines contain in which an engine says how it was called."""
_LEFT: Final = "Available KV cache memory"
"""Of the line in which vLLM says what its pool is made of."""
_NUMBERS: Final = (
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "gpu_memory_utilization"),
    "kv_cache_memory_bytes",
)
"""Fields of a shape that engines print under the same names."""


def with_other_shape(judged: Judgement, ledger: BootLedger, shape: Shape) -> Judgement:
    """A failure, unless the engine was called with other values than were asked: then it fails no shape of ours.

    Only the lines that say how it was called count: others of a failed boot have numbers of what failed.
    """
    other = not_as_asked(ledger, shape, only_called=True) if judged[0] is Verdict.FAIL else None
    return judged if other is None else other


def not_as_asked(ledger: BootLedger, shape: Shape, *, only_called: bool = False) -> Judgement | None:
    """The engine says that it runs with another value than was asked: whatever it proves is of another shape."""
    for name in _NUMBERS:
        asked, stated = getattr(shape, name), ledger.facts.get(name)
        if asked is None or stated is None or isinstance(stated.value, str):
            continue
        text, runs = stated.evidence.text, stated.value
        called = any(words in text for words in _ARGUMENTS)
        if text.startswith(_SIZED_FOR) or (only_called and not called):
            continue
        fitted = name == "max_model_len" and ledger.get("auto_fit") is not None
        # how it was called is printed in full, and no other line rounds a share to less than two decimals
        rounded = 0.0 if called else min(stated.precision, 0.005)
        if abs(runs - asked) <= rounded + 1e-9 and not fitted:
            continue
        if name == "max_model_len":
            return _other(ledger, name, stated, "window_not_served", f"serves a window of {runs}, not the {asked}")
        return _other(ledger, name, stated, "shape_not_served", f"runs with {name} {runs}, not the {asked}")
    return None if only_called else _larger_pool(ledger, shape)


def _larger_pool(ledger: BootLedger, shape: Shape) -> Judgement | None:
    """A pool that is larger than the pinned bytes is none of ours (``VLLM_CPU_KVCACHE_SPACE`` beside them, vLLM 0.32).

    A smaller one may be: an expert plan caps it.
    """
    pinned, stated = shape.kv_cache_memory_bytes, ledger.facts.get("available_kv_bytes")
    if pinned is None or stated is None or isinstance(stated.value, str):
        return None
    if _LEFT not in stated.evidence.text:
        return None  # a budget that other engines state is no pool yet
    if stated.value <= pinned + 2 * stated.precision:
        return None
    said = f"has a KV pool of {format_gib(stated.value)}, not the {format_size(pinned)}"
    return _other(ledger, "kv_cache_memory_bytes", stated, "shape_not_served", said)


def _other(ledger: BootLedger, name: str, stated: Value, failure_class: str, said: str) -> Judgement:
    why = "look for what sets it beside the shape: the target's command, its environment, a file of --config"
    verdict, cause, message = reason(
        Verdict.ERROR,
        ledger.phase,
        failure_class,
        f"the engine {said} that was asked for",
        levers=(Lever(name, "none", "helps", why),),
    )
    return verdict, msgspec.structs.replace(cause, evidence=(stated.evidence,)), message
