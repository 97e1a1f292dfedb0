"""What each lever of an expert plan is worth, in GiB, slots and tokens, and whether a deploy can reach it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from pytest_kvbudget.budget import rdna4
from pytest_kvbudget.budget.graphs import ChargeInForce
from pytest_kvbudget.budget.rdna4 import OverheadMode
from pytest_kvbudget.budget.utilization import FreeAtInit, largest_utilization, worth_bytes
from pytest_kvbudget.units import GIB, format_gib

EXPERTS_PER_LAYER: Final = rdna4.ROUTED_EXPERTS + 1
"""512 routed and one fused shared expert (facts, section 3): an assumption where the log does not say."""

Claim = Literal["reachable", "unverified", "image edit", "harmful", "spent"]


class Figure(msgspec.Struct, frozen=True):
    """A size as something printed it."""

    size_bytes: int
    precision_bytes: float = 0
    """Half a unit of the last printed digit."""


class Carry(msgspec.Struct, frozen=True):
    """Whether a lever can work on the running engine; ``None`` is not checked."""

    image_reads: bool | None = None
    """The image's code reads the variable or knows the flag."""
    carries: bool | None = None
    """The engine's environment or flags can carry it."""

    @property
    def claim(self) -> Claim:
        """What may be said of the lever."""
        if self.image_reads is False:
            return "image edit"
        return "reachable" if self.image_reads and self.carries else "unverified"


class SlotPrice(msgspec.Struct, frozen=True, kw_only=True):
    """What one expert slot costs on this rank, and how that is known."""

    slot_bytes: float
    precision_bytes: float
    source: str

    @property
    def slots_per_gib(self) -> float:
        """How many slots a GiB holds."""
        return GIB / self.slot_bytes


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """What turns GiB into slots and tokens, and which levers were seen to be carried."""

    slot: SlotPrice | None = None
    bytes_per_token: float | None = None
    carried: dict[str, Carry] = {}


class LeverWorth(msgspec.Struct, frozen=True, kw_only=True):
    """One lever."""

    name: str
    claim: Claim
    worth_bytes: int | None
    """``None`` where a figure is missing that it depends on; the sentence says which."""
    worth_slots: int | None
    worth_tokens: int | None
    """Tokens that so many bytes hold, if they are spent on a pinned pool instead."""
    sentence: str


def slot_price(
    *,
    slots: int | None,
    expert_cache: Figure | None,
    resident: Figure | None,
    resident_layers: int | None,
    experts_per_layer: int = EXPERTS_PER_LAYER,
) -> SlotPrice | None:
    """Price of a slot from this very plan: its own slot count, else its resident layers; never another model's.

    Args:
        slots: of the plan's row.
        expert_cache: of the plan's row.
        resident: bytes of the resident layers.
        resident_layers: how many they are.
        experts_per_layer: an assumption that is named in the source.
    """
    if slots and expert_cache is not None:
        # a floor of the room over the price: between slots and slots + 1 of them fit
        middle = expert_cache.size_bytes / (slots + 0.5)
        half = (expert_cache.precision_bytes + middle / 2) / slots
        return SlotPrice(slot_bytes=middle, precision_bytes=half, source=f"expert cache row, {slots:,} slots")
    if resident is None or not resident_layers:
        return None
    price = rdna4.slot_bytes_from_resident(resident.size_bytes, resident_layers, experts_per_layer)
    return SlotPrice(
        slot_bytes=price,
        precision_bytes=resident.precision_bytes / (resident_layers * experts_per_layer),
        source=f"resident-layer row, {resident_layers} layers of {experts_per_layer} experts (assumed)",
    )


def _worth(price: Price, name: str, size_bytes: int | None, sentence: str, claim: Claim | None = None) -> LeverWorth:
    carry = price.carried.get(name, Carry())
    return LeverWorth(
        name=name,
        claim=claim or carry.claim,
        worth_bytes=size_bytes,
        worth_slots=None if size_bytes is None or price.slot is None else int(size_bytes / price.slot.slot_bytes),
        worth_tokens=None
        if size_bytes is None or not price.bytes_per_token
        else int(size_bytes / price.bytes_per_token),
        sentence=sentence,
    )


def utilization(
    price: Price,
    *,
    budget: Figure | None,
    total_bytes: int | None,
    utilization: float | None,
    free: FreeAtInit | None,
) -> LeverWorth:
    """Utilization: worth per 0.01, and to the law's ceiling where the worker's free memory is known."""
    name = "--gpu-memory-utilization"
    if total_bytes is None or utilization is None:
        return _worth(price, name, None, "unknown until the card's total and the utilization are given")
    step_bytes = worth_bytes(total_bytes)
    sentence = f"{step_bytes / GIB:.4f} GiB per 0.01"
    if budget is not None:
        expected = total_bytes * utilization
        if abs(expected - budget.size_bytes) > budget.precision_bytes + total_bytes * 5e-4:
            sentence += f"; but {format_gib(total_bytes)} at {utilization} is not the budget printed"
    if free is None:
        return _worth(
            price, name, step_bytes, f"{sentence}; its ceiling is unknown until a worker says what it finds free"
        )
    most = largest_utilization(free)
    if most <= utilization:
        return _worth(price, name, 0, f"{sentence}; at its ceiling of {most}", "spent")
    gain_bytes = worth_bytes(total_bytes, most - utilization)
    return _worth(price, name, gain_bytes, f"{sentence}; to its ceiling of {most}: {format_gib(gain_bytes)}")


