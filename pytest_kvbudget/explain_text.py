"""The page that ``kvbudget explain`` prints for people: verdict first, then memory, levers, evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from pytest_kvbudget.ledger.model import BootLedger, Lever, Value
from pytest_kvbudget.ledger.reconcile import reconcile
from pytest_kvbudget.ledger.sentences import size_text
from pytest_kvbudget.units import GIB
from pytest_kvbudget.verdict import Phase, Provenance

Place = Callable[[int], str]

WIDEST_EVIDENCE: Final = 240
MOST_RANKS: Final = 4
"""Columns of a table; further ranks are in the JSON."""

_TITLES: Final[dict[str, str]] = {
    "total_bytes": "device total",
    "free_bytes": "free",
    "used_after_load_bytes": "in use",
    "free_after_load_bytes": "free",
    "hbm_total_used_bytes": "HBM in use",
    "requested_bytes": "requested share",
    "gpu_memory_utilization": "utilization",
    "weights_bytes": "weights",
    "model_load_bytes": "model load",
    "consumed_bytes": "consumed (weights + non-torch)",
    "non_torch_bytes": "non-torch",
    "peak_activation_bytes": "peak activation",
    "peak_torch_bytes": "peak torch",
    "graph_estimated_bytes": "graphs, estimated",
    "graph_capture_bytes": "graphs, captured",
    "graph_actual_bytes": "graphs, actual",
    "available_kv_bytes": "available for KV cache",
    "kv_needed_bytes": "KV cache needed",
    "kv_in_use_bytes": "KV cache in use",
    "kv_tokens": "KV cache tokens",
    "max_concurrency": "concurrency at the window",
    "max_model_len": "window (max_model_len)",
    "estimated_max_model_len": "window, engine's estimate",
    "tried_alloc_bytes": "allocation that failed",
    "torch_allocated_bytes": "allocated by torch",
    "torch_reserved_bytes": "reserved by torch",
    "plan_budget_bytes": "plan: budget",
    "plan_non_expert_bytes": "plan: non-expert weights",
    "plan_kv_reserve_bytes": "plan: KV reserve",
    "plan_graphs_bytes": "plan: graphs",
    "plan_overhead_bytes": "plan: runtime overhead",
    "plan_expert_cache_bytes": "plan: expert cache",
    "plan_slots": "plan: expert slots",
}
"""Order and names of the table; other facts follow in the order of the log."""
_FURTHER: Final[dict[str, str]] = {
    "alloc_alignment_bytes": "alignment of the allocation",
    "available_after_weights_bytes": "available after the weights",
    "block_size": "tokens of a KV block",
    "compile_secs": "compiling took",
    "configured_max_model_len": "window asked for",
    "constants_bytes": "constants",
    "cp_world_size": "context parallel ranks",
    "cpu_blocks": "KV blocks, host",
    "current_free_bytes": "free now",
    "dma_ring_bytes": "DMA rings",
    "effective_kv_bytes": "KV cache that is used",
    "gpu_blocks": "KV blocks, device",
    "graph_capture_secs": "graph capture took",
    "hbm_collectives_bytes": "HBM: collectives",
    "hbm_constants_bytes": "HBM: constants",
    "hbm_dma_rings_bytes": "HBM: DMA rings",
    "hbm_dma_rings_collectives_bytes": "HBM: DMA rings, collectives",
    "hbm_dma_rings_io_bytes": "HBM: DMA rings, input and output",
    "hbm_dma_rings_runtime_bytes": "HBM: DMA rings, runtime",
    "hbm_dma_rings_spill_bytes": "HBM: DMA rings, spill",
    "hbm_limit_bytes": "HBM limit of the compiler",
    "hbm_model_code_bytes": "HBM: program code",
    "hbm_profiler_bytes": "HBM: profiler buffers",
    "hbm_runtime_bytes": "HBM: runtime",
    "hbm_scratchpad_bytes": "HBM: scratchpad",
    "hbm_shared_scratchpad_bytes": "HBM: shared scratchpad",
    "hbm_tensors_bytes": "HBM: tensors",
    "host_mem_available_bytes": "host memory available",
    "host_total_bytes": "host memory",
    "host_usable_bytes": "host memory that may be used",
    "host_used_bytes": "host memory in use",
    "init_engine_secs": "engine start took",
    "initial_usage_bytes": "in use before the engine",
    "io_tensors_bytes": "input and output tensors",
    "kv_b_per_token_delta": "bytes per KV token, measured less planned",
    "kv_cache_memory_bytes": "pinned KV pool",
    "kv_cap_bytes": "cap of the KV cache",
    "kv_k_bytes": "KV cache, keys",
    "kv_suggest_fit_bytes": "pool that the engine suggests",
    "kv_suggest_full_bytes": "pool that would use all that was free",
    "kv_usage_pct": "KV cache in use, share",
    "kv_v_bytes": "KV cache, values",
    "margin_left_bytes": "margin left",
    "margin_required_bytes": "margin required",
    "margin_short_bytes": "margin short by",
    "max_num_batched_tokens": "tokens of a step (max_num_batched_tokens)",
    "max_num_seqs": "sequences (max_num_seqs)",
    "max_total_tokens": "tokens of all requests, at most",
    "measured_kv_b_per_token": "bytes per KV token, measured",
    "mem_fraction_static": "fraction for weights and KV cache",
    "min_kv_bytes": "least KV cache that is accepted",
    "model_load_secs": "loading the model took",
    "n_ctx": "context (n_ctx)",
    "n_ctx_slot": "context of a slot",
    "n_slots": "slots",
    "native_max_model_len": "window that the model was made for",
    "non_kv_bytes": "all but the KV cache",
    "non_torch_before_load_bytes": "non-torch before the weights",
    "num_gpu_blocks_override": "KV blocks that were set (num_gpu_blocks_override)",
    "padding_layers": "layers added as padding",
    "padding_waste_pct": "lost to padding",
    "peak_hbm_bytes": "HBM peak of the program",
    "plan_host_experts_bytes": "plan: experts in host memory",
    "plan_kv_b_per_token": "plan: bytes per KV token",
    "plan_overhead_delta_bytes": "plan: overhead, measured less planned",
    "plan_overhead_measured_bytes": "plan: overhead as measured",
    "plan_overhead_planned_bytes": "plan: overhead as planned",
    "plan_ple_bytes": "plan: per-layer embeddings",
    "plan_registry_b_per_token": "plan: bytes per KV token of the registry",
    "plan_resident_layers_bytes": "plan: resident layers",
    "ple_locked_bytes": "per-layer embeddings, locked in host memory",
    "ple_unlocked_bytes": "per-layer embeddings, not locked",
    "post_profile_bytes": "in use after the profile run",
    "private_pool_bytes": "graphs' own pools",
    "process_in_use_bytes": "in use by this process",
    "profiled_tokens": "tokens of the profile run",
    "profiler_bytes": "profiler",
    "projected_bytes": "projected",
    "projected_host_bytes": "host memory needed",
    "reserved_headroom_bytes": "reserved headroom",
    "reserved_unallocated_bytes": "reserved by torch, not allocated",
    "running": "requests running",
    "scratchpad_bytes": "scratchpad",
    "state_blocks": "state blocks",
    "tensor_parallel_size": "ranks (tensor_parallel_size)",
    "tried_alloc_rounded_bytes": "allocation that failed, as rounded up",
    "user_budget_bytes": "budget after the reserve",
    "utilization_equivalent": "utilization with the same KV cache",
    "utilization_without_graph_profile": "utilization without graphs counted",
    "waiting": "requests waiting",
    "weights_read_secs": "reading the weights took",
    "workspace_current_bytes": "workspace there is",
    "workspace_required_bytes": "workspace needed",
}
"""Names of the others."""

LABELS: Final[dict[str, str]] = {**_TITLES, **_FURTHER}
"""What people call each fact."""

_VERDICTS: Final[dict[str, str]] = {
    "failed": "FAILED in {phase}",
    "refused": "REFUSED in {phase}",
    "died_after_boot": "BOOTED, THEN DIED in {phase}",
    "recovered": "RECOVERED in {phase}",
}


class Boots(NamedTuple):
    """Every boot of a stream, oldest first."""

    ledgers: Sequence[BootLedger]
    starts: Sequence[int]
    """The first line of each."""
    times: Sequence[int | None]
    """When each began, in seconds of the day, where its lines say so."""
    forgotten: int = 0
    """Older boots that are not kept."""
    services: Sequence[str | None] = ()
    """Who logged each; nobody is named where all boots are of one service."""

    def logged_by(self, index: int) -> str:
        """The service that logged a boot, to write behind its number."""
        name = self.services[index] if self.services else None
        return f" [{name}]" if name else ""


def page(ledger: BootLedger, boots: Boots, number: int, place: Place, *, files: int = 1) -> str:
    """The whole explanation of one boot, ending in a newline.

    Args:
        ledger: the boot to explain.
        boots: every boot of the stream.
        number: 1-based number of the boot.
        place: writes where a line stands.
        files: how many were read as one log; figures of several are mixed, which whoever reads the page must know.
    """
    lines = [headline(ledger, place)]
    version = f" {ledger.engine_version}" if ledger.engine_version else ""
    simulated = any(value.provenance is Provenance.SIMULATED for value in ledger.facts.values())
    lines.append(
        f"  {ledger.family}{version}, {ledger.lines:,} lines read{_together(files)}, "
        f"boot {number} of {len(boots.ledgers)}{boots.logged_by(number - 1)}"
        f"{', SIMULATED' if simulated else ''}"
    )
    for section in (
        _memory(ledger, place),
        _findings(ledger),
        _levers(ledger),
        _evidence(ledger, place),
        _others(boots, number),
    ):
        body = list(section)
        if body:
            lines += ["", *body]
    return "\n".join(lines) + "\n"


def _together(files: int) -> str:
    return f" of {files} files taken together as the ranks of one engine" if files > 1 else ""


def headline(ledger: BootLedger, place: Place) -> str:
    """The verdict in one sentence."""
    cause = ledger.cause
    if cause is not None:
        begin = _VERDICTS.get(ledger.outcome, "UNKNOWN in {phase}").format(phase=_place_of(ledger.phase))
        if ledger.outcome == "booted":
            begin = "BOOTED, BUT STUCK"
        where = f" ({place(cause.evidence[0].line)})" if cause.evidence else ""
        ranks = {rank for by_rank in ledger.ranks.values() for rank in by_rank}
        who = f" [{cause.rank}]" if cause.rank in ranks and len(ranks) > 1 else ""
        return f"{begin}{who}: {cause.sentence}{where}"
    if ledger.get("compile_only"):
        return "COMPILED: the engine was only to compile, and did; it loaded and served nothing"
    if ledger.outcome == "booted" and ledger.phase in {Phase.READY, Phase.REQUEST}:
        return f"BOOTED: {_capacity(ledger)}"
    if ledger.outcome == "booted":
        return f"NO FAILURE in these lines; they end in {ledger.phase}, before the engine served"
    return f"UNKNOWN: the log ends in {ledger.phase}, before the engine served, and says no reason"


def _place_of(phase: Phase) -> str:
    return "an unknown phase" if phase is Phase.UNKNOWN else str(phase)


def _capacity(ledger: BootLedger) -> str:
    tokens, window, times = (ledger.get(name) for name in ("kv_tokens", "max_model_len", "max_concurrency"))
    if isinstance(tokens, int) and isinstance(window, int):
        ratio = f", {times:.2f} full windows of" if isinstance(times, float) else ", window"
        return f"the engine served; KV cache {tokens:,} tokens{ratio} {window:,}"
    return "the engine served"


def value_text(value: Value) -> str:
    """A value for people: sizes in the unit that fits, counts with separators."""
    number = value.value
    if isinstance(number, (bool, str)):
        return str(number).lower() if isinstance(number, bool) else number
    if value.unit == "bytes":
        return size_text(number, value.precision)
    if value.unit in {"tokens", "count"}:
        return f"{int(number):,}"
    ending = {"seconds": " s", "percent": " %", "ratio": "x"}.get(value.unit, "")
    return f"{number:g}{ending}" if value.unit != "ratio" else f"{number:.2f}{ending}"


def _memory(ledger: BootLedger, place: Place) -> Iterator[str]:
    names = [name for name in _TITLES if name in ledger.facts]
    names += sorted(
        (name for name in ledger.facts if name not in _TITLES and _is_amount(name, ledger.facts[name])),
        key=lambda name: ledger.facts[name].evidence.line,
    )
    if not names:
        return
    yield "Where the memory went (only what the log states; per rank where ranks differ)"
    titles = {name: _title(name) + _when(ledger.facts[name]) for name in names}
    width = max(len(title) for title in titles.values())
    for name in names:
        value = ledger.facts[name]
        ranks = ledger.ranks.get(name, {})
        texts = {rank: value_text(each) for rank, each in sorted(ranks.items())}
        source = "" if value.provenance is Provenance.MEASURED else f", {value.provenance}"
        yield f"  {titles[name]:{width}}  {value_text(value):>14}  {place(value.evidence.line)}{source}"
        if len(set(texts.values())) > 1:
            shown = [f"{rank} {text}" for rank, text in list(texts.items())[:MOST_RANKS]]
            more = f", and {len(texts) - MOST_RANKS} more" if len(texts) > MOST_RANKS else ""
            yield f"  {'':{width}}  {', '.join(shown)}{more}"
    hidden = [_title(name) for name, state in ledger.states.items() if state == "suppressed"]
    if hidden:
        yield f"  not printed because KV bytes are pinned: {', '.join(hidden)}"
    single = [_title(name) for name, state in ledger.states.items() if state == "rank 0 only"]
    if single:
        yield f"  printed by one rank only: {', '.join(single)}"


def _when(value: Value) -> str:
    """What a Neuron core says once, after the weights, is no state at a later failure."""
    return " after the weights" if value.evidence.text.startswith("Neuron HBM: ") else ""


def _findings(ledger: BootLedger) -> Iterator[str]:
    findings = reconcile(ledger)
    if not findings:
        return
    differ = [finding for finding in findings if not finding.agrees]
    if not differ:
        yield f"The figures agree with each other ({len(findings)} checked)"
        return
    yield f"What does not agree ({len(differ)} of {len(findings)} comparisons)"
    for finding in differ:
        worth = [size_text(finding.worth_bytes, 0.005 * GIB)] if finding.worth_bytes else []
        worth += [f"{finding.worth_tokens:,} tokens"] if finding.worth_tokens else []
        worth += [f"{finding.worth_slots:,} slots"] if finding.worth_slots else []
        yield f"  {finding.sentence}" + (f" (worth {', '.join(worth)})" if worth else "")


NAMES: Final = frozenset({"rank", "device", "nd", "nc", "status", "ret", "err"})
"""Numbers that name a place or a code."""


def _is_amount(name: str, value: Value) -> bool:
    """It belongs into a table of where memory went; words, flags and numbers of places are in the JSON."""
    return name not in NAMES and not isinstance(value.value, (bool, str))


def _title(name: str) -> str:
    """What people call a fact; one of a configuration's patterns has only its name."""
    return LABELS.get(name, name.removesuffix("_bytes").replace("_", " "))


