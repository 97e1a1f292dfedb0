"""Gates on memory: what every rank may use, must leave free, and may grow by. The heaviest rank binds and is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from pytest_kvbudget.device.trace import WindowMemory
from pytest_kvbudget.units import format_size
from pytest_kvbudget.verdict import Verdict

MIN_FREE: Final = "min_free"
MAX_USED: Final = "max_used"
MAX_GROWTH: Final = "max_growth"


class MemoryGates(msgspec.Struct, frozen=True, kw_only=True):
    """Limits per rank in bytes; ``None`` asks for nothing."""

    min_free_bytes: int | None = None
    max_used_bytes: int | None = None
    max_growth_bytes: int | None = None


class GateResult(msgspec.Struct, frozen=True, kw_only=True):
    """One gate, judged at the rank that is nearest to it."""

    gate: str
    verdict: Verdict
    """PASS; MARGINAL for too little left free; FAIL for a limit that was passed; UNKNOWN where nothing was seen."""
    rank: int | None
    device: str | None
    measured_bytes: int | None
    limit_bytes: int
    sentence: str

    @property
    def over_bytes(self) -> int | None:
        """By how much the gate is missed; negative where it is kept."""
        if self.measured_bytes is None:
            return None
        difference = self.measured_bytes - self.limit_bytes
        return -difference if self.gate == MIN_FREE else difference


def judge_memory(ranks: Sequence[WindowMemory | None], gates: MemoryGates) -> tuple[GateResult, ...]:
    """Judge every gate that is asked for.

    A rank that was not seen makes a gate UNKNOWN, unless another rank already misses it: what was not seen cannot
    make that better.

    Args:
        ranks: memory of every rank over the time in question, ``None`` where it could not be read.
        gates: the limits.
    """
    asked = (
        (MIN_FREE, gates.min_free_bytes, lambda seen: seen.least_free_bytes),
        (MAX_USED, gates.max_used_bytes, lambda seen: seen.peak_used_bytes),
        (MAX_GROWTH, gates.max_growth_bytes, lambda seen: seen.growth_bytes),
    )
    return tuple(_judge(gate, limit, ranks, value) for gate, limit, value in asked if limit is not None)


def worst(results: Sequence[GateResult]) -> Verdict:
    """The verdict of all gates together: FAIL over MARGINAL over UNKNOWN over PASS."""
    found = {result.verdict for result in results}
    order = (Verdict.FAIL, Verdict.MARGINAL, Verdict.UNKNOWN)
    return next((verdict for verdict in order if verdict in found), Verdict.PASS)


def _judge(
    gate: str, limit: int, ranks: Sequence[WindowMemory | None], value: Callable[[WindowMemory], int]
) -> GateResult:
    seen = [rank for rank in ranks if rank is not None]
    unseen = [number for number, rank in enumerate(ranks) if rank is None]
    heaviest = (min if gate == MIN_FREE else max)(seen, key=value, default=None)
    measured = None if heaviest is None else value(heaviest)
    missed = measured is not None and (measured < limit if gate == MIN_FREE else measured > limit)
    if missed:
        verdict = Verdict.MARGINAL if gate == MIN_FREE else Verdict.FAIL
    else:
        verdict = Verdict.UNKNOWN if unseen or not seen else Verdict.PASS
    return GateResult(
        gate=gate,
        verdict=verdict,
        rank=None if heaviest is None else heaviest.rank,
        device=None if heaviest is None else heaviest.device,
        measured_bytes=measured,
        limit_bytes=limit,
        sentence=_sentence(gate, limit, heaviest, measured, unseen),
    )


def _sentence(gate: str, limit: int, heaviest: WindowMemory | None, measured: int | None, unseen: Sequence[int]) -> str:
    asked = {
        MIN_FREE: f"at least {format_size(limit)} free",
        MAX_USED: f"at most {format_size(limit)} used",
        MAX_GROWTH: f"growth of at most {format_size(limit)}",
    }[gate]
    blind = f"; the memory of rank {', '.join(map(str, unseen))} was not seen" if unseen else ""
    if heaviest is None or measured is None:
        return f"{gate}: {asked} was asked for and no rank's memory was seen"
    had = {
        MIN_FREE: f"had {format_size(measured)} free at the worst moment, {heaviest.least_free_at_s:.1f} s in",
        MAX_USED: f"used {format_size(measured)} at the worst moment, {heaviest.peak_at_s:.1f} s in",
        MAX_GROWTH: f"grew by {format_size(measured)}",
    }[gate]
    # what is used most and what is free least make up the device
    size = heaviest.least_free_bytes + heaviest.peak_used_bytes
    never = ""
    if gate == MIN_FREE and limit > size:
        never = f", and can never be: the device has {format_size(size)} in all"
    return f"{gate}: rank {heaviest.rank} (device {heaviest.device}) {had}; {asked} was asked for{never}{blind}"
