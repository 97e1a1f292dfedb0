"""What a search is told and what it answers."""

from __future__ import annotations

from typing import Protocol

import msgspec

from pytest_kvbudget.ledger.model import Cause
from pytest_kvbudget.verdict import FindingKind, Verdict


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """The rungs of a ladder: ``ceiling``, then down by ``quantum`` while not below ``floor``, and ``floor`` itself.

    All four are in the unit of the field that ``name`` names: tokens for ``max_model_len``, bytes for
    ``kv_cache_memory_bytes``.
    """

    name: str
    floor: int
    ceiling: int
    quantum: int

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: when they make no ladder; the message says which one and what is accepted.
        """
        if self.quantum < 1:
            raise ValueError(f"quantum is {self.quantum}; expected 1 or more")
        if self.floor < 1:
            raise ValueError(f"floor is {self.floor}; expected 1 or more")
        if self.ceiling < self.floor:
            raise ValueError(f"start is {self.ceiling} and floor is {self.floor}; expected start at or above floor")

    def __len__(self) -> int:
        """Number of rungs."""
        whole, rest = divmod(self.ceiling - self.floor, self.quantum)
        return whole + (2 if rest else 1)

    def value(self, index: int) -> int:
        """The rung at ``index``, counted from 0 at the floor."""
        if not 0 <= index < len(self):
            raise IndexError(f"rung {index} of {len(self)}")
        return max(self.floor, self.ceiling - (len(self) - 1 - index) * self.quantum)

    def index_at_or_below(self, value: float) -> int:
        """Index of the highest rung at or below ``value``; -1 when even the floor is above it."""
        if value < self.floor:
            return -1
        if value >= self.ceiling:
            return len(self) - 1
        return max(0, len(self) - 1 - -int(-(self.ceiling - value) // self.quantum))


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """How far one limit of a boot was from being hit."""

    name: str
    """Phase or term it belongs to: ``"kv_check"``."""
    margin_bytes: float
    """Bytes left (positive) or missing (negative)."""
    bytes_per_unit: float | None = None
    """What one more unit of the axis costs here, in bytes, as measured on this boot; ``None`` where unknown."""
    precision_bytes: float = 0
    """Half a unit of the last digit printed."""
    at_least: bool = False
    """The deficit is only a lower bound: one allocation did not fit, and more would have followed."""


class Hint(msgspec.Struct, frozen=True, kw_only=True):
    """What a boot said about where the boundary is. Every part may be missing, and none of it is trusted as truth."""

    limits: tuple[Limit, ...] = ()
    estimate: int | None = None
    """The engine's own estimate of the largest value that fits, in the axis' unit."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One boot of one rung, as a search sees it."""

    value: int
    verdict: Verdict
    hint: Hint = Hint()
    cause: Cause | None = None
    pool_short: bool = False
    """The scaled pool turned out too small for the promised windows: an UNKNOWN that carries a new rate."""

    @property
    def passed(self) -> bool:
        """The rung counts as passed."""
        return self.verdict in {Verdict.PASS, Verdict.MARGINAL}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What a ladder established, and its proof."""

    kind: FindingKind
    axis: Axis
    value: int | None
    """The largest rung that passed; ``None`` where none did."""
    failed_at: int | None = None
    """The smallest rung above it that failed: the other half of the proof."""
    bounded_by: Cause | None = None
    """Why that rung failed; ``by_gate`` where the test body said no."""
    boots: int
    """Boots up to the proof, retries of an UNKNOWN included."""
    retries: int = 0
    """Boots among them that repeated an UNKNOWN."""
    confirmations: int = 0
    """Further boots of the winner after the proof; not part of ``boots``."""
    sentence: str
    """The finding in one sentence for people, with its proof."""

    @property
    def proven(self) -> bool:
        """The proof is complete."""
        return self.kind in {FindingKind.PROVEN, FindingKind.CEILING_REACHED}


class Strategy(Protocol):
    """Chooses the next rung from what is known. Stateless: the same history gives the same answer."""

    @property
    def name(self) -> str:
        """The word users type for it: ``"predict"``."""
        ...

    def next_index(self, axis: Axis, history: tuple[Trial, ...]) -> int | None:
        """Index of the rung to boot next, or ``None`` when the boundary is proven.

        ``history`` holds only PASS, MARGINAL and FAIL, in boot order; a rung may be in it once. A trial whose value
        is no rung of the axis (a scaled pool's reference) may inform the choice and proves nothing.
        """
        ...
