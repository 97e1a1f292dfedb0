"""The argument gate: a shape that is known not to boot is refused before anything starts, with law, numbers and source.

It refuses only what a law forbids with figures that are known; anything else boots.
"""

from __future__ import annotations

from typing import Final

from pytest_kvbudget.budget.gate import cautions, refusals
from pytest_kvbudget.budget.graphs import PER_GRAPH_VARIABLE
from pytest_kvbudget.budget.model import BudgetInputError, Refusal
from pytest_kvbudget.budget.neuron import CAP_VARIABLE, HEADROOM_VARIABLE
from pytest_kvbudget.config import LoadedTarget
from pytest_kvbudget.ledger.model import Cause, Lever
from pytest_kvbudget.planning import Experience, known_for, policy_of, variant_for
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.verdict import Phase

CLASSES: Final = {
    "headroom_share": "min_kv_budget",
    "minimum_kv": "min_kv_budget",
    "utilization": "startup_free_below_request",
    "environment": "argument_rejected",
    "decode_context_parallel": "parallelism_refused",
    "data_parallel": "parallelism_refused",
    "expert_plan": "plan_refused",
    "resident_floor": "plan_refused",
}
"""Failure class by law: the one that the boot would have ended with."""

_HEADROOM: Final = (
    Lever(HEADROOM_VARIABLE, "lower", "helps", "it is taken from the logical core's share"),
    Lever(HEADROOM_VARIABLE, "raise", "harms", "leaves still less for the KV cache"),
)
_LEVERS: Final[dict[str, tuple[Lever, ...]]] = {
    "headroom_share": _HEADROOM,
    "utilization": (Lever("gpu_memory_utilization", "lower", "helps", "the worker must find what it asks for free"),),
    "decode_context_parallel": (Lever("tensor_parallel_size", "raise", "helps", "above the model's KV heads"),),
    "data_parallel": (Lever("data_parallel_size", "lower", "helps", "every replica holds a full copy"),),
    "expert_plan": (
        Lever("gpu_memory_utilization", "raise", "helps", "within its law"),
        Lever(PER_GRAPH_VARIABLE, "lower", "helps", "down to what a boot captured"),
        Lever("max_model_len", "lower", "helps", "the KV reserve is of one window"),
    ),
    "resident_floor": (
        Lever("expert_resident_layers", "lower", "helps", "resident layers are the floor"),
        Lever("gpu_memory_utilization", "raise", "helps", "within its law"),
    ),
}


def refusal_for(loaded: LoadedTarget, shape: Shape, experience: Experience | None = None) -> Cause | None:
    """Why this shape is known not to boot, in phase ``argument``; ``None`` where it is not known.

    Args:
        loaded: the target.
        shape: what is to be booted.
        experience: earlier boots of the target: a minimum KV is judged only with the weights that one stated.
    """
    try:
        found = refusals(
            policy_of(loaded),
            shape,
            known_for(loaded, shape, experience),
            environ=loaded.environment,
            variant=variant_for(loaded, shape, experience),
        )
    except BudgetInputError:
        # a value for which no rule is public, or an engine without a law: not known to be refused
        return None
    return cause_of(found) if found else None


def cautions_for(loaded: LoadedTarget, shape: Shape, *, axis: str | None = None) -> tuple[str, ...]:
    """What endangers a boot of this shape, or changes what it measures, without being known to forbid it.

    Args:
        loaded: the target.
        shape: what is to be booted.
        axis: what a search moves.
    """
    try:
        return cautions(policy_of(loaded), shape, environ=loaded.environment, axis=axis)
    except BudgetInputError:
        return ()


def cause_of(found: tuple[Refusal, ...]) -> Cause:
    """The first refusal as a cause, the others named in its sentence."""
    first, *others = found
    more = "".join(f"; also {refusal.sentence}" for refusal in others)
    return Cause(
        phase=Phase.ARGUMENT,
        failure_class=CLASSES[first.law],
        sentence=f"not booted: {first.sentence}{more}; {first.advice} (law {first.law!r}: {first.source})",
        levers=_levers(first),
    )


def _levers(refusal: Refusal) -> tuple[Lever, ...]:
    if refusal.law == "minimum_kv":
        if "maximum_headroom_bytes" in refusal.numbers:
            return _HEADROOM
        return (
            Lever("gpu_memory_utilization", "raise", "helps", "the budget is its share of the logical core"),
            Lever(CAP_VARIABLE, "raise", "helps", "where the cap binds"),
        )
    return _LEVERS.get(refusal.law, ())