def graph_charge(
    price: Price, charge: ChargeInForce | None, captured: Mapping[str, Figure], graphs: int | None
) -> LeverWorth:
    """The graph charge: worth what the heavier rank's capture leaves of it."""
    name = "VLLM_CUDAGRAPH_MEM_PER_GRAPH_MB"
    if charge is None:
        return _worth(price, name, None, "unknown: neither an estimate line nor the plan's row was read")
    if not captured:
        sentence = f"capture not measured; at most the {format_gib(charge.size_bytes)} charged ({charge.source})"
        return _worth(price, name, None, sentence)
    rank = max(captured, key=lambda key: captured[key].size_bytes)
    most = max(0, captured[rank].size_bytes)
    over = charge.size_bytes - most
    count = "" if graphs is None else f" over {graphs} graphs"
    sentence = f"charged {format_gib(charge.size_bytes)} ({charge.source}), {rank} captured {format_gib(most)}{count}"
    if over < 0:
        return _worth(price, name, over, f"{sentence}: the charge must rise by {format_gib(-over)}")
    return _worth(price, name, over, f"{sentence}: over-charge of {format_gib(over)}")


def overhead_mode(
    planned: Figure, max_num_batched_tokens: int | None, *, precise: bool | None
) -> tuple[OverheadMode, int] | None:
    """Which constant a planned overhead stands on, and its batched tokens; ``None`` where it cannot be told.

    Without either given, a constant explains the row when the rest is whole steps of 0.22 GiB within the printed
    precision; only a single explanation counts.
    """
    modes = [mode for mode in OverheadMode if precise is None or precise == (mode is OverheadMode.PRECISE)]
    found = []
    for mode in modes:
        rest_gib = (planned.size_bytes - mode.base_bytes) / GIB
        steps = max(0, round(rest_gib / rdna4.OVERHEAD_STEP_GIB))
        tokens = rdna4.OVERHEAD_ANCHOR_TOKENS + 1024 * steps
        if max_num_batched_tokens is not None:
            tokens = max_num_batched_tokens
        if abs(rdna4.overhead_bytes(mode, tokens) - planned.size_bytes) <= planned.precision_bytes + 1:
            found.append((mode, tokens))
    return found[0] if len(found) == 1 else None


def precise_memory(
    price: Price,
    *,
    planned: Figure,
    measured: Figure | None,
    max_num_batched_tokens: int | None,
    precise: bool | None,
) -> LeverWorth:
    """Precise memory: worth its 2.35 GiB, harmful where it would plan less overhead than was measured."""
    name = rdna4.PRECISE_FLAG
    mode = overhead_mode(planned, max_num_batched_tokens, precise=precise)
    if mode is None:
        return _worth(
            price, name, None, "unknown: the planned overhead fits no single constant; give the batched tokens"
        )
    if mode[0] is not OverheadMode.DEFAULT:
        return _worth(price, name, 0, f"already spent: the plan stands on the {mode[0]} constant", "spent")
    trade = rdna4.precise_trade(mode[1], measured_bytes=None if measured is None else measured.size_bytes)
    tail = "" if measured is not None else "; overhead not measured, so whether it is harmful is unknown"
    claim: Claim | None = "harmful" if trade.harmful else None
    return _worth(price, name, trade.gained_bytes, trade.sentence + tail, claim)


def overhead_slack(price: Price, planned: Figure, measured: Figure | None) -> LeverWorth:
    """What the plan charges for the runtime beyond what was measured: no deploy reaches it."""
    name = "runtime overhead slack"
    if measured is None:
        return _worth(price, name, None, "overhead not measured", "image edit")
    slack = planned.size_bytes - measured.size_bytes
    sentence = (
        f"planned {format_gib(planned.size_bytes)}, measured {format_gib(measured.size_bytes)}: {format_gib(slack)} of "
        "slack, not deployable; compile and graph capture live in it"
    )
    return _worth(price, name, slack, sentence, "image edit")


def reserve_gap(price: Price, reserve: Figure, measured_need_bytes: int | None) -> LeverWorth:
    """What the registry reserves for one window beyond its measured price: no deploy reaches it."""
    name = "KV reserve over measured price"
    if measured_need_bytes is None:
        return _worth(price, name, None, "measured price per token not known", "image edit")
    gap = reserve.size_bytes - measured_need_bytes
    if gap < 0:
        sentence = f"under-priced by {format_gib(-gap)}: no shorter window cures it; pin --kv-cache-memory-bytes"
        return _worth(price, name, gap, sentence, "image edit")
    sentence = f"reserves {format_gib(gap)} more than one window costs, not deployable"
    return _worth(price, name, gap, sentence, "image edit")
