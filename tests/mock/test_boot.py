"""Boots, refusals and deaths follow from the device's numbers; expectations are worked out by hand from BASE."""

from __future__ import annotations

import pytest
import requests
from msgspec.structs import replace

from pytest_kvbudget.mock.spec import Arena, MockDevice
from pytest_kvbudget.units import GIB, MIB

from .harness import BASE, LONGEST, UTILIZATION, Host

# activation and graphs are taken again after the pool: 512 + 64 MiB
SERVING = 5 * GIB + 1984 * MIB + 576 * MIB


def pinned(mib: int, *more: str) -> tuple[str, ...]:
    return (*UTILIZATION, "--max-model-len", "16", "--kv-cache-memory-bytes", str(mib * MIB), *more)


def test_longest_window_boots_and_shows_what_it_holds(host: Host) -> None:
    engine = host.start(BASE, *UTILIZATION, "--max-model-len", str(LONGEST)).wait_ready()
    log = engine.log()
    assert "Available KV cache memory: 1.94 GiB" in log
    # 1984 blocks of 16 tokens; 1984 / 1983 windows
    assert "GPU KV cache size: 31,744 tokens, Maximum concurrency for 31,728 tokens per request: 1.00x" in log
    # 7.5 - 5 - 0.5625 - graphs once more - 150 MiB = 1770 MiB
    assert "--kv-cache-memory=1855979520` (1.73 GiB) to fit" in log
    assert host.used() == SERVING
    models = requests.get(engine.url("/v1/models"), timeout=5).json()
    assert models["data"][0]["max_model_len"] == LONGEST
    assert requests.get(engine.url("/version"), timeout=5).json() == {"version": "0.32.0"}
    assert 'kv_cache_size_tokens="31744"' in requests.get(engine.url("/metrics"), timeout=5).text


def test_auto_fits_the_longest_window(host: Host) -> None:
    engine = host.start(BASE, *UTILIZATION, "--max-model-len", "auto").wait_ready()
    assert "Auto-fit max_model_len: reduced from 262144 to 31728 to fit in available KV cache memory" in engine.log()
    models = requests.get(engine.url("/v1/models"), timeout=5).json()
    assert models["data"][0]["max_model_len"] == LONGEST


def test_free_memory_equal_to_the_budget_is_enough(host: Host) -> None:
    host.start(replace(BASE, free_at_start=7680 * MIB), *UTILIZATION, "--max-model-len", "16").wait_ready()


