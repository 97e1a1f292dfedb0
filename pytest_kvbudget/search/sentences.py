"""Findings in words. A finding bounded by the test's own gate is never put down to memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_kvbudget.verdict import FindingKind, Phase

if TYPE_CHECKING:
    from pytest_kvbudget.ledger.model import Cause
    from pytest_kvbudget.search.model import Finding


def of(finding: Finding, reason: str, *, confirmed: int = 0) -> str:
    """The finding in one sentence: value, what bounded it, and the boots that prove it.

    Args:
        finding: everything but its sentence.
        reason: what stopped a search that proved nothing.
        confirmed: how many of the confirmations passed.
    """
    name, boots = finding.axis.name, _boots(finding)
    if finding.kind is FindingKind.PROVEN:
        said = f"{name} {finding.value:,} passed and {finding.failed_at:,} {_failed(finding.bounded_by)}"
        said += f"; proven with {boots}"
    elif finding.kind is FindingKind.CEILING_REACHED:
        said = f"{name} {finding.value:,} passed and is the ceiling of the ladder; proven with {boots}"
    elif finding.kind is FindingKind.EMPTY:
        said = f"nothing passes: {name} {finding.failed_at:,}, the floor, {_failed(finding.bounded_by)}; {boots}"
    else:
        word = "no single boundary" if finding.kind is FindingKind.NON_MONOTONE else finding.kind.value
        said = f"{word}: {reason}; {_between(finding)}; {boots}"
    if finding.confirmations:
        said += f"; {confirmed} of {finding.confirmations} confirmations passed"
    return said


def _failed(cause: Cause | None) -> str:
    if cause is None:
        return "failed for memory"
    if cause.by_gate:
        return "did not: bounded by the test's own gate"
    return "failed for memory" if cause.phase is Phase.UNKNOWN else f"failed for memory in {cause.phase.value}"


def _between(finding: Finding) -> str:
    name = finding.axis.name
    passed = "nothing passed" if finding.value is None else f"{name} {finding.value:,} passed"
    if finding.failed_at is None:
        return f"{passed}, none above it failed" if finding.value is not None else "nothing passed or failed"
    gate = " the test's own gate" if finding.bounded_by is not None and finding.bounded_by.by_gate else ""
    return f"{passed}, {finding.failed_at:,} failed{gate}"


def _boots(finding: Finding) -> str:
    text = f"{finding.boots} boot" + ("" if finding.boots == 1 else "s")
    return f"{text}, {finding.retries} of them repeated" if finding.retries else text
