"""The command line of ``vllm serve``, as far as the simulated engine knows it, refused in vLLM's words."""

from __future__ import annotations

import os
from typing import Any, Final, NoReturn

import msgspec

USAGE: Final = """usage: vllm [-h] [-v]
            {chat,complete,serve,launch,bench,collect-env,download-kernels,preload,run-batch,snapshot}
            ..."""
KV_DTYPES: Final = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "int8")


class Arguments(msgspec.Struct, kw_only=True):
    """What was asked for. Defaults are vLLM 0.32's; ``None`` is decided by the model or the device."""

    model: str
    max_model_len: int | None = None
    """Tokens; -1 fits it to the memory."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int | None = None
    enforce_eager: bool = False
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None
    additional_config: str = "{}"
    host: str = ""
    port: int = 8000
    served_model_name: str | None = None
    expert_precise_memory: bool = False
    expert_offload_mem: float | None = None
    """Host memory for experts, GiB over all ranks."""
    given: dict[str, Any] = {}
    """Everything that was given, by field name, as vLLM prints its non-default arguments."""

    @property
    def served_name(self) -> str:
        """Name under which the model is served."""
        return self.served_model_name or self.model


class UsageError(Exception):
    """A command line that the engine refuses; the message is argparse's last line."""


def _integer(text: str) -> int:
    """An integer as vLLM reads sizes: ``4096``, ``50M`` (2^20), ``32k`` (10^3), ``auto``."""
    if text == "auto":
        return -1
    factor = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    if text[-1:] in factor:
        return int(float(text[:-1]) * factor[text[-1]])
    return int(text)


def _kv_dtype(text: str) -> str:
    if text not in KV_DTYPES:
        raise UsageError(
            f"argument --kv-cache-dtype: invalid choice: {text!r} (choose from {', '.join(map(repr, KV_DTYPES))})"
        )
    return text


_VALUES: Final = {
    "max-model-len": _integer,
    "max-num-seqs": _integer,
    "max-num-batched-tokens": _integer,
    "gpu-memory-utilization": float,
    "kv-cache-memory-bytes": _integer,
    "kv-cache-dtype": _kv_dtype,
    "tensor-parallel-size": int,
    "block-size": int,
    "num-gpu-blocks-override": int,
    "additional-config": str,
    "hf-overrides": str,
    "optimization-level": int,
    "host": str,
    "port": int,
    "served-model-name": str,
    "dtype": str,
    "load-format": str,
    "quantization": str,
    "tokenizer": str,
    "seed": int,
}
_SWITCHES: Final = {
    "enforce-eager",
    "trust-remote-code",
    "enable-prefix-caching",
    "no-enable-prefix-caching",
    "enable-chunked-prefill",
    "no-disable-hybrid-kv-cache-manager",
    "disable-log-stats",
}
_FORK_VALUES: Final = {"expert-offload-mem": float, "expert-resident-layers": str}
_FORK_SWITCHES: Final = {"enable-expert-offload", "expert-precise-memory", "expert-direct-load"}
_SHORT: Final = {"-tp": "tensor-parallel-size", "-q": "quantization"}


def parse(argv: list[str], *, fork: bool) -> Arguments:
    """Read ``serve MODEL --flag value ...``.

    Args:
        argv: arguments after the program's name.
        fork: the RDNA4 fork's flags exist.

    Raises:
        UsageError: as argparse would end, exit status 2.
    """
    if argv[:1] != ["serve"]:
        raise UsageError(f"argument subparser: invalid choice: {argv[0] if argv else ''!r} (choose from 'serve')")
    values = {**_VALUES, **(_FORK_VALUES if fork else {})}
    switches = _SWITCHES | (_FORK_SWITCHES if fork else set())
    given: dict[str, Any] = {}
    positional: list[str] = []
    unknown: list[str] = []
    rest = list(argv[1:])
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            (unknown or positional).append(word)
            continue
        flag, equals, value = word.partition("=")
        name = _SHORT.get(flag, flag.removeprefix("--").replace("_", "-"))
        if name in switches and not equals:
            given[name.replace("-", "_")] = True
        elif name in values:
            if not equals:
                if not rest:
                    raise UsageError(f"argument --{name}: expected one argument")
                value = rest.pop(0)
            given[name.replace("-", "_")] = _read(name, values[name], value)
        else:
            unknown.append(word)
    unknown += positional[1:]
    if unknown:
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)}")
    model = positional[0] if positional else "Qwen/Qwen3-0.6B"
    known = {name: value for name, value in given.items() if name in Arguments.__struct_fields__}
    return Arguments(model=model, given=given, **known)


def _read(name: str, kind: Any, text: str) -> Any:  # noqa: ANN401 - one type per flag
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"argument --{name}: invalid {kind.__name__.strip('_')} value: {text!r}") from None


def refuse(error: UsageError) -> NoReturn:
    """End as argparse does."""
    os.write(2, f"{USAGE}\nvllm: error: {error}\n".encode("utf-8", "surrogateescape"))
    os._exit(2)


def looks_like_path(model: str) -> bool:
    """Whether a model's name can only be a folder."""
    return model.startswith(("/", ".", "~"))
