"""What a worker of vLLM Neuron gives its KV cache, and how it reads its environment: the simulator's own arithmetic.

Releases 0.21 and 0.24 as read in source, 2.33 as its documentation has it. Where the documentation has no words, they
are those of the nearest public code (facts, sections 2 and 3).
"""

from __future__ import annotations

import math
import shlex
from typing import Any, Final

import msgspec

from pytest_kvbudget.mock.failures import Failure
from pytest_kvbudget.mock.physics import Physics
from pytest_kvbudget.mock.spec import STACK_BYTES, Compile
from pytest_kvbudget.units import GIB

HEADROOM: Final = "VLLM_NEURON_RESERVED_HEADROOM_GIB"
CAP: Final = "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION"
MINIMUM: Final = "VLLM_NEURON_MIN_KV_BUDGET_GIB"
LNC: Final = "NEURON_LOGICAL_NC_CONFIG"
OLD_LNC: Final = "NEURON_RT_VIRTUAL_CORE_SIZE"
CAP_FRACTION: Final = 0.30
_FRAMES: Final = ("n_budget", "n_compute")


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The budget of one worker, bytes."""

    core_bytes: int
    weights_bytes: int
    headroom_bytes: int | None
    """``None`` is the policy by utilization and cap."""
    total_budget_bytes: int
    user_budget_bytes: int
    cap_fraction: float
    cap_bytes: int
    available_bytes: int
    minimum_bytes: int | None
    """``None`` where nothing is tested."""

    @property
    def below(self) -> bool:
        """The worker stops on it."""
        return self.minimum_bytes is not None and self.available_bytes < self.minimum_bytes


class Buckets(msgspec.Struct, frozen=True):
    """What programs are compiled for."""

    prefill: tuple[int, ...]
    """Batched tokens."""
    decode: tuple[int, ...]
    """Sequences."""
    kv_segment: int

    @property
    def count(self) -> int:
        """Programs."""
        return len(self.prefill) + len(self.decode)


def compile_of(physics: Physics) -> Compile:
    """The compiler and runtime of a device."""
    return physics.spec.compile or Compile()


def lnc_of(physics: Physics) -> int:
    """Physical cores behind a logical one.

    Raises:
        Failure: the platform has no such logical cores.
    """
    paired = physics.spec.platform in {"trn2", "trn3"}
    raw = physics.environ.get(LNC, physics.environ.get(OLD_LNC, "2" if paired else "1"))
    if raw not in ({"1", "2"} if paired else {"1"}):
        raise Failure(
            "RuntimeError", f"{LNC} must be {'1 or 2' if paired else '1'} on {physics.spec.platform}. Got '{raw}'.",
            ("n_init",),
        )  # fmt: skip
    return int(raw)


def compiled_lnc(physics: Physics) -> int:
    """What programs are compiled for: ``--lnc`` of the compiler's flags, else what the runtime is set to."""
    words = shlex.split(physics.environ.get("NEURON_CC_FLAGS", "").replace("=", " "))
    return int(words[words.index("--lnc") + 1]) if "--lnc" in words else lnc_of(physics)


def cores_per_stack(physics: Physics) -> int:
    """Logical cores that share an HBM stack."""
    return (2 if physics.spec.platform in {"trn2", "trn3"} else 1) // lnc_of(physics)


def buckets_of(physics: Physics) -> Buckets:
    """Buckets of ``--additional-config``, by default one of each kind."""
    config = msgspec.json.decode(physics.arguments.additional_config, type=dict[str, Any]).get("neuron_config", {})
    return Buckets(
        tuple(config.get("num_batched_tokens_buckets", (physics.arguments.max_num_batched_tokens,))),
        tuple(config.get("num_seqs_buckets", (physics.arguments.max_num_seqs,))),
        max(config.get("kv_segment_size_buckets", (physics.max_model_len,))),
    )


def scratch_bytes(physics: Physics) -> int:
    """Scratchpad of the largest program, as the compiler knows it: the same on every boot of a shape."""
    compile_ = compile_of(physics)
    size_bytes = compile_.scratch_base + compile_.scratch_per_token * physics.max_model_len
    return max(0, size_bytes + physics.shape_noise_bytes)