def _levers(ledger: BootLedger) -> Iterator[str]:
    levers = ledger.cause.levers if ledger.cause is not None else ()
    good = [lever for lever in levers if lever.effect == "helps"]
    bad = [lever for lever in levers if lever.effect != "helps"]
    if good:
        yield "What to turn"
        yield from (f"  {_lever(lever)}" for lever in good)
    if bad:
        yield "What not to turn"
        yield from (f"  {_lever(lever)}" for lever in bad)


def _lever(lever: Lever) -> str:
    turn = f"{lever.direction} {lever.name}" if lever.direction != "none" else lever.name
    effect = "makes it worse" if lever.effect == "harms" else "no use" if lever.effect == "useless" else ""
    return ": ".join(part for part in (turn, "; ".join(part for part in (effect, lever.why) if part)) if part)


def _evidence(ledger: BootLedger, place: Place) -> Iterator[str]:
    if ledger.cause is None or not ledger.cause.evidence:
        return
    yield "Evidence"
    for evidence in ledger.cause.evidence:
        text = evidence.text
        if len(text) > WIDEST_EVIDENCE:
            text = f"{text[:WIDEST_EVIDENCE]}…"
        yield f"  {place(evidence.line)}: {text}"


def _others(boots: Boots, number: int) -> Iterator[str]:
    ledgers, starts = boots.ledgers, boots.starts
    if len(ledgers) < 2:
        return
    older = f", after {boots.forgotten:,} older ones" if boots.forgotten else ""
    yield f"Boots in this log{older} (--boot N shows one)"
    first = 0
    for index in range(1, len(ledgers) + 1):
        alike = index < len(ledgers) and boots.logged_by(index) == boots.logged_by(first)
        if alike and _same(ledgers[index], ledgers[first]):
            continue
        lines = f"lines {starts[first]:,}-{starts[index - 1] + ledgers[index - 1].lines - 1:,}"
        what, who = _short(ledgers[first]), boots.logged_by(first)
        shown = " <- this one" if first < number <= index else ""
        if index - first == 1:
            yield f"  {index}{who} ({lines}): {what}{shown}"
        else:
            often = (
                f"crash loop, {index - first} times" if ledgers[first].cause is not None else f"{index - first} times"
            )
            yield f"  {first + 1}-{index}{who} ({lines}): {often}{_period(boots.times[first:index])}: {what}{shown}"
        first = index


def _period(times: Sequence[int | None]) -> str:
    """How far the boots of a loop lie apart; the median of the gaps that the log shows."""
    gaps = sorted((late - early) % 86400 for early, late in pairwise(times) if early is not None and late is not None)
    if not gaps:
        return ""
    seconds = gaps[len(gaps) // 2]
    return f", every {seconds} s" if seconds < 100 else f", every {round(seconds / 60)} min"


def _same(one: BootLedger, other: BootLedger) -> bool:
    return (one.outcome, one.phase, one.failure_class) == (other.outcome, other.phase, other.failure_class)


def _short(ledger: BootLedger) -> str:
    loaded = "weights_bytes" in ledger.facts or "model_load_bytes" in ledger.facts
    failed = ledger.outcome in {"failed", "refused"}
    cause = f", {ledger.failure_class}" if ledger.failure_class else ""
    return f"{ledger.outcome} in {ledger.phase}{cause}" + (", no weights loaded" if failed and not loaded else "")
