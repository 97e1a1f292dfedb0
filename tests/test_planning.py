"""Plans before a boot, what earlier boots teach them, the argument gate, and plans against what a boot said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvbudget.budget.footprint import footprint
from pytest_kvbudget.budget.gate import refusals
from pytest_kvbudget.budget.neuron import Variant
from pytest_kvbudget.config import LoadedTarget, built_in, load
from pytest_kvbudget.gate import CLASSES, cautions_for, refusal_for
from pytest_kvbudget.ledger.classes import CLASSES as VOCABULARY
from pytest_kvbudget.ledger.model import BootLedger
from pytest_kvbudget.ledger.reader import LedgerReader
from pytest_kvbudget.plan_check import Reconciled, reconcile
from pytest_kvbudget.planning import Experience, footprint_of, known_for, plan_for, policy_of, variant_for
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import GIB
from pytest_kvbudget.verdict import Phase, Provenance

CENT = 0.01 * GIB
TRN3 = """\
backend = "neuron"
devices = [0, 1]
[target.it.env]
NEURON_PLATFORM_TARGET_OVERRIDE = "trn3"
[target.it.shape]
model = "m"
tensor_parallel_size = 1
"""
R9700 = """\
backend = "rdna4"
devices = [0]
[target.it.env]
VLLM_CUDAGRAPH_MEM_BASE_MB = "0"
VLLM_CUDAGRAPH_MEM_PER_GRAPH_MB = "12"
[target.it.shape]
model = "m"
max_model_len = 200704
gpu_memory_utilization = 0.982
extra_args = ["--enable-expert-offload", "--expert-precise-memory"]
"""
VLLM = """\
backend = "vllm"
devices = [0]
[target.it.shape]
model = "m"
max_model_len = 16384
gpu_memory_utilization = 0.97
"""
GPU_BOOT = (
    "(EngineCore pid=7) INFO 10-05 12:00:00 [x.py:1] Free memory on device (31.64/31.86 GiB) on startup. Desired GPU"
    " memory utilization is (0.97, 30.9 GiB). Actual usage is 24.57 GiB for consumed memory (weights + non-torch),"
    " 1.46 GiB for peak activation, and 0.31 GiB for CUDAGraph memory.\n"
    "(EngineCore pid=7) INFO 10-05 12:00:00 [x.py:1] Available KV cache memory: 4.87 GiB\n"
)
"""Figures of a public log: 30.9 - 24.57 - 1.46 = 4.87."""
REFUSED = (
    "ValueError: Free memory on device cuda:0 (31.29/31.86 GiB) on startup is less than desired GPU memory utilization"
    " (1.0, 31.86 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.\n"
)
PLAN_G = (
    "budget (total x util)                          31.29 GiB\n"
    "non-expert weights                              6.34\n"
    "KV reserve (one max-model-len request +8%)      1.86     registry 9190 B/token\n"
    "CUDA graphs                                     0.07\n"
    "runtime overhead                                5.25\n"
    "expert cache space (the rest)                  17.77 GiB     7,762 slots\n"
)
"""The deployed row of the RDNA4 document's ladder."""


def neuron_boot(weights_gib: float, version: str = "0.27.1") -> str:
    return (
        f"(APIServer pid=1) INFO 10-05 12:00:00 [x.py:1] vLLM API server version {version}\n"
        "(EngineCore pid=7) 2026-10-05 12:00:00,000 - DEBUG - neuron_worker.py:1 - KV cache heuristic:"
        f" user_budget=1.00 GiB, cap=1.00 GiB (total_budget=9.00 GiB, total_hbm=36.00 GiB, bytes_used={weights_gib:.2f}"
        " GiB, cap_fraction=0.30), effective=1.00 GiB\n"
    )


def ledger_of(text: str, *, simulated: bool = False) -> BootLedger:
    reader = LedgerReader(simulated=simulated)
    reader.feed(text.encode())
    reader.close()
    return reader.ledger()


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def make(body: str) -> LoadedTarget:
        path = tmp_path / "kvbudget.toml"
        path.write_text(f"[target.it]\n{body}")
        return load(path).pick("it")

    return make


def taught(shape: Shape, *texts: str) -> Experience:
    experience = Experience()
    for text in texts:
        experience.tell(shape, ledger_of(text))
    return experience


def term(found: tuple[Reconciled, ...], name: str) -> Reconciled:
    return next(one for one in found if one.term == name)


