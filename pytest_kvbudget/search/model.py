"""What a search is told and what it answers."""

from __future__ import annotations

from typing import Final, Literal, Protocol, runtime_checkable

import msgspec

from pytest_kvbudget.ledger.model import Cause, Lever
from pytest_kvbudget.units import exact_unit, size_in
from pytest_kvbudget.verdict import FindingKind, Verdict

BYTES_AXES: Final = frozenset({"kv_cache_memory_bytes", "reserved_headroom", "cudagraph_per_graph"})
"""Axes and knobs whose values are bytes."""
SigmaSource = Literal["archive", "residuals", "assumed"]


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """The rungs of a ladder: ``ceiling``, then down by ``quantum`` while not below ``floor``, and ``floor`` itself.

    They are in the unit of the field that ``name`` names, times ``scale``: tokens for ``max_model_len``, bytes for
    ``kv_cache_memory_bytes``, ten-thousandths for ``gpu_memory_utilization``.
    """

    name: str
    floor: int
    ceiling: int
    quantum: int
    scale: int = 1
    """How many of these whole numbers make 1 of the field: 10,000 where the field is a fraction."""
    fine: int | None = None
    """The quantum that was asked for, where ``quantum`` was raised: what was booted on that grid still counts."""

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

    def setting(self, value: int) -> int | float:
        """A rung as the field takes it."""
        return value if self.scale == 1 else value / self.scale

    def show(self, value: int) -> str:
        """A rung for people: ``245,760``, ``0.97``, ``50.00 MiB``."""
        if self.scale != 1:
            return f"{value / self.scale:g}"
        return size_in(value, self.unit_bytes) if self.name in BYTES_AXES else f"{value:,}"

    @property
    def unit_bytes(self) -> int:
        """The unit of rungs that are sizes, the largest that writes all of them exactly; 1 for other axes."""
        ends = (self.floor, self.ceiling, self.fine or self.quantum)
        return exact_unit(ends) if self.name in BYTES_AXES else 1

    def index_at_or_above(self, value: int) -> int:
        """Index of the lowest rung at or above ``value``; the number of rungs when even the ceiling is below it."""
        index = self.index_at_or_below(value)
        return index if index >= 0 and self.value(index) == value else index + 1

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
    rate_at_most: bool = False
    """`bytes_per_unit` is a share of what does not all grow with the axis: one more unit takes no more than it."""
    grows_with: str | None = None
    """Another limit whose margin one more unit of the axis changes by as many bytes."""
    at_least: bool = False
    """The deficit is only a lower bound: one allocation did not fit, and more would have followed."""
    loose: bool = False
    """Limits that this engine states nothing about when it serves may be hit first: what it compiles and loads."""
    exact: bool = False
    """Arithmetic on pinned numbers, which comes out the same on every boot: noise does not move it."""


class Hint(msgspec.Struct, frozen=True, kw_only=True):
    """What a boot said about where the boundary is. Every part may be missing, and none of it is trusted as truth."""

    limits: tuple[Limit, ...] = ()
    estimate: int | None = None
    """The engine's own estimate of the largest value that fits, in the axis' unit."""


class Prior(msgspec.Struct, frozen=True, kw_only=True):
    """Where something that was not booted says the boundary is."""

    value: float
    """In the axis' unit."""
    relative: float
    """What it may be off, as a share of the value: 0.03 for a plan that is right within 3 %."""
    source: Literal["plan", "archive"] = "plan"


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One boot of one rung, as a search sees it."""

    value: int
    verdict: Verdict
    hint: Hint = Hint()
    cause: Cause | None = None
    pool_short: bool = False
    """The scaled pool turned out too small for the promised windows: an UNKNOWN that carries a new rate."""
    warm: bool | None = None
    """What the boot compiles was in the cache; ``None`` where nobody knows or nothing is compiled."""
    device_set: str | None = None
    """What it ran on: equal for sets with equal total, idle free memory and host share; ``None`` where there is one."""
    devices: tuple[str, ...] = ()
    """Names of what it ran on."""
    grain: int | None = None
    """Least step of the axis that this engine tells apart, in the axis' unit: see `noise.grain`."""
    terms: dict[str, float] = {}
    """Ledger terms that the axis does not move, in bytes: what differs between boots is noise."""
    reused: bool = False
    """An earlier boot that stands for the one that was asked for: it has its verdict and cost nothing."""
    short: bool = False
    """It failed for want of more (a sweep: for the opposite reason), and bounds what passes from the other side.

    Where the boundary is looked for there was room to spare, so that its verdict is a pass to the search.
    """

    @property
    def passed(self) -> bool:
        """The rung counts as passed."""
        return self.verdict in {Verdict.PASS, Verdict.MARGINAL}

    @property
    def served(self) -> bool:
        """It really passed."""
        return self.passed and not self.short


