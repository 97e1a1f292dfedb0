"""What ladders and headroom sweeps are asked for: arguments of their markers, checked. Values are whole numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, get_args

import msgspec

from pytest_kvbudget.search.knobs import KNOBS, TICKS, Knob, Side
from pytest_kvbudget.search.model import Axis
from pytest_kvbudget.search.strategies import STRATEGIES, SWEEP_STRATEGIES
from pytest_kvbudget.units import GIB, MIB, SizeError, parse_memory, parse_size

AxisName = Literal[
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "gpu_memory_utilization"
]
AXES: Final[tuple[str, ...]] = get_args(AxisName)
FRACTIONS: Final = frozenset({"gpu_memory_utilization", "kv_cap_fraction"})
"""Axes and knobs whose values are fractions; they are counted in ten-thousandths."""
SIZES: Final = frozenset({"kv_cache_memory_bytes", "reserved_headroom", "cudagraph_per_graph"})
LARGEST: Final = 2**48
"""Of any number of a ladder: 256 TiB, or as many tokens."""
DEFAULT_QUANTUM: Final = {
    "max_model_len": 4096,  # the bonus step of the RDNA4 document's ladder
    "max_num_seqs": 1,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": MIB,
    "gpu_memory_utilization": 0.01,
}
"""As people write it."""
DEFAULT_ENDS: Final[Mapping[str, tuple[int | None, int | None]]] = {
    "reserved_headroom": (0, 36 * GIB),  # the HBM stack of a Trainium 3, the largest there is
    "kv_cap_fraction": (TICKS // 100, TICKS),
    "gpu_memory_utilization": (TICKS // 2, TICKS),
    "kv_cache_memory_bytes": (None, None),
    "cudagraph_per_graph": (0, 64 * MIB),  # the RDNA4 fork charges 52 MiB by itself
}
"""Ends of a sweep where its marker names none.

No lower end: one step. No upper end: the marker has to name it, or the shape pins it.
"""


class SpecError(Exception):
    """A marker's argument is wrong; the message names it, what was found and what is accepted."""


class LadderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A ladder as its marker asks for it. ``start``, ``floor`` and ``quantum`` are in the axis' whole numbers."""

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
    verify: Literal["neighbours"] | None = None

    @property
    def name(self) -> str:
        """What it moves."""
        return self.axis

    @property
    def rungs(self) -> Axis:
        """The axis with its rungs."""
        scale = TICKS if self.axis in FRACTIONS else 1
        return Axis(name=self.axis, floor=self.floor, ceiling=self.start, quantum=self.quantum, scale=scale)


class SweepSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A headroom sweep as its marker asks for it; values are the knob's whole numbers, see `Knob.value`."""

    name: str
    """Of the knob."""
    floor: int
    ceiling: int | None
    """``None``: the shape's own value."""
    step: int
    fine_step: int | None = None
    start: int | None = None
    strategy: str | None = None
    windows: int = 1
    confirm: int = 1
    classes: dict[str, Side] = {}
    """Sides of failure classes that only the user knows."""

    @property
    def knob(self) -> Knob:
        """What is turned."""
        return KNOBS[self.name]


def check_spec(arguments: Mapping[str, Any]) -> LadderSpec:
    """Check a ladder marker's keyword arguments.

    Raises:
        SpecError: naming the argument, what was found and what is accepted.
    """
    _known(arguments, LadderSpec.__struct_fields__)
    axis = _one_of("axis", arguments.get("axis", "max_model_len"), AXES)
    for name in ("start", "floor"):
        if name not in arguments:
            raise SpecError(f"{name} is missing; a ladder needs start (its ceiling) and floor")
    numbers = {
        name: _number(name, arguments.get(name, default), axis, least=1)
        for name, default in (("start", None), ("floor", None), ("quantum", DEFAULT_QUANTUM[axis]))
    }
    numbers |= {name: _whole(name, arguments.get(name, default), least) for name, default, least in _COUNTS}
    strategy = _strategy(arguments.get("strategy"), STRATEGIES)
    words = {
        name: _one_of(name, arguments[name], accepted)
        for name, accepted in _WORDS.items()
        if name in arguments and (arguments[name] is not None or name == "pool")
    }
    spec = msgspec.convert({"strategy": strategy, "axis": axis, **words, **numbers}, LadderSpec)
    try:
        _ = spec.rungs
    except ValueError as error:
        raise SpecError(str(error)) from None
    if spec.first is not None and strategy not in {None, "predict"}:
        raise SpecError(f"first={spec.first!r} with strategy={strategy!r}; first is for strategy 'predict'")
    if spec.pool == "scaled" and axis not in {"max_model_len", "max_num_seqs"}:
        raise SpecError(f"pool='scaled' with axis={axis!r}; a pool scales with max_model_len or max_num_seqs")
    return spec


_COUNTS: Final = (("windows", 1, 1), ("confirm", 0, 0))
_WORDS: Final = {"pool": ("fixed", "scaled"), "first": ("ceiling",), "verify": ("neighbours",)}


def check_stack(specs: Sequence[LadderSpec]) -> None:
    """Check ladders that are stacked on one function.

    Raises:
        SpecError: two of them move the same axis.
    """
    axes = [spec.axis for spec in specs]
    twice = next((axis for axis in axes if axes.count(axis) > 1), None)
    if twice is not None:
        raise SpecError(f"{axes.count(twice)} ladders move {twice}; ladders on one function each move another axis")


