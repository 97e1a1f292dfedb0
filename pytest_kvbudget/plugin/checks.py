"""Arguments of our markers, checked when tests are collected, before anything starts."""

from __future__ import annotations

import unittest
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
import pytest

from pytest_kvbudget.config import ConfigError, decode
from pytest_kvbudget.engine.backends.flags import check_extra_args
from pytest_kvbudget.engine.soak import SoakSpec
from pytest_kvbudget.engine.survival import DEFAULT_HOLD, SurvivalSpec
from pytest_kvbudget.plugin import BOOTING, MARKERS, SEARCHES, SESSION_FIXTURE
from pytest_kvbudget.search.bracket import rung_of
from pytest_kvbudget.shape import MemoryBytes, Shape
from pytest_kvbudget.specs import LadderSpec, SpecError, SweepSpec, check_spec, check_stack, check_sweep, number_of


@dataclass(frozen=True)
class BootGate:
    """What ``boot_gate`` asks of the engine's own count of its KV cache."""

    windows: int = 1
    min_tokens: int | None = None


_Count = Annotated[int, msgspec.Meta(ge=1)]


class KnifeEdge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``knife_edge`` asks: the largest real request, and what must be left of device memory."""

    prompt_tokens: _Count = 16
    max_tokens: _Count | None = None
    min_free: MemoryBytes | None = None
    max_used: MemoryBytes | None = None
    max_growth: MemoryBytes | None = None
    hold: _Count = DEFAULT_HOLD
    prefill: bool = True
    concurrency: _Count = 1
    timeout: Annotated[float, msgspec.Meta(gt=0)] = 1800.0

    @property
    def spec(self) -> SurvivalSpec:
        """The requests to send."""
        return SurvivalSpec(
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
            hold=self.hold,
            prefill=self.prefill,
            concurrency=self.concurrency,
            timeout_s=self.timeout,
        )


class KvSoak(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``kv_soak`` asks: how much mixed traffic, and how much device memory may grow under it."""

    requests: _Count | None = None
    minutes: Annotated[float, msgspec.Meta(gt=0)] | None = None
    concurrency: _Count = 4
    max_growth_per_hour: MemoryBytes | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    """Seconds for one request."""

    @property
    def spec(self) -> SoakSpec:
        """The traffic."""
        return SoakSpec(
            requests=self.requests,
            seconds=None if self.minutes is None else self.minutes * 60,
            concurrency=self.concurrency,
            request_s=self.timeout,
        )


class MarkerError(Exception):
    """A marker's argument is wrong; the message names it, what was found and what is accepted."""


def problems(items: Iterable[pytest.Function]) -> list[str]:
    """One line per wrong marker, naming test, marker and argument; each marked function once."""
    lines: dict[str, None] = {}
    for item in items:
        name = item.nodeid.partition("[")[0]
        if item.cls is not None and issubclass(item.cls, unittest.TestCase):
            lines[
                f"{name}: is a method of unittest.TestCase, which gets no fixtures; write a function or a plain class"
            ] = None
            continue
        for check in _CHECKS:
            try:
                check(item)
            except MarkerError as error:
                lines[f"{name}: {error}"] = None
    return list(lines)


def _only_once(item: pytest.Item) -> None:
    """Of two marks of a name at one place one would be silently ignored; the closer of two places wins.

    Ladders of a function are climbed one after the other, see `ladders_of`.

    Raises:
        MarkerError: naming the mark.
    """
    for node in item.listchain():
        names = [mark.name for mark in node.own_markers]
        stacks = "ladder" if node is item else None
        for name in BOOTING:
            if name != stacks and names.count(name) > 1:
                raise MarkerError(f"{names.count(name)} marks @pytest.mark.{name}; one test has one, write a test each")
    if all(item.get_closest_marker(name) is not None for name in SEARCHES):
        raise MarkerError("@pytest.mark.ladder and @pytest.mark.headroom_sweep on one test; write a test each")


def _boots_something(item: pytest.Item) -> None:
    """A shape on a test that boots nothing would be a promise that nobody keeps.

    A shape of the whole module or class may meet tests that need none.

    Raises:
        MarkerError: the test has a shape of its own and neither a mark nor a fixture of ours that boots.
    """
    if (
        any(mark.name == "kv_shape" for mark in item.own_markers)
        and SESSION_FIXTURE not in getattr(item, "fixturenames", ())
        and not any(item.get_closest_marker(name) for name in BOOTING)
    ):
        raise MarkerError(
            "@pytest.mark.kv_shape: nothing of this test boots an engine; add @pytest.mark.boot_gate or ask for a "
            "fixture such as kv_engine"
        )


