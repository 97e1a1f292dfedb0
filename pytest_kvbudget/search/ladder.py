"""A ladder: which rung to boot next, what to do with its verdict, and what the boots so far prove."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from pytest_kvbudget.search import noise as noise_model
from pytest_kvbudget.search import sentences
from pytest_kvbudget.search.bracket import Bracket, bracket_of, counts, rung_of
from pytest_kvbudget.search.lever import BEYOND, got_further, more_room_above, not_the_lever, wants_more
from pytest_kvbudget.search.log import REPEATS, Ask, BootLog
from pytest_kvbudget.search.model import Axis, BatchStrategy, Finding
from pytest_kvbudget.search.proof import ENOUGH_FAILURES, ENOUGH_PASSES, Rules, other_set
from pytest_kvbudget.search.rungs import COUNTED, Rung, RungState, clash, flaky, refused_rung, short_clash, steady_rung
from pytest_kvbudget.search.sets import Words, bounds
from pytest_kvbudget.search.sets import notes as sets_notes
from pytest_kvbudget.verdict import FindingKind, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_kvbudget.search.log import Why
    from pytest_kvbudget.search.model import SetBound, Strategy, Trial
    from pytest_kvbudget.search.noise import Noise

__all__ = ["Ask", "Ladder"]

MOST_PAIRS: Final = 2
"""Boots of a proof's failing half on the winner's devices: a set that cannot be had twice will not be had."""
_OF_THE_SAME_SET: Final = REPEATS | {"confirm"}
_NOTHING: Final = frozenset({FindingKind.EMPTY, FindingKind.EMPTY_WINDOW})
ENOUGH_TOLD: Final = 2
"""Boots of a value that must agree before a failure for want of more is said to contradict a pass."""
MOST_FLAKY_REPEATS: Final = 12
"""Boots that may go into the two ends of a flaky band."""


class Ladder:
    """Asks for boots until the boundary is proven or cannot be.

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
        noise: Noise | None = None,
        cold_extra_bytes: float | None = 0,
        verify: Literal["neighbours"] | None = None,
        two_sided: bool = True,
        known: Sequence[Trial] = (),
        spent: int = 0,
        before: Sequence[Trial] = (),
        home: str | None = None,
        words: Words | None = None,
    ) -> None:
        """A ladder that has not booted anything yet.

        Args:
            axis: the rungs.
            strategy: chooses among them.
            confirm: further boots of the winner after the proof.
            reference: value that is booted first and must pass: where a scaled pool's bytes were measured.
            max_boots: stop after this many boots, confirmations included.
            noise: what the same boot may differ by; ``None`` takes one boot for exact and a contradiction for final.
            cold_extra_bytes: what a first boot takes beyond a warm one, ``None`` where unknown: a cold failure that is
                short of no more is booted again warm.
            verify: ``"neighbours"`` boots the rungs beside the proof too: real ladders failed between two that passed.
            two_sided: what fails for want of a larger value (`wants_more`) lies below what passes. A sweep tells so
                itself, by the sides of its knob.
            known: finished boots of an earlier run that stand for boots of this one.
            spent: boots that another grid took out of ``max_boots``.
            before: boots that were made on another grid; they only tell device sets apart.
            home: the device set whose boots alone count, where sets were seen to differ before.
            words: how it speaks of values and failures; default: the axis' own way.

        Raises:
            ValueError: for a negative ``confirm`` or a ``max_boots`` below 1.
        """
        if confirm < 0:
            raise ValueError(f"confirm is {confirm}; expected 0 or more boots")
        if max_boots is not None and max_boots < 1:
            raise ValueError(f"max_boots is {max_boots}; expected 1 or more boots, or None for no limit")
        self.strategy = strategy
        self._base = axis
        self._confirm = confirm
        self._reference = reference
        self._max_boots, self._spent = max_boots, spent
        self._noise = noise
        self._cold_extra_bytes = cold_extra_bytes
        self._verify = verify
        self._two_sided = two_sided
        self._before = tuple(before)
        self.words = words or Words(axis.name, axis.show)
        self._halted: str | None = None
        self._rounds = 0
        self._log = BootLog(self.words.where, home)
        for trial in known:
            self._know(trial)

    @property
    def axis(self) -> Axis:
        """The rungs, with the quantum that device and noise can tell apart."""
        quantum = self._quantum()[0]
        fine = None if quantum == self._base.quantum else self._base.quantum
        return msgspec.structs.replace(self._base, quantum=quantum, fine=fine)

    def next(self) -> Ask | None:
        """The boot that is wanted now, the same until its trial is told; ``None`` when the ladder is at its end.

        Raises:
            ValueError: the strategy chose a rung that is none or was booted before.
        """
        return next(iter(self.next_batch(1)), None)

    def next_batch(self, count: int) -> tuple[Ask, ...]:
        """The boots that are wanted now with ``count`` free device sets, those not yet told of first.

        Only a search uses several sets: a proof's repetitions are asked for one by one, and everything is once sets
        were seen to differ.

        Raises:
            ValueError: see `next`.
        """
        pending = self._log.pending
        count = count if self._log.home is None else min(count, 1)
        before = len(pending)
        while len(pending) < count and self._stopped() is None and self.limit is None:
            room = count - len(pending)
            wanted = self._wanted(room if self._left is None else min(room, self._left))
            if not wanted:
                break
            pending += wanted
        self._rounds += len(pending) > before
        return tuple(pending)

    def is_rung(self, value: int) -> bool:
        """It is a rung as the axis was given."""
        return rung_of(self._base, value) is not None

    def moot(self) -> tuple[int, ...]:
        """Rungs under way that the verdicts so far have answered: calling their boots off (`drop`) loses nothing.

        Only boots of the search: a proof's repetitions are wanted for what they are. All of them where the search is
        over.
        """
        if self._stopped() is not None:
            return tuple(ask.value for ask in self._log.pending)
        passed, failed = self.ends
        lowest, highest = -math.inf if passed is None else passed, math.inf if failed is None else failed
        pending = ((ask.value, ask.why) for ask in self._log.pending)
        return tuple(value for value, why in pending if why == "search" and not lowest < value < highest)

    def drop(self, value: int) -> None:
        """A boot under way was called off: it has no verdict and counts nowhere.

        Raises:
            ValueError: no boot of this value is under way.
        """
        self._log.drop(value)

    def halt(self, reason: str) -> None:
        """Want no further boot: something outside the search ends it. What is proven by then stays proven."""
        self._halted = reason
        self._log.pending.clear()

    def know(self, trial: Trial) -> None:
        """Take a boot that nobody asked for, before the first one is asked for: it was made for another question.

        Raises:
            ValueError: a boot was asked for already, or it has no verdict.
        """
        if self._log.pending or len(self._log.told) > self._log.known or trial.verdict not in COUNTED:
            raise ValueError(f"{self._log.where(trial.value)} with {trial.verdict} cannot be known beforehand")
        self._know(trial)

    def _know(self, trial: Trial) -> None:
        ask = Ask(value=trial.value, index=rung_of(self._base, trial.value), attempt=1, why="known")
        self._take(trial, lambda seen: self._log.know(ask, seen))

    def tell(self, trial: Trial) -> None:
        """Take the outcome of a boot that was asked for.

        Raises:
            ValueError: it was not asked for, or says ``pool_short`` with another verdict than UNKNOWN.
        """
        self._take(trial, self._log.tell)

    def _take(self, trial: Trial, tell: Callable[[Trial], None]) -> None:
        """Tell of a trial as the search sees it."""
        low = self._two_sided and trial.verdict is Verdict.FAIL and wants_more(trial.cause, self._base.name)
        tell(as_short(trial) if low else trial)

    @property
    def history(self) -> tuple[Trial, ...]:
        """The trial that speaks for each rung, in the order of their first boots: no UNKNOWN, no ERROR."""
        return self._log.history(exact=self._exact)

    def finding(self) -> Finding:
        """What the boots so far prove; ``undecided`` with the bracket while that is incomplete."""
        axis, noise, log = self.axis, self._rules().noise, self._log
        rungs, bracket = self._rungs(), bracket_of(axis, self.history)
        kind, reason = self.outcome()
        low, (passed, failed_at) = self._low(), self.ends
        confirmed = [trial for ask, trial in log.told if ask.why == "confirm"]
        value = passed if low is None else None
        cause = None if failed_at is None else rungs[failed_at].trial.cause
        if low is not None and failed_at is None:
            failed_at, cause = low.value, low.cause
        is_flaky = kind is FindingKind.FLAKY
        deploy = noise_model.deploy_value(value, self._trials(), noise)
        steady = [rung.value for rung in rungs.values() if len(rung.passes) >= ENOUGH_PASSES and not rung.failures]
        refused = [rung.value for rung in rungs.values() if len(rung.failures) >= ENOUGH_FAILURES and not rung.passes]
        finding = Finding(
            kind=kind,
            axis=axis,
            value=value,
            failed_at=failed_at,
            bounded_by=cause,
            boots=log.boots - log.count("confirm", "verify"),
            retries=log.count("retry", "rate"),
            confirmations=log.count("confirm"),
            repeats=log.count(*REPEATS),
            neighbours=log.count("verify"),
            reused=log.reused,
            sigma_bytes=None if noise is None else noise.sigma_bytes,
            sigma_source=None if noise is None else noise.source,
            deploy_value=deploy if deploy is not None and deploy >= self._base.floor else None,
            steady_value=max(steady, default=None) if is_flaky else None,
            refused_at=min(refused, default=None) if is_flaky else None,
            lever=sentences.other_lever(low.cause if low else cause, axis.name) if kind in _NOTHING else None,
            sets=self._sets(),
            notes=self._notes(kind, bracket, rungs),
            sentence="",
        )
        sentence = sentences.of(finding, reason, confirmed=sum(trial.served for trial in confirmed))
        return msgspec.structs.replace(finding, sentence=sentence)

    def outcome(self) -> tuple[FindingKind, str]:
        """The finding's kind, and in words why it is no proof."""
        return self._stopped() or self._standing(bracket_of(self.axis, self.history))

    @property
    def ends(self) -> tuple[int | None, int | None]:
        """The largest value that passed, or failed for want of more, and the smallest above it that failed."""
        axis = self.axis
        known = [trial for trial in self.history if counts(axis, trial.value)]
        passed = max((trial.value for trial in known if trial.passed), default=None)
        above = (trial.value for trial in known if not trial.passed and (passed is None or trial.value > passed))
        return passed, min(above, default=None)

    def _low(self) -> Trial | None:
        """What stands at the bracket's lower end, where that is no pass but a failure for want of more."""
        passed, _ = self.ends
        return None if passed is None else self._rungs()[passed].short

    def _sets(self) -> tuple[SetBound, ...]:
        """What was booted on each kind of device set, first on those for which the finding holds."""
        rungs, (passed, failed_at) = self._rungs(), self.ends
        halves = [rungs[value].sets for value in (passed, failed_at) if value is not None]
        shared = frozenset.intersection(*halves) if halves else frozenset()
        first = self._log.home or min((name for name in shared or frozenset().union(*halves) if name), default=None)
        return bounds((*self._before, *(trial for _, trial in self._log.told)), first)

    # -- what is known

    @property
    def home(self) -> str | None:
        """Device set whose boots alone count, from when sets were seen to differ."""
        return self._log.home

    @property
    def _exact(self) -> bool:
        return self._noise is None

    @property
    def _left(self) -> int | None:
        """Boots that may still be asked for; ``None`` without a limit."""
        used = self._spent + self._log.boots + len(self._log.pending)
        return None if self._max_boots is None else self._max_boots - used

    @property
    def limit(self) -> str | None:
        """Why no further boot is made, whatever it would prove; ``None`` where one may be."""
        if self._halted is not None:
            return self._halted
        if self._left is None or self._left > 0:
            return None
        return f"the limit of {self._max_boots} boots is reached"

    def _trials(self) -> list[Trial]:
        return self._log.trials(exact=self._exact)

    def _rungs(self) -> dict[int, Rung]:
        return self._log.rungs(exact=self._exact)

    def _rules(self) -> Rules:
        noise = None if self._noise is None else self._noise.measured(self._trials())
        return Rules(noise=noise, cold_extra_bytes=self._cold_extra_bytes)

    def _quantum(self) -> tuple[int, tuple[str, ...]]:
        return noise_model.effective_quantum(self._base, self._trials(), self._rules().noise)

    def _notes(self, kind: FindingKind, bracket: Bracket, rungs: dict[int, Rung]) -> tuple[str, ...]:
        axis, notes = self.axis, list(self._quantum()[1])
        if (
            kind is FindingKind.PROVEN
            and bracket.high < len(axis) - 1
            and (failed_at := self.ends[1]) is not None
            and max(self._log.values()) <= failed_at
        ):
            notes.append(f"rungs above {axis.show(failed_at)} were not booted")
        notes += [
            f"{self.words.where(rung.value)} failed on a first, cold boot and passed with a warm cache"
            for rung in rungs.values()
            if rung.state is RungState.GOOD and len(rung.counted) < len(rung.trials)
        ]
        if kind is FindingKind.EMPTY:
            notes += sentences.refused_by_gate(self.axis, rungs.values(), self.ends[1])
        winner = rungs.get(self.ends[0] or 0)
        if winner is not None and winner.trial.verdict is Verdict.MARGINAL:
            notes.append(
                f"{self.words.where(winner.value)} is MARGINAL: it lived with less memory free than was asked for"
            )
        passed, failed_at = self.ends
        value = None if self._low() is not None else passed
        return (*notes, *sets_notes(self._sets(), value, failed_at if failed_at is not None else passed, self.words))

    # -- what is wanted

    def _wanted(self, count: int) -> list[Ask]:
        unanswered = self._log.unanswered()
        if unanswered is not None:
            ask, again = unanswered
            return [self._ask(ask.value, again, ask.device_set)]
        if self._reference is not None and not self.history:
            return [] if self._log.pending else [self._ask(self._reference, "reference")]
        gap = self._gap()
        if gap is not None:
            return [] if self._log.pending else [gap]
        bracket = bracket_of(self.axis, self.history)
        if not bracket.closed:
            return self._search(bracket, count)
        confirmed = sum(ask.why == "confirm" and trial.served for ask, trial in self._log.told)
        winner = None if self._low() is not None else self.ends[0]
        if winner is None or confirmed >= self._confirm or self._log.pending:
            return []
        return [self._ask(winner, "confirm")]

    def _gap(self) -> Ask | None:
        """The boot that a contradiction, a flaky band or a closed bracket wants before anything else."""
        rungs, axis = self._rungs(), self.axis
        if self._flips() is not None:
            return self._flaky_end()
        pair, low = clash(self._against(rungs)), self._short_clash()
        again = [] if pair is None else [rung for rung in pair if not rung.repeated]
        again += [] if low is None else [rung for rung in low if len(rung.counted) < ENOUGH_TOLD]
        if pair is not None or low is not None:
            return self._ask(again[0].value, "repeat") if again else None
        bracket = bracket_of(axis, self.history)
        doubted = [rung.value for rung in self._doubted(rungs) if rung.value > (self.ends[0] or 0)]
        if doubted:
            # any of them may be the boundary: halve them, as rungs that were not booted
            return self._ask(sorted(doubted)[len(doubted) // 2], "warm")
        if not bracket.closed:
            return None
        winner, failed = (None if value is None else rungs[value] for value in self.ends)
        return self._proof_gap(winner, failed) or self._neighbour(bracket)

    def _doubted(self, rungs: dict[int, Rung]) -> list[Rung]:
        """Cold failures that prove nothing, once one of their kind passed with a warm cache, below those that do."""
        if not any(rung.state is RungState.GOOD and len(rung.counted) < len(rung.trials) for rung in rungs.values()):
            return []
        rules = self._rules()
        failed = [rung for rung in rungs.values() if rung.state is not RungState.GOOD]
        settled = min((rung.value for rung in failed if rules.failure_settled(rung)), default=math.inf)
        return [rung for rung in failed if rung.value < settled and not rules.failure_settled(rung)]

    def _against(self, rungs: dict[int, Rung]) -> list[Rung]:
        """The rungs that can contradict each other: not those that failed only because they were cold, maybe."""
        doubted = {rung.value for rung in self._doubted(rungs)}
        return [rung for rung in rungs.values() if rung.value not in doubted]

    def _proof_gap(self, winner: Rung | None, failed: Rung | None) -> Ask | None:
        rules = self._rules()
        if failed is not None and not rules.failure_settled(failed):
            return self._ask(failed.value, "warm")
        if winner is None:
            # where the axis moves nothing, the other rungs have said what the floor says
            settled = (
                failed is None or rules.floor_settled(failed) or not_the_lever(self.axis, self.history, level=True)
            )
            return self._most_room() if settled or failed is None else self._ask(failed.value, "repeat")
        if not rules.winner_settled(winner, failed):
            return self._ask(winner.value, "repeat")
        there = None if failed is None else other_set(winner, failed)
        if failed is None or there is None or self._log.asked("pair", failed.value) >= MOST_PAIRS:
            return None
        return self._ask(failed.value, "pair", there)

    def _most_room(self) -> Ask | None:
        """The ceiling, where the floor failed and larger values seem to have more room."""
        ceiling = self.axis.ceiling
        if not self._two_sided or ceiling in self._log.values() or not more_room_above(self.history):
            return None
        return self._ask(ceiling, "verify")

    def _neighbour(self, bracket: Bracket) -> Ask | None:
        if self._verify is None or bracket.low < 0 or self._low() is not None:
            return None
        axis, booted = self.axis, self._log.values()
        beside = [axis.value(index) for index in (bracket.low - 1, bracket.high + 1) if 0 <= index < len(axis)]
        return next((self._ask(value, "verify") for value in beside if value not in booted), None)

    def _flips(self) -> str | None:
        """Why the boundary is flaky, ``None`` where it is not or boots are taken for exact."""
        if self._noise is None:
            return None
        rungs = self._rungs().values()
        pair = clash(self._against(self._rungs()))
        if pair is not None and pair[0].state is RungState.MIXED:
            low, high = pair
            return f"{self.words.where(low.value)} passed and failed, and {self.words.show(high.value)} passed"
        return flaky(rungs, self.axis.quantum)

    def _flaky_end(self) -> Ask | None:
        """The boot that tells more about where a band of mixed rungs ends."""
        rungs = list(self._rungs().values())
        if self._log.asked("repeat") >= MOST_FLAKY_REPEATS:
            return None
        below, above = steady_rung(self.axis, rungs), refused_rung(self.axis, rungs)
        if below is not None and below[1] < ENOUGH_PASSES:
            return self._ask(below[0], "repeat")
        if above is not None and above[1] < ENOUGH_FAILURES:
            return self._ask(above[0], "repeat")
        return None

    def _search(self, bracket: Bracket, count: int) -> list[Ask]:
        axis, strategy = self.axis, self.strategy
        untried = bracket.high == len(axis) and axis.ceiling not in self._log.values()
        if self._two_sided and untried and self._low() is not None:
            # nothing failed for too much yet: whether anything can pass is up to the end of the axis
            return [self._ask(axis.ceiling, "search")]
        pending = tuple(index for ask in self._log.pending if (index := rung_of(axis, ask.value)) is not None)
        indices: tuple[int | None, ...]
        if count + len(pending) > 1 and isinstance(strategy, BatchStrategy):
            indices = strategy.next_indices(axis, self.history, pending, count, self._rounds)
            if not indices and pending:
                return []
        elif pending:
            return []  # a strategy for one device set waits for its boot
        else:
            indices = (strategy.next_index(axis, self.history),)
        booted = self._log.values()
        for index in indices or (None,):
            if index is None or not 0 <= index < len(axis) or axis.value(index) in booted:
                raise ValueError(
                    f"strategy {strategy.name} chose rung {index} of {len(axis)} with {bracket} open; "
                    "expected a rung that was not booted yet"
                )
        return [self._ask(axis.value(index), "search") for index in indices if index is not None]

    def _ask(self, value: int, why: Why, device_set: str | None = None) -> Ask:
        attempt = 1 + self._log.attempts(value)
        there = device_set or self._log.home or (self._set_of(value) if why in _OF_THE_SAME_SET else None)
        return Ask(value=value, index=rung_of(self.axis, value), attempt=attempt, why=why, device_set=there)

    def _set_of(self, value: int) -> str | None:
        """The device set that a rung was booted on: another boot of it says as much only on one like it."""
        rung = self._log.rungs(exact=False).get(value)
        return None if rung is None else min((name for name in rung.sets if name is not None), default=None)

    # -- how it ends

    def _standing(self, bracket: Bracket) -> tuple[FindingKind, str]:
        """The kind of a search that nothing stopped, and why it is incomplete."""
        if not bracket.closed or self._gap() is not None:
            return FindingKind.UNDECIDED, self.limit or "not all boots are done"
        if bracket.low < 0:
            between = self._between_two_failures()
            return (FindingKind.EMPTY, "") if between is None else (FindingKind.UNDECIDED, between)
        low, rungs = self._low(), self._rungs()
        if low is not None and bracket.high == len(self.axis):
            return FindingKind.EMPTY, ""
        passed, failed = (None if value is None else rungs[value] for value in self.ends)
        if passed is not None and failed is not None and other_set(passed, failed) is not None:
            return FindingKind.UNDECIDED, "its two halves were booted on device sets that differ, and again so"
        if low is not None:
            return FindingKind.EMPTY_WINDOW, sentences.too_low(self.axis, low)
        return (FindingKind.PROVEN if bracket.high < len(self.axis) else FindingKind.CEILING_REACHED), ""

    def _between_two_failures(self) -> str | None:
        """Why something may pass although both ends failed; ``None`` where nothing says so.

        A value above the floor got further than a smaller one, and the ceiling fails for something else.
        """
        causes = [
            self._rungs()[end].trial.cause for end in (self.axis.floor, self.axis.ceiling) if end in self._rungs()
        ]
        if len(causes) < 2 or not got_further(self.history):
            return None
        floor, ceiling = causes
        if floor is None or ceiling is None or ceiling.by_gate or ceiling.failure_class == floor.failure_class:
            return None
        return (
            "a larger value got further than the floor, and the ceiling failed for another reason "
            f"({ceiling.failure_class}): what lies between was not decided"
        )

    def _stopped(self) -> tuple[FindingKind, str] | None:
        """The kind and reason of an outcome that ends the search at once."""
        error = self._log.error()
        if error is not None:
            return FindingKind.ERROR, error
        below = self._short_above_a_pass()
        if below is not None:
            return below
        undecided, flips = self._log.undecided(exact=self._exact), self._flips()
        if self._log.strays >= MOST_PAIRS:
            return FindingKind.UNDECIDED, f"device sets differ, and no further boot on {self._log.home} was to be had"
        if flips is not None and (undecided is not None or self._flaky_end() is None):
            return FindingKind.FLAKY, flips
        pair = None if flips is not None else clash(self._against(self._rungs()))
        if pair is not None and (self._exact or all(rung.repeated for rung in pair)):
            low, high = pair
            again = "" if self._exact else ", each of them twice"
            return (
                FindingKind.NON_MONOTONE,
                f"{self.words.where(low.value)} failed although {self.words.show(high.value)} passed{again}",
            )
        return None if undecided is None else (FindingKind.UNDECIDED, undecided)

    def _short_clash(self) -> tuple[Rung, Rung] | None:
        """What failed for want of more and what passed below it; confirmations count, they may be what turned."""
        return short_clash(self._log.rungs(exact=False).values())

    def _short_above_a_pass(self) -> tuple[FindingKind, str] | None:
        """A larger value would have cured a failure, and a smaller one passed: settled, or ``None``."""
        pair = self._short_clash()
        if pair is None:
            return None
        high, low = pair
        said = f"{self.words.where(high.value)} {self.words.short} although {self.words.show(low.value)} passed"
        if any(len(set(rung.endings)) > 1 for rung in pair):
            return FindingKind.FLAKY, f"{said}, and one of them did not when it was booted again"
        if self._exact:
            return FindingKind.NON_MONOTONE, said
        if any(len(rung.counted) < ENOUGH_TOLD for rung in pair):
            return None
        return FindingKind.NON_MONOTONE, f"{said}, each of them twice"


def as_short(trial: Trial) -> Trial:
    """A boot that failed for want of more, as the search sees it."""
    return msgspec.structs.replace(trial, verdict=Verdict.PASS, hint=BEYOND, short=True)
