"""Wording that several engines share: allocation failures of torch, the frames that tell where, deaths by the host."""

from __future__ import annotations

import re
from typing import Final

from pytest_kvbudget.ledger.grammar.model import Failure, Row, Table, Tier
from pytest_kvbudget.verdict import Phase

_OOM = Failure(failure_class="oom")

TORCH: Final = (
    Row(
        pattern=r"\b\w+ out of memory\. Tried to allocate {tried_alloc_bytes:size}",
        scope="rank",
        failure=_OOM,
        wraps=True,
        needle=" out of memory. ",
        known=True,
        parts=(
            r"(?:GPU|NPU|XPU|MUSA) {device:count} has a total capacity of {total_bytes:size}",
            r"of which {free_bytes:size} is free",
            r"\bthis process has {process_in_use_bytes:size} memory in use",
            r"[Oo]f the allocated memory {torch_allocated_bytes:size} is allocated by PyTorch",
            r"with {private_pool_bytes:size} allocated in private pools",
            r"\band {reserved_unallocated_bytes:size} is reserved by PyTorch but unallocated",
            r"\((?:GPU|NPU|XPU|MUSA) {device:count}; {total_bytes:size} total capacity",
            r"; {torch_allocated_bytes:size} already allocated",
            r"; {free_bytes:size} free",
            r"; {torch_reserved_bytes:size} reserved in total by PyTorch",
        ),
    ),
    Row(
        pattern=r"expandable_segments: memory mapping failed with OOM on device {device:count} "
        r"while trying to map {tried_alloc_bytes:bytes} bytes",
        scope="rank",
        failure=Failure(failure_class="oom", soft=True),
        wraps=True,
        needle="memory mapping failed with OOM",
        parts=(r"free: {free_bytes:bytes}\b", r"total: {total_bytes:bytes}\b"),
    ),
    Row(
        pattern=r"(?:CUDA|HIP|hip|cuda) ?(?:error|Error|runtime error)?:? ?"
        r"(?:out of memory(?! occ)|hipErrorOutOfMemory)",
        scope="rank",
        needle=" out of memory",
        failure=_OOM,
        known=False,
    ),
    Row(pattern=r"\bhipErrorOutOfMemory\b", needle="ErrorOutOfMemory", scope="rank", failure=_OOM, known=False),
    Row(pattern=r"\bcudaErrorMemoryAllocation\b", needle="ErrorMemoryAlloc", scope="rank", failure=_OOM, known=False),
    Row(
        pattern=r"(?:BLAS|DNN)_STATUS_ALLOC_FAILED",
        needle="_STATUS_ALLOC_FAILED",
        scope="rank",
        failure=_OOM,
        known=False,
    ),
    Row(
        pattern=r"(?:Cuda|CUDA|Hip|HIP) failure (?:\d+ )?'out of memory'",
        needle="'out of memory'",
        scope="rank",
        failure=_OOM,
        known=False,
    ),
)

