"""What to turn and what not, in words: one wording for terminal and pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from pytest_kvbudget.ledger.model import Cause, Effect, Lever
from pytest_kvbudget.search.model import Finding

_VERBS: Final = {"raise": "raise", "lower": "lower", "clean": "clean up"}


class LeverGroup(NamedTuple):
    """Levers with the same effect."""

    effect: Effect
    title: str
    levers: tuple[Lever, ...]


_TITLES: Final[tuple[tuple[Effect, str], ...]] = (
    ("helps", "turn this"),
    ("useless", "no use"),
    ("harms", "makes it worse"),
)


def grouped(cause: Cause | None) -> tuple[LeverGroup, ...]:
    """The levers of a cause by effect, helpful ones first; empty groups are left out."""
    levers: Iterable[Lever] = () if cause is None else cause.levers
    groups = (LeverGroup(effect, title, tuple(x for x in levers if x.effect == effect)) for effect, title in _TITLES)
    return tuple(group for group in groups if group.levers)


def wording(lever: Lever) -> str:
    """``"lower max_model_len"``; a lever that has no direction is changed where that helps, else left alone."""
    verb = _VERBS.get(lever.direction) or ("change" if lever.effect == "helps" else "leave")
    return f"{verb} {lever.name}"


def arrow(lever: Lever) -> str:
    """The direction as one character."""
    return {"raise": "↑", "lower": "↓", "clean": "⌫", "none": "·"}[lever.direction]


def for_more(finding: Finding) -> list[str]:
    """What moves the boundary that a ladder found: the axis itself was searched and is no way to more of it."""
    cause = finding.bounded_by
    if cause is None or cause.by_gate:
        return []
    return [wording(lever) for lever in cause.levers if lever.effect == "helps" and lever.name != finding.axis.name]
