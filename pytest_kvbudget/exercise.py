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
from pytest_kvbudget.judging import Judgement, judge_gates, judge_soak, judge_survival
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

    def survive(self, spec: SurvivalSpec, asked: MemoryGates) -> None:
        """Send the engine its largest real request, and judge what it did and what memory was left.

        Limits that ``asked`` leaves open are the target's; of free memory then the backend's.
        """
        window = self._window()
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
            record.survival = result.after_death()
            self._recording.save()
            return
        gates = MemoryGates(
            min_free_bytes=_first(asked.min_free_bytes, self._limits.min_free, self._min_free),
            max_used_bytes=_first(asked.max_used_bytes, self._limits.max_used),
            max_growth_bytes=_first(asked.max_growth_bytes, self._limits.max_growth),
        )
        judged = judge_survival(result) or self._judge_memory(gates, since=REQUEST)
        if judged is None:
            slowest = result.requests[0]
            judged = Verdict.PASS, None, f"survived {slowest.generated_tokens:,} tokens of its largest request"
        self._recording.decide(*judged)

    def soak(self, spec: SoakSpec, *, max_growth_per_hour: int | None) -> None:
        """Send mixed traffic for a while, and judge whether the engine lived and memory stayed."""
        window = self._window()
        self._memory.mark(SOAK)
        result = Soak(self._engine.client, spec, window=window, alive=lambda: self._engine.serving).run()
        record = self._recording.record
        record.soak = msgspec.structs.replace(result, trends=self._memory.trends(SOAK))
        if (result.failed or not self._engine.serving) and self._engine.died():
            return
        judged = judge_soak(record.soak, max_growth_per_hour)
        if judged is not None:
            self._recording.decide(*judged)
        self._recording.save()

    def judge_limits(self) -> Judgement | None:
        """Judge what the whole boot did against the target's limits on memory; ``None`` where each is kept."""
        limits = self._limits
        gates = MemoryGates(
            min_free_bytes=limits.min_free, max_used_bytes=limits.max_used, max_growth_bytes=limits.max_growth
        )
        return self._judge_memory(gates, since=LAUNCH)

    def _window(self) -> int:
        """Tokens of one request that the engine takes."""
        request = self._engine.request
        if self._recording.record.verdict not in {Verdict.PASS, Verdict.MARGINAL}:
            raise RuntimeError(f"{request.test}: no engine that could be sent anything")
        return request.shape.max_model_len or int(self._engine.ledger.number("max_model_len"))

    def _judge_memory(self, gates: MemoryGates, *, since: str) -> Judgement | None:
        record = self._recording.record
        host_free = None if record.survival is None else record.survival.least_host_free_bytes
        record.gates = self._memory.judge(gates, since=since, host_free_bytes=host_free)
        return judge_gates(record.gates)


def _first(*sizes: int | None) -> int | None:
    """The first that is given."""
    return next((size for size in sizes if size is not None), None)
