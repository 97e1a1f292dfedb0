"""Target configuration: ``kvbudget.toml`` or ``[tool.kvbudget]``, strictly decoded before anything starts."""

from __future__ import annotations

import os
import shlex
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec

from pytest_kvbudget.decoding import KeyedError, decoded, did_you_mean
from pytest_kvbudget.ledger.classes import CLASSES
from pytest_kvbudget.ledger.grammar.model import CompiledRow, Failure, Row
from pytest_kvbudget.ledger.notation import NotationError
from pytest_kvbudget.mock.spec import MockDevice
from pytest_kvbudget.shape import MemoryBytes, Shape
from pytest_kvbudget.units import GIB, MIB
from pytest_kvbudget.verdict import Phase

FILE_NAME: Final = "kvbudget.toml"

_Seconds = Annotated[float, msgspec.Meta(gt=0)]
_T = TypeVar("_T")


class ConfigError(Exception):
    """The configuration is wrong; the message names file, key, what was found and what was expected."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long to wait, in seconds, and how exact a clean device is, in bytes."""

    boot_seconds: _Seconds = 7200.0
    """From launch to ready, whatever the phases say."""
    phase_seconds: dict[Phase, _Seconds] = {}
    """Deadline of single phases; ``phase_default_seconds`` for the others."""
    phase_default_seconds: _Seconds = 3600.0
    settle_seconds: _Seconds = 15.0
    """How long an engine whose core died may take to leave by itself and finish its log."""
    stop_seconds: _Seconds = 75.0
    """From the first SIGTERM of a serving engine to SIGKILL (vLLM's own tests expect 15, 45 and 75 s)."""
    lease_seconds: _Seconds = 86_400.0
    release_seconds: _Seconds = 120.0
    """For device memory to come back after the engine is gone, or before a boot."""
    release_tolerance: MemoryBytes = 256 * MIB
    """Bytes above the idle level that still count as clean."""
    trace_hz: Annotated[float, msgspec.Meta(ge=1, le=100)] = 10.0
    """Samples of device memory per second."""
    min_free: MemoryBytes | None = None
    """Least free device memory per rank, from the launch to the teardown; less is MARGINAL."""
    max_used: MemoryBytes | None = None
    """Most used device memory per rank; more is FAIL."""
    max_growth: MemoryBytes | None = None
    """Most growth of used device memory per rank between ready and the end of the body; more is FAIL."""
    host_tolerance: MemoryBytes = 8 * GIB
    """Bytes of host memory that may be missing, or locked, beyond what was before this run's first boot."""
    idle_used: MemoryBytes = 2 * GIB
    """Bytes that a device may show as used before this run's first boot; more is somebody else's."""


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Something deployable: backend, launcher, devices and base shape."""

    backend: str
    launcher: str = "process"
    command: tuple[str, ...] | None = None
    """The engine's command without shape; a string is split as a shell would. Default: the backend's."""
    devices: tuple[int | str, ...] = ()
    """Devices the target may use, as the engine's visible-devices variable names them. Default: the backend's."""
    env: dict[str, str] = {}
    env_file: str | None = None
    """``NAME=value`` lines, relative to the configuration file; ``env`` wins over it."""
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """0 takes a free port for every boot."""
    shape: Shape = Shape()
    limits: Limits = Limits()
    mock: MockDevice | None = None

    def __repr__(self) -> str:
        # environment and command may hold secrets, and reprs end up in tracebacks
        return f"Target(backend={self.backend!r}, devices={self.devices!r}, shape={self.shape!r})"


class LinePattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A line of an engine that the built-in grammar does not know."""

    line: str
    """Plain text of the line, with ``{fact:kind}`` where it prints a figure."""
    phase: Phase | None = None
    """Boot phase that the line belongs to; nothing where it may stand anywhere."""
    failure_class: str | None = None
    """The line is a failure of this class."""


class LoadedTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A target with its name and where it was read from."""

    name: str
    target: Target
    origin: str
    """File and table, for messages: ``kvbudget.toml [target.r9700]``."""
    folder: str
    """Folder that relative paths of this target start from."""
    environment: dict[str, str]
    """``env_file`` and ``env`` together."""
    patterns: tuple[Row, ...] = ()
    """Lines that the configuration adds to the grammar of every engine."""

    def __repr__(self) -> str:
        return f"LoadedTarget(name={self.name!r}, origin={self.origin!r}, target={self.target!r})"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All targets of one configuration file, or the built-in simulated one."""

    path: str | None
    targets: dict[str, LoadedTarget]

    def pick(self, name: str | None, *, asked_by: str = "") -> LoadedTarget:
        """The target of that name, or the only one.

        Args:
            name: of the target.
            asked_by: option or key that names it, for messages.

        Raises:
            ConfigError: for an unknown name, or no name where there are several.
        """
        where = self.path or "the built-in configuration"
        known = ", ".join(sorted(self.targets))
        if name is None:
            if len(self.targets) == 1:
                return next(iter(self.targets.values()))
            raise ConfigError(f"{where}: has several targets ({known}); name one with --kvbudget-target")
        if name not in self.targets:
            asked = f" ({asked_by})" if asked_by else ""
            raise ConfigError(f"{where}: no target {name!r}{asked}; {did_you_mean(name, self.targets)}it has {known}")
        return self.targets[name]


BUILT_IN_NAME: Final = "mock-r9700"


def built_in(folder: Path) -> Config:
    """The configuration used when there is none: a simulated R9700 whose largest window is below the model's own.

    Card, utilization and KV price are the RDNA4 budget document's; the weights are made up so that the KV check, not
    the model, ends the ladder.
    """
    target = Target(
        backend="mock",
        devices=(0,),
        shape=Shape(
            model="simulated-moe-fp8",
            max_model_len=131_072,
            max_num_seqs=3,
            kv_cache_dtype="fp8",
            gpu_memory_utilization=0.98,
        ),
        mock=MockDevice(
            dialect="rdna4", weights=int(27.17 * GIB), kv_bytes_per_token=7_701, state_bytes_per_seq=2 * MIB
        ),
    )
    loaded = LoadedTarget(name=BUILT_IN_NAME, target=target, origin="built-in", folder=str(folder), environment={})
    return Config(path=None, targets={BUILT_IN_NAME: loaded})


def find(start: Path) -> Path | None:
    """The nearest configuration upward from ``start``: ``kvbudget.toml``, or ``pyproject.toml`` with our table.

    Raises:
        ConfigError: one folder has both.
    """
    for folder in (start, *start.parents):
        own, project = folder / FILE_NAME, folder / "pyproject.toml"
        has_table = project.is_file() and "kvbudget" in _read_toml(project).get("tool", {})
        if own.is_file() and has_table:
            raise ConfigError(f"{own} and [tool.kvbudget] in {project}: both are there; keep one")
        if own.is_file():
            return own
        if has_table:
            return project
    return None


def load(path: Path) -> Config:
    """Read and check a configuration file.

    Raises:
        ConfigError: for anything that is not exactly as expected.
    """
    raw, table = _read_tables(path)
    targets = raw.get("target", {})
    if not isinstance(targets, dict) or not targets:
        raise ConfigError(f"{path}: no target; expected at least one [{table}target.NAME] table")
    patterns = _load_patterns(path, raw, table)
    return Config(
        path=str(path),
        targets={
            name: _load_target(path, f"{table}target.{name}", name, body, patterns=patterns)
            for name, body in targets.items()
        },
    )


def _read_tables(path: Path) -> tuple[dict[str, Any], str]:
    """Our tables of a file, and what stands before their names in it."""
    raw = _read_toml(path)
    table = ""
    if path.name == "pyproject.toml":
        raw, table = raw.get("tool", {}).get("kvbudget", {}), "tool.kvbudget."
        if not isinstance(raw, dict):
            raise ConfigError(f"{path}: tool.kvbudget is {type(raw).__name__}; expected a table")
    unknown = sorted(set(raw) - {"target", "pattern"})
    if unknown:
        hint = did_you_mean(unknown[0], ("target", "pattern"))
        raise ConfigError(
            f"{path}: unknown key {table}{unknown[0]}; {hint}expected only [{table}target.NAME] and "
            f"[[{table}pattern]] tables"
        )
    return raw, table


