"""Where a sweep's grid begins if its marker does not say."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_kvbudget.search.sweep import Sweep
from pytest_kvbudget.specs import check_sweep
from pytest_kvbudget.units import GIB, MIB


def first(ceiling: int, **arguments: Any) -> int:
    """The first value that a sweep of the pool boots."""
    spec = check_sweep({"knob": "kv_cache_memory_bytes", **arguments})
    search = Sweep(spec.knob, lowest=spec.floor, highest=ceiling, step=spec.step, start=spec.start)
    ask = search.next()
    assert ask is not None
    return ask.value


def test_a_start_that_is_a_multiple_of_the_step_is_booted_as_it_is() -> None:
    assert first(9 * GIB, start="4 GiB", step="1 GiB") == 4 * GIB
    assert first(64 * MIB, start="50 MiB") == 50 * MIB


@pytest.mark.parametrize(
    ("arguments", "floor"),
    [
        ({}, MIB),
        ({"step": "1 GiB"}, GIB),
        ({"step": "1 GiB", "start": "512 MiB"}, 512 * MIB),
        ({"step": "1 GiB", "ceiling": "768 MiB"}, 768 * MIB),
        ({"step": "1 GiB", "floor": "64 MiB"}, 64 * MIB),
    ],
)
def test_a_pool_begins_at_one_step_unless_less_is_asked_for(arguments: dict[str, Any], floor: int) -> None:
    assert check_sweep({"knob": "kv_cache_memory_bytes", **arguments}).floor == floor
