"""Flags that a shape or a target renders itself: given once more they would win, and no record would say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pytest_kvbudget.config import ConfigError

SHAPE_FLAGS: Final = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
)
"""Fields of a shape that ``vllm serve`` takes as flags of their names, in the order in which they are rendered."""

_OF_THE_SHAPE: Final = {
    **{name.replace("_", "-"): name for name in SHAPE_FLAGS},
    "enforce-eager": "enforce_eager",
    "no-enforce-eager": "enforce_eager",
}
_RENDERED: Final = {**_OF_THE_SHAPE, "model": "model", "model-tag": "model", "host": "host", "port": "port"}
_SHORT: Final = {"-tp": "tensor-parallel-size"}
_OF_THE_TARGET: Final = frozenset({"host", "port"})


def check_extra_args(arguments: Sequence[str], *, where: str) -> None:
    """Check that further flags of a shape set nothing that the shape or the target sets.

    Raises:
        ConfigError: naming ``where``, the flag and the key to use instead.
    """
    _check(arguments, _RENDERED, where=where, abbreviated=True)


def check_command(command: Sequence[str], *, where: str) -> None:
    """Check that a target's own command sets nothing that the shape or the target sets.

    What stands before the engine's own words is a wrapper's (``numactl``, ``podman exec``), whose flags may have the
    names of the engine's.

    Raises:
        ConfigError: naming ``where``, the flag and the key to use instead.
    """
    own = next((at for at, word in enumerate(command) if word == "serve" or word.endswith("api_server")), None)
    if own is None:
        _check(command[1:], _OF_THE_SHAPE, where=where, abbreviated=False)
    else:
        _check(command[own + 1 :], _RENDERED, where=where, abbreviated=True)


def _check(words: Sequence[str], rendered: dict[str, str], *, where: str, abbreviated: bool) -> None:
    for word in words:
        flag = word.partition("=")[0]
        name = _SHORT.get(flag) or flag.removeprefix("--").replace("_", "-")
        if not word.startswith("-") or (flag not in _SHORT and not flag.startswith("--")) or not name:
            continue
        # argparse takes a flag by its beginning
        full = name if name in rendered else next((each for each in rendered if each.startswith(name)), None)
        if full is None or (full != name and not abbreviated):
            continue
        key = rendered[full]
        owner = "target" if key in _OF_THE_TARGET else "shape"
        spelled = "" if full == name else f", short for --{full},"
        raise ConfigError(
            f"{where}: {flag}{spelled} would override the {owner}'s {key}, and records would name a value that the "
            f"engine does not run with; set {key} of the {owner} instead"
        )