def budget(physics: Physics, stack_bytes: int) -> Budget:
    """Section 4 of the budget document, or what 0.21 and 0.24 do.

    Args:
        physics: the shape on its device.
        stack_bytes: the HBM stack as the runtime, or without a device the table, has it.

    Raises:
        Failure: a variable is nonsense to the worker.
    """
    documented = physics.spec.release == "2.33"
    headroom_bytes = _headroom(physics) if documented else None
    core_bytes = stack_bytes // cores_per_stack(physics) if documented else stack_bytes
    weights_bytes = physics.weights_bytes
    utilization = 1.0 if headroom_bytes is not None else physics.arguments.gpu_memory_utilization
    total = int(core_bytes * utilization)
    user = max(total - weights_bytes, 0)
    fraction = CAP_FRACTION if headroom_bytes is not None else _cap_fraction(physics)
    try:
        cap = int(total * fraction)
    except ValueError as error:
        raise Failure("ValueError", str(error), _FRAMES) from None
    if headroom_bytes is None:
        available = max(min(user, cap), 0)
    else:
        available = max(core_bytes - weights_bytes - headroom_bytes, 0)
    return Budget(
        core_bytes=core_bytes, weights_bytes=weights_bytes, headroom_bytes=headroom_bytes, total_budget_bytes=total,
        user_budget_bytes=user, cap_fraction=fraction, cap_bytes=cap, available_bytes=available,
        minimum_bytes=_minimum(physics),
    )  # fmt: skip


def table_bytes(physics: Physics) -> int:
    """The stack's size where there is no device: by the platform that was named.

    Raises:
        Failure: none was, or an unknown one.
    """
    name = physics.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "")
    for platform, size_bytes in STACK_BYTES.items():
        if name.startswith(platform):
            return size_bytes
    text = f"NEURON_PLATFORM_TARGET_OVERRIDE must name a platform with VLLM_NEURON_CPU_COMPILE. Got '{name}'."
    raise Failure("RuntimeError", text, ("n_budget",))


def _headroom(physics: Physics) -> int | None:
    raw = physics.environ.get(HEADROOM)
    if raw is None:
        return None
    try:
        value = float(raw)
    except ValueError:
        raise Failure("RuntimeError", f"{HEADROOM} must be a number of GiB. Got '{raw}'.", _FRAMES) from None
    if not math.isfinite(value) or value < 0:
        text = f"{HEADROOM} must be a finite, non-negative number of GiB. Got {value}."
        raise Failure("RuntimeError", text, _FRAMES)
    return int(value * GIB)


def _cap_fraction(physics: Physics) -> float:
    raw = physics.environ.get(CAP)
    if raw is None:
        return CAP_FRACTION
    try:
        value = float(raw)
    except ValueError as error:
        raise Failure("ValueError", str(error), _FRAMES) from None
    # NaN passes, and stops at the conversion to an integer
    if value <= 0 or value > 1:
        raise Failure("RuntimeError", f"{CAP} must be in (0, 1]. Got {value}.", _FRAMES)
    return value


def _minimum(physics: Physics) -> int | None:
    raw = physics.environ.get(MINIMUM)
    if raw is None:
        return compile_of(physics).min_kv or None
    try:
        value = float(raw)
        return int(value * GIB) if value > 0 else None
    except ValueError as error:
        raise Failure("ValueError", str(error), _FRAMES) from None
    except OverflowError as error:
        raise Failure("OverflowError", str(error), _FRAMES) from None


def below_minimum(physics: Physics, result: Budget) -> Failure:
    """What the worker raises on a budget below the minimum."""
    minimum_bytes = result.minimum_bytes or 0
    effective, minimum = result.available_bytes / GIB, minimum_bytes / GIB
    head = (
        "Computed KV cache budget is below minimum threshold."
        f" effective={effective:.2f} GiB, minimum={minimum:.2f} GiB."
    )
    if physics.spec.release != "2.33":
        advice = f"Increase gpu_memory_utilization or lower {MINIMUM}."
    elif result.headroom_bytes is None:
        advice = (
            f"Increase gpu_memory_utilization ({physics.arguments.gpu_memory_utilization}) or {CAP}"
            f" ({result.cap_fraction}), or lower {MINIMUM}."
        )
    else:
        most = (result.core_bytes - result.weights_bytes - minimum_bytes) / GIB
        advice = (
            f"{HEADROOM} is {result.headroom_bytes / GIB:.2f} GiB per logical core; its maximum is {most:.2f} GiB."
            f" Decrease it or lower {MINIMUM}."
        )
    return Failure("RuntimeError", f"{head} {advice}", _FRAMES)


def tuning_note(result: Budget | None) -> tuple[str, ...]:
    """What release 2.33 adds to an allocation failure in headroom mode; its words are not public."""
    if result is None or result.headroom_bytes is None:
        return ()
    return (
        f"{HEADROOM} is {result.headroom_bytes / GIB:.2f} GiB per logical core. If this configuration passes with a"
        " smaller KV cache, increase it in steps of 1 GiB and keep the smallest value that passes.",
    )
