"""Where each GiB went: stacks of memory terms per rank, from ledger facts and device readings.

Nothing here fills a gap. A term that no line states is listed as not stated, and what remains of the device after
the stated terms is shown as remaining, not as free.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from pytest_kvbudget.device.model import DeviceMemory
from pytest_kvbudget.ledger.model import BootLedger, Value
from pytest_kvbudget.records import AttemptRecord
from pytest_kvbudget.verdict import Provenance

MOST_RANKS: Final = 16
"""Ranks shown with bars of their own; the facts table has them all."""


class Segment(NamedTuple):
    """One term of a stack."""

    key: str
    """Colour class: equal terms have equal colours in every bar."""
    name: str
    size_bytes: float
    precision_bytes: float = 0
    derived: bool = False
    """A difference of two stated values."""


class Bar(NamedTuple):
    """One stack of terms of one rank against the device."""

    title: str
    kind: str
    """``planned``, ``measured`` or ``simulated``, ..."""
    rank: str | None
    segments: tuple[Segment, ...]
    total_bytes: float | None
    budget_bytes: float | None = None
    deficit: Segment | None = None
    """What was asked for beyond the stack; drawn on from its end."""
    free_bytes: float | None = None
    """Free memory, where it was stated; otherwise the remainder is just that."""
    missing: tuple[str, ...] = ()
    """Terms of this account that no line states."""

    @property
    def stacked_bytes(self) -> float:
        """Sum of the terms; negative ones (a capture that fitted into counted pages) take no room."""
        return sum(max(0.0, segment.size_bytes) for segment in self.segments)

    @property
    def precision_bytes(self) -> float:
        """How exactly the coarsest term was read."""
        return max((segment.precision_bytes for segment in self.segments), default=0.0)

    @property
    def remainder_bytes(self) -> float | None:
        """What the stated terms leave of the device, ``None`` where they fill it or its size is not stated."""
        if self.total_bytes is None:
            return None
        rest = self.total_bytes - self.stacked_bytes
        return rest if rest > 0 else None


class Comparison(NamedTuple):
    """A term as planned and as measured."""

    name: str
    planned: Value
    measured: Value


class _View:
    """The ledger as one rank sees it."""

    def __init__(
        self, ledger: BootLedger, rank: str | None, ranks: Sequence[str | None], device: DeviceMemory | None
    ) -> None:
        self.ledger, self.rank, self.ranks, self.device = ledger, rank, ranks, device

    def value(self, *names: str) -> Value | None:
        """The first of these facts that has a number, from this rank or from a process that speaks for all ranks."""
        for name in names:
            found = self.ledger.ranks.get(name, {}).get(self.rank or "")
            if found is None:
                found = self.ledger.facts.get(name)
                if found is None or (found.rank in self.ranks and found.rank not in {None, self.rank}):
                    continue
            if not isinstance(found.value, (str, bool)):
                return found
        return None

    def number(self, *names: str) -> float | None:
        """`value` as a number."""
        found = self.value(*names)
        return None if found is None else float(found.value)

    def total(self) -> float | None:
        """The device's size: as a line states it, else as the driver shows it."""
        stated = self.number("total_bytes")
        return float(self.device.total_bytes) if stated is None and self.device is not None else stated

    def owner_of(self, values: Iterable[Value | None]) -> str | None:
        """This rank, where it printed any of these; ``None`` where they are the whole engine's."""
        mine = any(value is not None and value.rank == self.rank for value in values)
        return self.rank if mine else None

    def owner(self, *names: str) -> str | None:
        """`owner_of` the values of these facts."""
        return self.owner_of(self.value(name) for name in names)


def memory_bars(record: AttemptRecord) -> list[Bar]:
    """All stacks that the record can fill, rank by rank: planned, accounted, at a failure, as the driver showed it."""
    devices = _devices(record, "ready") or _devices(record, "idle")
    ledger = record.ledger or BootLedger(family="unknown")
    ranks = _ranks(ledger)
    bars: list[Bar] = []
    for index, rank in enumerate(ranks[:MOST_RANKS]):
        view = _View(ledger, rank, ranks, _device_of(devices, index, len(ranks)))
        # what no rank printed is the engine's, and is shown once
        bars += [bar for bar in _bars_of(view) if index == 0 or bar.rank is not None]
    if record.target.simulated:
        bars = [bar._replace(kind=_simulated(bar.kind)) for bar in bars]
    for device in _devices(record, "ready")[:MOST_RANKS]:
        kind = Provenance.SIMULATED if record.target.simulated else Provenance.MEASURED
        used = Segment("used", "used", device.used_bytes)
        title = f"Device {device.device} when ready ({device.source})"
        bars.append(Bar(title, kind, None, (used,), device.total_bytes, free_bytes=device.free_bytes))
    return bars


