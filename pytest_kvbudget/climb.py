"""A ladder over real boots: the shape of each rung, and the finding's record."""

from __future__ import annotations

from typing import Final

import msgspec

from pytest_kvbudget.archive import RunArchive, timestamp
from pytest_kvbudget.question import DEFAULT_STRATEGY, Question, RungPlan, Setting
from pytest_kvbudget.records import AttemptRecord, FindingRecord
from pytest_kvbudget.request import BootRequest
from pytest_kvbudget.search.ladder import Ladder
from pytest_kvbudget.search.model import BYTES_AXES, Axis, Finding, Trial
from pytest_kvbudget.search.pool import next_pool_bytes, rung_shape
from pytest_kvbudget.search.predict import Predict
from pytest_kvbudget.search.strategies import STRATEGIES
from pytest_kvbudget.search.turn import turn, turned
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.specs import LadderSpec, SpecError
from pytest_kvbudget.verdict import Verdict

LARGEST_DEFAULT_BLOCK_TOKENS: Final = 128
"""Tokens of a KV block where the log does not say: vLLM's default on CPU; 16 on GPUs. The engine fills whole blocks."""


class Climb(Question):
    """One ladder on one target."""

    kind = "ladder"

    def __init__(self, spec: LadderSpec, base: Shape, about: Setting, archive: RunArchive) -> None:
        """A ladder that has not booted anything yet; arguments as `Question`.

        Raises:
            SpecError: a scaled pool has no reference.
        """
        known, strategy = about.known, spec.strategy or about.strategy or DEFAULT_STRATEGY
        predict = Predict(first=spec.first, prior=known.prior, minutes=known.minutes)
        self.spec, self._scaled_from = spec, base
        self._short: dict[int, AttemptRecord] = {}
        self._ladder = Ladder(
            spec.rungs,
            predict if strategy == "predict" else STRATEGIES[strategy],
            confirm=spec.confirm,
            reference=_reference(spec, base) if spec.pool == "scaled" else None,
            max_boots=known.max_boots,
            noise=known.noise,
            cold_extra_bytes=known.cold_extra_bytes,
            verify=spec.verify,
        )
        super().__init__(base, about, archive, self._ladder, strategy)

    @property
    def name(self) -> str:
        """The axis."""
        return self.spec.axis

    @property
    def ends(self) -> tuple[str, str]:
        """Ceiling and floor."""
        return self._said(self.spec.start), self._said(self.spec.floor)

    @property
    def step(self) -> str:
        """The quantum."""
        return self._said(self.spec.quantum)

    def _said(self, value: int) -> str:
        """A size with its unit, other values as labels of rungs write them."""
        axis = self.spec.rungs
        return axis.show(value) if axis.name in BYTES_AXES else str(axis.setting(value))

    @property
    def grid(self) -> Axis:
        """The rungs, as the marker asks for them."""
        return self.spec.rungs

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
            asked=self.about.asked,
        )

    def shape(self, value: int) -> Shape:
        """The base shape at one rung, with the pool that goes with it."""
        try:
            if self.spec.pool == "fixed":
                return turn(self.base, self.name, self.setting(value))
            shape = rung_shape(self._scaled_from, self.name, value, "scaled")
        except (ValueError, msgspec.ValidationError) as error:
            raise SpecError(f"{self.name}={value}: {error}") from None
        short = self._short.get(value)
        if short is None or short.ledger is None or short.shape.kv_cache_memory_bytes is None:
            return shape
        size = next_pool_bytes(short.ledger, short.shape, self.spec.windows, block_tokens=LARGEST_DEFAULT_BLOCK_TOKENS)
        if size is None:
            return shape  # no rate to be had: the same pool once more
        return shape.merged(kv_cache_memory_bytes=size)

    def seen(self, trial: Trial, record: AttemptRecord) -> Trial:
        """A pool that came out too short is asked again with the rate that was measured there.

        The others are scaled from the reference as it served, which may have taken more than it was given first.
        """
        pool = record.shape.kv_cache_memory_bytes
        if trial.passed and pool is not None and turned(self.base, self.name) == trial.value:
            self._scaled_from = self.base.merged(kv_cache_memory_bytes=pool)
        if trial.pool_short and trial.verdict is Verdict.UNKNOWN:
            self._short[trial.value] = record
            return trial
        return msgspec.structs.replace(trial, pool_short=False)

    def finding(self) -> Finding:
        """What is established so far."""
        return self._ladder.finding()

    def write(self) -> FindingRecord:
        """The finding's record."""
        return FindingRecord(
            run=self._archive.info,
            test=self.test,
            target=self.about.target,
            shape=self.base.redacted(),
            strategy=self.strategy,
            pool=self.spec.pool,
            windows=self.spec.windows,
            finding=self.finding(),
            attempts=(),
            started=self._started,
            finished=timestamp(),
        )


def _reference(spec: LadderSpec, base: Shape) -> int:
    value = getattr(base, spec.axis)
    if base.kv_cache_memory_bytes is None or not isinstance(value, int):
        raise SpecError(
            f"pool='scaled' needs a reference rung: give the shape kv_cache_memory_bytes and {spec.axis}, as booted; "
            f"the shape is {base.describe() or 'empty'}"
        )
    return value
