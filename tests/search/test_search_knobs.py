"""Which way a failure pushes a knob, from the tuning procedure of the Neuron document and its failure table."""

from __future__ import annotations

import pytest

from pytest_kvbudget.ledger.classes import CLASSES, Proof
from pytest_kvbudget.ledger.model import Cause
from pytest_kvbudget.search.knobs import KNOBS, SIDES, why_futile
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import GIB
from pytest_kvbudget.verdict import Phase


def cause(failure_class: str, phase: Phase, *, by_gate: bool = False) -> Cause:
    return Cause(phase=phase, failure_class=failure_class, sentence=failure_class, by_gate=by_gate)


@pytest.mark.parametrize(
    ("failure_class", "phase", "side"),
    [
        ("compile_hbm_exceeded", Phase.COMPILE, "allocation"),  # NCC_EOOM002
        ("runtime_hbm_oom", Phase.MODEL_LOAD, "allocation"),  # NRT_RESOURCE in nrt_load_util
        ("kv_alloc_oom", Phase.KV_ALLOC, "allocation"),  # nrt_tensor_allocate status=4
        ("min_kv_budget", Phase.KV_CHECK, "minimum_kv"),
        ("kv_check_short", Phase.KV_CHECK, "minimum_kv"),
        ("runtime_hbm_oom", Phase.WEIGHTS_LOAD, None),  # before any KV cache: raise TP
        ("compile_failed", Phase.COMPILE, None),
        ("lnc_mismatch", Phase.MODEL_LOAD, None),
        ("profiler_reserve", Phase.MODEL_LOAD, None),
    ],
)
@pytest.mark.parametrize("knob", ["reserved_headroom", "kv_cap_fraction"])
def test_neuron_failures(knob: str, failure_class: str, phase: Phase, side: str | None) -> None:
    assert KNOBS[knob].side(cause(failure_class, phase)) == side


def test_the_opposite_failures_end_the_way_of_a_pool() -> None:
    """The pool is wanted small: what is short of KV ends the way, what cannot be allocated is the other end."""
    pool = KNOBS["kv_cache_memory_bytes"]
    assert (pool.goal, pool.ends_at, pool.other_side) == ("least", "minimum_kv", "allocation")
    for name in ("kv_cap_fraction", "gpu_memory_utilization"):
        assert (KNOBS[name].goal, KNOBS[name].ends_at) == ("most", "allocation")


def test_utilization_comes_down_from_the_startup_gate() -> None:
    """RDNA4 document: at 1.0 both ranks refuse before a weight loads; 0.982 is the law."""
    refused = cause("startup_free_below_request", Phase.WORKER_INIT)
    assert KNOBS["gpu_memory_utilization"].side(refused) == "allocation"
    assert KNOBS["kv_cache_memory_bytes"].side(refused) is None
    assert KNOBS["reserved_headroom"].side(refused) is None


def test_a_gate_pushes_nowhere_and_the_callers_classes_win() -> None:
    knob = KNOBS["reserved_headroom"]
    assert knob.side(cause("graph_capture_oom", Phase.READY, by_gate=True)) is None
    assert knob.side(None) is None
    assert knob.side(cause("house_rule", Phase.COMPILE)) is None
    assert knob.side(cause("house_rule", Phase.COMPILE), {"house_rule": "minimum_kv"}) == "minimum_kv"


def test_only_memory_is_on_a_side() -> None:
    # a plan is refused for its slots, which is memory, or for the model, which is an ERROR and never asked for a side
    for name in set(SIDES) - {"plan_refused"}:
        assert CLASSES.get(name, Proof.MEMORY) is Proof.MEMORY


def test_settings_are_what_flags_take() -> None:
    assert KNOBS["gpu_memory_utilization"].setting(9820) == 0.982
    assert KNOBS["gpu_memory_utilization"].value(0.982) == 9820
    assert KNOBS["kv_cap_fraction"].show(3000) == "0.3"
    assert KNOBS["reserved_headroom"].setting(4 * GIB) == 4 * GIB
    assert KNOBS["reserved_headroom"].show(4 * GIB) == "4.00 GiB"


@pytest.mark.parametrize(
    ("knob", "shape", "word"),
    [
        ("reserved_headroom", Shape(extra_args=("--num-gpu-blocks-override", "512")), "--num-gpu-blocks-override"),
        ("kv_cache_memory_bytes", Shape(extra_args=("--num-gpu-blocks-override=512",)), "--num-gpu-blocks-override"),
        ("kv_cap_fraction", Shape(reserved_headroom=0), "bypasses kv_cap_fraction"),
        ("gpu_memory_utilization", Shape(env={"VLLM_NEURON_RESERVED_HEADROOM_GIB": "4"}), "bypasses"),
    ],
)
def test_sweeps_that_test_nothing(knob: str, shape: Shape, word: str) -> None:
    reason = why_futile(KNOBS[knob], shape)
    assert reason is not None
    assert word in reason


def test_sweeps_that_test_something() -> None:
    assert why_futile(KNOBS["reserved_headroom"], Shape(reserved_headroom=4 * GIB)) is None
    assert why_futile(KNOBS["kv_cap_fraction"], Shape(gpu_memory_utilization=0.9)) is None
