"""Plans and audits as text for people."""

from __future__ import annotations

from pytest_kvbudget.budget.audit import Audit
from pytest_kvbudget.budget.model import Plan, Refusal
from pytest_kvbudget.units import GIB, format_gib


def plan_lines(plan: Plan) -> list[str]:
    """The table of a plan: signed GiB, what moves each term, the sum."""
    width = max(len(name) for name in (*(term.name for term in plan.terms), *plan.unknown))
    lines = []
    for term in plan.terms:
        sign = "+" if term.signed_bytes >= 0 and term.role == "gives" else "-"
        size = f"{sign}{abs(term.signed_bytes) / GIB:9.2f} GiB"
        lines.append(f"  {term.name:<{width}}  {size}  {term.provenance:<10} {term.reach}: {term.how}")
    lines += [f"  {name:<{width}}  {'not given':>14}" for name in plan.unknown]
    lines.append(f"  {'left':<{width}}  {plan.left_bytes / GIB:10.2f} GiB  {plan.sentence}")
    return lines


def refusal_lines(refusals: tuple[Refusal, ...]) -> list[str]:
    """Why a shape is known not to boot."""
    lines = []
    for refusal in refusals:
        lines += [
            f"refused ({refusal.law}): {refusal.sentence}",
            f"  turn: {refusal.advice}",
            f"  law: {refusal.source}",
        ]
    return lines


def audit_lines(audit: Audit) -> list[str]:
    """An audit: the plan with its classification, the closure, the levers, free memory, the checks."""
    lines = ["plan of one rank"]
    width = max((len(row.name) for row in audit.rows), default=0)
    lines += [f"  {row.name:<{width}}  {row.size_bytes / GIB:7.2f} GiB  {row.reach}: {row.how}" for row in audit.rows]
    lines += [f"  {name}: not measured" for name in audit.missing]
    if audit.closure is not None:
        verb = "closes" if audit.closure.closes else "does not close"
        lines.append(
            f"  the sum {verb}: residual {format_gib(audit.closure.residual_bytes)}, "
            f"printed precision {audit.closure.precision_bytes / GIB:.3f} GiB"
        )
    if audit.slot is None:
        lines.append("  price of a slot: not measured")
    else:
        lines.append(
            f"  price of a slot: {audit.slot.slot_bytes / 2**20:.3f} MiB, {audit.slot.slots_per_gib:.0f} per GiB "
            f"({audit.slot.source})"
        )
    lines.append("levers")
    for lever in audit.levers:
        worth = "unknown" if lever.worth_bytes is None else f"{lever.worth_bytes / GIB:.2f} GiB"
        if lever.worth_slots is not None:
            worth += f", {lever.worth_slots:,} slots"
        if lever.worth_tokens is not None:
            worth += f", {lever.worth_tokens:,} tokens"
        lines.append(f"  {lever.name} [{lever.claim}]: {worth}; {lever.sentence}")
    lines += [f"free memory: {audit.free_memory}", "verification"]
    lines += [f"  {check.name} [{check.state}]: {check.sentence}" for check in audit.checks]
    return lines
