from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvbudget.engine.client import EngineClient
from pytest_kvbudget.engine.soak import PARTS, Soak, SoakSpec, trend

MIB = 2**20


def test_steady_growth_is_found_with_certainty() -> None:
    # 1 MiB more in every part of six minutes: 10 MiB an hour
    found = trend(0, [1000 * MIB + index * MIB for index in range(PARTS)], 360.0)
    assert found is not None
    assert found.bytes_per_hour == pytest.approx(10 * MIB)
    assert found.plus_minus == pytest.approx(0, abs=1)


def test_no_growth_is_no_growth() -> None:
    found = trend(0, [5 * MIB] * PARTS, 1.0)
    assert found is not None
    assert (found.bytes_per_hour, found.plus_minus) == (0, 0)


def test_noise_widens_the_interval_beyond_the_slope() -> None:
    noisy = [100 * MIB + (index % 2) * 50 * MIB for index in range(PARTS)]
    found = trend(0, noisy, 60.0)
    assert found is not None
    assert found.least < 0 < found.most


def test_a_part_that_was_not_seen_gives_no_trend() -> None:
    assert trend(0, [1, None, *([1] * (PARTS - 2))], 1.0) is None


@given(
    st.lists(st.integers(0, 2**35), min_size=PARTS, max_size=PARTS),
    st.integers(-(2**30), 2**30),
    st.floats(1, 1e5, allow_nan=False),
)
def test_a_constant_on_top_changes_no_trend(peaks: list[int], more: int, part_s: float) -> None:
    one, other = trend(0, peaks, part_s), trend(0, [peak + more for peak in peaks], part_s)
    assert one is not None
    assert other is not None
    assert other.bytes_per_hour == pytest.approx(one.bytes_per_hour, rel=1e-6, abs=1)
    assert one.least <= one.bytes_per_hour <= one.most


@pytest.mark.parametrize(("parts", "part_s"), [(PARTS - 1, 1.0), (PARTS, 0.0)])
def test_refuses_what_is_no_soak(parts: int, part_s: float) -> None:
    with pytest.raises(ValueError, match="expected 10 of a positive length"):
        trend(0, [1] * parts, part_s)


def test_a_soak_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="requests or seconds"):
        Soak(EngineClient("http://127.0.0.1:1"), SoakSpec(), window=10, alive=lambda: True)
