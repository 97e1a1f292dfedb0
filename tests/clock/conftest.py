"""A wall clock that jumps by hours, for processes of their own and for modules in this one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.support import Engines

SOURCE = Path(__file__).with_name("jumps.c")


@pytest.fixture(scope="session")
def jumping(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library that makes the wall clock of a process jump, for ``LD_PRELOAD``."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler: the wall clock of other processes cannot be made to jump")
    library = tmp_path_factory.mktemp("clock") / "jumps.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE)], check=True)
    return str(library)


class Clocks:
    """In the place of a module's ``time``: sleeping costs nothing, and the wall clock means nothing.

    Every look takes a millisecond, so that whatever waits without sleeping ends as well.
    """

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._looks = 0

    def monotonic(self) -> float:
        self.now_s += 0.001
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def time(self) -> float:
        self._looks += 1
        return 1e9 + 3600.0 * (5, -7, 26, -49)[self._looks % 4]


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    """Starts engines; whatever a test left is ended."""
    made = Engines(tmp_path)
    yield made
    made.close()
