"""What a boot is doing, shown while one waits: one line that is rewritten on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Final

import pytest

from pytest_kvbudget.progress import Snapshot
from pytest_kvbudget.verdict import STARTING, Phase

PLAIN_EVERY_S: Final = 2.0
"""Least time between two plain lines: a boot that is over before it says nothing."""


class ProgressLine:
    """Writes to the terminal as it was before tests captured output.

    The descriptor is duplicated while capturing is suspended, so nothing lands in a test's captured output.
    """

    def __init__(self, config: pytest.Config, *, silent: bool) -> None:
        self._config = config
        self._descriptor: int | None = None
        self._open = False
        self._shown: tuple[tuple[tuple[str, str], ...], float] = ((), time.monotonic())
        """Label and phase of the boots in the last plain line, and when it was written."""
        terminal = config.pluginmanager.get_plugin("terminalreporter")
        # Of a worker only standard error reaches people, and under -q a boot shows nothing: but waiting is always said.
        self._quiet = silent or terminal is None or terminal.verbosity < 0
        self._live = False
        if silent or terminal is None:
            return
        self._terminal: pytest.TerminalReporter = terminal
        with self._uncaptured(), suppress(OSError):
            self._descriptor = os.dup(1)
        self._live = self._descriptor is not None and os.isatty(self._descriptor) and os.environ.get("TERM") != "dumb"

    def show(self, *boots: Snapshot) -> None:
        """One moment of the boots that run, in one line. In the main thread only: it may have to suspend capturing."""
        if self._descriptor is None or self._quiet or not boots:
            return
        text = _together(boots)
        phases = tuple((boot.label, str(boot.phase)) for boot in boots)
        if self._live:
            self._rewrite(text)
        elif phases != self._shown[0] and max(boot.elapsed_s for boot in boots) >= PLAIN_EVERY_S and self._due():
            self._shown = (phases, time.monotonic())
            self.line(text)

    def line(self, text: str) -> None:
        """A line that stays."""
        if self._descriptor is None:
            with suppress(OSError):
                os.write(2, f"kvbudget: {text}\n".encode("utf-8", "replace"))
        else:
            self.end()
            self._begin()
            self._write(f"{text}\n")
            self._open = False

    def end(self) -> None:
        """The boot is over: take the line away."""
        if self._open and self._live:
            self._write("\r\x1b[K")
        self._open = False

    def close(self) -> None:
        """Give the descriptor back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _rewrite(self, text: str) -> None:
        self._begin()
        width = max(20, shutil.get_terminal_size().columns - 1)
        printable = "".join(char if char.isprintable() else " " for char in text)
        self._write(f"\r{printable[:width]}\x1b[K")

    def _begin(self) -> None:
        """Leave the line that pytest is writing on."""
        if not self._open:
            with self._uncaptured():
                self._terminal.ensure_newline()
                self._terminal.flush()
        self._open = True

    def _due(self) -> bool:
        return time.monotonic() - self._shown[1] >= PLAIN_EVERY_S

    def _write(self, text: str) -> None:
        if self._descriptor is not None:
            os.write(self._descriptor, text.encode("utf-8", "replace"))

    def _uncaptured(self) -> AbstractContextManager[None]:
        capture = self._config.pluginmanager.get_plugin("capturemanager")
        if capture is None:
            return nullcontext()
        released: AbstractContextManager[None] = capture.global_and_fixture_disabled()
        return released


def _doing(boot: Snapshot) -> str:
    return STARTING if boot.phase is Phase.UNKNOWN else str(boot.phase)


def _together(boots: Sequence[Snapshot]) -> str:
    """All boots in one line; what a boot said last is shown where it is the only one."""
    said = [f"{boot.label}: {_doing(boot)} {boot.elapsed_s:.0f} s" for boot in boots]
    return f"{said[0]}  {boots[0].text}" if len(said) == 1 else "  |  ".join(said)
