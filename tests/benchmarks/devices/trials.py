"""From what a device shows to what a search is told: the ledger's facts, the hints made of them, and their lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_kvbudget.ledger.levers import levers_for
from pytest_kvbudget.ledger.model import BootLedger, Cause, Evidence, Value
from pytest_kvbudget.search.hints import hint_from, sweep_hint_from
from pytest_kvbudget.search.model import Hint, Limit, Trial
from pytest_kvbudget.verdict import Verdict

if TYPE_CHECKING:
    from pytest_kvbudget.search.knobs import Knob
    from tests.benchmarks.devices.families import Case
    from tests.benchmarks.devices.model import Shown

_LINE = Evidence(1, "simulated")


def ledger_of(shown: Shown, *, family: str, pinned: bool) -> BootLedger:
    """What a log with these figures would be read as."""
    facts = {
        name: Value(value=printed.value, unit="bytes", evidence=_LINE, precision=printed.half_digit)
        for name, printed in shown.facts.items()
    }
    cause = None
    if shown.failure_class is not None:
        levers = levers_for(shown.failure_class, family, shown.phase, pinned=pinned)
        cause = Cause(phase=shown.phase, failure_class=shown.failure_class, sentence="simulated", levers=levers)
    return BootLedger(family=family, facts=facts, cause=cause, phase=shown.phase)


def ladder_trial(case: Case, value: int, number: int, shown: Shown) -> Trial:
    """A boot of a ladder over the window."""
    shape = case.device.shape(value)
    scaled = case.device.family == "offload"
    ledger = ledger_of(shown, family=_engine(case), pinned=shape.kv_cache_memory_bytes is not None)
    windows = (shape.max_num_seqs or 1) if scaled else 1
    hint = hint_from(
        ledger, axis="max_model_len", shape=shape, windows=windows, scaled=scaled, free_bytes=shown.free_bytes
    )
    return _trial(ledger, value, bent(case, hint, number))


def sweep_trial(case: Case, knob: Knob, value: int, number: int, shown: Shown) -> Trial:
    """A boot of a sweep."""
    ledger = ledger_of(shown, family="neuron", pinned=False)
    hint = sweep_hint_from(ledger, knob=knob, shape=case.device.shape(value), free_bytes=shown.free_bytes)
    return _trial(ledger, value, bent(case, hint, number))


def _engine(case: Case) -> str:
    return "neuron" if case.device.family == "neuron" else "vllm"


def _trial(ledger: BootLedger, value: int, hint: Hint) -> Trial:
    verdict = Verdict.PASS if ledger.cause is None else Verdict.FAIL
    return Trial(value=value, verdict=verdict, cause=ledger.cause, hint=hint)


def bent(case: Case, hint: Hint, number: int) -> Hint:
    """The hint as a device that misleads gives it."""
    if case.lie == "none":
        return hint
    if case.lie == "absent":
        return Hint()
    factor = {
        "factor": case.factor,
        "huge": 1e9,
        "negative": -1.0,
        "alternating": case.factor ** (-1) ** number,
    }[case.lie]
    limits = tuple(
        Limit(
            name=limit.name,
            margin_bytes=limit.margin_bytes * factor,
            bytes_per_unit=limit.bytes_per_unit,
            precision_bytes=limit.precision_bytes,
            at_least=limit.at_least,
            exact=limit.exact,
        )
        for limit in hint.limits
    )
    return Hint(limits=limits, estimate=None if hint.estimate is None else int(hint.estimate * factor))
