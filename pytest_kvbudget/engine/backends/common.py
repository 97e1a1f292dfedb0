"""What backends share: flags from a shape, device slots, a command's environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pytest_kvbudget.config import LoadedTarget, engine_environment
from pytest_kvbudget.engine.model import Command
from pytest_kvbudget.shape import Shape

_FLAGS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
)


def vllm_flags(shape: Shape) -> tuple[str, ...]:
    """The flags of ``vllm serve`` for a shape, only what was asked for, in a fixed order; ``extra_args`` last."""
    flags: list[str] = []
    for name in _FLAGS:
        value = getattr(shape, name)
        if value is not None:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    if shape.enforce_eager:
        flags.append("--enforce-eager")
    return (*flags, *shape.extra_args)


def slots_of(devices: Iterable[int | str], width: int) -> tuple[tuple[str, ...], ...]:
    """Cut a target's devices into sets of ``width``, in order; a rest that makes no whole set is not used."""
    names = [str(device) for device in devices]
    return tuple(tuple(names[start : start + width]) for start in range(0, len(names) - width + 1, width))


def build_command(
    loaded: LoadedTarget, shape: Shape, *, argv: Sequence[str], added: Mapping[str, str], port: int
) -> Command:
    """Put a command together: environment of this process, then ``added``, then target's and shape's."""
    own = {**added, **loaded.environment, **shape.env}
    return Command(
        argv=tuple(argv),
        env={**engine_environment(loaded, shape), **own},
        env_added=own,
        cwd=str(Path(loaded.folder).absolute()),
        host=loaded.target.host,
        port=port,
    )