# -- plans


def test_a_simulated_target_is_planned_from_its_own_table(tmp_path: Path) -> None:
    loaded = built_in(tmp_path).pick(None)
    mock, shape = loaded.target.mock, loaded.target.shape
    assert mock is not None
    plan = plan_for(loaded, shape.merged(max_num_batched_tokens=2048))
    assert plan is not None
    assert policy_of(loaded) == "vllm"
    peak = mock.activation_base + 2048 * mock.activation_per_batched_token
    utilization = shape.gpu_memory_utilization or 0
    taken = mock.weights + mock.non_torch + peak
    assert plan.left_bytes == pytest.approx(mock.device_total * utilization - taken, abs=2)


def test_two_ranks_share_the_weights_of_a_simulated_target(make: Any) -> None:
    body = (
        'backend = "mock"\ndevices = [0, 1]\n[target.it.shape]\nmodel = "m"\ngpu_memory_utilization = 0.9\n'
        'tensor_parallel_size = 2\n[target.it.mock]\nweights = "20 GiB"\n'
    )
    loaded = make(body)
    plan = plan_for(loaded, loaded.target.shape)
    assert plan is not None
    assert plan.term("weights and non-torch").size_bytes == 10 * GIB + int(1.45 * GIB)


def test_nothing_is_planned_where_nothing_is_known(make: Any) -> None:
    for body in (TRN3, R9700, VLLM):
        loaded = make(body)
        assert plan_for(loaded, loaded.target.shape) is None


def test_a_pinned_pool_is_a_plan_of_its_own(make: Any) -> None:
    loaded = make(VLLM)
    plan = plan_for(loaded, loaded.target.shape.merged(kv_cache_memory_bytes=GIB))
    assert plan is not None
    assert (plan.variant, plan.left_bytes) == ("pinned", GIB)


def test_the_next_boot_of_a_step_is_planned_from_the_last(make: Any) -> None:
    loaded = make(VLLM)
    shape = loaded.target.shape
    experience = taught(shape, GPU_BOOT)
    plan = plan_for(loaded, shape.merged(max_model_len=8192), experience)
    assert plan is not None
    assert plan.left_bytes == pytest.approx(4.87 * GIB, abs=2 * CENT)  # the window moves none of the terms
    other_step = shape.merged(max_num_batched_tokens=4096)
    assert plan_for(loaded, other_step, experience) is None
    assert plan_for(loaded, shape.merged(model="other"), experience) is None


def test_the_deployed_row_is_planned_again_from_its_own_lines(make: Any) -> None:
    loaded = make(R9700)
    shape = loaded.target.shape
    lines = PLAN_G + GPU_BOOT.replace("4.87", "2.95")
    plan = plan_for(loaded, shape, taught(shape, lines))
    assert plan is not None
    assert plan.left_bytes == pytest.approx(17.77 * GIB, abs=0.04 * GIB)


def test_the_window_moves_the_reserve_and_nothing_else(make: Any) -> None:
    loaded = make(R9700)
    shape = loaded.target.shape
    experience = taught(shape, PLAN_G + GPU_BOOT)
    whole, half = (plan_for(loaded, shape.merged(max_model_len=n), experience) for n in (200_704, 100_352))
    assert whole is not None
    assert half is not None
    for name in ("budget", "non-expert weights", "CUDA graphs", "runtime overhead"):
        assert whole.term(name) == half.term(name)
    saved = whole.term("KV reserve").size_bytes - half.term("KV reserve").size_bytes
    assert saved == pytest.approx(1.08 * 9190 * 100_352, abs=2)
    assert half.left_bytes - whole.left_bytes == saved


def test_a_neuron_plan_needs_weights_and_a_policy(make: Any) -> None:
    loaded = make(TRN3)
    shape = loaded.target.shape
    experience = taught(shape, neuron_boot(8.0))
    assert plan_for(loaded, shape, experience) is None  # neither utilization nor headroom
    plan = plan_for(loaded, shape.merged(reserved_headroom=4 * GIB), experience)
    assert plan is not None
    assert plan.left_bytes == 24 * GIB


def test_an_engine_without_a_law_has_no_plan(make: Any) -> None:
    loaded = make(VLLM.replace('"vllm"', '"somebodys"'))
    assert plan_for(loaded, loaded.target.shape) is None
    assert refusal_for(loaded, loaded.target.shape) is None


# -- what the gate knows


