"""The argument gate: which shapes are known not to boot, before any boot, with law, numbers and source.

A law refuses only where every figure that it needs is known; what is unknown is never refused. What only endangers a
boot is a caution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from pytest_kvbudget.budget import neuron, neuron_env
from pytest_kvbudget.budget.graphs import charge_from
from pytest_kvbudget.budget.model import BudgetInputError, Refusal
from pytest_kvbudget.budget.rdna4 import ArenaPlan
from pytest_kvbudget.budget.utilization import FreeAtInit, utilization_refusal
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import GIB, format_size
from pytest_kvbudget.verdict import Provenance

Policy = Literal["neuron", "rdna4", "vllm"]
_CEILINGS = "RDNA4 document, section 5 (parallelism ceilings)"


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What is known before the boot; ``None`` is unknown, and a law that needs it is silent."""

    total_bytes: int | None = None
    """The card, per rank."""
    free: FreeAtInit | None = None
    """What an earlier worker found free at init."""
    weights_bytes: int | None = None
    """Per rank, for the minimum-KV law."""
    weights_provenance: Provenance = Provenance.MEASURED
    """The minimum-KV law does not refuse on assumed or derived weights."""
    stack_bytes: int | None = None
    """HBM stack as a device reported it; else the platform's static table."""
    platform: str | None = None
    """Neuron platform, where the environment does not name it."""
    kv_heads: int | None = None
    """KV heads of the whole model."""
    latent_attention: bool = False
    """MLA: the context-parallel ceiling does not apply."""
    full_copy_bytes: int | None = None
    """Weights of one complete copy of the model."""
    arena: ArenaPlan | None = None
    """The expert plan of the shape, where its inputs are measured or configured."""
    resident_floor_slots: int | None = None


def refusals(
    policy: Policy,
    shape: Shape,
    known: Known | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    variant: neuron.Variant = neuron.Variant.SDK_2_33,
) -> tuple[Refusal, ...]:
    """Every law that is known to forbid this shape.

    Args:
        policy: the engine family's budget policy.
        shape: what is asked of the engine; its environment wins over ``environ``.
        known: what earlier boots, devices and configuration say.
        environ: the environment that the engine is started with.
        variant: Neuron release.

    Raises:
        BudgetInputError: the environment holds a value for which no rule is public.
    """
    known = known or Known()
    merged = {**(environ or {}), **shape.env}
    if policy == "neuron":
        return _neuron(shape, known, merged, variant)
    found = list(_parallelism(shape, known))
    if shape.gpu_memory_utilization is not None and not (policy == "vllm" and shape.kv_cache_memory_bytes is not None):
        refusal = utilization_refusal(
            shape.gpu_memory_utilization,
            total_bytes=known.total_bytes,
            free=known.free,
            full_refused=policy == "rdna4",
        )
        found += [] if refusal is None else [refusal]
    if policy == "rdna4" and known.arena is not None:
        found += _arena(known.arena, known.resident_floor_slots)
    return tuple(found)


def cautions(
    policy: Policy, shape: Shape, *, environ: Mapping[str, str] | None = None, axis: str | None = None
) -> tuple[str, ...]:
    """What endangers a boot or changes what is measured, without forbidding it.

    Args:
        policy: the engine family's budget policy.
        shape: what is asked of the engine.
        environ: the environment that the engine is started with.
        axis: what a search moves.

    Raises:
        BudgetInputError: a variable of the graph charge is no number.
    """
    merged = {**(environ or {}), **shape.env}
    found: list[str] = []
    if policy == "neuron":
        if flag_value(shape.extra_args, "--num-gpu-blocks-override") is not None:
            found.append("--num-gpu-blocks-override defeats the budget: the KV shape ignores headroom and utilization")
        return tuple(found)
    if policy == "rdna4":
        if has_flag(shape.extra_args, "--enable-expert-parallel"):
            found.append(
                "--enable-expert-parallel replaces the local gather of tiered offload by an all-to-all per layer"
            )
        warning = charge_from(merged).warning(axis)
        found += [] if warning is None else [warning]
    return tuple(found)


def _neuron(shape: Shape, known: Known, environ: Mapping[str, str], variant: neuron.Variant) -> tuple[Refusal, ...]:
    knobs = neuron_env.read_knobs(environ, variant)
    found = list(knobs.refusals)
    if found or knobs.cpu_mode:
        # the host's memory is not known before the boot, and a bad variable stops it anyway
        return tuple(found)
    headroom_bytes = knobs.headroom_bytes
    if shape.reserved_headroom is not None and variant.has_headroom:
        headroom_bytes = shape.reserved_headroom
    overridden = flag_value(shape.extra_args, "--num-gpu-blocks-override") is not None
    stack = _stack(shape, known, knobs)
    # without the minimum check an overriding block count replaces whatever the budget is
    if stack is None or (overridden and knobs.minimum_bytes is None):
        return ()
    stack_bytes, cores = stack
    share_bytes = stack_bytes // cores
    if headroom_bytes is not None and headroom_bytes >= share_bytes:
        return (_headroom_refusal(headroom_bytes, share_bytes),)
    if known.weights_bytes is None or known.weights_provenance in {Provenance.ASSUMED, Provenance.DERIVED}:
        return ()
    budget = neuron.compute_kv_budget(
        stack_bytes=stack_bytes,
        weights_bytes=known.weights_bytes,
        cores_per_stack=cores,
        # an unknown utilization can give at most what 1.0 gives
        utilization=shape.gpu_memory_utilization or 1.0,
        headroom_bytes=headroom_bytes,
        cap_fraction=knobs.cap_fraction,
        minimum_bytes=knobs.minimum_bytes,
        variant=variant,
        weights_provenance=known.weights_provenance,
    )
    refusal = neuron.minimum_refusal(budget)
    return () if refusal is None else (refusal,)


