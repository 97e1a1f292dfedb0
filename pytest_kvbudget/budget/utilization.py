"""The utilization law: what the worker compares before a single weight is loaded.

``free < ceil(total * utilization)`` raises; equality passes (vLLM, worker init; RDNA4 document, section 1, which
writes ``free > budget``). Only what the *worker* saw free counts: sysfs and SMI figures of an idle card are taken
before the runtime's own share is gone and bless utilizations that do not boot (idle torch free of 31.643 of 31.859 GiB
would give 0.993, where 0.982 is the law).
"""

from __future__ import annotations

import math
from typing import Final, Literal

import msgspec

from pytest_kvbudget.budget.model import BudgetInputError, Refusal
from pytest_kvbudget.units import GIB, MIB

SOURCE: Final = "RDNA4 document, section 1 (utilization law)"
STEP: Final = 0.001
"""Steps in which a utilization is proposed: three decimals, as the documents give them."""


class FreeAtInit(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that a worker finds free on its device at init."""

    free_bytes: int
    total_bytes: int
    source: Literal["refusal line", "startup line", "debug snapshot", "driver reserve"]
    """The worker's own words, or the total minus a configured driver reserve. Nothing else is accepted."""
    precision_bytes: float = 0
    """Half a unit of the last printed digit; 0 for exact figures."""

    def __post_init__(self) -> None:
        """Check the figures.

        Raises:
            BudgetInputError: more is free than there is, or the source is not one that the worker's check knows.
        """
        if self.source not in {"refusal line", "startup line", "debug snapshot", "driver reserve"}:
            raise BudgetInputError(
                f"free memory from {self.source!r}; expected the worker's refusal line, startup line or debug "
                "snapshot, or a configured driver reserve: idle driver figures bless utilizations that do not boot"
            )
        if not 0 <= self.free_bytes <= self.total_bytes or self.total_bytes < 1:
            raise BudgetInputError(f"{self.free_bytes} of {self.total_bytes} bytes free; expected free within total")

    def slack_bytes(self, utilization: float) -> int:
        """Bytes that are free beyond the request; negative where the worker refuses."""
        return self.free_bytes - requested_bytes(self.total_bytes, utilization)

    def boots(self, utilization: float) -> bool | None:
        """Whether the worker's check passes; ``None`` where the printed precision cannot tell."""
        slack_bytes = self.slack_bytes(utilization)
        if self.precision_bytes and abs(slack_bytes) <= self.precision_bytes:
            return None
        return slack_bytes >= 0

    def describe(self, utilization: float) -> str:
        """The slack in MiB with its precision."""
        slack_mib = self.slack_bytes(utilization) / MIB
        tail = f" (printed to {self.precision_bytes / MIB:.1f} MiB)" if self.precision_bytes else ""
        return f"utilization {utilization} leaves {slack_mib:.1f} MiB of slack{tail}"


def from_driver_reserve(total_bytes: int, reserve_bytes: int) -> FreeAtInit:
    """Free at init where no worker has spoken yet: the total minus what the driver is configured to keep."""
    return FreeAtInit(free_bytes=total_bytes - reserve_bytes, total_bytes=total_bytes, source="driver reserve")


def requested_bytes(total_bytes: int, utilization: float) -> int:
    """What a worker asks for at init: ``ceil(total * utilization)``, in bytes (vLLM, worker init)."""
    return math.ceil(total_bytes * utilization)


def largest_utilization(free: FreeAtInit, decimals: int = 3) -> float:
    """Largest utilization of so many decimals that passes the worker's check: free over total, rounded down."""
    steps: int = 10**decimals
    step = min(steps, free.free_bytes * steps // free.total_bytes)
    while step > 0 and free.slack_bytes(step / steps) < 0:
        step -= 1
    return step / steps


def worth_bytes(total_bytes: int, step: float = 0.01) -> int:
    """What so much more utilization is worth, in bytes: ``total * step`` (0.32 GiB per 0.01 on 31.86 GiB)."""
    return round(total_bytes * step)


def utilization_refusal(
    utilization: float, *, total_bytes: int | None = None, free: FreeAtInit | None = None, full_refused: bool = True
) -> Refusal | None:
    """Why the worker is known to refuse this utilization, ``None`` where it is not known to.

    Args:
        utilization: asked for, in (0, 1].
        total_bytes: the device's size, where known; used for the figures of the 1.00 refusal.
        free: what the worker finds free; ``None`` where no worker has said it.
        full_refused: without ``free``, refuse 1.00: on the R9700 the driver always keeps a share (RDNA4 document).
    """
    if free is not None:
        if free.boots(utilization) is not False:
            return None
        most = largest_utilization(free)
        asked_bytes = requested_bytes(free.total_bytes, utilization)
        return Refusal(
            law="utilization",
            sentence=(
                f"the worker finds {free.free_bytes / GIB:.2f} of {free.total_bytes / GIB:.2f} GiB free "
                f"({free.source}) and utilization {utilization} asks for {asked_bytes / GIB:.2f} GiB, "
                f"{-free.slack_bytes(utilization) / MIB:.1f} MiB too much: it raises ValueError before any weight loads"
            ),
            advice=f"lower --gpu-memory-utilization to at most {most}; {free.describe(most)}",
            source=SOURCE,
            numbers={
                "free_bytes": free.free_bytes,
                "requested_bytes": asked_bytes,
                "largest_utilization": most,
                "slack_bytes": free.slack_bytes(utilization),
            },
        )
    if not full_refused or utilization < 1:
        return None
    numbers: dict[str, int | float] = {} if total_bytes is None else {"requested_bytes": total_bytes}
    return Refusal(
        law="utilization",
        sentence="utilization 1.0 asks for the whole device, of which the driver keeps a share: every rank raises "
        "ValueError (free memory on startup is less than desired) before any weight loads",
        advice="lower --gpu-memory-utilization; the largest that boots is free over total of the worker's refusal line",
        source=SOURCE,
        numbers=numbers,
    )
