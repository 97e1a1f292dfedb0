"""Why a boot ended: the root cause among everything that reported the failure, its phase and its class."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from pytest_kvbudget.ledger.boot import BootState
from pytest_kvbudget.ledger.classes import Proof, counts_slots, proof_of
from pytest_kvbudget.ledger.grammar import order_of
from pytest_kvbudget.ledger.grammar.common import SHELLS_WORD
from pytest_kvbudget.ledger.grammar.llamacpp import RETRIED, UNPINNED
from pytest_kvbudget.ledger.grammar.model import Tier
from pytest_kvbudget.ledger.grammar.neuron import COMPILED
from pytest_kvbudget.ledger.grammar.sglang import STANDS_STILL, TOKENS
from pytest_kvbudget.ledger.grammar.vllm import IDLE
from pytest_kvbudget.ledger.levers import (
    NO_LIMIT,
    PLAN_CAPPED,
    PLAN_SHORT,
    SHARED_MEMORY,
    STUCK,
    levers_for,
    with_limits,
    with_own,
)
from pytest_kvbudget.ledger.model import Cause, Evidence, Lever, Outcome
from pytest_kvbudget.ledger.refused import blamed, fitting_layout, misread
from pytest_kvbudget.ledger.seen import Seen
from pytest_kvbudget.ledger.sentences import Figures, limits_of, quote, sentence_for
from pytest_kvbudget.units import GIB
from pytest_kvbudget.verdict import Phase

NEAR_FULL: Final = 0.87
"""Free over total at start-up. Above it the shape asks for too much (drivers and desktops hold a few percent); below
it somebody else holds the card: 27.28 of 31.86 GiB was memory not yet released, 19.77 of 22.05 GiB a share too big."""

DESKTOP_BYTES: Final = 3 * GIB // 2
"""What a driver, a desktop and a context hold on a small card, where it is a large part."""

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
_REFUSALS: Final = frozenset({"argument_rejected", "parallelism_refused"})
"""Of settings that cannot be: refused, also where a worker finds out before it uses its device."""
_BEFORE: Final = _REFUSALS | {"port_in_use", "install_broken"}
"""Failures that belong to the arguments where no line says how far the boot was."""
_LOADING: Final = "WorkerProc failed to start"
"""Said where a worker dies that has not done more than to take its device and load the model."""
_STARTING: Final = ("EngineCore failed to start", "Engine core initialization failed", "Engine process failed to start")
"""Said of an engine that did not come up, whatever it was doing."""
_BEHIND_SERVER: Final = re.compile(r"EngineCore|Worker|VllmWorker|RayWorker|(?:DP|TP|PP|EP)\d")
"""Processes that are not started before the arguments are accepted."""
_ALLOCATIONS: Final = frozenset(
    {
        "oom",
        "request_oom",
        TOKENS,
        "hbm_oom",
        "hbm_load_oom",
        "ggml_oom",
        "ggml_host_oom",
        "ggml_vulkan_oom",
        "kv_alloc_oom",
        "profile_oom",
    }
)
"""Failures after which an engine may have tried again with less."""
TABLES_OF_BLOCKS: Final = Lever(
    "max_model_len", "lower", "helps", "a kernel holds the table of every request's blocks in this memory"
)
_EXPLAINS: Final = frozenset({"weights_oom", "warmup_oom"})
"""What vLLM raises from an allocation that failed, to say what it was doing."""
_UNDER_WAY: Final = re.compile(r"checkpoint shards: +[1-9]\d?% ")
FLUSHED_LINES: Final = 3
"""Lines after a failure that may have been written before it, in the buffer of another stream."""
_HBM: Final = frozenset({"hbm_oom", "hbm_load_oom", "nrt_resource"})
"""Allocations that a Neuron device refused."""
_OF_PROGRAMS: Final = re.compile(r"scratchpad|dma ring|model code|constants|collectives|XT CC", re.IGNORECASE)
"""What only a compiled program allocates, when it is loaded."""
_OF_A_MODEL: Final = ("llama_model_load", "llama_load_model_from_file", "error loading model")
"""Said where a model file could not be loaded; its context comes later."""
_OF_A_START: Final = ("failed to load model", "failed to create context", "failed to initialize the context")
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
        return _nothing_left(state) or _without_root(state)
    resolved = _resolve(state, root)
    outcome = _outcome(state, root, resolved)
    phase = resolved.phase
    if root.served and (root.failure.tier is Tier.DEATH or resolved.failure_class == "host_oom_killed"):
        phase = Phase.REQUEST if state.requests or root.phase is Phase.REQUEST else Phase.READY
    return Diagnosis(root, outcome, phase, _cause(state, root, resolved.failure_class, phase))


def _root(state: BootState) -> Seen | None:
    living = [
        seen
        for seen in state.failures
        if not seen.survived and not _retried(state, seen) and not _unpinned(state, seen)
    ]
    # a serving engine logs exceptions of single requests and serves on
    hard = [
        seen for seen in living if not seen.failure.soft and (seen.row is not None or not seen.served or state.dead)
    ]
    given_up = min((seen.evidence.line for seen in hard if seen.failure.tier is Tier.WRAPPER), default=None)
    if given_up is not None:
        # an engine that gave up ends its processes
        hard = [seen for seen in hard if seen.evidence.line < given_up or not _shells(seen)]
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


def _shells(seen: Seen) -> bool:
    return seen.row is not None and seen.row.needle == SHELLS_WORD


def _nearness(seen: Seen) -> tuple[bool, Tier, int, bool]:
    """How near a line is to the root: the success that looks like a failure last, then tiers, then the first line."""
    failure = seen.failure
    return failure.failure_class == COMPILED, failure.tier, seen.evidence.line, failure.phase is None


def _without_root(state: BootState) -> Diagnosis:
    """No line says that the boot failed: it served, went on after a failure, starved, was stopped, or is not over."""
    order = order_of(state.family)
    furthest = max(state.phases, key=order.__getitem__, default=Phase.UNKNOWN)
    recovered = [
        seen
        for seen in state.failures
        if _allocation(seen)
        and (seen.failure.soft or seen.survived or _retried(state, seen))
        and not _unpinned(state, seen)
    ]
    if state.stopping is not None and state.served is None:
        cause = _plain_cause(state, "engine_killed", state.now, (state.stopping,))
        return Diagnosis(None, "failed", state.now, cause)
    soft = [
        seen
        for seen in state.failures
        if seen.failure.soft
        and not seen.survived
        and not _allocation(seen)
        and not _retried(state, seen)
        and not _unpinned(state, seen)
    ]
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


def _retried(state: BootState, seen: Seen) -> bool:
    """The engine said that it tries again with less, and no failure came after that."""
    again = [other.evidence.line for other in state.failures if other.failure.failure_class == RETRIED]
    return (
        bool(again)
        and (_allocation(seen) or seen.failure.failure_class == RETRIED)
        and max(other.evidence.line for other in state.failures) == again[-1]
    )


def _unpinned(state: BootState, seen: Seen) -> bool:
    """A host buffer that is not pinned, which is said in a line and explained in the next."""
    said = [other.evidence.line for other in state.failures if other.failure.failure_class == UNPINNED]
    return seen.failure.failure_class == UNPINNED or seen.evidence.line - 1 in said


def _nothing_left(state: BootState) -> Diagnosis | None:
    """A boot that has no memory for its KV cache, which the engine's own check never accepts: the log is cut there."""
    order = order_of(state.family)
    further = any(order[phase] > order[Phase.KV_ALLOC] for phase in state.phases)
    if state.family != "vllm" or further or state.served is not None:
        return None
    for name, least in (("available_kv_bytes", 0), ("gpu_blocks", 1)):
        for value in state.facts.values.get(name, {}).values():
            if isinstance(value.value, int) and value.value < least:
                cause = _plain_cause(state, "kv_budget_nonpositive", Phase.KV_CHECK, (value.evidence,))
                return Diagnosis(None, "failed", Phase.KV_CHECK, cause)
    return None


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
    if resolved == ("foreign_process_memory", Phase.UNKNOWN) and not _says(state, *_STARTING):
        return "unknown"
    if resolved.phase is Phase.UNKNOWN and resolved.failure_class == "request_oom":
        return "unknown"
    if (root.served and resolved.failure_class != "port_in_use") or resolved.phase is Phase.REQUEST:
        return "died_after_boot"
    early = resolved.phase is Phase.WORKER_INIT and resolved.failure_class in _REFUSALS
    if early:
        return "refused"
    refused = resolved.phase is Phase.ARGUMENT and proof_of(resolved.failure_class) is Proof.OTHER
    return "refused" if refused else "failed"


