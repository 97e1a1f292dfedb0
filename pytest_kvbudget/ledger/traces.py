"""Tracebacks in a log: which process is in one, and which phase of the boot its frames prove."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

from pytest_kvbudget.ledger.facts import Process
from pytest_kvbudget.ledger.grammar.common import FRAME, FRAMES, WAITING_FRAMES, WEAK_FRAMES
from pytest_kvbudget.verdict import Phase

EXCEPTION: Final = re.compile(
    r"^(?:\[?\w*\]?:? ?)(?:[a-z_][\w]*\.)*(?P<name>[A-Z]\w*(?:Error|Exception|Exit|Interrupt))(?::\s(?P<message>.*))?$"
)
"""The last line of a traceback."""
_CONSEQUENCES: Final = frozenset(
    {
        "EngineDeadError",
        "CancelledError",
        "SystemExit",
        "GeneratorExit",
        "KeyboardInterrupt",
        "BrokenPipeError",
        "ConnectionResetError",
        "EOFError",
        "MQEngineDeadError",
        "AsyncEngineDeadError",
    }
)
_CONSEQUENCE_TEXTS: Final = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "Engine process failed to start",
    "please check the stack trace above",
    "See stack trace",
)
_MOST_KNOWN: Final = 2048
"""Lines of tracebacks that are remembered: the same ones come again in every boot that fails alike."""


class TraceLine(NamedTuple):
    """What a line is to a traceback."""

    begins: bool = False
    frame: bool = False
    phase: Phase | None = None
    """The phase that the frame's function belongs to."""
    waits: bool = False
    """In the frame's function the server waits for the engine: the engine's phase counts."""
    weak: bool = False
    """The frame's function runs in several phases: a frame further in decides."""
    of_vllm: bool = False
    raises: bool = False
    """The exception, which ends the traceback."""
    passed_on: bool = False
    """The exception only reports what happened in another process."""


@lru_cache(maxsize=_MOST_KNOWN)
def read_trace(text: str) -> TraceLine:
    """What a line is to a traceback."""
    stripped = text.lstrip()
    if stripped.startswith("Traceback (most recent call last)"):
        return TraceLine(begins=True)
    frame = FRAME.match(text)
    if frame is not None:
        function = frame["function"]
        return TraceLine(
            frame=True,
            phase=FRAMES.get(function),
            waits=function in WAITING_FRAMES,
            weak=function in WEAK_FRAMES,
            of_vllm="/vllm/" in text,
        )
    exception = EXCEPTION.match(stripped)
    if exception is None:
        return TraceLine()
    name, message = exception["name"], exception["message"] or ""
    passed_on = name in _CONSEQUENCES or any(part in message for part in _CONSEQUENCE_TEXTS)
    return TraceLine(raises=True, passed_on=passed_on)


class Traces:
    """The tracebacks that are open, one per process."""

    def __init__(self) -> None:
        self._phases: dict[Process, tuple[Phase, bool] | None] = {}

    def begin(self, process: Process) -> None:
        """A traceback begins."""
        self._phases[process] = None

    def frame(self, process: Process, phase: Phase | None, *, weak: bool) -> None:
        """A frame came; the first one that proves a ``phase`` decides, unless it is ``weak``."""
        if phase is None:
            self._phases.setdefault(process, None)
            return
        known = self._phases.get(process)
        if known is None or known[1]:
            self._phases[process] = (phase, weak)

    def end(self, process: Process) -> None:
        """The exception came."""
        self._phases.pop(process, None)

    def phase(self, process: Process) -> Phase | None:
        """The phase that the frames of a process prove."""
        known = self._phases.get(process)
        return known[0] if known is not None else None

    def __contains__(self, process: Process) -> bool:
        return process in self._phases
