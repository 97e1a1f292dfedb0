from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvbudget.device.model import DeviceMemory
from pytest_kvbudget.set_labels import IDLE_FREE_STEP_BYTES, SetLabels
from pytest_kvbudget.units import GIB, MIB

TOTAL_BYTES = 34_208_743_424


def labels(nodes: Mapping[int, int] | None = None) -> SetLabels:
    return SetLabels(lambda: nodes or {})


def idle(*used: int, total: int = TOTAL_BYTES, node: int | None = None) -> tuple[DeviceMemory, ...]:
    return tuple(
        DeviceMemory(device=str(number), total_bytes=total, used_bytes=size, source="test", numa_node=node)
        for number, size in enumerate(used)
    )


def test_equal_cards_make_equal_sets() -> None:
    known = labels()
    assert known.learn(("0", "1"), idle(MIB, MIB)) == known.learn(("2", "3"), idle(MIB, MIB))


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (idle(600 * MIB), "a display holds memory"),
        (idle(MIB, total=TOTAL_BYTES - GIB), "another card"),
        (idle(MIB, MIB), "two cards"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_differs_has_another_label(other: tuple[DeviceMemory, ...], why: str) -> None:
    known = labels()
    assert known.learn(("0",), idle(MIB)) != known.learn(("1",), other), why


@given(st.integers(0, 4 * GIB), st.integers(-2 * IDLE_FREE_STEP_BYTES, 2 * IDLE_FREE_STEP_BYTES))
def test_sets_are_alike_up_to_one_step_wherever_the_step_lies(used: int, more: int) -> None:
    known = labels()
    one, two = known.learn(("0",), idle(used)), known.learn(("1",), idle(max(0, used + more)))
    assert (one == two) == (abs(max(0, used + more) - used) <= IDLE_FREE_STEP_BYTES)


@given(st.lists(st.integers(0, 8).map(lambda step: step * 5 * MIB), min_size=2, max_size=6))
def test_sets_of_one_label_are_within_two_steps_of_each_other(used: list[int]) -> None:
    known = labels()
    by_label: dict[str, list[int]] = {}
    for number, size in enumerate(used):
        by_label.setdefault(known.learn((str(number),), idle(size)), []).append(size)
    assert all(max(sizes) - min(sizes) <= 2 * IDLE_FREE_STEP_BYTES for sizes in by_label.values())


def test_a_set_keeps_its_label_whatever_it_shows_later() -> None:
    known = labels()
    first = known.learn(("0",), idle(MIB))
    assert known.learn(("0",), idle(900 * MIB)) == first
    assert known.known(("0",)) == first


def test_a_look_leaves_nothing_behind() -> None:
    known = labels()
    looked = known.look(("0",), idle(600 * MIB))
    assert known.known(("0",)) is None
    assert known.learn(("0",), idle(MIB)) != looked


def test_sets_that_nobody_can_read_are_never_alike() -> None:
    known = labels()
    assert [known.learn((name,), ()) for name in "01"] == ["devices 0", "devices 1"]


def test_the_same_card_on_the_smaller_node_is_another_set() -> None:
    known = labels({0: 256 * GIB, 1: 128 * GIB, 2: 256 * GIB})
    on = [known.learn((str(node),), idle(MIB, node=node)) for node in range(3)]
    assert on[0] == on[2] != on[1]


def test_a_card_on_an_unknown_node_of_several_is_like_no_other() -> None:
    known = labels({0: 256 * GIB, 1: 256 * GIB})
    assert [known.learn((name,), idle(MIB)) for name in "01"] == ["devices 0", "devices 1"]


def test_on_a_single_node_nobody_needs_to_say_where_a_card_is() -> None:
    known = labels({0: 256 * GIB})
    assert known.learn(("0",), idle(MIB)) == known.learn(("1",), idle(MIB, node=0))
