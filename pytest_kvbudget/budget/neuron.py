"""vLLM Neuron: how much HBM a logical core's KV cache is given.

Three releases of the law exist. Plugin 0.21 and 0.24 (read in source) divide nothing by the logical NeuronCore size,
know no headroom and test no minimum on CPU. SDK 2.33 (the document ``determine_available_memory``) has all three.
Truncation is the engines' own: ``int()`` of a double, so products are computed in floating point on purpose.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

import msgspec

from pytest_kvbudget.budget.model import BudgetInputError, Plan, Reach, Refusal, Term, gives, takes
from pytest_kvbudget.units import GIB, format_size
from pytest_kvbudget.verdict import Provenance

DOCUMENT: Final = "determine_available_memory"
CAP_FRACTION: Final = 0.30
"""Default fractional cap (document, section 3)."""
MINIMUM_KV_BYTES: Final = GIB
"""Default minimum KV budget, 1.0 GiB (document, section 3)."""
HEADROOM_VARIABLE: Final = "VLLM_NEURON_RESERVED_HEADROOM_GIB"
CAP_VARIABLE: Final = "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION"
MINIMUM_VARIABLE: Final = "VLLM_NEURON_MIN_KV_BUDGET_GIB"
LNC_VARIABLE: Final = "NEURON_LOGICAL_NC_CONFIG"
UTILIZATION_FLAG: Final = "--gpu-memory-utilization"

_LAW: Final = f"{DOCUMENT}, sections 1 and 4"
_CPU_LAW: Final = f"{DOCUMENT}, section 2"
_STACK_GIB: Final = {"trn1": 16, "trn1n": 16, "trn2": 24, "trn3": 36, "inf2": 16}
_PHYSICAL_CORES_PER_STACK: Final = {"trn1": 1, "trn1n": 1, "inf2": 1, "trn2": 2, "trn3": 2}
_PLATFORM = re.compile(r"(?P<name>trn1n|trn1|trn2|trn3|inf2)(?:pre|-rev\w+)?", re.ASCII)


class Variant(StrEnum):
    """A release of the budget law."""

    RELEASE_0_21 = "0.21"
    RELEASE_0_24 = "0.24"
    SDK_2_33 = "2.33"

    @property
    def divides_stack(self) -> bool:
        """A stack that two logical cores share is divided between them."""
        return self is Variant.SDK_2_33

    @property
    def has_headroom(self) -> bool:
        """An explicit headroom is read and selects the reserve policy."""
        return self is Variant.SDK_2_33

    @property
    def cpu_minimum(self) -> bool:
        """The minimum KV budget is tested in CPU inference too."""
        return self is Variant.SDK_2_33


def variant_of(version: str) -> Variant:
    """The law that an engine's version follows: plugin ``0.21.0.1.0.0``, SDK ``2.31``, or a variant's own name.

    Plugins after 0.24 are taken to follow SDK 2.33, the only later text that is public.

    Raises:
        BudgetInputError: for a version whose law is not known.
    """
    match = re.match(r"v?(\d+)\.(\d+)", version)
    release = (int(match[1]), int(match[2])) if match else (-1, -1)
    if release >= (2, 33) or (0, 24) < release < (1, 0):
        return Variant.SDK_2_33
    if release in {(0, 24), (2, 32)}:
        return Variant.RELEASE_0_24
    if (0, 21) <= release < (0, 24) or release == (2, 31):
        return Variant.RELEASE_0_21
    raise BudgetInputError(
        f"no budget law is known for vLLM Neuron {version!r}; expected plugin 0.21 or later, or SDK 2.31 or later"
    )


def platform_name(platform: str) -> str:
    """The platform's entry of the static table, without revision: ``trn3-rev2`` is ``trn3``.

    Raises:
        BudgetInputError: for a platform that the table does not have.
    """
    match = _PLATFORM.fullmatch(platform)
    if match is None:
        raise BudgetInputError(f"platform {platform!r} has no HBM size; expected one of {', '.join(_STACK_GIB)}")
    return match["name"]


def hbm_stack_bytes(platform: str) -> int:
    """Static HBM size of one stack, in bytes, by platform (facts, section 4): what CPU compile plans with.

    Raises:
        BudgetInputError: for a platform that the table does not have.
    """
    return _STACK_GIB[platform_name(platform)] * GIB


def default_lnc(platform: str) -> int:
    """Logical NeuronCore size where nothing sets it: 2 on trn2 and trn3, 1 elsewhere (facts, section 3)."""
    return _PHYSICAL_CORES_PER_STACK[platform_name(platform)]


def logical_cores_per_stack(platform: str, lnc: int) -> int:
    """Logical cores that share one HBM stack: 1 at LNC 2 and 2 at LNC 1 (document, section 1).

    trn1 and inf2 have one physical core per stack and stand outside the document: 1.

    Raises:
        BudgetInputError: the platform has no such logical core.
    """
    physical = _PHYSICAL_CORES_PER_STACK[platform_name(platform)]
    if lnc not in range(1, physical + 1):
        accepted = "1 or 2" if physical == 2 else "1"
        raise BudgetInputError(f"{LNC_VARIABLE} is {lnc} on {platform}; expected {accepted}")
    return physical // lnc


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker is given, and every step of how."""

    mode: str
    """``"headroom"`` or ``"default"``."""
    share_bytes: int
    """The logical core's HBM, or in CPU inference the worker's share of the host."""
    total_budget_bytes: int
    user_budget_bytes: int
    """Before the cap; negative when the weights do not fit (the engine prints 0)."""
    cap_bytes: int | None
    """Fractional cap, ``None`` where headroom bypasses it."""
    minimum_bytes: int | None
    """The minimum that the engine tests, ``None`` where it tests none."""
    maximum_headroom_bytes: int
    """Largest headroom that leaves the minimum; negative when none does."""
    plan: Plan

    @property
    def available_bytes(self) -> int:
        """What the engine's function returns: what is left, or 0."""
        return max(self.plan.left_bytes, 0)

    @property
    def below_minimum(self) -> bool:
        """The engine stops on this budget: strictly below the minimum."""
        return self.minimum_bytes is not None and self.available_bytes < self.minimum_bytes

    @property
    def cap_binds(self) -> bool:
        """The fractional cap, not the memory, decides."""
        return self.cap_bytes is not None and self.cap_bytes < self.user_budget_bytes


