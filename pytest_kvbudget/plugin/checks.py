"""Arguments of our markers, checked when tests are collected, before anything starts."""

from __future__ import annotations

import unittest
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
import pytest

from pytest_kvbudget.climb import LadderSpec, SpecError, check_spec
from pytest_kvbudget.config import ConfigError, decode
from pytest_kvbudget.engine.soak import SoakSpec
from pytest_kvbudget.engine.survival import DEFAULT_HOLD, SurvivalSpec
from pytest_kvbudget.plugin import BOOTING, MARKERS, SESSION_FIXTURE
from pytest_kvbudget.search.bracket import rung_of
from pytest_kvbudget.shape import Shape, SizeBytes


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
    min_free: SizeBytes | None = None
    max_used: SizeBytes | None = None
    max_growth: SizeBytes | None = None
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
    max_growth_per_hour: SizeBytes | None = None

    @property
    def spec(self) -> SoakSpec:
        """The traffic."""
        return SoakSpec(
            requests=self.requests,
            seconds=None if self.minutes is None else self.minutes * 60,
            concurrency=self.concurrency,
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
        for check in (
            _only_once,
            ladder_of,
            boot_gate_of,
            knife_edge_of,
            soak_of,
            _parity,
            shape_changes,
            _boots_something,
        ):
            try:
                check(item)
            except MarkerError as error:
                lines[f"{name}: {error}"] = None
    return list(lines)


def _only_once(item: pytest.Item) -> None:
    """Of two marks of a name at one place one would be silently ignored; the closer of two places wins.

    Raises:
        MarkerError: naming the mark.
    """
    for node in item.listchain():
        names = [mark.name for mark in node.own_markers]
        for name in BOOTING:
            if names.count(name) > 1:
                raise MarkerError(f"{names.count(name)} marks @pytest.mark.{name}; one test has one, write a test each")


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


def ladder_of(item: pytest.Item) -> LadderSpec | None:
    """The ladder a test asks for.

    Raises:
        MarkerError: for a wrong argument.
    """
    mark = item.get_closest_marker("ladder")
    if mark is None:
        return None
    try:
        return check_spec(_keywords(mark))
    except SpecError as error:
        raise MarkerError(f"@pytest.mark.ladder: {error}") from None


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
        f"--kvbudget-rung {value} is no rung of {test}: {axis.name} from {axis.ceiling} down to {axis.floor} by "
        f"{axis.quantum}; the nearest is {nearest}"
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
        MarkerError: for an unknown field, a wrong type or an impossible value.
    """
    try:
        shape = decode(dict(fields), Shape, where=where)
    except ConfigError as error:
        raise MarkerError(str(error)) from None
    return {name: getattr(shape, name) for name in fields}


def _keywords(mark: pytest.Mark) -> Mapping[str, Any]:
    if mark.args:
        accepted = MARKERS[mark.name].partition(":")[0]
        raise MarkerError(f"@pytest.mark.{mark.name}: takes keyword arguments only, got {mark.args[0]!r}: {accepted}")
    return mark.kwargs


_CHECKS: Final = (
    *(_only_once, ladder_of, boot_gate_of, knife_edge_of, soak_of, _parity, shape_changes),
    _boots_something,
)
