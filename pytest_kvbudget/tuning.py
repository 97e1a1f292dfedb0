"""A headroom sweep over real boots: the shape of each boot, what the result belongs to, and the finding's record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pytest_kvbudget.archive import RunArchive, timestamp
from pytest_kvbudget.budget.gate import flag_value
from pytest_kvbudget.question import DEFAULT_STRATEGY, Question, RungPlan, Setting
from pytest_kvbudget.records import SweepRecord, TargetInfo
from pytest_kvbudget.request import BootRequest
from pytest_kvbudget.search.model import Axis, SweepFinding, SweepKey
from pytest_kvbudget.search.predict import Predict
from pytest_kvbudget.search.strategies import SWEEP_STRATEGIES
from pytest_kvbudget.search.sweep import Sweep
from pytest_kvbudget.search.turn import turn, turned
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.specs import SpecError, SweepSpec

_FORMAT_FLAGS: Final = ("--quantization", "-q", "--dtype", "--hf-overrides", "--load-format")
"""Flags that decide what a checkpoint's weights are on the device."""
_CARDS: Final = {"rdna4": "R9700", "vllm": "device of vLLM"}
_BACKEND_VARIABLE: Final = "VLLM_ATTENTION_BACKEND"


class Tuning(Question):
    """One headroom sweep on one target."""

    kind = "sweep"

    def __init__(
        self, spec: SweepSpec, base: Shape, about: Setting, archive: RunArchive, *, maximum: int | None = None
    ) -> None:
        """A sweep that has not booted anything yet.

        Args:
            spec: what its marker asks for.
            base: as `Question`.
            about: as `Question`.
            archive: as `Question`.
            maximum: value beyond which arithmetic expects the opposite failure (``maximum_headroom``).

        Raises:
            SpecError: the sweep has no upper end, or no such strategy.
        """
        known, strategy = about.known, spec.strategy or about.strategy or DEFAULT_STRATEGY
        if strategy not in SWEEP_STRATEGIES:
            raise SpecError(f"strategy {strategy!r}; a sweep knows {', '.join(SWEEP_STRATEGIES)}")
        self.spec = spec
        self._sweep = Sweep(
            spec.knob,
            lowest=spec.floor,
            highest=_ceiling(spec, base),
            step=spec.step,
            fine_step=spec.fine_step,
            start=spec.start,
            maximum=maximum,
            strategy=Predict(spare=1, minutes=known.minutes) if strategy == "predict" else SWEEP_STRATEGIES[strategy],
            confirm=spec.confirm,
            max_boots=known.max_boots,
            noise=known.noise,
            cold_extra_bytes=known.cold_extra_bytes,
            classes=spec.classes,
            key=sweep_key(base, about.target),
        )
        super().__init__(base, about, archive, self._sweep, strategy)

    @property
    def name(self) -> str:
        """The knob."""
        return self.spec.name

    @property
    def ends(self) -> tuple[str, str]:
        """Lowest and highest value."""
        return self._sweep.knob.show(self._sweep.lowest), self._sweep.knob.show(self._sweep.highest)

    @property
    def step(self) -> str:
        """That of the coarse grid."""
        return self._sweep.knob.show(self._sweep.step)

    @property
    def grid(self) -> Axis:
        """The values of the coarse grid; where it begins does not count here."""
        sweep = self._sweep
        # an axis has no rung at zero, and only their number matters
        lowest = max(1, sweep.lowest)
        ceiling = lowest + sweep.highest - sweep.lowest
        return Axis(name=self.name, floor=lowest, ceiling=ceiling, quantum=sweep.step, scale=self.spec.knob.scale)

    def setting(self, value: int) -> int | float:
        """A value as shape or variable take it."""
        return self.spec.knob.setting(value)

    def request(self, plan: RungPlan, shape: Shape) -> BootRequest:
        """The boot of a value."""
        return BootRequest(
            test=self.test,
            shape=shape,
            rung=plan.rung,
            number=plan.number,
            windows=self.spec.windows,
            axis=self.name,
            knob=True,
            asked=self.about.asked,
        )

    def shape(self, value: int) -> Shape:
        """The base shape with the knob at a value."""
        try:
            return turn(self.base, self.name, self.setting(value))
        except msgspec.ValidationError as error:
            raise SpecError(f"{self.name}={self.spec.knob.show(value)}: {error}") from None

    def finding(self) -> SweepFinding:
        """What is established so far."""
        return self._sweep.finding()

    def write(self) -> SweepRecord:
        """The finding's record."""
        return SweepRecord(
            run=self._archive.info,
            test=self.test,
            target=self.about.target,
            shape=self.base.redacted(),
            strategy=self.strategy,
            windows=self.spec.windows,
            finding=self.finding(),
            attempts=(),
            started=self._started,
            finished=timestamp(),
        )


def _ceiling(spec: SweepSpec, base: Shape) -> int:
    if spec.ceiling is not None:
        return spec.ceiling
    own = turned(base, spec.name)
    if own is None or spec.knob.value(own) < spec.floor:
        raise SpecError(
            f"knob={spec.name!r} needs a ceiling: give the marker one, or the shape a {spec.name} of at least "
            f"{spec.knob.show(spec.floor)}"
        )
    return spec.knob.value(own)


def sweep_key(base: Shape, target: TargetInfo) -> SweepKey:
    """What a sweep's result belongs to, by what configuration says of it (Neuron document, section 3)."""
    formats = [f"{flag} {value}" for flag in _FORMAT_FLAGS if (value := flag_value(base.extra_args, flag))]
    attention = base.env.get(_BACKEND_VARIABLE)
    kind = target.backend if attention is None else f"{target.backend} {attention}"
    return SweepKey(
        model=base.model,
        weights_format=" ".join(formats) or "as in the checkpoint",
        tensor_parallel_size=base.tensor_parallel_size,
        backend=kind,
        lnc=base.lnc,
        hardware=_hardware(target.config),
    )


def _hardware(config: Mapping[str, Any]) -> str | None:
    mock = config.get("mock")
    if isinstance(mock, Mapping):
        dialect = mock.get("dialect", "vllm")
        return f"simulated {mock.get('platform') if dialect == 'neuron' else _CARDS.get(dialect, 'device')}"
    platform = config.get("env", {}).get("NEURON_PLATFORM_TARGET_OVERRIDE")
    return str(platform) if platform else None
