"""What one test asks of a ready engine: what it is sent to show what it can stand, and limits on memory after it."""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from pytest_kvbudget.config import Limits
from pytest_kvbudget.device.cgroup import room_of
from pytest_kvbudget.device.gates import MemoryGates
from pytest_kvbudget.device.trace import LAUNCH
from pytest_kvbudget.engine.client import EngineClient
from pytest_kvbudget.engine.soak import Soak, SoakSpec
from pytest_kvbudget.engine.survival import SurvivalRun, SurvivalSpec
from pytest_kvbudget.judgement import Judgement, reason
from pytest_kvbudget.judging import (
    judge_boot_gate,
    judge_gates,
    judge_soak,
    judge_survival,
    survival_passed,
    together,
    with_client_evidence,
)
from pytest_kvbudget.ledger.model import BootLedger, Cause, MissingValueError
from pytest_kvbudget.memory import REQUEST, SOAK, AttemptMemory
from pytest_kvbudget.recording import Recording
from pytest_kvbudget.records import BootGateResult
from pytest_kvbudget.request import BootRequest
from pytest_kvbudget.verdict import Phase, Verdict

_SERVED: Final = frozenset({Verdict.PASS, Verdict.MARGINAL})


class Exercised(Protocol):
    """The engine as an exercise sees it."""

    @property
    def request(self) -> BootRequest:
        """What was booted."""

    @property
    def client(self) -> EngineClient:
        """Client of its HTTP interface."""

    @property
    def root_pid(self) -> int:
        """Process id of its first process."""

    @property
    def serving(self) -> bool:
        """It has not died as far as the keeper knows."""

    @property
    def answering(self) -> bool:
        """Its health endpoint says 200."""

    @property
    def url(self) -> str:
        """Its base address."""

    @property
    def closed(self) -> bool:
        """It was ended by us, or handed over: what it does now says nothing."""

    @property
    def ledger(self) -> BootLedger:
        """What it said about memory."""

    def died(self) -> bool:
        """It is dead, and that has become the boot's verdict."""

    def hint_again(self) -> None:
        """The least that was free while it was asked is known now."""


