"""The arena audit: where the GiB of a live expert plan are, which of them a deploy can move, and what each is worth.

RDNA4 document, section 7. Takes figures as a boot printed them, with their precision; what nobody read is "not
measured", and a lever that nobody saw the running image read is "unverified".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from pytest_kvbudget.budget import levers
from pytest_kvbudget.budget.graphs import charge_in_force
from pytest_kvbudget.budget.levers import Figure, LeverWorth, SlotPrice
from pytest_kvbudget.budget.model import Reach
from pytest_kvbudget.budget.pool import full_windows
from pytest_kvbudget.budget.utilization import FreeAtInit
from pytest_kvbudget.units import format_gib

REACH = {
    "budget": (Reach.FLAG, "--gpu-memory-utilization, within its law"),
    "non-expert weights": (Reach.FIXED, "checkpoint census"),
    "KV reserve": (Reach.IMAGE_EDIT, "registry constant; only --max-model-len scales it"),
    "CUDA graphs": (Reach.ENVIRONMENT, "VLLM_CUDAGRAPH_MEM_BASE_MB, _PER_GRAPH_MB or _ESTIMATE_MB"),
    "runtime overhead": (Reach.PARTLY, "--expert-precise-memory chooses the constant; the rest is an image edit"),
    "expert cache": (Reach.FIXED, "what is left"),
}
"""Every row of a plan table and who moves it (RDNA4 document, section 1)."""


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What was read from a live engine, its log and its cards. ``None`` and empty are "not measured"."""

    rows: dict[str, Figure] = {}
    """Plan table by the names of `REACH`, per rank."""
    slots: int | None = None
    resident: Figure | None = None
    """Bytes of the resident layers."""
    resident_layers: int | None = None
    experts_per_layer: int = levers.EXPERTS_PER_LAYER
    """Assumed where no line states it."""
    overhead_measured: Figure | None = None
    registry_bytes_per_token: float | None = None
    measured_bytes_per_token: float | None = None
    """At this very geometry."""
    kv_tokens: int | None = None
    max_model_len: int | None = None
    windows: int | None = None
    """Full windows that the deploy promises."""
    asked_tokens: int | None = None
    """Tokens that the pinned pool was asked for."""
    max_num_batched_tokens: int | None = None
    precise: bool | None = None
    graph_estimate: Figure | None = None
    graph_captured: dict[str, Figure] = {}
    """By rank."""
    graphs: int | None = None
    total_bytes: int | None = None
    utilization: float | None = None
    free: FreeAtInit | None = None
    high_water_bytes: dict[str, int] = {}
    """Driver's use of each card at its highest."""
    restarts: int | None = None
    peer_answered: bool | None = None
    """One real chat completion through a peer's address; ``None``: not tried, or no answer from localhost."""
    peer_said: str = ""
    """What came of it, in words."""
    carried: dict[str, levers.Carry] = {}
    """By lever: whether the running image reads it and the engine's environment or flags can carry it."""


class Row(msgspec.Struct, frozen=True):
    """One term of the live plan."""

    name: str
    size_bytes: int
    reach: Reach
    how: str


class Closure(msgspec.Struct, frozen=True):
    """Whether the rows sum to the expert cache that is printed."""

    residual_bytes: int
    precision_bytes: float

    @property
    def closes(self) -> bool:
        """The residual is within what the printed digits allow."""
        return abs(self.residual_bytes) <= self.precision_bytes + 1


class Check(msgspec.Struct, frozen=True):
    """One point of the verification after a deploy."""

    name: str
    state: Literal["ok", "wrong", "not measured", "unknown"]
    sentence: str


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, for people and programs."""

    rows: tuple[Row, ...]
    closure: Closure | None
    """``None`` where a row is missing."""
    slot: SlotPrice | None
    levers: tuple[LeverWorth, ...]
    free_memory: str
    checks: tuple[Check, ...]
    missing: tuple[str, ...]
    """Rows that no line states."""


def audit(observed: Observed) -> Audit:
    """Audit one rank's plan; nothing that was not read is filled in."""
    rows = tuple(
        Row(name, observed.rows[name].size_bytes, *reach) for name, reach in REACH.items() if name in observed.rows
    )
    slot = levers.slot_price(
        slots=observed.slots,
        expert_cache=observed.rows.get("expert cache"),
        resident=observed.resident,
        resident_layers=observed.resident_layers,
        experts_per_layer=observed.experts_per_layer,
    )
    return Audit(
        rows=rows,
        closure=closure(observed.rows),
        slot=slot,
        levers=_levers(observed, slot),
        free_memory=_free_memory(observed),
        checks=_checks(observed),
        missing=tuple(name for name in REACH if name not in observed.rows),
    )


def closure(rows: Mapping[str, Figure]) -> Closure | None:
    """Budget minus every other row minus the expert cache; ``None`` where a row is missing."""
    if any(name not in rows for name in REACH):
        return None
    residual_bytes = rows["budget"].size_bytes - sum(rows[name].size_bytes for name in REACH if name != "budget")
    return Closure(residual_bytes, sum(rows[name].precision_bytes for name in REACH))


