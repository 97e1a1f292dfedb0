"""What markers ask for in sizes, and where a sweep's grid begins if its marker does not say."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_kvbudget.search.sweep import Sweep
from pytest_kvbudget.specs import SpecError, check_spec, check_sweep, number_of
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


POOL_LADDER = {"axis": "kv_cache_memory_bytes", "start": "4 GiB", "floor": "1 GiB"}
POOL_SWEEP = {"knob": "kv_cache_memory_bytes", "start": "4 GiB", "ceiling": "8 GiB"}


@pytest.mark.parametrize("value", [1, 64, "512", MIB - 1])
@pytest.mark.parametrize("argument", ["start", "floor", "quantum"])
def test_a_small_size_of_a_ladder_needs_its_unit(argument: str, value: object) -> None:
    with pytest.raises(SpecError, match=f"^{argument}: {value!r} has no unit and would be .* bytes; expected "):
        check_spec({**POOL_LADDER, argument: value})


@pytest.mark.parametrize("argument", ["start", "floor", "ceiling", "step", "fine_step"])
@pytest.mark.parametrize("knob", ["kv_cache_memory_bytes", "reserved_headroom", "cudagraph_per_graph"])
def test_a_small_size_of_a_sweep_needs_its_unit(knob: str, argument: str) -> None:
    with pytest.raises(SpecError, match=f"^{argument}: 4 has no unit and would be 4 bytes; expected '4 GiB'"):
        check_sweep({"knob": knob, argument: 4})


def test_sizes_with_a_unit_of_a_mebibyte_or_of_nothing_are_taken() -> None:
    ladder = check_spec({**POOL_LADDER, "floor": GIB, "quantum": "64 KiB"})
    assert (ladder.floor, ladder.quantum) == (1_073_741_824, 65_536)
    assert check_spec({**POOL_LADDER, "quantum": MIB}).quantum == 1_048_576
    assert check_sweep({**POOL_SWEEP, "step": "64 KiB", "fine_step": "512 B"}).fine_step == 512
    assert check_sweep({"knob": "reserved_headroom", "floor": 0, "start": 0}).start == 0


def test_other_axes_count_no_bytes() -> None:
    assert check_spec({"axis": "max_num_seqs", "start": 8, "floor": 1}).rungs.floor == 1
    with pytest.raises(SpecError, match="start='8'"):
        check_spec({"axis": "max_num_seqs", "start": "8", "floor": 1})


def test_a_rung_below_a_mebibyte_is_asked_for_as_its_row_shows_it() -> None:
    assert number_of("65536", "kv_cache_memory_bytes") == 65_536