def load_patterns(path: Path) -> tuple[Row, ...]:
    """Read the lines that a configuration file adds to the grammar; it need not have a target.

    Raises:
        ConfigError: for anything that is not exactly as expected.
    """
    return _load_patterns(path, *_read_tables(path))


def _load_patterns(path: Path, raw: dict[str, Any], table: str) -> tuple[Row, ...]:
    entries = raw.get("pattern", [])
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: {table}pattern is {type(entries).__name__}; expected [[{table}pattern]] tables")
    return tuple(_load_pattern(f"{path}: [[{table}pattern]] {number}", body) for number, body in enumerate(entries, 1))


def _load_pattern(where: str, body: object) -> Row:
    if not isinstance(body, dict):
        raise ConfigError(f"{where} is {type(body).__name__}; expected a table")
    entry = decode(body, LinePattern, where=where)
    failure = None
    if entry.failure_class is not None:
        if entry.failure_class not in CLASSES:
            hint = did_you_mean(entry.failure_class, CLASSES)
            raise ConfigError(
                f"{where} failure_class: {entry.failure_class!r} is none; {hint}expected {', '.join(sorted(CLASSES))}"
            )
        failure = Failure(failure_class=entry.failure_class, phase=entry.phase)
    row = Row(
        pattern=entry.line,
        literal=True,
        scope="rank",
        phase=None if failure is not None else entry.phase,
        failure=failure,
    )
    try:
        CompiledRow(row, None)
    except NotationError as error:
        raise ConfigError(f"{where} line: {error}") from None
    return row


def _load_target(path: Path, table: str, name: str, body: object, *, patterns: tuple[Row, ...] = ()) -> LoadedTarget:
    if not isinstance(body, dict):
        raise ConfigError(f"{path}: {table} is {type(body).__name__}; expected a table")
    target = decode(body, Target, where=f"{path}: [{table}]")
    if body.get("devices") == []:
        raise ConfigError(f"{path}: [{table}] devices: is empty; expected at least one, or no such key")
    named = [str(device) for device in target.devices]
    if len(set(named)) < len(named):
        raise ConfigError(f"{path}: [{table}] devices: {named} names a device twice; expected each once")
    environment: dict[str, str] = {}
    if target.env_file is not None:
        environment.update(_read_env_file(path.parent / target.env_file, f"{path}: [{table}] env_file"))
    environment.update(target.env)
    return LoadedTarget(
        name=name,
        target=target,
        origin=f"{path} [{table}]",
        folder=str(path.parent),
        environment=environment,
        patterns=patterns,
    )


def decode(raw: dict[str, Any], kind: type[_T], *, where: str) -> _T:
    """Decode a table into ``kind``, sizes written as text included.

    Raises:
        ConfigError: for an unknown key, a wrong type or an impossible value, naming ``where`` and the key.
    """
    if kind is Target and isinstance(raw.get("command"), str):
        try:
            raw = {**raw, "command": shlex.split(raw["command"])}
        except ValueError as error:
            raise ConfigError(
                f"{where} command: {raw['command']!r} cannot be split as a shell would: {error}"
            ) from None
    try:
        return decoded(raw, kind)
    except KeyedError as problem:
        raise ConfigError(f"{where} {problem.key}: {problem}" if problem.key else f"{where}: {problem}") from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None


def _read_env_file(path: Path, where: str) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {path} cannot be read: {error}") from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals or not name.strip().isidentifier():
            raise ConfigError(f"{where}: {path} line {number} is {line!r}; expected NAME=value")
        found[name.strip()] = value.strip().strip("'\"") if value.strip()[:1] in {"'", '"'} else value.strip()
    return found


def engine_environment(loaded: LoadedTarget, shape: Shape) -> dict[str, str]:
    """The environment an engine is started with: this process', the target's, the shape's, later ones winning."""
    return {**os.environ, **loaded.environment, **shape.env}
