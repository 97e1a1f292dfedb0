"""Rehearsed boots are what processes do, and the chance that a shape passes is what its boots show."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pytest_kvbudget.mock.arguments import parse
from pytest_kvbudget.mock.conditions import Conditions, boot_noise, normal, shape_key
from pytest_kvbudget.mock.probability import command_of, pass_probability
from pytest_kvbudget.mock.rehearsal import rehearse
from pytest_kvbudget.mock.spec import MockDevice
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import GIB, MIB

from .harness import BASE, LONGEST, UTILIZATION, Host
from .rehearsing import CORE, FORK, HEADROOM, PRECISE, WINDOW, core, read, rehearsed

SHAPE = Shape(gpu_memory_utilization=0.75)
BOOTS: dict[str, tuple[MockDevice, tuple[str, ...], dict[str, str]]] = {
    "longest": (BASE, (*UTILIZATION, "--max-model-len", str(LONGEST)), {}),
    "too_long": (BASE, (*UTILIZATION, "--max-model-len", str(LONGEST + 1)), {}),
    "capture": (replace(BASE, graph_base=3 * GIB, graph_estimate=0.01), (*UTILIZATION, "--max-model-len", "16"), {}),
    "skewed_ranks": (
        replace(BASE, ranks=2, rank_skew=64 * MIB, device_skew=32 * MIB, noise_shape=8 * MIB, cold_extra=MIB),
        (*UTILIZATION, "--max-model-len", "16000"), {},
    ),
    "fork": (FORK, PRECISE, {}),
    "neuron": (replace(CORE, ranks=2), WINDOW, HEADROOM),
    "neuron_compile": (core(scratch_base=14 * GIB), WINDOW, {}),
    "neuron_load": (replace(core(scratch_base=8 * GIB, allocatable=18 * GIB), ranks=2), WINDOW, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", BOOTS)
def test_a_process_does_what_is_rehearsed(host: Host, name: str) -> None:
    spec, flags, env = BOOTS[name]
    boot = rehearsed(spec, *flags, env=env, cold=True)
    engine = host.start(spec, *flags, env=env)
    if boot.passed:
        engine.wait_ready()
        if spec.dialect != "neuron":
            assert tuple(host.used(card) for card in range(spec.ranks)) == boot.used_bytes
    else:
        assert engine.wait_exit() == 1
        assert boot.failure is not None
        assert f"{boot.failure.kind}: {boot.failure.text}" in engine.log()
    shown, thought = read(spec, engine.log()), read(spec, boot.log)
    assert (shown.failure_class, shown.phase) == (thought.failure_class, thought.phase)
    # ranks race, which of two equal values came first is then chance; a cache lies in the tree of its own device
    numbers = [
        {
            name: value.value
            for name, value in ledger.facts.items()
            if value.unit != "seconds" and name not in {"rank", "nc", "compile_cache_folder"}
        }
        for ledger in (shown, thought)
    ]
    assert numbers[0] == numbers[1]


def test_without_noise_a_shape_passes_or_does_not() -> None:
    assert pass_probability(BASE, SHAPE.merged(max_model_len=LONGEST)) == 1
    assert pass_probability(BASE, SHAPE.merged(max_model_len=LONGEST + 1)) == 0


def test_chance_is_the_normal_distributions() -> None:
    # the longest window is 1,983 blocks of a MiB with nothing to spare; each block less is one more sigma
    spec = replace(BASE, noise_boot=1 * MIB)
    chances = [pass_probability(spec, SHAPE.merged(max_model_len=LONGEST - 16 * blocks)) for blocks in range(-2, 4)]
    expected = [statistics.NormalDist().cdf(sigmas) for sigmas in range(-2, 4)]
    assert chances == pytest.approx(expected, abs=1e-5)


def test_chance_is_how_often_boots_pass() -> None:
    spec = replace(BASE, noise_boot=1 * MIB, seed=7)
    shape = SHAPE.merged(max_model_len=LONGEST - 16)
    argv, environ = command_of(shape)
    key = shape_key(parse(argv, fork=False), environ)
    passed = [
        rehearse(spec, argv, environ, conditions=Conditions(noise_bytes=boot_noise(spec, key, attempt))).passed
        for attempt in range(1, 401)
    ]
    # 0.841 of 400 boots, and four standard errors
    assert sum(passed) / 400 == pytest.approx(pass_probability(spec, shape), abs=4 * (0.841 * 0.159 / 400) ** 0.5)


def test_cold_boots_and_requests_count() -> None:
    spec = replace(BASE, cold_extra=1 * MIB)
    shape = SHAPE.merged(max_model_len=LONGEST)
    assert pass_probability(spec, shape) == 1
    assert pass_probability(spec, shape, cold=True) == 0
    spec = replace(BASE, request_peak_per_token=1 * MIB)
    # 2,560 MiB are free after the boot
    assert pass_probability(spec, shape, request_tokens=2560) == 1
    assert pass_probability(spec, shape, request_tokens=2561) == 0


def test_noise_of_a_shape_is_its_own() -> None:
    spec = replace(BASE, noise_shape=64 * MIB)
    windows = [SHAPE.merged(max_model_len=LONGEST - 16 * blocks) for blocks in range(64)]
    first = [pass_probability(spec, shape) for shape in windows]
    assert set(first) == {0, 1}
    assert [pass_probability(spec, shape) for shape in windows] == first
    assert [pass_probability(replace(spec, seed=1), shape) for shape in windows] != first


def test_device_skew_is_the_cards() -> None:
    spec = replace(BASE, device_skew=1 * GIB)
    shape = Shape(gpu_memory_utilization=0.85, max_model_len=16)
    # 8.5 GiB are asked for; card 1 has 9, card 2 has 8
    assert [pass_probability(spec, shape, cards=[card]) for card in range(3)] == [1, 1, 0]


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 1 << 20), st.integers(0, 1 << 29), st.integers(0, 1 << 29))
def test_more_noise_never_helps(window: int, low: int, more: int) -> None:
    argv, _ = command_of(SHAPE.merged(max_model_len=min(window, 262_144)))
    quiet = rehearse(BASE, argv, conditions=Conditions(noise_bytes=low)).passed
    loud = rehearse(BASE, argv, conditions=Conditions(noise_bytes=low + more)).passed
    assert quiet or not loud


def test_draws_are_standard_normal() -> None:
    draws = [normal("draw", number) for number in range(2000)]
    assert statistics.fmean(draws) == pytest.approx(0, abs=0.09)
    assert statistics.stdev(draws) == pytest.approx(1, abs=0.07)


def test_headroom_and_lnc_of_a_shape_are_neurons_variables() -> None:
    _, environ = command_of(Shape(reserved_headroom=int(3.5 * GIB), lnc=1))
    assert environ == {"VLLM_NEURON_RESERVED_HEADROOM_GIB": "3.5", "NEURON_LOGICAL_NC_CONFIG": "1"}
    # 24 - 5 - 20 GiB leave nothing
    assert pass_probability(CORE, Shape(reserved_headroom=4 * GIB, max_model_len=65536)) == 1
    assert pass_probability(CORE, Shape(reserved_headroom=20 * GIB, max_model_len=65536)) == 0


def test_neuron_noise_is_met_when_programs_are_loaded() -> None:
    # 5 + 0.5 + 4 (headroom 15) + 1 GiB and two programs of 4 MiB, of 24 GiB; activation comes last, 64 MiB
    free = (24 - 5) * GIB - 512 * MIB - 4 * GIB - 1 * GIB - 8 * MIB - 64 * MIB
    shape = Shape(reserved_headroom=15 * GIB, max_model_len=65520)
    assert pass_probability(replace(CORE, cold_extra=free), shape, cold=True) == 1
    assert pass_probability(replace(CORE, cold_extra=free + 1), shape, cold=True) == 0
    assert pass_probability(replace(CORE, cold_extra=free, noise_boot=MIB), shape, cold=True) == pytest.approx(
        0.5, abs=1e-5
    )


def test_command_prints_the_chance_of_every_rung(tmp_path: Path) -> None:
    (tmp_path / "kvbudget.toml").write_text(
        """
[target.small]
backend = "mock"
[target.small.shape]
gpu_memory_utilization = 0.75
[target.small.mock]
device_total = "10 GiB"
free_at_start = "10 GiB"
weights = "4 GiB"
non_torch = "1 GiB"
activation_base = "512 MiB"
activation_per_batched_token = 0
graph_base = "64 MiB"
graph_per_size = 0
kv_bytes_per_token = 65536
""",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "pytest_kvbudget.mock", "probability", "--target", "small"]
    command += ["--floor", "31712", "--ceiling", "31744", "--quantum", "16"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "31712 1.000000\n31728 1.000000\n31744 0.000000\n"
