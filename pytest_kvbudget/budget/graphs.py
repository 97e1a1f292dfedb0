"""The CUDA-graph term: what the plan charges, and what the measured capture says about the charge.

RDNA4 document, section 2. Sizes of the variables are MiB, as the engine reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from pytest_kvbudget.budget.model import BudgetInputError
from pytest_kvbudget.units import MIB, format_gib

BASE_VARIABLE: Final = "VLLM_CUDAGRAPH_MEM_BASE_MB"
PER_GRAPH_VARIABLE: Final = "VLLM_CUDAGRAPH_MEM_PER_GRAPH_MB"
ESTIMATE_VARIABLE: Final = "VLLM_CUDAGRAPH_MEM_ESTIMATE_MB"
DEFAULT_BASE_MIB: Final = 256
DEFAULT_PER_GRAPH_MIB: Final = 52


class GraphCharge(msgspec.Struct, frozen=True, kw_only=True):
    """How the plan charges for captured graphs."""

    base_mib: float = DEFAULT_BASE_MIB
    per_graph_mib: float = DEFAULT_PER_GRAPH_MIB
    estimate_mib: float | None = None
    """Explicit total; wins, and does not scale with the number of graphs."""

    def charged_bytes(self, graphs: int) -> int:
        """The plan's term for so many graphs: ``base + per_graph * graphs``, or the explicit estimate."""
        if self.estimate_mib is not None:
            return int(self.estimate_mib * MIB)
        return int((self.base_mib + self.per_graph_mib * graphs) * MIB)

    @property
    def how(self) -> str:
        """The variables that move the term."""
        return ESTIMATE_VARIABLE if self.estimate_mib is not None else f"{BASE_VARIABLE}, {PER_GRAPH_VARIABLE}"

    def warning(self, axis: str | None) -> str | None:
        """What to say when ``axis`` changes the capture sizes and an explicit estimate does not follow."""
        if self.estimate_mib is None or axis not in CAPTURE_AXES:
            return None
        return (
            f"{ESTIMATE_VARIABLE} is an explicit total of {self.estimate_mib:g} MiB and does not scale when {axis} "
            f"changes the capture sizes; {BASE_VARIABLE} and {PER_GRAPH_VARIABLE} do"
        )


CAPTURE_AXES: Final = frozenset({"max_num_seqs", "max_num_batched_tokens", "cudagraph_per_graph", "speculative_tokens"})
"""Axes that change which sizes are captured."""


def charge_from(environ: Mapping[str, str]) -> GraphCharge:
    """The charge that an environment asks for; unset variables have the fork's defaults.

    Raises:
        BudgetInputError: for a value that is not a number of MiB.
    """

    def read(name: str) -> float | None:
        raw = environ.get(name)
        if raw is None:
            return None
        try:
            value = float(raw)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= 0):
            raise BudgetInputError(f"{name} is {raw!r}; expected a number of MiB, zero or more")
        return value

    base, per_graph = read(BASE_VARIABLE), read(PER_GRAPH_VARIABLE)
    return GraphCharge(
        base_mib=DEFAULT_BASE_MIB if base is None else base,
        per_graph_mib=DEFAULT_PER_GRAPH_MIB if per_graph is None else per_graph,
        estimate_mib=read(ESTIMATE_VARIABLE),
    )


class ChargeInForce(msgspec.Struct, frozen=True):
    """The charge of a boot, and which line said it."""

    size_bytes: int
    source: Literal["estimate line", "plan row"]
    """A pinned boot prints no estimate: the charge then comes from the plan's row, and is marked so."""


def charge_in_force(estimate_bytes: int | None, plan_row_bytes: int | None) -> ChargeInForce | None:
    """The charge of a boot from its lines; ``None`` where neither line is there."""
    if estimate_bytes is not None:
        return ChargeInForce(estimate_bytes, "estimate line")
    return None if plan_row_bytes is None else ChargeInForce(plan_row_bytes, "plan row")


class GraphAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """What a measured capture says about the charge."""

    keep: bool
    rank: str
    """The heavier rank; it binds."""
    captured_bytes: int
    charged_bytes: int
    per_graph_mib: int | None
    """Least whole MiB per graph whose charge covers the capture; ``None`` where the charge is kept."""
    sentence: str


def advise(charge: GraphCharge, graphs: int, captured_bytes: Mapping[str, int]) -> GraphAdvice:
    """Compare the charge with what the ranks captured (document, section 2: the heavier rank binds).

    A capture of zero or less fitted into pages that the profiler had already counted: the charge is kept.

    Args:
        charge: in force at that boot.
        graphs: how many were captured.
        captured_bytes: by rank; may be negative.

    Raises:
        BudgetInputError: no rank, or no graph.
    """
    if not captured_bytes or graphs < 1:
        raise BudgetInputError(f"{len(captured_bytes)} ranks and {graphs} graphs; expected at least 1 of each")
    rank = max(captured_bytes, key=lambda name: captured_bytes[name])
    most_bytes, charged_bytes = captured_bytes[rank], charge.charged_bytes(graphs)
    keep = most_bytes <= charged_bytes
    per_graph_mib = None
    if most_bytes <= 0:
        sentence = f"{rank} captured {format_gib(most_bytes)}, inside pages already counted: keep the charge"
    elif keep:
        sentence = f"{rank} captured {format_gib(most_bytes)} of {format_gib(charged_bytes)} charged: keep the charge"
    else:
        base_mib = 0.0 if charge.estimate_mib is not None else charge.base_mib
        per_graph_mib = math.ceil((most_bytes / MIB - base_mib) / graphs)
        sentence = (
            f"{rank} captured {format_gib(most_bytes)} and {format_gib(charged_bytes)} is charged: raise "
            f"{PER_GRAPH_VARIABLE} to at least {per_graph_mib} over {graphs} graphs"
        )
    return GraphAdvice(
        keep=keep,
        rank=rank,
        captured_bytes=most_bytes,
        charged_bytes=charged_bytes,
        per_graph_mib=per_graph_mib,
        sentence=sentence,
    )