SWEEP_ARGUMENTS: Final = (
    *("knob", "start", "step", "fine_step", "floor", "ceiling", "strategy", "windows", "confirm", "classes"),
)


def check_sweep(arguments: Mapping[str, Any]) -> SweepSpec:
    """Check a sweep marker's keyword arguments.

    Raises:
        SpecError: naming the argument, what was found and what is accepted.
    """
    _known(arguments, SWEEP_ARGUMENTS)
    if "knob" not in arguments:
        raise SpecError(f"knob is missing; accepted are {', '.join(map(repr, KNOBS))}")
    name = _one_of("knob", arguments["knob"], tuple(KNOBS))
    knob = KNOBS[name]
    floor, ceiling = DEFAULT_ENDS[name]
    given = {
        argument: _number(argument, arguments[argument], name, least=least)
        for argument, least in (("floor", 0), ("ceiling", 1), ("start", 0), ("step", 1), ("fine_step", 1))
        if arguments.get(argument) is not None
    }
    spec = SweepSpec(
        name=name,
        floor=given.get("floor", _least(given, knob) if floor is None else floor),
        ceiling=given.get("ceiling", ceiling),
        step=given.get("step", knob.default_step),
        fine_step=given.get("fine_step"),
        start=given.get("start"),
        strategy=_strategy(arguments.get("strategy"), SWEEP_STRATEGIES),
        windows=_whole("windows", arguments.get("windows", 1), 1),
        confirm=_whole("confirm", arguments.get("confirm", 1), 0),
        classes=_classes(arguments.get("classes", {})),
    )
    _ordered(spec)
    return spec


def _least(given: Mapping[str, int], knob: Knob) -> int:
    """One step, so that the grid has the multiples of it; less where start or ceiling are."""
    named = (given[name] for name in ("start", "ceiling") if name in given)
    return min((given.get("step", knob.default_step), *named))


def _ordered(spec: SweepSpec) -> None:
    show = spec.knob.show
    if spec.ceiling is not None and spec.floor > spec.ceiling:
        raise SpecError(f"floor is {show(spec.floor)} and ceiling is {show(spec.ceiling)}; expected floor below it")
    if spec.start is not None and (spec.start < spec.floor or (spec.ceiling is not None and spec.start > spec.ceiling)):
        most = "the ceiling" if spec.ceiling is None else show(spec.ceiling)
        raise SpecError(f"start is {show(spec.start)}; expected {show(spec.floor)} to {most}")
    if spec.fine_step is not None and spec.fine_step >= spec.step:
        raise SpecError(f"fine_step is {show(spec.fine_step)}; expected below step, {show(spec.step)}")
    if spec.fine_step is not None and spec.step % spec.fine_step:
        raise SpecError(
            f"fine_step is {show(spec.fine_step)}, and step is {show(spec.step)}; expected a whole number of fine "
            "steps in a step, so that both grids meet"
        )


def _classes(value: object) -> dict[str, Side]:
    try:
        return msgspec.convert(value, dict[str, Side])
    except msgspec.ValidationError:
        raise SpecError(
            f"classes={value!r}; expected failure classes with 'allocation' or 'minimum_kv' each, as in "
            "{'my_oom': 'allocation'}"
        ) from None


def number_of(text: str, name: str) -> int:
    """A value as people write it for an axis or knob, in its whole numbers: ``0.97``, ``"4 GiB"``, ``245760``.

    Raises:
        SpecError: naming the axis, what was found and what is accepted.
    """
    value: object = int(text) if name not in SIZES and text.replace("_", "").isdecimal() else text
    # a row shows its bytes without a unit, and what it shows is what a person copies
    return _number(name, value, name, least=0, read_size=parse_size)


def _known(arguments: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in arguments:
        if name not in known:
            raise SpecError(f"unknown argument {name!r}; accepted are {', '.join(known)}")


def _one_of(name: str, value: object, accepted: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in accepted:
        raise SpecError(f"{name}={value!r}; accepted are {', '.join(map(repr, accepted))}")
    return value


def _strategy(value: object, accepted: Mapping[str, object]) -> str | None:
    return None if value is None else _one_of("strategy", value, tuple(accepted))


def _number(
    argument: str, value: object, name: str, *, least: int, read_size: Callable[[object], int] = parse_memory
) -> int:
    """A value of an axis or knob in whole numbers."""
    if name in FRACTIONS:
        return _fraction(argument, value)
    if name in SIZES:
        try:
            value = read_size(value)
        except SizeError as error:
            raise SpecError(f"{argument}: {error}") from None
    return _whole(argument, value, least)


def _fraction(argument: str, value: object) -> int:
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else -1.0
    except ValueError:
        number = -1.0
    ticks = round(number * TICKS) if 0 < number <= 1 else 0
    if ticks < 1 or abs(number * TICKS - ticks) > 1e-6:
        raise SpecError(f"{argument}={value!r}; expected a fraction above 0 and up to 1, of at most four decimals")
    return ticks


def _whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
        raise SpecError(f"{name}={value!r}; expected a whole number from {least} to {LARGEST:,}")
    return value
