"""Whether an engine went on after a line that reports a failure.

A process that prints a later milestone of its own went on. A line of the whole engine (the size of its KV cache, the
end of its start) needs every rank to have come that far, whoever prints it. What other processes print proves nothing:
ranks do not wait for each other's death, and lines without a process may be anybody's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from pytest_kvbudget.ledger.grammar.model import Row, Tier
from pytest_kvbudget.ledger.seen import Seen
from pytest_kvbudget.verdict import Phase

NOBODY: Final = (None, None)
"""The process of lines that name none."""

RECENT_LINES: Final = 2000
"""Lines that the ranks' tracebacks may fill between an allocation that failed and the word that the engine is dead."""

_FINAL: Final = frozenset(
    {"startup_free", "kv_budget_nonpositive", "kv_check_short", "min_kv_budget", "plan_refused", "parallelism_refused"}
)
"""Classes of checks that raise: nothing goes on after them but another boot."""
_DEATHS: Final = frozenset({"engine_killed", "host_oom_killed"})
_REPLICA: Final = re.compile(r"_DP(\d+)")


def is_final(seen: Seen) -> bool:
    """Whether nothing of the same boot goes on after the failure."""
    return seen.failure.failure_class in _FINAL or seen.failure.tier is Tier.WRAPPER


def replica_of(name: str | None) -> str | None:
    """The data-parallel replica that a process belongs to, ``None`` where its name does not say."""
    match = _REPLICA.search(name or "")
    return None if match is None else match[1]


def outlived(
    seen: Seen, row: Row, process: tuple[str | None, int | None], order: dict[Phase, int], *, alone: bool
) -> bool:
    """Whether a milestone shows that the engine went on after the failure.

    Args:
        seen: the failure.
        row: the milestone's row.
        process: who printed the milestone.
        order: position of every phase in a boot of this family.
        alone: no line names a rank, so those that name no process come from one.
    """
    assert row.phase is not None, "only rows with a phase are milestones"
    reached = row.then or row.phase
    if is_final(seen) or not order[reached] > order[seen.phase] > 0:
        return False
    if row.scope == "engine" and _same_replica(seen.process[0], process[0]):
        return True
    if process != NOBODY and process == seen.process:
        return True
    if seen.process != NOBODY or seen.failure.failure_class in _DEATHS:
        return False
    # a traceback of nobody's that the grammar does not know is mostly a library's that somebody caught
    return seen.row is None or (alone and process == NOBODY)


def _same_replica(one: str | None, other: str | None) -> bool:
    """Not of two data-parallel replicas, each of which is an engine of its own."""
    first, second = replica_of(one), replica_of(other)
    return first is None or second is None or first == second


def reopened(failures: Iterable[Seen], line: int, *, served: bool) -> None:
    """The engine is said to be dead at ``line``: what seemed outlived by little may have been its death after all.

    Before it served, an exception of nobody's beside which other processes went on; afterwards, an allocation that
    failed shortly before, since a server still answers while its engine dies.
    """
    for seen in failures:
        if not seen.survived or seen.failure.soft:
            continue
        if served:
            recent = seen.served and line - seen.evidence.line <= RECENT_LINES
            if recent and seen.failure.tier <= Tier.KILLED:
                seen.survived = False
        elif seen.process == NOBODY and seen.row is None:
            seen.survived = False
