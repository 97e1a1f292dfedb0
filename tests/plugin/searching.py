"""Simulated devices for searches that pytest runs, and the truth about each rung, by the device's own arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pytest_kvbudget.config import load
from pytest_kvbudget.mock.probability import pass_probability
from pytest_kvbudget.mock.spec import MockDevice
from pytest_kvbudget.search.turn import turn
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import GIB, MIB
from tests.conftest import Project

CARD = """
[target.card]
backend = "mock"
devices = [{devices}]

[target.card.shape]
model = "simulated"
{shape}

[target.card.mock]
sysfs = "sysfs"
{mock}

[target.card.limits]
release_seconds = 10
"""


def card(*, mock: str = "", shape: str = "", devices: str = "0") -> str:
    """A configuration of one target; physics and shape are given whole."""
    return CARD.format(devices=devices, shape=shape, mock=mock)


def neuron(
    *,
    weights: str = "8 GiB",
    shape: str = "",
    mock: str = "",
    scratch: str = "1536 MiB",
    compiler: str = 'load_extra = "2 GiB"',
    devices: str = "0",
) -> str:
    """A core of a Trainium 3 with its stack of 36 GiB, of which KV cache, weights, scratch and collectives take."""
    physics = f"""
dialect = "neuron"
platform = "trn3"
weights = "{weights}"
kv_bytes_per_token = 32768
activation_base = "512 MiB"
activation_per_batched_token = 0
{mock}
[target.card.mock.compile]
scratch_base = "{scratch}"
{compiler}
"""
    return card(mock=physics, shape=f"max_model_len = 8192\n{shape}", devices=devices)


def target_shape(project: Project) -> Shape:
    """The shape of the project's target."""
    return load(project.path / "kvbudget.toml").pick(None).target.shape


def chances(
    project: Project,
    name: str,
    values: Iterable[float],
    *,
    base: Shape | None = None,
    request_tokens: int = 0,
    cards: Sequence[int] | None = None,
) -> dict[float, float]:
    """The chance to pass of every value of an axis or knob, by the device of the project's configuration.

    Args:
        project: its configuration counts.
        name: of the axis or knob.
        values: as the shape's field takes them.
        base: everything else of the shape; default: the target's.
        request_tokens: prompt and answer of a request that has to be lived through.
        cards: devices by rank; default: the first ones.
    """
    loaded = load(project.path / "kvbudget.toml").pick(None)
    shape, device = base or loaded.target.shape, loaded.target.mock or MockDevice()
    return {
        value: pass_probability(
            device, turn(shape, name, value), loaded.environment, request_tokens=request_tokens, cards=cards
        )
        for value in values
    }


def largest(found: dict[float, float]) -> tuple[float, float | None]:
    """The largest value that passes and the smallest that does not, on a device without noise and with one boundary."""
    passing = [value for value, chance in found.items() if chance == 1]
    failing = [value for value, chance in found.items() if chance == 0]
    assert len(passing) + len(failing) == len(found)
    assert not failing or max(passing) < min(failing)
    return max(passing), min(failing, default=None)


def smallest(found: dict[float, float]) -> tuple[float, float | None]:
    """The smallest value that passes and the largest that does not."""
    value, failed_at = largest({-value: chance for value, chance in found.items()})
    return -value, None if failed_at is None else -failed_at


def gib(least: float, most: float, step: float = 1.0) -> list[int]:
    """Sizes on a grid of so many GiB, in bytes."""
    steps = round((most - least) / step)
    return [int((least + index * step) * GIB) for index in range(steps + 1)]


__all__ = ["CARD", "GIB", "MIB", "card", "chances", "gib", "largest", "neuron", "smallest", "target_shape"]