def _resolve(state: BootState, seen: Seen) -> _Resolved:
    """The class and phase of a failure line, where its wording leaves them to the lines around it."""
    name, phase = seen.failure.failure_class, seen.phase
    write = _RESOLVE.get(name)
    if write is not None:
        return write(state, seen)
    if seen.failure.phase is None:
        phase = _when(state, seen)
    if name == "port_in_use" and seen.served:
        phase = Phase.READY  # some releases say that they are up, and bind then
    if name in _BEFORE and phase is Phase.UNKNOWN:
        phase = Phase.WORKER_INIT if _BEHIND_SERVER.match(seen.process[0] or "") else Phase.ARGUMENT
    return _Resolved(name, phase)


def _resolve_exception(state: BootState, seen: Seen) -> _Resolved:
    """A setting that is no number is found where it is first used, deep in the engine."""
    if misread(state, seen):
        return _Resolved("argument_rejected", Phase.KV_CHECK if seen.phase is Phase.PROFILE else seen.phase)
    phase = _when(state, seen)
    if phase in {Phase.UNKNOWN, Phase.ARGUMENT}:
        behind = (
            seen.failure.failure_class == "core_exception"
            or _BEHIND_SERVER.match(seen.process[0] or "")
            or _says(state, "Scheduler hit an exception")
        )
        phase = Phase.WORKER_INIT if behind else Phase.ARGUMENT
    return _Resolved("engine_exception", phase)