def maximum_headroom(share_bytes: int, weights_bytes: int, minimum_bytes: int | None) -> int:
    """Largest headroom, in bytes, that leaves the minimum KV budget (document, section 3); negative when none does."""
    return share_bytes - weights_bytes - (minimum_bytes or 0)


def compute_kv_budget(
    *,
    stack_bytes: int,
    weights_bytes: int,
    cores_per_stack: int,
    utilization: float | None = None,
    headroom_bytes: int | None = None,
    cap_fraction: float = CAP_FRACTION,
    minimum_bytes: int | None = MINIMUM_KV_BYTES,
    variant: Variant = Variant.SDK_2_33,
    stack_provenance: Provenance = Provenance.ASSUMED,
    weights_provenance: Provenance = Provenance.CONFIGURED,
) -> Budget:
    """The KV budget of one logical core, on a device or in CPU compile (document, section 4).

    Args:
        stack_bytes: HBM of one stack: runtime used + free on a device, the static table in CPU compile.
        weights_bytes: parameters and buffers of this rank, a drafter's included.
        cores_per_stack: see `logical_cores_per_stack`; releases before 2.33 do not divide.
        utilization: needed in the default policy; headroom forces 1.0.
        headroom_bytes: explicit reserve, zero included; ``None`` selects the default policy.
        cap_fraction: of the total budget, default policy only.
        minimum_bytes: ``None`` where the check is off.
        variant: the release of the law.
        stack_provenance: where the stack's size comes from.
        weights_provenance: where the weights' size comes from.

    Raises:
        BudgetInputError: default policy without a utilization in (0, 1], a cap outside (0, 1], a negative headroom.
    """
    share_bytes = stack_bytes // cores_per_stack if variant.divides_stack else stack_bytes
    terms = [gives("HBM stack", stack_bytes, Reach.FIXED, "the device", law=_LAW, provenance=stack_provenance)]
    if share_bytes != stack_bytes:
        others_bytes = stack_bytes - share_bytes
        terms.append(takes("other logical cores of the stack", others_bytes, Reach.ENVIRONMENT, LNC_VARIABLE, law=_LAW))
    how = "checkpoint, dtype, --tensor-parallel-size"
    weights = takes("model weights", weights_bytes, Reach.FIXED, how, law=_LAW, provenance=weights_provenance)
    return _budget(
        share_bytes=share_bytes,
        terms=terms,
        weights=weights,
        utilization=utilization,
        headroom_bytes=headroom_bytes,
        cap_fraction=cap_fraction,
        minimum_bytes=minimum_bytes,
        variant=variant,
    )


