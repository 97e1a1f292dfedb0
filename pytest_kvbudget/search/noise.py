"""How far two boots of one shape may differ, and the least step of an axis that still means something."""

from __future__ import annotations

import math
from statistics import linear_regression, stdev
from typing import TYPE_CHECKING, Final

import msgspec

from pytest_kvbudget.search.hints import RESERVE_FACTOR
from pytest_kvbudget.units import GIB, MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_kvbudget.ledger.model import BootLedger
    from pytest_kvbudget.search.model import Axis, SigmaSource, Trial

ASSUMED_SIGMA_BYTES: Final = 64.0 * MIB
REPEATS_FOR_SIGMA: Final = 5
"""Boots of one key in the archive from which their own deviation counts."""
PROOF_SIGMAS: Final = 2.0
"""Slack from which one pass is enough."""
DEPLOY_SIGMAS: Final = 3.0
STEADY_TERMS: Final = (
    *("model_load_bytes", "non_torch_bytes", "consumed_bytes", "peak_activation_bytes", "graph_capture_bytes"),
)
"""Facts of a ledger that neither a window nor a pool moves, or moves along a line."""
OUTSIDE_TERM: Final = "outside_bytes"
"""What a ready engine holds beside a pinned pool, by the driver's own count: the only term without rounding."""
PRINTED_SIGMA_BYTES: Final = 0.01 * GIB / math.sqrt(12)
"""Deviation that two decimals of a GiB hide: terms that are printed alike may differ by as much."""
MOVED_TERMS: Final = {
    name: frozenset({"non_torch_bytes", "consumed_bytes", "peak_activation_bytes", "graph_capture_bytes"})
    for name in ("max_num_seqs", "max_num_batched_tokens")
}
"""Those that an axis moves after all: sequences decide which graph sizes are captured, a step's tokens workspaces."""
ARENA_TERMS: Final = frozenset({"model_load_bytes", "consumed_bytes"})
"""Those that include an expert arena where there is one: it gets what the plan leaves, so that every axis moves it."""
_ARENA: Final = ("plan_expert_cache_bytes", "plan_slots", "plan_registry_b_per_token")
_FEW_BOOTS: Final = 4
_TWO_BOOTS: Final = 2


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """One standard deviation of what the same boot takes, in bytes, and where it comes from."""

    sigma_bytes: float = ASSUMED_SIGMA_BYTES
    source: SigmaSource = "assumed"

    @classmethod
    def of(cls, repeats: Sequence[float]) -> Noise:
        """From what repeated boots of one key had left or took, in bytes; assumed where they are fewer than five."""
        if len(repeats) < REPEATS_FOR_SIGMA:
            return cls()
        return cls(sigma_bytes=stdev(repeats), source="archive")

    def measured(self, trials: Sequence[Trial]) -> Noise:
        """Replaced by what the ladder's own boots show, where it is only assumed and two boots state a common term.

        What differs between rungs may be a trend, which is no noise: three boots tell the two apart, of two a spread
        beyond the assumption says nothing. Terms that are printed bound sigma from below by what their digits hide:
        equal figures are no sign that boots are equal.
        """
        if self.source != "assumed":
            return self
        found = _by_term(trials)
        if not found:
            return self
        # terms vary on their own, so their variances add
        sigma = math.hypot(*map(_deviation, found))
        trends = any(len(points) == _TWO_BOOTS and len(dict(points)) == _TWO_BOOTS for points in found)
        if trends and sigma > self.sigma_bytes:
            return self
        rounded = any(set(trial.terms) - {OUTSIDE_TERM} for trial in trials)
        return Noise(sigma_bytes=max(sigma, PRINTED_SIGMA_BYTES) if rounded else sigma, source="residuals")

    def said(self) -> str:
        """``sigma 12.00 MiB, from repeated boots in the archive``."""
        return f"sigma {format_size(self.sigma_bytes)}, {origin(self.sigma_bytes, self.source)}"


