"""From figures to an answer: one policy's plan with its refusals, warnings and comparisons, for people and programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pytest_kvbudget.budget import gate, neuron, neuron_env, pool, rdna4, vllm
from pytest_kvbudget.budget.blocks import KvGeometry, block_count, parity
from pytest_kvbudget.budget.footprint import footprint
from pytest_kvbudget.budget.graphs import GraphCharge, charge_from
from pytest_kvbudget.budget.kv_need import kv_need
from pytest_kvbudget.budget.model import BudgetInputError, Plan, Refusal
from pytest_kvbudget.budget.utilization import FreeAtInit, largest_utilization
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.verdict import Provenance


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a plan can be made from; ``None`` is not given. Sizes are bytes per rank."""

    policy: gate.Policy
    shape: Shape = Shape()
    environ: Mapping[str, str] = {}
    release: str | None = None
    total_bytes: int | None = None
    weights_bytes: int | None = None
    """Neuron: parameters and buffers; RDNA4: non-expert weights; vLLM: weights and non-torch."""
    weights_provenance: Provenance = Provenance.CONFIGURED
    # Neuron
    platform: str | None = None
    stack_bytes: int | None = None
    """Of a device; the static table where it is not given."""
    stack_provenance: Provenance = Provenance.MEASURED
    """Of ``stack_bytes``."""
    host_available_bytes: int | None = None
    local_workers: int = 1
    geometry: KvGeometry | None = None
    # RDNA4
    weights_hold_reserve: bool = False
    """``weights_bytes`` is non-expert weights and KV reserve together."""
    kv_reserve_bytes: int | None = None
    price: pool.KvPrice = pool.KvPrice()
    graphs: int | None = None
    charge: GraphCharge | None = None
    overhead: rdna4.OverheadMode | int = rdna4.OverheadMode.DEFAULT
    slot_bytes: int = rdna4.SLOT_BYTES
    free: FreeAtInit | None = None
    resident_floor_slots: int | None = None
    # vLLM
    activation_bytes: int | None = None
    graph_bytes: int | None = None
    model_config: Mapping[str, Any] | None = None
    block_tokens: int = 16


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One plan and what is to be said about it."""

    plan: Plan | None
    """``None`` where a refusal keeps the figures from being computed."""
    refusals: tuple[Refusal, ...]
    warnings: tuple[str, ...] = ()
    figures: dict[str, Any] = {}
    """What the policy computed beside the terms; sizes in ``*_bytes``."""
    notes: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        """Known not to boot."""
        return bool(self.refusals)

    def document(self) -> dict[str, Any]:
        """The answer for JSON."""
        head: dict[str, Any] = {} if self.plan is None else {"policy": self.plan.policy, "variant": self.plan.variant}
        body = {} if self.plan is None else {"left_bytes": self.plan.left_bytes, "fits": self.plan.fits}
        return {
            **head,
            **body,
            **self.figures,
            "refused": self.refused,
            "refusals": msgspec.to_builtins(self.refusals),
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "terms": [] if self.plan is None else msgspec.to_builtins(self.plan.terms),
        }


def answer(ask: Ask) -> Answer:
    """The plan of one shape.

    Raises:
        BudgetInputError: something that the policy needs is not given, or is impossible; the message names it.
    """
    return {"neuron": _neuron, "rdna4": _rdna4, "vllm": _vllm}[ask.policy](ask)


class _Wanted:
    """What a law needs: all that is missing is named at once, before anything is worked out."""

    def __init__(self) -> None:
        self._missing: list[str] = []

    def take(self, value: int | None, flag: str, why: str) -> int:
        """The value; where it is missing a placeholder that `check` lets nobody see."""
        if value is None:
            self.miss(flag, why)
        return value or 0

    def miss(self, flag: str, why: str) -> None:
        """Note that something is missing."""
        self._missing.append(f"{flag} is not given{why}")

    def check(self) -> None:
        """End here where something is missing.

        Raises:
            BudgetInputError: naming everything that is missing.
        """
        if self._missing:
            raise BudgetInputError("; ".join(self._missing))


def _neuron(ask: Ask) -> Answer:
    variant = neuron.Variant.SDK_2_33 if ask.release is None else neuron.variant_of(ask.release)
    environ = {**ask.environ, **ask.shape.env}
    knobs = neuron_env.read_knobs(environ, variant)
    if knobs.refusals:
        figures: dict[str, Any] = {"policy": "neuron", "variant": variant, "available_bytes": None}
        return Answer(plan=None, refusals=knobs.refusals, warnings=knobs.warnings, figures=figures)
    headroom_bytes = knobs.headroom_bytes if ask.shape.reserved_headroom is None else ask.shape.reserved_headroom
    budgets = _NeuronBudgets(ask, knobs, variant)
    current = budgets.at(ask.shape.gpu_memory_utilization, headroom_bytes)
    known = gate.Known(
        weights_bytes=ask.weights_bytes,
        weights_provenance=Provenance.CONFIGURED,
        stack_bytes=ask.stack_bytes,
        platform=budgets.platform or None,
    )
    shape = ask.shape.merged(reserved_headroom=headroom_bytes)
    refusals = gate.refusals("neuron", shape, known, environ=environ, variant=variant)
    if budgets.on_host and (refusal := neuron.minimum_refusal(current)):
        refusals = (refusal,)
    warnings = [*knobs.warnings, *current.plan.warnings, *gate.cautions("neuron", ask.shape)]
    if not budgets.on_host and (warning := neuron_env.lnc_warning(budgets.lnc, variant)):
        warnings.append(warning)
    figures = {
        "mode": current.mode,
        "available_bytes": current.available_bytes,
        "share_bytes": current.share_bytes,
        "total_budget_bytes": current.total_budget_bytes,
        "user_budget_bytes": current.user_budget_bytes,
        "cap_bytes": current.cap_bytes,
        "minimum_bytes": current.minimum_bytes,
        "maximum_headroom_bytes": current.maximum_headroom_bytes,
    }
    notes: list[str] = []
    if variant.has_headroom:
        figures["other_policy"] = _other_policy(budgets, current, ask.shape.gpu_memory_utilization, warnings, notes)
    if ask.geometry is not None:
        figures.update(_blocks(ask, budgets, current, headroom_bytes, notes))
    return Answer(plan=current.plan, refusals=refusals, warnings=tuple(warnings), figures=figures, notes=tuple(notes))


class _NeuronBudgets:
    """One target's budgets under different policies."""

    def __init__(self, ask: Ask, knobs: neuron_env.Knobs, variant: neuron.Variant) -> None:
        self.ask, self.knobs, self.variant = ask, knobs, variant
        self.on_host = ask.host_available_bytes is not None
        self.platform = ask.platform or knobs.platform or ""
        self.lnc = 0
        if self.on_host:
            return
        if knobs.cpu_mode:
            raise BudgetInputError(
                f"--host-available is not given, and {neuron_env.CPU_MODE_VARIABLE} plans host memory"
            )
        wanted = _Wanted()
        if not self.platform:
            wanted.miss("--platform", f", nor {neuron_env.PLATFORM_VARIABLE}: it sizes the HBM")
        self.weights_bytes = wanted.take(ask.weights_bytes, "--weights", ": parameters and buffers of one logical core")
        wanted.check()
        self.lnc = ask.shape.lnc or knobs.lnc or neuron.default_lnc(self.platform)
        self.cores = neuron.logical_cores_per_stack(self.platform, self.lnc)
        self.table_bytes = neuron.hbm_stack_bytes(self.platform)

    def at(
        self, utilization: float | None, headroom_bytes: int | None, *, stack_bytes: int | None = None
    ) -> neuron.Budget:
        """The budget under these settings, on the device's stack where it is known, else the table's."""
        if self.ask.host_available_bytes is not None:
            return neuron.cpu_kv_budget(
                host_available_bytes=self.ask.host_available_bytes,
                local_workers=self.ask.local_workers,
                utilization=utilization,
                headroom_bytes=headroom_bytes,
                cap_fraction=self.knobs.cap_fraction,
                minimum_bytes=self.knobs.minimum_bytes,
                variant=self.variant,
            )
        measured = stack_bytes is None and self.ask.stack_bytes is not None
        return neuron.compute_kv_budget(
            stack_bytes=stack_bytes or self.ask.stack_bytes or self.table_bytes,
            weights_bytes=self.weights_bytes,
            cores_per_stack=self.cores,
            utilization=utilization,
            headroom_bytes=headroom_bytes,
            cap_fraction=self.knobs.cap_fraction,
            minimum_bytes=self.knobs.minimum_bytes,
            variant=self.variant,
            stack_provenance=self.ask.stack_provenance if measured else Provenance.ASSUMED,
            weights_provenance=self.ask.weights_provenance,
        )


