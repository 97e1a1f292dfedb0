"""What a target's configuration and its earlier boots say of the next one: its plan, and what its gate may know.

Figures of an earlier boot count only where they do not depend on what was changed since.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from pytest_kvbudget.budget.answers import Answer, Ask, answer
from pytest_kvbudget.budget.footprint import footprint
from pytest_kvbudget.budget.gate import Known, Policy, flag_value, has_flag
from pytest_kvbudget.budget.graphs import charge_from
from pytest_kvbudget.budget.model import BudgetInputError, Plan
from pytest_kvbudget.budget.neuron import Variant, variant_of
from pytest_kvbudget.budget.pool import REGISTRY_BYTES_PER_TOKEN, KvPrice
from pytest_kvbudget.budget.rdna4 import PRECISE_FLAG, SLOT_BYTES, OverheadMode
from pytest_kvbudget.budget.utilization import FreeAtInit
from pytest_kvbudget.budget.vllm import peak_has_graphs
from pytest_kvbudget.config import LoadedTarget
from pytest_kvbudget.ledger.model import BootLedger
from pytest_kvbudget.mock.spec import MockDevice
from pytest_kvbudget.observed import count_of, figure_of, free_at_init, number_of
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import MIB
from pytest_kvbudget.verdict import Provenance

_CHANGES_WEIGHTS: Final = ("--quantization", "-q", "--load-format", "--hf-overrides", "--dtype", "--cpu-offload-gb")
"""Flags with which the bytes of a checkpoint are not the bytes on the cards."""


SIMULATED_STEP_TOKENS: Final = 2048
"""``max_num_batched_tokens`` of the simulated engine where nobody sets it, as of vLLM 0.32."""


UNDISTURBED: Final = 0.95
"""Least share of a card that a worker finds free beside the driver alone: 0.980 and 0.982 on R9700 hosts."""


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """What one boot stated. Sizes are bytes per rank; ``None`` is not stated."""

    shape: Shape
    """What was booted."""
    devices: tuple[str, ...] = ()
    """On which devices; empty where there is no telling."""
    simulated: bool = False
    engine_version: str | None = None
    total_bytes: int | None = None
    free: FreeAtInit | None = None
    weights_bytes: int | None = None
    weights_precision_bytes: int = 0
    consumed_bytes: int | None = None
    """Weights and what is outside torch."""
    activation_bytes: int | None = None
    """Peak of one step; from 0.27 on with the graphs that were estimated."""
    graph_bytes: int | None = None
    non_expert_bytes: int | None = None
    reserve_bytes: int | None = None
    registry_bytes_per_token: float | None = None
    graph_row_bytes: int | None = None


class Experience:
    """What this run's boots of one target stated, the last of each kind. Any thread may tell or ask: it only grows."""

    def __init__(self) -> None:
        self._learned: list[Learned] = []

    def tell(self, shape: Shape, ledger: BootLedger, devices: tuple[str, ...] = ()) -> None:
        """A boot of ``shape`` has said what it says, on these devices; whether it served does not matter."""
        self._learned.append(msgspec.structs.replace(learn(shape, ledger), devices=devices))

    def on(self, devices: tuple[str, ...]) -> Experience:
        """What counts for a boot on these devices: what another card had free says nothing of this one."""
        there = Experience()
        there._learned = [
            learned if learned.devices in {(), devices} else msgspec.structs.replace(learned, free=None)
            for learned in self._learned
        ]
        return there

    def last(self, shape: Shape, fields: Sequence[str], stating: str) -> Learned | None:
        """The last boot whose ``fields`` of the shape were these and that stated a figure; ``None`` where none did.

        Args:
            shape: the next one.
            fields: of the shape, that the figure depends on.
            stating: the figure, a field of `Learned`.
        """
        for learned in reversed(self._learned):
            same = all(getattr(learned.shape, field) == getattr(shape, field) for field in fields)
            if same and getattr(learned, stating) is not None:
                return learned
        return None

    def free(self) -> FreeAtInit | None:
        """The most that any worker found free at init: a boot that was disturbed found less than there is.

        ``None`` also where something may have held more than a driver keeps: the next boot may find more.
        """
        found = [
            learned.free
            for learned in self._learned
            if learned.free is not None and learned.free.free_bytes >= UNDISTURBED * learned.free.total_bytes
        ]
        return max(found, key=lambda free: free.free_bytes, default=None)


_WEIGHTS_FIELDS: Final = ("model", "tensor_parallel_size", "lnc", "extra_args")
_STEP_FIELDS: Final = (*_WEIGHTS_FIELDS, "max_num_batched_tokens", "max_num_seqs", "enforce_eager", "env")


