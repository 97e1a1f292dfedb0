"""Rehearsed boots read by the project's own reader."""

from __future__ import annotations

from msgspec.structs import replace

from pytest_kvbudget.ledger.model import BootLedger
from pytest_kvbudget.ledger.reader import LedgerReader
from pytest_kvbudget.mock.rehearsal import Rehearsal, rehearse
from pytest_kvbudget.mock.spec import Arena, Compile, MockDevice
from pytest_kvbudget.units import GIB, MIB

from .harness import BASE, UTILIZATION

CORE = MockDevice(
    dialect="neuron",
    weights=5 * GIB,
    non_torch=512 * MIB,
    activation_base=64 * MIB,
    activation_per_batched_token=0,
    kv_bytes_per_token=64 * 1024,
    compile=Compile(scratch_base=1 * GIB, per_bucket=4 * MIB),
)
"""A logical core of trn2 at LNC 2, 24 GiB. By default the KV cache gets 0.3 of 0.92 of it, 6.62 GiB; with a headroom of
4 GiB 15 GiB. Two programs, one for prefill and one for decode."""
HEADROOM = {"VLLM_NEURON_RESERVED_HEADROOM_GIB": "4"}
WINDOW = ("--max-model-len", "65536")
"""4 GiB of KV cache on CORE."""

ARENA = Arena(slot_bytes=MIB, slots_min=10, registry_bytes_per_token=1024, reserve_factor=1.5, overhead_planned=2 * GIB)
FORK = replace(BASE, dialect="rdna4", weights=1 * GIB, kv_bytes_per_token=1024, arena=ARENA)
PRECISE = (*UTILIZATION, *WINDOW, "--expert-precise-memory")


def core(**keys: object) -> MockDevice:
    """CORE with another compiler."""
    return replace(CORE, compile=replace(CORE.compile or Compile(), **keys))


def fork(**keys: object) -> MockDevice:
    """FORK with another arena."""
    return replace(FORK, arena=replace(ARENA, **keys))


def rehearsed(
    spec: MockDevice, *flags: str, env: dict[str, str] | None = None, request_tokens: int = 0, cold: bool = False
) -> Rehearsal:
    return rehearse(spec, ["serve", "sim", *flags], env, request_tokens=request_tokens, cold=cold)


def read(spec: MockDevice, log: str) -> BootLedger:
    """The ledger of a log, as the dialect's backend would have it read."""
    reader = LedgerReader(spec.dialect, simulated=True)
    reader.feed(log.encode())
    reader.close()
    return reader.ledger()