def _other_policy(
    budgets: _NeuronBudgets, current: neuron.Budget, utilization: float | None, warnings: list[str], notes: list[str]
) -> dict[str, Any]:
    """The policy that does not decide, beside the one that does; an upper bound where its own knob is not given."""
    if current.mode == "headroom":
        # without a utilization: the default policy gives at most what it gives at 1.0
        other = budgets.at(utilization or 1.0, None)
        bound = utilization is None
        if bound:
            notes.append("default policy: utilization not given, shown at 1.0, the most that it can give")
        if warning := neuron.switch_warning(current, other):
            warnings.append(warning)
    else:
        other, bound = budgets.at(None, 0), True
        even_bytes = current.share_bytes - _weights(current.plan) - current.available_bytes
        notes.append("headroom policy: no headroom given, shown at 0, the most that it can give")
        if warning := neuron.switch_warning(current, other):
            warnings.append(f"{warning}; headroom of {even_bytes} bytes gives what the default policy gives")
    return {
        "mode": other.mode,
        "available_bytes": other.available_bytes,
        "upper_bound": bound,
        "below_minimum": other.below_minimum,
    }


def _weights(plan: Plan) -> int:
    return sum(term.size_bytes for term in plan.terms if term.name == "model weights")


def _blocks(
    ask: Ask, budgets: _NeuronBudgets, current: neuron.Budget, headroom_bytes: int | None, notes: list[str]
) -> dict[str, Any]:
    geometry = ask.geometry or KvGeometry(layers=1, kv_heads=1, head_size=1)
    blocks = block_count(current.available_bytes, geometry)
    figures: dict[str, Any] = {"blocks": blocks, "kv_tokens": blocks * geometry.block_tokens}
    if ask.stack_bytes is not None:
        static = budgets.at(ask.shape.gpu_memory_utilization, headroom_bytes, stack_bytes=budgets.table_bytes)
        compared = parity(static, current, geometry)
        figures["parity"] = {**msgspec.to_builtins(compared), "equal": compared.equal}
        notes.append(compared.sentence)
    return figures


