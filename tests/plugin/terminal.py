"""A pytest that believes it is on a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEADLINE_S = 60.0


class Terminal:
    """Both ends of a conversation with a process on a pseudo-terminal."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._seen = ""

    def expect(self, pattern: str) -> re.Match[str]:
        """Read until ``pattern`` is there; what comes before it is forgotten.

        Raises:
            AssertionError: it did not come, with what came instead.
        """
        deadline = time.monotonic() + DEADLINE_S
        while True:
            found = re.search(pattern, self._seen)
            if found is not None:
                self._seen = self._seen[found.end() :]
                return found
            ready, _, _ = select.select([self._descriptor], [], [], max(0, deadline - time.monotonic()))
            try:
                data = os.read(self._descriptor, 65_536) if ready else b""
            except OSError:  # what a terminal gives when its last process is gone
                data = b""
            if not data:
                raise AssertionError(f"{pattern!r} did not come; there was {self._seen!r}")
            self._seen += data.decode("utf-8", "replace")

    def send(self, line: str) -> None:
        """Type a line."""
        os.write(self._descriptor, f"{line}\n".encode())


@contextmanager
def pytest_on_a_terminal(folder: Path, *arguments: str) -> Iterator[Terminal]:
    """Run pytest in ``folder``; it is ended with the context, if it did not end by itself."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", f"--basetemp={folder}/terminal", *arguments],
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
        process.wait(DEADLINE_S)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
