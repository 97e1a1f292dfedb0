"""What the simulated engine does is what the ledger reads: phases and classes are those of the facts' tables."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from pytest_kvbudget.mock.spec import MockDevice
from pytest_kvbudget.units import GIB, MIB
from pytest_kvbudget.verdict import Phase

from .harness import BASE, UTILIZATION
from .rehearsing import CORE, FORK, HEADROOM, PRECISE, WINDOW, core, fork, read, rehearsed

SMALL = (*UTILIZATION, "--max-model-len", "16")


class Case(msgspec.Struct, frozen=True):
    spec: MockDevice
    flags: tuple[str, ...]
    phase: Phase
    failure_class: str
    env: dict[str, str] = {}
    request_tokens: int = 0
    facts: dict[str, float] = {}


def pinned(mib: int, *more: str) -> tuple[str, ...]:
    return (*SMALL, "--kv-cache-memory-bytes", str(mib * MIB), *more)


GPU = {
    "worker_init": Case(
        replace(BASE, free_at_start=9728 * MIB), ("--gpu-memory-utilization", "1.0"), Phase.WORKER_INIT,
        "startup_free_below_request", facts={"free_bytes": 9.5 * GIB, "requested_bytes": 10 * GIB},
    ),
    "card_held": Case(
        replace(BASE, free_at_start=5 * GIB), ("--gpu-memory-utilization", "1.0"), Phase.WORKER_INIT,
        "foreign_process_memory",
    ),
    "weights": Case(
        replace(BASE, weights=9728 * MIB), UTILIZATION, Phase.WEIGHTS_LOAD, "weights_oom",
        facts={"tried_alloc_bytes": 608 * MIB, "free_bytes": 96 * MIB},
    ),
    "profile": Case(
        replace(BASE, weights=8704 * MIB, activation_base=513 * MIB), UTILIZATION, Phase.PROFILE, "profile_oom",
        facts={"tried_alloc_bytes": 513 * MIB},
    ),
    "nothing_left": Case(
        BASE, ("--gpu-memory-utilization", "0.5", *SMALL[2:]), Phase.KV_CHECK, "kv_budget_nonpositive",
    ),
    "kv_check": Case(
        BASE, (*UTILIZATION, *WINDOW), Phase.KV_CHECK, "kv_check_short",
        facts={"kv_needed_bytes": 4 * GIB, "max_model_len": 65536, "estimated_max_model_len": 31728},
    ),
    "state_blocks": Case(
        replace(BASE, state_bytes_per_seq=3 * MIB), (*SMALL, "--max-num-seqs", "662"), Phase.KV_CHECK,
        "max_num_seqs_exceeds_state", facts={"max_num_seqs": 662, "state_blocks": 661},
    ),
    "kv_alloc": Case(BASE, pinned(6144), Phase.KV_ALLOC, "kv_alloc_oom", facts={"tried_alloc_bytes": 6 * GIB}),
    "capture": Case(
        replace(BASE, graph_base=3 * GIB, graph_estimate=0.01), SMALL, Phase.GRAPH_CAPTURE, "graph_capture_oom",
        facts={"tried_alloc_bytes": 3 * GIB, "graph_estimated_bytes": 0.03 * GIB},
    ),
    "warmup": Case(BASE, pinned(4700, "--enforce-eager", "--max-num-seqs", "7"), Phase.WARMUP, "warmup_oom"),
    "request": Case(
        replace(BASE, request_peak_base=3 * GIB), SMALL, Phase.REQUEST, "request_oom", request_tokens=9,
        facts={"tried_alloc_bytes": 3 * GIB},
    ),
    "native": Case(BASE, ("--max-model-len", "262145"), Phase.ARGUMENT, "argument_rejected"),
    # the fork
    "plan_floor": Case(fork(slots_min=4449), PRECISE, Phase.ARGUMENT, "plan_refused", facts={"plan_slots": 4448}),
    "plan_host": Case(fork(host_bytes=20 * GIB, experts=15_000), PRECISE, Phase.ARGUMENT, "plan_refused"),
    "underpriced": Case(
        replace(FORK, kv_bytes_per_token=2048), PRECISE, Phase.KV_CHECK, "kv_reserve_underpriced",
        facts={"plan_kv_b_per_token": 1024, "measured_kv_b_per_token": 2048},
    ),
    "overhead_underplanned": Case(fork(overhead_real=int(2.25 * GIB)), PRECISE, Phase.KV_CHECK, "kv_budget_nonpositive",
        facts={"plan_overhead_planned_bytes": 2 * GIB, "plan_overhead_measured_bytes": 2.25 * GIB}),
    "pool_beside_arena": Case(
        FORK, (*PRECISE, "--kv-cache-memory-bytes", str(5 * GIB)), Phase.KV_ALLOC, "kv_alloc_oom",
        facts={"tried_alloc_bytes": 5 * GIB},
    ),
    "undercharged_graphs": Case(
        replace(FORK, graph_base=4 * GIB), PRECISE, Phase.GRAPH_CAPTURE, "graph_capture_oom",
        env={"VLLM_CUDAGRAPH_MEM_ESTIMATE_MB": "64"}, facts={"graph_estimated_bytes": 64 * MIB},
    ),
}  # fmt: skip

NEURON = {
    "kv_below_min": Case(
        CORE, ("--gpu-memory-utilization", "0.21", *WINDOW), Phase.KV_CHECK, "min_kv_budget",
        # 0.21 x 24 - 5 GiB
        facts={"effective_kv_bytes": 0.04 * GIB, "min_kv_bytes": 1 * GIB},
    ),
    "cap_invalid": Case(
        CORE, WINDOW, Phase.KV_CHECK, "argument_rejected", env={"VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION": "2"},
    ),
    "vllm_no_blocks": Case(
        CORE, ("--gpu-memory-utilization", "0.2", *WINDOW), Phase.KV_CHECK, "kv_budget_nonpositive",
        env={"VLLM_NEURON_MIN_KV_BUDGET_GIB": "0"},
    ),
    "vllm_one_req": Case(
        CORE, ("--max-model-len", "262144"), Phase.KV_CHECK, "kv_check_short",
        facts={"kv_needed_bytes": 16 * GIB, "available_kv_bytes": 6.62 * GIB},
    ),
    "ncc_oom": Case(
        core(scratch_base=14 * GIB), WINDOW, Phase.COMPILE, "compile_hbm_exceeded",
        # 5 of weights, 6.62 of KV cache, 14 of scratchpad
        facts={"peak_hbm_bytes": 25.62 * GIB, "hbm_limit_bytes": 24 * GIB, "io_tensors_bytes": 11.62 * GIB,
               "scratchpad_bytes": 14 * GIB},
    ),
    "ncc_evrf009": Case(
        core(scratch_base=14 * GIB, prints_numbers=False), WINDOW, Phase.COMPILE, "compile_hbm_exceeded",
    ),
    "nrt_load_oom": Case(
        core(scratch_base=8 * GIB, allocatable=18 * GIB), WINDOW, Phase.MODEL_LOAD, "runtime_hbm_oom",
        facts={"tried_alloc_bytes": 8 * GIB, "hbm_tensors_bytes": 11.623 * GIB, "nd": 0, "nc": 0},
    ),
    "nrt_load_oom_without_numbers": Case(
        core(scratch_base=8 * GIB, allocatable=18 * GIB, prints_numbers=False), WINDOW, Phase.MODEL_LOAD,
        "runtime_hbm_oom",
    ),
    "nrt_coll_oom": Case(
        core(load_extra=13 * GIB), WINDOW, Phase.MODEL_LOAD, "runtime_hbm_oom", facts={"tried_alloc_bytes": 13 * GIB},
    ),
    "nrt_tensor_oom_load": Case(replace(CORE, weights=25 * GIB), WINDOW, Phase.WEIGHTS_LOAD, "runtime_hbm_oom",
        facts={"tried_alloc_bytes": 25 * GIB // 16}),
    "nrt_tensor_oom_kv": Case(core(allocatable=11 * GIB), WINDOW, Phase.KV_ALLOC, "runtime_hbm_oom"),
    "nrt_tensor_oom_warmup": Case(
        replace(CORE, activation_base=14 * GIB), WINDOW, Phase.WARMUP, "runtime_hbm_oom",
        facts={"tried_alloc_bytes": 14 * GIB},
    ),
    "nrt_tensor_oom_request": Case(
        replace(CORE, request_peak_base=14 * GIB), WINDOW, Phase.REQUEST, "request_oom", request_tokens=9,
        facts={"tried_alloc_bytes": 14 * GIB},
    ),
    "fragmentation": Case(replace(CORE, fragmentation=11 * GIB), WINDOW, Phase.MODEL_LOAD, "runtime_hbm_oom"),
    "lnc_mismatch": Case(CORE, WINDOW, Phase.MODEL_LOAD, "lnc_mismatch", env={"NEURON_CC_FLAGS": "--lnc=1"}),
    "profiling": Case(
        core(allocatable=13 * GIB), WINDOW, Phase.MODEL_LOAD, "profiler_reserve",
        env={"NEURON_RT_INSPECT_DEVICE_PROFILE": "1"},
    ),
    "visible_cores": Case(
        CORE, WINDOW, Phase.WORKER_INIT, "argument_rejected", env={"NEURON_RT_VISIBLE_CORES": "0"},
    ),
    "modes": Case(
        CORE, WINDOW, Phase.ARGUMENT, "argument_rejected",
        env={"VLLM_NEURON_CPU_MODE": "1", "VLLM_NEURON_CPU_COMPILE": "1"},
    ),
}  # fmt: skip


def agrees(case: Case) -> None:
    boot = rehearsed(case.spec, *case.flags, env=case.env, request_tokens=case.request_tokens)
    assert not boot.passed
    ledger = read(case.spec, boot.log)
    assert (ledger.failure_class, ledger.phase) == (case.failure_class, case.phase)
    assert ledger.family == case.spec.dialect or case.phase is Phase.ARGUMENT or case.spec.arena is None
    assert ledger.outcome == ("died_after_boot" if case.request_tokens else ledger.outcome)
    for name, expected in case.facts.items():
        # sizes are printed to a hundredth of their unit
        assert ledger.number(name) == pytest.approx(expected, abs=0.0051 * GIB if expected > GIB / 100 else 0), name


@pytest.mark.parametrize("name", GPU)
def test_gpu_failures(name: str) -> None:
    agrees(GPU[name])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("release", ["0.21", "0.24", "2.33"])
@pytest.mark.parametrize("name", NEURON)
def test_neuron_failures(name: str, release: str, ranks: int) -> None:
    case = NEURON[name]
    agrees(replace(case, spec=replace(case.spec, release=release, ranks=ranks)))


@pytest.mark.parametrize("release", ["0.21", "0.24", "2.33"])
def test_neuron_boot_is_read_whole(release: str) -> None:
    boot = rehearsed(replace(CORE, release=release, ranks=2), *WINDOW)
    ledger = read(CORE, boot.log)
    assert boot.passed
    assert (ledger.outcome, ledger.phase, ledger.failure_class) == ("booted", Phase.READY, None)
    assert ledger.family == "neuron"
    # the facts' case D3: a cap of 7,112,465,841 B, which is 6,782 blocks of 16 tokens
    assert ledger.number("kv_tokens") == 6782 * 16
    assert ledger.number("max_concurrency") == 1.66
    # 5 GiB of weights, and half a GiB of the runtime
    assert ledger.number("hbm_total_used_bytes") == 5.5 * GIB
    assert {milestone.phase for milestone in ledger.milestones} >= {
        Phase.ARGUMENT, Phase.WORKER_INIT, Phase.WEIGHTS_LOAD, Phase.COMPILE, Phase.WARMUP, Phase.READY,
    }  # fmt: skip


def test_headroom_mode_states_its_four_quantities() -> None:
    ledger = read(CORE, rehearsed(CORE, *WINDOW, env=HEADROOM).log)
    for name, gib in (
        ("total_bytes", 24), ("weights_bytes", 5), ("reserved_headroom_bytes", 4), ("available_kv_bytes", 15),
    ):  # fmt: skip
        assert ledger.number(name) == gib * GIB


def test_debug_shows_the_heuristic_of_0_24() -> None:
    spec = replace(CORE, release="0.24")
    assert "KV cache heuristic" not in rehearsed(spec, *WINDOW).log
    ledger = read(spec, rehearsed(spec, *WINDOW, env={"VLLM_NEURON_LOG_LEVEL": "DEBUG"}).log)
    assert ledger.number("user_budget_bytes") == pytest.approx(17.08 * GIB, abs=0.005 * GIB)
    assert ledger.number("kv_cap_bytes") == pytest.approx(6.62 * GIB, abs=0.005 * GIB)
    assert ledger.number("available_kv_bytes") == pytest.approx(6.62 * GIB, abs=0.005 * GIB)


def test_fork_boot_states_plan_and_check() -> None:
    spec = fork(host_bytes=64 * GIB, experts=5000, ple_bytes=2 * GIB)
    ledger = read(spec, rehearsed(spec, *PRECISE).log)
    assert (ledger.family, ledger.phase, ledger.failure_class) == ("rdna4", Phase.READY, None)
    for name, expected in (
        ("plan_budget_bytes", 7.5 * GIB), ("plan_overhead_bytes", 2 * GIB), ("plan_slots", 4448),
        ("plan_expert_cache_bytes", 4448 * MIB), ("plan_registry_b_per_token", 1024), ("plan_ple_bytes", 2 * GIB),
        # 5,000 - 4,448 experts of a MiB; 95 % of 64 less 2, 7 and 5 GiB
        ("plan_host_experts_bytes", 552 * MIB), ("host_usable_bytes", 46.8 * GIB),
        ("host_mem_available_bytes", 64 * GIB), ("ple_locked_bytes", 2 * GIB),
        ("plan_overhead_measured_bytes", 1.5 * GIB),
    ):  # fmt: skip
        tolerance = 0.051 * GIB if name.startswith("host") else 0.0051 * GIB if expected > MIB else 0
        assert ledger.number(name) == pytest.approx(expected, abs=tolerance), name


def test_embeddings_that_cannot_be_locked_do_not_stop_the_boot() -> None:
    spec = fork(ple_bytes=2 * GIB, memlock_bytes=1 * GIB)
    boot = rehearsed(spec, *PRECISE)
    assert boot.passed
    assert "PLE offload: locked 0.0 GiB, FAILED to lock 2.0 GiB" in boot.log
    assert read(spec, boot.log).outcome == "booted"
