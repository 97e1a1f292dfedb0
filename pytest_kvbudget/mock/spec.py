"""The physics of a simulated device, as ``[target.NAME.mock]`` gives it. Data only."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from pytest_kvbudget.shape import SizeBytes
from pytest_kvbudget.units import GIB, MIB

Seconds = Annotated[float, msgspec.Meta(ge=0)]

BootPhase = Literal[
    "imports",
    "worker_init",
    "weights_load",
    "compile",
    "profile",
    "kv_alloc",
    "graph_capture",
    "warmup",
]
"""Phases of a boot in the order in which they run."""

FaultPhase = Literal[BootPhase, "request"]


class PhaseSeconds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long each phase of a boot takes, in seconds."""

    imports: Seconds = 0.0
    worker_init: Seconds = 0.0
    weights_load: Seconds = 0.0
    compile: Seconds = 0.0
    profile: Seconds = 0.0
    kv_alloc: Seconds = 0.0
    graph_capture: Seconds = 0.0
    warmup: Seconds = 0.0
    shutdown: Seconds = 0.0
    """Between SIGTERM and the end of an idle engine."""
    linger: Seconds = 1.0
    """How long the server of a dead engine core answers 503 before it leaves (5 s at most in vLLM)."""
    per_token: Seconds = 0.0
    """Generating one token."""


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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


class Arena(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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
    pool_capped: bool = True
    """The KV pool is capped at the plan's reserve unless its bytes are pinned."""


class MockDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The simulated device and what the simulated engine allocates on it. Bytes are per rank unless said otherwise."""

    dialect: Literal["vllm", "rdna4"] = "vllm"
    device_total: SizeBytes = 34_208_743_424
    """Bytes of one card; the default is a Radeon AI PRO R9700."""
    free_at_start: SizeBytes | None = None
    """Bytes that a process sees free before it allocates anything; default: total less the driver's 0.57 GiB."""
    ranks: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    weights: SizeBytes = 16 * GIB
    non_torch: SizeBytes = int(1.45 * GIB)
    activation_base: SizeBytes = 512 * MIB
    activation_per_batched_token: SizeBytes = 128 * 1024
    """Peak of one step is ``activation_base`` and this for each of ``max_num_batched_tokens``; given back after
    profiling, taken again and kept from graph capture on."""
    graph_base: SizeBytes = 64 * MIB
    graph_per_size: SizeBytes = 12 * MIB
    """Bytes that capturing one graph size takes; the sizes are vLLM's, from ``max_num_seqs``."""
    kv_bytes_per_token: Annotated[int, msgspec.Meta(ge=1)] = 32 * 1024
    state_bytes_per_seq: SizeBytes = 0
    """Fixed state of one sequence in a hybrid model. As in vLLM, blocks then grow until one holds a state, every
    sequence takes one block for it, and capture needs as many blocks as ``max_num_seqs``."""
    block_size: Annotated[int, msgspec.Meta(ge=1)] = 16
    """Tokens of one KV block; grows in hybrid models."""
    fragmentation: SizeBytes = 0
    """Bytes lost to the allocator before graph capture, seen by no estimate."""
    request_peak_base: SizeBytes = 0
    """Bytes a first real request takes beyond anything that warm-up took."""
    request_peak_per_token: SizeBytes = 0
    """The same, per token of prompt and asked-for answer."""
    native_max_model_len: Annotated[int, msgspec.Meta(ge=1)] = 262_144
    arena: Arena | None = None
    seconds: PhaseSeconds = PhaseSeconds()
    seed: int = 0
    """Of the bytes that ``garbage_in`` prints."""
    faults: Faults = Faults()
    sysfs: str | None = None
    """Folder of the simulated device tree; default: one per configuration file and device in the temporary folder."""

    @property
    def idle_bytes(self) -> int:
        """Bytes in use on an idle card: the driver's own."""
        free_bytes = self.free_at_start
        return DRIVER_RESERVE_BYTES if free_bytes is None else max(0, self.device_total - free_bytes)


DRIVER_RESERVE_BYTES = int(0.57 * GIB)
"""What the RDNA4 budget document measured on an idle R9700."""
