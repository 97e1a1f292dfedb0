"""Why a boot ended: the root cause among everything that reported the failure, its phase and its class."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from pytest_kvbudget.ledger.boot import BootState
from pytest_kvbudget.ledger.classes import Proof, counts_slots, proof_of
from pytest_kvbudget.ledger.grammar import order_of
from pytest_kvbudget.ledger.grammar.model import Tier
from pytest_kvbudget.ledger.grammar.neuron import COMPILED
from pytest_kvbudget.ledger.levers import PLAN_SHORT, levers_for, with_limits, with_own
from pytest_kvbudget.ledger.model import Cause, Evidence, Lever, Outcome
from pytest_kvbudget.ledger.refused import blamed, misread
from pytest_kvbudget.ledger.seen import Seen
from pytest_kvbudget.ledger.sentences import Figures, limits_of, quote, sentence_for
from pytest_kvbudget.verdict import Phase

NEAR_FULL: Final = 0.87
"""Free over total at start-up. Above it the shape asks for too much (drivers and desktops hold a few percent); below
it somebody else holds the card: 27.28 of 31.86 GiB was memory not yet released, 19.77 of 22.05 GiB a share too big."""

OVERPRICE: Final = 1.08
"""The fork's planner reserves this much more than its registry's bytes per token, and caps the pool there."""

_OOM_CLASSES: Final[dict[Phase, tuple[str, Phase]]] = {
    Phase.ARGUMENT: ("weights_oom", Phase.WORKER_INIT),
    Phase.WORKER_INIT: ("weights_oom", Phase.WORKER_INIT),
    Phase.WEIGHTS_LOAD: ("weights_oom", Phase.WEIGHTS_LOAD),
    Phase.COMPILE: ("profile_oom", Phase.PROFILE),
    Phase.PROFILE: ("profile_oom", Phase.PROFILE),
    Phase.KV_CHECK: ("kv_alloc_oom", Phase.KV_ALLOC),
    Phase.KV_ALLOC: ("kv_alloc_oom", Phase.KV_ALLOC),
    Phase.MODEL_LOAD: ("runtime_hbm_oom", Phase.MODEL_LOAD),
    Phase.GRAPH_CAPTURE: ("graph_capture_oom", Phase.GRAPH_CAPTURE),
    Phase.WARMUP: ("warmup_oom", Phase.WARMUP),
    Phase.READY: ("request_oom", Phase.REQUEST),
    Phase.REQUEST: ("request_oom", Phase.REQUEST),
    Phase.SHUTDOWN: ("request_oom", Phase.REQUEST),
    Phase.UNKNOWN: ("request_oom", Phase.UNKNOWN),
}
_BEHIND_SERVER: Final = re.compile(r"EngineCore|Worker|VllmWorker|RayWorker|(?:DP|TP|PP|EP)\d")
"""Processes that are not started before the arguments are accepted."""
_ALLOCATIONS: Final = frozenset(
    {"oom", "request_oom", "hbm_oom", "hbm_load_oom", "ggml_oom", "ggml_vulkan_oom", "kv_alloc_oom", "profile_oom"}
)
"""Failures after which an engine may have tried again with less."""
_EXPLAINS_GGML: Final = frozenset({"kv_alloc_oom", "profile_oom", "weights_oom", "single_alloc_limit"})


class Diagnosis(NamedTuple):
    """How a boot ended."""

    root: Seen | None
    outcome: Outcome
    phase: Phase
    cause: Cause | None


class _Resolved(NamedTuple):
    failure_class: str
    phase: Phase


def diagnose(state: BootState) -> Diagnosis:
    """Outcome, phase and cause of a boot, from the lines read so far."""
    root = _root(state)
    if root is not None and root.failure.failure_class == COMPILED:
        return Diagnosis(None, "booted", Phase.COMPILE, None)
    if root is None:
        return _without_root(state)
    resolved = _resolve(state, root)
    outcome = _outcome(state, root, resolved)
    phase = resolved.phase
    if root.served and (root.failure.tier is Tier.DEATH or resolved.failure_class == "host_oom_killed"):
        phase = Phase.REQUEST if state.requests or root.phase is Phase.REQUEST else Phase.READY
    return Diagnosis(root, outcome, phase, _cause(state, root, resolved.failure_class, phase))


def _root(state: BootState) -> Seen | None:
    living = [seen for seen in state.failures if not seen.survived]
    # a serving engine logs exceptions of single requests and serves on
    hard = [
        seen for seen in living if not seen.failure.soft and (seen.row is not None or not seen.served or state.dead)
    ]
    if not hard:
        return None
    named = [seen for seen in hard if seen.failure.tier in {Tier.ROOT, Tier.KILLED}]
    done = next((seen for seen in named if seen.failure.failure_class == COMPILED), None)
    if done is not None:
        # it was only to compile, and ends by an exception: what other ranks raise after it are consequences
        named += [seen for seen in hard if seen.row is None and seen.evidence.line < done.evidence.line]
    limits = [seen for seen in living if seen.failure.failure_class == "host_memory_limit"]
    if limits and all(seen.failure.failure_class == "oom" and not seen.readings for seen in named):
        # leaked descriptors and locked memory make a driver say "out of memory", without a size
        return limits[0]
    soft = [seen for seen in living if seen.failure.soft]
    return min(named or soft or hard, key=_nearness)


def _nearness(seen: Seen) -> tuple[bool, Tier, int, bool]:
    """How near a line is to the root: the success that looks like a failure last, then tiers, then the first line."""
    failure = seen.failure
    return failure.failure_class == COMPILED, failure.tier, seen.evidence.line, failure.phase is None


def _without_root(state: BootState) -> Diagnosis:
    """No line says that the boot failed: it served, went on after a failure, starved, was stopped, or is not over."""
    order = order_of(state.family)
    furthest = max(state.phases, key=order.__getitem__, default=Phase.UNKNOWN)
    recovered = [seen for seen in state.failures if _allocation(seen) and (seen.failure.soft or seen.survived)]
    if state.stopping is not None and state.served is None:
        cause = _plain_cause(state, "engine_killed", state.now, (state.stopping,))
        return Diagnosis(None, "failed", state.now, cause)
    soft = [seen for seen in state.failures if seen.failure.soft and not seen.survived and not _allocation(seen)]
    if soft and state.served is None:
        resolved = _resolve(state, soft[0])
        outcome = _outcome(state, soft[0], resolved)
        return Diagnosis(
            soft[0], outcome, resolved.phase, _cause(state, soft[0], resolved.failure_class, resolved.phase)
        )
    if recovered:
        resolved = _resolve(state, recovered[0])
        cause = _cause(state, recovered[0], resolved.failure_class, resolved.phase)
        return Diagnosis(recovered[0], "recovered", resolved.phase, cause)
    if _starved(state):
        return Diagnosis(
            None, "booted", Phase.REQUEST, _plain_cause(state, "request_starved", Phase.REQUEST, tuple(state.starved))
        )
    if furthest is Phase.UNKNOWN or (state.served is None and state.began is not None and furthest is not Phase.READY):
        return Diagnosis(None, "unknown", furthest, None)
    return Diagnosis(None, "booted", furthest, None)


def _allocation(seen: Seen) -> bool:
    return seen.failure.failure_class in _ALLOCATIONS


def _starved(state: BootState) -> bool:
    """A request waits and none runs: the first one, or for longer than an interval, or for more than the pool holds."""
    if not state.starved:
        return False
    figures = Figures(state, None)
    tokens, window = figures.number("kv_tokens"), figures.number("max_model_len")
    short = tokens is not None and window is not None and tokens < window
    fits = tokens is not None and window is not None and tokens >= window
    return len(state.starved) > 1 or short or not (fits or state.ran)


def _outcome(state: BootState, root: Seen, resolved: _Resolved) -> Outcome:
    if resolved.phase is Phase.UNKNOWN and resolved.failure_class == "request_oom":
        return "unknown"
    if root.served or resolved.phase is Phase.REQUEST:
        return "died_after_boot"
    refused = resolved.phase is Phase.ARGUMENT and proof_of(resolved.failure_class) is Proof.OTHER
    return "refused" if refused else "failed"


def _resolve(state: BootState, seen: Seen) -> _Resolved:
    """The class and phase of a failure line, where its wording leaves them to the lines around it."""
    name, phase = seen.failure.failure_class, seen.phase
    write = _RESOLVE.get(name)
    if write is not None:
        return write(state, seen)
    if seen.served and seen.failure.phase is None:
        phase = Phase.REQUEST
    if name in {"port_in_use", "install_broken"} and phase is Phase.UNKNOWN:
        phase = Phase.ARGUMENT
    return _Resolved(name, phase)


def _resolve_exception(state: BootState, seen: Seen) -> _Resolved:
    """A setting that is no number is found where it is first used, deep in the engine."""
    if misread(state, seen):
        return _Resolved("argument_rejected", Phase.KV_CHECK if seen.phase is Phase.PROFILE else seen.phase)
    phase = Phase.REQUEST if seen.served else seen.phase
    if phase in {Phase.UNKNOWN, Phase.ARGUMENT}:
        phase = Phase.WORKER_INIT if _BEHIND_SERVER.match(seen.process[0] or "") else Phase.ARGUMENT
    return _Resolved("engine_exception", phase)


def _resolve_desync(state: BootState, seen: Seen) -> _Resolved:
    """In a boot, ranks wait for each other while they compile; later a closed connection only says that one is gone."""
    if seen.served:
        return _Resolved("engine_killed", Phase.REQUEST)
    return _Resolved("compile_desync", Phase.COMPILE if seen.phase is Phase.UNKNOWN else seen.phase)


def _resolve_timeout(state: BootState, seen: Seen) -> _Resolved:
    order = order_of(state.family)
    return _Resolved("ready_timeout", max(state.now, Phase.WORKER_INIT, key=order.__getitem__))


def _resolve_short(state: BootState, seen: Seen) -> _Resolved:
    return _Resolved("kv_reserve_underpriced" if _underpriced(state) else "kv_check_short", Phase.KV_CHECK)


def _resolve_startup(state: BootState, seen: Seen) -> _Resolved:
    return _Resolved(_startup_class(seen), Phase.WORKER_INIT)


def _resolve_oom(state: BootState, seen: Seen) -> _Resolved:
    phase = Phase.REQUEST if seen.served and not seen.framed else seen.phase
    pools = seen.readings.get("private_pool_bytes")
    if (
        pools is not None
        and isinstance(pools.value, int)
        and pools.value > 0
        and phase in {Phase.KV_ALLOC, Phase.PROFILE}
    ):
        phase = phase if seen.framed else Phase.GRAPH_CAPTURE
    return _Resolved(*_OOM_CLASSES[phase])


def _startup_class(seen: Seen) -> str:
    free, total = seen.readings.get("free_bytes"), seen.readings.get("total_bytes")
    if free is None or total is None or not isinstance(free.value, int) or not isinstance(total.value, int):
        return "startup_free_below_request"
    return "startup_free_below_request" if free.value >= NEAR_FULL * total.value else "foreign_process_memory"


def _resolve_hbm(state: BootState, seen: Seen) -> _Resolved:
    if seen.served:
        return _Resolved("request_oom", Phase.REQUEST)
    others = {other.failure.failure_class for other in state.failures}
    if seen.failure.failure_class == "nrt_resource" and "device_resource_exhausted" in others:
        return _Resolved("device_resource_exhausted", Phase.MODEL_LOAD)
    loading = any(other.phase is Phase.MODEL_LOAD for other in state.failures) or Phase.MODEL_LOAD in state.phases
    if seen.phase is Phase.WEIGHTS_LOAD or (
        not loading and seen.phase in {Phase.KV_CHECK, Phase.KV_ALLOC, Phase.WARMUP}
    ):
        return _Resolved("runtime_hbm_oom", Phase.KV_ALLOC if seen.phase is Phase.KV_CHECK else seen.phase)
    if loading or seen.phase in {Phase.COMPILE, Phase.MODEL_LOAD}:
        return _Resolved("runtime_hbm_oom", Phase.MODEL_LOAD)
    if others <= {"hbm_oom"} and "DEVICE memory (" in seen.evidence.text:
        return _Resolved("request_oom", Phase.UNKNOWN)
    return _Resolved("runtime_hbm_oom", Phase.UNKNOWN)


def _resolve_ggml(state: BootState, seen: Seen) -> _Resolved:
    figures = Figures(state, seen)
    asked, free = figures.number("tried_alloc_bytes"), figures.number("free_bytes")
    where = [other for other in state.failures if other.failure.phase is not None and other.row is not None]
    phase = where[0].phase if where else seen.phase
    if any(other.failure.failure_class == "single_alloc_limit" for other in state.failures):
        return _Resolved("single_alloc_limit", phase)
    for other in state.failures:
        if other.failure.failure_class in _EXPLAINS_GGML:
            return _Resolved(other.failure.failure_class, other.phase)
    if seen.failure.failure_class == "ggml_vulkan_oom" and asked is not None and free is not None and asked < free:
        return _Resolved("single_alloc_limit", phase)
    if phase is Phase.UNKNOWN:
        return _Resolved("weights_oom", phase)
    return _Resolved(*_OOM_CLASSES[phase])


_RESOLVE: Final[dict[str, Callable[[BootState, Seen], _Resolved]]] = {
    "engine_exception": _resolve_exception,
    "oom": _resolve_oom,
    "startup_free": _resolve_startup,
    "hbm_oom": _resolve_hbm,
    "hbm_load_oom": _resolve_hbm,
    "nrt_resource": _resolve_hbm,
    "ggml_oom": _resolve_ggml,
    "ggml_vulkan_oom": _resolve_ggml,
    "single_alloc_limit": _resolve_ggml,
    "compile_desync": _resolve_desync,
    "ready_timeout": _resolve_timeout,
    "kv_check_short": _resolve_short,
}
"""Failures whose class or phase the lines around them decide."""


def _underpriced(state: BootState) -> bool:
    figures = Figures(state, None)
    measured = figures.number("measured_kv_b_per_token")
    priced = figures.number("plan_kv_b_per_token") or figures.number("plan_registry_b_per_token")
    return measured is not None and priced is not None and measured > OVERPRICE * priced


def _cause(state: BootState, root: Seen, failure_class: str, phase: Phase) -> Cause:
    figures = Figures(state, root)
    lines = {root.evidence.line: root.evidence}
    for seen in state.failures:
        near = seen.failure.tier <= root.failure.tier + 1 and seen.failure.tier is not Tier.WRAPPER
        if near and not seen.survived and seen.row is not None and seen.process == root.process and len(lines) < 5:
            lines.setdefault(seen.evidence.line, seen.evidence)
    levers = PLAN_SHORT if counts_slots(failure_class, root.evidence.text) else _levers(state, failure_class, phase)
    sentence = sentence_for(failure_class, figures, root.evidence.text)
    if failure_class == "argument_rejected":
        own = blamed(state, root)
        levers = levers if own is None else with_own(levers, own)
        if own is not None and misread(state, root):
            sentence = f"{own.name} is not a number that the engine can use: {quote(root.evidence.text)}"
    return Cause(
        phase=phase,
        failure_class=failure_class,
        sentence=sentence,
        evidence=tuple(lines.values()),
        levers=with_limits(levers, limits_of(failure_class, figures)),
        rank=root.process[0],
    )


def _levers(state: BootState, failure_class: str, phase: Phase) -> tuple[Lever, ...]:
    return levers_for(
        failure_class,
        state.family,
        phase,
        pinned=state.pinned,
        reserved="reserved_headroom_bytes" in state.facts,
        fitted=any(seen.row is not None and "auto_fit" in seen.row.flags for seen in state.failures),
    )


def _plain_cause(state: BootState, failure_class: str, phase: Phase, evidence: tuple[Evidence, ...]) -> Cause:
    text = evidence[0].text if evidence else ""
    return Cause(
        phase=phase,
        failure_class=failure_class,
        sentence=sentence_for(failure_class, Figures(state, None), text),
        evidence=evidence,
        levers=_levers(state, failure_class, phase),
    )