def _agrees_with_itself(item: pytest.Item) -> None:
    """Two marks of one test that say different things about one number: one of them would be silently ignored.

    Raises:
        MarkerError: naming both.
    """
    ladders = ladders_of(item)
    moved = {spec.axis for spec in ladders if spec.pool == "fixed"}
    for mark in item.own_markers:
        twice = sorted(moved & set(mark.kwargs)) if mark.name == "kv_shape" else []
        if twice:
            raise MarkerError(
                f"@pytest.mark.kv_shape sets {twice[0]}, and @pytest.mark.ladder moves it from rung to rung; leave it "
                "out"
            )
    gate = item.get_closest_marker("boot_gate")
    search = next((mark for mark in item.own_markers if mark.name in SEARCHES and "windows" in mark.kwargs), None)
    if (
        gate is not None
        and search is not None
        and gate.kwargs.get("windows", search.kwargs["windows"]) != (promised := search.kwargs["windows"])
    ):
        raise MarkerError(
            f"@pytest.mark.{search.name}(windows={promised}) and @pytest.mark.boot_gate(windows="
            f"{gate.kwargs['windows']}): a rung holds one number of windows; give it once"
        )


def ladders_of(item: pytest.Item) -> tuple[LadderSpec, ...]:
    """The ladders a test asks for, in the order in which they are climbed: the top decorator first.

    Only those of the function itself stack; of a class or module there is one, and the closest counts.

    Raises:
        MarkerError: for a wrong argument.
    """
    marks = [mark for mark in item.own_markers if mark.name == "ladder"]
    closest = item.get_closest_marker("ladder")
    if not marks and closest is not None:
        marks = [closest]
    try:
        # the decorator next to the function is the first of its marks
        specs = tuple(check_spec(_keywords(mark)) for mark in reversed(marks))
        check_stack(specs)
    except SpecError as error:
        raise MarkerError(f"@pytest.mark.ladder: {error}") from None
    return specs


def sweep_of(item: pytest.Item) -> SweepSpec | None:
    """The headroom sweep a test asks for.

    Raises:
        MarkerError: for a wrong argument.
    """
    mark = item.get_closest_marker("headroom_sweep")
    if mark is None:
        return None
    try:
        return check_sweep(_keywords(mark))
    except SpecError as error:
        raise MarkerError(f"@pytest.mark.headroom_sweep: {error}") from None


def specs_of(item: pytest.Item) -> tuple[LadderSpec | SweepSpec, ...]:
    """What a test searches for, one after the other.

    Raises:
        MarkerError: for a wrong argument.
    """
    sweep = sweep_of(item)
    return ladders_of(item) if sweep is None else (sweep,)


class OneRung(msgspec.Struct, frozen=True, kw_only=True):
    """The rung that was asked for alone."""

    spec: LadderSpec | SweepSpec
    value: int
    """In the whole numbers of its axis or knob."""
    fixed: dict[str, int | float]
    """Settings of the other axes of a stack."""


def one_rung(specs: Sequence[LadderSpec | SweepSpec], text: str, test: str) -> OneRung:
    """The rung that ``--kvbudget-rung`` asks for: a value, or for stacked ladders a label as their rows show it.

    Raises:
        MarkerError: naming test, rungs and what is accepted.
    """
    by_name = {spec.name: spec for spec in specs}
    if "=" not in text and len(specs) > 1:
        named = ",".join(f"{name}=VALUE" for name in by_name)
        raise MarkerError(f"--kvbudget-rung {text}: {test} has {len(specs)} ladders; name each axis: {named}")
    parts = dict(part.split("=", 1) for part in text.split(",")) if "=" in text else {specs[-1].name: text}
    unknown = next((name for name in parts if name not in by_name), None)
    if unknown is not None:
        raise MarkerError(f"--kvbudget-rung {text}: {test} moves {', '.join(by_name)}, not {unknown}")
    values = {name: _rung(by_name[name], number, test) for name, number in parts.items()}
    *others, last = values.items()
    return OneRung(
        spec=by_name[last[0]],
        value=last[1],
        fixed={name: _setting(by_name[name], value) for name, value in others},
    )


def _rung(spec: LadderSpec | SweepSpec, text: str, test: str) -> int:
    try:
        value = number_of(text, spec.name)
    except SpecError as error:
        raise MarkerError(f"--kvbudget-rung: {error}") from None
    if isinstance(spec, LadderSpec):
        check_rung(spec, value, test)
    return value


def _setting(spec: LadderSpec | SweepSpec, value: int) -> int | float:
    return spec.rungs.setting(value) if isinstance(spec, LadderSpec) else spec.knob.setting(value)


