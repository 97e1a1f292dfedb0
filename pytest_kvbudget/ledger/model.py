"""The boot ledger: everything a boot said about memory, with the line each number came from.

A value that no line states is missing. It is never 0 and never guessed.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Literal

import msgspec

from pytest_kvbudget.verdict import Phase, Provenance

Unit = Literal["bytes", "tokens", "count", "seconds", "fraction", "percent", "ratio", "flag", "text"]
Outcome = Literal["booted", "failed", "died_after_boot", "recovered", "refused", "unknown"]
Direction = Literal["raise", "lower", "clean", "none"]
Effect = Literal["helps", "harms", "useless"]


class MissingValueError(LookupError):
    """No line of the log states this value; the message names it and why it may be missing."""


class Evidence(msgspec.Struct, frozen=True):
    r"""A line of the log: its 1-based number (``\n`` counts, ``\r`` does not) and its text without prefixes."""

    line: int
    """0 for a line from elsewhere, whose text says where from."""
    text: str


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """One number or word that the log states."""

    value: int | float | str | bool
    unit: Unit
    evidence: Evidence
    provenance: Provenance = Provenance.MEASURED
    precision: float = 0
    """Half a unit of the last printed digit, in ``unit``; 0 for exact values."""
    rank: str | None = None
    """Process that printed it as the engine names it (``"Worker_TP1"``), ``None`` where there is only one."""


class Lever(msgspec.Struct, frozen=True):
    """Something an operator can turn, which way, and whether it moves this cause."""

    name: str
    """The engine's own name for it: a flag's or variable's, as ``max_model_len``."""
    direction: Direction
    effect: Effect
    why: str = ""


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Why a boot ended: the root cause, never the wrapper that reported it."""

    phase: Phase
    failure_class: str
    """A word of the vocabulary in ``ledger/classes.py``, such as ``kv_check_short``."""
    sentence: str
    """The cause in one sentence for people, with its numbers."""
    evidence: tuple[Evidence, ...] = ()
    levers: tuple[Lever, ...] = ()
    rank: str | None = None
    by_gate: bool = False
    """The test body refused the rung; never a statement about memory."""


class Milestone(msgspec.Struct, frozen=True):
    """A line that shows the boot entering or passing a phase."""

    phase: Phase
    evidence: Evidence


class KvCache:
    """The KV cache as the engine stated it. Reading a value that no line states raises `MissingValueError`."""

    def __init__(self, ledger: BootLedger) -> None:
        self._ledger = ledger

    def __repr__(self) -> str:
        names = {"tokens": "kv_tokens", "max_concurrency": "max_concurrency", "available_bytes": "available_kv_bytes"}
        shown = (f"{name}={self._ledger.get(fact)}" for name, fact in names.items() if fact in self._ledger.facts)
        return f"KvCache({', '.join(shown)})"

    @property
    def tokens(self) -> int:
        """Capacity in tokens, over all ranks, as one number for the engine (data-parallel replica)."""
        return int(self._ledger.number("kv_tokens"))

    @property
    def max_concurrency(self) -> float:
        """How many requests of ``max_model_len`` tokens fit at once."""
        return float(self._ledger.number("max_concurrency"))

    @property
    def available_bytes(self) -> int:
        """Bytes per rank left for the KV cache, the least of all ranks."""
        return int(self._ledger.number("available_kv_bytes"))

    @property
    def needed_bytes(self) -> int:
        """Bytes per rank that one request of ``max_model_len`` needs; stated only where they did not fit."""
        return int(self._ledger.number("kv_needed_bytes"))


def _unknown(name: str, stated: Iterable[str]) -> str:
    """Why a fact is not there of which nothing else is known: no line states it, or there is no such fact."""
    from pytest_kvbudget.ledger.vocabulary import fact_units  # noqa: PLC0415 - for this message only

    known = {*fact_units(), *stated}
    if name in known:
        return "absent"
    near = get_close_matches(name, sorted(known), 3)
    return "no fact has this name" + (f"; did you mean {', '.join(near)}?" if near else "")


class BootLedger(msgspec.Struct, kw_only=True):
    """Everything one boot said about memory."""

    family: str
    """Grammar table that read it: ``"vllm"``; ``"unknown"`` where no line was recognised."""
    engine_version: str | None = None
    outcome: Outcome = "unknown"
    phase: Phase = Phase.UNKNOWN
    """Furthest boot phase for a boot that served, else where it ended."""
    cause: Cause | None = None
    facts: dict[str, Value] = {}
    """One value per name; where several ranks print it, the one that binds."""
    ranks: dict[str, dict[str, Value]] = {}
    """Name of the fact, then rank, to value; only for facts that a rank printed."""
    states: dict[str, str] = {}
    """Why a fact that readers look for is not there: ``"absent"``, ``"suppressed"`` or ``"rank 0 only"``."""
    milestones: tuple[Milestone, ...] = ()
    lines: int = 0
    """Lines read."""

    def __repr__(self) -> str:
        # assertion introspection prints it: the whole of it would bury what a test says
        cause = "" if self.cause is None else f", cause={self.cause.failure_class}"
        return (
            f"<BootLedger {self.family} {self.engine_version}: {self.outcome}, {self.phase}{cause}, {self.kv_cache!r}>"
        )

    @property
    def failure_class(self) -> str | None:
        """The cause's failure class, ``None`` when nothing failed."""
        return None if self.cause is None else self.cause.failure_class

    @property
    def kv_cache(self) -> KvCache:
        """The KV cache as the engine stated it."""
        return KvCache(self)

    def get(self, name: str) -> int | float | str | bool | None:
        """The value of a fact, ``None`` where no line states it."""
        value = self.facts.get(name)
        return None if value is None else value.value

    def number(self, name: str) -> int | float:
        """The value of a numeric fact.

        Raises:
            MissingValueError: no line states it.
        """
        value = self.get(name)
        if value is None or isinstance(value, (str, bool)):
            state = self.states.get(name) or _unknown(name, self.facts)
            raise MissingValueError(f"{name}: no line of this boot states it ({state}; {self.lines} lines read)")
        return value