def _resolve_lone(state: BootState, seen: Seen) -> _Resolved:
    return _Resolved("engine_exception", _when(state, seen))


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
    if seen.framed and seen.phase is Phase.WORKER_INIT and not seen.served:
        # before this engine has allocated anything
        return _Resolved("foreign_process_memory", seen.phase)
    phase = seen.phase if seen.framed else _explained(state, seen) or _when(state, seen)
    pools = seen.readings.get("private_pool_bytes")
    if (
        pools is not None
        and isinstance(pools.value, int)
        and pools.value > 0
        and phase in {Phase.KV_ALLOC, Phase.PROFILE}
    ):
        phase = phase if seen.framed else Phase.GRAPH_CAPTURE
    if phase is Phase.UNKNOWN and _says(state, _LOADING):
        phase = Phase.WEIGHTS_LOAD
    if phase in {Phase.UNKNOWN, Phase.WORKER_INIT, Phase.WEIGHTS_LOAD} and _crowded(seen):
        return _Resolved("foreign_process_memory", phase)
    if phase is Phase.UNKNOWN and _says(state, *_STARTING):
        return _Resolved("device_oom", phase)
    return _Resolved(*_OOM_CLASSES[phase])


def _explained(state: BootState, seen: Seen) -> Phase | None:
    """The phase that another line gives an allocation which failed before: what was raised from its exception.

    A progress bar of the weights that is under way after it was written before it, in another buffer.
    """
    if seen.served or state.family == "llama.cpp":
        return None
    below = (other for other in state.failures if other.evidence.line > seen.evidence.line and not other.survived)
    for other in below:
        if other.row is not None and other.failure.failure_class in _EXPLAINS and other.failure.phase is not None:
            return other.failure.phase
    bar = state.phases.get(Phase.WEIGHTS_LOAD)
    if seen.phase is not Phase.UNKNOWN or bar is None or state.now is not Phase.WEIGHTS_LOAD:
        return None
    near = 0 < bar.line - seen.evidence.line <= FLUSHED_LINES
    return Phase.WEIGHTS_LOAD if near and _UNDER_WAY.search(bar.text) else None


def _crowded(seen: Seen) -> bool:
    """Others hold more of the card than this process does, and more than half of it."""
    names = ("total_bytes", "free_bytes", "process_in_use_bytes")
    figures = [reading.value for name in names if (reading := seen.readings.get(name)) is not None]
    if len(figures) < len(names) or "this process has" not in seen.places.get(names[-1], seen.evidence).text:
        return False
    total, free, ours = map(float, figures)
    others = total - free - ours
    return others > ours and others > total / 2


