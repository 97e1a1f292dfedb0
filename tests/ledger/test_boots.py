"""Complete boots of real engines, as a person reads them: verdict, figures with their lines, what to turn."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from pytest_kvbudget.explain import exit_status
from pytest_kvbudget.ledger.model import Outcome
from pytest_kvbudget.verdict import Phase
from tests.ledger.support import DATA, GIB, MIB, lever_effects, read_bytes

Fact = tuple[int | float | str | bool, str]
"""A value, and words of the one line that states it last."""
SIZE = "CPU KV cache size: "
TOOK = "init engine (profile, create kv cache, warmup model) took "
ARGS = "non-default args: "
SERVE = "ERROR 11-29 {} [core.py:1510] ValueError: To serve at least one request"


class Boot(NamedTuple):
    """What a person says of a boot."""

    name: str
    outcome: Outcome
    phase: Phase
    failure_class: str | None
    status: int
    facts: dict[str, Fact]
    because: str = ""
    """Words of the line that is the root cause."""
    turn: tuple[tuple[str, str], ...] = ()
    """Levers that must be said to help."""
    leave: tuple[tuple[str, str], ...] = ()
    """Levers that must not be said to help."""


def size(tokens: int, window: int, times: float) -> dict[str, Fact]:
    words = f"{SIZE}{tokens:,} tokens, Maximum concurrency for {window:,} tokens per request: {times:.2f}x"
    return {"kv_tokens": (tokens, words), "max_model_len": (window, words), "max_concurrency": (times, words)}


def explicit(gib: str, total: str) -> dict[str, Fact]:
    words = f"Explicitly set ({gib}/{total}) GiB for KV cache on node 0."
    return {"available_kv_bytes": (round(float(gib) * GIB), words), "total_bytes": (round(float(total) * GIB), words)}


def short(when: str, window: int, need: str) -> dict[str, Fact]:
    words = SERVE.format(when)
    return {
        "max_model_len": (window, words),
        "kv_needed_bytes": (round(float(need) * GIB), words),
        "available_kv_bytes": (round(0.05 * GIB), words),
        "estimated_max_model_len": (51072, words),
        "kv_cache_memory_bytes": (50 * MIB, ARGS),
    }


POOL = (("kv_cache_memory_bytes", "raise"), ("max_model_len", "lower"))
UTILIZATION = (("gpu_memory_utilization", "raise"), ("gpu_memory_utilization", "lower"))
NO_MEMORY = (*UTILIZATION, ("max_model_len", "lower"), ("kv_cache_memory_bytes", "raise"))

BOOTS: list[Boot] = [
    Boot(
        "a_plain",
        "booted",
        Phase.READY,
        None,
        0,
        size(1048576, 4096, 256.0) | explicit("1.0", "9.34") | {"init_engine_secs": (2.48, TOOK + "2.48 s")},
    ),
    Boot(
        "b0_kvspace_not_int",
        "refused",
        Phase.ARGUMENT,
        "argument_rejected",
        1,
        {"max_model_len": (131072, "Using max model len 131072")},
        because="Value error, invalid literal for int() with base 10: '0.05'",
        leave=NO_MEMORY,
    ),
    Boot(
        "b1_kv_too_small",
        "failed",
        Phase.KV_CHECK,
        "kv_check_short",
        1,
        short("18:21:59", 131072, "0.12"),
        because=SERVE.format("18:21:59"),
        turn=POOL,
        leave=UTILIZATION,
    ),
    Boot(
        "b2_kv_more_than_ram",
        "failed",
        Phase.KV_ALLOC,
        "kv_alloc_oom",
        1,
        {
            "tried_alloc_bytes": (1000 * GIB, "(Worker pid=12677) ERROR 11-29 18:31:58 [multiproc_executor.py:1063] V"),
            "free_bytes": (
                round(14.96 * GIB),
                "(Worker pid=12677) ERROR 11-29 18:31:58 [multiproc_executor.py:1063] V",
            ),
            "total_bytes": (
                round(16.46 * GIB),
                "(Worker pid=12677) ERROR 11-29 18:31:58 [multiproc_executor.py:1063] V",
            ),
        },
        because="(Worker pid=12677) ERROR 11-29 18:31:58 [multiproc_executor.py:1063] ValueError: Available memory "
        "on node",
        turn=(("kv_cache_memory_bytes", "lower"),),
        leave=(("kv_cache_memory_bytes", "raise"), ("max_model_len", "lower")),
    ),
    Boot(
        "b3_maxlen_over_config",
        "refused",
        Phase.ARGUMENT,
        "argument_rejected",
        1,
        {"max_model_len": (300000, "Value error, User-specified max_model_len (300000)")},
        because="Value error, User-specified max_model_len (300000)",
        turn=(("max_model_len", "lower"),),
        leave=(*UTILIZATION, ("kv_cache_memory_bytes", "raise")),
    ),
    Boot(
        "c_kv_cache_memory_bytes",
        "booted",
        Phase.READY,
        None,
        0,
        size(262144, 4096, 64.0)
        | explicit("0.25", "11.21")
        | {"kv_cache_memory_bytes": (268435456, ARGS), "init_engine_secs": (0.56, TOOK + "0.56 s")},
    ),
    Boot(
        "d2_gmu_0.05",
        "booted",
        Phase.READY,
        None,
        0,
        size(196992, 4096, 48.09)
        | {
            "gpu_memory_utilization": (0.05, ARGS),
            "available_kv_bytes": (round(0.19 * GIB), "Auto set (0.19/14.96) GiB"),
            "total_bytes": (round(14.96 * GIB), "Auto set (0.19/14.96) GiB"),
            "requested_bytes": (round(0.74 * GIB), "0.74 GiB requested memory for the worker"),
            "consumed_bytes": (round(0.55 * GIB), "0.55 GiB memory was consumed by non-kv usages"),
        },
    ),
    Boot(
        "e_invalid_flag",
        "refused",
        Phase.ARGUMENT,
        "argument_rejected",
        1,
        {},
        because="vllm: error: unrecognized arguments: --no-such-flag 3",
        leave=NO_MEMORY,
    ),
    Boot(
        "g1_sigterm_midboot_engine",
        "failed",
        Phase.WORKER_INIT,
        "engine_killed",
        1,
        {"max_model_len": (4096, "Using max model len 4096")},
        because="KeyboardInterrupt: terminated",
        leave=NO_MEMORY,
    ),
    Boot(
        "g1_sigterm_midboot_worker",
        "booted",
        Phase.READY,
        None,
        0,
        size(1048576, 4096, 256.0) | explicit("1.0", "16.46"),
    ),
    Boot(
        "g2_kill9_engine",
        "died_after_boot",
        Phase.READY,
        "engine_killed",
        1,
        size(1048576, 4096, 256.0) | explicit("1.0", "10.46"),
        because="MPClient: engine core exited unexpectedly; starting cleanup",
        leave=NO_MEMORY,
    ),
    Boot("g4_kill9_parent", "booted", Phase.READY, None, 0, size(1048576, 4096, 256.0) | explicit("1.0", "15.34")),
    Boot(
        "g5_sigterm_inflight",
        "booted",
        Phase.READY,
        None,
        0,
        size(1048576, 4096, 256.0) | {"kv_usage_pct": (0.1, "18:29:19 [loggers.py:335]")},
    ),
    Boot(
        "h1_maxlen_auto",
        "booted",
        Phase.READY,
        None,
        0,
        size(51200, 51072, 1.0)
        | {
            "configured_max_model_len": (131072, "Auto-fit max_model_len: reduced from 131072 to 51072"),
            "auto_fit": (True, "Auto-fit max_model_len: reduced from 131072 to 51072"),
            "available_kv_bytes": (round(0.05 * GIB), "Explicitly set (0.05/16.46)"),
        },
    ),
    Boot(
        "i_big_request",
        "booted",
        Phase.READY,
        None,
        0,
        size(131072, 65536, 2.0) | {"kv_cache_memory_bytes": (128 * MIB, ARGS), "kv_usage_pct": (0.0, "18:24:13 [log")},
    ),
    Boot(
        "l_compiled_default",
        "booted",
        Phase.READY,
        None,
        0,
        size(1048576, 4096, 256.0) | explicit("1.0", "16.46") | {"init_engine_secs": (42.63, TOOK + "42.63 s")},
    ),
    Boot(
        "llama_badflag",
        "refused",
        Phase.ARGUMENT,
        "argument_rejected",
        1,
        {},
        because="error: invalid argument: --nope",
        leave=NO_MEMORY,
    ),
    Boot("llama_huge_ctx", "unknown", Phase.WEIGHTS_LOAD, None, 2, {}),
    Boot(
        "llama_np4_verbose",
        "booted",
        Phase.READY,
        None,
        0,
        {
            "projected_bytes": (65 * MIB, "projected to use 65 MiB of host memory"),
            "host_total_bytes": (24105 * MIB, "vs. 24105 MiB of total host memory"),
            "margin_left_bytes": (24039 * MIB, "will leave 24039 >= 1024 MiB"),
            "margin_required_bytes": (1024 * MIB, "will leave 24039 >= 1024 MiB"),
            "weights_bytes": (round(0.53 * MIB), "CPU_Mapped model buffer size =     0.53 MiB"),
            "kv_in_use_bytes": (32 * MIB, "CPU KV buffer size =    32.00 MiB"),
            "peak_activation_bytes": (round(33.14 * MIB), "CPU compute buffer size =    33.14 MiB"),
            "n_slots": (4, "initializing, n_slots = 4, n_ctx_slot = 32768"),
            "n_ctx_slot": (32768, "initializing, n_slots = 4, n_ctx_slot = 32768"),
        },
    ),
    Boot(
        "llama_plain",
        "booted",
        Phase.READY,
        None,
        0,
        {
            "n_slots": (4, "n_slots = 4, n_ctx_slot = 4096"),
            "n_ctx_slot": (4096, "n_slots = 4, n_ctx_slot = 4096"),
        },
    ),
    Boot(
        "llama_port_in_use",
        "refused",
        Phase.ARGUMENT,
        "port_in_use",
        1,
        {},
        because="couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 18165",
        leave=NO_MEMORY,
    ),
    Boot(
        "m2_refused_131072",
        "failed",
        Phase.KV_CHECK,
        "kv_check_short",
        1,
        short("23:08:16", 131072, "0.12"),
        because=SERVE.format("23:08:16"),
        turn=POOL,
        leave=UTILIZATION,
    ),
    Boot("m3_serves_51072", "booted", Phase.READY, None, 0, size(51200, 51072, 1.0) | explicit("0.05", "9.71")),
    Boot(
        "m4_refused_51200",
        "failed",
        Phase.KV_CHECK,
        "kv_check_short",
        1,
        short("23:09:07", 51200, "0.05"),
        because=SERVE.format("23:09:07"),
        turn=POOL,
        leave=UTILIZATION,
    ),
    Boot(
        "z_torchvision_mismatch",
        "refused",
        Phase.ARGUMENT,
        "install_broken",
        1,
        {},
        because="RuntimeError: operator torchvision::nms does not exist",
        leave=NO_MEMORY,
    ),
]


@pytest.mark.parametrize("boot", BOOTS, ids=[boot.name for boot in BOOTS])
def test_a_boot_is_read_right(boot: Boot) -> None:
    data = (DATA / "boots" / f"{boot.name}.log").read_bytes()
    lines = data.decode().split("\n")
    ledger = read_bytes(data)
    assert (ledger.outcome, ledger.phase, ledger.failure_class) == (boot.outcome, boot.phase, boot.failure_class)
    assert exit_status(ledger) == boot.status
    for name, (value, words) in boot.facts.items():
        assert ledger.get(name) == value, name
        line = next(number for number, text in enumerate(lines, 1) if words in text)
        assert ledger.facts[name].evidence.line == line, name
    assert ledger.engine_version == ("0.32.0" if any("0.32.0" in line for line in lines) else None)


@pytest.mark.parametrize("boot", [boot for boot in BOOTS if boot.failure_class], ids=lambda boot: boot.name)
def test_the_root_cause_and_what_to_turn(boot: Boot) -> None:
    data = (DATA / "boots" / f"{boot.name}.log").read_bytes()
    ledger = read_bytes(data)
    assert ledger.cause is not None
    cause = next(number for number, text in enumerate(data.decode().split("\n"), 1) if boot.because in text)
    assert ledger.cause.evidence[0].line == cause
    effects = lever_effects(ledger)
    for lever in boot.turn:
        assert effects.get(lever) == "helps"
    for lever in boot.leave:
        assert effects.get(lever) != "helps"


def test_need_and_pool_that_print_alike_are_told_apart() -> None:
    ledger = read_bytes((DATA / "boots" / "m4_refused_51200.log").read_bytes())
    assert ledger.cause is not None
    (why,) = [lever.why for lever in ledger.cause.levers if lever.name == "kv_cache_memory_bytes"]
    assert why.startswith("to more than 0.05 GiB")


def test_every_boot_of_the_collection_is_held() -> None:
    assert {path.stem for path in DATA.glob("boots/*.log")} == {boot.name for boot in BOOTS}
