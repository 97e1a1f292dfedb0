"""AMD's cards, the fork for them, and what carries a log: as people report it."""

from __future__ import annotations

import pytest

from pytest_kvbudget.verdict import Phase
from tests.ledger.support import MIB, read
from tests.ledger.variant import Variant, check, gib

S = "[2026-01-02 03:04:05 TP0] "
LOADING = S + "Load weight begin. avail mem=78.52 GB"
LEN_DOWN, UTIL_UP = ("max_model_len", "lower"), ("gpu_memory_utilization", "raise")
SHORT = (
    "ValueError: To serve at least one request with the model's max seq len (262144), (3.32 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (2.9 GiB)."
)

VARIANTS: list[Variant] = [
    Variant(
        "what the plan's overhead misses comes out of the KV cache, at every window",
        (
            "expert offload plan check (this rank): runtime overhead planned 6.25 GiB, measured 6.8 GiB (+0.55)",
            SHORT,
        ),
        "failed",
        Phase.KV_CHECK,
        "kv_check_short",
        {
            "plan_overhead_planned_bytes": gib(6.25),
            "plan_overhead_measured_bytes": gib(6.8),
            "plan_overhead_delta_bytes": gib(0.55),
            "kv_needed_bytes": gib(3.32),
        },
        turn=(("plan overhead", "raise"), ("kv_cache_memory_bytes", "raise")),
        leave=(LEN_DOWN, UTIL_UP),
    ),
    Variant(
        "the check of a plan, wrapped",
        (
            "expert offload plan check: runtime overhead planned 5.25 GiB, measured 4.09 GiB (-1.16);",
            "KV planned 8937 B/token, measured 10125 B/token (+1188)",
            SHORT,
        ),
        "failed",
        Phase.KV_CHECK,
        "kv_reserve_underpriced",
        {"plan_kv_b_per_token": 8937, "measured_kv_b_per_token": 10125, "kv_b_per_token_delta": 1188},
        leave=(LEN_DOWN,),
    ),
    Variant(
        "a page that is not there",
        (
            "amdgpu 0000:c2:00.0: amdgpu: [gfxhub] page fault (src_id:0 ring:153 vmid:8 pasid:32795)",
            "amdgpu 0000:c2:00.0: amdgpu: GCVM_L2_PROTECTION_FAULT_STATUS:0x00800932",
        ),
        "failed",
        Phase.UNKNOWN,
        "kernel_fault",
        {},
    ),
    *(
        Variant(name, (line,), "failed", Phase.UNKNOWN, "kernel_fault", {}, leave=(LEN_DOWN,))
        for name, line in (
            ("an access", "Memory access fault by GPU node-1 (Agent handle: 0x55) on address 0x7f. Reason: Unknown."),
            (
                "a queue",
                "Memory critical error by agent node-0 (Agent handle: 0x2c) on address 0x7f. Reason: in use.",
            ),
            ("a hang", "HW Exception by GPU node-1 (Agent handle: 0x5e) reason :GPU Hang"),
            ("a library", "rocBLAS error: Cannot read /l/TensileLibrary.dat: No such file for GPU arch : gfx1151"),
            ("a ring", "amdgpu 0000:03:00.0: amdgpu: ring comp_1.0.0 timeout, signaled seq=3, emitted seq=5"),
        )
    ),
    Variant(
        "the driver has no memory for a command",
        ("[drm:amdgpu_cs_ioctl [amdgpu]] *ERROR* Not enough memory for command submission!",),
        "unknown",
        Phase.UNKNOWN,
        "request_oom",
        {},
    ),
    Variant(
        "TheRock#1054: more than the card has; what is stated as none is none",
        (
            "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of "
            "15.24 GiB of which 15.09 GiB is free. Of the allocated memory 0 bytes is allocated by PyTorch, and 0 "
            "bytes is reserved by PyTorch but unallocated.",
        ),
        "unknown",
        Phase.UNKNOWN,
        "request_oom",
        {
            "tried_alloc_bytes": gib(16),
            "total_bytes": gib(15.24),
            "torch_allocated_bytes": 0,
            "reserved_unallocated_bytes": 0,
        },
    ),
    Variant(
        "pytorch#16417: reserved was called cached",
        (
            "RuntimeError: CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.92 GiB total capacity; 8.57 MiB "
            "already allocated; 9.28 GiB free; 4.68 MiB cached)",
        ),
        "unknown",
        Phase.UNKNOWN,
        "request_oom",
        {"torch_reserved_bytes": round(4.68 * MIB), "torch_allocated_bytes": round(8.57 * MIB)},
    ),
    Variant(
        "Ray's old monitor",
        ("ray.memory_monitor.RayOutOfMemoryError: More than 95% of the memory on node n is used (11.8 / 12.3 GB).",),
        "failed",
        Phase.UNKNOWN,
        "host_oom_killed",
        {"host_used_bytes": gib(11.8), "host_total_bytes": gib(12.3)},
    ),
    Variant(
        "the kernel, of a process that serves models",
        ("[12345.678950] Out of memory: Killed process 4242 (python3) total-vm:98765432kB, anon-rss:61234567kB",),
        "failed",
        Phase.UNKNOWN,
        "host_oom_killed",
        {},
    ),
    *(
        Variant(name, (LOADING, line), "failed", Phase.WEIGHTS_LOAD, "host_oom_killed", {})
        for name, line in (
            ("Kubernetes", "      Exit Code:    137"),
            (
                "Slurm",
                "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some tasks have been OOM Killed.",
            ),
            ("torchrun", "api: [ERROR] failed (exitcode: -9) local_rank: 0 (pid: 3054) of binary: /usr/bin/python3"),
            ("a spawned process", "ProcessExitedException: process 0 terminated with signal SIGKILL"),
            ("deepspeed", "[launch.py:434:sigkill_handler] ['python', '-u'] exits with return code = -9"),
        )
    ),
    *(
        Variant(name, (LOADING, line), "failed", Phase.WEIGHTS_LOAD, "engine_killed", {})
        for name, line in (
            ("a shell", "start.sh: line 12:  4242 Killed                  python3 -m sglang.launch_server"),
            (
                "a shell, behind a progress bar",
                "Loading checkpoint shards:  75%|##  | 3/4 [00:08<00:02,  2.83s/it]Killed",
            ),
        )
    ),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=[variant.name for variant in VARIANTS])
def test_a_public_report_is_read(variant: Variant) -> None:
    check(variant)


def test_a_process_of_another_program_is_no_engine() -> None:
    ledger = read("[12345.678950] Out of memory: Killed process 4242 (firefox) total-vm:98765432kB")
    assert ledger.family == "unknown"


def test_a_pinned_pool_is_not_capped_by_the_plan() -> None:
    ledger = read(
        "INFO 09-30 10:00:00 [utils.py:1] non-default args: {'kv_cache_memory_bytes': 3113851290}",
        "expert offload plan check (this rank): runtime overhead planned 6.25 GiB, measured 6.8 GiB (+0.55)",
        SHORT,
    )
    assert ledger.cause is not None
    assert ("max_model_len", "lower", "helps") in {(e.name, e.direction, e.effect) for e in ledger.cause.levers}
