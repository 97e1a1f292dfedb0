"""A verdict with its cause and its sentence."""

from __future__ import annotations

from pytest_kvbudget.ledger.model import Cause, Lever
from pytest_kvbudget.verdict import Phase, Verdict

Judgement = tuple[Verdict, Cause | None, str]
"""Verdict, cause (``None`` where nothing failed), and the verdict in one sentence."""


def reason(
    verdict: Verdict, phase: Phase, failure_class: str, sentence: str, *, levers: tuple[Lever, ...] = ()
) -> tuple[Verdict, Cause, str]:
    """A verdict that rests on something else than the log, with its cause and message."""
    cause = Cause(phase=phase, failure_class=failure_class, sentence=sentence, levers=levers)
    return verdict, cause, f"{failure_class}: {sentence}"
