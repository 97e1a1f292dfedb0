"""Wording that several engines share: allocation failures of torch, the frames that tell where, deaths by the host."""

from __future__ import annotations

import re
from typing import Final

from pytest_kvbudget.ledger.grammar.model import Failure, Row, Table, Tier
from pytest_kvbudget.verdict import Phase

_OOM = Failure(failure_class="oom")

_TORCH_PARTS: Final = (
    r"(?:GPU|NPU|XPU|MUSA) {device:count} has a total capaci?ty of {total_bytes:size}",
    r"\. (?:GPU|NPU|XPU|MUSA) {device:count} has a",
    r"of which {free_bytes:size} is free",
    r"\bthis process has {process_in_use_bytes:size} memory in use",
    # in a container a process does not know its own number, and is the only one that it sees
    r"is free\. Process \d+ has {process_in_use_bytes:size} memory in use\. Of the allocated",
    r"[Oo]f the allocated memory {torch_allocated_bytes:size} is allocated by PyTorch",
    r"with {private_pool_bytes:size} allocated in private pools",
    r"\band {reserved_unallocated_bytes:size} is reserved by PyTorch but unallocated",
    r"\((?:GPU|NPU|XPU|MUSA) {device:count}; {total_bytes:size} total capacity",
    r"; {torch_allocated_bytes:size} already allocated",
    r"; {free_bytes:size} free",
    r"; {torch_reserved_bytes:size} (?:reserved in total by PyTorch|cached\))",
)

TORCH: Final = (
    Row(
        pattern=r"\b\w+ out of memory\. Tried to allocate {tried_alloc_bytes:size}",
        scope="rank",
        failure=_OOM,
        wraps=True,
        needle=" out of memory. ",
        known=True,
        parts=_TORCH_PARTS,
    ),
    Row(  # a terminal broke its message before it said anything
        pattern=r"(?<!exceptions\.)\bOutOfMemoryError(?::(?: \w+)?(?: ou?t?(?: o?f?(?: m\w*\.?)?)?)?)?$",
        scope="rank",
        failure=_OOM,
        wraps=True,
        needle="OutOfMemoryError",
        parts=(r"Tried to allocate {tried_alloc_bytes:size}", *_TORCH_PARTS),
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
        pattern=r"(?:CUDA|HIP|ROCm|MUSA|hip|cuda)\]? ?(?:error|Error|runtime error|driver error)?:? ?"
        r"(?:out of memory(?! occ)|hipErrorOutOfMemory)",
        scope="rank",
        needle=" out of memory",
        failure=_OOM,
        known=False,
    ),
    Row(  # torch says so where it cannot ask for the figures of a failed allocation
        pattern=r"NVML_SUCCESS == .* ?INTERNAL ASSERT FAILED",
        needle="NVML_SUCCESS == ",
        scope="rank",
        failure=_OOM,
        known=False,
    ),
    Row(
        pattern=r"\bCUDA_ERROR_OUT_OF_MEMORY\b",
        needle="ERROR_OUT_OF_MEMORY",
        scope="rank",
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
        pattern=r"\b(?:UR_RESULT|PI)_ERROR_OUT_OF_(?:DEVICE_MEMORY|HOST_MEMORY|RESOURCES)\b",
        needle="_ERROR_OUT_OF_",
        scope="rank",
        failure=_OOM,
        known=False,
    ),
    Row(
        pattern=r"RESOURCE_EXHAUSTED: .*Attempting to (?:allocate|reserve) {tried_alloc_bytes:xla}\b",
        needle="RESOURCE_EXHAUSTED: ",
        scope="rank",
        failure=_OOM,
        parts=(r"There are {free_bytes:xla} free",),
        wraps=True,
    ),
    Row(
        pattern=r"Ran out of memory in memory space hbm",
        scope="rank",
        failure=Failure(failure_class="compile_hbm_exceeded", phase=Phase.COMPILE),
        parts=(r"Used {peak_hbm_bytes:xla} of", r"of {hbm_limit_bytes:xla} hbm"),
        wraps=True,
    ),
    Row(
        pattern=r"RESOURCE_EXHAUSTED: .*[Hh]bm usage.* exceeding available bytes: {hbm_limit_bytes:xla}",
        needle="exceeding available bytes: ",
        scope="rank",
        failure=Failure(failure_class="compile_hbm_exceeded", phase=Phase.COMPILE),
    ),
    Row(
        pattern=r"Ran out of memory in memory space [vsc]mem",
        needle="Ran out of memory in memory space",
        scope="rank",
        failure=Failure(failure_class="compile_failed", phase=Phase.COMPILE),
    ),
    Row(
        pattern=r"Failed to allocate memory for \S+ with size {tried_alloc_bytes:bytes} "
        r"and alignment \d+ in AlignedAlloc",
        needle="Failed to allocate memory for ",
        scope="rank",
        failure=Failure(failure_class="workspace_locked"),
        releases="FlashInfer: its workspace has a fixed size",
    ),
    Row(
        pattern=r"(?:Cuda|CUDA|Hip|HIP) (?:failure|error)\b[^']{0,200}'out of memory'",
        needle="'out of memory'",
        scope="rank",
        failure=_OOM,
        known=False,
    ),
)