def _levers(observed: Observed, slot: SlotPrice | None) -> tuple[LeverWorth, ...]:
    rate = observed.measured_bytes_per_token or observed.registry_bytes_per_token
    price = levers.Price(slot=slot, bytes_per_token=rate, carried=observed.carried)
    rows = observed.rows
    estimate = None if observed.graph_estimate is None else observed.graph_estimate.size_bytes
    row = None if "CUDA graphs" not in rows else rows["CUDA graphs"].size_bytes
    found = [
        levers.utilization(
            price,
            budget=rows.get("budget"),
            total_bytes=observed.total_bytes,
            utilization=observed.utilization,
            free=observed.free,
        ),
        levers.graph_charge(price, charge_in_force(estimate, row), observed.graph_captured, observed.graphs),
    ]
    if "runtime overhead" in rows:
        overhead, measured = rows["runtime overhead"], observed.overhead_measured
        found.append(
            levers.precise_memory(
                price,
                planned=overhead,
                measured=measured,
                max_num_batched_tokens=observed.max_num_batched_tokens,
                precise=observed.precise,
            )
        )
        found.append(levers.overhead_slack(price, overhead, measured))
    if "KV reserve" in rows:
        measured_need = None
        if observed.measured_bytes_per_token is not None and observed.max_model_len is not None:
            measured_need = int(observed.measured_bytes_per_token * observed.max_model_len)
        found.append(levers.reserve_gap(price, rows["KV reserve"], measured_need))
    return tuple(found)


def _free_memory(observed: Observed) -> str:
    if not observed.high_water_bytes or observed.total_bytes is None:
        return "not measured: no card's high-water was read"
    heaviest = max(observed.high_water_bytes, key=lambda card: observed.high_water_bytes[card])
    left = observed.total_bytes - observed.high_water_bytes[heaviest]
    return (
        f"{format_gib(left)} were never used on {heaviest}, the heavier card: the estimator's gap (KV and overhead are "
        "priced too high, and torch returns no slabs), a margin and not arena that a deploy could take"
    )


def _checks(observed: Observed) -> tuple[Check, ...]:
    return (
        _plan_check(observed),
        _size_check(observed),
        _capture_check(observed),
        _high_water_check(observed),
        _restart_check(observed),
        _peer_check(observed),
    )


def _plan_check(observed: Observed) -> Check:
    closed = closure(observed.rows)
    if closed is None:
        return Check("plan lines", "not measured", "the plan table is not complete")
    state: Literal["ok", "wrong"] = "ok" if closed.closes else "wrong"
    return Check(
        "plan lines", state, f"the rows sum to the expert cache within {format_gib(abs(closed.residual_bytes))}"
    )


def _size_check(observed: Observed) -> Check:
    name, tokens = "size against ask", observed.kv_tokens
    if tokens is None:
        return Check(name, "not measured", "no line states the KV cache's tokens")
    asked = observed.asked_tokens
    if asked is None and observed.windows is not None and observed.max_model_len is not None:
        asked = observed.windows * observed.max_model_len
    if asked is None:
        count = full_windows(tokens, observed.max_model_len) if observed.max_model_len else 0
        held = f", {count} full window{'' if count == 1 else 's'}" if count else ""
        return Check(name, "unknown", f"{tokens:,} tokens{held}; how many were asked for is not known")
    return Check(name, "ok" if tokens >= asked else "wrong", f"{tokens:,} tokens of {asked:,} asked for")


def _capture_check(observed: Observed) -> Check:
    name = "estimate against capture"
    estimate = None if observed.graph_estimate is None else observed.graph_estimate.size_bytes
    row = observed.rows.get("CUDA graphs")
    charge = charge_in_force(estimate, None if row is None else row.size_bytes)
    if charge is None or not observed.graph_captured:
        return Check(name, "not measured", "no line states what graph capture took")
    rank = max(observed.graph_captured, key=lambda key: observed.graph_captured[key].size_bytes)
    captured = observed.graph_captured[rank]
    over = captured.size_bytes - charge.size_bytes > captured.precision_bytes
    return Check(
        name,
        "wrong" if over else "ok",
        f"{rank} captured {format_gib(captured.size_bytes)}, charged {format_gib(charge.size_bytes)} ({charge.source})",
    )


def _high_water_check(observed: Observed) -> Check:
    name = "high-water per card"
    if not observed.high_water_bytes:
        return Check(name, "not measured", "no card was read")
    parts = [f"{card} {format_gib(used)}" for card, used in sorted(observed.high_water_bytes.items())]
    total = observed.total_bytes
    over = total is not None and max(observed.high_water_bytes.values()) > total
    return Check(name, "wrong" if over else "ok", ", ".join(parts))


def _restart_check(observed: Observed) -> Check:
    if observed.restarts is None:
        return Check("restart count", "not measured", "the unit's restart count was not read")
    return Check("restart count", "wrong" if observed.restarts else "ok", f"{observed.restarts} restarts")


def _peer_check(observed: Observed) -> Check:
    name = "chat completion from a peer"
    if observed.peer_answered is None:
        said = observed.peer_said or "no completion was asked for through a peer's address"
        return Check(name, "unknown", f"{said}; silence from localhost is not an outage")
    said = observed.peer_said or "one completion was asked for through a peer"
    return Check(name, "ok" if observed.peer_answered else "wrong", said)
