"""Where arithmetic points before the first boot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_kvbudget.budget.utilization import FreeAtInit
from pytest_kvbudget.config import LoadedTarget, load
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.specs import LadderSpec, SweepSpec, check_spec, check_sweep
from pytest_kvbudget.units import GIB, MIB
from pytest_kvbudget.vantage import from_the_law, largest_headroom, plan_prior, turns_nothing

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}
POOL = Shape(kv_cache_memory_bytes=50 * MIB, max_model_len=4096)


@pytest.fixture
def target(tmp_path: Path) -> LoadedTarget:
    (tmp_path / "kvbudget.toml").write_text('[target.it]\nbackend = "vllm"\n[target.it.shape]\nmodel = "./model"\n')
    return load(tmp_path / "kvbudget.toml").pick("it")


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(TINY_LLAMA))
    return str(tmp_path / "model")


def ladder(**arguments: object) -> LadderSpec:
    return check_spec({"start": 131_072, "floor": 4096, "quantum": 128, **arguments})


def test_the_plan_of_a_pinned_pool_points_to_what_a_real_engine_takes(target: LoadedTarget, model: str) -> None:
    """The real vLLM served 51,072 tokens of this model from 50 MiB, and refused 51,200: it keeps one block of 128."""
    prior = plan_prior(target, ladder(), POOL.merged(model=model))
    assert prior is not None
    assert prior.source == "plan"
    assert 0 <= prior.value - 51_072 <= 128 + 127
    assert prior.relative == 0.03


def test_two_promised_windows_halve_it(target: LoadedTarget, model: str) -> None:
    prior = plan_prior(target, ladder(windows=2), POOL.merged(model=model))
    assert prior is not None
    # 25,536 tokens are a half, in blocks of 128
    assert 0 <= prior.value - 25_536 <= 128 + 127


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ({}, {}),
        ({"model": "/no/such/model"}, {}),
        ({"model": "{model}", "kv_cache_memory_bytes": None}, {}),
        ({"model": "{model}", "kv_cache_memory_bytes": MIB}, {}),
        ({"model": "{model}"}, {"axis": "max_num_seqs", "start": 8, "floor": 1, "quantum": 1}),
        ({"model": "{model}"}, {"axis": "kv_cache_memory_bytes", "start": "64 MiB", "floor": "32 MiB", "quantum": MIB}),
    ],
    ids=["no model", "no folder", "pool unknown", "floor does not fit", "sequences", "pool"],
)
def test_without_figures_nothing_is_pointed_to(
    target: LoadedTarget, model: str, shape: dict[str, object], spec: dict[str, object]
) -> None:
    changes = {name: model if value == "{model}" else value for name, value in shape.items()}
    assert plan_prior(target, ladder(**spec), POOL.merged(**changes)) is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model_type": 5}'])
def test_a_broken_configuration_of_a_model_is_no_plan(target: LoadedTarget, model: str, text: str) -> None:
    Path(model, "config.json").write_text(text)
    assert plan_prior(target, ladder(), POOL.merged(model=model)) is None


def sweep(**arguments: object) -> SweepSpec:
    return check_sweep({"knob": "gpu_memory_utilization", **arguments})


def test_a_sweep_of_the_utilization_goes_down_from_its_law() -> None:
    """31.29 of 31.86 GiB are free on an R9700: 0.982 is the law (RDNA4 document, section 1), 0.98 on a grid of 0.01."""
    free = FreeAtInit(free_bytes=int(31.29 * GIB), total_bytes=int(31.86 * GIB), source="startup line")
    assert from_the_law(sweep(), free).start == 9800
    assert from_the_law(sweep(), None).start == 9800
    assert from_the_law(sweep(step=0.001), free).start == 9820
    assert from_the_law(sweep(ceiling=0.9), free).start == 9000
    assert from_the_law(sweep(floor=0.99), free).start == 9900
    assert from_the_law(sweep(start=0.8), free).start == 8000
    pool = check_sweep({"knob": "kv_cache_memory_bytes", "ceiling": "1 GiB"})
    assert from_the_law(pool, free) == pool


def test_the_largest_headroom_needs_the_weights(target: LoadedTarget) -> None:
    headroom = check_sweep({"knob": "reserved_headroom"})
    assert largest_headroom(target, headroom, Shape(model="m")) is None
    assert largest_headroom(target, sweep(), Shape(model="m")) is None


@pytest.mark.parametrize("knob", ["reserved_headroom", "kv_cap_fraction", "cudagraph_per_graph"])
def test_a_knob_that_the_engine_does_not_read_is_refused(target: LoadedTarget, knob: str) -> None:
    said = turns_nothing(target, check_sweep({"knob": knob}), Shape(model="m"))
    assert said is not None
    assert said.startswith(f"target it is 'vllm', whose engine does not read {knob}")


@pytest.mark.parametrize("knob", ["gpu_memory_utilization", "kv_cache_memory_bytes"])
def test_knobs_of_vllm_are_read_by_every_engine(target: LoadedTarget, knob: str) -> None:
    assert turns_nothing(target, check_sweep({"knob": knob}), Shape(model="m")) is None
