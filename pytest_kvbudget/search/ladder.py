"""A ladder: which rung to boot next, what to do with its verdict, and what the boots so far prove."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from pytest_kvbudget.search import sentences
from pytest_kvbudget.search.bracket import Bracket, bracket_of, contradiction, rung_of
from pytest_kvbudget.search.model import Axis, Finding, Trial
from pytest_kvbudget.verdict import FindingKind, Verdict

if TYPE_CHECKING:
    from pytest_kvbudget.ledger.model import Cause
    from pytest_kvbudget.search.model import Strategy

Why = Literal["search", "retry", "reference", "rate", "confirm"]


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One boot that the ladder wants."""

    value: int
    """What to set the axis' field to."""
    index: int | None
    """The rung's index; ``None`` for a reference that is no rung of the axis."""
    attempt: int
    """Which boot of this value it is, from 1."""
    why: Why
    """``retry`` repeats an UNKNOWN, ``rate`` a pool that was short, with the rate measured there."""


class Ladder:
    """Asks for boots one at a time until the boundary is proven or cannot be.

    Only PASS, MARGINAL and FAIL move the search. An UNKNOWN is asked once more, an ERROR ends it.
    """

    def __init__(
        self,
        axis: Axis,
        strategy: Strategy,
        *,
        confirm: int = 0,
        reference: int | None = None,
        max_boots: int | None = None,
    ) -> None:
        """A ladder that has not booted anything yet.

        Args:
            axis: the rungs.
            strategy: chooses among them.
            confirm: further boots of the winner after the proof.
            reference: value that is booted first and must pass: where a scaled pool's bytes were measured.
            max_boots: stop after this many boots, confirmations included.

        Raises:
            ValueError: for a negative ``confirm`` or a ``max_boots`` below 1.
        """
        if confirm < 0:
            raise ValueError(f"confirm is {confirm}; expected 0 or more boots")
        if max_boots is not None and max_boots < 1:
            raise ValueError(f"max_boots is {max_boots}; expected 1 or more boots, or None for no limit")
        self.axis = axis
        self.strategy = strategy
        self._confirm = confirm
        self._reference = reference
        self._max_boots = max_boots
        self._told: list[tuple[Ask, Trial]] = []
        self._pending: Ask | None = None

    def next(self) -> Ask | None:
        """The boot that is wanted now, the same until its trial is told; ``None`` when the ladder is at its end.

        Raises:
            ValueError: the strategy chose a rung that is none or was booted before.
        """
        if self._pending is None and self._stopped() is None and not self._at_limit:
            self._pending = self._wanted()
        return self._pending

    def tell(self, trial: Trial) -> None:
        """Take the outcome of the boot that `next` asked for.

        Raises:
            ValueError: it was not asked for, or says ``pool_short`` with another verdict than UNKNOWN.
        """
        if self._pending is None or trial.value != self._pending.value:
            wanted = "no boot" if self._pending is None else f"{self.axis.name} {self._pending.value:,}"
            raise ValueError(f"told of a trial at {self.axis.name} {trial.value:,}; next() asked for {wanted}")
        if trial.pool_short and trial.verdict is not Verdict.UNKNOWN:
            raise ValueError(
                f"a short pool came with {trial.verdict}; expected UNKNOWN: it says nothing about the rung"
            )
        self._told.append((self._pending, trial))
        self._pending = None

    @property
    def history(self) -> tuple[Trial, ...]:
        """The trials that count for the search, in boot order: no UNKNOWN, no ERROR, no confirmation."""
        counted = {Verdict.PASS, Verdict.MARGINAL, Verdict.FAIL}
        return tuple(trial for ask, trial in self._told if ask.why != "confirm" and trial.verdict in counted)

    def finding(self) -> Finding:
        """What the boots so far prove; ``undecided`` with the bracket while that is incomplete."""
        bracket = bracket_of(self.axis, self.history)
        kind, reason = self._stopped() or self._standing(bracket)
        confirmations = [trial for ask, trial in self._told if ask.why == "confirm"]
        finding = Finding(
            kind=kind,
            axis=self.axis,
            value=self.axis.value(bracket.low) if bracket.low >= 0 else None,
            failed_at=self.axis.value(bracket.high) if bracket.high < len(self.axis) else None,
            bounded_by=self._cause_at(bracket.high),
            boots=len(self._told) - len(confirmations),
            retries=sum(ask.why in {"retry", "rate"} for ask, _ in self._told),
            confirmations=len(confirmations),
            sentence="",
        )
        sentence = sentences.of(finding, reason, confirmed=sum(trial.passed for trial in confirmations))
        return msgspec.structs.replace(finding, sentence=sentence)

    @property
    def _at_limit(self) -> bool:
        return self._max_boots is not None and len(self._told) >= self._max_boots

    def _wanted(self) -> Ask | None:
        if self._told and self._told[-1][1].verdict is Verdict.UNKNOWN:
            ask, trial = self._told[-1]
            again: Why = "rate" if trial.pool_short else "retry"
            return self._ask(ask.value, "confirm" if ask.why == "confirm" else again)
        if self._reference is not None and not self.history:
            return self._ask(self._reference, "reference")
        bracket = bracket_of(self.axis, self.history)
        if bracket.closed:
            confirmed = sum(ask.why == "confirm" and trial.passed for ask, trial in self._told)
            wanted = bracket.low >= 0 and confirmed < self._confirm
            return self._ask(self.axis.value(bracket.low), "confirm") if wanted else None
        index = self.strategy.next_index(self.axis, self.history)
        if index is None or not 0 <= index < len(self.axis) or self._booted(self.axis.value(index)):
            raise ValueError(
                f"strategy {self.strategy.name} chose rung {index} of {len(self.axis)} with {bracket} open; "
                "expected a rung that was not booted yet"
            )
        return self._ask(self.axis.value(index), "search")

    def _ask(self, value: int, why: Why) -> Ask:
        attempt = 1 + sum(ask.value == value for ask, _ in self._told)
        return Ask(value=value, index=rung_of(self.axis, value), attempt=attempt, why=why)

    def _booted(self, value: int) -> bool:
        return any(trial.value == value for trial in self.history)

    def _cause_at(self, index: int) -> Cause | None:
        if index >= len(self.axis):
            return None
        value = self.axis.value(index)
        return next(trial.cause for trial in self.history if trial.value == value and not trial.passed)

    def _standing(self, bracket: Bracket) -> tuple[FindingKind, str]:
        """The kind of a search that nothing stopped, and why it is incomplete."""
        if not bracket.closed:
            reason = f"the limit of {self._max_boots} boots is reached" if self._at_limit else "not all boots are done"
            return FindingKind.UNDECIDED, reason
        if bracket.low < 0:
            return FindingKind.EMPTY, ""
        return (FindingKind.PROVEN if bracket.high < len(self.axis) else FindingKind.CEILING_REACHED), ""

    def _stopped(self) -> tuple[FindingKind, str] | None:
        """The kind and reason of an outcome that ends the search at once."""
        if not self._told:
            return None
        ask, trial = self._told[-1]
        where = f"{self.axis.name} {trial.value:,}"
        because = "" if trial.cause is None else f": {trial.cause.sentence}"
        if trial.verdict is Verdict.ERROR:
            return FindingKind.ERROR, f"{where} ended for another reason than memory{because}"
        clash = contradiction(self.history)
        if clash is not None:
            low, high = clash
            return FindingKind.NON_MONOTONE, f"{self.axis.name} {low.value:,} failed although {high.value:,} passed"
        reason = self._undecided(ask, trial, where, because)
        return None if reason is None else (FindingKind.UNDECIDED, reason)

    def _undecided(self, ask: Ask, trial: Trial, where: str, because: str) -> str | None:
        if trial.verdict is Verdict.FAIL and trial.value == self._reference:
            return f"the reference rung {where} failed, so no pool can be scaled from it{because}"
        if trial.verdict is Verdict.FAIL and ask.why == "confirm":
            return f"{where} passed and then failed when it was booted again to confirm it{because}"
        if trial.verdict is not Verdict.UNKNOWN or not self._unknown_before(ask, trial):
            return None
        if trial.pool_short:
            return f"the scaled pool was too small twice at {where}"
        return f"{where} gave no verdict twice{because}"

    def _unknown_before(self, ask: Ask, trial: Trial) -> bool:
        """This rung already had its second boot for the same reason."""
        return any(
            other.verdict is Verdict.UNKNOWN
            and other.value == trial.value
            and other.pool_short == trial.pool_short
            and (earlier.why == "confirm") == (ask.why == "confirm")
            for earlier, other in self._told[:-1]
        )