def _rdna4(ask: Ask) -> Answer:
    total_bytes = rdna4.R9700_TOTAL_BYTES if ask.total_bytes is None else ask.total_bytes
    wanted, utilization = _Wanted(), ask.shape.gpu_memory_utilization or 0.0
    if ask.shape.gpu_memory_utilization is None:
        wanted.miss("--utilization", ": read it from the deploy, its default differs by release")
    environ = {**ask.environ, **ask.shape.env}
    charge = charge_from(environ) if ask.charge is None else ask.charge
    if ask.graphs is None and charge.estimate_mib is None:
        wanted.miss("--graphs", ": the charge is base and per graph, and needs their number")
    reserve_bytes = ask.kv_reserve_bytes
    if reserve_bytes is None and not ask.weights_hold_reserve:
        why = ": the KV reserve is priced for one window"
        window = wanted.take(ask.shape.max_model_len, "--max-model-len", why)
        reserve_bytes = ask.price.reserve_bytes(window, ask.shape.max_num_seqs or 1)
    weights_bytes = wanted.take(ask.weights_bytes, "--weights", ": non-expert weights of one rank")
    wanted.check()
    graph_bytes = charge.charged_bytes(ask.graphs or 0)
    arena = rdna4.arena_plan(
        total_bytes=total_bytes,
        utilization=utilization,
        non_expert_bytes=weights_bytes,
        kv_reserve_bytes=reserve_bytes,
        graph_bytes=graph_bytes,
        overhead=rdna4.overhead_bytes(ask.overhead, ask.shape.max_num_batched_tokens or 0),
        slot_bytes=ask.slot_bytes,
        graphs_how=charge.how,
        weights_provenance=ask.weights_provenance,
    )
    known = gate.Known(
        total_bytes=total_bytes, free=ask.free, arena=arena, resident_floor_slots=ask.resident_floor_slots
    )
    warnings = list(gate.cautions("rdna4", ask.shape, environ=environ))
    figures: dict[str, Any] = {
        "available_bytes": max(0, arena.plan.left_bytes),
        "slots": arena.slots,
        "arena_bytes": arena.arena_bytes,
        "utilization": utilization,
        "graph_bytes": graph_bytes,
    }
    notes = []
    if ask.free is not None:
        figures["largest_utilization"] = largest_utilization(ask.free)
        figures["slack_bytes"] = ask.free.slack_bytes(utilization)
        notes.append(ask.free.describe(utilization))
    pinned_bytes = ask.shape.kv_cache_memory_bytes
    if pinned_bytes is not None and not ask.weights_hold_reserve:
        taken = footprint(
            total_bytes=total_bytes,
            weights_bytes=weights_bytes,
            pool_bytes=pinned_bytes,
            graph_bytes=graph_bytes,
            arena_bytes=arena.arena_bytes,
        )
        figures["footprint"] = taken.document()
        notes.append(f"footprint with the pinned pool, which is no term of the plan: {taken.sentence}")
        warnings += taken.warnings
    return Answer(
        plan=arena.plan,
        refusals=gate.refusals("rdna4", ask.shape, known, environ=environ),
        warnings=tuple(warnings),
        figures=figures,
        notes=tuple(notes),
    )