def _when(state: BootState, seen: Seen) -> Phase:
    """The phase of a failure whose wording names none.

    After the server was up, or where the engine itself says that it died after its start, whatever was printed last.
    """
    if seen.served:
        return Phase.REQUEST
    over = (
        other.failure.tier is Tier.WRAPPER and other.failure.phase is Phase.REQUEST and not other.survived
        for other in state.failures
    )
    if any(over) and not seen.framed:
        return Phase.REQUEST
    if seen.phase is not Phase.UNKNOWN:
        return seen.phase
    # "Model warmup failed for ... Error: ..." names the phase of what it passes on
    above = (other for other in state.failures if other.failure.tier is Tier.WRAPPER and not other.survived)
    named = (other.failure.phase for other in above if other.evidence.line <= seen.evidence.line)
    return next((phase for phase in named if phase is not None), seen.phase)


def _says(state: BootState, *texts: str) -> bool:
    return any(text in seen.evidence.text for seen in state.failures if not seen.survived for text in texts)


def _startup_class(seen: Seen) -> str:
    free, total = seen.readings.get("free_bytes"), seen.readings.get("total_bytes")
    if free is None or total is None or not isinstance(free.value, int) or not isinstance(total.value, int):
        return "startup_free_below_request"
    ours = free.value >= NEAR_FULL * total.value or total.value - free.value <= DESKTOP_BYTES
    return "startup_free_below_request" if ours else "foreign_process_memory"


def _resolve_hbm(state: BootState, seen: Seen) -> _Resolved:
    if seen.served:
        return _Resolved("request_oom", Phase.REQUEST)
    others = {other.failure.failure_class for other in state.failures}
    if seen.failure.failure_class == "nrt_resource" and "device_resource_exhausted" in others:
        return _Resolved("device_resource_exhausted", Phase.MODEL_LOAD)
    loading = any(other.phase is Phase.MODEL_LOAD for other in state.failures) or Phase.MODEL_LOAD in state.phases
    phase = _hbm_phase(state, seen)
    if phase is Phase.WEIGHTS_LOAD or (not loading and phase in {Phase.KV_CHECK, Phase.KV_ALLOC, Phase.WARMUP}):
        return _Resolved("runtime_hbm_oom", Phase.KV_ALLOC if phase is Phase.KV_CHECK else phase)
    if loading or phase in {Phase.COMPILE, Phase.MODEL_LOAD}:
        return _Resolved("runtime_hbm_oom", Phase.MODEL_LOAD)
    if others <= {"hbm_oom"} and "DEVICE memory (" in seen.evidence.text:
        return _Resolved("request_oom", Phase.UNKNOWN)
    return _Resolved("runtime_hbm_oom", Phase.UNKNOWN)


def _hbm_phase(state: BootState, seen: Seen) -> Phase:
    """Where no line says it: what the memory was for, or where the exception that passes it on came from."""
    if seen.phase is not Phase.UNKNOWN:
        return seen.phase
    same = [other for other in state.failures if other.failure.failure_class in _HBM and not other.survived]
    usages = (other.readings["alloc_usage"].value for other in same if "alloc_usage" in other.readings)
    if any(_OF_PROGRAMS.search(str(usage)) for usage in usages):
        return Phase.MODEL_LOAD
    return next((other.phase for other in (*same, *state.failures) if other.phase is not Phase.UNKNOWN), seen.phase)


def _resolve_pool(state: BootState, seen: Seen) -> _Resolved:
    return _Resolved("request_oom", Phase.REQUEST)


def _room(state: BootState, free: float) -> float:
    """What was free before anything was loaded, less what was."""
    taken = (
        value.value
        for name in ("weights_bytes", "kv_in_use_bytes")
        for process, value in state.facts.values.get(name, {}).items()
        if (process[0] or "").startswith("Vulkan") and not isinstance(value.value, str)
    )
    return free - sum(taken)


