"""Options, ini keys and configuration file together: what a run was asked to do, checked before anything starts."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Final

import pytest

from pytest_kvbudget.config import Config, ConfigError, LoadedTarget, built_in, find, load
from pytest_kvbudget.decoding import did_you_mean
from pytest_kvbudget.engine.backends.registry import backend_of, launcher_of
from pytest_kvbudget.plugin.paths import archive_folder, path_option, source_of, test_folders
from pytest_kvbudget.question import DEFAULT_STRATEGY
from pytest_kvbudget.search.strategies import STRATEGIES
from pytest_kvbudget.units import SizeError, parse_size

_SEPARATED: Final = re.compile(r"(?<!\d)\d{1,3}(?:,\d{3})+(?![\d,])")
"""A number as findings and tables write it: ``241,664``."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run was asked to do."""

    loaded: LoadedTarget
    config_path: str | None
    """The configuration file; ``None`` for the built-in simulated target."""
    archive: Path
    strategy: str
    rung: str | None
    """The one rung to boot, as its ladder's or sweep's marker reads it."""
    leave_serving: bool
    resume: bool
    """Finished boots of earlier runs count."""
    max_boots: int | None
    """Most boots of each ladder or sweep."""
    until: datetime | None
    """When to stop starting boots; local time, with its zone."""
    simulated: bool


def read_settings(config: pytest.Config) -> Settings:
    """Read and check everything that can be checked without starting anything.

    Raises:
        pytest.UsageError: naming option or file and key, what was found and what was expected.
    """
    option = config.option
    try:
        found = _configuration(config)
        loaded = found.pick(_value(config, "target"), asked_by=source_of(config, "target"))
        simulated = backend_of(loaded).simulated
        launcher_of(loaded, run="")
    except ConfigError as error:
        raise pytest.UsageError(f"kvbudget: {error}") from None
    if simulated and (option.kvbudget_require_hardware or config.getini("kvbudget_require_hardware")):
        where = found.path or "no configuration was found, so the built-in one is used"
        required = source_of(config, "require_hardware")
        raise pytest.UsageError(
            f"kvbudget: target {loaded.name} is simulated ({where}) and {required} is set; "
            "name a target of real hardware with --kvbudget-target"
        )
    strategy = _value(config, "strategy") or DEFAULT_STRATEGY
    if strategy not in STRATEGIES:
        source, accepted = source_of(config, "strategy"), ", ".join(STRATEGIES)
        hint = did_you_mean(strategy, STRATEGIES)
        raise pytest.UsageError(f"kvbudget: {source} is {strategy!r}; {hint}expected one of {accepted}")
    if option.kvbudget_leave_serving and option.kvbudget_rung:
        raise pytest.UsageError(
            "kvbudget: --kvbudget-leave-serving leaves the winner of a whole ladder; --kvbudget-rung finds none"
        )
    archive = archive_folder(config)
    _check_archive(archive, source_of(config, "archive"))
    return Settings(
        loaded=loaded,
        config_path=found.path,
        archive=archive,
        strategy=strategy,
        rung=_rung(option.kvbudget_rung),
        leave_serving=option.kvbudget_leave_serving,
        resume=option.kvbudget_resume,
        max_boots=_max_boots(option.kvbudget_max_boots),
        until=_until(config),
        simulated=simulated,
    )


def _check_archive(archive: Path, source: str) -> None:
    """Nothing is created yet; what cannot be created later is an error now."""
    nearest = next(path for path in (archive, *archive.parents) if path.exists() or path.is_symlink())
    if not nearest.is_dir():
        problem = f"{nearest} is no folder"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        problem = f"{nearest} cannot be written to"
    else:
        return
    raise pytest.UsageError(f"kvbudget: {source}: {archive} cannot hold records: {problem}")


def _configuration(config: pytest.Config) -> Config:
    path = path_option(config, "config")
    if path is not None and not path.is_file():
        raise ConfigError(f"{source_of(config, 'config')}: {path} is not a file")
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


def misplaced(config: pytest.Config, settings: Settings, items: Iterable[pytest.Item]) -> dict[str, str]:
    """Tests whose own nearest configuration is not the one of this run: by node id, what is wrong and what to do.

    Which configuration a run uses is known from its arguments, before anything is collected; the tests may lie deeper.
    """
    if path_option(config, "config") is not None:
        return {}
    found: dict[Path, str | None] = {}
    wrong = {}
    for item in items:
        folder = item.path.parent
        if folder not in found:
            found[folder] = _own(folder.resolve(), settings)
        if (said := found[folder]) is not None:
            wrong[item.nodeid] = f"{item.nodeid} {said}"
    return wrong


def _own(folder: Path, settings: Settings) -> str | None:
    try:
        nearest = find(folder)
    except ConfigError as error:
        return f"has no configuration: {error}"
    if nearest is None or str(nearest) == settings.config_path:
        return None
    used = settings.config_path or f"the built-in simulated target {settings.loaded.name}, as none was found from there"
    return (
        f"belongs to {nearest}, and this run's arguments lead to {used}; run the tests of each configuration on their "
        f"own, as in: pytest {nearest.parent}, or name one for all with --kvbudget-config"
    )


def _value(config: pytest.Config, name: str) -> str | None:
    value: str | None = getattr(config.option, f"kvbudget_{name}") or config.getini(f"kvbudget_{name}") or None
    return value


def _rung(text: str | None) -> str | None:
    """A value or a label, without thousands separators; whether it is a rung, its ladder tells."""
    # In a label a comma is followed by a name.
    text = None if text is None else _SEPARATED.sub(lambda number: number[0].replace(",", ""), text)
    for part in [] if text is None else text.split(","):
        value = part.rpartition("=")[2]
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (number >= 0 or _is_size(value)):
            raise pytest.UsageError(
                f"kvbudget: --kvbudget-rung: {value!r} is no value; expected a number, a size such as '4 GiB', or a "
                "label as rows show it, such as max_num_seqs=4,max_model_len=65536"
            )
    return text or None


def _is_size(text: str) -> bool:
    try:
        parse_size(text)
    except SizeError:
        return False
    return True


def _max_boots(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise pytest.UsageError(f"kvbudget: --kvbudget-max-boots is {text!r}; expected a whole number of 1 or more")
    return int(text)


def _until(config: pytest.Config) -> datetime | None:
    """The time is resolved once: a worker takes the controller's, also where it has just passed."""
    resolved: str | None = getattr(config, "workerinput", {}).get("kvbudget_until")
    if resolved is not None:
        return datetime.fromisoformat(resolved)
    text: str | None = config.option.kvbudget_until
    return None if text is None else until(text, datetime.now().astimezone())


def until(text: str, now: datetime) -> datetime:
    """The next time that the clock shows ``HH:MM``; a date with it (ISO 8601) names the day.

    Raises:
        pytest.UsageError: it is no time, or a date and time that is over.
    """
    try:
        if "T" in text or "-" in text:
            found = datetime.fromisoformat(text).astimezone()
            if found <= now:
                raise pytest.UsageError(f"kvbudget: --kvbudget-until is {text!r}, and now is {now:%Y-%m-%d %H:%M}")
            return found
        clock = time.fromisoformat(text)
    except ValueError:
        raise pytest.UsageError(
            f"kvbudget: --kvbudget-until is {text!r}; expected a local time such as 06:00, or 2026-12-01T06:00"
        ) from None
    today = datetime.combine(now.date(), clock, tzinfo=None).astimezone()
    return today if today > now else datetime.combine(now.date() + timedelta(days=1), clock).astimezone()