def learn(shape: Shape, ledger: BootLedger) -> Learned:
    """The figures of one boot that the next plan can use."""
    weights = figure_of(ledger, "weights_bytes")
    if weights is None and ledger.family != "neuron":
        weights = figure_of(ledger, "model_load_bytes")
    non_torch, consumed = count_of(ledger, "non_torch_bytes"), count_of(ledger, "consumed_bytes")
    if consumed is None and weights is not None and non_torch is not None:
        consumed = weights.size_bytes + non_torch
    return Learned(
        shape=shape,
        simulated=any(value.provenance is Provenance.SIMULATED for value in ledger.facts.values()),
        engine_version=ledger.engine_version,
        total_bytes=count_of(ledger, "total_bytes"),
        free=free_at_init(ledger),
        weights_bytes=None if weights is None else weights.size_bytes,
        weights_precision_bytes=0 if weights is None else int(weights.precision_bytes) + 1,
        consumed_bytes=consumed,
        activation_bytes=count_of(ledger, "peak_activation_bytes"),
        graph_bytes=count_of(ledger, "graph_estimated_bytes"),
        non_expert_bytes=count_of(ledger, "plan_non_expert_bytes"),
        reserve_bytes=count_of(ledger, "plan_kv_reserve_bytes"),
        registry_bytes_per_token=number_of(ledger, "plan_kv_b_per_token")
        or number_of(ledger, "plan_registry_b_per_token"),
        graph_row_bytes=count_of(ledger, "plan_graphs_bytes"),
    )


def policy_of(loaded: LoadedTarget) -> Policy:
    """Whose law a target's engine follows.

    Raises:
        BudgetInputError: nobody's that is known.
    """
    name, mock = loaded.target.backend, loaded.target.mock
    if name == "mock":
        # without an arena nothing is offloaded, and what utilization leaves is the KV cache's
        spec = mock or MockDevice()
        name = "vllm" if spec.dialect == "rdna4" and spec.arena is None else spec.dialect
    policies: dict[str, Policy] = {"neuron": "neuron", "rdna4": "rdna4", "vllm": "vllm"}
    if name not in policies:
        raise BudgetInputError(f"{loaded.origin}: backend {name!r} has no budget policy; give --policy")
    return policies[name]


def plan_for(loaded: LoadedTarget, shape: Shape, experience: Experience | None = None) -> Plan | None:
    """What a boot of this shape is expected to be given; ``None`` where something that its law needs is not known.

    A simulated target's own table is known before its first boot, of a real device only what an earlier boot of this
    run stated.

    Args:
        loaded: the target.
        shape: what will be booted.
        experience: earlier boots of the target.
    """
    found = answer_for(loaded, shape, experience)
    return None if found is None else found.plan


def answer_for(loaded: LoadedTarget, shape: Shape, experience: Experience | None = None) -> Answer | None:
    """As `plan_for`, with what is to be said about the plan."""
    try:
        ask = ask_for(loaded, shape, experience)
        if ask.policy == "vllm" and ask.activation_bytes is None and shape.kv_cache_memory_bytes is None:
            return None  # the peak of a step is known only from a boot of the same step
        return answer(ask)
    except BudgetInputError:
        return None


def ask_for(loaded: LoadedTarget, shape: Shape, experience: Experience | None = None) -> Ask:
    """Everything that a target's configuration and its earlier boots say for the plan of a shape.

    Raises:
        BudgetInputError: the target's engine has no law, or a variable cannot be read.
    """
    make = {"neuron": _neuron_ask, "rdna4": _rdna4_ask, "vllm": _vllm_ask}[policy_of(loaded)]
    return make(loaded, shape, experience or Experience())


def known_for(loaded: LoadedTarget, shape: Shape, experience: Experience | None = None) -> Known:
    """What the argument gate may know before a boot of this shape.

    Printed figures are taken at the end of their precision that speaks for the shape.
    """
    experience = experience or Experience()
    weights_bytes, provenance = None, Provenance.MEASURED
    boot = experience.last(shape, _WEIGHTS_FIELDS, "weights_bytes")
    if boot is not None and boot.weights_bytes is not None:
        weights_bytes = max(0, boot.weights_bytes - boot.weights_precision_bytes)
        provenance = Provenance.SIMULATED if boot.simulated else provenance
    on_card = experience.last(shape, (), "total_bytes")
    return Known(
        total_bytes=None if on_card is None else on_card.total_bytes,
        free=experience.free(),
        weights_bytes=weights_bytes,
        weights_provenance=provenance,
        platform=_platform(loaded, shape),
        **_checkpoint(shape),
    )


