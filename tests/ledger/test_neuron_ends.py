"""Neuron: the state at a failed allocation, runs that only compile, the compile cache, settings that are no number."""

from __future__ import annotations

import io
import json

import pytest

from pytest_kvbudget import explain
from pytest_kvbudget.ledger.classes import verdict_of
from pytest_kvbudget.ledger.levers import levers_for
from pytest_kvbudget.verdict import Phase, Verdict
from tests.ledger.support import GIB, MIB, lever_effects, read
from tests.ledger.variant import N1, WRAPPER, E, N, R, gib

CAP = "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION"
MINIMUM = "VLLM_NEURON_MIN_KV_BUDGET_GIB"
HEADROOM = "VLLM_NEURON_RESERVED_HEADROOM_GIB"
T = "(Worker_TP0 pid=77) "
R1 = R.replace("77:77", "78:78")
LOADED = (
    N + "Initialized NeuronWorker with rank 0, local_rank 0",
    N1 + "Initialized NeuronWorker with rank 1, local_rank 1",
    N + "Neuron HBM: 17.08 GiB used, 6.92 GiB free",
    N1 + "Neuron HBM: 5.64 GiB used, 18.36 GiB free",
)
WARMING = (N + "Compilation complete in 301.22 seconds", N1 + "[1/4] Warming up for prefill: bucket_size=512, kv")
LIST = (
    "\t* total: 15.855GB",
    "\t* model code: 96.000MB",
    "\t* tensors: 15.000GB",
    "\t* runtime: 1.062KB",
)
REFUSED = "TDRV:log_dev_mem   Failed to allocate 512.000MB (alignment: none, usage: tensors) on ND 0:NC 1"
COLUMNS = (
    R1 + "TDRV:print_lnc_hbm_details   LNC size is 1. Neuron Cores using this HBM: NC 4 and NC 5",
    R1 + REFUSED,
    R1 + "TDRV:log_dev_mem_usage_table   Displaying Current Memory Utilization:",
    "(NOTE: the lines are LONG, and NEFF id to name mapping is printed after)",
    "",
    "              |          |  Model   |  Model   |          |  Shared  |",
    "              |  TOTAL   |   Code   |Constants | Tensors  |Scratchpad|",
    "ND 0 Overall  | 20.188GB |192.102MB | 82.344KB | 19.500GB |  0.000B  |",
    "\\_NC 4        | 20.094GB | 96.065MB | 58.344KB | 19.500GB |  0.000B  |",
)
BORDERED = (
    R1 + REFUSED + ", current utilization:",
    "|              |  TOTAL   |   Model Code   | Tensors  |",
    "ND 0 HBM 1     | 22.500GB |    96.000MB    | 20.000GB |",
)


@pytest.mark.parametrize(
    ("table", "total", "tensors"),
    [
        ((R1 + REFUSED + ", current utilization:", *LIST), gib(15.855), gib(15)),
        (COLUMNS, gib(20.188), gib(19.5)),
        (BORDERED, gib(22.5), gib(20)),
    ],
    ids=["list", "columns", "columns with a border"],
)
def test_the_table_of_the_failure_counts_and_not_what_was_said_after_the_weights(
    table: tuple[str, ...], total: int, tensors: int
) -> None:
    ledger = read(
        *LOADED, *WARMING, *table, "RuntimeError: Could not load the model status=4 message=Allocation Failure"
    )
    assert (ledger.failure_class, ledger.phase) == ("runtime_hbm_oom", Phase.MODEL_LOAD)
    assert (ledger.get("hbm_total_used_bytes"), ledger.get("hbm_tensors_bytes")) == (total, tensors)
    assert ledger.get("free_bytes") is None
    assert (ledger.get("used_after_load_bytes"), ledger.get("free_after_load_bytes")) == (gib(17.08), gib(6.92))
    assert ledger.cause is not None
    assert ledger.cause.rank == "Worker_TP1"
    assert list(ledger.ranks["hbm_total_used_bytes"]) == ["Worker_TP1"]
    assert "was free" not in ledger.cause.sentence
    assert f"{total / GIB:.2f} GiB was in use" in ledger.cause.sentence


def test_without_a_table_no_state_at_the_failure_is_claimed() -> None:
    refused = R1 + "TDRV:dmem_alloc_internal  Failed to allocate DEVICE memory (4294967296 bytes): memory (ret=-12)"
    ledger = read(*LOADED, *WARMING, refused)
    assert (ledger.get("hbm_total_used_bytes"), ledger.get("free_bytes")) == (gib(17.08), gib(6.92))
    assert ledger.cause is not None
    assert "6.92" not in ledger.cause.sentence
    out = io.StringIO()
    log = "\n".join((*LOADED, *WARMING, refused)).encode()
    assert explain.run([], as_json=False, out=out, stdin=io.BytesIO(log)) == explain.FAILED
    assert "free after the weights" in out.getvalue()