def test_the_release_is_the_engines_own(make: Any) -> None:
    loaded = make(TRN3)
    shape = loaded.target.shape
    assert variant_for(loaded, shape) is Variant.SDK_2_33
    assert variant_for(loaded, shape, taught(shape, neuron_boot(8.0, "0.24.0"))) is Variant.RELEASE_0_24


def test_a_checkpoint_folder_tells_its_heads_and_its_size(make: Any, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"text_config": {"num_key_value_heads": 2}}))
    (model / "model.safetensors").write_bytes(bytes(1000))
    loaded = make(VLLM.replace('"m"', f'"{model}"'))
    known = known_for(loaded, loaded.target.shape)
    assert (known.kv_heads, known.full_copy_bytes, known.latent_attention) == (2, 1000, False)
    smaller = loaded.target.shape.merged(extra_args=("--quantization", "fp8"))
    assert known_for(loaded, smaller).full_copy_bytes is None


def test_a_worker_that_was_disturbed_teaches_no_law(make: Any) -> None:
    shape = Shape()
    held = [REFUSED.replace("31.29/", f"{free}/") for free in ("27.00", "29.80")]
    assert taught(shape, *held).free() is None
    experience = taught(shape, *held, REFUSED.replace("31.29/", "31.10/"), REFUSED)
    free = experience.free()
    assert free is not None
    assert free.free_bytes == pytest.approx(31.29 * GIB, abs=CENT)


# -- the gate


def test_headroom_at_the_share_is_refused_before_any_boot(make: Any) -> None:
    loaded = make(TRN3)
    shape = loaded.target.shape
    cause = refusal_for(loaded, shape.merged(reserved_headroom=36 * GIB, lnc=2))
    assert cause is not None
    assert (cause.phase, cause.failure_class) == (Phase.ARGUMENT, "min_kv_budget")
    assert "not booted: headroom of 36.00 GiB" in cause.sentence
    assert "determine_available_memory, section 3" in cause.sentence
    assert {(lever.direction, lever.effect) for lever in cause.levers} == {("lower", "helps"), ("raise", "harms")}
    assert refusal_for(loaded, shape.merged(reserved_headroom=36 * GIB - 1, lnc=2)) is None
    assert refusal_for(loaded, shape.merged(reserved_headroom=18 * GIB, lnc=1)) is not None


def test_a_minimum_is_judged_only_with_weights_that_a_boot_stated(make: Any) -> None:
    loaded = make(TRN3)
    shape = loaded.target.shape.merged(reserved_headroom=30 * GIB)
    assert refusal_for(loaded, shape) is None
    experience = taught(loaded.target.shape, neuron_boot(8.0))
    cause = refusal_for(loaded, shape, experience)
    assert cause is not None
    assert cause.failure_class == "min_kv_budget"
    assert "to at most 27" in cause.sentence
    # printed to two decimals: at the very edge nobody knows
    assert refusal_for(loaded, shape.merged(reserved_headroom=27 * GIB), experience) is None
    assert refusal_for(loaded, shape.merged(reserved_headroom=27 * GIB + 1), experience) is None
    assert refusal_for(loaded, shape.merged(reserved_headroom=27 * GIB, model="larger"), experience) is None


def test_a_release_that_reads_no_headroom_refuses_none(make: Any) -> None:
    loaded = make(TRN3)
    shape = loaded.target.shape
    experience = taught(shape, neuron_boot(8.0, "0.24.0"))
    assert refusal_for(loaded, shape.merged(reserved_headroom=40 * GIB), experience) is None


def test_utilization_is_refused_by_what_a_worker_found(make: Any) -> None:
    loaded = make(R9700)
    shape = loaded.target.shape
    assert refusal_for(loaded, shape.merged(gpu_memory_utilization=0.99)) is None
    full = refusal_for(loaded, shape.merged(gpu_memory_utilization=1.0))
    assert full is not None
    assert full.failure_class == "startup_free_below_request"
    experience = taught(shape, REFUSED)
    refused = refusal_for(loaded, shape.merged(gpu_memory_utilization=0.99), experience)
    assert refused is not None
    assert "0.982" in refused.sentence or "0.981" in refused.sentence
    assert refusal_for(loaded, shape.merged(gpu_memory_utilization=0.981), experience) is None


