from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.support import Engines


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    """Starts engines; whatever a test left is ended."""
    made = Engines(tmp_path)
    yield made
    made.close()
