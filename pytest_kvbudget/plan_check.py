"""A plan against what its boot said: which term was predicted, what was measured, and who owes whom. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from pytest_kvbudget.budget.footprint import error_bytes, used_bytes
from pytest_kvbudget.budget.model import Plan
from pytest_kvbudget.ledger.model import BootLedger, Evidence, Value
from pytest_kvbudget.units import format_gib
from pytest_kvbudget.verdict import Provenance

EXACT_BYTES: Final = 1
"""Plans are cut to whole bytes term by term."""

LEFT: Final = "left"

_FACTS: Final[dict[str, dict[str, tuple[tuple[str, ...], ...]]]] = {
    "neuron": {
        "HBM stack": (("hbm_total_used_bytes", "free_bytes"),),
        "model weights": (("weights_bytes",),),
        "reserved headroom": (("reserved_headroom_bytes",),),
        LEFT: (("effective_kv_bytes",), ("available_kv_bytes",)),
    },
    "rdna4": {
        "budget": (("plan_budget_bytes",),),
        "non-expert weights": (("plan_non_expert_bytes",),),
        "KV reserve": (("plan_kv_reserve_bytes",),),
        "CUDA graphs": (("graph_capture_bytes",), ("plan_graphs_bytes",)),
        "runtime overhead": (("plan_overhead_measured_bytes",), ("plan_overhead_bytes",)),
        LEFT: (("plan_expert_cache_bytes",),),
    },
    "vllm": {
        "requested": (("requested_bytes",),),
        "weights and non-torch": (("consumed_bytes",), ("weights_bytes", "non_torch_bytes")),
        "peak activation": (("peak_activation_bytes",),),
        "CUDA graphs": (("graph_actual_bytes",), ("graph_capture_bytes",), ("graph_estimated_bytes",)),
        "pinned pool": (("available_kv_bytes",),),
        LEFT: (("available_kv_bytes",),),
    },
}
"""By policy and term: the facts that state it, the best first; several facts of one entry are added."""


class Reconciled(msgspec.Struct, frozen=True, kw_only=True):
    """One term of a plan beside what the boot said of it. Sizes are bytes per rank."""

    term: str
    """As the plan names it; ``left`` for what the terms leave."""
    role: Literal["gives", "takes"]
    planned_bytes: int
    stated_bytes: int
    provenance: Provenance
    """``measured`` where the boot saw it; ``assumed`` or ``derived`` where it is the engine's own plan or estimate."""
    precision_bytes: float
    """Of what was printed."""
    agrees: bool
    """Equal within printed precision."""
    sentence: str
    evidence: tuple[Evidence, ...] = ()

    @property
    def difference_bytes(self) -> int:
        """Stated minus planned."""
        return self.stated_bytes - self.planned_bytes


def reconcile(plan: Plan, ledger: BootLedger, *, high_water_bytes: int | None = None) -> tuple[Reconciled, ...]:
    """Every term of the plan that the boot speaks of; terms that no line states are not there.

    Args:
        plan: made before the boot.
        ledger: of the boot; where ranks differ, the rank that binds is compared.
        high_water_bytes: the most that the driver showed as used on a card: what a footprint is held against.
    """
    if plan.variant == "footprint":
        return () if high_water_bytes is None else (_footprint(plan, high_water_bytes),)
    return tuple(_terms(plan, ledger))


def _terms(plan: Plan, ledger: BootLedger) -> Iterator[Reconciled]:
    facts = _FACTS.get(plan.policy, {})
    for term in plan.terms:
        found = _stated(ledger, facts.get(term.name, ()))
        if found:
            yield _compared(term.name, term.role, term.size_bytes, found)
    found = _stated(ledger, facts.get(LEFT, ()))
    # A pool of pinned bytes is the term itself.
    if found and plan.variant != "pinned" and not plan.unknown:
        yield _compared(LEFT, "gives", max(0, plan.left_bytes), found, plan.result)


def _stated(ledger: BootLedger, choices: tuple[tuple[str, ...], ...]) -> tuple[Value, ...]:
    for names in choices:
        values = tuple(ledger.facts[name] for name in names if name in ledger.facts)
        if len(values) == len(names) and all(isinstance(value.value, int) for value in values):
            return values
    return ()


def _compared(
    name: str, role: Literal["gives", "takes"], planned_bytes: int, values: tuple[Value, ...], result: str = ""
) -> Reconciled:
    stated_bytes = sum(int(value.value) for value in values)
    precision_bytes = sum(value.precision for value in values)
    # of added figures the weaker word counts
    provenance = next((v.provenance for v in values if v.provenance is not Provenance.MEASURED), Provenance.MEASURED)
    agrees = abs(stated_bytes - planned_bytes) <= precision_bytes + EXACT_BYTES
    return Reconciled(
        term=name,
        role=role,
        planned_bytes=planned_bytes,
        stated_bytes=stated_bytes,
        provenance=provenance,
        precision_bytes=precision_bytes,
        agrees=agrees,
        sentence=_sentence(result or name, role, planned_bytes, stated_bytes, provenance, agrees=agrees),
        evidence=tuple(dict.fromkeys(value.evidence for value in values)),
    )


def _sentence(
    name: str, role: str, planned_bytes: int, stated_bytes: int, provenance: Provenance, *, agrees: bool
) -> str:
    verb = {Provenance.MEASURED: "measured", Provenance.SIMULATED: "simulated"}.get(provenance, "the engine plans")
    head = f"{name}: planned {format_gib(planned_bytes)}, {verb} {format_gib(stated_bytes)}"
    if agrees:
        return head
    apart = format_gib(abs(stated_bytes - planned_bytes))
    if role == "gives":
        return f"{head}: {apart} {'more' if stated_bytes > planned_bytes else 'less'} than planned"
    if stated_bytes > planned_bytes:
        return f"{head}: it takes {apart} that the plan gave to something else"
    return f"{head}: {apart} are planned and not taken"


def _footprint(plan: Plan, high_water_bytes: int) -> Reconciled:
    planned_bytes, missed_bytes = used_bytes(plan), error_bytes(plan, high_water_bytes)
    tail = "" if missed_bytes <= 0 else ": the law promised too little, the margin is smaller than it says"
    return Reconciled(
        term="footprint",
        role="takes",
        planned_bytes=planned_bytes,
        stated_bytes=high_water_bytes,
        provenance=Provenance.MEASURED,
        precision_bytes=0,
        agrees=abs(missed_bytes) <= EXACT_BYTES,
        sentence=f"footprint: planned {format_gib(planned_bytes)}, high-water {format_gib(high_water_bytes)}{tail}",
    )
