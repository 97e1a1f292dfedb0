"""Where arithmetic points before the first boot: a place to begin, never an answer.

Only real targets: what a simulated device does is to be found out as a real one's is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from pytest_kvbudget.budget.answers import answer
from pytest_kvbudget.budget.model import BudgetInputError
from pytest_kvbudget.budget.utilization import FreeAtInit, largest_utilization
from pytest_kvbudget.config import LoadedTarget, engine_environment
from pytest_kvbudget.mock.spec import MockDevice
from pytest_kvbudget.planning import Experience, answer_for, ask_for, policy_of
from pytest_kvbudget.search.knobs import why_futile
from pytest_kvbudget.search.model import Axis, Prior
from pytest_kvbudget.search.pool import rung_shape
from pytest_kvbudget.search.turn import turn
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.specs import LadderSpec, SweepSpec

PLAN_RELATIVE: Final = 0.03
"""What a plan's window may be off, as a share of it."""
BLOCK_TOKENS: Final = {"cpu": 128}
"""Tokens of a KV block where the engine's default is not 16."""
USUAL_UTILIZATION: Final = 0.982
"""Largest share on a card of which the driver keeps 0.57 of 31.86 GiB (RDNA4 document, section 1)."""
READERS: Final = {
    "reserved_headroom": frozenset({"neuron"}),
    "kv_cap_fraction": frozenset({"neuron"}),
    "cudagraph_per_graph": frozenset({"rdna4"}),
}
"""Whose engines read a knob (Neuron document, sections 1 and 3; RDNA4 document, section 2); every other one all do."""
PRICED: Final = "max_model_len"
"""The axis whose end a plan knows: what a larger pool or more sequences fail for is no term of it."""


def plan_prior(
    loaded: LoadedTarget, ladder: LadderSpec, base: Shape, experience: Experience | None = None
) -> Prior | None:
    """The largest value of a ladder whose promised windows fit by the plan; ``None`` where no plan can be made.

    It takes the model's own configuration (``config.json`` in the folder that the shape names), and a KV cache whose
    bytes are known: pinned, or by terms that an earlier boot of this run stated.
    """
    config = None if loaded.target.mock is not None else model_config(base)
    if config is None or ladder.axis != PRICED:
        return None
    axis = ladder.rungs

    def fits(value: int) -> bool:
        try:
            shape = rung_shape(base, axis.name, value, ladder.pool)
        except (ValueError, msgspec.ValidationError):
            return False
        ask = msgspec.structs.replace(
            ask_for(loaded, shape, experience), model_config=config, block_tokens=_block_tokens(loaded)
        )
        found = answer(ask)
        need, have = found.figures.get("need_bytes"), found.figures.get("available_bytes")
        return need is not None and have is not None and ladder.windows * need <= have and not found.refused

    try:
        largest = _largest(axis, fits)
    except BudgetInputError:
        return None
    return None if largest is None else Prior(value=largest, relative=PLAN_RELATIVE, source="plan")


def largest_headroom(loaded: LoadedTarget, sweep: SweepSpec, base: Shape) -> int | None:
    """The headroom that leaves the minimum KV cache (Neuron document, section 3), where the weights are known."""
    if sweep.name != "reserved_headroom" or loaded.target.mock is not None:
        return None
    found = answer_for(loaded, turn(base, sweep.name, sweep.floor))
    most = None if found is None else found.figures.get("maximum_headroom_bytes")
    return most if isinstance(most, int) and most > 0 else None


def from_the_law(sweep: SweepSpec, free: FreeAtInit | None) -> SweepSpec:
    """A sweep of the utilization goes down from the largest that the worker's check passes, unless it names a start.

    Args:
        sweep: as its marker asks for it.
        free: what earlier boots of this run found free at init; ``None`` takes what the RDNA4 document measured.
    """
    if sweep.name != "gpu_memory_utilization" or sweep.start is not None or sweep.ceiling is None:
        return sweep
    share = USUAL_UTILIZATION if free is None else largest_utilization(free)
    start = sweep.knob.value(share) // sweep.step * sweep.step
    return msgspec.structs.replace(sweep, start=min(max(start, sweep.floor), sweep.ceiling))


def turns_nothing(loaded: LoadedTarget, sweep: SweepSpec, base: Shape) -> str | None:
    """Why a sweep would boot the same engine at every value, in words; ``None`` where it would not.

    An engine is asked for by the target's command and environment as well as by the shape; and one that does not know
    a knob is the same engine at every value.
    """
    readers = READERS.get(sweep.name)
    engine = _engine(loaded)
    if readers is not None and engine is not None and engine not in readers:
        return (
            f"target {loaded.name} is {engine!r}, whose engine does not read {sweep.name} (that is for "
            f"{' and '.join(sorted(readers))}), so a sweep over it tests nothing; sweep gpu_memory_utilization or "
            "kv_cache_memory_bytes"
        )
    asked = base.merged(
        env=engine_environment(loaded, base), extra_args=(*(loaded.target.command or ()), *base.extra_args)
    )
    return why_futile(sweep.knob, asked)


def compiles_on_cpu(loaded: LoadedTarget) -> bool:
    """Whether a target's engine can compile its programs on a machine without the device: only Neuron's does."""
    return _engine(loaded) in {"neuron", None}  # where nobody knows, the boot will say


def _engine(loaded: LoadedTarget) -> str | None:
    """Whose flags and variables a target's engine reads; ``None`` where nobody knows."""
    if loaded.target.backend == "mock":
        return (loaded.target.mock or MockDevice()).dialect
    try:
        return policy_of(loaded)
    except BudgetInputError:
        return None


def model_config(shape: Shape) -> dict[str, Any] | None:
    """The configuration of a model that is a folder of this machine."""
    if shape.model is None:
        return None
    try:
        found = json.loads(Path(shape.model, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _block_tokens(loaded: LoadedTarget) -> int:
    devices = [str(device) for device in loaded.target.devices] or ["cpu"]
    return BLOCK_TOKENS.get(devices[0], 16)


def _largest(axis: Axis, fits: Callable[[int], bool]) -> int | None:
    """By bisection between floor and ceiling; ``None`` where not even the floor fits."""
    if not fits(axis.floor):
        return None
    low, high = axis.floor, axis.ceiling + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