def cpu_kv_budget(
    *,
    host_available_bytes: int,
    local_workers: int,
    utilization: float | None = None,
    headroom_bytes: int | None = None,
    cap_fraction: float = CAP_FRACTION,
    minimum_bytes: int | None = MINIMUM_KV_BYTES,
    variant: Variant = Variant.SDK_2_33,
) -> Budget:
    """The KV budget of one worker in CPU inference (document, section 2): weights are not subtracted again.

    The document writes ``host_available / local_workers``; the releases floor. Both give the same bytes in headroom
    mode and at most one byte apart in the default policy, so the floor is used.

    Raises:
        BudgetInputError: as `compute_kv_budget`, and for a host or a worker count that is not positive.
    """
    if host_available_bytes <= 0 or local_workers < 1:
        raise BudgetInputError(
            f"{host_available_bytes} bytes of host memory for {local_workers} workers; expected both to be positive"
        )
    share_bytes = host_available_bytes // local_workers
    measured = Provenance.MEASURED
    others_bytes = host_available_bytes - share_bytes
    terms = [
        gives(
            "host memory available", host_available_bytes, Reach.FIXED, "the host", law=_CPU_LAW, provenance=measured
        ),
        takes("other local workers", others_bytes, Reach.FLAG, "--tensor-parallel-size", law=_CPU_LAW),
    ]
    return _budget(
        share_bytes=share_bytes,
        terms=terms,
        weights=None,
        utilization=utilization,
        headroom_bytes=headroom_bytes,
        cap_fraction=cap_fraction,
        minimum_bytes=minimum_bytes if variant.cpu_minimum else None,
        variant=variant,
    )


def _budget(
    *,
    share_bytes: int,
    terms: list[Term],
    weights: Term | None,
    utilization: float | None,
    headroom_bytes: int | None,
    cap_fraction: float,
    minimum_bytes: int | None,
    variant: Variant,
) -> Budget:
    weights_bytes = 0 if weights is None else weights.size_bytes
    warnings: tuple[str, ...] = ()
    if headroom_bytes is not None and not variant.has_headroom:
        warnings = (f"release {variant} does not read {HEADROOM_VARIABLE}: the default policy decides",)
        headroom_bytes = None
    if headroom_bytes is not None:
        if headroom_bytes < 0:
            raise BudgetInputError(f"headroom is {headroom_bytes} bytes; expected zero or more")
        total_budget_bytes, cap_bytes = share_bytes, None
        user_budget_bytes = share_bytes - weights_bytes - headroom_bytes
        terms += [] if weights is None else [weights]
        terms.append(
            takes(
                "reserved headroom",
                headroom_bytes,
                Reach.ENVIRONMENT,
                HEADROOM_VARIABLE,
                law=_LAW,
                provenance=Provenance.CONFIGURED,
            )
        )
    else:
        total_budget_bytes = int(share_bytes * _checked(utilization, UTILIZATION_FLAG))
        cap_bytes = int(total_budget_bytes * _checked(cap_fraction, CAP_VARIABLE))
        user_budget_bytes = total_budget_bytes - weights_bytes
        outside_bytes, above_bytes = share_bytes - total_budget_bytes, max(user_budget_bytes - cap_bytes, 0)
        terms.append(takes("outside utilization", outside_bytes, Reach.FLAG, UTILIZATION_FLAG, law=_LAW))
        terms += [] if weights is None else [weights]
        terms.append(takes("above the fractional cap", above_bytes, Reach.ENVIRONMENT, CAP_VARIABLE, law=_LAW))
    return Budget(
        mode="default" if headroom_bytes is None else "headroom",
        share_bytes=share_bytes,
        total_budget_bytes=total_budget_bytes,
        user_budget_bytes=user_budget_bytes,
        cap_bytes=cap_bytes,
        minimum_bytes=minimum_bytes,
        maximum_headroom_bytes=maximum_headroom(share_bytes, weights_bytes, minimum_bytes),
        plan=Plan(policy="neuron", variant=variant, result="KV cache", terms=tuple(terms), warnings=warnings),
    )


