"""What tests hold: a running engine, and the rung that a ladder is at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pytest_kvbudget.attempt import Attempt
from pytest_kvbudget.decoding import did_you_mean
from pytest_kvbudget.device.trace import LAUNCH
from pytest_kvbudget.ledger.model import BootLedger
from pytest_kvbudget.memory import SOAK
from pytest_kvbudget.records import AttemptRecord
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.verdict import Phase

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_kvbudget.device.trace import MemoryTrace, WindowMemory
    from pytest_kvbudget.engine.client import EngineClient


_SINCE: Final = (LAUNCH, SOAK, *(phase.value for phase in Phase if phase is not Phase.UNKNOWN))
"""Since when a trace can be asked."""


class KvEngine:
    """A running engine, and what its boot proved. It belongs to the fixture or test that it was made for."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def __repr__(self) -> str:
        return f"<KvEngine {self.url} {self.shape.describe()}>"

    @property
    def url(self) -> str:
        """Base address: ``http://127.0.0.1:PORT``."""
        return self._attempt.url

    @property
    def client(self) -> EngineClient:
        """Client of the engine's HTTP interface."""
        return self._attempt.client

    @property
    def shape(self) -> Shape:
        """What was asked of it."""
        return self._attempt.request.shape

    @property
    def record(self) -> AttemptRecord:
        """The boot's record as it stands."""
        return self._attempt.record

    @property
    def record_path(self) -> Path:
        """The record on disk."""
        return self._attempt.record_path

    @property
    def log_path(self) -> Path:
        """The engine's complete log, still growing."""
        return self._attempt.log_path

    @property
    def ledger(self) -> BootLedger:
        """What the boot said about memory."""
        return self._attempt.ledger

    def complete(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 16,
        **options: Any,  # noqa: ANN401 - whatever JSON the engine takes
    ) -> dict[str, Any]:
        """One completion, whole; ``prompt`` is text or token ids, ``options`` are further fields of the request.

        Raises:
            ClientError: for anything but a good answer.
        """
        return self.client.complete(prompt, max_tokens, **options)

    def pids(self) -> Sequence[int]:
        """Process ids of every living process of the engine."""
        return self._attempt.pids()

    @property
    def trace(self) -> KvTrace:
        """Device memory since before the launch."""
        return KvTrace(self._attempt)

    @property
    def alive(self) -> bool:
        """It is up and has not died."""
        return self._attempt.serving


class KvTrace:
    """Device memory of an engine while it runs. Ranks that nobody can read are ``None``, never 0."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def since(self, phase: str = "launch") -> tuple[WindowMemory | None, ...]:
        """Memory of every rank since a phase began: ``launch``, ``ready``, ``request`` or a phase of the boot.

        Empty where the target has no device memory that can be read (CPU); ``None`` for every rank where the boot
        never entered the phase.

        Raises:
            ValueError: there is no such phase; the message names those that there are.
        """
        __tracebackhide__ = True
        if phase not in _SINCE:
            raise ValueError(f"phase is {phase!r}; {did_you_mean(phase, _SINCE)}expected one of {', '.join(_SINCE)}")
        return self._attempt.memory_since(phase)

    def snapshot(self) -> MemoryTrace | None:
        """The whole trace so far."""
        return self._attempt.memory_trace()


@dataclass(frozen=True, kw_only=True)
class KvRung:
    """The rung that a ladder or sweep is at. ``int(rung)`` and ``float(rung)`` are its value on the axis."""

    axis: str
    value: int | float
    """Tokens, sequences, bytes or a fraction: the unit of the axis."""
    label: str
    """``max_model_len=245760``; a repeat of a rung ends in ``#2``."""
    number: int
    """Which boot of this rung it is, from 1."""
    why: str
    """Why the search asks: ``search``, ``retry``, ``reference``, ``rate``, ``repeat``, ``warm``, ``pair``, ``verify``
    or ``confirm``."""

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)
