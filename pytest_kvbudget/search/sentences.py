"""Findings in words. A finding bounded by the test's own gate is never put down to memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_kvbudget.search.model import BYTES_AXES
from pytest_kvbudget.units import size_beyond
from pytest_kvbudget.verdict import FindingKind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_kvbudget.ledger.model import Cause, Lever
    from pytest_kvbudget.search.model import Axis, Finding, SweepFinding, Trial
    from pytest_kvbudget.search.rungs import Rung


def of(finding: Finding, reason: str, *, confirmed: int = 0) -> str:
    """The finding in one sentence: value, what bounded it, and the boots that prove it.

    Args:
        finding: everything but its sentence.
        reason: what stopped a search that proved nothing.
        confirmed: how many of the confirmations passed.
    """
    name, effort = finding.axis.name, boots(finding)
    value, failed_at = _shown(finding, finding.value), _shown(finding, finding.failed_at)
    if finding.kind is FindingKind.PROVEN:
        said = f"{name} {value} passed and {failed_at} {_failed(finding.bounded_by)}; proven with {effort}"
    elif finding.kind is FindingKind.CEILING_REACHED:
        said = f"{name} {value} passed and is the ceiling of the ladder; proven with {effort}"
    elif finding.kind in {FindingKind.EMPTY, FindingKind.EMPTY_WINDOW}:
        said = f"nothing passes: {reason or _end(finding)}{_failed(finding.bounded_by)}; {effort}"
        if finding.lever is not None:
            said += f"; {turn(finding.lever)} instead"
    elif finding.kind is FindingKind.FLAKY:
        said = f"flaky: {reason}; {_band(finding)}; {effort}"
    else:
        word = "no single boundary" if finding.kind is FindingKind.NON_MONOTONE else finding.kind.value
        said = f"{word}: {reason}; {_between(finding)}; {effort}"
    if finding.confirmations:
        said += f"; {confirmed} of {finding.confirmations} confirmations passed"
    if finding.proven and finding.deploy_value is not None and finding.deploy_value != finding.value:
        said += f"; deploy {_deploy(finding.axis, finding.deploy_value)}, three sigma below"
    return "; ".join((said, *finding.notes))


def too_low(axis: Axis, low: Trial) -> str:
    """How the sentence of an empty window begins: the lower of its two failures."""
    value, above = axis.show(low.value), axis.show(axis.value(axis.index_at_or_below(low.value) + 1))
    return f"{axis.name} {value} {_failed(low.cause)} for want of more, and {above}, the next rung, "


def refused_by_gate(axis: Axis, rungs: Iterable[Rung], failed_at: int | None) -> list[str]:
    """What did not pass for a reason of the test's own, beside the failure that a finding is put down to."""
    refused = sorted(
        rung.value
        for rung in rungs
        if rung.value != failed_at and (cause := rung.trial.cause) is not None and cause.by_gate
    )
    if not refused:
        return []
    values = " to ".join(axis.show(value) for value in dict.fromkeys((refused[0], refused[-1])))
    return [f"{axis.name} {values} booted and was refused by the test's own gate, not for memory"]


def _end(finding: Finding) -> str:
    """The end of the axis that was booted and failed: the floor, or the ceiling where even that is too little."""
    axis = finding.axis
    which = "even the ceiling" if finding.failed_at == axis.ceiling != axis.floor else "the floor"
    return f"{axis.name} {_shown(finding, finding.failed_at)}, {which}, "


def _deploy(axis: Axis, value: int) -> str:
    return size_beyond(value, axis.unit_bytes, up=False) if axis.name in BYTES_AXES else axis.show(value)


def _shown(finding: Finding, value: int | None) -> str:
    return "nothing" if value is None else finding.axis.show(value)


def other_lever(cause: Cause | None, axis: str) -> Lever | None:
    """The first thing that moves a cause and is not the axis itself."""
    helps = [lever for lever in (cause.levers if cause else ()) if lever.effect == "helps" and lever.name != axis]
    return helps[0] if helps else None


def turn(lever: Lever) -> str:
    """``lower max_num_seqs``, ``change kv_cache_dtype``."""
    verb = {"raise": "raise", "lower": "lower", "clean": "clean up", "none": "change"}[lever.direction]
    return f"{verb} {lever.name}"


def _band(finding: Finding) -> str:
    name, parts = finding.axis.name, []
    if finding.steady_value is not None:
        parts.append(f"{name} {_shown(finding, finding.steady_value)} passed three of three")
    if finding.refused_at is not None:
        parts.append(f"{_shown(finding, finding.refused_at)} failed two of two")
    return ", ".join(parts) or "no rung passed three of three or failed two of two"


def _failed(cause: Cause | None) -> str:
    if cause is None:
        return "failed for memory"
    if cause.by_gate:
        return "was refused by the test's own gate"
    return "failed for memory" if cause.phase is Phase.UNKNOWN else f"failed for memory in {cause.phase.value}"


def _between(finding: Finding) -> str:
    name = finding.axis.name
    passed = "nothing passed" if finding.value is None else f"{name} {_shown(finding, finding.value)} passed"
    if finding.failed_at is None:
        return f"{passed}, none above it failed" if finding.value is not None else "nothing passed or failed"
    gate = " the test's own gate" if finding.bounded_by is not None and finding.bounded_by.by_gate else ""
    return f"{passed}, {_shown(finding, finding.failed_at)} failed{gate}"


def boots(finding: Finding | SweepFinding) -> str:
    """``5 boots, 1 of them repeated, and 2 taken over``."""
    text = f"{finding.boots} boot" + ("" if finding.boots == 1 else "s")
    again = finding.retries + finding.repeats
    text += f", {again} of them repeated" if again else ""
    if not finding.reused:
        return text
    return f"{text}{',' if again else ''} and {finding.reused} taken over"
