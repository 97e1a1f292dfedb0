"""A ladder over real boots: the marker's arguments, the shape of each rung, and the finding's record."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec

from pytest_kvbudget.archive import RunArchive, timestamp
from pytest_kvbudget.records import AttemptRecord, FindingRecord, TargetInfo
from pytest_kvbudget.request import BootRequest
from pytest_kvbudget.search.ladder import Ask, Ladder
from pytest_kvbudget.search.model import Axis, Finding, Trial
from pytest_kvbudget.search.pool import measured_pool_bytes, rung_shape
from pytest_kvbudget.search.predict import Predict
from pytest_kvbudget.search.strategies import STRATEGIES
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import SizeError, parse_size
from pytest_kvbudget.verdict import Verdict

AxisName = Literal["max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"]
AXES: Final[tuple[str, ...]] = get_args(AxisName)
LARGEST_DEFAULT_BLOCK_TOKENS: Final = 128
"""Tokens of a KV block where the log does not say: vLLM's default on CPU; 16 on GPUs. The engine fills whole blocks."""
LARGEST: Final = 2**48
"""Of any number of a ladder: 256 TiB, or as many tokens."""
DEFAULT_STRATEGY: Final = "predict"
DEFAULT_QUANTUM: Final = {
    "max_model_len": 4096,  # the bonus step of the RDNA4 document's ladder
    "max_num_seqs": 1,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 2**20,
}


class SpecError(Exception):
    """A ladder marker's argument is wrong; the message names it, what was found and what is accepted."""


class LadderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A ladder as its marker asks for it. ``start``, ``floor`` and ``quantum`` are in the unit of the axis."""

    axis: str
    start: int
    floor: int
    quantum: int
    strategy: str | None = None
    """``None``: the run's own, ``predict`` by default."""
    pool: Literal["fixed", "scaled"] = "fixed"
    windows: int = 1
    confirm: int = 0
    first: Literal["ceiling"] | None = None

    @property
    def rungs(self) -> Axis:
        """The axis with its rungs."""
        return Axis(name=self.axis, floor=self.floor, ceiling=self.start, quantum=self.quantum)


def check_spec(arguments: Mapping[str, Any]) -> LadderSpec:
    """Check a marker's keyword arguments.

    Raises:
        SpecError: naming the argument, what was found and what is accepted.
    """
    known = LadderSpec.__struct_fields__
    for name in arguments:
        if name not in known:
            raise SpecError(f"unknown argument {name!r}; accepted are {', '.join(known)}")
    axis = arguments.get("axis", "max_model_len")
    if axis not in AXES:
        raise SpecError(f"axis={axis!r}; accepted are {', '.join(map(repr, AXES))}")
    for name in ("start", "floor"):
        if name not in arguments:
            raise SpecError(f"{name} is missing; a ladder needs start (its ceiling) and floor")
    numbers = {
        name: _whole(name, arguments.get(name, default), size=axis == "kv_cache_memory_bytes" and name in _SIZED)
        for name, default in (
            ("start", None),
            ("floor", None),
            ("quantum", DEFAULT_QUANTUM[axis]),
            ("windows", 1),
            ("confirm", 0),
        )
    }
    strategy = arguments.get("strategy")
    if strategy is not None and strategy not in STRATEGIES:
        raise SpecError(f"strategy={strategy!r}; accepted are {', '.join(map(repr, STRATEGIES))}")
    try:
        spec = msgspec.convert({"strategy": strategy, "axis": axis, **_rest(arguments), **numbers}, LadderSpec)
        _ = spec.rungs
    except msgspec.ValidationError as error:
        raise SpecError(str(error).replace("`$.", "`")) from None
    except ValueError as error:
        raise SpecError(str(error)) from None
    if spec.first is not None and strategy not in {None, "predict"}:
        raise SpecError(f"first={spec.first!r} with strategy={strategy!r}; first is for strategy 'predict'")
    if spec.pool == "scaled" and axis not in {"max_model_len", "max_num_seqs"}:
        raise SpecError(f"pool='scaled' with axis={axis!r}; a pool scales with max_model_len or max_num_seqs")
    return spec


_SIZED: Final = ("start", "floor", "quantum")


def _rest(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in ("pool", "first") if name in arguments}


