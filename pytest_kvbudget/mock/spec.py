"""The physics of a simulated device, as ``[target.NAME.mock]`` gives it. Data only."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec.structs import force_setattr

from pytest_kvbudget.shape import SizeBytes
from pytest_kvbudget.units import GIB, MIB

Seconds = Annotated[float, msgspec.Meta(ge=0)]
Chunking = (
    bool | Annotated[int, msgspec.Meta(ge=1)] | Annotated[str, msgspec.Meta(pattern=r"^((on|off)( above \d+)?)$")]
)
"""``on``, ``off``, or ``off above N``, which a bare N means too: chunked prefill by the window's length."""
Estimate = (
    Annotated[float, msgspec.Meta(gt=0)]
    | Annotated[str, msgspec.Meta(pattern=r"^(exact|absent|proportional|huge|negative|alternating|factor \d*\.?\d+)$")]
)
"""How true the engine's own estimate of the longest window is; a bare F is ``factor F``."""

BootPhase = Literal[
    "imports",
    "worker_init",
    "weights_load",
    "compile",
    "profile",
    "kv_alloc",
    "model_load",
    "graph_capture",
    "warmup",
]
"""Phases of a boot. A Neuron boot compiles after the KV cache is there, then loads; it captures nothing."""

FaultPhase = Literal[BootPhase, "request"]


class ColdSeconds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """How long phases take where nothing is in the compile cache, in seconds; ``None`` is as long as otherwise."""

    worker_init: Seconds | None = None
    weights_load: Seconds | None = None
    compile: Seconds | None = None
    profile: Seconds | None = None
    kv_alloc: Seconds | None = None
    model_load: Seconds | None = None
    graph_capture: Seconds | None = None
    warmup: Seconds | None = None


class PhaseSeconds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """How long each phase of a boot takes, in seconds."""

    imports: Seconds = 0.0
    worker_init: Seconds = 0.0
    weights_load: Seconds = 0.0
    compile: Seconds = 0.0
    profile: Seconds = 0.0
    kv_alloc: Seconds = 0.0
    model_load: Seconds = 0.0
    graph_capture: Seconds = 0.0
    warmup: Seconds = 0.0
    cold: ColdSeconds = ColdSeconds()
    """The same on the first boot of a compile key."""
    shutdown: Seconds = 0.0
    """Between SIGTERM and the end of an idle engine."""
    linger: Seconds = 1.0
    """How long the server of a dead engine core answers 503 before it leaves (5 s at most in vLLM)."""
    per_token: Seconds = 0.0
    """Generating one token."""


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Misbehaviour to ask for."""

    hang_in: FaultPhase | None = None
    """Stop making progress in this phase, for ever."""
    die_in: FaultPhase | None = None
    """Every process of the engine is gone in this phase, without a word (exit status 1)."""
    exit_zero_in: FaultPhase | None = None
    """The engine core dies in this phase; the server leaves a little later with status 0."""
    error_in: FaultPhase | None = None
    """A fault that has nothing to do with memory, in this phase, with a traceback."""
    ignore_sigterm: bool = False
    leave_orphan: bool = False
    """A worker leaves a process of its own session behind, which keeps the device's memory."""
    garbage_in: FaultPhase | None = None
    """Print bytes that are no text, half lines and a line of a megabyte in this phase, and go on."""
    request_hang: bool = False
    """Accept completions and never answer."""