REFUSED = {
    # one token more needs block 1984 of 1983
    "kv_check": (
        BASE,
        (*UTILIZATION, "--max-model-len", str(LONGEST + 1)),
        "ValueError: To serve at least one request with the model's max seq len (31729), (1.94 GiB KV cache is needed,"
        " which is larger than the available KV cache memory (1.94 GiB). Based on the available memory, the estimated"
        " maximum model length is 31728.",
    ),
    # 5 GiB - 5 - 0.5 - 64 MiB
    "nothing_left": (
        BASE,
        ("--gpu-memory-utilization", "0.5", "--max-model-len", "16"),
        "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    ),
    "worker_init": (
        replace(BASE, free_at_start=9728 * MIB),
        ("--gpu-memory-utilization", "1.0"),
        "ValueError: Free memory on device cuda:0 (9.5/10.0 GiB) on startup is less than desired GPU memory utilization"
        " (1.0, 10.0 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
    ),
    # shards of 9728 / 16 = 608 MiB into 9216 MiB: 15 fit, 96 MiB are left
    "weights_load": (
        replace(BASE, weights=9728 * MIB),
        UTILIZATION,
        "CUDA out of memory. Tried to allocate 608.00 MiB. GPU 0 has a total capacity of 10.00 GiB of which 96.00 MiB"
        " is free. Including non-PyTorch memory, this process has 9.91 GiB memory in use.",
    ),
    # 512 MiB are free
    "profile": (
        replace(BASE, weights=8704 * MIB, activation_base=513 * MIB),
        UTILIZATION,
        "Tried to allocate 513.00 MiB. GPU 0 has a total capacity of 10.00 GiB of which 512.00 MiB is free.",
    ),
    # 5 GiB are free
    "kv_alloc": (
        BASE,
        pinned(6144),
        "Tried to allocate 6.00 GiB. GPU 0 has a total capacity of 10.00 GiB of which 5.00 GiB is free.",
    ),
    # 5120 - 4544 - 512 leaves 64 MiB: the base and three of the four sizes 8, 4, 2, 1
    "graph_capture": (
        replace(BASE, dialect="rdna4", graph_base=16 * MIB, graph_per_size=16 * MIB),
        pinned(4544, "--max-num-seqs", "4"),
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 16.00 MiB. GPU 0 has a total capacity of"
        " 10.00 GiB"
        " of which 0 bytes is free. Of the allocated memory 9.00 GiB is allocated by PyTorch, with 64.00 MiB allocated"
        " in private pools (e.g., HIP Graphs), and 0 bytes is reserved",
    ),
    # 5120 - 4544 - 100 leaves less than the activations
    "fragmentation": (
        replace(BASE, fragmentation=100 * MIB),
        pinned(4544),
        "Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 10.00 GiB of which 476.00 MiB is free.",
    ),
    "warmup": (
        BASE,
        pinned(4700, "--enforce-eager", "--max-num-seqs", "7"),
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 7 dummy requests.",
    ),
    # a state of 3 MiB makes blocks of 48 tokens: 1984 // 3 = 661 of them
    "state_blocks": (
        replace(BASE, state_bytes_per_seq=3 * MIB),
        (*UTILIZATION, "--max-model-len", "16", "--max-num-seqs", "662"),
        "ValueError: max_num_seqs (662) exceeds available Mamba cache blocks (661).",
    ),
    "native": (
        BASE,
        ("--max-model-len", "262145"),
        "User-specified max_model_len (262145) is greater than the derived max_model_len"
        " (max_position_embeddings=262144.0",
    ),
    "utilization": (BASE, ("--gpu-memory-utilization", "1.01"), "Input should be less than or equal to 1"),
}
FRAMES = {
    "kv_check": "in _check_enough_kv_cache_memory",
    "worker_init": "in request_memory",
    "weights_load": "in load_model",
    "profile": "in profile_run",
    "kv_alloc": "in _allocate_kv_cache_tensors",
    "graph_capture": "in _capture_cudagraphs",
    "fragmentation": "in capture_model",
    "warmup": "in _dummy_sampler_run",
    "native": "in create_model_config",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_in_the_right_phase(host: Host, name: str) -> None:
    spec, flags, text = REFUSED[name]
    engine = host.start(spec, *flags)
    assert engine.wait_exit() == 1
    log = engine.log()
    assert text in log
    assert FRAMES.get(name, "") in log
    assert "Starting vLLM server" not in log
    if name not in {"native", "utilization"}:
        assert "EngineCore failed to start." in log
        assert log.rstrip().endswith(
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s):"
            " {'EngineCore': 1}"
        )
        host.wait_used(10 * GIB - (spec.free_at_start or 0))


def test_just_enough_boots(host: Host) -> None:
    # 5120 - 4544 - 512 = 64 MiB for the graphs, to the byte
    host.start(BASE, *pinned(4544)).wait_ready()
    assert host.used() == 10 * GIB


def test_eager_captures_nothing(host: Host) -> None:
    engine = host.start(BASE, *pinned(4608, "--enforce-eager")).wait_ready()
    assert "Capturing CUDA graphs" not in engine.log()
    assert host.used() == 10 * GIB


def test_pinned_pool_replaces_the_profile_lines(host: Host) -> None:
    log = host.start(BASE, *pinned(100)).wait_ready().log()
    assert "Initial free memory 10.0 GiB, reserved 0.1 GiB memory for KV Cache as specified by" in log
    assert "Available KV cache memory" not in log
    assert "Estimated CUDA graph memory" not in log
    assert "Free memory on device" not in log
    assert "GPU KV cache size: 1,600 tokens" in log


def test_hybrid_takes_a_block_for_each_state(host: Host) -> None:
    # 661 blocks, one never handed out, one for the state: 659 x 48 = 31632 tokens
    spec = replace(BASE, state_bytes_per_seq=3 * MIB)
    flags = (*UTILIZATION, "--max-num-seqs", "661", "--max-model-len")
    log = host.start(spec, *flags, "31632").wait_ready().log()
    assert "Setting attention block size to 48 tokens" in log
    assert host.start(spec, *flags, "31633", visible="1").wait_exit() == 1


def test_several_ranks_refuse_each_for_itself(host: Host) -> None:
    engine = host.start(replace(BASE, ranks=2, free_at_start=9 * GIB), "--gpu-memory-utilization", "1.0")
    assert engine.wait_exit() == 1
    log = engine.log()
    for rank in (0, 1):
        assert f"ValueError: Free memory on device cuda:{rank} (9.0/10.0 GiB) on startup" in log
        assert f"(Worker_TP{rank} pid=" in log
    assert "WorkerProc failed to start." in log
    assert "WorkerProc initialization failed due to an exception in a background process." in log


def test_workers_fail_behind_the_executor(host: Host) -> None:
    engine = host.start(replace(BASE, ranks=2), *pinned(6144))
    assert engine.wait_exit() == 1
    log = engine.log()
    assert "WorkerProc hit an exception." in log
    assert "RuntimeError: Worker failed with error 'CUDA out of memory. Tried to allocate 6.00 GiB." in log


ARENA = Arena(slot_bytes=MIB, slots_min=10, registry_bytes_per_token=1024, reserve_factor=1.5, overhead_planned=2 * GIB)
FORK = replace(BASE, dialect="rdna4", weights=1 * GIB, kv_bytes_per_token=1024, arena=ARENA)
PRECISE = (*UTILIZATION, "--max-model-len", "65536", "--expert-precise-memory")


def test_arena_takes_what_the_plan_leaves(host: Host) -> None:
    engine = host.start(FORK, *PRECISE).wait_ready()
    log = engine.log()
    assert "Clav Version" in log
    # 7680 - 1024 weights - 96 reserve (1.5 x 64) - 64 graphs - 2048 overhead = 4448 MiB
    for label, figure in (("budget (total x util)", "7.50"), ("KV reserve (one", "0.09"), ("runtime overhead", "2.00")):
        assert any(label in line and f" {figure} GiB" in line for line in log.splitlines())
    assert "4.34 GiB     4,448 slots" in log
    # capped at the reserve: 96 MiB of 1 KiB per token
    assert "GPU KV cache size: 98,304 tokens" in log
    assert "memory after profile: torch reserved 5.34 GiB" in log
    assert "runtime overhead planned 2.00 GiB, measured 1.50 GiB (-0.50)" in log
    assert host.used() == (1024 + 1024 + 4448 + 96 + 512 + 64) * MIB


def test_plan_without_room_is_refused_before_the_device(host: Host) -> None:
    # 2.35 GiB more overhead: 4448 - 2406.4 MiB of room
    spec = replace(FORK, arena=replace(ARENA, slots_min=2042))
    engine = host.start(spec, *UTILIZATION, "--max-model-len", "65536")
    assert engine.wait_exit() == 1
    assert "ExpertPlanError: expert cache space holds 2,041 slots" in engine.log()
    assert "EngineCore" not in engine.log()


def test_idle_card_holds_the_drivers_reserve() -> None:
    # 0.57 GiB on a card of 31.86 GiB, in the source document
    assert MockDevice().idle_bytes == 612_032_839
    assert MockDevice(device_total=10 * GIB, free_at_start=9 * GIB).idle_bytes == 1 * GIB


def test_the_log_says_at_once_that_nothing_is_real(host: Host) -> None:
    engine = host.start(BASE, "--max-model-len", "262145")
    engine.wait_exit()
    first = engine.log().splitlines()[0]
    assert "pytest-kvbudget simulated device: cards 0 of 10.0 GiB, dialect vllm" in first
