from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvbudget.report.placing import END, GAP, LETTER, Place, on_the_left, places, shortened


@pytest.mark.parametrize(
    ("at", "lines", "left"),
    [
        (90.0, [], True),  # towards the middle
        (10.0, [], False),
        (60.0, [55.0], False),  # the other side of the line that the label would cross
        (85.0, [80.0], True),  # no room on the other side: masked by its halo
    ],
)
def test_a_label_keeps_clear_of_the_boundary(at: float, lines: list[float], left: bool) -> None:
    assert on_the_left(at, 20.0, lines) is left


def test_two_neighbours_on_the_right_hand_side() -> None:
    """The label of the line further out stands above the end of the other line."""
    assert places([82.0, 85.0], [27, 13]) == [Place(1, True), Place(0, True)]
    assert places([20.0, 23.0], [27, 13]) == [Place(0, False), Place(1, False)]


def test_a_line_is_crossed_rather_than_a_text_cut_off_on_a_narrow_page() -> None:
    """Either label could keep clear of the other's line on the side where a telephone has no room for it."""
    first, second = places([39.0, 54.0], [23, 24])
    assert not first.left  # 23 letters on a telephone: 45.5 % of the width
    assert second.left  # 24 letters: 47.5 %


MARKS = st.lists(st.floats(9, 94), min_size=1, max_size=3, unique=True)


def spans(
    ats: list[float], letters: list[int], chosen: list[Place], letter: float = LETTER
) -> list[tuple[float, float]]:
    return [
        (at - length * letter, at) if place.left else (at, at + length * letter)
        for place, at, length in zip(chosen, ats, letters, strict=True)
    ]


@given(ats=MARKS, letters=st.lists(st.integers(1, 35), min_size=3))
def test_no_label_is_cut_off_on_a_wide_page(ats: list[float], letters: list[int]) -> None:
    letters = letters[: len(ats)]
    chosen = places(ats, letters)
    assert sorted(place.level for place in chosen) == list(range(len(ats)))
    assert all(low >= 0 and high <= END for low, high in spans(ats, letters, chosen))


@given(ats=MARKS, letters=st.lists(st.integers(1, 12), min_size=3))
def test_no_label_crosses_a_line_on_a_wide_page_where_all_fit_a_narrow_one(
    ats: list[float], letters: list[int]
) -> None:
    letters = letters[: len(ats)]
    chosen = places(ats, letters)
    assert all(low >= 0 and high <= END for low, high in spans(ats, letters, chosen, 3 * LETTER))
    for place, (low, high) in zip(chosen, spans(ats, letters, chosen), strict=True):
        above = [ats[index] for index, other in enumerate(chosen) if other.level < place.level]
        assert not any(low < line < high for line in above)


@given(text=st.text("abc ", max_size=200), at=st.floats(0, 100), before=st.integers(0, 30))
def test_a_label_is_cut_only_where_it_would_run_past_the_plot(text: str, at: float, before: int) -> None:
    cut = shortened(text, at, before)
    room = max(at, END - at) - GAP
    if cut == text:
        assert not text or LETTER * (before + len(text)) <= room
    else:
        assert LETTER * (before + len(text)) > room - LETTER
        assert not cut or (cut.endswith("…") and LETTER * (before + len(cut)) <= room)
        assert text.startswith(cut.removesuffix("…"))


def test_no_line_needs_no_place() -> None:
    assert places([], []) == []
