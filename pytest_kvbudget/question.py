"""A question that boots answer: which boots it wants, what they proved, and the record of the answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from pytest_kvbudget.archive import AnyFinding, RunArchive, timestamp
from pytest_kvbudget.hinting import hint_of_record
from pytest_kvbudget.records import AttemptRecord, TargetInfo
from pytest_kvbudget.request import BootRequest
from pytest_kvbudget.search.ladder import Ask
from pytest_kvbudget.search.model import Axis, Finding, Prior, SweepFinding, Trial
from pytest_kvbudget.search.noise import Noise, ledger_grain, steady_terms
from pytest_kvbudget.search.turn import label, turned
from pytest_kvbudget.shape import Shape

DEFAULT_STRATEGY: Final = "predict"


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What plans and earlier runs say before the first boot."""

    prior: Prior | None = None
    """Where the boundary may be."""
    noise: Noise = Noise()
    """What the same boot may differ by."""
    cold_extra_bytes: float | None = None
    """What a boot with nothing in the compile cache takes beyond a warm one; ``None`` where nobody knows."""
    minutes: tuple[float, float] = (1.0, 1.0)
    """What a boot that passes and one that fails take."""
    max_boots: int | None = None
    """Boots that may be spent."""


class RungPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The next boot of a ladder or sweep."""

    value: int
    """In the whole numbers of axis or knob."""
    setting: int | float
    """As shape, flag or variable take it."""
    label: str
    """``max_model_len=245760``; a repeat of a rung ends in ``#2``. Stacked ladders name all axes, their own last."""
    number: int
    why: str
    shape: Shape
    device_set: str | None = None
    """The only device set that will do; ``None`` for any."""

    @property
    def rung(self) -> str:
        """The label without the repeat's number."""
        return self.label.partition("#")[0]


class Question(ABC):
    """One question on one target: asks for boots, is told what they proved, writes its finding."""

    def __init__(
        self,
        base: Shape,
        *,
        test: str,
        target: TargetInfo,
        archive: RunArchive,
        fixed: Mapping[str, int | float] | None = None,
    ) -> None:
        """``fixed``: axes that are settled already, the outermost first; labels name them, and ``base`` has them."""
        self.base, self.test = base, test
        self._target, self._archive = target, archive
        self._fixed = dict(fixed or {})
        self._attempts: list[Path] = []
        self._started = timestamp()

    strategy: str
    """Which rung to boot next is chosen by it."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What is moved: an axis or a knob."""

    kind: str
    """``ladder`` or ``sweep``."""

    @property
    @abstractmethod
    def ends(self) -> tuple[str, str]:
        """Where it begins and ends by its marker, for people."""

    @property
    @abstractmethod
    def grid(self) -> Axis:
        """Every value that may be booted, as rungs."""

    @abstractmethod
    def asks(self, count: int) -> tuple[Ask, ...]:
        """Boots that are wanted now with so many free device sets; none when the question is at its end."""

    @abstractmethod
    def setting(self, value: int) -> int | float:
        """A value as shape, flag or variable take it."""

    @abstractmethod
    def shape(self, value: int) -> Shape:
        """The base shape with the axis or knob at this value."""

    @abstractmethod
    def request(self, plan: RungPlan, shape: Shape) -> BootRequest:
        """The boot of a rung, at the shape that the test settled on."""

    @abstractmethod
    def take(self, trial: Trial, record: AttemptRecord) -> None:
        """Tell the search of a boot."""

    @abstractmethod
    def finding(self) -> Finding | SweepFinding:
        """What is established so far."""

    @abstractmethod
    def moot(self) -> frozenset[int]:
        """Values under way whose boots can be called off: other boots have answered for them."""

    @abstractmethod
    def drop(self, value: int) -> None:
        """A boot under way was called off."""

    @abstractmethod
    def halt(self, reason: str) -> None:
        """Want no further boot."""

    @abstractmethod
    def write(self) -> AnyFinding:
        """The record of what is established."""

    def next_batch(self, count: int = 1) -> tuple[RungPlan, ...]:
        """The boots to make now, those not yet told of first."""
        return tuple(map(self._plan, self.asks(count)))

    def next(self) -> RungPlan | None:
        """The boot to make now; ``None`` when the question is at its end."""
        return next(iter(self.next_batch()), None)

    def stands(self, shape: Shape, plan: RungPlan) -> bool:
        """A shape that a test's own fixture made still has the rung's setting."""
        return turned(shape, self.name) == turned(plan.shape, self.name)

    @abstractmethod
    def know(self, trial: Trial) -> None:
        """Tell the search of a boot that was made for another question, before its own first one."""

    def known_plan(self, shape: Shape) -> RungPlan | None:
        """The rung that a boot of this shape stands on by its setting alone; ``None`` where it is none.

        Whether everything else of the shape is the rung's too is for the caller to compare.
        """
        setting = turned(shape, self.name)
        value = None if setting is None else round(setting * self.grid.scale)
        if value is None or not self.is_rung(value):
            return None
        return self._plan(Ask(value=value, index=None, attempt=1, why="known"))

    @abstractmethod
    def is_rung(self, value: int) -> bool:
        """The search may ask for this value from the beginning."""

    def tell(
        self, plan: RungPlan, record: AttemptRecord, path: Path, *, reused: bool = False, known: bool = False
    ) -> None:
        """What the boot of a rung proved.

        Args:
            plan: what was asked for.
            record: of the boot.
            path: of the record.
            reused: it was booted earlier, and stands for the one that was asked for.
            known: it was booted earlier, and nobody asked for it.
        """
        self._attempts.append(path)
        ledger = record.ledger
        trial = Trial(
            value=plan.value,
            verdict=record.verdict,
            hint=hint_of_record(record, self.request(plan, record.shape)) if reused else record.hint,
            cause=record.cause,
            pool_short=record.pool_short,
            warm=record.warm,
            device_set=record.device_set,
            grain=None if ledger is None else ledger_grain(ledger, self.name),
            terms={} if ledger is None else steady_terms(ledger, self.name),
            reused=reused,
        )
        if known:
            self.know(trial)
        else:
            self.take(trial, record)

    def winner(self) -> Shape | None:
        """The shape of the best value that passed."""
        value = self.finding().value
        return None if value is None else self.shape(value)

    def finish(self) -> Path:
        """Write the finding's record; returns its path."""
        stage = self.name if self._fixed else None
        return self._archive.write_finding(self.write(), stage=stage, attempts=self._attempts)

    def _plan(self, ask: Ask) -> RungPlan:
        setting = self.setting(ask.value)
        settings = {**self._fixed, self.name: setting}
        words = ",".join(label(name, value) for name, value in settings.items())
        return RungPlan(
            value=ask.value,
            setting=setting,
            label=words + (f"#{ask.attempt}" if ask.attempt > 1 else ""),
            number=ask.attempt,
            why=ask.why,
            shape=self.shape(ask.value),
            device_set=ask.device_set,
        )
