"""What a headroom sweep can turn, which failures push it which way, and when turning it tests nothing.

Every knob has a goal: the least headroom, the smallest pool, the largest fraction. Going for the goal ends at one class
of failure, going away from it at the opposite one (Neuron document, sections 3 and 5).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from pytest_kvbudget.units import GIB, MIB, exact_unit, size_beyond, size_in
from pytest_kvbudget.verdict import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_kvbudget.ledger.model import Cause
    from pytest_kvbudget.shape import Shape

Side = Literal["allocation", "minimum_kv"]
"""``allocation``: too little memory outside the KV cache. ``minimum_kv``: too little KV cache."""
Goal = Literal["least", "most"]
KnobName = Literal[
    "reserved_headroom", "kv_cap_fraction", "gpu_memory_utilization", "kv_cache_memory_bytes", "cudagraph_per_graph"
]

TICKS: Final = 10_000
"""A fraction's unit is one ten-thousandth, so that every search counts in whole numbers."""

SIDES: Final[Mapping[str, Side]] = MappingProxyType(
    {
        "compile_hbm_exceeded": "allocation",
        "runtime_hbm_oom": "allocation",
        "kv_alloc_oom": "allocation",
        "graph_capture_oom": "allocation",
        "warmup_oom": "allocation",
        "request_oom": "allocation",
        "min_kv_budget": "minimum_kv",
        "kv_check_short": "minimum_kv",
        "kv_windows_short": "minimum_kv",
        "kv_budget_nonpositive": "minimum_kv",
        "kv_reserve_underpriced": "minimum_kv",
        "max_num_seqs_exceeds_state": "minimum_kv",
        "plan_refused": "minimum_kv",
    }
)
"""Which side a failure class is on, for every knob. A class that is not here stops a sweep."""
_SHARE_SIDES: Final[Mapping[str, Side]] = MappingProxyType(
    {
        "startup_free_below_request": "allocation",
        "weights_oom": "allocation",
        "profile_oom": "allocation",
    }
)
"""Further classes that a smaller share of the device can cure: an expert arena takes it before the KV cache exists."""
_BEFORE_KV: Final = frozenset({Phase.ARGUMENT, Phase.WORKER_INIT, Phase.WEIGHTS_LOAD})
HEADROOM_VARIABLE: Final = "VLLM_NEURON_RESERVED_HEADROOM_GIB"
BLOCKS_FLAG: Final = "--num-gpu-blocks-override"


class Knob(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to turn. Its values are whole numbers: bytes, or ten-thousandths of a fraction."""

    name: KnobName
    goal: Goal
    unit: Literal["bytes", "fraction"]
    default_step: int
    ends_at: Side
    """The failures that end the way to the goal."""
    unit_bytes: int | None = None
    """The unit of a finding's sizes, see `in_unit_of`; ``None``: each size in the unit that writes it exactly."""

    @property
    def other_side(self) -> Side:
        """The failures on the way from the goal."""
        return "minimum_kv" if self.ends_at == "allocation" else "allocation"

    @property
    def scale(self) -> int:
        """How many whole numbers make 1 of the setting."""
        return 1 if self.unit == "bytes" else TICKS

    def setting(self, value: int) -> int | float:
        """The value as shape, flag or environment take it: bytes, or the fraction."""
        return value if self.unit == "bytes" else value / TICKS

    def value(self, setting: float) -> int:
        """The whole number for a setting."""
        return round(setting if self.unit == "bytes" else setting * TICKS)

    def show(self, value: int) -> str:
        """The value for people: ``"4.00 GiB"``, ``"0.982"``."""
        if self.unit != "bytes":
            return f"{value / TICKS:g}"
        return size_in(value, exact_unit((value,)) if self.unit_bytes is None else self.unit_bytes)

    def show_beyond(self, value: int) -> str:
        """A value that is none of the grid, rounded away from the edge."""
        if self.unit != "bytes" or self.unit_bytes is None:
            return self.show(value)
        return size_beyond(value, self.unit_bytes, up=self.goal == "least")

    def in_unit_of(self, *values: int) -> Knob:
        """The knob with all its sizes in the largest unit that writes these exactly: a grid's ends and steps."""
        return msgspec.structs.replace(self, unit_bytes=exact_unit(values)) if self.unit == "bytes" else self

    def side(self, cause: Cause | None, classes: Mapping[str, Side] = MappingProxyType({})) -> Side | None:
        """Which way a failure pushes this knob; ``None`` where it says nothing about it.

        An allocation that failed before the KV cache existed is no matter of headroom or pool: neither was taken yet.

        Args:
            cause: of the boot that failed.
            classes: the caller's own failure classes; they win.
        """
        if cause is None or cause.by_gate:
            return None
        if cause.failure_class in classes:
            return classes[cause.failure_class]
        shares = self.name in {"gpu_memory_utilization", "cudagraph_per_graph"}
        if shares and cause.failure_class in _SHARE_SIDES:
            return _SHARE_SIDES[cause.failure_class]
        side = SIDES.get(cause.failure_class)
        return None if side == "allocation" and cause.phase in _BEFORE_KV else side


KNOBS: Final[Mapping[str, Knob]] = MappingProxyType(
    {
        knob.name: knob
        for knob in (
            Knob(name="reserved_headroom", goal="least", unit="bytes", default_step=GIB, ends_at="allocation"),
            Knob(name="kv_cap_fraction", goal="most", unit="fraction", default_step=TICKS // 100, ends_at="allocation"),
            Knob(
                name="gpu_memory_utilization",
                goal="most",
                unit="fraction",
                default_step=TICKS // 100,
                ends_at="allocation",
            ),
            Knob(name="kv_cache_memory_bytes", goal="least", unit="bytes", default_step=MIB, ends_at="minimum_kv"),
            Knob(name="cudagraph_per_graph", goal="least", unit="bytes", default_step=MIB, ends_at="allocation"),
        )
    }
)


def why_futile(knob: Knob, shape: Shape) -> str | None:
    """Why turning the knob changes nothing at this shape, in words for a usage error; ``None`` where it does."""
    if any(argument.split("=")[0] == BLOCKS_FLAG for argument in shape.extra_args):
        return f"{BLOCKS_FLAG} fixes the KV cache, so a sweep over {knob.name} tests nothing; drop it"
    headroom = shape.reserved_headroom is not None or HEADROOM_VARIABLE in shape.env
    if headroom and knob.name in {"kv_cap_fraction", "gpu_memory_utilization"}:
        return (
            f"an explicit headroom bypasses {knob.name} (Neuron document, section 1), so a sweep over it tests "
            f"nothing; unset reserved_headroom and {HEADROOM_VARIABLE}, or sweep reserved_headroom"
        )
    return None
