"""What a boot really takes of the card, against what the plan accounts for.

``weights + pinned_pool + graphs + arena + non-torch (1.45 + 0.57 driver reserve)`` against the card (RDNA4 document,
section 1). The pinned pool is a term here and not of the plan (section 3). The law warns and never refuses: margins
of 0.13 GiB have booted (section 1) and crash-looped (section 4).
"""

from __future__ import annotations

from typing import Final

import msgspec

from pytest_kvbudget.budget.model import Plan, Reach, gives, takes
from pytest_kvbudget.units import GIB, format_size
from pytest_kvbudget.verdict import Provenance

NON_TORCH_BYTES: Final = int(1.45 * GIB)
DRIVER_RESERVE_BYTES: Final = int(0.57 * GIB)
_LAW: Final = "RDNA4 document, section 1"


def footprint(
    *,
    total_bytes: int,
    weights_bytes: int,
    pool_bytes: int,
    graph_bytes: int,
    arena_bytes: int,
    non_torch_bytes: int = NON_TORCH_BYTES,
    driver_reserve_bytes: int = DRIVER_RESERVE_BYTES,
) -> Plan:
    """The footprint of one rank on its card; what is left is the margin, and a negative one is only a warning."""
    assumed, configured = Provenance.ASSUMED, Provenance.CONFIGURED
    pool_how = "--kv-cache-memory-bytes"
    plan = Plan(
        policy="rdna4",
        variant="footprint",
        result="margin",
        terms=(
            gives("card", total_bytes, Reach.FIXED, "the device", law=_LAW, provenance=configured),
            takes("non-expert weights", weights_bytes, Reach.FIXED, "checkpoint", law=_LAW),
            takes("pinned pool", pool_bytes, Reach.FLAG, pool_how, law=_LAW, provenance=configured),
            takes("CUDA graphs", graph_bytes, Reach.FIXED, "capture sizes", law=_LAW),
            takes("arena", arena_bytes, Reach.FLAG, "--gpu-memory-utilization", law=_LAW),
            takes("non-torch", non_torch_bytes, Reach.FIXED, "runtime", law=_LAW, provenance=assumed),
            takes("driver reserve", driver_reserve_bytes, Reach.FIXED, "driver", law=_LAW, provenance=assumed),
        ),
    )
    if plan.fits:
        return plan
    return msgspec.structs.replace(
        plan, warnings=(f"the footprint exceeds the card by {format_size(-plan.left_bytes)}: a boot is at risk",)
    )


def used_bytes(plan: Plan) -> int:
    """Bytes that a footprint predicts to be used on its card."""
    return sum(term.size_bytes for term in plan.terms if term.role == "takes")


def error_bytes(plan: Plan, high_water_bytes: int) -> int:
    """Measured high-water minus predicted: positive where the law promised too little."""
    return high_water_bytes - used_bytes(plan)
