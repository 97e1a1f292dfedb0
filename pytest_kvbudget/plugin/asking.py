"""What a test asks of a boot, as a digest: its marks, its code and all that it uses, and the fixtures under it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Final

import pytest

from pytest_kvbudget.plugin import MARKERS, SEARCHES
from pytest_kvbudget.plugin.sources import dependencies, is_foreign

_JUDGING: Final = frozenset(MARKERS) - frozenset(SEARCHES) - {"kv_shape"}
"""Marks that decide about a boot. A search's own mark only says which boots are wanted, and the shape counts itself."""
_OURS: Final = "pytest_kvbudget"
_CODE: Final = pytest.StashKey[list[str] | None]()


def digest(item: pytest.Function, *extra: object) -> str | None:
    """Equal for two runs of a test that ask the same of a boot; ``None`` where its code cannot be read.

    Args:
        item: the test.
        extra: what else a verdict depends on, as text or numbers.
    """
    marks = sorted(
        f"{mark.name} {mark.args} {sorted(mark.kwargs.items())}"
        for mark in item.iter_markers()
        if mark.name in _JUDGING
    )
    remember(item)
    code = item.stash[_CODE]
    if code is None:
        return None
    text = "\0".join([*marks, *map(repr, extra), *code])
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def remember(item: pytest.Function) -> None:
    """Look at what a test uses, once: before anything runs, as what it uses may change while tests run."""
    if _CODE in item.stash:
        return
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    try:
        item.stash[_CODE] = list(dependencies(_functions(item), parameters))
    except Exception:  # noqa: BLE001 - what people's objects do when they are looked at costs no run: it is not resumed
        item.stash[_CODE] = None


def own_shape(item: pytest.Function) -> bool:
    """Nobody overrides the ``kv_shape`` fixture for this test: its shape is known before it runs."""
    found = item._fixtureinfo.name2fixturedefs.get("kv_shape", ())  # noqa: SLF001 - the closure that pytest made
    return all(getattr(definition.func, "__module__", "").partition(".")[0] == _OURS for definition in found)


def _functions(item: pytest.Function) -> Iterable[Callable[..., object]]:
    yield item.function
    if item.cls is not None:
        yield item.cls
    for definitions in item._fixtureinfo.name2fixturedefs.values():  # noqa: SLF001 - as above
        yield from (definition.func for definition in definitions if not is_foreign(definition.func))
