"""What a boot meets beyond its shape: noise by attempt, a cold cache, an estimate that alternates."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from pytest_kvbudget.config import ConfigError, decode
from pytest_kvbudget.mock.arguments import parse
from pytest_kvbudget.mock.conditions import begin, boot_noise, shape_key
from pytest_kvbudget.mock.spec import ColdSeconds, Compile, MockDevice, PhaseSeconds
from pytest_kvbudget.units import GIB, MIB

from .harness import BASE, UTILIZATION, Engine, Host

SMALL = (*UTILIZATION, "--max-model-len", "4096")
QUICK_END = PhaseSeconds(linger=0.05)


def ended(engine: Engine) -> str:
    engine.wait_ready().process.terminate()
    engine.wait_exit()
    return engine.log()


def available(log: str) -> float:
    match = re.search(r"Available KV cache memory: ([\d.]+) GiB", log)
    assert match is not None
    return float(match[1])


def test_attempts_are_counted_by_shape_and_in_all(tmp_path: Path) -> None:
    spec = replace(BASE, noise_boot=MIB, seed=3)
    seen = [begin(spec, key, str(tmp_path)) for key in ("a", "b", "a")]
    assert [one.boot for one in seen] == [1, 2, 3]
    assert [one.noise_bytes for one in seen] == [
        boot_noise(spec, key, attempt) for key, attempt in (("a", 1), ("b", 1), ("a", 2))
    ]
    assert len({one.noise_bytes for one in seen}) == 3


def test_nothing_is_counted_where_nothing_depends_on_it(tmp_path: Path) -> None:
    begin(BASE, "a", str(tmp_path / "tree"))
    assert not (tmp_path / "tree").exists()


def test_key_of_a_shape_ignores_where_it_is_served() -> None:
    def key(*flags: str, **env: str) -> str:
        return shape_key(parse(["serve", "m", *flags], fork=False), env)

    assert key("--port", "1") == key("--port", "2", "--host", "::")
    assert key("--max-num-seqs", "1", "--max-model-len", "5") == key("--max-model-len", "5", "--max-num-seqs", "1")
    assert key(VLLM_CACHE_ROOT="a", NEURON_VISIBLE_DEVICES="0") == key()
    assert len({key(), key("--max-model-len", "5"), key(VLLM_NEURON_RESERVED_HEADROOM_GIB="4")}) == 3


def test_boots_of_one_shape_differ_and_can_be_repeated(host: Host, tmp_path: Path) -> None:
    spec = replace(BASE, noise_boot=256 * MIB, seconds=QUICK_END)
    first = [available(ended(host.start(spec, *SMALL))) for _ in range(2)]
    assert first[0] != first[1]
    host.tree = tmp_path / "another"
    assert [available(ended(host.start(spec, *SMALL))) for _ in range(2)] == first
    host.tree = tmp_path / "third"
    assert available(ended(host.start(replace(spec, seed=1), *SMALL))) != first[0]


def test_first_boot_of_a_compile_key_takes_more(host: Host) -> None:
    seconds = PhaseSeconds(linger=0.05, cold=ColdSeconds(compile=0.03))
    spec = replace(BASE, cold_extra=512 * MIB, seconds=seconds)
    cold, warm = (ended(host.start(spec, *SMALL)) for _ in range(2))
    assert (available(cold), available(warm)) == (1.44, 1.94)
    assert "(compilation: 0.03 s)" in cold
    assert "Dynamo bytecode transform time" in cold
    assert "Directly load the compiled graph(s) for compile range (1, 2048) from the cache" in warm
    # the window is no part of the key, the tokens of a step are
    assert available(ended(host.start(spec, *UTILIZATION, "--max-model-len", "8192"))) == 1.94
    assert available(ended(host.start(spec, *SMALL, "--max-num-batched-tokens", "1024"))) == 1.44


def test_alternating_estimate_changes_from_boot_to_boot(host: Host) -> None:
    spec = replace(BASE, estimate="alternating")
    said = []
    for window in ("40000", "50000", "40000"):
        engine = host.start(spec, *UTILIZATION, "--max-model-len", window)
        engine.wait_exit()
        match = re.search(r"estimated maximum model length is (\d+)\.", engine.log())
        assert match is not None
        said.append(int(match[1]))
    assert said == [31_728 * 2, 31_728 // 2, 31_728 * 2]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"chunked_prefill": False}, MockDevice(chunked_prefill=False)),
        ({"chunked_prefill": 32768}, MockDevice(chunked_prefill=32768)),
        ({"chunked_prefill": "off above 32768"}, MockDevice(chunked_prefill="off above 32768")),
        ({"estimate": 2}, MockDevice(estimate=2.0)),
        ({"estimate": "factor 0.5", "noise_boot": "64 MiB"}, MockDevice(estimate="factor 0.5", noise_boot=64 * MIB)),
        (
            {"dialect": "neuron", "compile": {"limit": "23 GiB", "min_kv": 0}},
            MockDevice(dialect="neuron", compile=Compile(limit=23 * GIB, min_kv=0)),
        ),
        ({"seconds": {"cold": {"compile": 3}}}, MockDevice(seconds=PhaseSeconds(cold=ColdSeconds(compile=3)))),
    ],
)
def test_keys_are_decoded(raw: dict[str, object], expected: MockDevice) -> None:
    assert decode(raw, MockDevice, where="t") == expected
    # and survive the way to the engine
    assert msgspec.json.decode(msgspec.json.encode(expected), type=MockDevice) == expected


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({"estimate": "wild"}, "estimate"),
        ({"chunked_prefill": "never"}, "chunked_prefill"),
        ({"compile": {}}, "compile is of dialect 'neuron', not 'vllm'"),
        ({"arena": {"overhead": 1}}, "unknown key"),
        ({"noise_boot": "a lot"}, "noise_boot"),
        ({"graph_estimate": -1}, "graph_estimate"),
    ],
)
def test_wrong_keys_are_named(raw: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        decode(raw, MockDevice, where="t")
