"""Whether somebody's ``ladder`` mark was meant to be ours, misspelt or positional. Loaded only for marks in doubt."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Final

import pytest

KEYWORDS: Final = ("axis", "start", "floor", "quantum", "strategy", "pool", "windows", "confirm", "first", "verify")
AXES: Final = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
)
NEAR: Final = 0.75
"""Similarity from which a word is taken for a misspelling (`difflib`): ``axes`` for ``axis``, ``window``."""
LEAST_WINDOW: Final = 1024
"""Whole numbers from here on are tokens or bytes: no level or step of somebody else's ladder is that large."""


def meant_for_us(mark: pytest.Mark) -> bool:
    """Whether keywords or values of a ``ladder`` mark are ours, or almost."""
    values = (*mark.args, *mark.kwargs.values())
    return any(_near(name, KEYWORDS) for name in mark.kwargs) or any(map(_value_of_ours, values))


def _value_of_ours(value: object) -> bool:
    if isinstance(value, str):
        return _near(value, AXES)
    return isinstance(value, int) and value >= LEAST_WINDOW


def _near(word: str, known: tuple[str, ...]) -> bool:
    return bool(get_close_matches(word, known, 1, NEAR))
