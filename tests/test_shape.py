from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from pytest_kvbudget.shape import Shape, ShapeError


def test_equal_shapes_have_equal_keys_in_every_process() -> None:
    code = (
        "from pytest_kvbudget.shape import Shape;"
        "print(Shape(max_model_len=4096, env={'B': '2', 'A': '1'}, model='m').key())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert Shape(model="m", env={"A": "1", "B": "2"}, max_model_len=4096).key() == other


def test_every_field_changes_the_key() -> None:
    base = Shape(model="m")
    changed = {
        "model": "n",
        "max_model_len": 1,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1,
        "kv_cache_dtype": "fp8",
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory_bytes": 1,
        "reserved_headroom": 0,
        "lnc": 2,
        "enforce_eager": True,
        "env": {"A": "1"},
        "extra_args": ("--x",),
    }
    assert set(changed) == set(Shape.__struct_fields__)
    keys = {base.merged(**{name: value}).key() for name, value in changed.items()}
    assert len(keys | {base.key()}) == len(changed) + 1


def test_merging_keeps_the_rest_and_joins_environments() -> None:
    shape = Shape(model="m", max_model_len=4096, env={"A": "1"}).merged(max_model_len=8192, env={"B": "2"})
    assert shape == Shape(model="m", max_model_len=8192, env={"A": "1", "B": "2"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_model_lens": 3}, "max_model_lens"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_model_len": "4096"}, "max_model_len"),
        ({"gpu_memory_utilization": 1.01}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization"),
        ({"kv_cache_memory_bytes": -1}, "kv_cache_memory_bytes"),
    ],
)
def test_impossible_values_are_refused_by_name(change: dict[str, object], said: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=said):
        Shape().merged(**change)


def test_a_misspelt_field_is_met_with_the_right_one() -> None:
    with pytest.raises(ShapeError, match="max_modle_len: unknown key; did you mean 'max_model_len'"):
        Shape().merged(max_modle_len=4096)


def test_sizes_may_be_text_as_in_marks() -> None:
    assert Shape().merged(kv_cache_memory_bytes="50 MiB", max_model_len=4096).kv_cache_memory_bytes == 52_428_800
    with pytest.raises(ShapeError, match="has no unit"):
        Shape().merged(kv_cache_memory_bytes="50")


def test_describes_only_what_was_asked_for() -> None:
    shape = Shape(max_model_len=4096, kv_cache_memory_bytes=52_428_800, env={"A": "1"}, extra_args=("--x", "1"))
    assert shape.describe() == "max_model_len=4096 kv_cache_memory_bytes=50.00 MiB A=1 --x 1"
    assert not Shape().describe()
