"""A question that boots answer: which boots it wants, what they proved, and the record of the answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Final, Protocol

import msgspec

from pytest_kvbudget.archive import AnyFinding, RunArchive, timestamp
from pytest_kvbudget.hinting import hint_of_record, terms_of_record
from pytest_kvbudget.records import AttemptRecord, TargetInfo
from pytest_kvbudget.request import BootRequest
from pytest_kvbudget.search.ladder import Ask
from pytest_kvbudget.search.model import Axis, Finding, Prior, SweepFinding, Trial
from pytest_kvbudget.search.noise import Noise, ledger_grain
from pytest_kvbudget.search.turn import label, turned
from pytest_kvbudget.shape import Shape

DEFAULT_STRATEGY: Final = "predict"
INTERRUPTED: Final = "interrupted"
"""Why a boot without a verdict is in a finding's record: the run ended before it had one."""
CALLED_OFF: Final = "called off"
"""The same of a boot that others had answered."""
UNJUDGED: Final = frozenset({INTERRUPTED, CALLED_OFF})


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
    """``max_model_len=245760``; a repeat of a rung ends in ``#2``. Stacked ladders name all axes that have a value,
    their own last."""
    number: int
    why: str
    shape: Shape
    device_set: str | None = None
    """The only device set that will do; ``None`` for any."""

    @property
    def rung(self) -> str:
        """The label without the repeat's number."""
        return self.label.partition("#")[0]


class Search(Protocol):
    """A ladder or a sweep, as a question uses it."""

    def next_batch(self, count: int) -> tuple[Ask, ...]:
        """Boots that are wanted now with so many free device sets, those not yet told of first."""

    def tell(self, trial: Trial) -> None:
        """Take the outcome of a boot that was asked for."""

    def know(self, trial: Trial) -> None:
        """Take a boot that nobody asked for, before the first one is asked for."""

    def is_rung(self, value: int) -> bool:
        """It may ask for this value from the beginning."""

    def moot(self) -> tuple[int, ...]:
        """Values under way whose boots can be called off."""

    def drop(self, value: int) -> None:
        """A boot under way was called off."""

    def halt(self, reason: str) -> None:
        """Want no further boot."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What a question is about, beside its spec and its base shape."""

    test: str
    """Node id."""
    target: TargetInfo
    strategy: str | None = None
    """The run's own, where the marker names none."""
    only: int | None = None
    """The one value to boot, in whole numbers."""
    known: Known = Known()
    fixed: dict[str, int | float] = {}
    """Other axes of a stack that have a value, the outermost first; labels name them, and the base shape has them."""
    asked: str = ""
    """Digest of what the test asks of a boot."""


class Question(ABC):
    """One question on one target: asks for boots, is told what they proved, writes its finding."""

    def __init__(self, base: Shape, about: Setting, archive: RunArchive, search: Search, strategy: str) -> None:
        """A question that has not booted anything yet.

        Args:
            base: the shape, what is moved aside.
            about: whose question it is.
            archive: where its records go.
            search: finds the answer.
            strategy: by which it chooses.
        """
        self.base, self.about, self.test, self.strategy = base, about, about.test, strategy
        self._archive, self._search = archive, search
        self._attempts: list[Path] = []
        self._why: list[str] = []
        self._started = timestamp()

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
    def step(self) -> str:
        """The distance of two values, for people."""

    @property
    @abstractmethod
    def grid(self) -> Axis:
        """Every value that may be booted, as rungs."""

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
    def finding(self) -> Finding | SweepFinding:
        """What is established so far."""

    @abstractmethod
    def write(self) -> AnyFinding:
        """The record of what is established."""

    def next_batch(self, count: int = 1) -> tuple[RungPlan, ...]:
        """The boots to make now, those not yet told of first; none when the question is at its end."""
        only = self.about.only
        if only is None:
            return tuple(map(self._plan, self._search.next_batch(count)))
        return () if self._attempts else (self._plan(Ask(value=only, index=None, attempt=1, why="search")),)

    def next(self) -> RungPlan | None:
        """The boot to make now; ``None`` when the question is at its end."""
        return next(iter(self.next_batch()), None)

    def stands(self, shape: Shape, plan: RungPlan) -> bool:
        """A shape that a test's own fixture made still has the rung's setting."""
        return turned(shape, self.name) == turned(plan.shape, self.name)

    def moot(self) -> tuple[int, ...]:
        """Values under way whose boots can be called off: other boots have answered for them."""
        return self._search.moot()

    def drop(self, value: int) -> None:
        """A boot under way was called off, see `unjudged`."""
        self._search.drop(value)

    def halt(self, reason: str) -> None:
        """Want no further boot."""
        self._search.halt(reason)

    def known_plan(self, shape: Shape) -> RungPlan | None:
        """The rung that a boot of this shape stands on by its setting alone; ``None`` where it is none.

        Whether everything else of the shape is the rung's too is for the caller to compare.
        """
        setting = turned(shape, self.name)
        value = None if setting is None else round(setting * self.grid.scale)
        if value is None or not self._search.is_rung(value):
            return None
        return self._plan(Ask(value=value, index=None, attempt=1, why="known"))

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
        self._why.append(plan.why)
        ledger = record.ledger
        trial = Trial(
            value=plan.value,
            verdict=record.verdict,
            hint=hint_of_record(record, self.request(plan, record.shape)) if reused else record.hint,
            cause=record.cause,
            pool_short=record.pool_short,
            warm=record.warm,
            device_set=record.device_set,
            devices=record.target.devices,
            grain=None if ledger is None else ledger_grain(ledger, self.name),
            terms=terms_of_record(record, self.name),
            reused=reused,
        )
        if known:
            self._search.know(trial)
        elif self.about.only is None:
            self._search.tell(self.seen(trial, record))

    def unjudged(self, path: Path, why: str) -> None:
        """A boot has no verdict (`INTERRUPTED`, `CALLED_OFF`): it is in the finding's record, and counts nowhere."""
        self._attempts.append(path)
        self._why.append(why)

    def seen(self, trial: Trial, record: AttemptRecord) -> Trial:
        """A boot as the search is told of it."""
        return trial

    def winner(self) -> Shape | None:
        """The shape of the best value that passed."""
        value = self.finding().value
        return None if value is None else self.shape(value)

    def finish(self) -> Path:
        """Write the finding's record; returns its path."""
        stage = self.name if self.about.fixed else None
        record = self.write()
        record.why = tuple(self._why)
        return self._archive.write_finding(record, stage=stage, attempts=self._attempts)

    def _plan(self, ask: Ask) -> RungPlan:
        setting = self.setting(ask.value)
        settings = {**self.about.fixed, self.name: setting}
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