SHELLS_WORD: Final = "Killed"
"""What a shell says of a process that somebody ended by force, and some releases end themselves so."""

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
        pattern=r"The actor (?:is dead because its worker process has died|died unexpectedly before finishing)",
        needle="The actor ",
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
        pattern=r"Watchdog caught collective operation timeout",
        failure=Failure(failure_class="engine_hung", tier=Tier.KILLED),
    ),
    *(
        Row(
            pattern=pattern,
            needle=needle,
            scope="rank",
            flags=("shared_memory",),
            failure=Failure(failure_class="host_memory_limit"),
        )
        for pattern, needle in (
            (r"Error while (?:creating|attaching to) shared memory segment .*No space left on device", "shared memory"),
            (r"Error while creating shared memory segment /dev/shm/nccl-\S+ \(size \d+\)$", "shared memory"),
            (r"posix_fallocate failed ?: No space left on device", "posix_fallocate"),
            (r"insufficient shared memory \(shm\)", "shared memory"),
            (r"Insufficient space in /dev/shm", ""),
            (r"\[Errno 28\] No space left on device: '/?(?:dev/shm|psm_|sem\.|torch_)", "No space left on device"),
            (
                r"unable to (?:write to|mmap|allocate shared memory)\b.*(?:torch_|shm).*(?:No space|Cannot alloc)",
                "unable to ",
            ),
        )
    ),
    *(
        Row(pattern=pattern, needle=needle, known=False, failure=Failure(failure_class="disk_full"))
        for pattern, needle in (
            (r"\[Errno 28\] No space left on device", "No space left on device"),
            (r"No space left on device \(os error 28\)", "No space left on device"),
            (r"\[Errno 122\] Disk quota exceeded", "Disk quota exceeded"),
        )
    ),
    Row(
        pattern=r"^OSError: \[Errno 24\] Too many open files",
        needle="[Errno 24] Too many",
        scope="rank",
        known=False,
        failure=Failure(failure_class="host_memory_limit", tier=Tier.KILLED, soft=True),
    ),
    Row(
        pattern=r"DefaultCPUAllocator: (?:can't|not enough) ",
        needle="DefaultCPUAllocator: ",
        failure=Failure(failure_class="host_memory_short"),
        parts=(r"tried to allocate {tried_alloc_bytes:bytes} bytes",),
    ),
    Row(
        pattern=r"\[Errno 12\] Cannot allocate memory",
        known=False,
        failure=Failure(failure_class="host_memory_short"),
    ),
    Row(
        pattern=r"^MemoryError\b",
        needle="MemoryError",
        known=False,
        failure=Failure(failure_class="host_memory_short"),
    ),
    Row(pattern=r"std::bad_alloc", known=False, failure=Failure(failure_class="host_memory_short")),
    Row(
        pattern=r"killed due to the node running low on memory|ray\.exceptions\.OutOfMemoryError"
        r"|[1-9]\d* Workers \(tasks / actors\) killed due to memory pressure",
        needle="emory",
        failure=Failure(failure_class="host_oom_killed"),
    ),
    Row(
        pattern=r"Out of memory: Killed process \d+ |oom-kill:|Memory cgroup out of memory: Killed process",
        needle="oom-kill",
        known=False,
        failure=Failure(failure_class="host_oom_killed"),
    ),
    Row(
        pattern=r"Killed process \d+ \((?:python|pt_main|VLLM|vllm|sglang|ray|llama|ollama|neuronx?-cc|walrus)",
        needle="Killed process ",
        failure=Failure(failure_class="host_oom_killed"),
    ),
    Row(pattern=r"Killed process \d+", known=False, failure=Failure(failure_class="host_oom_killed")),
    Row(
        pattern=r"More than \d+% of the memory on node \S+ is used "
        r"\({host_used_bytes:gib_bare} / {host_total_bytes:gib}\)",
        needle="of the memory on node ",
        failure=Failure(failure_class="host_oom_killed"),
    ),
    Row(
        pattern=r"Detected \d+ oom[-_ ]kill event",
        needle="kill event",
        known=False,
        failure=Failure(failure_class="host_oom_killed"),
    ),
    *(
        Row(
            pattern=pattern,
            needle=needle,
            known=False,
            failure=Failure(failure_class="host_oom_killed", tier=Tier.KILLED),
        )
        for pattern, needle in (
            (r"\bexited with code 137\b", "exited with code 137"),
            (r"\bexited with exit code 137\b", "exited with exit code"),
            (r"\b[Ee]xit code:?\s+137\b", "xit code"),
            (r"\b[Ee]xit status 137\b", "xit status 137"),
            (r"\bExited \(137\)", "Exited (137)"),
            (r"^\s*Exit Code:\s+137\b", "Exit Code: "),
            (r"\bexitcode\s*: -9\b", "exitcode"),
            (r"\bexits with return code = -9\b", "exits with return code"),
            (r"terminated with signal SIGKILL", ""),
            (r"died with <Signals\.SIGKILL: 9>", "died with <Signals.SIGKILL"),
            (r"\bOOMKilled\b(?!\"?: ?false)", "OOMKilled"),
            (r"(?<!was )killed by the OOM killer", "killed by the OOM killer"),
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
            (r"(?:^|\])Killed$|\bline \d+:\s+\d+ Killed\s", SHELLS_WORD),
            (r"^Fatal Python error: (?:Segmentation fault|Aborted|Bus error)", "Fatal Python error: "),
            (r"!+ Segfault encountered !+", "Segfault encountered"),
            (r"Main process exited, code=(?:dumped|killed), status=(?!9/|15/)\d+/", "Main process exited, code="),
            (r"\bexited with code 13[24569]\b", "exited with code 13"),
            (r"\bexited with exit code 13[24569]\b", "exited with exit code"),
        )
    ),
)

