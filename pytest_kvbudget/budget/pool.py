"""The KV pool of the RDNA4 fork: what the plan reserves, what a pool really costs, and tokens against bytes.

RDNA4 document, sections 3 and 5; facts, section 3. A rate in bytes per token belongs to one geometry (window,
sequences, dtype) and is never carried to another.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final

import msgspec

from pytest_kvbudget.budget.model import BudgetInputError

REGISTRY_BYTES_PER_TOKEN: Final = 9190
"""The registry's price for the document's model at TP 2; others have 8040 to 11041: read it from the log."""
RESERVE_FACTOR: Final = 1.08


class PagesReading(StrEnum):
    """Where the per-sequence state pages stand against the factor 1.08."""

    OUTSIDE = "outside"
    """``price * len * 1.08 + pages``: the document, section 1."""
    INSIDE = "inside"
    """``1.08 * (price * len + pages)``: the facts, section 3."""


class KvPrice(msgspec.Struct, frozen=True, kw_only=True):
    """How the registry prices the KV cache."""

    bytes_per_token: float = REGISTRY_BYTES_PER_TOKEN
    pages_bytes_per_seq: int = 0
    """State (mamba) pages of one sequence."""
    factor: float = RESERVE_FACTOR
    extra_factor: float = 1.0
    """1.02 for GLM (facts, section 3)."""
    reading: PagesReading = PagesReading.OUTSIDE

    def reserve_bytes(self, max_model_len: int, max_num_seqs: int = 1) -> int:
        """The plan's KV reserve: *one* window, whatever the sequences, but for their state pages.

        Args:
            max_model_len: tokens of the window.
            max_num_seqs: sequences; each has state pages.
        """
        window, pages = self.bytes_per_token * max_model_len, self.pages_bytes_per_seq * max_num_seqs
        factor = self.factor * self.extra_factor
        if self.reading is PagesReading.INSIDE:
            return int(factor * (window + pages))
        return int(factor * window) + pages

    def underpriced(self, measured_bytes_per_token: float) -> bool:
        """The reserve is short of one window at every length: need over reserve does not depend on the window.

        Then no shorter window cures "to serve at least one request", since the pool is capped at the reserve.
        """
        return measured_bytes_per_token > self.bytes_per_token * self.factor * self.extra_factor


def pool_bytes(available_bytes: int, reserve_bytes: int, pinned_bytes: int | None = None) -> int:
    """The pool that the fork allocates, in bytes per rank: pinned bytes, else capped at the reserve (facts, 3)."""
    return min(available_bytes, reserve_bytes) if pinned_bytes is None else pinned_bytes


class Alignment(StrEnum):
    """Which way the block-alignment loss counts when tokens become bytes; the engine's size line decides."""

    SUBTRACT = "subtract"
    """The document, section 3: ask for less by the loss."""
    ADD = "add"
    """Ask for more by the loss, so that whole blocks still cover the target."""


ALIGNMENT_LOSS_BYTES: Final = 3_870_000
"""The document's figure for its hybrid: "~3.87 MB"."""


def bytes_for_tokens(
    tokens: int,
    bytes_per_token: float,
    *,
    alignment_bytes: int = 0,
    direction: Alignment = Alignment.ADD,
) -> int:
    """Pool bytes per rank to ask for so many tokens, at the rate measured at this very geometry."""
    window = math.ceil(tokens * bytes_per_token)
    return window + alignment_bytes if direction is Alignment.ADD else window - alignment_bytes


def tokens_for_bytes(
    size_bytes: int,
    bytes_per_token: float,
    *,
    alignment_bytes: int = 0,
    direction: Alignment = Alignment.ADD,
    block_tokens: int = 1,
) -> int:
    """Tokens that a pool holds, in whole blocks: the inverse of `bytes_for_tokens`.

    Raises:
        BudgetInputError: for a rate or a block that is not positive.
    """
    if bytes_per_token <= 0 or block_tokens < 1:
        raise BudgetInputError(f"{bytes_per_token} bytes per token in blocks of {block_tokens}; expected both positive")
    usable = size_bytes - alignment_bytes if direction is Alignment.ADD else size_bytes + alignment_bytes
    return math.floor(usable / bytes_per_token) // block_tokens * block_tokens


def measured_bytes_per_token(size_bytes: int, tokens: int) -> float:
    """The rate of a booted pool, in bytes per token and rank.

    Raises:
        BudgetInputError: for a pool without tokens.
    """
    if tokens < 1:
        raise BudgetInputError(f"{tokens} tokens; expected at least 1 for a rate")
    return size_bytes / tokens


def contract_floor_bytes(windows: int, max_model_len: int, bytes_per_token: float) -> int:
    """Least pool, in bytes per rank, that holds the promised windows (document, section 5).

    Bytes above it come out of the arena's headroom and buy nothing.
    """
    return math.ceil(windows * max_model_len * bytes_per_token)


def full_windows(tokens: int, max_model_len: int) -> int:
    """Full windows that a pool of so many tokens holds, whatever its shape is called."""
    return tokens // max_model_len
