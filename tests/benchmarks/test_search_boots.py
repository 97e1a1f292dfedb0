"""The benchmark runs, and no strategy is ever wrong on its devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.benchmarks import search_boots

if TYPE_CHECKING:
    import pytest


def test_no_strategy_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert search_boots.main(40) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["predict", "step", "bisect"]
    assert [row.split()[5] for row in rows] == ["0", "0", "0"]