def test_parallelism_is_refused_by_the_models_heads(make: Any, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"num_key_value_heads": 2}))
    loaded = make(VLLM.replace('"m"', f'"{model}"'))
    shape = loaded.target.shape.merged(tensor_parallel_size=2, extra_args=("--decode-context-parallel-size", "2"))
    cause = refusal_for(loaded, shape)
    assert cause is not None
    assert cause.failure_class == "parallelism_refused"
    assert refusal_for(loaded, shape.merged(tensor_parallel_size=4)) is None


def test_a_variable_that_the_worker_cannot_read_is_refused_with_its_text(make: Any) -> None:
    loaded = make(TRN3)
    shape = loaded.target.shape.merged(env={"VLLM_NEURON_MIN_KV_BUDGET_GIB": "inf"})
    cause = refusal_for(loaded, shape)
    assert cause is not None
    assert cause.failure_class == "argument_rejected"
    assert "'inf'" in cause.sentence
    negative = loaded.target.shape.merged(env={"VLLM_NEURON_RESERVED_HEADROOM_GIB": "-1"})
    assert refusal_for(loaded, negative) is None  # no rule for it is public


def test_what_endangers_a_boot_is_said_and_not_refused(make: Any) -> None:
    loaded = make(R9700)
    shape = loaded.target.shape.merged(env={"VLLM_CUDAGRAPH_MEM_ESTIMATE_MB": "72"})
    assert "does not scale" in cautions_for(loaded, shape, axis="max_num_seqs")[0]
    assert cautions_for(loaded, shape, axis="max_model_len") == ()
    assert refusal_for(loaded, shape) is None


def test_every_law_has_a_class_of_the_vocabulary() -> None:
    assert set(CLASSES.values()) <= set(VOCABULARY)


@given(
    headroom=st.none() | st.integers(0, 40 * GIB),
    utilization=st.none() | st.floats(0.01, 1.0),
    lnc=st.sampled_from((None, 1, 2)),
    weights_gib=st.integers(0, 40),
)
def test_the_gate_refuses_exactly_what_the_law_does(
    headroom: int | None, utilization: float | None, lnc: int | None, weights_gib: int
) -> None:
    from pytest_kvbudget.budget.gate import Known  # noqa: PLC0415 - only here

    shape = Shape(reserved_headroom=headroom, gpu_memory_utilization=utilization, lnc=lnc)
    known = Known(platform="trn3", weights_bytes=weights_gib * GIB)
    found = refusals("neuron", shape, known)
    share = 36 * GIB // (2 if lnc == 1 else 1)
    most = share - weights_gib * GIB - (headroom or 0)
    if headroom is None:
        # the cap of 0.30 and an unknown utilization's most
        budget = int(share * (utilization or 1.0))
        most = min(budget - weights_gib * GIB, int(budget * 0.30))
    assert bool(found) is (most < GIB or (headroom is not None and headroom >= share))


# -- against the boot


def test_terms_are_held_against_what_a_boot_said(make: Any) -> None:
    loaded = make(VLLM)
    shape = loaded.target.shape
    plan = plan_for(loaded, shape, taught(shape, GPU_BOOT))
    assert plan is not None
    found = reconcile(plan, ledger_of(GPU_BOOT.replace("24.57", "25.07").replace("4.87", "4.37")))
    assert term(found, "requested").agrees
    weights = term(found, "weights and non-torch")
    assert weights.difference_bytes == pytest.approx(0.50 * GIB, abs=CENT)
    assert "takes 0.50 GiB that the plan gave to something else" in weights.sentence
    left = term(found, "left")
    assert left.difference_bytes == pytest.approx(-0.50 * GIB, abs=2 * CENT)
    assert left.provenance is Provenance.MEASURED
    assert left.evidence[0].line == 2


def test_the_engines_own_plan_is_marked_as_such(make: Any) -> None:
    loaded = make(R9700)
    shape = loaded.target.shape
    plan = plan_for(loaded, shape, taught(shape, PLAN_G + GPU_BOOT))
    assert plan is not None
    found = reconcile(plan, ledger_of(PLAN_G))
    assert all(one.agrees for one in found if one.term != "left")
    assert {one.provenance for one in found} == {Provenance.ASSUMED}
    measured = reconcile(plan, ledger_of(PLAN_G.replace("5.25", "5.25     measured 4.09")))
    overhead = term(measured, "runtime overhead")
    assert overhead.provenance is Provenance.MEASURED
    assert "1.16 GiB are planned and not taken" in overhead.sentence