ROCM: Final = (
    *(
        Row(
            pattern=pattern,
            needle=needle,
            scope="rank",
            failure=Failure(failure_class="kernel_fault", tier=tier),
        )
        for pattern, needle, tier in (
            (r"Memory access fault by GPU node-\d", "Memory access fault by GPU", Tier.ROOT),
            (r"Memory critical error by agent node-\d", "Memory critical error by", Tier.ROOT),
            (r"HW Exception by GPU node-\d", "HW Exception by GPU node-", Tier.ROOT),
            (r"\bHipVMM Failure: (?!out of memory)", "HipVMM Failure: ", Tier.ROOT),
            (r"rocBLAS error: Cannot read \S*Tensile", "rocBLAS error: ", Tier.KILLED),
            (r"\bROCm error: (?!out of memory)", "ROCm error: ", Tier.KILLED),
            (r"amdgpu: .*page fault \(src_id:", "page fault (src_id:", Tier.KILLED),
            (r"amdgpu: GPU reset begin!", "", Tier.KILLED),
            (r"amdgpu: ring \S+ timeout, ", "amdgpu: ring ", Tier.KILLED),
        )
    ),
    Row(pattern=r"\*ERROR\* Not enough memory for command submission", needle="for command submission", failure=_OOM),
    Row(
        pattern=r"SVM mapping failed, exceeds resident system memory limit",
        failure=Failure(failure_class="host_memory_limit", tier=Tier.KILLED),
    ),
)
"""The HSA runtime, the libraries above it, and the kernel's driver."""

