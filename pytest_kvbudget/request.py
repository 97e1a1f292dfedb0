"""Who asks for which boot."""

from __future__ import annotations

from typing import Literal

import msgspec

from pytest_kvbudget.shape import Shape


class BootRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks for which shape."""

    test: str
    shape: Shape
    rung: str | None = None
    number: int = 1
    windows: int | None = None
    """How many full windows the KV cache must hold by the engine's own count; ``None`` asks for nothing."""
    pool: Literal["fixed", "scaled"] = "fixed"
    axis: str = "max_model_len"
    """What the search moves."""
    knob: bool = False
    """It is a knob of a headroom sweep: both sides of its window say something."""
    compiles: bool = False
    """The engine is to compile its programs and end; it never serves."""
    asked: str = ""
    """Digest of what the test asks of a boot: marks and body."""
