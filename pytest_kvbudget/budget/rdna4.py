"""The RDNA4 fork with expert offload: what the plan leaves for the expert arena, and what a deploy can move.

``arena = budget - non_expert - kv_reserve - cuda_graphs - runtime_overhead`` (RDNA4 document, section 1; terms in
facts, section 3). The planner's source is not public: constants below are the documents'.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final

import msgspec

from pytest_kvbudget.budget.graphs import GraphCharge
from pytest_kvbudget.budget.model import BudgetInputError, Plan, Reach, gives, takes
from pytest_kvbudget.units import GIB, MIB, format_size
from pytest_kvbudget.verdict import Provenance

DOCUMENT: Final = "RDNA4 document"
R9700_TOTAL_BYTES: Final = 34_208_743_424
"""32624 MiB (facts, section 5)."""
SLOT_BYTES: Final = 3 * 2560 * 640 // 2
"""One expert of the document's model, fp8 at TP 2: 2.34375 MiB, 437 per GiB (facts, section 3)."""
UTILIZATION_FLAG: Final = "--gpu-memory-utilization"
PRECISE_FLAG: Final = "--expert-precise-memory"
OVERHEAD_ANCHOR_TOKENS: Final = 4096
OVERHEAD_STEP_GIB: Final = 0.22


class OverheadMode(StrEnum):
    """Which fitted constant the plan charges for the runtime."""

    DEFAULT = "default"
    """7.60 GiB: fitted plus 2.35 GiB of compile and capture headroom (document, section 4)."""
    PRECISE = "precise"
    """5.25 GiB, the registry's fit at 4096 batched tokens."""
    GLM = "glm"
    """6.25 GiB (facts, section 3)."""

    @property
    def base_bytes(self) -> int:
        """The constant, in bytes."""
        return int({"default": 7.60, "precise": 5.25, "glm": 6.25}[self.value] * GIB)


def overhead_bytes(mode: OverheadMode | int, max_num_batched_tokens: int = OVERHEAD_ANCHOR_TOKENS) -> int:
    """The plan's runtime overhead, in bytes: the mode's constant + 0.22 GiB per 1024 batched tokens above 4096.

    1024, 2048 and 4096 are plan-identical (document, section 3).

    Args:
        mode: the constant's name, or its bytes.
        max_num_batched_tokens: MNBT.
    """
    base_bytes = mode.base_bytes if isinstance(mode, OverheadMode) else mode
    above = max(0, max_num_batched_tokens - OVERHEAD_ANCHOR_TOKENS)
    return base_bytes + int(OVERHEAD_STEP_GIB * GIB * above / 1024)


def plan_identical(first_tokens: int, second_tokens: int) -> bool:
    """Two batched-token rungs give one and the same plan: both at or below the anchor, or equal."""
    return first_tokens == second_tokens or max(first_tokens, second_tokens) <= OVERHEAD_ANCHOR_TOKENS


class ArenaPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one rank and the expert slots that its rest holds."""

    plan: Plan
    slot_bytes: int

    @property
    def slots(self) -> int:
        """Whole experts that fit: ``arena // expert_bytes``; none when the plan does not fit."""
        return max(0, self.plan.left_bytes) // self.slot_bytes

    @property
    def arena_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes


def arena_plan(
    *,
    total_bytes: int,
    utilization: float,
    non_expert_bytes: int,
    kv_reserve_bytes: int | None,
    graph_bytes: int,
    overhead: int,
    slot_bytes: int = SLOT_BYTES,
    graphs_how: str = GraphCharge().how,
    weights_provenance: Provenance = Provenance.CONFIGURED,
    warnings: tuple[str, ...] = (),
) -> ArenaPlan:
    """The plan of one rank (document, section 1). The pinned pool is no term of it: the reserve is.

    Args:
        total_bytes: the card.
        utilization: in (0, 1].
        non_expert_bytes: weights outside the routed experts, per rank.
        kv_reserve_bytes: `pool.KvPrice.reserve_bytes`; ``None`` where ``non_expert_bytes`` is both together.
        graph_bytes: `graphs.GraphCharge.charged_bytes`.
        overhead: `overhead_bytes`.
        slot_bytes: one expert on this rank.
        graphs_how: variables that move the graph charge.
        weights_provenance: where the weights' size comes from.
        warnings: things to say with the plan.

    Raises:
        BudgetInputError: a utilization outside (0, 1], or a slot without bytes.
    """
    if not 0 < utilization <= 1:
        raise BudgetInputError(f"{UTILIZATION_FLAG} is {utilization}; expected above 0 and at most 1")
    if slot_bytes < 1:
        raise BudgetInputError(f"a slot of {slot_bytes} bytes; expected at least 1")
    assumed, law = Provenance.ASSUMED, f"{DOCUMENT}, section 1"
    budget_bytes = int(total_bytes * utilization)
    reserve_how = "registry constant; only --max-model-len scales it"
    overhead_how = f"{PRECISE_FLAG} chooses the constant; anything else is an image edit"
    weights_name, reserve = "non-expert weights and KV reserve", []
    if kv_reserve_bytes is not None:
        weights_name = "non-expert weights"
        reserve = [
            takes("KV reserve", kv_reserve_bytes, Reach.IMAGE_EDIT, reserve_how, law=law, provenance=assumed),
        ]
    terms = (
        gives("budget", budget_bytes, Reach.FLAG, UTILIZATION_FLAG, law=law),
        takes(weights_name, non_expert_bytes, Reach.FIXED, "checkpoint census", law=law, provenance=weights_provenance),
        *reserve,
        takes(
            "CUDA graphs",
            graph_bytes,
            Reach.ENVIRONMENT,
            graphs_how,
            law=f"{DOCUMENT}, section 2",
            provenance=assumed,
        ),
        takes(
            "runtime overhead",
            overhead,
            Reach.PARTLY,
            overhead_how,
            law=f"{DOCUMENT}, sections 3 and 4",
            provenance=assumed,
        ),
    )
    plan = Plan(policy="rdna4", variant="expert plan", result="expert cache", terms=terms, warnings=warnings)
    return ArenaPlan(plan=plan, slot_bytes=slot_bytes)


