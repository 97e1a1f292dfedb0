"""The boots of a search: what was asked for, what came of it, what is still under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from pytest_kvbudget.search.rungs import COUNTED, Rung, apart, rungs_of
from pytest_kvbudget.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_kvbudget.search.model import Trial

Why = Literal["search", "retry", "reference", "rate", "repeat", "warm", "pair", "verify", "confirm", "known"]
REPEATS: Final[frozenset[Why]] = frozenset({"repeat", "warm", "pair"})


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One boot that a search wants."""

    value: int
    """What to set the axis' field to."""
    index: int | None
    """The rung's index; ``None`` for a reference that is no rung of the axis."""
    attempt: int
    """Which boot of this value it is, from 1."""
    why: Why
    """``retry`` repeats an UNKNOWN, ``rate`` a pool that was short, with the rate measured there; ``repeat`` a verdict
    that noise could turn, ``warm`` a cold failure, ``pair`` a failure on the winner's devices; ``verify`` boots a
    value beside the proof, ``known`` was booted by an earlier run."""
    device_set: str | None = None
    """The only device set that will do; ``None`` for any."""


class BootLog:
    """Asks and their trials, in the order in which they were told."""

    def __init__(self, where: Callable[[int], str], home: str | None = None) -> None:
        self.where = where
        """A rung for people: ``max_model_len 245,760``."""
        self.told: list[tuple[Ask, Trial]] = []
        self.pending: list[Ask] = []
        self.home = home
        """Device set whose boots alone count, from when sets were seen to differ."""

    def tell(self, trial: Trial) -> None:
        """Take the outcome of a pending boot.

        Raises:
            ValueError: it was not asked for, or says ``pool_short`` with another verdict than UNKNOWN.
        """
        ask = next((ask for ask in self.pending if ask.value == trial.value), None)
        if ask is None:
            wanted = " and ".join(self.where(ask.value) for ask in self.pending) or "no boot"
            raise ValueError(f"told of a trial at {self.where(trial.value)}; next() asked for {wanted}")
        if trial.pool_short and trial.verdict is not Verdict.UNKNOWN:
            raise ValueError(
                f"a short pool came with {trial.verdict}; expected UNKNOWN: it says nothing about the rung"
            )
        self._keep(ask, trial)
        self.pending.remove(ask)

    @property
    def strays(self) -> int:
        """Boots that were asked for on the set that alone counts, and were made on another."""
        wanted = (trial for ask, trial in self.told if self.home is not None and ask.device_set == self.home)
        return sum(trial.verdict in COUNTED and not self._counts(trial) for trial in wanted)

    @property
    def known(self) -> int:
        """Boots that were there before the search."""
        return sum(ask.why == "known" for ask, _ in self.told)

    def know(self, ask: Ask, trial: Trial) -> None:
        """Take a boot that was there before the search."""
        self._keep(ask, trial)

    def _keep(self, ask: Ask, trial: Trial) -> None:
        self.told.append((ask, trial))
        self.home = self.home or apart(rungs_of(told for _, told in self.told).values())

    def _counts(self, trial: Trial) -> bool:
        return self.home is None or trial.device_set in {None, self.home}

    def drop(self, value: int) -> None:
        """Forget a pending boot.

        Raises:
            ValueError: it was not asked for.
        """
        ask = next((ask for ask in self.pending if ask.value == value), None)
        if ask is None:
            raise ValueError(f"no boot of {self.where(value)} is under way")
        self.pending.remove(ask)

    @property
    def boots(self) -> int:
        """Boots of this run."""
        return sum(ask.why != "known" and not trial.reused for ask, trial in self.told)

    @property
    def reused(self) -> int:
        """Boots that were not needed: earlier ones stand for them."""
        return len(self.told) - self.boots

    def count(self, *reasons: Why) -> int:
        """Boots of this run that were asked for any of these reasons."""
        return sum(ask.why in reasons and not trial.reused for ask, trial in self.told)

    def asked(self, why: Why, value: int | None = None) -> int:
        """How often boots were asked for this reason, whoever made them; ``value`` counts only those of one rung."""
        return sum(ask.why == why and value in {None, ask.value} for ask, _ in self.told)

    def attempts(self, value: int) -> int:
        """Boots of a value so far."""
        return sum(ask.value == value for ask, _ in self.told)

    def trials(self, *, exact: bool) -> list[Trial]:
        """Boots with a verdict. Where boots are exact a confirmation is no part of the search; else it is one more."""
        told = ((ask, trial) for ask, trial in self.told if trial.verdict in COUNTED and self._counts(trial))
        return [trial for ask, trial in told if not (exact and ask.why == "confirm")]

    def rungs(self, *, exact: bool) -> dict[int, Rung]:
        """The same by value, in the order of their first boots."""
        return rungs_of(self.trials(exact=exact))

    def history(self, *, exact: bool) -> tuple[Trial, ...]:
        """The trial that speaks for each rung; a mixed rung counts as bad."""
        return tuple(rung.trial for rung in self.rungs(exact=exact).values())

    def values(self) -> set[int]:
        """Every value that was booted, where it counts, or is being booted."""
        return {ask.value for ask, trial in self.told if self._counts(trial)} | {ask.value for ask in self.pending}

    def unanswered(self) -> tuple[Ask, Why] | None:
        """The first UNKNOWN that was not asked again, and why to ask again."""
        for position, (ask, trial) in enumerate(self.told):
            if trial.verdict is not Verdict.UNKNOWN or ask.why == "known":
                continue
            later = [other for other, _ in self.told[position + 1 :]] + self.pending
            if not any(other.value == ask.value for other in later):
                again: Why = "rate" if trial.pool_short else "retry"
                return ask, "confirm" if ask.why == "confirm" else again
        return None

    def error(self) -> str | None:
        """What ended for another reason than memory, in words."""
        failed = next((trial for _, trial in self.told if trial.verdict is Verdict.ERROR), None)
        if failed is None:
            return None
        return f"{self.where(failed.value)} ended for another reason than memory{_because(failed)}"

    def undecided(self, *, exact: bool) -> str | None:
        """Why no verdict is to be had, in words."""
        for position, (ask, trial) in enumerate(self.told):
            where, because = self.where(trial.value), _because(trial)
            if trial.verdict is Verdict.FAIL and self._reference(position):
                return f"the reference rung {where} failed, so no pool can be scaled from it{because}"
            if trial.verdict is Verdict.FAIL and ask.why == "confirm" and exact:
                return f"{where} passed and then failed when it was booted again to confirm it{because}"
            if trial.verdict is Verdict.UNKNOWN and self._unknown_before(position):
                if trial.pool_short:
                    return f"the scaled pool was too small twice at {where}"
                return f"{where} gave no verdict twice{because}"
        return None

    def _reference(self, position: int) -> bool:
        """It was booted as the reference, or is the repetition of that boot."""
        value = self.told[position][0].value
        return any(ask.why == "reference" and ask.value == value for ask, _ in self.told[: position + 1])

    def _unknown_before(self, position: int) -> bool:
        """This rung already had its second boot for the same reason."""
        ask, trial = self.told[position]
        return any(
            other.verdict is Verdict.UNKNOWN
            and other.value == trial.value
            and other.pool_short == trial.pool_short
            and (earlier.why == "confirm") == (ask.why == "confirm")
            for earlier, other in self.told[:position]
        )


def _because(trial: Trial) -> str:
    return "" if trial.cause is None else f": {trial.cause.sentence}"