def test_two_ranks_tables_are_not_mixed() -> None:
    other = ("\t* total: 16.000GB", "\t* tensors: 12.000GB")
    ledger = read(
        *LOADED,
        *WARMING,
        R1 + REFUSED + ", current utilization:",
        *LIST,
        R + REFUSED + ", current utilization:",
        *other,
    )
    totals = {rank: value.value for rank, value in ledger.ranks["hbm_total_used_bytes"].items()}
    tensors = {rank: value.value for rank, value in ledger.ranks["hbm_tensors_bytes"].items()}
    assert totals == {"Worker_TP1": gib(15.855), "Worker_TP0": gib(16)}
    assert tensors == {"Worker_TP1": gib(15), "Worker_TP0": gib(12)}


COMPILED = (
    N + "Initialized NeuronWorker with rank 0, local_rank 0",
    N + "Compilation complete in 301.22 seconds",
    T + "Traceback (most recent call last):",
    T + '  File "/v/vllm_neuron/vllm/worker/neuron_worker.py", line 3, in compile_or_warm_up_model',
    T + "vllm_neuron.exceptions.CPUCompilationComplete: CPU compilation is complete; no device was used.",
)


@pytest.mark.parametrize(
    "end",
    [
        (),
        (E + "EngineCore failed to start.", WRAPPER),
        ("(Worker_TP1 pid=78) RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer", WRAPPER),
    ],
    ids=["alone", "with its wrappers", "with a rank that waited"],
)
def test_a_run_that_was_only_to_compile_ends_by_an_exception_and_is_no_failure(end: tuple[str, ...]) -> None:
    out = io.StringIO()
    status = explain.run([], as_json=True, out=out, stdin=io.BytesIO("\n".join((*COMPILED, *end, "")).encode()))
    said = json.loads(out.getvalue())
    assert (said["outcome"], said["phase"], said["failure_class"]) == ("booted", "compile", None)
    assert said["facts"]["compile_only"] is True
    assert status == explain.UNSAID
    page = io.StringIO()
    explain.run([], as_json=False, out=page, stdin=io.BytesIO("\n".join((*COMPILED, *end, "")).encode()))
    assert page.getvalue().startswith("COMPILED")


def test_a_rank_whose_compiler_refused_is_the_cause_whoever_else_finished() -> None:
    refused = "[NCC_EOOM002] Maximum peak HBM usage of 43.00GB exceeds HBM limit of 24.00GB for Trn2."
    assert read("(Worker_TP1 pid=78) " + refused, *COMPILED, WRAPPER).failure_class == "compile_hbm_exceeded"
    assert read(*COMPILED, "(Worker_TP1 pid=78) " + refused, WRAPPER).failure_class == "compile_hbm_exceeded"
    other = ("(Worker_TP1 pid=78) Traceback (most recent call last):", "(Worker_TP1 pid=78) KeyError: 'bucket'")
    assert read(*other, *COMPILED, WRAPPER).failure_class == "engine_exception"
    failed = "(Worker_TP1 pid=78) RuntimeError: neuronx-cc compilation failed with 70. Check compiler logs."
    assert read(*COMPILED, failed, WRAPPER).failure_class == "compile_failed"


@pytest.mark.parametrize(
    "line",
    [
        "Compilation cache key: 0123456789abcdef0123456789abcdef",
        "Local cache hit for key: 0123456789abcdef0123456789abcdef",
        "Remote cache miss for key: 0123456789abcdef0123456789abcdef",
        "Compile cache miss for graph 0123456789abcdef0123456789abcdef, compiling",
        "Cache disabled - forcing recompilation for key: 0123456789abcdef0123456789abcdef",
    ],
)
def test_a_miss_of_the_compile_cache_is_no_failure(line: str) -> None:
    ledger = read(N + "Initialized NeuronWorker with rank 0, local_rank 0", N + line, N + "Compiling...")
    assert (ledger.outcome, ledger.phase, ledger.cause) == ("booted", Phase.COMPILE, None)


@pytest.mark.parametrize(
    "text",
    [
        "VLLM_NEURON_DISABLE_WARMUP_COMPILE: local compile cache miss for key 0123456789abcdef. All graphs must be",
        "VLLM_NEURON_ASSERT_CACHE_HIT: local compile cache miss for key 0123456789abcdef and remote cache is disabled.",
        "No compiled graph in the cache, and VLLM_NEURON_DISABLE_WARMUP_COMPILE forbids to compile it.",
    ],
)
def test_it_is_one_where_compiling_is_forbidden(text: str) -> None:
    ledger = read(
        *LOADED,
        T + "Traceback (most recent call last):",
        T + '  File "/v/vllm_neuron/compile/backend.py", line 9, in compile_or_warm_up_model',
        T + "RuntimeError: " + text,
        E + "EngineCore failed to start.",
    )
    assert (ledger.outcome, ledger.phase, ledger.failure_class) == ("failed", Phase.COMPILE, "compile_cache_miss")
    assert verdict_of("compile_cache_miss") is Verdict.ERROR
    assert lever_effects(ledger)[HEADROOM, "raise"] == "useless"


def budget(exception: str, *reads: str) -> tuple[str, ...]:
    """A boot that stops where the worker works out its budget, with the lines of code of its traceback."""
    return (
        *LOADED,
        T + "Traceback (most recent call last):",
        T + '  File "/v/vllm_neuron/vllm/worker/neuron_worker.py", line 9, in determine_available_memory',
        *(T + "    " + line for line in reads),
        T + exception,
        E + "EngineCore failed to start.",
        WRAPPER,
    )


