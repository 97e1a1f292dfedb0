"""KV blocks of vLLM Neuron: how many a budget holds, and whether CPU compile and device agree on the number.

The block count is part of the compile cache's key, so one block of difference leaves the cache cold.
"""

from __future__ import annotations

import msgspec

from pytest_kvbudget.budget.model import BudgetInputError
from pytest_kvbudget.budget.neuron import Budget
from pytest_kvbudget.units import format_size


class KvGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache of one rank: ``layers`` tensors of blocks, each block holding keys and values of its tokens."""

    layers: int
    kv_heads: int
    """Per rank."""
    head_size: int
    dtype_bytes: int = 2
    block_tokens: int = 32
    """The plugin's default block size."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in one layer: ``2 * block * kv_heads * head * dtype`` (facts, section 4)."""
        return 2 * self.block_tokens * self.kv_heads * self.head_size * self.dtype_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers of the rank."""
        return self.page_bytes * self.layers // self.block_tokens


def block_count(available_bytes: int, geometry: KvGeometry) -> int:
    """Blocks of the KV cache: ``available // page // layers`` (facts, section 4).

    Raises:
        BudgetInputError: for a geometry without bytes.
    """
    if geometry.page_bytes < 1 or geometry.layers < 1:
        raise BudgetInputError(f"{geometry} holds no bytes; expected at least 1 of each")
    return available_bytes // geometry.page_bytes // geometry.layers


def bytes_for_blocks(blocks: int, geometry: KvGeometry) -> int:
    """Least budget, in bytes, that holds so many blocks: the inverse of `block_count`."""
    return blocks * geometry.page_bytes * geometry.layers


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a CPU-compile plan and a device plan of one target meet in the compile cache."""

    compile_blocks: int
    device_blocks: int
    share_difference_bytes: int
    """Memory that the compile plan counted per logical core and the device does not have."""
    available_difference_bytes: int

    @property
    def equal(self) -> bool:
        """The programs compiled on the CPU fit the device's KV shape."""
        return self.compile_blocks == self.device_blocks

    @property
    def restoring_override(self) -> str | None:
        """Flag that gives both sides one block count: the smaller, which both can hold. ``None`` where equal."""
        return None if self.equal else f"--num-gpu-blocks-override {min(self.compile_blocks, self.device_blocks)}"

    @property
    def sentence(self) -> str:
        """The finding in one line."""
        if self.equal:
            return f"both plans have {self.compile_blocks:,} blocks: the compile cache hits"
        memory = self.share_difference_bytes
        sides = ("CPU compile", "the device") if memory >= 0 else ("the device", "CPU compile")
        reason = (
            f"{sides[0]} counts {format_size(abs(memory))} more per logical core than {sides[1]}"
            if memory
            else f"the budgets differ by {format_size(abs(self.available_difference_bytes))}"
        )
        return (
            f"CPU compile has {self.compile_blocks:,} blocks and the device {self.device_blocks:,}: {reason}, and the "
            f"compile cache stays cold; {self.restoring_override} on both sides restores it"
        )


def parity(compile_budget: Budget, device_budget: Budget, geometry: KvGeometry) -> Parity:
    """Compare the block counts of both sides (document, section 4): equal only for equal totals.

    A device may report some MiB less than the static table.
    """
    return Parity(
        compile_blocks=block_count(compile_budget.available_bytes, geometry),
        device_blocks=block_count(device_budget.available_bytes, geometry),
        share_difference_bytes=compile_budget.share_bytes - device_budget.share_bytes,
        available_difference_bytes=compile_budget.available_bytes - device_budget.available_bytes,
    )
