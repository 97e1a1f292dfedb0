"""What one boot's ledger says about where the boundary of an axis is.

Every figure is of the boot at hand: bytes per token depend on the shape, and a rate of another geometry is no hint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pytest_kvbudget.budget.neuron import MINIMUM_KV_BYTES
from pytest_kvbudget.search.knobs import TICKS
from pytest_kvbudget.search.model import Hint, Limit
from pytest_kvbudget.verdict import Phase

if TYPE_CHECKING:
    from pytest_kvbudget.ledger.model import BootLedger, Value
    from pytest_kvbudget.search.knobs import Knob
    from pytest_kvbudget.shape import Shape

KV_LIMIT: Final = "kv_check"
DEVICE_LIMIT: Final = "device_memory"
COMPILE_LIMIT: Final = "compile"
STARTUP_LIMIT: Final = "startup"
STARTUP_CLASS: Final = "startup_free_below_request"
ARENA_LIMIT: Final = "expert_arena"
SHRINKS: Final = 1.05
"""What a compiled program loses with each byte of its KV cache: scratch and rings that go with the cache too (Neuron
document, section 2: a larger cache changes the graph and its memory)."""
RESERVE_FACTOR: Final = 1.08
"""What the RDNA4 fork's plan reserves for a window over its registry's price (RDNA4 budget document, section 1)."""


def hint_from(
    ledger: BootLedger,
    *,
    axis: str,
    shape: Shape,
    windows: int = 1,
    scaled: bool = False,
    free_bytes: int | None = None,
) -> Hint:
    """Slack of the limits that a boot passed, deficit of the one that it failed, and the engine's own estimate.

    Args:
        ledger: what the boot printed.
        axis: field of the shape that the ladder moves.
        shape: what was booted, the axis' value included.
        windows: full windows that the pool must hold.
        scaled: the pinned pool's bytes move with the axis (``pool="scaled"``).
        free_bytes: least free device memory of a rank once the boot was ready, from the memory probe.

    Returns:
        A hint, empty where the boot stated nothing that bears on this axis. A limit has no rate where the axis is not
        known to move it; two boots' margins together still make a line.
    """
    kv = None if axis == "kv_cache_memory_bytes" else _kv_limit(ledger, axis, shape, windows, scaled=scaled)
    device = _device_limit(ledger, _device_rate(ledger, axis, shape, scaled=scaled), free_bytes)
    # some of a scratchpad is there whatever the window
    compiled = _compile_limit(ledger, _scratch_rate(ledger, axis, shape), at_most=True)
    limits = tuple(limit for limit in (kv, compiled, _arena_limit(ledger, axis), device) if limit is not None)
    return Hint(limits=limits, estimate=_estimate(ledger, axis, windows, scaled=scaled))


def sweep_hint_from(
    ledger: BootLedger, *, knob: Knob, shape: Shape, windows: int = 1, free_bytes: int | None = None
) -> Hint:
    """The same for a boot of a headroom sweep: slack and deficits per unit of the knob.

    Margins shrink towards the knob's goal where they belong to the failures that end the way there, and towards the
    other end where they belong to the opposite ones: an allocation's deficit bounds the raise of a headroom, memory
    left when the boot was ready the cut, and what the KV cache has beyond its minimum the largest headroom.

    Args:
        ledger: what the boot printed.
        knob: what the sweep turns.
        shape: what was booted.
        windows: full windows that the pool must hold.
        free_bytes: least free device memory of a rank once the boot was ready, from the memory probe.
    """
    rate = _knob_rate(ledger, knob)
    taken = None if _before_the_pool(ledger) else rate
    window = shape.max_model_len or _whole(ledger, "max_model_len")
    found = [
        _startup_limit(ledger, knob, shape),
        _compile_limit(ledger, None if rate is None else SHRINKS * rate),
        _minimum_limit(ledger, knob, shape),
        _kv_limit(ledger, knob.name, shape, windows, scaled=False) if window else None,
    ]
    rated = (limit if limit is None or limit.bytes_per_unit else replace(limit, bytes_per_unit=rate) for limit in found)
    limits = (*rated, _device_limit(ledger, taken, free_bytes))
    return Hint(limits=tuple(limit for limit in limits if limit is not None))


def _before_the_pool(ledger: BootLedger) -> bool:
    """An allocation failed before anything that a knob sizes was there: the KV cache, or an expert arena."""
    if ledger.cause is None or ledger.get("plan_expert_cache_bytes") is not None:
        return False
    return ledger.cause.phase in {Phase.WORKER_INIT, Phase.WEIGHTS_LOAD, Phase.PROFILE}


def _knob_rate(ledger: BootLedger, knob: Knob) -> float | None:
    """Bytes that one unit of the knob moves; ``None`` where the boot does not tell."""
    if knob.name in {"reserved_headroom", "kv_cache_memory_bytes"}:
        return 1.0
    share = {"gpu_memory_utilization": "total_bytes", "kv_cap_fraction": "requested_bytes"}.get(knob.name)
    whole = None if share is None else _fact(ledger, share)
    return None if whole is None or float(whole.value) <= 0 else float(whole.value) / TICKS


def _startup_limit(ledger: BootLedger, knob: Knob, shape: Shape) -> Limit | None:
    """What a worker found free at init beyond what a share of the device asks for: the utilization law.

    An allocation that failed states another free memory, of another moment.
    """
    free, total = _fact(ledger, "free_bytes"), _fact(ledger, "total_bytes")
    share = shape.gpu_memory_utilization
    if knob.name != "gpu_memory_utilization" or free is None or total is None or share is None:
        return None
    if ledger.cause is not None and ledger.failure_class != STARTUP_CLASS:
        return None
    return Limit(
        name=STARTUP_LIMIT,
        margin_bytes=float(free.value) - share * float(total.value),
        bytes_per_unit=float(total.value) / TICKS,
        precision_bytes=free.precision + share * total.precision,
    )


def _compile_limit(ledger: BootLedger, rate: float | None, *, at_most: bool = False) -> Limit | None:
    """What a compiled program was over its limit, in bytes: the peak of the first program that was.

    Args:
        ledger: what the boot printed.
        rate: bytes that one more unit takes; ``None`` where unknown.
        at_most: it takes no more than that, and maybe less.
    """
    peak, limit = _fact(ledger, "peak_hbm_bytes"), _fact(ledger, "hbm_limit_bytes")
    if peak is None or limit is None or float(peak.value) <= float(limit.value):
        return None
    return Limit(
        name=COMPILE_LIMIT,
        margin_bytes=float(limit.value) - float(peak.value),
        bytes_per_unit=rate,
        rate_at_most=at_most,
        precision_bytes=peak.precision + limit.precision,
        exact=True,  # the compiler's own sum: a program that it refused is in no cache, and is refused again
    )


def _arena_limit(ledger: BootLedger, axis: str) -> Limit | None:
    """What an expert arena has beyond its resident layers; the plan's reserve for the window is taken from it.

    The planner's floor is somewhat more than the resident layers (48 shared slots on the RDNA4 fork).
    """
    arena, resident = _fact(ledger, "plan_expert_cache_bytes"), _fact(ledger, "plan_resident_layers_bytes")
    registry = _fact(ledger, "plan_registry_b_per_token")
    if axis != "max_model_len" or arena is None or resident is None or registry is None:
        return None
    return Limit(
        name=ARENA_LIMIT,
        margin_bytes=float(arena.value) - float(resident.value),
        bytes_per_unit=RESERVE_FACTOR * float(registry.value),
        precision_bytes=arena.precision + resident.precision,
    )


def _scratch_rate(ledger: BootLedger, axis: str, shape: Shape) -> float | None:
    """Scratchpad of a program per token of its window: what of it grows with the window is not printed."""
    scratch = _fact(ledger, "scratchpad_bytes")
    if axis != "max_model_len" or scratch is None or not shape.max_model_len or float(scratch.value) <= 0:
        return None
    return float(scratch.value) / shape.max_model_len


def _minimum_limit(ledger: BootLedger, knob: Knob, shape: Shape) -> Limit | None:
    """A KV budget against the minimum that the engine tests.

    In headroom mode the budget comes from its terms: the engine prints no less than zero (Neuron document, section 3,
    ``maximum_headroom``).
    """
    least = _fact(ledger, "min_kv_bytes")
    budget = _fact(ledger, "effective_kv_bytes") or _fact(ledger, "available_kv_bytes")
    core, weights = _fact(ledger, "total_bytes"), _fact(ledger, "weights_bytes")
    minimum, blur = (float(MINIMUM_KV_BYTES), 0.0) if least is None else (float(least.value), least.precision)
    if knob.name == "reserved_headroom" and core is not None and weights is not None and shape.reserved_headroom:
        left = float(core.value) - float(weights.value) - shape.reserved_headroom
        return Limit(
            name=KV_LIMIT, margin_bytes=left - minimum, precision_bytes=core.precision + weights.precision + blur
        )
    if least is None or budget is None or float(budget.value) <= 0:
        return None
    return Limit(name=KV_LIMIT, margin_bytes=float(budget.value) - minimum, precision_bytes=budget.precision + blur)


def _kv_limit(ledger: BootLedger, axis: str, shape: Shape, windows: int, *, scaled: bool) -> Limit | None:
    """KV memory that is there less what the promised windows need."""
    window = shape.max_model_len or _whole(ledger, "max_model_len")
    pool = _pool_bytes(ledger, shape)
    if pool is None or not window:
        return None
    have, have_blur = pool
    # a scaled pool grows with the need: its shortness says nothing about another value
    by_window = axis == "max_model_len" and not scaled
    needed = _fact(ledger, "kv_needed_bytes")
    if needed is not None and float(needed.value) > 0:
        need = windows * float(needed.value)
        # at the root, where both are equal, the need's last digit counts only by have/need
        blur = have_blur + windows * needed.precision * min(1.0, have / need)
        rate = need / window if by_window else None
        return Limit(
            name=KV_LIMIT,
            margin_bytes=have - need,
            bytes_per_unit=rate,
            precision_bytes=blur,
            exact=have_blur == 0,
            loose=_compiles(ledger),
        )
    capacity = capacity_tokens(ledger, window)
    if capacity is None or scaled:
        return None
    tokens, blur_tokens = capacity
    per_token = have / tokens
    return Limit(
        name=KV_LIMIT,
        margin_bytes=(tokens - windows * window) * per_token,
        bytes_per_unit=windows * per_token if by_window else None,
        precision_bytes=blur_tokens * per_token,
        exact=have_blur == 0,
        loose=_compiles(ledger),
    )


def _compiles(ledger: BootLedger) -> bool:
    """What the engine compiles and loads has limits of its own, which it states only when they are hit."""
    return ledger.family == "neuron"


def capacity_tokens(ledger: BootLedger, window: int | None) -> tuple[float, float] | None:
    """Tokens that the pool holds in windows of this length, and half a unit of their last digit.

    From vLLM 0.20.2 the token count is concurrency times window. On hybrid models earlier releases print another
    count, and then it is the concurrency that tells how many windows fit.
    """
    tokens, concurrency = _fact(ledger, "kv_tokens"), _fact(ledger, "max_concurrency")
    if tokens is None or float(tokens.value) <= 0:
        return None
    count = float(tokens.value)
    if concurrency is None or not window:
        return count, 0.5
    by_concurrency = float(concurrency.value) * window
    blur = max(concurrency.precision, 0.005) * window
    blocks = _whole(ledger, "gpu_blocks")
    block = count / blocks if blocks else 0.0
    if by_concurrency <= 0 or abs(by_concurrency - count) <= 2 * blur + block:
        return count, max(0.5, block / 2)
    return by_concurrency, blur


def _device_rate(ledger: BootLedger, axis: str, shape: Shape, *, scaled: bool) -> float | None:
    """Device bytes per rank that one more unit of the axis takes: a pinned pool's, where the pool moves with it.

    An expert arena gives back what the plan reserves for one more token of the window.
    """
    if axis == "kv_cache_memory_bytes":
        return 1.0
    value = {"max_model_len": shape.max_model_len, "max_num_seqs": shape.max_num_seqs}.get(axis)
    if not scaled or shape.kv_cache_memory_bytes is None or not value:
        return None
    registry = _fact(ledger, "plan_registry_b_per_token") if axis == "max_model_len" else None
    back = 0.0 if registry is None else RESERVE_FACTOR * float(registry.value)
    rate = shape.kv_cache_memory_bytes / value - back
    return rate if rate > 0 else None


def _device_limit(ledger: BootLedger, rate: float | None, free_bytes: int | None) -> Limit | None:
    """Memory left on the device after a boot, or what an allocation that failed was short of: at least that."""
    tried = _fact(ledger, "tried_alloc_bytes")
    # the Neuron worker prints what was free after loading the weights, not when an allocation failed
    free = None if _compiles(ledger) else _fact(ledger, "free_bytes")
    if ledger.cause is not None:
        if tried is not None and free is None and float(tried.value) > 0:
            # less was free than that: anything down to nothing
            half = float(tried.value) / 2
            return Limit(
                name=DEVICE_LIMIT, margin_bytes=-half, bytes_per_unit=rate, precision_bytes=half, at_least=True
            )
        if tried is None or free is None or float(tried.value) <= float(free.value):
            return None
        return Limit(
            name=DEVICE_LIMIT,
            margin_bytes=float(free.value) - float(tried.value),
            bytes_per_unit=rate,
            precision_bytes=tried.precision + free.precision,
            at_least=True,
        )
    if free_bytes is None:
        return None
    # what a program takes it takes of the device when it is loaded
    program = COMPILE_LIMIT if rate is None and _compiles(ledger) else None
    return Limit(name=DEVICE_LIMIT, margin_bytes=free_bytes, bytes_per_unit=rate, grows_with=program)


def _estimate(ledger: BootLedger, axis: str, windows: int, *, scaled: bool) -> int | None:
    """The engine's own word for the largest value that fits."""
    if axis == "max_model_len" and not scaled:
        # the engine means one window: a promise of several is out of its sight
        return _whole(ledger, "estimated_max_model_len") if windows == 1 else None
    if axis == "max_num_seqs" and ledger.failure_class == "max_num_seqs_exceeds_state":
        return _whole(ledger, "state_blocks")
    if axis == "kv_cache_memory_bytes":
        return _whole(ledger, "kv_suggest_full_bytes")
    return None


def _pool_bytes(ledger: BootLedger, shape: Shape) -> tuple[float, float] | None:
    """Bytes of the KV cache and half a unit of their last digit: the pinned ones exactly, else as printed.

    A variable of the environment may size the pool whatever is pinned (``VLLM_CPU_KVCACHE_SPACE`` on CPU, vLLM 0.32).
    """
    available, pinned = _fact(ledger, "available_kv_bytes"), shape.kv_cache_memory_bytes
    printed = None if available is None or float(available.value) <= 0 else float(available.value)
    if pinned is not None and (
        printed is None or available is None or abs(printed - pinned) <= 2 * available.precision
    ):
        return float(pinned), 0.0
    return None if printed is None or available is None else (printed, available.precision)


def _fact(ledger: BootLedger, name: str) -> Value | None:
    value = ledger.facts.get(name)
    return None if value is None or isinstance(value.value, (str, bool)) else value


def _whole(ledger: BootLedger, name: str) -> int | None:
    value = _fact(ledger, name)
    return None if value is None else int(value.value)