class Arena(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Expert offload of the RDNA4 fork: what is left of the budget becomes device-resident expert slots.

    Terms and defaults: sections 1 to 3 of the RDNA4 budget document. ``weights`` are then the non-expert ones.
    """

    slot_bytes: Annotated[int, msgspec.Meta(ge=1)] = 2_457_600
    """Bytes of one expert (2.34375 MiB, an fp8 expert of that document's model at TP=2)."""
    slots_min: Annotated[int, msgspec.Meta(ge=0)] = 1_584
    """Slots below which the planner refuses."""
    registry_bytes_per_token: Annotated[int, msgspec.Meta(ge=1)] = 9_190
    reserve_factor: Annotated[float, msgspec.Meta(ge=1)] = 1.08
    """Planned over exact KV of one window."""
    overhead_planned: SizeBytes = int(5.25 * GIB)
    """Runtime overhead in the plan with ``--expert-precise-memory``; 2.35 GiB more without."""
    overhead_real: SizeBytes | None = None
    """Runtime overhead that the engine has, activation included; default: ``non_torch`` and activation."""
    pool_capped: bool = True
    """The KV pool is capped at the plan's reserve unless its bytes are pinned."""
    charged_by_rule: bool = False
    """Graphs are charged as the fork does by itself, 256 MiB and 52 MiB each, not as they are."""
    host_bytes: SizeBytes | None = None
    """MemAvailable of the host; ``None`` is enough for everything, and says nothing about the host."""
    experts: Annotated[int, msgspec.Meta(ge=1)] = 24_624
    """Experts of one rank (48 layers of 512 and a shared one); what is not in the arena stays on the host."""
    ple_bytes: SizeBytes = 0
    """Per-layer embeddings that are locked in host memory; 0 where the model has none."""
    memlock_bytes: SizeBytes | None = None
    """Limit of locked memory (``LimitMEMLOCK``); ``None`` is none."""


class Compile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Compiled programs on a NeuronCore. Sizes are bytes per rank."""

    limit: SizeBytes | None = None
    """HBM that the compiler grants one program: weights, KV cache and scratchpad; default: the HBM stack."""
    scratch_base: SizeBytes = 256 * MIB
    scratch_per_token: SizeBytes = 0
    """The largest scratchpad is ``scratch_base`` and this for each token of the window; programs share it."""
    per_bucket: SizeBytes = 4 * MIB
    """Code of one compiled bucket."""
    load_extra: SizeBytes = 0
    """Rings and collectives, taken once all programs are loaded."""
    allocatable: SizeBytes | None = None
    """What the runtime can give out of one HBM stack; default: all of it."""
    min_kv: SizeBytes = GIB
    """Smallest KV budget that the worker accepts where ``VLLM_NEURON_MIN_KV_BUDGET_GIB`` is not set."""
    prints_numbers: bool = True
    """Compiler and runtime say how much was asked for and how much there is."""


class MockDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The simulated device and what the simulated engine allocates on it. Bytes are per rank unless said otherwise."""

    dialect: Literal["vllm", "rdna4", "neuron"] = "vllm"
    platform: Literal["trn1", "trn2", "trn3", "inf2"] = "trn2"
    """Neuron device that is simulated."""
    release: Literal["0.21", "0.24", "2.33"] = "2.33"
    """Of vLLM Neuron: two plugin releases, and what the documentation of SDK 2.33 says of a later one."""
    device_total: SizeBytes = 0
    """Bytes of one card, or of one HBM stack; 0 is a Radeon AI PRO R9700, or the platform's stack."""
    free_at_start: SizeBytes | None = None
    """Bytes that a process sees free before it allocates anything; default: total less the driver's 0.57 GiB, on
    Neuron all of it."""
    device_skew: SizeBytes = 0
    """So many bytes less are free on card 1 than on card 0, twice as many on card 2, and so on."""
    rank_skew: SizeBytes = 0
    """So many bytes outside torch more has rank 1 than rank 0, twice as many rank 2, and so on."""
    ranks: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    weights: SizeBytes = 16 * GIB
    non_torch: SizeBytes = int(1.45 * GIB)
    activation_base: SizeBytes = 512 * MIB
    activation_per_batched_token: SizeBytes = 128 * 1024
    """Peak of one step is ``activation_base`` and this for each of ``max_num_batched_tokens``; given back after
    profiling, taken again and kept from graph capture on."""
    activation_per_window_token: SizeBytes = 0
    """Of the same peak, for each token of ``max_model_len``."""
    chunked_prefill: Chunking = "on"
    """Where it is off, a step has as many batched tokens as the window."""
    graph_base: SizeBytes = 64 * MIB
    graph_per_size: SizeBytes = 12 * MIB
    """Bytes that capturing one graph size takes; the sizes are vLLM's, from ``max_num_seqs``."""
    graph_estimate: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """Estimate over real capture, where nothing else says what graphs are charged; 0: they are not charged."""
    kv_bytes_per_token: Annotated[int, msgspec.Meta(ge=1)] = 32 * 1024
    state_bytes_per_seq: SizeBytes = 0
    """Fixed state of one sequence in a hybrid model. As in vLLM, blocks then grow until one holds a state, every
    sequence takes one block for it, and capture needs as many blocks as ``max_num_seqs``."""
    block_size: Annotated[int, msgspec.Meta(ge=1)] = 16
    """Tokens of one KV block; grows in hybrid models."""
    kv_page_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Tokens of one KV block whatever the state takes, which then is as many blocks as it needs; 0: as vLLM does it."""
    kv_window_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Sliding window of every layer: beyond it and one step's tokens a request takes no more KV; 0: none."""
    fragmentation: SizeBytes = 0
    """Bytes lost to the allocator before graph capture, seen by no estimate."""
    request_peak_base: SizeBytes = 0
    """Bytes a first real request takes beyond anything that warm-up took."""
    request_peak_per_token: SizeBytes = 0
    """The same, per token of prompt and asked-for answer."""
    native_max_model_len: Annotated[int, msgspec.Meta(ge=1)] = 262_144
    arena: Arena | None = None
    compile: Compile | None = None
    """Of dialect ``neuron``; default: all defaults."""
    noise_boot: SizeBytes = 0
    """One sigma of what boots of one shape differ by, from ``seed``, shape and the shape's attempt number."""
    noise_shape: SizeBytes = 0
    """One sigma of what shapes differ by beyond all arithmetic, from ``seed`` and shape: the same on every boot."""
    cold_extra: SizeBytes = 0
    """What the first boot of a compile key takes more."""
    estimate: Estimate = "exact"
    """What becomes of the longest window that the engine says would fit: nothing, scaled by the memory that is there
    (``proportional``), wrong by a factor, absurd, or two times and half of it in turns."""
    seconds: PhaseSeconds = PhaseSeconds()
    seed: int = 0
    """Of noise, and of the bytes that ``garbage_in`` prints."""
    faults: Faults = Faults()
    sysfs: str | None = None
    """Folder of the simulated device tree; default: one per configuration file and device in the temporary folder."""

    def __post_init__(self) -> None:
        if self.compile is not None and self.dialect != "neuron":
            raise ValueError(f"compile is of dialect 'neuron', not {self.dialect!r}")
        if not self.device_total:
            total_bytes = STACK_BYTES[self.platform] if self.dialect == "neuron" else R9700_BYTES
            force_setattr(self, "device_total", total_bytes)

    @property
    def engine_version(self) -> str:
        """What the engine calls itself. Of SDK 2.33 no version is public: it is one after the plugin 0.24."""
        if self.dialect != "neuron":
            return "0.32.0"
        return {"0.21": "0.21.0", "0.24": "0.24.0", "2.33": "0.27.1"}[self.release]

    @property
    def keeps_cache(self) -> bool:
        """A cold compile cache is told from a warm one."""
        return self.dialect == "neuron" or bool(self.cold_extra) or self.seconds.cold != ColdSeconds()

    @property
    def idle_bytes(self) -> int:
        """Bytes in use on an idle card: the driver's own."""
        if self.free_at_start is None:
            return 0 if self.dialect == "neuron" else DRIVER_RESERVE_BYTES
        return max(0, self.device_total - self.free_at_start)


R9700_BYTES = 34_208_743_424
STACK_BYTES = {"trn1": 16 * GIB, "trn2": 24 * GIB, "trn3": 36 * GIB, "inf2": 16 * GIB}
"""One HBM stack by platform: the static table that the facts quote from the compiler's package."""
DRIVER_RESERVE_BYTES = int(0.57 * GIB)
"""What the RDNA4 budget document measured on an idle R9700."""
