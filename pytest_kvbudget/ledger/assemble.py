"""The state of a boot to its ledger."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from pytest_kvbudget.ledger.boot import BootState
from pytest_kvbudget.ledger.diagnosis import diagnose
from pytest_kvbudget.ledger.facts import TOTALS, Process, binding
from pytest_kvbudget.ledger.model import BootLedger, Value
from pytest_kvbudget.ledger.seen import Seen
from pytest_kvbudget.verdict import Provenance

_RANKED: Final = re.compile(r"(?:TP|PP|DP|EP|rank[ =]?)\d|Worker|ip=|^(?:CPU|CUDA|ROCm|Vulkan|SYCL|Metal|MUSA|CANN)")
_CORE: Final = re.compile(r"EngineCore|APIServer")
_V0_WORKER: Final = re.compile(r"VllmWorkerProcess|RayWorker")
DRIVER: Final = "driver"
"""Name of the rank that lives in the first process and prints without a prefix (vLLM V0)."""

_HIDDEN: Final = frozenset(
    {"engine_version", "kv_pinned", "tried_alloc_rounded_bytes", "waiting", "running", "env_variable"}
)
_AFTER_LOAD: Final = {"used_after_load_bytes": "hbm_total_used_bytes", "free_after_load_bytes": "free_bytes"}
"""What a Neuron core says after the weights, and what it is called where no table tells the state at a failure."""

_LOOKED_FOR: Final = (
    "weights_bytes",
    "model_load_bytes",
    "peak_activation_bytes",
    "graph_estimated_bytes",
    "graph_capture_bytes",
    "available_kv_bytes",
    "kv_tokens",
    "max_concurrency",
    "consumed_bytes",
    "kv_suggest_full_bytes",
)
_PROFILED: Final = frozenset({"graph_estimated_bytes", "peak_activation_bytes", "plan_overhead_measured_bytes"})
"""What the profile run prints; pinned KV bytes skip it."""


def assemble(state: BootState, lines: int) -> BootLedger:
    """The ledger of a boot, from everything that its lines said so far."""
    root, outcome, phase, cause = diagnose(state)
    values = _merged(state, root)
    version = values.pop("engine_version", {})
    facts: dict[str, Value] = {}
    ranks: dict[str, dict[str, Value]] = {}
    names = _labels(state)
    for name, by_process in values.items():
        if name in _HIDDEN:
            continue
        labelled = {
            label: _with_rank(value, label)
            for process, value in by_process.items()
            if (label := names.get(process)) is not None
        }
        bare = [value for process, value in by_process.items() if names.get(process) is None]
        facts[name] = binding(name, bare if bare and name in TOTALS else [*bare, *labelled.values()])
        if labelled:
            ranks[name] = labelled
    _same_device(facts, values)
    return BootLedger(
        family=state.family,
        engine_version=str(binding("engine_version", list(version.values())).value) if version else None,
        outcome=outcome,
        phase=phase,
        cause=cause,
        facts=facts,
        ranks=ranks,
        states=_states(state, facts, ranks, pinned=state.pinned),
        milestones=tuple(state.milestones),
        lines=lines,
    )


def _same_device(facts: dict[str, Value], values: dict[str, dict[Process, Value]]) -> None:
    """The device is that of the rank whose free memory binds."""
    if "device" not in facts or "free_bytes" not in facts:
        return
    binds = facts["free_bytes"].evidence
    owners = [process for process, value in values["free_bytes"].items() if value.evidence == binds]
    devices = [values["device"][process] for process in owners if process in values["device"]]
    if devices:
        facts["device"] = msgspec.structs.replace(devices[0], rank=facts["free_bytes"].rank)


def _merged(state: BootState, root: Seen | None) -> dict[str, dict[Process, Value]]:
    """Values of lines that went well, then what failure lines add; the root cause's own figures count first."""
    values = {name: dict(by_process) for name, by_process in state.facts.values.items()}
    stated: set[str] = set()
    for seen in _tellers(state, root):
        for name, value in _of(state, seen).items():
            if name not in stated:
                values[name] = {}
                stated.add(name)
            values[name].setdefault(seen.process, value)
    for seen in state.failures:
        for name, value in _of(state, seen).items():
            if name not in stated and name not in state.facts:
                values.setdefault(name, {}).setdefault(seen.process, value)
    if "hbm_total_used_bytes" not in values:
        for after_load, name in _AFTER_LOAD.items():
            if name not in values and after_load in values:
                values[name] = values.pop(after_load)
    if "tried_alloc_rounded_bytes" in values:
        values.setdefault("tried_alloc_bytes", values["tried_alloc_rounded_bytes"])
    _sharpen(state, values.get("tried_alloc_bytes", {}))
    return values


