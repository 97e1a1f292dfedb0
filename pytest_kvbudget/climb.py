"""A ladder over real boots: the shape of each rung, and the finding's record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from pytest_kvbudget.archive import RunArchive, timestamp
from pytest_kvbudget.question import DEFAULT_STRATEGY, Known, Question, RungPlan
from pytest_kvbudget.records import AttemptRecord, FindingRecord, TargetInfo
from pytest_kvbudget.request import BootRequest
from pytest_kvbudget.search.bracket import rung_of
from pytest_kvbudget.search.ladder import Ask, Ladder
from pytest_kvbudget.search.model import Axis, Finding, Trial
from pytest_kvbudget.search.pool import measured_pool_bytes, rung_shape
from pytest_kvbudget.search.predict import Predict
from pytest_kvbudget.search.strategies import STRATEGIES
from pytest_kvbudget.search.turn import turn
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.specs import LadderSpec, SpecError
from pytest_kvbudget.verdict import Verdict

LARGEST_DEFAULT_BLOCK_TOKENS: Final = 128
"""Tokens of a KV block where the log does not say: vLLM's default on CPU; 16 on GPUs. The engine fills whole blocks."""


class Climb(Question):
    """One ladder on one target."""

    kind = "ladder"

    def __init__(
        self,
        spec: LadderSpec,
        base: Shape,
        *,
        test: str,
        target: TargetInfo,
        archive: RunArchive,
        strategy: str | None = None,
        only: int | None = None,
        known: Known | None = None,
        fixed: Mapping[str, int | float] | None = None,
        asked: str = "",
    ) -> None:
        """A ladder that has not booted anything yet.

        Args:
            spec: what its marker asks for.
            base: the shape, the axis aside.
            test: node id.
            target: what it runs on.
            archive: where its records go.
            strategy: the run's own, where the marker names none.
            only: the one rung to boot, in the axis' whole numbers.
            known: what plans and earlier runs say.
            fixed: as `Question`.
            asked: digest of what the test asks of a boot.
        """
        super().__init__(base, test=test, target=target, archive=archive, fixed=fixed)
        self.spec, self._only, self._asked = spec, only, asked
        self.strategy = spec.strategy or strategy or DEFAULT_STRATEGY
        self._short: dict[int, AttemptRecord] = {}
        known = known or Known()
        predict = Predict(first=spec.first, prior=known.prior, minutes=known.minutes)
        self._ladder = Ladder(
            spec.rungs,
            predict if self.strategy == "predict" else STRATEGIES[self.strategy],
            confirm=spec.confirm,
            reference=self._reference() if spec.pool == "scaled" else None,
            max_boots=known.max_boots,
            noise=known.noise,
            cold_extra_bytes=known.cold_extra_bytes,
            verify=spec.verify,
        )

    @property
    def name(self) -> str:
        """The axis."""
        return self.spec.axis

    @property
    def ends(self) -> tuple[str, str]:
        """Ceiling and floor."""
        axis = self.spec.rungs
        return str(axis.setting(axis.ceiling)), str(axis.setting(axis.floor))

    @property
    def grid(self) -> Axis:
        """The rungs, as the marker asks for them."""
        return self.spec.rungs

    def asks(self, count: int) -> tuple[Ask, ...]:
        """Rungs to boot now."""
        if self._only is None:
            return self._ladder.next_batch(count)
        return () if self._attempts else (Ask(value=self._only, index=0, attempt=1, why="search"),)

    def setting(self, value: int) -> int | float:
        """A rung as the shape's field takes it."""
        return self.spec.rungs.setting(value)

    def request(self, plan: RungPlan, shape: Shape) -> BootRequest:
        """The boot of a rung."""
        return BootRequest(
            test=self.test,
            shape=shape,
            rung=plan.rung,
            number=plan.number,
            windows=self.spec.windows,
            pool=self.spec.pool,
            axis=self.name,
            asked=self._asked,
        )

    def shape(self, value: int) -> Shape:
        """The base shape at one rung, with the pool that goes with it."""
        try:
            if self.spec.pool == "fixed":
                return turn(self.base, self.name, self.setting(value))
            shape = rung_shape(self.base, self.name, value, "scaled")
        except (ValueError, msgspec.ValidationError) as error:
            raise SpecError(f"{self.name}={value}: {error}") from None
        short = self._short.get(value)
        if short is None or short.ledger is None or short.shape.kv_cache_memory_bytes is None:
            return shape
        tokens = short.ledger.get("kv_tokens") or short.ledger.get("estimated_max_model_len")
        if not isinstance(tokens, int) or tokens < 1:
            return shape  # no rate to be had: the same pool once more
        size = measured_pool_bytes(
            short.shape.kv_cache_memory_bytes,
            tokens,
            self.spec.windows,
            shape.max_model_len or 0,
            block_tokens=LARGEST_DEFAULT_BLOCK_TOKENS,
        )
        return shape.merged(kv_cache_memory_bytes=size)

    def take(self, trial: Trial, record: AttemptRecord) -> None:
        """Tell the ladder of a boot."""
        if trial.pool_short and trial.verdict is Verdict.UNKNOWN:
            self._short[trial.value] = record
        elif trial.pool_short:
            trial = msgspec.structs.replace(trial, pool_short=False)
        if self._only is None:
            self._ladder.tell(trial)

    def is_rung(self, value: int) -> bool:
        """It is a rung as the marker asks for them."""
        return rung_of(self.spec.rungs, value) is not None

    def know(self, trial: Trial) -> None:
        """Tell the ladder of a boot that was made for another one."""
        self._ladder.know(trial)

    def moot(self) -> frozenset[int]:
        """Rungs under way that other boots have answered."""
        return frozenset(ask.value for ask in self._ladder.moot())

    def drop(self, value: int) -> None:
        """A boot under way was called off."""
        self._ladder.drop(value)

    def halt(self, reason: str) -> None:
        """Want no further rung."""
        self._ladder.halt(reason)

    def finding(self) -> Finding:
        """What is established so far."""
        return self._ladder.finding()

    def write(self) -> FindingRecord:
        """The finding's record."""
        return FindingRecord(
            run=self._archive.info,
            test=self.test,
            target=self._target,
            shape=self.base.redacted(),
            strategy=self.strategy,
            pool=self.spec.pool,
            windows=self.spec.windows,
            finding=self.finding(),
            attempts=(),
            started=self._started,
            finished=timestamp(),
        )

    def _reference(self) -> int:
        value = getattr(self.base, self.name)
        if self.base.kv_cache_memory_bytes is None or not isinstance(value, int):
            raise SpecError(
                f"pool='scaled' needs a reference rung: give the shape kv_cache_memory_bytes and {self.name}, "
                f"as booted; the shape is {self.base.describe() or 'empty'}"
            )
        return value
