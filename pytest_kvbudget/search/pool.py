"""What the pinned KV pool does while a ladder moves, and whether it holds the windows that a deploy promises."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from pytest_kvbudget.ledger.model import BootLedger, Cause, Lever
from pytest_kvbudget.units import format_size
from pytest_kvbudget.verdict import Phase

if TYPE_CHECKING:
    from pytest_kvbudget.shape import Shape

PoolPolicy = Literal["fixed", "scaled"]
"""``fixed``: the pool's bytes stay as configured. ``scaled``: they move with window and sequences."""


def scaled_pool_bytes(reference: Shape, rung: Shape) -> int:
    """The pool for ``rung``, in bytes per rank, from a booted reference of the same model and dtype.

    ``KV_BYTES = round(ref_bytes * seqs*len_new / (seqs*len_ref))`` (RDNA4 budget document, section 6 point 1), each
    side with its own sequences, so that they cancel unless they are what the ladder moves.

    Raises:
        ValueError: the reference has no pinned pool, or one of the two has no window.
    """
    if reference.kv_cache_memory_bytes is None:
        raise ValueError("a scaled pool needs kv_cache_memory_bytes in the target's shape: the reference has none")
    if reference.max_model_len is None or rung.max_model_len is None:
        raise ValueError("a scaled pool needs max_model_len in the target's shape: bytes are scaled by it")
    # sequences that are left to the engine's default are the same on both sides
    ratio = Fraction(rung.max_model_len, reference.max_model_len)
    if reference.max_num_seqs is not None and rung.max_num_seqs is not None:
        ratio *= Fraction(rung.max_num_seqs, reference.max_num_seqs)
    return round(reference.kv_cache_memory_bytes * ratio)


def rung_shape(base: Shape, axis: str, value: int, pool: PoolPolicy) -> Shape:
    """The shape of one rung: ``base`` with the axis at ``value`` and the pool as its policy says.

    ``base`` is the reference of a scaled pool.

    Raises:
        ValueError: see `scaled_pool_bytes`; also when a scaled pool is itself the axis.
        msgspec.ValidationError: the axis is no field of a shape, or the value is impossible for it.
    """
    rung = base.merged(**{axis: value})
    if pool == "fixed":
        return rung
    if axis == "kv_cache_memory_bytes":
        raise ValueError(
            "pool='scaled' sets kv_cache_memory_bytes and axis='kv_cache_memory_bytes' moves it; use 'fixed'"
        )
    return rung.merged(kv_cache_memory_bytes=scaled_pool_bytes(base, rung))


def pool_short(ledger_tokens: int, windows: int, max_model_len: int) -> bool:
    """The pool that the engine printed, in tokens, does not hold ``windows`` windows of ``max_model_len`` tokens."""
    return ledger_tokens < windows * max_model_len


def next_pool_bytes(ledger: BootLedger, shape: Shape, windows: int, *, block_tokens: int) -> int | None:
    """The pool for the next boot of a rung whose scaled pool was short; ``None`` where the boot does not tell.

    By the engine's own count of tokens where it got so far. Of a KV check that failed, by what it says that a window
    needs, to the last printed digit and with the block that is never handed out; or by its estimate, which is finer,
    but only where it agrees with the need: an engine's estimate is no truth.

    Args:
        ledger: of the boot.
        shape: what was booted.
        windows: full windows that the pool must hold.
        block_tokens: tokens of a KV block, at most, where the log does not say more.
    """
    window, pool = shape.max_model_len, shape.kv_cache_memory_bytes
    if not window or not pool:
        return None
    counted = ledger.get("kv_tokens")
    if isinstance(counted, int) and counted > 0:
        return measured_pool_bytes(pool, counted, windows, window, block_tokens=block_tokens)
    need, estimate, printed = (
        ledger.facts.get("kv_needed_bytes"),
        ledger.get("estimated_max_model_len"),
        ledger.get("block_size"),
    )
    if need is None or isinstance(need.value, str):
        return None
    # what is known of a check that failed is so in whole blocks only
    block = max(block_tokens, printed if isinstance(printed, int) else 1)
    most, least = float(need.value) + need.precision, float(need.value) - need.precision
    by_need = math.ceil(most * (windows + block / window))
    agrees = isinstance(estimate, int) and window * pool / most - 2 * block <= estimate < window
    if not agrees or not isinstance(estimate, int) or estimate < block or estimate * least > window * pool:
        return by_need
    by_estimate = measured_pool_bytes(pool, estimate // block * block, windows, window, block_tokens=block)
    return min(by_need, by_estimate)


def measured_pool_bytes(
    pool_bytes: int, ledger_tokens: int, windows: int, max_model_len: int, *, block_tokens: int = 1
) -> int:
    """The pool for the next boot of a rung whose scaled pool was short, in bytes per rank.

    Bytes per token as measured at this very geometry, rounded up, times the tokens of all windows in whole blocks:
    the engine fills blocks, and a rate of another geometry is never used (RDNA4 budget document, section 3).

    Raises:
        ValueError: the engine printed no tokens, so that there is no rate.
    """
    if ledger_tokens < 1 or block_tokens < 1:
        raise ValueError(f"{ledger_tokens} tokens in blocks of {block_tokens}; expected at least 1 of each for a rate")
    bytes_per_token = -(-pool_bytes // ledger_tokens)
    blocks = -(-windows * max_model_len // block_tokens)
    return bytes_per_token * blocks * block_tokens


def kv_windows_short(ledger_tokens: int, windows: int, max_model_len: int, *, pool_bytes: int | None = None) -> Cause:
    """Why a boot whose own pool does not hold the promised windows fails: for memory, in the KV check.

    Args:
        ledger_tokens: tokens that the engine printed.
        windows: full windows that the deploy promises.
        max_model_len: tokens of one window.
        pool_bytes: the pinned pool per rank; ``None`` where utilization decides it.
    """
    wanted = windows * max_model_len
    pool = "the KV cache" if pool_bytes is None else f"the pinned KV cache of {format_size(pool_bytes)}"
    memory = (
        Lever("gpu_memory_utilization", "raise", "helps", "the KV cache gets what weights and graphs leave of it")
        if pool_bytes is None
        else Lever("kv_cache_memory_bytes", "raise", "helps", "the pool is pinned, utilization does not move it")
    )
    return Cause(
        phase=Phase.KV_CHECK,
        failure_class="kv_windows_short",
        sentence=(
            f"{pool} holds {ledger_tokens:,} tokens, and {windows} window{'s' if windows > 1 else ''} of "
            f"{max_model_len:,} need {wanted:,}: {wanted - ledger_tokens:,} short"
        ),
        levers=(
            memory,
            Lever("max_model_len", "lower", "helps", f"{windows} of {ledger_tokens // windows:,} tokens fit"),
            Lever("windows", "lower", "helps", f"{ledger_tokens // max_model_len} of {max_model_len:,} tokens fit"),
        ),
    )
