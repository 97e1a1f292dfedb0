"""Stand-ins for the vendors' tools: real executables on PATH that print what the real ones were seen to print."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> str:
    """Output of a tool as it was recorded."""
    return (RECORDED / name).read_text(encoding="utf-8")


class Tools:
    """A folder on PATH, and the executables in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def script(self, name: str, body: str) -> Path:
        """Install an executable of one's own."""
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        path.chmod(0o755)
        return path

    def install(self, name: str, answers: Mapping[str, str]) -> Path:
        """Install a tool that prints ``answers[arguments]`` and refuses other arguments, as the real ones do."""
        cases = []
        for number, (arguments, output) in enumerate(answers.items()):
            file = self.folder / f"{name}.{number}.out"
            file.write_text(output, encoding="utf-8")
            cases.append(f"{shlex.quote(arguments)}) exec cat {shlex.quote(str(file))};;")
        return self.script(
            name, f'case "$*" in {" ".join(cases)} *) echo "unrecognized arguments: $*" >&2; exit 2;; esac'
        )

    def hang(self, name: str) -> Path:
        """Install a tool that says its process id in ``NAME.pid`` and never ends; its child holds its output open."""
        pid = self.folder / f"{name}.pid"
        self.script(name, f"sleep 600 &\necho $! > {pid}.new\nmv {pid}.new {pid}\nwait")
        return pid

    def stream(self, name: str) -> Path:
        """Install a tool that prints what is written to the returned FIFO, and ends with it."""
        fifo = self.folder / f"{name}.fifo"
        os.mkfifo(fifo)
        self.script(name, f"exec cat {shlex.quote(str(fifo))}")
        return fifo
