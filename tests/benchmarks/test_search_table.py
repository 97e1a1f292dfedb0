"""The table of the search is printed, and nothing in it is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.benchmarks import search_table
from tests.benchmarks.devices.families import CEILING, FAMILIES, FLOOR, case

if TYPE_CHECKING:
    import pytest


def test_nothing_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """Goals are means over a thousand devices and are not judged on so few."""
    search_table.main(6)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("wrong 0, goals missed ")
    assert [line.split()[0] for line in lines[2:7]] == ["cold", "plan", "archive", "step", "bisect"]
    assert all(line.split()[-1] == "0" for line in lines[2:7])


def test_devices_are_the_same_everywhere_and_cover_the_axis() -> None:
    assert case("plain", 3) == case("plain", 3)
    ends = [search_table.boundary(case(family, seed)) for family in FAMILIES for seed in range(40)]
    assert min(ends) < FLOOR
    assert max(ends) > CEILING


def test_a_missed_goal_is_marked_and_counted() -> None:
    table = search_table.Table()
    assert table.figure(3.74, 3.7) == "3.74"
    assert table.figure(3.76, 3.7) == "3.76!"
    assert table.figure(9.0, None) == "9.00"
    assert table.missed == 1
