"""The few numbers that decided an attempt: what was needed, what was there, how much was left or missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from pytest_kvbudget.ledger.model import BootLedger, Value
from pytest_kvbudget.records import AttemptRecord
from pytest_kvbudget.report import labels
from pytest_kvbudget.report.marks import FAIL, mark_of
from pytest_kvbudget.report.numbers import amount, size, value_text, words
from pytest_kvbudget.search.model import Limit
from pytest_kvbudget.verdict import Verdict


class Figure(NamedTuple):
    """A number with its name."""

    name: str
    text: str


class _Contest(NamedTuple):
    need: str
    have: str
    need_name: str
    have_name: str


_CONTESTS: Final = {
    "kv": _Contest("kv_needed_bytes", "available_kv_bytes", "KV needed", "KV available"),
    "alloc": _Contest("tried_alloc_bytes", "free_bytes", "tried to allocate", "free"),
    "start": _Contest("requested_bytes", "free_bytes", "budget asked for", "free at start"),
    "compile": _Contest("peak_hbm_bytes", "hbm_limit_bytes", "peak HBM", "HBM limit"),
    "minimum": _Contest("min_kv_bytes", "effective_kv_bytes", "minimum KV budget", "KV budget"),
    "margin": _Contest("margin_required_bytes", "margin_left_bytes", "margin asked for", "margin left"),
    "workspace": _Contest("workspace_required_bytes", "workspace_current_bytes", "workspace needed", "workspace"),
}
_BY_CLASS: Final = {
    "kv_check_short": "kv",
    "kv_reserve_underpriced": "kv",
    "startup_free_below_request": "start",
    "foreign_process_memory": "start",
    "compile_hbm_exceeded": "compile",
    "min_kv_budget": "minimum",
    "workspace_locked": "workspace",
}


def figures(record: AttemptRecord) -> tuple[Figure, ...]:
    """The deciding numbers of an attempt, in reading order; empty where nothing stated any."""
    if record.verdict in {Verdict.PASS, Verdict.MARGINAL}:
        return tuple(_of_pass(record))
    if record.cause is not None and record.cause.by_gate:
        # it booted: what the gate may have looked at
        return tuple(_stated(record, (("kv_tokens", "KV cache"), ("max_concurrency", "full windows"))))
    return tuple(_of_failure(record))


def least_free_bytes(record: AttemptRecord) -> int | None:
    """The least free memory of the attempt's devices when it was ready, as the driver showed it."""
    ready = [device.free_bytes for reading in record.memory if reading.moment == "ready" for device in reading.devices]
    return min(ready, default=None)


def tightest(limits: Iterable[Limit]) -> Limit | None:
    """The limit with the least margin."""
    return min(limits, key=lambda limit: limit.margin_bytes, default=None)


def _of_pass(record: AttemptRecord) -> Iterator[Figure]:
    yield from _stated(record, (("kv_tokens", "KV cache"),))
    limit, free = tightest(record.hint.limits), least_free_bytes(record)
    if limit is not None:
        yield Figure(f"slack at {words(limit.name)}", size(limit.margin_bytes, limit.precision_bytes))
    if free is not None and (limit is None or round(limit.margin_bytes) != free):
        yield Figure("device memory free when ready", size(free))
    yield from _stated(record, (("available_kv_bytes", "KV pool"), ("max_concurrency", "full windows")))


def _stated(record: AttemptRecord, names: Iterable[tuple[str, str]]) -> Iterator[Figure]:
    facts = {} if record.ledger is None else record.ledger.facts
    for fact, name in names:
        if fact in facts:
            yield Figure(name, value_text(facts[fact]))


def _of_failure(record: AttemptRecord) -> Iterator[Figure]:
    contest = None if record.ledger is None else _contest(record.ledger, record)
    if contest is not None and record.ledger is not None:
        need, have = record.ledger.facts.get(contest.need), record.ledger.facts.get(contest.have)
        for name, value in ((contest.need_name, need), (contest.have_name, have)):
            if value is not None:
                yield Figure(name, value_text(value))
        if need is not None and have is not None and _number(need) > _number(have):
            yield Figure("short by", size(_number(need) - _number(have), max(need.precision, have.precision)))
    elif mark_of(record.verdict, record.cause) is FAIL:
        limit = tightest(record.hint.limits)
        if limit is not None and limit.margin_bytes < 0:
            yield Figure(f"short at {words(limit.name)}", size(-limit.margin_bytes, limit.precision_bytes))
    if record.hint.estimate is not None:
        # the hint is in the unit of the axis that was climbed, which the label names
        axis = labels.climbed(record.rung) or "max_model_len"
        yield Figure("engine's estimate", amount(axis, record.hint.estimate))


def _contest(ledger: BootLedger, record: AttemptRecord) -> _Contest | None:
    """Need against have: the pair that belongs to the failure class, else the first whose need is larger."""
    failure_class = "" if record.cause is None else record.cause.failure_class
    named = _BY_CLASS.get(failure_class)
    if named is None and failure_class.endswith("oom"):
        named = "alloc"
    if named is not None:
        contest = _CONTESTS[named]
        return contest if contest.need in ledger.facts or contest.have in ledger.facts else None
    if record.cause is None or record.cause.by_gate:
        return None
    for contest in _CONTESTS.values():
        need, have = ledger.facts.get(contest.need), ledger.facts.get(contest.have)
        if need is not None and have is not None and _number(need) > _number(have):
            return contest
    return None


def _number(value: Value) -> float:
    return float(value.value)