def origin(sigma_bytes: float, source: SigmaSource) -> str:
    """Where a deviation comes from, in words."""
    if source == "residuals" and math.isclose(sigma_bytes, PRINTED_SIGMA_BYTES):
        return "what two printed decimals hide: this search's own boots show no more"
    return {
        "archive": "from repeated boots in the archive",
        "residuals": "from this search's own boots",
        "assumed": "assumed, not measured",
    }[source]


def _by_term(trials: Sequence[Trial]) -> list[list[tuple[int, float]]]:
    """Values of each term that several boots state, with their places on the axis: of warm boots, else of cold ones.

    What the two differ by is what being cold costs, and no noise.
    """
    for cold in (False, True):
        alike = [trial for trial in trials if (trial.warm is False) is cold]
        names = sorted({name for trial in alike for name in trial.terms})
        told = [[(trial.value, trial.terms[name]) for trial in alike if name in trial.terms] for name in names]
        several = [points for points in told if len(points) > 1]
        if several:
            return several
    return []


def _deviation(points: Sequence[tuple[int, float]]) -> float:
    """One deviation of a term from its line over the axis: a model's tables, say, grow with the window.

    Without two boots more than the line has parameters the whole spread is taken.
    """
    places, values = [float(place) for place, _ in points], [value for _, value in points]
    if len(points) > _TWO_BOOTS and len(set(places)) > 1:
        slope, base = linear_regression(places, values)
        values = [value - slope * place - base for place, value in zip(places, values, strict=True)]
    if len(points) < _FEW_BOOTS:
        return max(values) - min(values)
    return stdev(values)


def steady_terms(ledger: BootLedger, axis: str) -> dict[str, float]:
    """The terms of a boot that its place on an axis does not move, in bytes; the residuals' raw material."""
    moved = MOVED_TERMS.get(axis, frozenset())
    if ledger.get("plan_expert_cache_bytes") is not None:
        moved |= ARENA_TERMS
    values = {name: ledger.get(name) for name in STEADY_TERMS if name not in moved}
    return {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}


def grain(
    *, block_tokens: int | None = None, slot_bytes: float | None = None, bytes_per_token: float | None = None
) -> int | None:
    """Tokens below which a window moves nothing on the device, so that it is not monotone there.

    Args:
        block_tokens: tokens of a KV block; 272 to 2,096 on hybrids, whose block holds one state.
        slot_bytes: an expert slot of an arena, by which the arena shrinks at once.
        bytes_per_token: marginal bytes of one token, which the slot is divided by.

    Returns:
        The larger of the two, ``None`` where neither is known.
    """
    blocks = [block_tokens] if block_tokens else []
    slots = [math.ceil(slot_bytes / bytes_per_token)] if slot_bytes and bytes_per_token else []
    return max(blocks + slots, default=None)


def ledger_grain(ledger: BootLedger, axis: str) -> int | None:
    """The least step that a boot tells apart, by what it printed of blocks and arena, in the axis' unit.

    Windows: tokens of a block, or of an arena's slot. Pools: bytes of a block. ``None`` on every other axis.
    """
    if axis == "kv_cache_memory_bytes":
        return _block_bytes(ledger)
    if axis != "max_model_len":
        return None
    known = {name: ledger.get(name) for name in ("block_size", *_ARENA)}
    numbers = {name: float(value) for name, value in known.items() if isinstance(value, (int, float)) and value > 0}
    slot = rate = None
    if all(name in numbers for name in _ARENA):
        arena, slots, registry = (numbers[name] for name in _ARENA)
        slot, rate = arena / slots, RESERVE_FACTOR * registry
    block = numbers.get("block_size")
    return grain(block_tokens=None if block is None else int(block), slot_bytes=slot, bytes_per_token=rate)