def _sharpen(state: BootState, tried: dict[Process, Value]) -> None:
    """Where one line rounds what another says in bytes, the bytes count."""
    for seen in state.failures:
        exact = seen.readings.get("tried_alloc_bytes")
        known = tried.get(seen.process)
        if exact is None or known is None or exact.precision or isinstance(exact.value, str):
            continue
        if known.precision and not isinstance(known.value, str) and abs(exact.value - known.value) <= known.precision:
            tried[seen.process] = _of(state, seen)["tried_alloc_bytes"]


def _tellers(state: BootState, root: Seen | None) -> list[Seen]:
    """The root cause's line, and the same line of other ranks; not its repetition by processes that passed it on."""
    if root is None or root.row is None:
        return []
    ranks = state.workers if root.process in state.workers else set()
    others = [
        seen
        for seen in state.failures
        if seen is not root
        and ((seen.row is root.row and seen.process in ranks) or seen.evidence.line == root.evidence.line)
    ]
    return [root, *others]


def _of(state: BootState, seen: Seen) -> dict[str, Value]:
    stated = seen.row.provenance if seen.row is not None else Provenance.MEASURED
    found = {
        name: state.value(name, reading, seen.places.get(name, seen.evidence), stated)
        for name, reading in seen.readings.items()
    }
    for flag in seen.row.flags if seen.row is not None else ():
        found[flag] = Value(value=True, unit="flag", evidence=seen.evidence)
    return found


def _labels(state: BootState) -> dict[Process, str | None]:
    """What to call each process: its own name, with the pid where several share it; ``None`` where it is no rank."""
    processes = {process for by_process in state.facts.values.values() for process in by_process}
    processes |= {seen.process for seen in state.failures}
    count: dict[str, int] = {}
    for name, _ in processes:
        if name is not None:
            count[name] = count.get(name, 0) + 1
    labels: dict[Process, str | None] = {}
    ranked = any(_V0_WORKER.search(name) for name in count)
    # the only engine core is called EngineCore_DP0 up to 0.16: that makes it no rank
    replicas = sum(1 for name in count if name.startswith("EngineCore")) > 1
    for name, pid in processes:
        if (name, pid) == (None, None) and ranked and (name, pid) in state.workers:
            labels[name, pid] = DRIVER
            continue
        if name is None or not _RANKED.search(name) or (_CORE.match(name) and not replicas):
            labels[name, pid] = None
        elif count[name] > 1:
            labels[name, pid] = f"{name} pid={pid}"
        else:
            labels[name, pid] = name
    return labels


def _with_rank(value: Value, label: str) -> Value:
    return msgspec.structs.replace(value, rank=label)


def _states(
    state: BootState, facts: dict[str, Value], ranks: dict[str, dict[str, Value]], *, pinned: bool
) -> dict[str, str]:
    states = {}
    workers = len({name for name, _ in state.workers if name is not None and _RANKED.search(name)})
    for name in (*_LOOKED_FOR, *sorted(_PROFILED - set(_LOOKED_FOR))):
        if name not in facts:
            states[name] = "suppressed" if pinned and name in _PROFILED else "absent"
        elif workers > 1 and len(ranks.get(name, {})) == 1:
            states[name] = "rank 0 only"
    return states