SIMULATED: Final = Row(pattern=r"pytest-kvbudget simulated device", event="simulated", known=False)
"""What this project's own simulated engine says first; no figure after it was measured."""

TABLE: Final = Table(family=None, rows=(*TORCH, *HOST, *ROCM, SIMULATED))

FRAME: Final = re.compile(
    r'^\s*File (?:"[^"]*", line \d+, in (?P<function>[\w.<>]+)|[^"\s]+\.py:\d+\]?, in (?:[\w.<>]+\.)?(?P<cell>\w+)\()'
)
"""One frame of a Python traceback, as Python or as IPython writes it."""

FRAMES: Final[dict[str, Phase]] = {
    "init_device": Phase.WORKER_INIT,
    "init_worker_distributed_environment": Phase.WORKER_INIT,
    "load_model": Phase.WEIGHTS_LOAD,
    "load_weights": Phase.WEIGHTS_LOAD,
    "initialize_model": Phase.WEIGHTS_LOAD,
    "_initialize_model": Phase.WEIGHTS_LOAD,
    "_init_model": Phase.WEIGHTS_LOAD,
    "make_layers": Phase.WEIGHTS_LOAD,
    "create_weights": Phase.WEIGHTS_LOAD,
    "process_weights_after_loading": Phase.WEIGHTS_LOAD,
    "to_neuron": Phase.WEIGHTS_LOAD,
    "profile_run": Phase.PROFILE,
    "determine_available_memory": Phase.PROFILE,
    "determine_num_available_blocks": Phase.PROFILE,
    "profile_cudagraph_memory": Phase.PROFILE,
    "initialize_kv_cache": Phase.KV_ALLOC,
    "init_caches": Phase.KV_ALLOC,
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
    "wake_up": Phase.REQUEST,
    "run_busy_loop": Phase.REQUEST,
    "start_worker_execution_loop": Phase.REQUEST,
    "_process_engine_step": Phase.REQUEST,
    "step_with_batch_queue": Phase.REQUEST,
    "execute_model": Phase.REQUEST,
    "sample_tokens": Phase.REQUEST,
    "forward_batch_generation": Phase.REQUEST,
    "forward_thread_func": Phase.REQUEST,
    "forward_thread_func_": Phase.REQUEST,
    "event_loop_normal": Phase.REQUEST,
    "event_loop_overlap": Phase.REQUEST,
    "_forward_raw": Phase.REQUEST,
}
"""Functions of the engines that run in one phase only. The outermost frame counts that is no weak one."""

CALLS: Final[dict[str, str]] = {
    ".layers = make_layers(": "make_layers",
    "graph.capture_end()": "capture_end",
    "super().capture_end()": "capture_end",
}
"""Source text that a frame shows, and which of `FRAMES` it calls: that one's own frame is missing in cut logs, or of
another language."""

WAITING_FRAMES: Final = frozenset({"make_async_mp_client", "launch_core_engines", "wait_for_engine_startup"})
"""Functions in which the server waits for the engine: the engine's own phase counts, at least ``worker_init``."""

WEAK_FRAMES: Final = frozenset(
    {"compile_or_warm_up_model", "determine_available_memory", "initialize_cache", "_warm_up_model", "to_neuron"}
)
"""Frames around others of these; a frame inside them counts more."""
