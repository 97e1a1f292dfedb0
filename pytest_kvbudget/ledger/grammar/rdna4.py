"""The RDNA4 fork with expert offload: what it prints beside mainline's lines.

The planner's source is not public: labels are matched as prefixes, the first figure after two or more spaces counts,
the unit is optional and the tail is free, since columns differ between releases.
"""

from __future__ import annotations

from typing import Final

from pytest_kvbudget.ledger.grammar.model import Failure, Row, Table
from pytest_kvbudget.verdict import Phase, Provenance

_PLAN = Provenance.ASSUMED
_BEGIN = r"(?:^|[:|])\W{0,8}"
_GAP = r"(?:\s*\([^()]*\))?[\s:|]+"


def _plan(label: str, fact: str, *parts: str, event: bool = False) -> Row:
    return Row(
        pattern=rf"{_BEGIN}{label}{_GAP}{{{fact}:gib_bare}}(?![\w./])",
        needle=label.replace("\\", ""),
        phase=Phase.ARGUMENT,
        scope="api",
        provenance=_PLAN,
        parts=parts,
        releases="fork",
        event="plan" if event else "",
    )


PLAN: Final = (
    _plan(r"budget \(total x util\)", "plan_budget_bytes", event=True),
    _plan(r"non-expert weights", "plan_non_expert_bytes", r"PLE {plan_ple_bytes:gib_bare} excluded"),
    _plan(r"KV reserve", "plan_kv_reserve_bytes", r"registry {plan_registry_b_per_token:count} B/token"),
    _plan(r"CUDA graphs", "plan_graphs_bytes"),
    _plan(r"runtime overhead", "plan_overhead_bytes", r"measured {plan_overhead_measured_bytes:gib_bare}"),
    _plan(
        r"expert cache space",
        "plan_expert_cache_bytes",
        r"{plan_slots:count} slots",
        r"resident layers (?:\[[^\]]*\]\s*)?{plan_resident_layers_bytes:gib_bare}",
    ),
    _plan(
        r"host-backed experts",
        "plan_host_experts_bytes",
        r"host usable {host_usable_bytes:gib_bare}",
        r"MemAvailable {host_mem_available_bytes:gib_bare}",
    ),
)

BOOT: Final = (
    Row(pattern=r"PLE offload: locked {ple_locked_bytes:gib} of PLE weights", phase=Phase.WEIGHTS_LOAD, scope="rank"),
    Row(
        pattern=r"FAILED to lock {ple_unlocked_bytes:gib}",
        scope="rank",
        failure=Failure(failure_class="host_memory_limit", phase=Phase.WEIGHTS_LOAD, soft=True),
        parts=(r"locked {ple_locked_bytes:gib}, FAILED",),
    ),
    Row(
        pattern=r"memory after profile: torch reserved {torch_reserved_bytes:gib}, torch allocated "
        r"{torch_allocated_bytes:gib}, non-torch {non_torch_bytes:gib}",
        phase=Phase.PROFILE,
        scope="rank",
        parts=(r"before load: non-torch {non_torch_before_load_bytes:gib}",),
    ),
    Row(
        pattern=r"expert offload plan check",
        wraps=True,
        phase=Phase.PROFILE,
        scope="rank",
        parts=(
            r"runtime overhead planned {plan_overhead_planned_bytes:gib}, measured {plan_overhead_measured_bytes:gib}",
            r"runtime overhead planned [-\d.]+ GiB, measured [-\d.]+ GiB \(\+?{plan_overhead_delta_bytes:gib_bare}(?: "
            r"GiB)?\)",
            r"KV planned {plan_kv_b_per_token:count} B/token, measured {measured_kv_b_per_token:count} B/token",
            r"KV planned \d+ B/token, measured \d+ B/token \({kv_b_per_token_delta:signed_count}\)",
        ),
    ),
    Row(pattern=r"ExpertPlanError: ", scope="api", failure=Failure(failure_class="plan_refused", phase=Phase.ARGUMENT)),
)

TABLE: Final = Table(family="rdna4", rows=(*PLAN, *BOOT))