NAN = "ValueError: cannot convert float NaN to integer"
INFINITE = "OverflowError: cannot convert float infinity to integer"
TEXT = "ValueError: could not convert string to float: 'thirty'"


@pytest.mark.parametrize(
    ("lines", "variable"),
    [
        (budget(NAN, "heuristic_cap = int(total_budget * cap_fraction)"), CAP),
        (budget(INFINITE, "min_kv_bytes = int(min_kv_gib * (1024**3))"), MINIMUM),
        (budget(TEXT, f'maybe_convert_float(os.getenv("{CAP}"))'), CAP),
        (budget(TEXT, f"min_kv_gib = envs.{MINIMUM}"), MINIMUM),
        (budget("ValueError: could not convert string to float: ''", f"fraction = envs.{CAP}"), CAP),
        (budget(TEXT), f"{CAP}, {MINIMUM} or {HEADROOM}"),
        (budget(f"RuntimeError: {CAP} must be in (0, 1]. Got inf."), CAP),
        (budget(f"RuntimeError: {HEADROOM} must be a number of GiB. Got 'four'."), HEADROOM),
        (budget(f"RuntimeError: {HEADROOM} must be a finite, positive number of GiB. Got nan."), HEADROOM),
    ],
)
def test_a_setting_that_is_no_number_is_named(lines: tuple[str, ...], variable: str) -> None:
    ledger = read(*lines)
    assert (ledger.outcome, ledger.phase, ledger.failure_class) == ("failed", Phase.KV_CHECK, "argument_rejected")
    assert lever_effects(ledger)[variable, "none"] == "helps"
    assert ("gpu_memory_utilization", "lower") in lever_effects(ledger)
    assert ledger.cause is not None
    assert variable.split(",", maxsplit=1)[0] in ledger.cause.sentence


def test_the_same_exception_elsewhere_names_no_variable() -> None:
    ledger = read(
        "(EngineCore pid=5) INFO 09-30 10:00:00 [m.py:1] Starting to load model m...",
        E + "Traceback (most recent call last):",
        E + '  File "/v/vllm/model_executor/models/x.py", line 9, in load_model',
        E + NAN,
        E + "EngineCore failed to start.",
    )
    assert (ledger.failure_class, ledger.phase) == ("engine_exception", Phase.WEIGHTS_LOAD)


@pytest.mark.parametrize(
    ("status", "failure_class"), [(5, "device_fault"), (9, "devices_busy"), (11, "host_memory_short")]
)
def test_what_the_runtimes_status_says(status: int, failure_class: str) -> None:
    ledger = read(*LOADED, *WARMING, T + f"RuntimeError: nrt_execute status={status} message=x")
    assert (ledger.failure_class, ledger.get("status")) == (failure_class, status)


def test_with_a_headroom_set_the_utilization_and_the_cap_move_nothing() -> None:
    low = N.replace("INFO", "ERROR") + "RuntimeError: KV cache budget 0.00 GiB is below the minimum of 1.00 GiB"
    plain = read(*LOADED, low)
    headroom = read(
        N + "KV budget: logical core HBM 24.00 GiB, model weights 21.79 GiB, reserved headroom 4.00 GiB, KV budget "
        "0.00 GiB",
        low,
    )
    assert plain.failure_class == headroom.failure_class == "min_kv_budget"
    assert lever_effects(plain)["gpu_memory_utilization", "raise"] == "helps"
    assert lever_effects(headroom)["gpu_memory_utilization", "raise"] == "useless"
    assert lever_effects(headroom)[CAP, "raise"] == "useless"
    assert lever_effects(headroom)[HEADROOM, "lower"] == "helps"
    assert lever_effects(headroom)[HEADROOM, "raise"] == "harms"


@pytest.mark.parametrize("failure_class", ["kv_check_short", "kv_budget_nonpositive", "min_kv_budget"])
def test_more_headroom_harms_where_the_kv_cache_is_too_small(failure_class: str) -> None:
    effects = {
        (lever.name, lever.direction): lever.effect for lever in levers_for(failure_class, "neuron", Phase.KV_CHECK)
    }
    assert effects[HEADROOM, "raise"] == "harms"
    assert not any("cudagraph" in name or "CUDAGRAPH" in name for name, _ in effects)


def test_a_rank_that_lost_another_is_not_the_cause() -> None:
    ledger = read(
        N + "Extracting graphs for 2 prefill buckets: [128]",
        "(Worker_TP3 pid=80) RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:4433",
        T + "RuntimeError: neuronx-cc compilation failed with 70. Check compiler logs.",
    )
    assert ledger.failure_class == "compile_failed"


def test_an_alignment_is_read_and_none_is_not() -> None:
    aligned = REFUSED.replace("alignment: none", "alignment: 64.000MB")
    assert read(R + aligned).get("alloc_alignment_bytes") == 64 * MIB
    assert read(R + REFUSED).get("alloc_alignment_bytes") is None
