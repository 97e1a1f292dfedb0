"""Where a run's archive, configuration and tests are."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

ARCHIVE: Final = "kvbudget-archive"


def archive_folder(config: pytest.Config) -> Path:
    """The archive of this run, absolute; the same in every xdist worker, and from whatever folder pytest is called."""
    given = getattr(config, "workerinput", {}).get("kvbudget_archive")
    return Path(given) if given else path_option(config, "archive") or config.rootpath / ARCHIVE


def test_folders(config: pytest.Config) -> list[Path]:
    """The folder of each test argument; never empty."""
    folders = []
    for argument in config.args:
        path = config.invocation_params.dir / argument.partition("::")[0]
        if path.exists():
            folders.append((path if path.is_dir() else path.parent).resolve())
    return folders or [config.invocation_params.dir]


def source_of(config: pytest.Config, name: str) -> str:
    """Where the value of an option of ours comes from, as people find it: the option, or the key of the ini file."""
    if getattr(config.option, f"kvbudget_{name}") or not config.getini(f"kvbudget_{name}"):
        return f"--kvbudget-{name.replace('_', '-')}"
    return f"kvbudget_{name}" + ("" if config.inipath is None else f" in {config.inipath}")


def path_option(config: pytest.Config, name: str) -> Path | None:
    """A path from the command line, relative to the invocation, or from the ini file, relative to that file."""
    given = getattr(config.option, f"kvbudget_{name}")
    if given:
        return Path(config.invocation_params.dir / given)
    configured = config.getini(f"kvbudget_{name}")
    if not configured:
        return None
    return (config.rootpath if config.inipath is None else config.inipath.parent) / str(configured)
