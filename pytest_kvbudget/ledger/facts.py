"""The figures of a boot: which line, which rank, and which of several counts."""

from __future__ import annotations

from typing import Final, Literal

from pytest_kvbudget.ledger.model import Value
from pytest_kvbudget.verdict import Provenance


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


Rule = Literal["least", "most", "last", "first"]

_LEAST: Final = _names(
    """
    kv_tokens max_concurrency available_kv_bytes kv_suggest_fit_bytes kv_suggest_full_bytes free_bytes
    kv_in_use_bytes current_free_bytes effective_kv_bytes margin_left_bytes available_after_weights_bytes
    estimated_max_model_len state_blocks gpu_blocks cpu_blocks total_bytes requested_bytes free_after_load_bytes
    """
)
_LAST: Final = _names(
    """
    max_model_len configured_max_model_len max_num_seqs gpu_memory_utilization engine_version auto_fit kv_pinned
    num_gpu_blocks_override kv_cache_memory_bytes tensor_parallel_size max_num_batched_tokens block_size
    """
)
_FIRST: Final = _names(
    """
    tried_alloc_bytes tried_alloc_rounded_bytes device nd nc alloc_usage alloc_alignment_bytes ret status err
    code
    """
)
_ONCE: Final = "hbm_"
"""Figures of the Neuron runtime's tables begin so: the first table of a process counts, of ranks the fullest."""
CONFIGURED: Final = _names(
    """
    max_model_len configured_max_model_len max_num_seqs gpu_memory_utilization num_gpu_blocks_override
    kv_cache_memory_bytes tensor_parallel_size max_num_batched_tokens block_size min_kv_bytes
    margin_required_bytes native_max_model_len reserved_headroom_bytes mem_fraction_static
    """
)
"""What somebody asked for, whatever line repeats it."""
DERIVED: Final = _names(
    """
    graph_estimated_bytes estimated_max_model_len kv_suggest_fit_bytes kv_suggest_full_bytes projected_bytes
    utilization_equivalent utilization_without_graph_profile margin_left_bytes padding_waste_pct
    """
)
"""What the engine worked out and did not see."""
_PEAK: Final = frozenset({"kv_usage_pct"})
TOTALS: Final = frozenset({"kv_in_use_bytes"})
"""A figure of no device is that of all together, where theirs are stated too."""

Process = tuple[str | None, int | None]
"""Who printed a line: name and process id, each ``None`` where the line does not say."""

MOST_PROCESSES: Final = 4096
"""Processes that a boot may have before further ones are taken together."""


def source_of(name: str, stated: Provenance) -> Provenance:
    """Where a value comes from: the row's word, made exact for names that mean the same in every line."""
    if name in CONFIGURED:
        return Provenance.CONFIGURED
    if name in DERIVED:
        return Provenance.DERIVED
    if name.startswith(("plan_overhead_measured", "measured_")):
        return Provenance.MEASURED
    return Provenance.ASSUMED if name.startswith(("plan_", "kv_b_per_token")) else stated


def rule_of(name: str) -> Rule:
    """Which value of several processes binds."""
    if name in _LEAST:
        return "least"
    if name in _LAST:
        return "last"
    if name in _FIRST:
        return "first"
    return "most"


def binding(name: str, values: list[Value]) -> Value:
    """The value that binds: the heaviest use, the least room; of equal ones the first printed."""
    rule = rule_of(name)
    if rule == "last":
        return max(values, key=lambda value: value.evidence.line)
    if rule == "first" or any(isinstance(value.value, (str, bool)) for value in values):
        return min(values, key=lambda value: value.evidence.line)
    ordered = sorted(values, key=lambda value: value.evidence.line)
    pick = min if rule == "least" else max
    return pick(ordered, key=lambda value: value.value)


class FactStore:
    """Per fact and process one value: the last printed, or the first, or the peak, as the fact's rule says."""

    def __init__(self) -> None:
        self.values: dict[str, dict[Process, Value]] = {}

    def add(self, name: str, process: Process, value: Value) -> None:
        """Record what a process printed."""
        by_process = self.values.setdefault(name, {})
        known = by_process.get(process)
        if known is None and len(by_process) >= MOST_PROCESSES:
            process = (None, None)
            known = by_process.get(process)
        if known is not None and name in _PEAK:
            if float(known.value) >= float(value.value):
                return
        elif known is not None and (name in _FIRST or name.startswith(_ONCE)):
            return
        by_process[process] = value

    def __contains__(self, name: str) -> bool:
        return name in self.values
