"""What the figures of a boot say about each other: identities that must close, estimates against what was measured.

Every comparison allows for what was rounded away in print: the sum of the printed precisions of its terms.
"""

from __future__ import annotations

from typing import Final

import msgspec

from pytest_kvbudget.ledger.model import BootLedger, Evidence, Value
from pytest_kvbudget.ledger.sentences import size_text
from pytest_kvbudget.units import GIB, MIB

SUGGESTION_MARGIN_BYTES: Final = 150 * MIB
"""What the engine subtracts on top when it suggests KV bytes that fit (vLLM, `gpu_worker.py`)."""
CONCURRENCY_PRECISION: Final = 0.005


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison of stated figures."""

    name: str
    agrees: bool
    """The two sides are equal within printed precision."""
    sentence: str
    evidence: tuple[Evidence, ...]
    worth_bytes: int = 0
    """How far the sides are apart, bytes per rank; positive where memory was held back that was not needed."""
    worth_tokens: int | None = None
    """The same in tokens of KV cache, where the log says what a token takes."""
    worth_slots: int | None = None
    """The same in expert slots, where the log says what a slot takes."""


class _Side:
    """The figures of one rank, or of the boot where ranks do not print them."""

    def __init__(self, ledger: BootLedger, rank: str | None) -> None:
        self.ledger = ledger
        self.rank = rank
        self.used: list[Value] = []

    def __call__(self, name: str) -> float | None:
        value = self.ledger.ranks.get(name, {}).get(self.rank or "") or self.ledger.facts.get(name)
        if value is None or isinstance(value.value, (str, bool)):
            return None
        self.used.append(value)
        return value.value

    def take(self, *names: str) -> tuple[float, ...] | None:
        """All of these figures, or ``None``."""
        taken = [self(name) for name in names]
        return (
            None if any(number is None for number in taken) else tuple(number for number in taken if number is not None)
        )

    @property
    def precision(self) -> float:
        return sum(value.precision for value in self.used)

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        lines = {value.evidence.line: value.evidence for value in self.used}
        return tuple(lines[line] for line in sorted(lines))

    def text(self, size_bytes: float) -> str:
        """A size as the engine prints it."""
        return size_text(size_bytes, 0.005 * GIB)


def reconcile(ledger: BootLedger) -> tuple[Finding, ...]:
    """Every comparison that the figures of this boot allow; those whose figures are missing are not there."""
    found = []
    for rank in _ranks(ledger):
        for check in (_budget, _suggestion, _overcommit, _graphs, _overhead):
            finding = check(_Side(ledger, rank))
            if finding is not None:
                found.append(finding)
    for check in (_capacity, _plan, _kv_price):
        finding = check(_Side(ledger, None))
        if finding is not None:
            found.append(finding)
    return tuple(found)


def _ranks(ledger: BootLedger) -> list[str | None]:
    names = {rank for by_rank in ledger.ranks.values() for rank in by_rank}
    return [*sorted(names)] or [None]


def _finding(side: _Side, name: str, agrees: bool, sentence: str, worth_bytes: float = 0) -> Finding:
    rank = f"{side.rank}: " if side.rank else ""
    slot_bytes, token_bytes = _slot_bytes(side.ledger), _token_bytes(side.ledger)
    return Finding(
        name=name,
        agrees=agrees,
        sentence=rank + sentence,
        evidence=side.evidence,
        worth_bytes=round(worth_bytes),
        worth_tokens=None if agrees or token_bytes is None else int(worth_bytes / token_bytes),
        worth_slots=None if agrees or slot_bytes is None else int(worth_bytes / slot_bytes),
    )


def _token_bytes(ledger: BootLedger) -> float | None:
    side = _Side(ledger, None)
    figures = side.take("available_kv_bytes", "max_concurrency", "max_model_len")
    if figures is None or figures[0] <= 0 or figures[1] * figures[2] <= 0:
        return None
    return figures[0] / (figures[1] * figures[2])


def _slot_bytes(ledger: BootLedger) -> float | None:
    figures = _Side(ledger, None).take("plan_expert_cache_bytes", "plan_slots")
    return None if figures is None or figures[1] <= 0 else figures[0] / figures[1]


def _budget(side: _Side) -> Finding | None:
    """What was asked for, less what is in use and the peak, is what the KV cache gets.

    From 0.27 the estimate of the graphs is part of the peak, before it is a term of its own. Pinned bytes have none.
    """
    if "suppressed" in side.ledger.states.values():
        return None
    asked = side.take("requested_bytes", "peak_activation_bytes", "available_kv_bytes")
    if asked is None:
        return None
    consumed = side("consumed_bytes")
    if consumed is None:
        parts = side.take("weights_bytes", "non_torch_bytes")
        if parts is None:
            return None
        consumed = sum(parts)
    requested, peak, available = asked
    left = requested - consumed - peak
    agrees = abs(left - available) <= side.precision
    if not agrees:
        graphs = side("graph_estimated_bytes")
        if graphs is not None and abs(left - graphs - available) <= side.precision:
            left, agrees = left - graphs, True
    sentence = (
        f"requested less consumed and peak is {side.text(left)}, available for KV cache is {side.text(available)}"
    )
    return _finding(side, "kv_budget", agrees, sentence, left - available)


def _suggestion(side: _Side) -> Finding | None:
    """The engine's suggestion that fits is what was asked for, less use, peak, graphs and 150 MiB."""
    figures = side.take(
        "requested_bytes", "consumed_bytes", "peak_activation_bytes", "graph_actual_bytes", "kv_suggest_fit_bytes"
    )
    if figures is None:
        return None
    requested, consumed, peak, graphs, suggested = figures
    derived = requested - consumed - peak - graphs - SUGGESTION_MARGIN_BYTES
    agrees = abs(derived - suggested) <= side.precision
    sentence = f"the engine suggests {side.text(suggested)} of KV cache, its own terms give {side.text(derived)}"
    return _finding(side, "kv_suggestion", agrees, sentence, derived - suggested)


