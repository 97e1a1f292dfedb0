"""What to turn and what not, in words: one wording for terminal and pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from pytest_kvbudget.archive import AnyFinding
from pytest_kvbudget.ledger.model import Cause, Effect, Lever
from pytest_kvbudget.report.searched import track_of
from pytest_kvbudget.search.knobs import HEADROOM_VARIABLE
from pytest_kvbudget.search.turn import VARIABLES

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


def with_why(lever: Lever) -> str:
    """`wording` with its reason, where there is one."""
    return f"{wording(lever)}: {lever.why}" if lever.why else wording(lever)


def arrow(lever: Lever) -> str:
    """The direction as one character."""
    return {"raise": "↑", "lower": "↓", "clean": "⌫", "none": "·"}[lever.direction]


def for_more(record: AnyFinding) -> list[str]:
    """What moves the boundary that a search found: what was searched itself is no way to more of it."""
    cause = record.finding.bounded_by
    if cause is None or cause.by_gate:
        return []
    own = _own_names(track_of(record).name)
    return [wording(lever) for lever in cause.levers if lever.effect == "helps" and lever.name not in own]


def _own_names(name: str) -> frozenset[str]:
    """What an axis or knob is called in levers; headroom and cap fraction are one lever of two modes."""
    variable = VARIABLES[name][0] if name in VARIABLES else name
    return _HEADROOM if name in _HEADROOM else frozenset((name, variable))


_HEADROOM: Final = frozenset(
    ("reserved_headroom", HEADROOM_VARIABLE, "kv_cap_fraction", VARIABLES["kv_cap_fraction"][0])
)
