"""The phases of a boot over all ranks, and between two of them the sizing of the KV pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from pytest_kvbudget.mock.failures import Failure
from pytest_kvbudget.mock.physics import Physics
from pytest_kvbudget.mock.process import Log, gib

_CONSERVING: Final = "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
_FRAMES: Final = ("core", "super", "kv_caches", "configs")
ONE_LINE_SINCE: Final = (0, 28)
"""Release from which size and concurrency are one line."""


class Runs(Protocol):
    """Runs a phase on every rank; see `Executor`."""

    def run(self, method: str, *arguments: int) -> list[int]:
        """See `Executor`."""
        ...


class Cache(Protocol):
    """A compile cache."""

    def has(self, key: str) -> bool:
        """See `CompileCache`."""
        ...

    def fill(self, key: str) -> None:
        """See `CompileCache`."""
        ...


class Boot:
    """One boot. ``blocks`` is the pool once it has run; the window may then be a fitted one."""

    def __init__(self, physics: Physics, log: Log, cache: Cache, executor: Runs) -> None:
        self._physics = physics
        self._log = log
        self._cache = cache
        self._executor = executor
        self.blocks = 0

    def run(self, entering: Callable[[str], None]) -> tuple[float, float]:
        """Run all phases; returns the seconds after weights were loaded, and those of compiling.

        Args:
            entering: is called with the name of each phase that begins.

        Raises:
            Failure: a phase failed.
        """
        physics, began, compiled_s = self._physics, time.monotonic(), 0.0
        for phase, method in physics.phases:
            entering(phase)
            if method == "profile":
                available = self._executor.run(method)
                entering("kv_check")
                self._size_pool(available)
            elif phase == "compile":
                self._compile(method)
                compiled_s = 0.0 if physics.arguments.enforce_eager else physics.pause_s("compile")
            else:
                self._executor.run(method, *((self.blocks,) if method == "kv_alloc" else ()))
            if phase == "weights_load":
                began = time.monotonic()
        return time.monotonic() - began, compiled_s

    def _compile(self, method: str) -> None:
        physics = self._physics
        key = physics.compile_key(self.blocks)
        if physics.neuron:
            physics.cold = not self._cache.has(key)
            self._executor.run(method, int(physics.cold))
        else:
            self._executor.run(method)
        if physics.spec.keeps_cache:
            self._cache.fill(key)
        if physics.compiles_only:
            raise Failure(
                "vllm_neuron.vllm.worker.neuron_worker.CPUCompilationComplete",
                "CPU compilation is complete; no device was used.",
                ("core", "super", "kv_caches", "compile_or_warm"),
            )

    def _size_pool(self, available_bytes: list[int]) -> None:
        """The KV check of ``kv_cache_utils.get_kv_cache_configs``; the rank with the fewest blocks counts."""
        physics = self._physics
        # one block of the pool is never handed out
        usable = [available - physics.block_bytes for available in available_bytes]
        if physics.auto_fit:
            self._auto_fit(min(usable))
        for rank_bytes in usable:
            self._check(rank_bytes)
        self.blocks = min(available_bytes) // physics.block_bytes
        forced = physics.arguments.num_gpu_blocks_override
        if forced is not None:
            self._log.say(
                "kv_cache_utils.py:822",
                f"Overriding num_gpu_blocks={self.blocks} with num_gpu_blocks_override={forced}",
            )
            self.blocks = forced
        concurrency = self.blocks / physics.blocks_for(physics.max_model_len)
        size = f"GPU KV cache size: {int(concurrency * physics.max_model_len):,} tokens"
        most = f"Maximum concurrency for {physics.max_model_len:,} tokens per request: {concurrency:.2f}x"
        release = tuple(int(part) for part in physics.spec.engine_version.split(".")[:2])
        for text in (f"{size}, {most}",) if release >= ONE_LINE_SINCE else (size, most):
            self._log.say("kv_cache_utils.py:2327", text)

    def _check(self, rank_bytes: int) -> None:
        physics = self._physics
        if rank_bytes <= 0:
            raise Failure(
                "ValueError",
                "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when"
                " initializing the engine (this flag also controls CPU memory reservation on the CPU"
                " backend, despite its name)."
                f" {_CONSERVING}",
                (*_FRAMES, "get_configs", "check"),
            )
        need = physics.need_bytes(physics.max_model_len)
        if need > rank_bytes:
            estimate = physics.said_len(rank_bytes)
            advice = f"Based on the available memory, the estimated maximum model length is {estimate}. "
            raise Failure(
                "ValueError",
                f"To serve at least one request with the model's max seq len ({physics.max_model_len}),"
                f" ({gib(need)} GiB KV cache is needed, which is larger than the available KV cache memory"
                f" ({gib(rank_bytes)} GiB). {advice if estimate else ''}Try increasing `gpu_memory_utilization`"
                " (which also controls CPU memory on the CPU backend) or decreasing `max_model_len` when"
                f" initializing the engine. {_CONSERVING}",
                (*_FRAMES, "get_configs", "check"),
            )

    def _auto_fit(self, usable_bytes: int) -> None:
        physics = self._physics
        fitted = physics.estimated_len(usable_bytes)
        if fitted <= 0:
            raise Failure(
                "ValueError",
                "Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token. Try"
                " increasing `gpu_memory_utilization`.",
                (*_FRAMES, "auto_fit"),
            )
        memory = f"available KV cache memory ({gib(usable_bytes)} GiB GPU)"
        if fitted >= physics.max_model_len:
            text = f"full model context length {physics.max_model_len} fits in {memory}"
        else:
            text = f"reduced from {physics.max_model_len} to {fitted} to fit in {memory}"
        self._log.say("kv_cache_utils.py:2477", f"Auto-fit max_model_len: {text}")
        physics.max_model_len = fitted
