"""What a ready engine is sent to show what it can stand, and the limits on memory that are judged after it."""

from __future__ import annotations

from typing import Protocol

import msgspec

from pytest_kvbudget.config import Limits
from pytest_kvbudget.device.cgroup import room_of
from pytest_kvbudget.device.gates import MemoryGates
from pytest_kvbudget.device.trace import LAUNCH
from pytest_kvbudget.engine.client import EngineClient
from pytest_kvbudget.engine.soak import Soak, SoakSpec
from pytest_kvbudget.engine.survival import SurvivalRun, SurvivalSpec
from pytest_kvbudget.judging import (
    Judgement,
    judge_gates,
    judge_soak,
    judge_survival,
    soak_passed,
    survival_passed,
    together,
    with_client_evidence,
)
from pytest_kvbudget.ledger.model import BootLedger
from pytest_kvbudget.memory import REQUEST, SOAK, AttemptMemory
from pytest_kvbudget.recording import Recording
from pytest_kvbudget.request import BootRequest
from pytest_kvbudget.verdict import Verdict


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
    def ledger(self) -> BootLedger:
        """What it said about memory."""

    def died(self) -> bool:
        """It is dead, and that has become the verdict."""


class Exercise:
    """Survival, soak and gates on memory of one attempt; each leaves what it saw, and its verdict, in the record."""

    def __init__(
        self, engine: Exercised, recording: Recording, memory: AttemptMemory, limits: Limits, *, min_free: int | None
    ) -> None:
        """``min_free``: bytes that the backend wants free where neither test nor target say anything."""
        self._engine, self._recording, self._memory = engine, recording, memory
        self._limits, self._min_free = limits, min_free
        self._asked = MemoryGates()
        """Of the last survival check; they hold for a soak after it too."""
        self._before: Judgement | None = None
        """What the boot and the body before the first check came to."""
        self._survival: tuple[Judgement, ...] = ()
        self._soak: tuple[Judgement, ...] = ()

    def survive(self, spec: SurvivalSpec, asked: MemoryGates) -> None:
        """Send the engine its largest real request, and judge what it did and what memory was left.

        Limits that ``asked`` leaves open are the target's; of free memory then the backend's.
        """
        window = self._begin()
        tokens = self._engine.ledger.get("kv_tokens")
        self._memory.mark(REQUEST)
        record = self._recording.record
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
            judged = with_client_evidence((record.verdict, record.cause, record.message), result)
            record.survival = msgspec.structs.replace(result, verdict=judged[0], sentence=judged[2])
            self._recording.decide(*judged)
            return
        self._asked = asked
        # A request may be over within one period: what it allocated and kept is seen, whether or not a gate asks.
        self._memory.await_sample()
        judged = judge_survival(result) or self._judge_memory(self._gates(), since=REQUEST) or survival_passed(result)
        record.survival = msgspec.structs.replace(result, verdict=judged[0], sentence=judged[2])
        self._survival = (judged,)
        self._conclude()

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
        record = self._recording.record
        record.soak = result = msgspec.structs.replace(result, trends=self._memory.trends(SOAK))
        if (result.failed or not self._engine.serving) and self._engine.died():
            record.soak = msgspec.structs.replace(result, verdict=record.verdict, sentence=record.message)
            self._recording.save()
            return
        since = SOAK if record.survival is None else REQUEST
        growth = judge_soak(result, max_growth_per_hour, sample_s=self._memory.period_s)
        limits = self._judge_memory(self._gates(), since=since)
        self._soak = (growth or soak_passed(result), *(() if limits is None else (limits,)))
        verdict, _, said = together(self._soak)
        record.soak = msgspec.structs.replace(result, verdict=verdict, sentence=said)
        self._conclude()

    def _conclude(self) -> None:
        """The verdict of all checks so far; one that passed is not forgotten for one that came to nothing."""
        checks = [*self._survival, *self._soak]
        if self._before is not None and self._before[0] is not Verdict.PASS and not self._survival:
            checks.append(self._before)
        self._recording.decide(*together(checks))

    def _gates(self) -> MemoryGates:
        """What the last survival check asked for; what it left open is the target's, or the backend's."""
        asked = self._asked
        return MemoryGates(
            min_free_bytes=_first(asked.min_free_bytes, self._limits.min_free, self._min_free),
            max_used_bytes=_first(asked.max_used_bytes, self._limits.max_used),
            max_growth_bytes=_first(asked.max_growth_bytes, self._limits.max_growth),
        )

    def judge_limits(self) -> Judgement | None:
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
        request, record = self._engine.request, self._recording.record
        if self._before is None:
            self._before = record.verdict, record.cause, record.message
        if record.verdict not in {Verdict.PASS, Verdict.MARGINAL}:
            raise RuntimeError(f"{request.test}: no engine that could be sent anything")
        return request.shape.max_model_len or int(self._engine.ledger.number("max_model_len"))

    def _judge_memory(self, gates: MemoryGates, *, since: str) -> Judgement | None:
        record = self._recording.record
        seen = [check.least_host_free_bytes for check in (record.survival, record.soak) if check is not None]
        host_free = min((free for free in seen if free is not None), default=None)
        record.gates = self._memory.judge(gates, since=since, host_free_bytes=host_free)
        return judge_gates(record.gates, trouble=self._memory.problems())


def _first(*sizes: int | None) -> int | None:
    """The first that is given."""
    return next((size for size in sizes if size is not None), None)
