"""The physics of a simulated device, as ``[target.NAME.mock]`` gives it. Data only."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from pytest_kvbudget.shape import SizeBytes
from pytest_kvbudget.units import GIB, MIB

Seconds = Annotated[float, msgspec.Meta(ge=0)]

FaultKind = Literal["hang", "die", "exit_zero", "garbage", "error"]


class PhaseSeconds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long each phase of a boot takes, in seconds."""

    imports: Seconds = 0.0
    worker_init: Seconds = 0.0
    weights_load: Seconds = 0.0
    profile: Seconds = 0.0
    kv_alloc: Seconds = 0.0
    compile: Seconds = 0.0
    graph_capture: Seconds = 0.0
    warmup: Seconds = 0.0
    shutdown: Seconds = 0.0
    per_token: Seconds = 0.0
    """Generating one token."""


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Misbehaviour to ask for. Names of phases are those of ``seconds``, or ``request``."""

    hang_in: str | None = None
    """Stop making progress in this phase, for ever."""
    die_in: str | None = None
    """Every process of the engine is gone in this phase, without a word (exit status 1)."""
    exit_zero_in: str | None = None
    """The engine core dies in this phase; the server leaves a little later with status 0."""
    error_in: str | None = None
    """A fault that has nothing to do with memory, in this phase, with a traceback."""
    ignore_sigterm: bool = False
    leave_orphan: bool = False
    """A worker leaves a process of its own session behind, which keeps the device's memory."""
    garbage_in: str | None = None
    """Print bytes that are no text, half lines and a line of a megabyte in this phase, and go on."""
    request_hang: bool = False
    """Accept completions and never answer."""


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
    graph_base: SizeBytes = 64 * MIB
    graph_per_size: SizeBytes = 12 * MIB
    """Bytes that capturing one graph size takes."""
    kv_bytes_per_token: Annotated[int, msgspec.Meta(ge=1)] = 32 * 1024
    state_bytes_per_seq: SizeBytes = 0
    """Fixed state of one sequence in a hybrid model."""
    block_size: Annotated[int, msgspec.Meta(ge=1)] = 16
    fragmentation: SizeBytes = 0
    """Bytes lost to the allocator before graph capture, seen by no estimate."""
    request_peak_base: SizeBytes = 0
    """Bytes a first real request takes beyond anything that warm-up took."""
    request_peak_per_token: SizeBytes = 0
    """The same, per token of prompt and asked-for answer."""
    native_max_model_len: Annotated[int, msgspec.Meta(ge=1)] = 262_144
    seconds: PhaseSeconds = PhaseSeconds()
    seed: int = 0
    faults: Faults = Faults()
    sysfs: str | None = None
    """Folder of the simulated device tree; default: one per configuration file and device in the temporary folder."""
