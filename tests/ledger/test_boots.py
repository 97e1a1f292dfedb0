"""Complete boots of real engines, as they are read by a person."""

from __future__ import annotations

import pytest

from pytest_kvbudget.ledger.model import Outcome
from pytest_kvbudget.verdict import Phase
from tests.ledger.support import DATA, GIB, MIB, read_bytes

Facts = dict[str, int | float | str | bool]

BOOTS: list[tuple[str, Outcome, Phase, str | None, Facts]] = [
    (
        "a_plain",
        "booted",
        Phase.READY,
        None,
        {"kv_tokens": 1048576, "max_concurrency": 256.0, "init_engine_secs": 2.48},
    ),
    ("b0_kvspace_not_int", "refused", Phase.ARGUMENT, "argument_rejected", {"max_model_len": 131072}),
    (
        "b1_kv_too_small",
        "failed",
        Phase.KV_CHECK,
        "kv_check_short",
        {
            "max_model_len": 131072,
            "kv_needed_bytes": round(0.12 * GIB),
            "available_kv_bytes": round(0.05 * GIB),
            "estimated_max_model_len": 51072,
            "kv_cache_memory_bytes": 50 * MIB,
        },
    ),
    (
        "b2_kv_more_than_ram",
        "failed",
        Phase.KV_ALLOC,
        "kv_alloc_oom",
        {"tried_alloc_bytes": 1000 * GIB, "free_bytes": round(14.96 * GIB), "total_bytes": round(16.46 * GIB)},
    ),
    ("b3_maxlen_over_config", "refused", Phase.ARGUMENT, "argument_rejected", {"max_model_len": 300000}),
    ("c_kv_cache_memory_bytes", "booted", Phase.READY, None, {"kv_tokens": 262144, "max_concurrency": 64.0}),
    (
        "d2_gmu_0.05",
        "booted",
        Phase.READY,
        None,
        {
            "gpu_memory_utilization": 0.05,
            "available_kv_bytes": round(0.19 * GIB),
            "requested_bytes": round(0.74 * GIB),
            "consumed_bytes": round(0.55 * GIB),
        },
    ),
    ("e_invalid_flag", "refused", Phase.ARGUMENT, "argument_rejected", {}),
    ("g1_sigterm_midboot_engine", "failed", Phase.WORKER_INIT, "engine_killed", {}),
    ("g1_sigterm_midboot_worker", "booted", Phase.READY, None, {"kv_tokens": 1048576}),
    ("g2_kill9_engine", "died_after_boot", Phase.READY, "engine_killed", {"kv_tokens": 1048576}),
    ("g4_kill9_parent", "booted", Phase.READY, None, {"kv_tokens": 1048576}),
    ("g5_sigterm_inflight", "booted", Phase.READY, None, {"kv_usage_pct": 0.1}),
    (
        "h1_maxlen_auto",
        "booted",
        Phase.READY,
        None,
        {"configured_max_model_len": 131072, "max_model_len": 51072, "auto_fit": True, "kv_tokens": 51200},
    ),
    ("i_big_request", "booted", Phase.READY, None, {"kv_cache_memory_bytes": 134217728}),
    ("l_compiled_default", "booted", Phase.READY, None, {"init_engine_secs": 42.63}),
    ("llama_badflag", "refused", Phase.ARGUMENT, "argument_rejected", {}),
    ("llama_huge_ctx", "unknown", Phase.WEIGHTS_LOAD, None, {}),
    (
        "llama_np4_verbose",
        "booted",
        Phase.READY,
        None,
        {
            "projected_bytes": 65 * MIB,
            "margin_left_bytes": 24039 * MIB,
            "margin_required_bytes": 1024 * MIB,
            "kv_in_use_bytes": 32 * MIB,
            "n_slots": 4,
            "n_ctx_slot": 32768,
        },
    ),
    ("llama_plain", "booted", Phase.READY, None, {"n_slots": 4, "n_ctx_slot": 4096}),
    ("llama_port_in_use", "refused", Phase.ARGUMENT, "port_in_use", {}),
    ("z_torchvision_mismatch", "refused", Phase.ARGUMENT, "install_broken", {}),
]


@pytest.mark.parametrize(("name", "outcome", "phase", "failure_class", "facts"), BOOTS, ids=[boot[0] for boot in BOOTS])
def test_a_boot_is_read_right(
    name: str, outcome: Outcome, phase: Phase, failure_class: str | None, facts: Facts
) -> None:
    ledger = read_bytes((DATA / "boots" / f"{name}.log").read_bytes())
    assert (ledger.outcome, ledger.phase, ledger.failure_class) == (outcome, phase, failure_class)
    assert {fact: ledger.get(fact) for fact in facts} == facts
    assert ledger.engine_version == ("0.32.0" if name[0] in "abcdghil" and name[1] != "l" else None)


def test_every_boot_of_the_collection_is_held() -> None:
    assert {path.stem for path in DATA.glob("boots/*.log")} == {boot[0] for boot in BOOTS}