def _resolve_ggml(state: BootState, seen: Seen) -> _Resolved:
    figures = Figures(state, seen)
    asked, free = figures.number("tried_alloc_bytes"), figures.number("free_bytes")
    if seen.served or any(other.failure.failure_class == "request_oom" for other in state.failures):
        return _Resolved("request_oom", Phase.REQUEST)
    where = [other for other in state.failures if other.failure.phase is not None and other.row is not None]
    phase = where[0].phase if where else seen.phase
    held = (value.evidence.line for value in state.facts.values.get("weights_bytes", {}).values())
    if phase is Phase.WEIGHTS_LOAD and not where and min(held, default=seen.evidence.line) < seen.evidence.line:
        # the buffers of the weights are listed when all of them are there
        phase = Phase.KV_ALLOC
    if any(other.failure.failure_class == "single_alloc_limit" for other in state.failures):
        return _Resolved("single_alloc_limit", phase)
    vulkan = any(other.failure.failure_class == "ggml_vulkan_oom" for other in state.failures)
    if vulkan and asked is not None and free is not None and asked < _room(state, free):
        return _Resolved("single_alloc_limit", phase)
    for other in state.failures:
        if other.failure.failure_class in _EXPLAINS_GGML:
            return _Resolved(other.failure.failure_class, other.phase)
    if phase is Phase.UNKNOWN and _says(state, *_OF_A_MODEL):
        phase = Phase.WEIGHTS_LOAD
    started = phase is Phase.UNKNOWN and _says(state, *_OF_A_START)
    return _Resolved("device_oom", phase) if started else _Resolved(*_OOM_CLASSES[phase])


def _resolve_ggml_host(state: BootState, seen: Seen) -> _Resolved:
    """What is sized by the context is made smaller by it, wherever it lies."""
    resolved = _resolve_ggml(state, seen)
    sized = resolved.phase in {Phase.KV_ALLOC, Phase.PROFILE, Phase.REQUEST}
    return resolved if sized else _Resolved("host_memory_short", resolved.phase)


_RESOLVE: Final[dict[str, Callable[[BootState, Seen], _Resolved]]] = {
    "engine_exception": _resolve_exception,
    "core_exception": _resolve_exception,
    "lone_exception": _resolve_lone,
    "oom": _resolve_oom,
    "startup_free": _resolve_startup,
    TOKENS: _resolve_pool,
    "hbm_oom": _resolve_hbm,
    "hbm_load_oom": _resolve_hbm,
    "nrt_resource": _resolve_hbm,
    "ggml_oom": _resolve_ggml,
    "ggml_host_oom": _resolve_ggml_host,
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
    # a full pool of tokens ends like a full card, and is helped by the opposite
    full = root.failure.failure_class == TOKENS
    levers = _levers(state, TOKENS if full else failure_class, phase)
    if counts_slots(failure_class, root.evidence.text):
        levers = PLAN_SHORT
    elif failure_class == "kv_check_short" and not state.pinned and "plan_overhead_planned_bytes" in state.facts:
        levers = PLAN_CAPPED
    layout = fitting_layout(root.evidence.text) if failure_class == "parallelism_refused" else None
    if layout is not None:
        levers = (layout, NO_LIMIT)
    if failure_class == "runtime_hbm_oom" and any("profiler_bytes" in seen.readings for seen in state.failures):
        levers = (*levers_for("profiler_reserve", state.family, phase), *levers)
    if failure_class == "compile_failed" and "memory space smem" in root.evidence.text:
        levers = with_own(levers, TABLES_OF_BLOCKS)
    if root.row is not None and "shared_memory" in root.row.flags:
        levers = SHARED_MEMORY
    nowhere = failure_class in {"request_oom", "weights_oom"} and phase is Phase.UNKNOWN
    said = TOKENS if full else "device_oom" if nowhere else failure_class
    sentence = sentence_for(said, figures, root.evidence.text)
    if failure_class == "foreign_process_memory" and _crowded(root):
        ours, total = figures.size("process_in_use_bytes"), figures.size("total_bytes")
        sentence = f"this process holds {ours} of {total}, and others hold more"
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
        roomy="free_bytes" in state.facts,
        vllm=state.of_vllm,
        fitted=any(seen.row is not None and "auto_fit" in seen.row.flags for seen in state.failures),
    )


def _plain_cause(state: BootState, failure_class: str, phase: Phase, evidence: tuple[Evidence, ...]) -> Cause:
    text = evidence[0].text if evidence else ""
    if failure_class == "request_starved" and IDLE in text and "Running: 0 " not in text:
        return Cause(
            phase=phase,
            failure_class=failure_class,
            sentence="requests run and none gets a token: the KV cache is full",
            evidence=evidence,
            levers=STUCK,
        )
    # requests that run and get nothing starve of a full pool, not of one that is too small for the first
    said = TOKENS if failure_class == "request_starved" and STANDS_STILL in text else failure_class
    return Cause(
        phase=phase,
        failure_class=failure_class,
        sentence=sentence_for(said, Figures(state, None), text),
        evidence=evidence,
        levers=_levers(state, said, phase),
    )
