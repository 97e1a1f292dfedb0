"""What a test asks for against what its target is: contradictions that are known before anything starts."""

from __future__ import annotations

from typing import Final

import msgspec
import pytest

from pytest_kvbudget.config import ConfigError, LoadedTarget
from pytest_kvbudget.engine.backends.registry import backend_of
from pytest_kvbudget.plugin.checks import knife_edge_of, ladders_of, shape_changes
from pytest_kvbudget.shape import Shape

_FOREIGN: Final = ("reserved_headroom", "lnc", "kv_cache_memory_bytes")
"""Fields of a shape that not every backend can pass on."""


def contradiction(loaded: LoadedTarget, item: pytest.Item, base: Shape) -> str | None:
    """Why a test cannot be what it asks for, in words; ``None`` where nothing is known against it."""
    return _foreign(loaded, item) or _too_long(item, base)


def _foreign(loaded: LoadedTarget, item: pytest.Item) -> str | None:
    """A mark sets what the target's backend would silently leave out."""
    named = {name: value for name, value in shape_changes(item).items() if name in _FOREIGN and value is not None}
    if not named:
        return None
    target = msgspec.structs.replace(loaded.target, shape=loaded.target.shape.merged(**named))
    origin = f"@pytest.mark.kv_shape on target {loaded.name}:"
    try:
        backend_of(msgspec.structs.replace(loaded, target=target, origin=origin))
    except ConfigError as error:
        return str(error)
    return None


def _too_long(item: pytest.Item, base: Shape) -> str | None:
    """A survival check whose request is longer than a window that the test boots."""
    edge = knife_edge_of(item)
    ladder = next((spec for spec in ladders_of(item) if spec.axis == "max_model_len"), None)
    window = base.max_model_len if ladder is None else ladder.floor
    if edge is None or window is None or _overridden(item):
        return None
    asked = edge.prompt_tokens + (edge.max_tokens or 1)
    if asked <= window:
        return None
    what = "max_model_len" if ladder is None else "the ladder's floor"
    answer = f" and max_tokens={edge.max_tokens:,}" if edge.max_tokens else " and one token of an answer"
    return (
        f"@pytest.mark.knife_edge: prompt_tokens={edge.prompt_tokens:,}{answer} do not fit into a window of "
        f"{window:,} tokens ({what})"
    )


def _overridden(item: pytest.Item) -> bool:
    """A conftest has its own ``kv_shape``, whose window nobody knows before it runs."""
    found = item.session._fixturemanager.getfixturedefs("kv_shape", item)  # noqa: SLF001 - pytest has no other way
    return found is not None and len(found) > 1