def check_rung(spec: LadderSpec, value: int, test: str) -> None:
    """Check that a rung which was asked for alone is one of a ladder's.

    Raises:
        MarkerError: naming ladder, rungs and the nearest one.
    """
    axis = spec.rungs
    if rung_of(axis, value) is not None:
        return
    below = max(0, axis.index_at_or_below(value))
    around = {axis.value(index) for index in (below, min(below + 1, len(axis) - 1))}
    nearest = min(around, key=lambda rung: abs(rung - value))
    raise MarkerError(
        f"--kvbudget-rung {axis.setting(value)} is no rung of {test}: {axis.name} from {axis.setting(axis.ceiling)} "
        f"down to {axis.setting(axis.floor)} by {axis.setting(axis.quantum)}; the nearest is {axis.setting(nearest)}"
    )


def boot_gate_of(item: pytest.Item) -> BootGate | None:
    """The gate a test asks for.

    Raises:
        MarkerError: for a wrong argument.
    """
    mark = item.get_closest_marker("boot_gate")
    if mark is None:
        return None
    for name, value in _keywords(mark).items():
        if name not in {"windows", "min_tokens"}:
            raise MarkerError(f"@pytest.mark.boot_gate: unknown argument {name!r}; accepted are windows, min_tokens")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise MarkerError(f"@pytest.mark.boot_gate: {name}={value!r}; expected a whole number of 1 or more")
    return BootGate(**mark.kwargs)


def knife_edge_of(item: pytest.Item) -> KnifeEdge | None:
    """The survival check a test asks for.

    Raises:
        MarkerError: for a wrong argument.
    """
    mark = item.get_closest_marker("knife_edge")
    return None if mark is None else knife_edge(_keywords(mark), where="@pytest.mark.knife_edge:")


def knife_edge(arguments: Mapping[str, Any], *, where: str) -> KnifeEdge:
    """A survival check from its arguments.

    Raises:
        MarkerError: for an unknown argument, a wrong type or an impossible value.
    """
    __tracebackhide__ = True
    try:
        return decode(dict(arguments), KnifeEdge, where=where)
    except ConfigError as error:
        raise MarkerError(str(error)) from None


def soak_of(item: pytest.Item) -> KvSoak | None:
    """The soak a test asks for.

    Raises:
        MarkerError: for a wrong argument, or none that ends it.
    """
    mark = item.get_closest_marker("kv_soak")
    if mark is None:
        return None
    where = "@pytest.mark.kv_soak:"
    try:
        asked = decode(dict(_keywords(mark)), KvSoak, where=where)
    except ConfigError as error:
        raise MarkerError(str(error)) from None
    if asked.requests is None and asked.minutes is None:
        raise MarkerError(f"{where} neither requests nor minutes; give one of them, or both, so that it ends")
    return asked


def _parity(item: pytest.Item) -> None:
    mark = item.get_closest_marker("compile_parity")
    if mark is not None and (mark.args or mark.kwargs):
        raise MarkerError("@pytest.mark.compile_parity: takes no arguments")


def shape_changes(item: pytest.Item) -> dict[str, Any]:
    """What a test's ``kv_shape`` marks change, the closest mark winning; ``env`` of all marks together.

    Raises:
        MarkerError: for a wrong argument.
    """
    changes: dict[str, Any] = {}
    for mark in reversed(list(item.iter_markers("kv_shape"))):
        found = decode_shape(_keywords(mark), where="@pytest.mark.kv_shape:")
        if "env" in found:
            found["env"] = {**changes.get("env", {}), **found["env"]}
        changes.update(found)
    return changes


def decode_shape(fields: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Fields of a shape as people write them, decoded: sizes as text become bytes.

    Raises:
        MarkerError: for an unknown field, a wrong type, an impossible value or flags that the shape renders itself.
    """
    __tracebackhide__ = True
    try:
        shape = decode(dict(fields), Shape, where=where)
        check_extra_args(shape.extra_args, where=f"{where} extra_args")
    except ConfigError as error:
        raise MarkerError(str(error)) from None
    return {name: getattr(shape, name) for name in fields}


def _keywords(mark: pytest.Mark) -> Mapping[str, Any]:
    if mark.args:
        accepted = MARKERS[mark.name].partition(":")[0]
        raise MarkerError(f"@pytest.mark.{mark.name}: takes keyword arguments only, got {mark.args[0]!r}: {accepted}")
    return mark.kwargs


_CHECKS: Final = (
    *(_only_once, specs_of, boot_gate_of, knife_edge_of, soak_of, _parity, shape_changes),
    _agrees_with_itself,
    _boots_something,
)