class SetBound(msgspec.Struct, frozen=True, kw_only=True):
    """What a search booted on device sets of one kind: those that no boot tells apart."""

    device_set: str
    """Its label, see `Trial.device_set`."""
    devices: tuple[str, ...] = ()
    """The sets of this kind that were booted on: ``"0"``, or ``"0+1"`` where a set has several devices."""
    passed: int | None = None
    """The best value that passed there, with nothing that failed there in its way."""
    failed_at: int | None = None
    """The least value, farthest from the goal of a sweep, that failed there for too much."""
    short_at: int | None = None
    """The value nearest to the goal that failed there for too little."""


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
    repeats: int = 0
    """Boots among them that repeated a rung with a verdict: noise, a cold failure, a contradiction."""
    neighbours: int = 0
    """Boots beside the proof that were asked for (``verify``), or of a ceiling that may have most room; not part of
    ``boots``."""
    reused: int = 0
    """Finished boots that were taken over from an earlier run or ladder; not part of ``boots``."""
    sigma_bytes: float | None = None
    """One standard deviation of what the same boot takes; ``None`` where boots were taken as exact."""
    sigma_source: SigmaSource | None = None
    deploy_value: int | None = None
    """``value`` less three sigma, in the axis' unit; ``None`` where sigma or the bytes per unit are not known."""
    steady_value: int | None = None
    """Largest rung that passed three of three boots, where the boundary is flaky."""
    refused_at: int | None = None
    """Smallest rung that failed two of two, where the boundary is flaky."""
    lever: Lever | None = None
    """What to turn where the axis itself moves nothing."""
    sets: tuple[SetBound, ...] = ()
    """What was booted on each kind of device set; it holds for the first. Empty where there is one set."""
    notes: tuple[str, ...] = ()
    """What else has to be said with it: a quantum that was raised, boots that were not repeated."""
    sentence: str
    """The finding in one sentence for people, with its proof."""

    @property
    def proven(self) -> bool:
        """The proof is complete."""
        return self.kind in {FindingKind.PROVEN, FindingKind.CEILING_REACHED}


class SweepKey(msgspec.Struct, frozen=True, kw_only=True):
    """What the result of a headroom sweep belongs to; another key's result says nothing here (Neuron document, 3)."""

    model: str | None = None
    weights_format: str | None = None
    tensor_parallel_size: int | None = None
    backend: str | None = None
    lnc: int | None = None
    hardware: str | None = None


class SweepFinding(msgspec.Struct, frozen=True, kw_only=True):
    """What a headroom sweep established, and its proof. Values are in the knob's own unit, see `knobs.Knob.setting`."""

    kind: FindingKind
    knob: str
    lowest: int
    highest: int
    step: int
    """Of the grid on which ``value`` and ``failed_at`` are neighbours."""
    unit_bytes: int | None = None
    """Bytes of the unit in which all its sizes are written; ``None`` for fractions."""
    coarse_step: int | None = None
    """Of the grid before that, where a finer one was booted between its neighbours."""
    key: SweepKey = SweepKey()
    value: int | None
    """The best value that passed: least headroom, smallest pool, largest fraction; ``None`` where none did."""
    failed_at: int | None = None
    """The next better value, which failed: the other half of the proof."""
    bounded_by: Cause | None = None
    short_at: int | None = None
    """Nearest value on the other side that failed for the opposite reason: the end of what passes."""
    short_by: Cause | None = None
    boots: int
    retries: int = 0
    repeats: int = 0
    confirmations: int = 0
    reused: int = 0
    """Finished boots that were taken over from an earlier run; not part of ``boots``."""
    sigma_bytes: float | None = None
    sigma_source: SigmaSource | None = None
    deploy_value: int | None = None
    """``value`` with three sigma of room more; ``None`` where sigma is not known, or the other edge is nearer."""
    steady_value: int | None = None
    """Best value that passed three of three boots, where the edge is flaky."""
    refused_at: int | None = None
    """Nearest better value that failed two of two, where the edge is flaky."""
    lever: Lever | None = None
    sets: tuple[SetBound, ...] = ()
    """See `Finding.sets`."""
    notes: tuple[str, ...] = ()
    sentence: str

    @property
    def proven(self) -> bool:
        """The proof is complete."""
        return self.kind in {FindingKind.PROVEN, FindingKind.CEILING_REACHED, FindingKind.FLOOR_REACHED}


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


@runtime_checkable
class BatchStrategy(Strategy, Protocol):
    """A strategy that can use several device sets at once."""

    def next_indices(
        self, axis: Axis, history: tuple[Trial, ...], pending: tuple[int, ...], count: int, rounds: int
    ) -> tuple[int, ...]:
        """Indices of up to ``count`` further rungs to boot while those of ``pending`` run.

        ``rounds`` batches were asked for before: the bound is one on rounds.
        """
        ...
