"""What a boot's ledger says in the words of the budget laws. Pure: nothing that no line states is filled in."""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from pytest_kvbudget.budget.audit import Observed
from pytest_kvbudget.budget.levers import Figure
from pytest_kvbudget.budget.pool import measured_bytes_per_token
from pytest_kvbudget.budget.utilization import FreeAtInit
from pytest_kvbudget.ledger.diagnosis import NEAR_FULL
from pytest_kvbudget.ledger.model import BootLedger, Evidence, Value

ROW_FACTS: Final = {
    "budget": "plan_budget_bytes",
    "non-expert weights": "plan_non_expert_bytes",
    "KV reserve": "plan_kv_reserve_bytes",
    "CUDA graphs": "plan_graphs_bytes",
    "runtime overhead": "plan_overhead_bytes",
    "expert cache": "plan_expert_cache_bytes",
}
"""Rows of an expert plan by the names of `budget.audit.REACH`, and the facts that state them."""

_LAYERS: Final = re.compile(r"resident layers \[([0-9, -]*)\]")


def observed_from(ledger: BootLedger, total_bytes: int | None = None) -> Observed:
    """The figures of one boot that an audit of its expert plan can use, with their printed precision.

    Args:
        ledger: of the boot.
        total_bytes: of a card, where somebody knows it and no line states it.
    """
    tokens = count_of(ledger, "kv_tokens")
    return Observed(
        rows={name: row for name, fact in ROW_FACTS.items() if (row := figure_of(ledger, fact)) is not None},
        slots=count_of(ledger, "plan_slots"),
        resident=figure_of(ledger, "plan_resident_layers_bytes"),
        resident_layers=resident_layers(ledger),
        overhead_measured=figure_of(ledger, "plan_overhead_measured_bytes"),
        registry_bytes_per_token=number_of(ledger, "plan_kv_b_per_token")
        or number_of(ledger, "plan_registry_b_per_token"),
        measured_bytes_per_token=_measured_rate(ledger, tokens),
        kv_tokens=tokens,
        max_model_len=count_of(ledger, "max_model_len"),
        max_num_batched_tokens=count_of(ledger, "max_num_batched_tokens"),
        graph_estimate=figure_of(ledger, "graph_estimated_bytes"),
        graph_captured=_captured(ledger),
        utilization=number_of(ledger, "gpu_memory_utilization"),
        total_bytes=total_bytes,
        free=free_at_init(ledger, total_bytes),
    )


def row_evidence(ledger: BootLedger) -> dict[str, Evidence]:
    """The line that states each row of the plan."""
    return {name: ledger.facts[fact].evidence for name, fact in ROW_FACTS.items() if fact in ledger.facts}


def number_of(ledger: BootLedger, name: str) -> float | None:
    """A numeric fact; ``None`` where no line states it."""
    value = ledger.get(name)
    return None if value is None or isinstance(value, (str, bool)) else value


def count_of(ledger: BootLedger, name: str) -> int | None:
    """A whole number of tokens, slots or bytes; ``None`` where no line states it."""
    value = number_of(ledger, name)
    return None if value is None else int(value)


def figure_of(ledger: BootLedger, name: str) -> Figure | None:
    """A size with its printed precision; ``None`` where no line states it."""
    value = ledger.facts.get(name)
    return None if value is None else _figure(value)


def resident_layers(ledger: BootLedger) -> int | None:
    """How many layers the plan's line names as resident: ``[0,1,2]`` and ``[0-2]`` are three."""
    value = ledger.facts.get("plan_resident_layers_bytes")
    match = None if value is None else _LAYERS.search(value.evidence.text)
    if match is None:
        return None
    layers: set[int] = set()
    for part in filter(None, (part.strip() for part in match[1].split(","))):
        first, dash, last = part.partition("-")
        if not first.strip().isdecimal() or (dash and not last.strip().isdecimal()):
            return None
        layers.update(range(int(first), int(last or first) + 1))
    return len(layers) or None


def free_at_init(ledger: BootLedger, total_bytes: int | None = None) -> FreeAtInit | None:
    """What the worker found free at init, in its own words; of several ranks the least.

    ``None`` where no worker said it, or where something else held memory of the card: such a figure is no property of
    the host.

    Args:
        ledger: of the boot.
        total_bytes: of the card, for lines that state the free memory alone.
    """
    pairs: list[tuple[Value | None, Value | None]] = [
        (free, ledger.ranks.get("total_bytes", {}).get(rank))
        for rank, free in ledger.ranks.get("free_bytes", {}).items()
    ]
    pairs = pairs or [(ledger.facts.get("free_bytes"), ledger.facts.get("total_bytes"))]
    said = [found for free, total in pairs if (found := _said_free(free, total, total_bytes)) is not None]
    if not said or any(found.free_bytes < NEAR_FULL * found.total_bytes for found in said):
        return None
    return min(said, key=lambda found: found.free_bytes)


def _said_free(free: Value | None, total: Value | None, total_bytes: int | None) -> FreeAtInit | None:
    if free is None or not isinstance(free.value, int):
        return None
    text, size_bytes, precision = free.evidence.text, total_bytes, free.precision
    if total is not None and isinstance(total.value, int) and total.evidence.line == free.evidence.line:
        # the budget is a share of the total, whose digits are rounded too
        size_bytes, precision = total.value, free.precision + total.precision
    source: Literal["refusal line", "startup line", "debug snapshot"]
    if "worker init memory snapshot" in text:
        source = "debug snapshot"
    elif "Free memory on device" in text:
        source = "refusal line" if "is less than" in text else "startup line"
    elif text.startswith("Initial free memory") and "current free memory" not in text:
        source = "startup line"
    else:
        return None
    if size_bytes is None or not 0 <= free.value <= size_bytes:
        return None
    return FreeAtInit(free_bytes=free.value, total_bytes=size_bytes, source=source, precision_bytes=precision)


def _measured_rate(ledger: BootLedger, tokens: int | None) -> float | None:
    """Bytes of a token at this very geometry: as printed, else a pinned pool over its tokens."""
    printed = number_of(ledger, "measured_kv_b_per_token")
    if printed is not None:
        return printed
    pool = count_of(ledger, "kv_cache_memory_bytes") or count_of(ledger, "available_kv_bytes")
    return None if not pool or pool < 0 or not tokens else measured_bytes_per_token(pool, tokens)


def _captured(ledger: BootLedger) -> dict[str, Figure]:
    for name in ("graph_capture_bytes", "graph_actual_bytes"):
        by_rank = {rank: figure for rank, value in ledger.ranks.get(name, {}).items() if (figure := _figure(value))}
        if by_rank:
            return by_rank
        only = figure_of(ledger, name)
        if only is not None:
            return {"the engine": only}
    return {}


def _figure(value: Value) -> Figure | None:
    return Figure(value.value, value.precision) if isinstance(value.value, int) and value.unit == "bytes" else None


def with_given(observed: Observed, **given: object) -> Observed:
    """The figures with those that somebody gave in place of what was read; ``None`` gives nothing."""
    return msgspec.structs.replace(observed, **{name: value for name, value in given.items() if value is not None})