class Exercise:
    """One test's use of an engine. Each thing that it asks leaves what it saw, and its verdict, in the test's record.

    Tests that share an engine have one each: what one of them asked is neither judged nor forgotten for another.
    """

    def __init__(
        self,
        engine: Exercised,
        recording: Recording,
        memory: AttemptMemory,
        limits: Limits,
        *,
        test: str,
        min_free: int | None,
    ) -> None:
        """``min_free``: bytes that the backend wants free where neither test nor target say anything."""
        self._engine, self._recording, self._memory = engine, recording, memory
        self._limits, self._min_free = limits, min_free
        self.record = recording.begin_use(test)
        """What is known of this use."""
        self._asked = MemoryGates()
        """Of the last survival check; they hold for a soak after it too."""
        self._before: Judgement | None = None
        """What the boot and the body before the first check came to."""
        self._survival: tuple[Judgement, ...] = ()
        self._soak: tuple[Judgement, ...] = ()

    def capacity(self, windows: int, min_tokens: int | None) -> None:
        """Hold the engine's own count of its KV cache against what a ``boot_gate`` asks."""
        shape, tokens = self._engine.request.shape, None
        judged: Judgement
        try:
            tokens = self._engine.ledger.kv_cache.tokens
            length = shape.max_model_len or int(self._engine.ledger.number("max_model_len"))
        except MissingValueError as error:
            judged = reason(Verdict.UNKNOWN, Phase.READY, "capacity_unstated", f"boot_gate: {error}")
        else:
            judged = judge_boot_gate(tokens, length, windows, min_tokens, pool_bytes=shape.kv_cache_memory_bytes)
        verdict, _, sentence = judged
        self.record.boot_gate = BootGateResult(
            windows=windows, min_tokens=min_tokens, tokens=tokens, verdict=verdict, sentence=sentence
        )
        if verdict is Verdict.UNKNOWN or (verdict is Verdict.FAIL and self._recording.record.rung is None):
            self._decide(judged)
        elif verdict is Verdict.PASS:
            self.note(sentence)
        else:
            self._recording.save()  # a rung that its test's own gate refuses is for the runner of its body to judge

    def body_ended(self, *, failed: bool) -> None:
        """The body is over. An engine that died under it is not a pass; gates on memory have the last word.

        Args:
            failed: the body raised something: then it is not for the gates to judge.
        """
        record, boot = self.record, self._recording.record
        if record.verdict not in _SERVED or self._engine.closed:
            return
        if self._engine.died():
            self._as_the_boot()
        elif failed:
            return
        elif not self._engine.answering:
            said = f"the engine lives, and {self._engine.url}/health answers no more"
            self._recording.decide(*reason(Verdict.UNKNOWN, Phase.REQUEST, "health_lost", said))
            self._as_the_boot()
        elif record.survival is None and (judged := self._judge_limits()) is not None and boot.verdict is Verdict.PASS:
            self._recording.decide(*judged)  # the target's limits are on the boot as a whole
            self._as_the_boot()

    def conclude(self, verdict: Verdict, cause: Cause | None, message: str) -> None:
        """What came of something that the test asked and that was done elsewhere."""
        self._decide((verdict, cause, message))

    def note(self, text: str) -> None:
        """Something that the test asked for and got, beside the verdict."""
        record = self.record
        self._decide((record.verdict, record.cause, f"{record.message}; {text}"))

    def _as_the_boot(self) -> None:
        boot = self._recording.record
        self._decide((boot.verdict, boot.cause, boot.message))

    def _decide(self, judged: Judgement) -> None:
        self._recording.decide_use(self.record, *judged)

    def survive(self, spec: SurvivalSpec, asked: MemoryGates) -> None:
        """Send the engine its largest real request, and judge what it did and what memory was left.

        Limits that ``asked`` leaves open are the target's; of free memory then the backend's.
        """
        window = self._begin()
        tokens = self._engine.ledger.get("kv_tokens")
        self._memory.mark(REQUEST)
        record, boot = self.record, self._recording.record
        record.survival = result = SurvivalRun(
            self._engine.client,
            spec,
            window=window,
            pool_tokens=tokens if isinstance(tokens, int) else None,
            alive=lambda: self._engine.serving,
            host_free=room_of(self._engine.root_pid),
        ).run()
        if result.first_bad is not None and self._engine.died():
            result = result.after_death()
            judged = with_client_evidence((boot.verdict, boot.cause, boot.message), result)
            record.survival = msgspec.structs.replace(result, verdict=judged[0], sentence=judged[2])
            self._decide(judged)
            return
        self._asked = asked
        # A request may be over within one period: what it allocated and kept is seen, whether or not a gate asks.
        self._memory.await_sample()
        judged = judge_survival(result) or self._judge_memory(self._gates(), since=REQUEST) or survival_passed(result)
        record.survival = msgspec.structs.replace(result, verdict=judged[0], sentence=judged[2])
        self._survival = (judged,)
        self._conclude()
        if record.verdict in _SERVED:
            self._engine.hint_again()

    def soak(self, spec: SoakSpec, *, max_growth_per_hour: int | None) -> None:
        """Send mixed traffic for a while, and judge whether the engine lived and memory stayed."""
        window = self._begin()
        self._memory.mark(SOAK)
        result = Soak(
            self._engine.client,
            spec,
            window=window,
            alive=lambda: self._engine.serving,
            host_free=room_of(self._engine.root_pid),
        ).run()
        self._memory.await_sample()
        record, boot = self.record, self._recording.record
        record.soak = result = msgspec.structs.replace(result, trends=self._memory.trends(SOAK))
        if (result.failed or not self._engine.serving) and self._engine.died():
            record.soak = msgspec.structs.replace(result, verdict=boot.verdict, sentence=boot.message)
            self._as_the_boot()
            return
        since = SOAK if record.survival is None else REQUEST
        traffic = judge_soak(result, max_growth_per_hour, sample_s=self._memory.period_s)
        limits = self._judge_memory(self._gates(), since=since)
        self._soak = (traffic, *(() if limits is None else (limits,)))
        verdict, _, said = together(self._soak)
        record.soak = msgspec.structs.replace(result, verdict=verdict, sentence=said)
        self._conclude()

    def _conclude(self) -> None:
        """The verdict of all checks so far; one that passed is not forgotten for one that came to nothing."""
        checks = [*self._survival, *self._soak]
        if self._before is not None and self._before[0] is not Verdict.PASS and not self._survival:
            checks.append(self._before)
        self._decide(together(checks))

    def _gates(self) -> MemoryGates:
        """What the last survival check asked for; what it left open is the target's, or the backend's."""
        asked = self._asked
        return MemoryGates(
            min_free_bytes=_first(asked.min_free_bytes, self._limits.min_free, self._min_free),
            max_used_bytes=_first(asked.max_used_bytes, self._limits.max_used),
            max_growth_bytes=_first(asked.max_growth_bytes, self._limits.max_growth),
        )

    def _judge_limits(self) -> Judgement | None:
        """Judge what the whole boot did against the target's limits on memory; ``None`` where each is kept."""
        limits = self._limits
        gates = MemoryGates(
            min_free_bytes=limits.min_free, max_used_bytes=limits.max_used, max_growth_bytes=limits.max_growth
        )
        if gates != MemoryGates():
            self._memory.await_sample()
        return self._judge_memory(gates, since=LAUNCH)

    def _begin(self) -> int:
        """Tokens of one request that the engine takes."""
        request, record = self._engine.request, self.record
        if self._before is None:
            self._before = record.verdict, record.cause, record.message
        if record.verdict not in _SERVED:
            raise RuntimeError(f"{request.test}: no engine that could be sent anything")
        return request.shape.max_model_len or int(self._engine.ledger.number("max_model_len"))

    def _judge_memory(self, gates: MemoryGates, *, since: str) -> Judgement | None:
        record = self.record
        seen = [check.least_host_free_bytes for check in (record.survival, record.soak) if check is not None]
        host_free = min((free for free in seen if free is not None), default=None)
        record.gates = self._memory.judge(gates, since=since, host_free_bytes=host_free)
        return judge_gates(record.gates, trouble=self._memory.problems())


def _first(*sizes: int | None) -> int | None:
    """The first that is given."""
    return next((size for size in sizes if size is not None), None)
