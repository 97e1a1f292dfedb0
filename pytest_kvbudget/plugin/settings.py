"""Options, ini keys and configuration file together: what a run was asked to do, checked before anything starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_kvbudget.climb import DEFAULT_STRATEGY
from pytest_kvbudget.config import Config, ConfigError, LoadedTarget, built_in, find, load
from pytest_kvbudget.engine.backends.registry import backend_of, launcher_of
from pytest_kvbudget.plugin.paths import archive_folder, path_option, test_folders
from pytest_kvbudget.search.strategies import STRATEGIES
from pytest_kvbudget.units import SizeError, parse_size


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run was asked to do."""

    loaded: LoadedTarget
    config_path: str | None
    """The configuration file; ``None`` for the built-in simulated target."""
    archive: Path
    strategy: str
    rung: int | None
    leave_serving: bool
    simulated: bool


def read_settings(config: pytest.Config) -> Settings:
    """Read and check everything that can be checked without starting anything.

    Raises:
        pytest.UsageError: naming option or file and key, what was found and what was expected.
    """
    option = config.option
    try:
        found = _configuration(config)
        loaded = found.pick(_value(config, "target"))
        simulated = backend_of(loaded).simulated
        launcher_of(loaded, run="")
    except ConfigError as error:
        raise pytest.UsageError(f"kvbudget: {error}") from None
    if simulated and (option.kvbudget_require_hardware or config.getini("kvbudget_require_hardware")):
        where = found.path or "no configuration was found, so the built-in one is used"
        raise pytest.UsageError(
            f"kvbudget: target {loaded.name} is simulated ({where}) and --kvbudget-require-hardware is set; "
            "name a target of real hardware with --kvbudget-target"
        )
    strategy = _value(config, "strategy") or DEFAULT_STRATEGY
    if strategy not in STRATEGIES:
        accepted = ", ".join(STRATEGIES)
        raise pytest.UsageError(f"kvbudget: --kvbudget-strategy is {strategy!r}; expected one of {accepted}")
    if option.kvbudget_leave_serving and option.kvbudget_rung:
        raise pytest.UsageError(
            "kvbudget: --kvbudget-leave-serving leaves the winner of a whole ladder; --kvbudget-rung finds none"
        )
    archive = archive_folder(config)
    _check_archive(archive)
    return Settings(
        loaded=loaded,
        config_path=found.path,
        archive=archive,
        strategy=strategy,
        rung=_rung(option.kvbudget_rung),
        leave_serving=option.kvbudget_leave_serving,
        simulated=simulated,
    )


def _check_archive(archive: Path) -> None:
    """Nothing is created yet; what cannot be created later is an error now."""
    nearest = next(path for path in (archive, *archive.parents) if path.exists() or path.is_symlink())
    if not nearest.is_dir():
        problem = f"{nearest} is no folder"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        problem = f"{nearest} cannot be written to"
    else:
        return
    raise pytest.UsageError(f"kvbudget: --kvbudget-archive: {archive} cannot hold records: {problem}")


def _configuration(config: pytest.Config) -> Config:
    path = path_option(config, "config")
    if path is not None and not path.is_file():
        raise ConfigError(f"--kvbudget-config: {path} is not a file")
    if path is None:
        path = _nearest(config)
    return built_in(config.invocation_params.dir) if path is None else load(path)


def _nearest(config: pytest.Config) -> Path | None:
    """The configuration nearest to the tests.

    Raises:
        ConfigError: tests of two configurations were given.
    """
    folders = test_folders(config)
    nearest = {path for folder in folders if (path := find(folder)) is not None}
    if len(nearest) > 1:
        both = " and ".join(sorted(map(str, nearest)))
        raise ConfigError(f"the tests given belong to two configurations, {both}; name one with --kvbudget-config")
    if nearest:
        return nearest.pop()
    return find(Path(os.path.commonpath(folders)))


def _value(config: pytest.Config, name: str) -> str | None:
    value: str | None = getattr(config.option, f"kvbudget_{name}") or config.getini(f"kvbudget_{name}") or None
    return value


def _rung(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_size(text)
    except SizeError as error:
        raise pytest.UsageError(f"kvbudget: --kvbudget-rung: {error}") from None
