"""The vLLM fork for RDNA4 cards with expert offload (R9700): ``vllm serve`` with the fork's flags and variables.

The fork's own flags (``--enable-expert-offload``, ``--expert-precise-memory``, ``--expert-offload-mem``,
``--expert-resident-layers``, ...) come through the shape's ``extra_args``, its variables (the graph charge
``VLLM_CUDAGRAPH_MEM_*``, ``VLLM_PLE_CPU_OFFLOAD``, ...) through ``env``: nothing is added that was not asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from pytest_kvbudget.budget.gate import flag_value, has_flag
from pytest_kvbudget.budget.graphs import charge_from
from pytest_kvbudget.budget.model import BudgetInputError
from pytest_kvbudget.config import ConfigError, LoadedTarget
from pytest_kvbudget.device.model import MemoryProbe
from pytest_kvbudget.engine.backends.common import (
    CRITICAL,
    GPU_VARIABLES,
    RDNA4_MIN_FREE_BYTES,
    build_command,
    check_served,
    chosen_probe,
    serve_command,
    slots_of,
    vllm_flags,
)
from pytest_kvbudget.engine.model import Command
from pytest_kvbudget.shape import Shape

OFFLOAD_FLAG: Final = "--enable-expert-offload"
OFFLOAD_FLAGS: Final = (
    "--expert-offload-mem",
    "--expert-resident-layers",
    "--expert-precise-memory",
    "--expert-direct-load",
    "--expert-cache-gb",
)
"""Flags of the fork that mean nothing without offload (facts, section 3)."""


class Rdna4Backend:
    """Runs the fork's ``vllm serve`` on AMD cards, named by their number."""

    name = "rdna4"
    grammar = "rdna4"
    simulated = False
    critical = CRITICAL

    def check(self, loaded: LoadedTarget) -> None:
        """Check what only this backend can check.

        Raises:
            ConfigError: for keys of another backend, devices that are no cards, a graph charge that is no number, or
                offload flags without offload.
        """
        foreign = dict.fromkeys(("reserved_headroom", "lnc"), "is a Neuron setting; backend 'rdna4' has none")
        check_served(loaded, foreign=foreign, variables=GPU_VARIABLES)
        for device in loaded.target.devices:
            if not str(device).isdecimal():
                raise ConfigError(f"{loaded.origin} devices: {device!r} is no card; expected numbers from 0")
        if not loaded.target.devices:
            raise ConfigError(f"{loaded.origin} devices: is missing; expected the cards of the target, as in [0, 1]")
        try:
            charge_from({**loaded.environment, **loaded.target.shape.env})
        except BudgetInputError as error:
            raise ConfigError(f"{loaded.origin} env: {error}") from None
        arguments = (*(loaded.target.command or ()), *loaded.target.shape.extra_args)
        if not has_flag(arguments, OFFLOAD_FLAG):
            for flag in OFFLOAD_FLAGS:
                if has_flag(arguments, flag) or flag_value(arguments, flag) is not None:
                    raise ConfigError(f"{loaded.origin} shape.extra_args: {flag} without {OFFLOAD_FLAG}; add that")

    def slots(self, loaded: LoadedTarget, shape: Shape) -> tuple[tuple[str, ...], ...]:
        """Cards cut into sets of ``tensor_parallel_size``."""
        return slots_of(loaded.target.devices, shape.tensor_parallel_size or 1)

    def lease_names(self, loaded: LoadedTarget, devices: Sequence[str]) -> tuple[str, ...]:
        """Cards are leased by the number that HIP gives them on this host, as backend ``vllm`` does."""
        return tuple(f"gpu-{device}" for device in devices)

    def probe(self, loaded: LoadedTarget, devices: Sequence[str]) -> MemoryProbe:
        """The best source of AMD cards' memory that answers."""
        return chosen_probe("amd", devices)

    def min_free_bytes(self, loaded: LoadedTarget) -> int:
        """Between the margins at which shapes died and lived."""
        return RDNA4_MIN_FREE_BYTES

    def render(self, loaded: LoadedTarget, shape: Shape, devices: Sequence[str], port: int) -> Command:
        """``vllm serve MODEL FLAGS --host H --port P`` with the visible cards set."""
        added = dict.fromkeys(GPU_VARIABLES, ",".join(devices))
        argv = serve_command(loaded, shape, vllm_flags(shape), port)
        return build_command(loaded, shape, argv=argv, added=added, port=port)

    def session(self, loaded: LoadedTarget) -> AbstractContextManager[None]:
        """Nothing has to be there beside the engine."""
        return nullcontext()