def _stack(shape: Shape, known: Known, knobs: neuron_env.Knobs) -> tuple[int, int] | None:
    """HBM of a stack and the logical cores that share it; ``None`` where platform or LNC are not known."""
    platform = knobs.platform or known.platform
    if platform is None:
        return None
    try:
        cores = neuron.logical_cores_per_stack(platform, shape.lnc or knobs.lnc or neuron.default_lnc(platform))
        return known.stack_bytes or neuron.hbm_stack_bytes(platform), cores
    except BudgetInputError:
        return None


def _headroom_refusal(headroom_bytes: int, share_bytes: int) -> Refusal:
    return Refusal(
        law="headroom_share",
        sentence=(
            f"headroom of {format_size(headroom_bytes)} is at or above the logical core's share of "
            f"{format_size(share_bytes)}: no KV cache is left, whatever the weights"
        ),
        advice=f"lower {neuron.HEADROOM_VARIABLE}; at LNC 1 the share is half of the stack",
        source=f"{neuron.DOCUMENT}, section 3",
        numbers={"headroom_bytes": headroom_bytes, "share_bytes": share_bytes},
    )


def _parallelism(shape: Shape, known: Known) -> list[Refusal]:
    found = []
    ranks = shape.tensor_parallel_size or 1
    context = _count(shape.extra_args, "--decode-context-parallel-size", "-dcp")
    if context > 1 and known.kv_heads is not None and not known.latent_attention and ranks <= known.kv_heads:
        found.append(
            Refusal(
                law="decode_context_parallel",
                sentence=(
                    f"--decode-context-parallel-size {context} needs more ranks than KV heads: tensor parallel size "
                    f"{ranks}, KV heads {known.kv_heads}"
                ),
                advice=f"raise --tensor-parallel-size above {known.kv_heads}, or drop the flag",
                source=_CEILINGS,
                numbers={"tensor_parallel_size": ranks, "kv_heads": known.kv_heads},
            )
        )
    replicas = _count(shape.extra_args, "--data-parallel-size", "-dp")
    if replicas > 1 and known.full_copy_bytes is not None and known.total_bytes is not None:
        room_bytes = known.total_bytes * ranks
        if known.full_copy_bytes > room_bytes:
            found.append(
                Refusal(
                    law="data_parallel",
                    sentence=(
                        f"--data-parallel-size {replicas} needs a full copy of {known.full_copy_bytes / GIB:.2f} GiB "
                        f"per replica, and a replica's {ranks} card{'s have' if ranks > 1 else ' has'} "
                        f"{room_bytes / GIB:.2f} GiB"
                    ),
                    advice="drop --data-parallel-size: impossible here, not slow",
                    source=_CEILINGS,
                    numbers={"full_copy_bytes": known.full_copy_bytes, "room_bytes": room_bytes},
                )
            )
    return found


def _arena(arena: ArenaPlan, floor_slots: int | None) -> list[Refusal]:
    if not arena.plan.fits:
        missing_bytes = -arena.plan.left_bytes
        return [
            Refusal(
                law="expert_plan",
                sentence=f"the expert plan {arena.plan.sentence}: no slot is left",
                advice="raise --gpu-memory-utilization within its law, charge less for graphs, or shorten the window",
                source="RDNA4 document, section 1",
                numbers={"missing_bytes": missing_bytes},
            )
        ]
    if floor_slots is None or arena.slots >= floor_slots:
        return []
    return [
        Refusal(
            law="resident_floor",
            sentence=f"the plan has {arena.slots:,} slots and the resident layers need {floor_slots:,}",
            advice="lower --expert-resident-layers, or make room: utilization, graph charge, window",
            source="facts on the fork, section 3 (resident-layer floor)",
            numbers={"slots": arena.slots, "floor_slots": floor_slots},
        )
    ]


def flag_value(arguments: tuple[str, ...], *names: str) -> str | None:
    """The value of a flag in further arguments, the last one given; ``None`` where it is not there."""
    found = None
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") not in names:
            continue
        if equals:
            found = value
        elif index + 1 < len(arguments):
            found = arguments[index + 1]
    return found


def has_flag(arguments: tuple[str, ...], name: str) -> bool:
    """Whether a switch is among further arguments."""
    return any(argument.replace("_", "-") == name for argument in arguments)


def _count(arguments: tuple[str, ...], *names: str) -> int:
    raw = flag_value(arguments, *names)
    return int(raw) if raw is not None and raw.isascii() and raw.isdecimal() else 1