def _overcommit(side: _Side) -> Finding | None:
    figures = side.take("kv_in_use_bytes", "kv_suggest_fit_bytes")
    if figures is None:
        return None
    used, fits = figures
    agrees = used <= fits + side.precision
    sentence = f"the KV cache in use is {side.text(used)}, what fits the requested share is {side.text(fits)}"
    return _finding(side, "kv_overcommit", agrees, sentence, 0 if agrees else fits - used)


def _graphs(side: _Side) -> Finding | None:
    estimated = side("graph_estimated_bytes")
    actual = side("graph_actual_bytes")
    captured = actual if actual is not None else side("graph_capture_bytes")
    if estimated is None or captured is None:
        return None
    agrees = abs(estimated - captured) <= side.precision
    sentence = f"graphs: estimate {side.text(estimated)}, captured {side.text(captured)}"
    return _finding(side, "graphs", agrees, sentence, estimated - captured)


def _overhead(side: _Side) -> Finding | None:
    figures = side.take("plan_overhead_planned_bytes", "plan_overhead_measured_bytes")
    if figures is None:
        figures = side.take("plan_overhead_bytes", "plan_overhead_measured_bytes")
    if figures is None:
        return None
    planned, measured = figures
    agrees = abs(planned - measured) <= side.precision
    sentence = f"runtime overhead: planned {side.text(planned)}, measured {side.text(measured)}"
    return _finding(side, "plan_overhead", agrees, sentence, planned - measured)


def _capacity(side: _Side) -> Finding | None:
    """Tokens are concurrency times window; on hybrids up to 0.19 the token line is wrong and the product counts."""
    figures = side.take("kv_tokens", "max_concurrency", "max_model_len")
    if figures is None:
        return None
    tokens, concurrency, window = figures
    capacity = concurrency * window
    agrees = abs(tokens - capacity) <= CONCURRENCY_PRECISION * window + 1
    sentence = f"the token line says {int(tokens):,}, concurrency times window is {int(capacity):,}"
    if not agrees:
        sentence += ": a hybrid model, the product is the capacity"
    return _finding(side, "kv_capacity", agrees, sentence)


def _plan(side: _Side) -> Finding | None:
    figures = side.take(
        "plan_budget_bytes",
        "plan_non_expert_bytes",
        "plan_kv_reserve_bytes",
        "plan_graphs_bytes",
        "plan_overhead_bytes",
        "plan_expert_cache_bytes",
    )
    if figures is None:
        return None
    budget, *terms, cache = figures
    left = budget - sum(terms)
    agrees = abs(left - cache) <= side.precision
    sentence = f"the plan's terms leave {side.text(left)} for the expert cache, it states {side.text(cache)}"
    return _finding(side, "plan_sum", agrees, sentence, left - cache)


def _kv_price(side: _Side) -> Finding | None:
    planned = side("plan_kv_b_per_token") or side("plan_registry_b_per_token")
    measured, window = side("measured_kv_b_per_token"), side("max_model_len")
    if planned is None or measured is None:
        return None
    sentence = f"KV per token: planned {int(planned):,} B, measured {int(measured):,} B"
    return _finding(side, "kv_per_token", planned == measured, sentence, (planned - measured) * (window or 0))