def test_what_no_line_states_is_not_compared(make: Any) -> None:
    loaded = make(VLLM)
    plan = plan_for(loaded, loaded.target.shape.merged(kv_cache_memory_bytes=GIB))
    assert plan is not None
    assert reconcile(plan, ledger_of("nothing of interest\n")) == ()


def test_simulated_figures_stay_simulated(make: Any) -> None:
    loaded = make(VLLM)
    plan = plan_for(loaded, loaded.target.shape, taught(loaded.target.shape, GPU_BOOT))
    assert plan is not None
    found = reconcile(plan, ledger_of(GPU_BOOT, simulated=True))
    assert {one.provenance for one in found} == {Provenance.SIMULATED}
    assert "simulated" in term(found, "left").sentence


def test_a_footprint_is_held_against_the_high_water() -> None:
    lines = (
        "INFO 10-05 12:00:00 [x.py:1] non-default args: {'kv_cache_memory_bytes': 3166500000}\n" + PLAN_G
        + "(Worker_TP0 pid=10) INFO 10-05 12:00:00 [x.py:1] Graph capturing finished in 9 secs, took 0.31 GiB\n"
    )  # fmt: skip
    assert footprint_of(ledger_of(lines)) is None  # the card's size is in no line
    plan = footprint_of(ledger_of(lines), 34_208_743_424)
    assert plan is not None
    # 6.34 + 2.95 + 0.31 + 17.77 + 1.45 + 0.57
    assert plan.left_bytes == pytest.approx((31.859 - 29.39) * GIB, abs=2 * CENT)
    (found,) = reconcile(plan, ledger_of(lines), high_water_bytes=34_208_743_424 - int(0.89 * GIB))
    assert found.difference_bytes == pytest.approx((30.97 - 29.39) * GIB, abs=2 * CENT)
    assert "promised too little" in found.sentence
    assert reconcile(plan, ledger_of(lines)) == ()


def test_a_footprint_beyond_the_card_warns_and_refuses_nothing() -> None:
    plan = footprint(total_bytes=GIB, weights_bytes=GIB, pool_bytes=0, graph_bytes=0, arena_bytes=0)
    assert plan.warnings
    assert not plan.fits


@pytest.mark.parametrize(("version", "counted"), [("0.26.0", False), ("0.27.0", True), ("0.32.0", True)])
def test_graphs_that_are_in_the_peak_are_not_charged_twice(make: Any, version: str, counted: bool) -> None:
    """From 0.27 the printed peak has the estimate of the graphs in it (facts on vLLM, section 3)."""
    loaded = make(VLLM)
    banner = (
        f"(EngineCore pid=7) INFO 10-05 11:59:00 [x.py:1] Initializing a V1 LLM engine (v{version}) with config: m\n"
    )
    estimate = "(EngineCore pid=7) INFO 10-05 12:00:00 [x.py:1] Estimated CUDA graph memory: 0.31 GiB total\n"
    ledger = ledger_of(banner + GPU_BOOT + estimate)
    assert ledger.engine_version == version
    assert ledger.get("graph_estimated_bytes") is not None
    experience = Experience()
    experience.tell(loaded.target.shape, ledger)
    plan = plan_for(loaded, loaded.target.shape, experience)
    assert plan is not None
    charged = sum(term.size_bytes for term in plan.terms if term.name == "CUDA graphs")
    assert charged == (0 if counted else pytest.approx(0.31 * GIB, abs=2))


def test_what_another_card_had_free_refuses_no_boot_on_this_one(make: Any) -> None:
    """31.00 of 31.86 GiB free on card 1: 0.98 of it cannot be had there, and nobody knows what card 0 has."""
    loaded = make('backend = "vllm"\ndevices = [0, 1]\n[target.it.shape]\nmodel = "m"\ngpu_memory_utilization = 0.98\n')
    refused = ledger_of(
        "(EngineCore pid=7) ERROR 10-05 12:00:00 [x.py:1] ValueError: Free memory on device cuda:0 (31.00/31.86 GiB) "
        "on startup is less than desired GPU memory utilization (0.98, 31.22 GiB).\n"
    )
    experience = Experience()
    experience.tell(loaded.target.shape, refused, devices=("1",))
    cause = refusal_for(loaded, loaded.target.shape, experience.on(("1",)))
    assert cause is not None
    assert cause.failure_class == "startup_free_below_request"
    assert refusal_for(loaded, loaded.target.shape, experience.on(("0",))) is None
