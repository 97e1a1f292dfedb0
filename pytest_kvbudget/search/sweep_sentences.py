"""Findings of headroom sweeps in words: each failure with its side, since the sides mean opposite turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_kvbudget.search import sentences
from pytest_kvbudget.search.sets import Words
from pytest_kvbudget.verdict import FindingKind, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pytest_kvbudget.ledger.model import Cause, Lever
    from pytest_kvbudget.search.knobs import Knob, Side
    from pytest_kvbudget.search.model import SweepFinding, Trial


def of(knob: Knob, finding: SweepFinding, reason: str) -> str:
    """The finding in one sentence.

    Args:
        knob: what was turned.
        finding: everything but its sentence.
        reason: why it is no proof.
    """
    said = f"{_claim(knob, finding, reason)}; {sentences.boots(finding)}"
    if finding.lever is not None:
        said += f"; {sentences.turn(finding.lever)} instead"
    if finding.confirmations:
        said += f"; {finding.confirmations} confirming boot{'s' if finding.confirmations > 1 else ''}"
    if finding.proven and finding.deploy_value is not None and finding.deploy_value != finding.value:
        said += f"; deploy {knob.show_beyond(finding.deploy_value)}, three sigma away"
    return "; ".join((said, *finding.notes))


def _claim(knob: Knob, finding: SweepFinding, reason: str) -> str:
    name, end = knob.name, "smallest" if knob.goal == "least" else "largest"
    value, failed_at = _shown(knob, finding.value), _shown(knob, finding.failed_at)
    failed = _failed(knob.ends_at, finding.bounded_by)
    short = f"{_shown(knob, finding.short_at)}{{}} {_failed(knob.other_side, finding.short_by)}"
    match finding.kind:
        case FindingKind.PROVEN:
            said = f"{name} {value} passed and {failed_at} {failed}; proven"
        case FindingKind.FLOOR_REACHED | FindingKind.CEILING_REACHED:
            said = f"{name} {value} passed and is the {end} of the sweep; proven"
        case FindingKind.EMPTY_WINDOW:
            said = f"empty window: {name} {failed_at} {failed}, and {short.format('')}"
        case FindingKind.EMPTY if finding.failed_at is not None:
            other = "largest" if knob.goal == "least" else "smallest"
            said = f"nothing passes: {name} {failed_at}, the {other} of the sweep, still {failed}"
        case FindingKind.EMPTY:
            said = f"nothing passes: {name} {short.format(f', the {end} of the sweep, already')}"
        case FindingKind.NON_MONOTONE:
            said = f"no single boundary: {reason}"
        case _:
            said = f"{finding.kind}: {reason}; {_between(knob, finding)}"
    return said


def _between(knob: Knob, finding: SweepFinding) -> str:
    passed = "nothing passed" if finding.value is None else f"{knob.name} {knob.show(finding.value)} passed"
    if finding.failed_at is None:
        return passed
    # what pushes neither way ends a sweep too, and is no failure of this side
    own = knob.side(finding.bounded_by) == knob.ends_at
    return f"{passed}, {knob.show(finding.failed_at)} {_failed(knob.ends_at, finding.bounded_by) if own else 'failed'}"


def _failed(side: Side, cause: Cause | None) -> str:
    what = "for allocation" if side == "allocation" else "for too little KV cache"
    return f"failed {what}" if cause is None or cause.phase is Phase.UNKNOWN else f"failed {what} in {cause.phase}"


def _shown(knob: Knob, value: int | None) -> str:
    return "nothing" if value is None else knob.show(value)


def stopped(knob: Knob, trial: Trial) -> str:
    """Why a failure ends a sweep: it is on neither side."""
    where = f"{knob.name} {knob.show(trial.value)}"
    if trial.cause is None:
        return f"{where} failed without a cause, which pushes neither way"
    if trial.cause.by_gate:
        return f"{where} was refused by the test's own gate, which pushes neither way: {trial.cause.sentence}"
    return f"{where} failed for something that {knob.name} does not move: {trial.cause.sentence}"


def words(knob: Knob, mirror: Callable[[int], int]) -> Words:
    """How the ladder that a sweep is in a mirror speaks of its values."""
    least = knob.goal == "least"
    return Words(
        name=knob.name,
        show=lambda value: knob.show(mirror(value)),
        failed=_failed(knob.ends_at, None),
        short=_failed(knob.other_side, None),
        best="smallest" if least else "largest",
        at="at least" if least else "at most",
    )


def band(knob: Knob, reason: str, steady: int | None, refused: int | None) -> str:
    """A flaky boundary with the ends that held."""
    parts = [reason]
    if steady is not None:
        parts.append(f"{knob.show(steady)} passed three of three")
    if refused is not None:
        parts.append(f"{knob.show(refused)} failed two of two")
    return ", ".join(parts)


def other_lever(knob: Knob, kind: FindingKind, bounded_by: Cause | None, short: Iterable[Trial]) -> Lever | None:
    """What to turn where no value of the knob passes."""
    if kind not in {FindingKind.EMPTY, FindingKind.EMPTY_WINDOW}:
        return None
    causes = [bounded_by, *(trial.cause for trial in short)]
    own = {knob.name, *_OWN_NAMES.get(knob.name, ())}
    for cause in causes:
        for lever in cause.levers if cause else ():
            if lever.effect == "helps" and lever.name not in own:
                return lever
    return None


_OWN_NAMES = {
    "reserved_headroom": ("VLLM_NEURON_RESERVED_HEADROOM_GIB",),
    "kv_cap_fraction": ("VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION",),
}
