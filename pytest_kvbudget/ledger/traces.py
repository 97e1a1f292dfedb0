"""Tracebacks in a log: which process is in one, and which phase of the boot its frames prove."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

from pytest_kvbudget.ledger.facts import Process
from pytest_kvbudget.ledger.grammar.common import CALLS, FRAME, FRAMES, WAITING_FRAMES, WEAK_FRAMES
from pytest_kvbudget.verdict import Phase

EXCEPTION: Final = re.compile(
    r"^(?:\[?\w*\]?:? ?)(?:[a-z_][\w]*\.)*(?P<name>[A-Z]\w*(?:Error|Exception|Exit|Interrupt))(?::\s(?P<message>.*))?$"
)
"""The last line of a traceback."""
_METHOD: Final = re.compile(r"(?:while processing method|Error executing method) '?(?P<function>\w+)")
"""A worker's word for what it was doing, in front of the traceback or without one."""
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
        "ActorDiedError",
        "RayActorError",
    }
)
_CONSEQUENCE_TEXTS: Final = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "Engine process failed to start",
    "please check the stack trace above",
    "See stack trace",
)
_BEGINS: Final = "Traceback (most recent call last)"
_INNER: Final = re.compile(r'File "[^"]*", line \d+, in (?P<function>\w+)')
"""A frame anywhere in a line."""
_SOURCE: Final = re.compile(r"\s{2,}\S|-+> \d+ ")
"""How the source text that a frame shows begins, as Python or as IPython writes it."""
_MOVES: Final = frozenset({"<lambda>", "_apply", "convert", "cuda"})
"""Functions of torch that move a model's weights to a device."""
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
    family: str = ""
    """The engine family whose code the frame is in."""
    raises: bool = False
    """The exception, which ends the traceback."""
    passed_on: bool = False
    """The exception only reports what happened in another process."""


NO_TRACE: Final = TraceLine()
"""What a line is that belongs to no traceback."""


@lru_cache(maxsize=_MOST_KNOWN)
def read_trace(text: str) -> TraceLine:
    """What a line is to a traceback."""
    stripped = text.lstrip()
    if stripped.startswith(_BEGINS):
        return _whole(stripped) if len(stripped) > len(_BEGINS) + 1 else TraceLine(begins=True)
    method = _METHOD.search(text)
    if method is not None:
        function = method["function"]
        return TraceLine(begins=True, frame=True, phase=FRAMES.get(function), weak=function in WEAK_FRAMES)
    frame = FRAME.match(text)
    if frame is not None:
        function = frame["function"] or frame["cell"]
        if function in _MOVES and "/torch/nn/modules/module.py" in text:
            return TraceLine(frame=True, phase=Phase.WEIGHTS_LOAD, weak=True)
        return TraceLine(
            frame=True,
            phase=FRAMES.get(function),
            waits=function in WAITING_FRAMES,
            weak=function in WEAK_FRAMES,
            family="sglang" if "/sglang/" in text else "vllm" if "/vllm/" in text else "",
        )
    exception = EXCEPTION.match(stripped)
    if exception is None:
        called = next((name for call, name in CALLS.items() if call in text), None) if _SOURCE.match(text) else None
        return TraceLine() if called is None else TraceLine(frame=True, phase=FRAMES[called])
    name, message = exception["name"], exception["message"] or ""
    passed_on = name in _CONSEQUENCES or any(part in message for part in _CONSEQUENCE_TEXTS)
    return TraceLine(raises=True, passed_on=passed_on)


def _whole(text: str) -> TraceLine:
    """A traceback that was put on one line: its frames and its exception are there, nothing of it follows."""
    functions = [frame["function"] for frame in _INNER.finditer(text)]
    phases = [(FRAMES[function], function in WEAK_FRAMES) for function in functions if function in FRAMES]
    if not functions:
        return TraceLine(begins=True)
    phase, weak = next((known for known in phases if not known[1]), phases[0] if phases else (None, False))
    return TraceLine(begins=True, frame=True, phase=phase, weak=weak, raises=True, passed_on=True)


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

    def loose(self, process: Process) -> bool:
        """Whether the phase that the frames prove is only that of a `WEAK_FRAMES` one."""
        known = self._phases.get(process)
        return known is not None and known[1]

    def __contains__(self, process: Process) -> bool:
        return process in self._phases
