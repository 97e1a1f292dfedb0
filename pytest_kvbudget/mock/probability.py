"""The truth about a shape on a simulated device: the chance that it passes, for exhaustive checks of a search.

``python -m pytest_kvbudget.mock probability --target NAME --floor A --ceiling B --quantum Q`` prints it for every rung
of an axis of a configured target.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from pytest_kvbudget.config import built_in, find, load
from pytest_kvbudget.engine.backends.common import vllm_flags
from pytest_kvbudget.engine.backends.neuron import shape_variables
from pytest_kvbudget.mock.conditions import Conditions
from pytest_kvbudget.mock.rehearsal import rehearse
from pytest_kvbudget.mock.spec import MockDevice
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import parse_size

_FAR: Final = 9
"""Sigmas beyond which nothing is drawn that would matter."""


def command_of(shape: Shape, environ: Mapping[str, str] | None = None) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment by which a shape is asked of the simulated engine, Neuron's variables included."""
    # as the backend renders it, to the letter: noise is drawn for a shape as it was asked for
    variables = {**(environ or {}), **shape_variables(shape), **shape.env}
    return ["serve", shape.model or "simulated", *vllm_flags(shape)], variables


def pass_probability(
    spec: MockDevice,
    shape: Shape,
    environ: Mapping[str, str] | None = None,
    *,
    cards: Sequence[int] | None = None,
    cold: bool = False,
    request_tokens: int = 0,
) -> float:
    """The chance that one boot of a shape passes, 0 to 1; without ``noise_boot`` it is 0 or 1.

    Args:
        spec: the device.
        shape: what is asked for.
        environ: the target's environment.
        cards: cards by rank; default: the first ones.
        cold: of a first boot of its compile key.
        request_tokens: prompt and answer of the request that it must live through; 0: booting is enough.

    Raises:
        UsageError: for a shape that the engine's command line refuses.
    """
    argv, variables = command_of(shape, environ)

    def passes(noise_bytes: int) -> bool:
        conditions = Conditions(noise_bytes=noise_bytes)
        return rehearse(
            spec, argv, variables, cards=cards, conditions=conditions, cold=cold, request_tokens=request_tokens
        ).passed

    sigma = spec.noise_boot
    low, high = -_FAR * sigma, _FAR * sigma
    if not passes(low):
        return 0.0
    if passes(high):
        return 1.0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    # noise is rounded to whole bytes
    return 0.5 * math.erfc(-(low + 0.5) / sigma / math.sqrt(2))


def main(argv: Sequence[str]) -> int:
    """Print value and chance, one rung a line."""
    parser = argparse.ArgumentParser(prog="pytest_kvbudget.mock probability", description=__doc__)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--target")
    parser.add_argument("--axis", default="max_model_len")
    parser.add_argument("--floor", type=parse_size, required=True)
    parser.add_argument("--ceiling", type=parse_size, required=True)
    parser.add_argument("--quantum", type=parse_size, required=True)
    parser.add_argument("--request-tokens", type=int, default=0)
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args(argv)
    path = options.config or find(Path.cwd())
    loaded = (built_in(Path.cwd()) if path is None else load(path)).pick(options.target)
    for value in range(options.floor, options.ceiling + 1, options.quantum):
        shape = loaded.target.shape.merged(**{options.axis: value})
        chance = pass_probability(
            loaded.target.mock or MockDevice(),
            shape,
            loaded.environment,
            cold=options.cold,
            request_tokens=options.request_tokens,
        )
        print(f"{value} {chance:.6f}")
    return 0
