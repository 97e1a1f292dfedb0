"""Fixtures of the device tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.device.tools import Tools


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    """A folder that comes first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return Tools(folder)