def variant_for(loaded: LoadedTarget, shape: Shape, experience: Experience | None = None) -> Variant:
    """The Neuron release whose law applies: as an earlier boot or a simulated device says.

    Where nothing says it, SDK 2.33: no earlier release reads a headroom.
    """
    boot = None if experience is None else experience.last(shape, (), "engine_version")
    if loaded.target.mock is not None:
        return variant_of(loaded.target.mock.release)
    if boot is not None and boot.engine_version is not None:
        try:
            return variant_of(boot.engine_version)
        except BudgetInputError:
            pass
    return Variant.SDK_2_33


def _platform(loaded: LoadedTarget, shape: Shape) -> str | None:
    mock = loaded.target.mock
    if mock is not None:
        return mock.platform
    if loaded.target.backend != "neuron":
        return None
    from pytest_kvbudget.engine.backends.neuron import platform_of  # noqa: PLC0415 - only for this backend

    return platform_of(loaded, shape)


def simulated_figures(loaded: LoadedTarget, shape: Shape) -> dict[str, int]:
    """What a simulated target's own table says of one rank: ``total_bytes``, ``weights_bytes``.

    Without an arena, ``weights_bytes`` has what is outside torch; empty for a real target.
    """
    mock = loaded.target.mock
    if mock is None:
        return {}
    ranks = shape.tensor_parallel_size or mock.ranks
    outside_bytes = 0 if mock.arena is not None or mock.dialect == "neuron" else mock.non_torch
    return {"total_bytes": mock.device_total, "weights_bytes": -(-mock.weights * mock.ranks // ranks) + outside_bytes}


def _neuron_ask(loaded: LoadedTarget, shape: Shape, experience: Experience) -> Ask:
    figures = simulated_figures(loaded, shape)
    boot = experience.last(shape, _WEIGHTS_FIELDS, "weights_bytes")
    return Ask(
        policy="neuron",
        shape=shape,
        environ=loaded.environment,
        release=variant_for(loaded, shape, experience),
        platform=_platform(loaded, shape),
        stack_bytes=figures.get("total_bytes"),
        stack_provenance=Provenance.CONFIGURED,
        weights_bytes=figures.get("weights_bytes", None if boot is None else boot.weights_bytes),
        weights_provenance=_provenance(figures, boot),
    )


def _rdna4_ask(loaded: LoadedTarget, shape: Shape, experience: Experience) -> Ask:
    arguments = (*(loaded.target.command or ()), *shape.extra_args)
    mock, arena = loaded.target.mock, None if loaded.target.mock is None else loaded.target.mock.arena
    boot = experience.last(shape, _WEIGHTS_FIELDS, "non_expert_bytes")
    captured = experience.last(shape, _STEP_FIELDS, "graph_row_bytes")
    graphs = None if captured is None else _graphs(captured, loaded.environment)
    if shape.enforce_eager:
        graphs = 0
    overhead: OverheadMode | int = OverheadMode.PRECISE if has_flag(arguments, PRECISE_FLAG) else OverheadMode.DEFAULT
    price = KvPrice() if boot is None else _price(boot)
    if mock is not None and arena is not None:
        missing_bytes = OverheadMode.DEFAULT.base_bytes - OverheadMode.PRECISE.base_bytes
        overhead = arena.overhead_planned + (0 if overhead is OverheadMode.PRECISE else missing_bytes)
        price = KvPrice(bytes_per_token=arena.registry_bytes_per_token, factor=arena.reserve_factor)
    figures = simulated_figures(loaded, shape)
    total_bytes = figures.get("total_bytes", None if boot is None else boot.total_bytes)
    return Ask(
        policy="rdna4",
        shape=shape,
        environ=loaded.environment,
        # an unknown card is the law's own: its documents are about one
        total_bytes=total_bytes,
        weights_bytes=figures.get("weights_bytes", None if boot is None else boot.non_expert_bytes),
        # the planner's own census, whatever boot printed it
        weights_provenance=Provenance.CONFIGURED if figures else Provenance.ASSUMED,
        price=price,
        graphs=graphs,
        overhead=overhead,
        slot_bytes=SLOT_BYTES if arena is None else arena.slot_bytes,
        free=experience.free(),
    )


def _provenance(figures: Mapping[str, int], boot: Learned | None) -> Provenance:
    """Where the weights of a plan come from: a simulated target's table, or an earlier boot."""
    if figures or boot is None:
        return Provenance.CONFIGURED
    return Provenance.SIMULATED if boot.simulated else Provenance.MEASURED


def _graphs(boot: Learned, environ: Mapping[str, str]) -> int | None:
    """How many graphs a boot captured, from what its plan charged for them; ``None`` where that does not tell."""
    charge = charge_from({**environ, **boot.shape.env})
    if boot.graph_row_bytes is None or charge.estimate_mib is not None or charge.per_graph_mib <= 0:
        return None
    return max(0, round((boot.graph_row_bytes / MIB - charge.base_mib) / charge.per_graph_mib))


def _price(boot: Learned) -> KvPrice:
    """How the registry priced an earlier window; what its reserve has beyond that are state pages."""
    rate = boot.registry_bytes_per_token or REGISTRY_BYTES_PER_TOKEN
    bare = KvPrice(bytes_per_token=rate)
    window, seqs = boot.shape.max_model_len, boot.shape.max_num_seqs or 1
    if boot.reserve_bytes is None or window is None:
        return bare
    pages_bytes = max(0, boot.reserve_bytes - bare.reserve_bytes(window)) // seqs
    return KvPrice(bytes_per_token=rate, pages_bytes_per_seq=pages_bytes)


def _vllm_ask(loaded: LoadedTarget, shape: Shape, experience: Experience) -> Ask:
    boot = experience.last(shape, _STEP_FIELDS, "activation_bytes")
    activation_bytes = None if boot is None else boot.activation_bytes
    mock = loaded.target.mock
    graph_bytes = None if boot is None and mock is None else 0
    if boot is not None and not _counted(boot):
        graph_bytes = boot.graph_bytes or 0
    figures = simulated_figures(loaded, shape)
    if mock is not None and activation_bytes is None:
        activation_bytes = mock.activation_base
        activation_bytes += mock.activation_per_batched_token * (shape.max_num_batched_tokens or SIMULATED_STEP_TOKENS)
        activation_bytes += mock.activation_per_window_token * (shape.max_model_len or 0)
    return Ask(
        policy="vllm",
        shape=shape,
        environ=loaded.environment,
        release=None if boot is None else boot.engine_version,
        total_bytes=figures.get("total_bytes", None if boot is None else boot.total_bytes),
        weights_bytes=figures.get("weights_bytes", None if boot is None else boot.consumed_bytes),
        weights_provenance=_provenance(figures, boot),
        activation_bytes=activation_bytes,
        graph_bytes=graph_bytes,
        free=experience.free(),
    )


def _counted(boot: Learned) -> bool:
    """The graphs of a boot are part of the peak that it printed; where no version tells, they are taken as apart."""
    try:
        return boot.engine_version is not None and peak_has_graphs(boot.engine_version)
    except BudgetInputError:
        return False


def footprint_of(ledger: BootLedger, total_bytes: int | None = None) -> Plan | None:
    """What a boot of an expert plan is expected to take of its card, from its own lines; ``None`` where one is missing.

    Args:
        ledger: of the boot: non-expert weights, KV pool, graphs, expert cache.
        total_bytes: of the card; default: as the boot states it.
    """
    total = total_bytes or count_of(ledger, "total_bytes")
    weights, arena = count_of(ledger, "plan_non_expert_bytes"), count_of(ledger, "plan_expert_cache_bytes")
    pool = count_of(ledger, "kv_cache_memory_bytes") or count_of(ledger, "available_kv_bytes")
    graphs = count_of(ledger, "graph_capture_bytes")
    if graphs is None:
        graphs = count_of(ledger, "plan_graphs_bytes")
    if total is None or weights is None or arena is None or pool is None or graphs is None:
        return None
    return footprint(
        total_bytes=total, weights_bytes=weights, pool_bytes=pool, graph_bytes=max(0, graphs), arena_bytes=arena
    )


def _checkpoint(shape: Shape) -> dict[str, Any]:
    """KV heads and size of a checkpoint that is a folder here; empty for a name in a registry."""
    folder = Path(shape.model or "")
    if shape.model is None or not (folder / "config.json").is_file():
        return {}
    found: dict[str, Any] = {}
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config", config)
        heads = text.get("num_key_value_heads", text.get("num_attention_heads"))
        if isinstance(heads, int):
            found = {"kv_heads": heads, "latent_attention": "kv_lora_rank" in text}
        sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    except (OSError, ValueError, AttributeError):
        return {}
    changed = any(flag_value(shape.extra_args, flag) is not None for flag in _CHANGES_WEIGHTS)
    if sizes and not changed:
        found["full_copy_bytes"] = sum(sizes)
    return found
