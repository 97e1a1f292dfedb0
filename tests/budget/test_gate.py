"""The argument gate refuses what a law forbids, and nothing else."""

from __future__ import annotations

import pytest

from pytest_kvbudget.budget.gate import Known, Policy, cautions, flag_value, refusals
from pytest_kvbudget.budget.neuron import Variant
from pytest_kvbudget.budget.rdna4 import arena_plan
from pytest_kvbudget.budget.utilization import FreeAtInit
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import GIB
from pytest_kvbudget.verdict import Provenance

TRN3 = Known(platform="trn3")


def laws(policy: Policy, shape: Shape, known: Known | None = None, variant: Variant = Variant.SDK_2_33) -> list[str]:
    return [refusal.law for refusal in refusals(policy, shape, known, variant=variant)]


@pytest.mark.parametrize(
    ("lnc", "headroom_gib", "expected"),
    [(2, 36, ["headroom_share"]), (2, 35, []), (1, 18, ["headroom_share"]), (1, 17, [])],
)
def test_headroom_at_or_above_the_share(lnc: int, headroom_gib: int, expected: list[str]) -> None:
    assert laws("neuron", Shape(lnc=lnc, reserved_headroom=headroom_gib * GIB), TRN3) == expected


def test_headroom_is_not_judged_where_it_is_not_read_or_the_core_is_unknown() -> None:
    shape = Shape(reserved_headroom=40 * GIB)
    assert laws("neuron", shape, TRN3, variant=Variant.RELEASE_0_24) == []
    assert laws("neuron", shape) == []
    unchecked = Shape(
        reserved_headroom=40 * GIB,
        env={"VLLM_NEURON_MIN_KV_BUDGET_GIB": "0"},
        extra_args=("--num-gpu-blocks-override", "100"),
    )
    assert laws("neuron", unchecked, TRN3) == []


def test_minimum_kv_only_with_known_weights() -> None:
    shape = Shape(lnc=1, gpu_memory_utilization=0.9)
    assert laws("neuron", shape, TRN3) == []
    assert laws("neuron", shape, Known(platform="trn3", weights_bytes=16 * GIB)) == ["minimum_kv"]
    guessed = Known(platform="trn3", weights_bytes=16 * GIB, weights_provenance=Provenance.ASSUMED)
    assert laws("neuron", shape, guessed) == []


def test_unknown_utilization_is_refused_only_where_the_whole_core_would_not_do() -> None:
    assert laws("neuron", Shape(lnc=1), Known(platform="trn3", weights_bytes=16 * GIB)) == []
    assert laws("neuron", Shape(lnc=1), Known(platform="trn3", weights_bytes=17 * GIB + 1)) == ["minimum_kv"]


def test_bad_variable_is_refused_with_its_text() -> None:
    (refusal,) = refusals("neuron", Shape(env={"VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION": "2"}), TRN3)
    assert refusal.law == "environment"
    assert "'2'" in refusal.sentence


def test_utilization_law() -> None:
    seen = Known(free=FreeAtInit(free_bytes=int(31.29 * GIB), total_bytes=int(31.86 * GIB), source="refusal line"))
    assert laws("rdna4", Shape(gpu_memory_utilization=0.982), seen) == []
    assert laws("rdna4", Shape(gpu_memory_utilization=0.983), seen) == ["utilization"]
    assert laws("rdna4", Shape(gpu_memory_utilization=0.99)) == []
    assert laws("rdna4", Shape(gpu_memory_utilization=1.0)) == ["utilization"]
    assert laws("vllm", Shape(gpu_memory_utilization=1.0)) == []
    assert laws("vllm", Shape(gpu_memory_utilization=0.99), seen) == ["utilization"]
    assert laws("rdna4", Shape()) == []


def test_context_parallel_needs_more_ranks_than_kv_heads() -> None:
    shape = Shape(tensor_parallel_size=2, extra_args=("--decode-context-parallel-size", "2"))
    (refusal,) = refusals("rdna4", shape, Known(kv_heads=2))
    assert refusal.law == "decode_context_parallel"
    assert refusal.numbers == {"tensor_parallel_size": 2, "kv_heads": 2}
    assert laws("rdna4", shape.merged(tensor_parallel_size=4), Known(kv_heads=2)) == []
    assert laws("rdna4", shape) == []
    assert laws("vllm", shape, Known(kv_heads=2, latent_attention=True)) == []
    single = Shape(tensor_parallel_size=2, extra_args=("--decode-context-parallel-size=1",))
    assert laws("rdna4", single, Known(kv_heads=2)) == []


def test_data_parallel_only_when_a_copy_exceeds_the_card() -> None:
    shape = Shape(extra_args=("--data-parallel-size=2",))
    assert laws("rdna4", shape, Known(total_bytes=32 * GIB, full_copy_bytes=70 * GIB)) == ["data_parallel"]
    assert laws("rdna4", shape, Known(total_bytes=32 * GIB, full_copy_bytes=20 * GIB)) == []
    assert laws("rdna4", shape, Known(full_copy_bytes=70 * GIB)) == []


def test_expert_parallel_is_a_caution_only() -> None:
    shape = Shape(extra_args=("--enable-expert-parallel",))
    assert laws("rdna4", shape) == []
    assert "replaces" in cautions("rdna4", shape)[0]
    assert cautions("rdna4", Shape()) == ()


def test_explicit_estimate_is_a_caution_on_an_axis_that_changes_captures() -> None:
    shape = Shape(env={"VLLM_CUDAGRAPH_MEM_ESTIMATE_MB": "72"})
    assert "does not scale" in cautions("rdna4", shape, axis="max_num_seqs")[0]
    assert cautions("rdna4", shape, axis="max_model_len") == ()


def test_block_override_is_a_caution() -> None:
    assert "defeats" in cautions("neuron", Shape(extra_args=("--num-gpu-blocks-override=10",)))[0]


def test_resident_floor() -> None:
    arena = arena_plan(
        total_bytes=34_208_743_424, utilization=0.9, non_expert_bytes=20 * GIB, kv_reserve_bytes=0, graph_bytes=0,
        overhead=int(5.25 * GIB),
    )  # fmt: skip
    assert laws("rdna4", Shape(), Known(arena=arena, resident_floor_slots=1587)) == ["resident_floor"]
    assert laws("rdna4", Shape(), Known(arena=arena, resident_floor_slots=1000)) == []
    assert laws("rdna4", Shape(), Known(arena=arena)) == []


def test_flags_are_read_in_both_spellings() -> None:
    assert flag_value(("--a=1", "--data_parallel_size", "4"), "--data-parallel-size") == "4"
    assert flag_value(("--data-parallel-size",), "--data-parallel-size") is None