_GIVEN_BY: Final = {"peak activation": "--activation", "CUDA graphs": "--graph-estimate"}


def _vllm_graphs(ask: Ask) -> int | None:
    """What graphs take beside the peak: nothing without graphs, and where the printed peak has them in it."""
    if ask.graph_bytes is None and (
        ask.shape.enforce_eager
        or (ask.activation_bytes is not None and ask.release is not None and vllm.peak_has_graphs(ask.release))
    ):
        return 0
    return ask.graph_bytes


def _vllm(ask: Ask) -> Answer:
    shape, notes = ask.shape, []
    utilization = shape.gpu_memory_utilization
    if utilization is None and ask.release is not None:
        utilization = vllm.default_utilization(ask.release)
        notes.append(f"utilization {utilization}: the default of vLLM {ask.release}")
    wanted, pinned = _Wanted(), shape.kv_cache_memory_bytes is not None
    if utilization is None and not pinned:
        wanted.miss("--utilization", ", and its default is 0.9 or 0.92 by release; give --release")
    total_bytes = 0 if pinned else wanted.take(ask.total_bytes, "--total", ": the device's memory")
    weights_bytes = 0 if pinned else wanted.take(ask.weights_bytes, "--weights", ": weights and non-torch of one rank")
    window = 0
    if ask.model_config is not None:
        why = ": the KV need is priced for one window"
        window = wanted.take(shape.max_model_len, "--max-model-len", why)
    wanted.check()
    plan = vllm.kv_plan(
        total_bytes=total_bytes,
        utilization=1.0 if utilization is None else utilization,
        consumed_bytes=weights_bytes,
        peak_activation_bytes=ask.activation_bytes,
        graph_bytes=_vllm_graphs(ask),
        kv_cache_memory_bytes=shape.kv_cache_memory_bytes,
        provenance=ask.weights_provenance,
    )
    figures: dict[str, Any] = {"available_bytes": max(0, plan.left_bytes), "utilization": utilization}
    if plan.unknown:
        figures["upper_bound"] = True
        given = ", ".join(f"{name} ({_GIVEN_BY[name]})" for name in plan.unknown)
        notes.append(f"not given, and so not taken off: {given}; what is left is at most this")
    if ask.model_config is not None:
        need = kv_need(
            ask.model_config,
            max_model_len=window,
            tensor_parallel_size=shape.tensor_parallel_size or 1,
            kv_cache_dtype=shape.kv_cache_dtype or "auto",
            block_tokens=ask.block_tokens,
            max_num_batched_tokens=shape.max_num_batched_tokens,
        )
        blocks = max(0, plan.left_bytes) // (need.page_bytes * need.layers_per_group)
        times = vllm.concurrency(blocks, need.blocks_per_request)
        figures.update(need_bytes=need.need_bytes, max_concurrency=times, kv_tokens=vllm.printed_tokens(times, window))
        most = "at most " if plan.unknown else ""
        verb = "does not fit" if need.need_bytes > plan.left_bytes else "may fit" if plan.unknown else "fits"
        notes.append(f"one window of {window:,} tokens needs {need.need_bytes:,} bytes and {verb}: {most}{times:.2f}x")
    known = gate.Known(total_bytes=ask.total_bytes, free=ask.free)
    return Answer(
        plan=plan,
        refusals=gate.refusals("vllm", shape, known, environ=ask.environ),
        warnings=plan.warnings,
        figures=figures,
        notes=tuple(notes),
    )