def _block_bytes(ledger: BootLedger) -> int | None:
    """Bytes of one KV block of a rank, all layers of a group together."""
    pool = ledger.get("kv_cache_memory_bytes") or ledger.get("available_kv_bytes")
    blocks, tokens, size = (ledger.get(name) for name in ("gpu_blocks", "kv_tokens", "block_size"))
    if isinstance(tokens, int) and isinstance(size, int) and not blocks and size > 0:
        blocks = tokens // size
    if not isinstance(pool, (int, float)) or not isinstance(blocks, int) or pool <= 0 or blocks <= 0:
        return None
    # of printed figures, or of a pool that ends in a part of a block, the least that it can be
    return int(pool) // (blocks if int(pool) % blocks == 0 else blocks + 1)


def sigma_units(trials: Sequence[Trial], sigma_bytes: float) -> float | None:
    """Sigma in the axis' unit, by the cheapest unit that a boot measured; ``None`` where none did.

    Limits that are arithmetic on pinned numbers do not count: noise does not move them.
    """
    rates = [
        limit.bytes_per_unit
        for trial in trials
        for limit in trial.hint.limits
        if not limit.exact and limit.bytes_per_unit is not None and 0 < limit.bytes_per_unit < math.inf
    ]
    return sigma_bytes / rates[-1] if rates else None


def effective_quantum(axis: Axis, trials: Sequence[Trial], noise: Noise | None) -> tuple[int, tuple[str, ...]]:
    """The quantum raised to what device and noise can tell apart, with the reasons in words.

    At least the largest grain of the boots, and at least three sigma where sigma is more than a third of a quantum;
    always a multiple of the axis' own quantum.
    """
    notes = []
    steps, own = 1, axis.show(axis.quantum)
    finest = max((trial.grain for trial in trials if trial.grain), default=0)
    if finest > axis.quantum:
        steps = -(-finest // axis.quantum)
        notes.append(
            f"quantum raised from {own} to {axis.show(steps * axis.quantum)}: below {axis.show(finest)}, a KV block "
            "or an arena slot, the device itself is not monotone"
        )
    # one boot has no residuals yet, and an assumption shall not cost the second boot its place
    sigma = None if noise is None or len(trials) < _TWO_BOOTS else sigma_units(trials, noise.sigma_bytes)
    if noise is not None and sigma is not None and 3 * sigma > steps * axis.quantum:
        steps = min(math.ceil(3 * sigma / axis.quantum), max(1, (axis.ceiling - axis.floor) // axis.quantum))
        notes = [f"quantum raised from {own} to {axis.show(steps * axis.quantum)}: three sigma ({noise.said()})"]
    return steps * axis.quantum, tuple(notes)


def slack_bytes(trial: Trial) -> float | None:
    """Bytes that a boot which passed had left in the tightest limit that noise moves; ``None`` where it states none."""
    margins = [limit.margin_bytes for limit in trial.hint.limits if not limit.exact]
    known = [margin for margin in margins if math.isfinite(margin)]
    return max(0.0, min(known)) if known else None


def deficit_bytes(trial: Trial) -> float | None:
    """Bytes that a boot which failed was short of, at least; ``None`` where it did not say."""
    return max((-limit.margin_bytes for limit in trial.hint.limits if limit.margin_bytes < 0), default=None)


def by_exact_limit(trial: Trial) -> bool:
    """It failed by arithmetic on pinned numbers, which no repetition changes."""
    short = [limit for limit in trial.hint.limits if limit.margin_bytes < 0]
    return bool(short) and all(limit.exact for limit in short)


def deploy_value(value: int | None, trials: Sequence[Trial], noise: Noise | None) -> int | None:
    """The winner less three sigma, in the axis' unit: what a deploy may promise day after day.

    ``None`` without a winner, or where sigma or the bytes of a unit are not known.
    """
    if value is None or noise is None or noise.sigma_bytes == 0:
        return None if noise is None else value
    sigma = sigma_units(trials, noise.sigma_bytes)
    if sigma is not None:
        return max(0, math.floor(value - DEPLOY_SIGMAS * sigma))
    exact = [trial for trial in trials if trial.hint.limits]
    return value if exact and all(limit.exact for trial in exact for limit in trial.hint.limits) else None