def _simulated(kind: str) -> str:
    return "planned, simulated" if kind == "planned" else Provenance.SIMULATED


def comparisons(record: AttemptRecord) -> list[Comparison]:
    """Terms that were both planned and measured; a pair with one half missing is left out."""
    if record.ledger is None:
        return []
    view = _View(record.ledger, None, (), None)
    found = []
    for name, planned_names, measured_names in _COMPARED:
        planned, measured = view.value(*planned_names), view.value(*measured_names)
        if planned is not None and measured is not None:
            found.append(Comparison(name, planned, measured))
    return found


_KV: Final = ("kv_in_use_bytes", "available_kv_bytes")
_GRAPHS: Final = ("graph_actual_bytes", "graph_capture_bytes")
_COMPARED: Final[tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]] = (
    ("KV reserve against KV pool", ("plan_kv_reserve_bytes",), _KV),
    ("CUDA graphs, charged by the plan", ("plan_graphs_bytes",), _GRAPHS),
    ("CUDA graphs, engine's estimate", ("graph_estimated_bytes",), _GRAPHS),
    (
        "Runtime overhead",
        ("plan_overhead_planned_bytes", "plan_overhead_bytes"),
        ("plan_overhead_measured_bytes",),
    ),
    (
        "KV bytes per token",
        ("plan_kv_b_per_token", "plan_registry_b_per_token"),
        ("measured_kv_b_per_token",),
    ),
    ("Window", ("configured_max_model_len",), ("max_model_len",)),
)


def _bars_of(view: _View) -> Iterator[Bar]:
    for build in (_planned, _accounted, _neuron_use, _neuron_compile, _failed_allocation):
        bar = build(view)
        if bar is not None:
            yield bar


_PLAN: Final = (
    ("weights", "non-expert weights", "plan_non_expert_bytes"),
    ("kv", "KV reserve", "plan_kv_reserve_bytes"),
    ("graphs", "CUDA graphs", "plan_graphs_bytes"),
    ("other", "runtime overhead", "plan_overhead_bytes"),
    ("experts", "expert cache", "plan_expert_cache_bytes"),
)
_NEURON_USE: Final = (
    ("weights", "tensors", "hbm_tensors_bytes"),
    ("weights2", "constants", "hbm_constants_bytes"),
    ("graphs", "model code", "hbm_model_code_bytes"),
    ("activation", "shared scratchpad", "hbm_shared_scratchpad_bytes"),
    ("other", "runtime", "hbm_runtime_bytes"),
    ("rings", "DMA rings", "hbm_dma_rings_bytes"),
    ("experts", "collectives", "hbm_collectives_bytes"),
)
_NEURON_COMPILE: Final = (
    ("weights2", "constants", "constants_bytes"),
    ("kv", "input and output tensors", "io_tensors_bytes"),
    ("activation", "scratchpad", "scratchpad_bytes"),
    ("rings", "DMA rings", "dma_ring_bytes"),
)


def _stack(view: _View, layout: Sequence[tuple[str, str, str]]) -> tuple[tuple[Segment, ...], tuple[str, ...]]:
    segments, missing = [], []
    for key, name, fact in layout:
        value = view.value(fact)
        if value is None:
            missing.append(name)
        else:
            segments.append(Segment(key, name, float(value.value), value.precision))
    return tuple(segments), tuple(missing)


def _planned(view: _View) -> Bar | None:
    segments, missing = _stack(view, _PLAN)
    if not segments:
        return None
    return Bar(
        "Planned before the boot", "planned", view.owner(*(fact for _, _, fact in _PLAN)), segments, view.total(),
        budget_bytes=view.number("plan_budget_bytes"), missing=missing,
    )  # fmt: skip


def _accounted(view: _View) -> Bar | None:
    """The engine's own account after profiling.

    From vLLM 0.27 on it states weights and non-torch together as consumed, and its peak activation already holds the
    graph estimate; the estimate is taken out there, so that graphs are not stacked twice.
    """
    consumed, estimate = view.value("consumed_bytes"), view.number("graph_estimated_bytes")
    layout: list[tuple[str, str, Value | None]]
    if consumed is not None:
        layout = [("weights", "weights and non-torch", consumed)]
    else:
        weights = view.value("weights_bytes", "model_load_bytes")
        layout = [("weights", "weights", weights), ("nontorch", "non-torch", view.value("non_torch_bytes"))]
    layout.append(("activation", "peak activation", view.value("peak_activation_bytes")))
    layout.append(("kv", "KV cache", view.value(*_KV)))
    actual = view.value(*_GRAPHS)
    graphs = "CUDA graphs" if actual is not None or estimate is None else "CUDA graphs (estimate)"
    layout.append(("graphs", graphs, actual or view.value("graph_estimated_bytes")))
    if all(value is None for _, _, value in layout):
        return None
    segments, missing = [], []
    for key, name, value in layout:
        if value is None:
            missing.append(name)
            continue
        number, derived = float(value.value), False
        if key == "activation" and consumed is not None and estimate is not None and 0 < estimate <= number:
            number, derived = number - estimate, True
        segments.append(Segment(key, name, number, value.precision, derived))
    values = [value for _, _, value in layout if value is not None]
    stated = values[0]
    return Bar(
        "The engine's own account", stated.provenance, view.owner_of(values), tuple(segments), view.total(),
        budget_bytes=view.number("requested_bytes"), deficit=_kv_deficit(view), missing=tuple(missing),
    )  # fmt: skip