def _checked(fraction: float | None, name: str) -> float:
    if fraction is None:
        raise BudgetInputError(f"{name} is not given, and its default differs between releases (0.9, 0.92); give it")
    if not 0 < fraction <= 1:
        raise BudgetInputError(f"{name} is {fraction}; expected above 0 and at most 1")
    return fraction


def minimum_refusal(budget: Budget) -> Refusal | None:
    """Why the engine stops on this budget, with the advice that belongs to the mode (document, section 5).

    ``None`` when it does not stop. In headroom mode more headroom makes it worse.
    """
    if budget.minimum_bytes is None or not budget.below_minimum:
        return None
    missing_bytes = budget.minimum_bytes - budget.plan.left_bytes
    numbers: dict[str, int | float] = {
        "available_bytes": budget.available_bytes,
        "minimum_bytes": budget.minimum_bytes,
        "missing_bytes": missing_bytes,
    }
    if budget.mode == "headroom":
        numbers["maximum_headroom_bytes"] = budget.maximum_headroom_bytes
        most = budget.maximum_headroom_bytes
        advice = (
            f"lower {HEADROOM_VARIABLE} to at most {format_size(most)}; raising it makes this worse"
            if most >= 0
            else f"no headroom passes: weights and minimum exceed the share by {format_size(-most)}; shard the model "
            "over more cores; raising headroom makes this worse"
        )
    elif budget.cap_binds:
        advice = f"raise {CAP_VARIABLE} (the cap binds) or {UTILIZATION_FLAG}, or lower {MINIMUM_VARIABLE}"
    else:
        advice = f"raise {UTILIZATION_FLAG} (the cap does not bind), or lower {MINIMUM_VARIABLE}"
    return Refusal(
        law="minimum_kv",
        sentence=(
            f"the KV budget is {budget.available_bytes:,} bytes ({format_size(budget.available_bytes)}), "
            f"{format_size(missing_bytes)} short of the minimum of {format_size(budget.minimum_bytes)}"
        ),
        advice=advice,
        source=f"{DOCUMENT}, sections 4 and 5",
        numbers=numbers,
    )


def minimum_from_text(effective_bytes: float, minimum_bytes: float, precision_bytes: float) -> bool | None:
    """Whether printed figures show a budget below the minimum; ``None`` where their precision cannot tell.

    Two decimals hide a byte: an engine can refuse ``1.00`` against ``1.00`` (facts, section 4).
    """
    if abs(effective_bytes - minimum_bytes) <= precision_bytes:
        return None
    return effective_bytes < minimum_bytes


def switch_warning(current: Budget, other: Budget) -> str | None:
    """What to say when the other policy would give more KV (document, section 3): only a boot makes it count."""
    more_bytes = other.available_bytes - current.available_bytes
    if more_bytes <= 0:
        return None
    return (
        f"the {other.mode} policy would give {format_size(more_bytes)} more KV cache; "
        "the new capacity counts only after a boot: the KV shape is part of every compiled program"
    )
