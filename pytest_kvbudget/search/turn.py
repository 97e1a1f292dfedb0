"""Turning one thing of a shape: a field of its own, or a variable of the engine's environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_kvbudget.budget.graphs import PER_GRAPH_VARIABLE
from pytest_kvbudget.budget.neuron import CAP_VARIABLE
from pytest_kvbudget.units import MIB

if TYPE_CHECKING:
    from pytest_kvbudget.shape import Shape

VARIABLES: Final = {"kv_cap_fraction": (CAP_VARIABLE, 1), "cudagraph_per_graph": (PER_GRAPH_VARIABLE, MIB)}
"""What is turned by a variable: its name, and how many of our units (bytes, 1) make one of the variable's."""


def turn(shape: Shape, name: str, setting: float) -> Shape:
    """The shape with one thing turned.

    Args:
        shape: everything else.
        name: a field of `Shape`, or a knob of `VARIABLES`.
        setting: bytes, tokens, a count or a fraction, as the field takes it; bytes for ``cudagraph_per_graph``.

    Raises:
        msgspec.ValidationError: the value is impossible for the field.
    """
    if name not in VARIABLES:
        return shape.merged(**{name: setting})
    variable, unit = VARIABLES[name]
    return shape.merged(env={variable: f"{setting / unit:.10g}"})


def turned(shape: Shape, name: str) -> float | None:
    """Where the thing stands at this shape; ``None`` where the engine decides, or where it is not a number."""
    if name not in VARIABLES:
        value: float | None = getattr(shape, name)
        return value
    variable, unit = VARIABLES[name]
    try:
        return float(shape.env[variable]) * unit
    except (KeyError, ValueError):
        return None


def label(name: str, setting: float) -> str:
    """``max_model_len=245760``, ``gpu_memory_utilization=0.97``: what a rung is called."""
    return f"{name}={setting:.10g}" if isinstance(setting, float) else f"{name}={setting}"