def _kv_deficit(view: _View) -> Segment | None:
    needed, available = view.value("kv_needed_bytes"), view.value("available_kv_bytes")
    if needed is None or available is None:
        return None
    short = float(needed.value) - float(available.value)
    return Segment("deficit", "KV missing", short, needed.precision, derived=True) if short > 0 else None


def _neuron_use(view: _View) -> Bar | None:
    segments, missing = _stack(view, _NEURON_USE)
    if not segments:
        return None
    used, free = view.number("hbm_total_used_bytes"), view.number("free_bytes")
    total = used + free if used is not None and free is not None else view.total()
    facts = [fact for _, _, fact in _NEURON_USE]
    stated = view.value(*facts)
    kind = Provenance.MEASURED if stated is None else stated.provenance
    tried = view.value("tried_alloc_bytes")
    deficit = None if tried is None else Segment("deficit", "refused allocation", float(tried.value), tried.precision)
    return Bar(
        "Neuron device memory", kind, view.owner(*facts), segments, total,
        deficit=deficit, free_bytes=free, missing=missing,
    )  # fmt: skip


def _neuron_compile(view: _View) -> Bar | None:
    segments, missing = _stack(view, _NEURON_COMPILE)
    peak, limit = view.value("peak_hbm_bytes"), view.number("hbm_limit_bytes")
    if peak is None:
        return None
    rest = float(peak.value) - sum(segment.size_bytes for segment in segments)
    if rest > 0:
        segments = (*segments, Segment("other", "rest of the peak", rest, peak.precision, derived=True))
    return Bar("Peak of the compiled program", peak.provenance, view.owner_of([peak]), segments, limit, missing=missing)


def _failed_allocation(view: _View) -> Bar | None:
    """The torch allocator's state in an out-of-memory message."""
    tried, allocated = view.value("tried_alloc_bytes"), view.value("torch_allocated_bytes")
    if tried is None or view.value("hbm_tensors_bytes") is not None:
        return None
    private, reserved = view.value("private_pool_bytes"), view.value("reserved_unallocated_bytes")
    process, free = view.value("process_in_use_bytes"), view.number("free_bytes")
    segments: list[Segment] = []
    if allocated is not None:
        rest = float(allocated.value) - (0.0 if private is None else float(private.value))
        segments.append(Segment("used", "allocated by PyTorch", rest, allocated.precision, private is not None))
        if private is not None:
            segments.append(Segment("graphs", "private pools (graphs)", float(private.value), private.precision))
        if reserved is not None:
            segments.append(Segment("activation", "reserved, unallocated", float(reserved.value), reserved.precision))
    stacked = sum(segment.size_bytes for segment in segments)
    if process is not None and float(process.value) > stacked:
        rest = float(process.value) - stacked
        segments.append(Segment("nontorch", "rest of the process", rest, process.precision, allocated is not None))
    missing = () if allocated is not None or process is not None else ("allocated by PyTorch",)
    short = float(tried.value) - (free or 0)
    deficit = Segment("deficit", "refused beyond free", short, tried.precision, derived=True)
    return Bar(
        "At the failed allocation", tried.provenance, view.owner_of([tried]), tuple(segments), view.total(),
        deficit=deficit if short > 0 and free is not None else None, free_bytes=free, missing=missing,
    )  # fmt: skip


def _ranks(ledger: BootLedger) -> list[str | None]:
    """Processes that printed memory figures; front ends, which speak for all ranks, only where there is no other."""
    memory = {rank for name, by_rank in ledger.ranks.items() if name.endswith("_bytes") for rank in by_rank}
    workers = {rank for rank in memory if not rank.startswith(("APIServer", "EngineCore"))}
    return [*sorted(workers or memory, key=_natural)] or [None]


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def _devices(record: AttemptRecord, moment: str) -> tuple[DeviceMemory, ...]:
    return next((reading.devices for reading in record.memory if reading.moment == moment), ())


def _device_of(devices: tuple[DeviceMemory, ...], index: int, ranks: int) -> DeviceMemory | None:
    """The device whose size stands for a rank: its own when there are as many as ranks, any when all are alike."""
    if len(devices) == ranks:
        return devices[index]
    return devices[0] if len({device.total_bytes for device in devices}) == 1 else None