def _whole(name: str, value: object, *, size: bool) -> int:
    least = 0 if name == "confirm" else 1
    if size and isinstance(value, str):
        try:
            value = parse_size(value)
        except SizeError as error:
            raise SpecError(f"{name}: {error}") from None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
        raise SpecError(f"{name}={value!r}; expected a whole number from {least} to {LARGEST:,}")
    return value


class RungPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The next boot of a ladder."""

    value: int
    label: str
    """``max_model_len=245760``; a repeat of a rung ends in ``#2``."""
    number: int
    why: str
    shape: Shape


class Climb:
    """One ladder on one target: asks for rungs, is told what their boots proved, writes the finding."""

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
    ) -> None:
        self.spec, self.base, self.test = spec, base, test
        self.strategy = spec.strategy or strategy or DEFAULT_STRATEGY
        self._target, self._archive, self._only = target, archive, only
        self._started = timestamp()
        self._attempts: list[Path] = []
        self._numbers: dict[int, int] = {}
        self._short: dict[int, AttemptRecord] = {}
        self._ladder = Ladder(
            spec.rungs,
            Predict(first=spec.first) if self.strategy == "predict" else STRATEGIES[self.strategy],
            confirm=spec.confirm,
            reference=self._reference() if spec.pool == "scaled" else None,
        )

    def next(self) -> RungPlan | None:
        """The next rung to boot; ``None`` when the search is over."""
        if self._only is not None:
            if self._attempts:
                return None
            ask = Ask(value=self._only, index=0, attempt=1, why="search")
        else:
            found = self._ladder.next()
            if found is None:
                return None
            ask = found
        number = self._numbers[ask.value] = self._numbers.get(ask.value, 0) + 1
        label = f"{self.spec.axis}={ask.value}" + (f"#{number}" if number > 1 else "")
        return RungPlan(value=ask.value, label=label, number=number, why=ask.why, shape=self.shape(ask.value))

    def request(self, plan: RungPlan, shape: Shape) -> BootRequest:
        """The boot of a rung, at the shape that the test settled on."""
        return BootRequest(
            test=self.test,
            shape=shape,
            rung=f"{self.spec.axis}={plan.value}",
            number=plan.number,
            windows=self.spec.windows,
            pool=self.spec.pool,
            axis=self.spec.axis,
        )

    def shape(self, value: int) -> Shape:
        """The base shape at one value of the axis, with the pool that goes with it."""
        try:
            shape = rung_shape(self.base, self.spec.axis, value, self.spec.pool)
        except (ValueError, msgspec.ValidationError) as error:
            raise SpecError(f"{self.spec.axis}={value}: {error}") from None
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

    def tell(self, plan: RungPlan, record: AttemptRecord, path: Path) -> None:
        """What the boot of a rung proved."""
        self._attempts.append(path)
        pool_short = record.pool_short and record.verdict is Verdict.UNKNOWN
        if pool_short:
            self._short[plan.value] = record
        if self._only is None:
            self._ladder.tell(
                Trial(
                    value=plan.value,
                    verdict=record.verdict,
                    hint=record.hint,
                    cause=record.cause,
                    pool_short=pool_short,
                )
            )

    def finding(self) -> Finding:
        """What is established so far."""
        return self._ladder.finding()

    def winner(self) -> Shape | None:
        """The shape of the largest rung that passed."""
        value = self.finding().value
        return None if value is None else self.shape(value)

    def finish(self) -> Path:
        """Write the finding's record; returns its path."""
        folder = self._archive.test_folder(self.test)
        return self._archive.write_finding(
            FindingRecord(
                run=self._archive.info,
                test=self.test,
                target=self._target,
                shape=self.base.redacted(),
                strategy=self.strategy,
                pool=self.spec.pool,
                windows=self.spec.windows,
                finding=self.finding(),
                attempts=tuple(os.path.relpath(path, folder) for path in self._attempts),
                started=self._started,
                finished=timestamp(),
            )
        )

    def _reference(self) -> int:
        value = getattr(self.base, self.spec.axis)
        if self.base.kv_cache_memory_bytes is None or not isinstance(value, int):
            raise SpecError(
                f"pool='scaled' needs a reference rung: give the shape kv_cache_memory_bytes and {self.spec.axis}, "
                f"as booted; the shape is {self.base.describe() or 'empty'}"
            )
        return value
