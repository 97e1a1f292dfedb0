"""Tests that want the same engine side by side, so that they share a boot."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest


def arrange(items: list[pytest.Item], ours: Sequence[pytest.Item]) -> None:
    """Move ``ours`` within their module, in place: equal shapes become neighbours, in order of first appearance.

    Only the places of ``ours`` are used, every other item keeps its own. The order follows from marks alone, so it is
    the same in every xdist worker.
    """
    places: dict[object, list[int]] = {}
    chosen = set(ours)
    for index, item in enumerate(items):
        if item in chosen:
            places.setdefault(item.getparent(pytest.Module), []).append(index)
    for indexes in places.values():
        groups: dict[Hashable, list[pytest.Item]] = {}
        for index in indexes:
            groups.setdefault(_key(items[index]), []).append(items[index])
        moved = [item for group in groups.values() for item in group]
        for index, item in zip(indexes, moved, strict=True):
            items[index] = item


def _key(item: pytest.Item) -> Hashable:
    """What decides the shape, as written; closest marks win as they do in the shape itself."""
    fields: dict[str, object] = {}
    for mark in reversed(list(item.iter_markers("kv_shape"))):
        fields.update(mark.kwargs)
    return repr(sorted(fields.items()))
