"""What is attached to test items: the rung that an item is about, and the engine that it uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pytest

from pytest_kvbudget.attempt import Attempt
from pytest_kvbudget.booting import Booting
from pytest_kvbudget.exercise import Exercise
from pytest_kvbudget.plugin import BOOT_FIXTURE, SEARCHES
from pytest_kvbudget.question import Question, RungPlan
from pytest_kvbudget.records import AttemptRecord, as_used
from pytest_kvbudget.verdict import Verdict

COUNTS_AS_PASSED: Final = frozenset({Verdict.PASS, Verdict.MARGINAL})


@dataclass(frozen=True)
class RungContext:
    """What a rung's item knows of its ladder or sweep."""

    question: Question
    plan: RungPlan
    booting: Booting | None = None
    """Its boot, where it began before the item did."""


@dataclass(frozen=True)
class Use:
    """The engine that one test item uses."""

    attempt: Attempt
    exercise: Exercise
    """What the test asks of it, with the record of its own."""
    boot_failed: bool
    """The boot itself was no success: its verdict stands, whatever the test says."""
    failure: str | None
    """Why the test cannot have this engine, for people."""

    @property
    def verdict(self) -> Verdict:
        """Of the engine and of all that this test asked of it so far."""
        return self.exercise.record.verdict

    @property
    def record(self) -> AttemptRecord:
        """The boot as this test saw it, with the test's verdict."""
        return as_used(self.attempt.record, self.exercise.record)


RUNG: Final = pytest.StashKey[RungContext]()
USE: Final = pytest.StashKey[Use]()


def must_be_recorded(item: pytest.Item, use: Use) -> None:
    """A verdict that nobody can read afterwards is none. Of a rung its ladder says so: it is no refusal by its body."""
    if use.attempt.lost is not None and RUNG not in item.stash:
        pytest.fail(f"kvbudget: {use.attempt.lost}", pytrace=False)


def searches(item: pytest.Item) -> bool:
    """Whether an item is a ladder or sweep of ours, as collected; its rungs' items are not."""
    return (
        BOOT_FIXTURE in getattr(item, "fixturenames", ())
        and any(item.get_closest_marker(name) is not None for name in SEARCHES)
        and RUNG not in item.stash
    )