HOST: Final = (
    Row(
        pattern=r"was running was {host_used_bytes:size} / {host_total_bytes:size} \(",
        needle="was running was ",
        failure=Failure(failure_class="host_oom_killed"),
    ),
    Row(
        pattern=r"A worker died or was killed while executing a task by an unexpected system error",
        known=False,
        failure=Failure(failure_class="engine_killed", tier=Tier.DEATH),
    ),
    Row(
        pattern=r"The actor is dead because its worker process has died",
        known=False,
        failure=Failure(failure_class="engine_killed", tier=Tier.DEATH),
    ),
    Row(
        pattern=r"hipHost(?:Malloc|Register)\b.*out of memory|out of memory.*hipHost(?:Malloc|Register)",
        needle="hipHost",
        scope="rank",
        failure=Failure(failure_class="host_memory_limit"),
        known=False,
    ),
    Row(
        pattern=r"^OSError: \[Errno 24\] Too many open files",
        needle="[Errno 24] Too many",
        scope="rank",
        known=False,
        failure=Failure(failure_class="host_memory_limit", tier=Tier.KILLED, soft=True),
    ),
    Row(
        pattern=r"\[Errno 12\] Cannot allocate memory|DefaultCPUAllocator: (?:can't|not enough) ",
        needle="llocat",
        known=False,
        failure=Failure(failure_class="host_memory_short"),
    ),
    Row(
        pattern=r"killed due to the node running low on memory|ray\.exceptions\.OutOfMemoryError",
        needle="emory",
        failure=Failure(failure_class="host_oom_killed"),
    ),
    Row(
        pattern=r"Out of memory: Killed process \d+ |oom-kill:|Memory cgroup out of memory: Killed process",
        needle="oom-kill",
        known=False,
        failure=Failure(failure_class="host_oom_killed"),
    ),
    Row(pattern=r"Killed process \d+", known=False, failure=Failure(failure_class="host_oom_killed")),
    *(
        Row(
            pattern=pattern,
            needle=needle,
            known=False,
            failure=Failure(failure_class="host_oom_killed", tier=Tier.KILLED),
        )
        for pattern, needle in (
            (r"\bexited with code 137\b", "exited with code 137"),
            (r"\bOOMKilled\b(?!\"?: ?false)", "OOMKilled"),
            (r"killed by the OOM killer", ""),
            (r"Failed with result 'oom-kill'", ""),
            (r"Main process exited, code=killed, status=9/KILL", ""),
        )
    ),
    *(
        Row(
            pattern=pattern, needle=needle, known=False, failure=Failure(failure_class="engine_killed", tier=Tier.DEATH)
        )
        for pattern, needle in (
            (r"^\s*Segmentation fault|core dumped", "core dumped"),
            (r"^Fatal Python error: (?:Segmentation fault|Aborted|Bus error)", "Fatal Python error: "),
            (r"!+ Segfault encountered !+", "Segfault encountered"),
            (r"Main process exited, code=(?:dumped|killed), status=(?!9/|15/)\d+/", "Main process exited, code="),
            (r"\bexited with code 13[49]\b", "exited with code 13"),
        )
    ),
)

SIMULATED: Final = Row(pattern=r"pytest-kvbudget simulated device", event="simulated", known=False)
"""What this project's own simulated engine says first; no figure after it was measured."""

TABLE: Final = Table(family=None, rows=(*TORCH, *HOST, SIMULATED))

FRAME: Final = re.compile(r'^\s*File "[^"]*", line \d+, in (?P<function>[\w.<>]+)')
"""One frame of a Python traceback."""

FRAMES: Final[dict[str, Phase]] = {
    "init_device": Phase.WORKER_INIT,
    "init_worker_distributed_environment": Phase.WORKER_INIT,
    "load_model": Phase.WEIGHTS_LOAD,
    "load_weights": Phase.WEIGHTS_LOAD,
    "profile_run": Phase.PROFILE,
    "determine_available_memory": Phase.PROFILE,
    "determine_num_available_blocks": Phase.PROFILE,
    "profile_cudagraph_memory": Phase.PROFILE,
    "initialize_kv_cache": Phase.KV_ALLOC,
    "initialize_kv_cache_tensors": Phase.KV_ALLOC,
    "_allocate_kv_cache": Phase.KV_ALLOC,
    "_allocate_kv_cache_tensors": Phase.KV_ALLOC,
    "initialize_from_config": Phase.KV_ALLOC,
    "initialize_cache": Phase.KV_ALLOC,
    "init_memory_pool": Phase.KV_ALLOC,
    "capture_model": Phase.GRAPH_CAPTURE,
    "_capture_cudagraphs": Phase.GRAPH_CAPTURE,
    "capture_end": Phase.GRAPH_CAPTURE,
    "init_cuda_graphs": Phase.GRAPH_CAPTURE,
    "init_device_graphs": Phase.GRAPH_CAPTURE,
    "_dummy_sampler_run": Phase.WARMUP,
    "_dummy_pooler_run": Phase.WARMUP,
    "kernel_warmup": Phase.WARMUP,
    "_warm_up_model": Phase.WARMUP,
    "compile_or_warm_up_model": Phase.WARMUP,
    "execute_model": Phase.REQUEST,
    "sample_tokens": Phase.REQUEST,
    "forward_batch_generation": Phase.REQUEST,
}
"""Functions of the engines that run in one phase only. The outermost frame counts that is no weak one."""

WAITING_FRAMES: Final = frozenset({"make_async_mp_client", "launch_core_engines", "wait_for_engine_startup"})
"""Functions in which the server waits for the engine: the engine's own phase counts, at least ``worker_init``."""

WEAK_FRAMES: Final = frozenset(
    {"compile_or_warm_up_model", "determine_available_memory", "initialize_cache", "_warm_up_model"}
)
"""Frames around others of these; a frame inside them counts more."""
