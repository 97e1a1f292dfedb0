"""What is asked of an engine."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

import msgspec

from pytest_kvbudget.decoding import KeyedError, decoded
from pytest_kvbudget.redact import command_without_secrets, without_secrets
from pytest_kvbudget.units import format_size

MemoryBytes = Annotated[
    int, msgspec.Meta(ge=0, extra={"kvbudget": "memory"}, description="bytes, or text: '76 MiB'; never a bare 76")
]
"""What a device or a pool has or keeps: see `pytest_kvbudget.units.parse_memory`."""
SizeBytes = Annotated[int, msgspec.Meta(ge=0, extra={"kvbudget": "size"}, description="bytes, or text: '76 MiB'")]
"""An integer of bytes; in configuration and markers also text such as ``"31.86 GiB"``."""

_Count = Annotated[int, msgspec.Meta(ge=1)]


class ShapeError(msgspec.ValidationError):
    """A shape cannot be so; the message names the field, what was found and what was expected."""


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What is asked of an engine. ``None`` leaves a value to the engine's own default.

    Sizes are bytes and, like the engine's own flags, per rank.
    """

    model: str | None = None
    max_model_len: _Count | None = None
    """Tokens of one window."""
    max_num_seqs: _Count | None = None
    max_num_batched_tokens: _Count | None = None
    kv_cache_dtype: str | None = None
    tensor_parallel_size: _Count | None = None
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    kv_cache_memory_bytes: MemoryBytes | None = None
    """The pinned KV pool, bytes per rank."""
    reserved_headroom: MemoryBytes | None = None
    lnc: _Count | None = None
    """Logical NeuronCore size: physical cores behind one logical core."""
    enforce_eager: bool = False
    env: dict[str, str] = {}
    """Environment added for the engine; wins over the target's."""
    extra_args: tuple[str, ...] = ()
    """Further flags, passed as they are, last."""

    def merged(self, **changes: Any) -> Shape:  # noqa: ANN401 - one value per field, checked below
        """This shape with some fields changed; ``env`` is merged, ``extra_args`` is replaced.

        Raises:
            ShapeError: for an unknown field, a wrong type or an impossible value, naming the field.
        """
        __tracebackhide__ = True
        merged = {**msgspec.to_builtins(self), **changes}
        if isinstance(env := changes.get("env", {}), dict):
            merged["env"] = {**self.env, **env}
        try:
            return msgspec.convert(merged, Shape)
        except msgspec.ValidationError:
            pass  # sizes written as text are decoded below, and everything else gets its message there
        try:
            return decoded(merged, Shape)
        except KeyedError as problem:
            raise ShapeError(f"{problem.key}: {problem}" if problem.key else str(problem)) from None

    def key(self) -> str:
        """A stable digest: equal for equal shapes, on every machine and in every process."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:16]

    def redacted(self) -> Shape:
        """The shape with secrets removed from its environment and its further flags, as records keep it."""
        return msgspec.structs.replace(
            self, env=without_secrets(self.env), extra_args=command_without_secrets(self.extra_args)
        )

    def __repr__(self) -> str:
        return f"Shape({self.describe()})"

    def describe(self) -> str:
        """The shape in one line, only what was asked for: ``max_model_len=4096 kv_cache_memory_bytes=50.00 MiB``.

        Secrets are removed: it is what people and logs get to see.
        """
        parts = []
        for name, value in msgspec.to_builtins(self.redacted()).items():
            if name == "env":
                parts += [f"{variable}={text}" for variable, text in sorted(value.items())]
            elif name == "extra_args":
                parts += value
            elif name in {"kv_cache_memory_bytes", "reserved_headroom"}:
                parts.append(f"{name}={format_size(value)}")
            else:
                parts.append(f"{name}={value}")
        return " ".join(parts)