def utilization_for_slots(slots: int, reference: ArenaPlan, total_bytes: int) -> float:
    """Least utilization whose plan holds so many slots, other terms as in ``reference``: the plan's inverse.

    May exceed 1: then no utilization does.
    """
    taken_bytes = sum(term.size_bytes for term in reference.plan.terms if term.role == "takes")
    wanted_bytes = slots * reference.slot_bytes + taken_bytes
    utilization = wanted_bytes / total_bytes
    while int(total_bytes * utilization) < wanted_bytes:
        utilization = math.nextafter(utilization, math.inf)
    return utilization


class PreciseTrade(msgspec.Struct, frozen=True, kw_only=True):
    """What precise memory gives the arena and what it takes it from."""

    gained_bytes: int
    gained_slots: int
    harmful: bool | None
    """It would plan less than the overhead that was measured; ``None`` where nothing was measured."""
    planned_bytes: int
    sentence: str


def precise_trade(
    max_num_batched_tokens: int, slot_bytes: int | None = None, measured_bytes: int | None = None
) -> PreciseTrade:
    """Precise memory against the default (document, section 4): it moves exactly one term, by 2.35 GiB.

    Args:
        max_num_batched_tokens: MNBT of the deploy.
        slot_bytes: price of a slot; ``None`` gives no slots.
        measured_bytes: runtime overhead that a boot measured.
    """
    planned_bytes = overhead_bytes(OverheadMode.PRECISE, max_num_batched_tokens)
    gained_bytes = overhead_bytes(OverheadMode.DEFAULT, max_num_batched_tokens) - planned_bytes
    harmful = None if measured_bytes is None else measured_bytes > planned_bytes
    pays = "the phases that allocate last, compile and graph capture, pay for it"
    if measured_bytes is not None and harmful:
        sentence = (
            f"harmful here: it would plan {format_size(planned_bytes)} of overhead against "
            f"{format_size(measured_bytes)} measured; {pays}"
        )
    else:
        sentence = (
            f"moves {format_size(gained_bytes)} from overhead to the arena; {pays}: a smaller pinned pool, fewer "
            "sequences or a shorter window must make up for it"
        )
    return PreciseTrade(
        gained_bytes=gained_bytes,
        gained_slots=0 if slot_bytes is None else gained_bytes // slot_bytes,
        harmful=harmful,
        planned_bytes=planned_bytes,
        sentence=sentence,
    )


ROUTED_EXPERTS: Final = 512
SHARED_LAYERS: Final = 48


def resident_floor_slots(
    resident_layers: int = 3, routed_experts: int = ROUTED_EXPERTS, shared_layers: int = SHARED_LAYERS
) -> int:
    """Least slots that the plan accepts: resident layers whole, with their shared expert, and one shared per layer.

    ``layers x (512 + 1) + 48`` (facts, section 3), whose own ``~1,584`` is 3 x 512 + 48; the law gives 1,587.
    """
    return resident_layers * (routed_experts + 1) + shared_layers


def slot_bytes_from_resident(
    resident_bytes: float, resident_layers: int, experts_per_layer: int = ROUTED_EXPERTS + 1
) -> float:
    """Price of a slot from the plan's resident-layer figure, in bytes; the experts of a layer are an assumption.

    Raises:
        BudgetInputError: no layer is resident.
    """
    if resident_layers < 1 or experts_per_layer < 1:
        raise BudgetInputError(f"{resident_layers} layers of {experts_per_layer} experts; expected at least 1 of each")
    return resident_bytes / (resident_layers * experts_per_layer)


def expert_bytes(layer_bytes: int, routed_experts: int, *, fused_shared: bool = False) -> int:
    """Bytes of one slot from a checkpoint: the largest expert layer over its experts (facts, section 3)."""
    return layer_bytes // (routed_experts + int(fused_shared))


def pinned_target_slots(slots: int) -> int:
    """Slots that a profile sidecar pins: ``floor(0.33 x slots)`` (facts, section 3)."""
    return slots * 33 // 100


def host_bound_bytes(mem_available_bytes: int, ple_bytes: int, ranks: int, offload_mem_bytes: int | None = None) -> int:
    """Host memory that experts of all ranks may use (facts, section 3); negative when there is none.

    ``MemAvailable - PLE - 7 GiB x ranks - 5 GiB - 5 %``, the last of MemAvailable; or ``--expert-offload-mem``.
    """
    if offload_mem_bytes is not None:
        return offload_mem_bytes
    return mem_available_bytes - ple_bytes - 7 * GIB * ranks - 5 * GIB - mem_available_bytes * 5 // 100


MXFP4_SLOT_BYTES: Final = int(1.245 * MIB)
"""One expert in MXFP4 at TP 2 (facts, section 3)."""
