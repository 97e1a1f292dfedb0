"""Backends: a shape as the exact command line and environment, device sets, lease names, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_kvbudget.config import ConfigError, LoadedTarget, load
from pytest_kvbudget.device import probes
from pytest_kvbudget.device.model import ProbeError
from pytest_kvbudget.engine.backends.neuron import gib_text, platform_of
from pytest_kvbudget.engine.backends.registry import BUILT_IN, backend_of
from pytest_kvbudget.engine.model import Backend, Command
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import GIB

R9700 = """\
backend = "rdna4"
devices = [0, 1, 2, 3]
[target.it.env]
VLLM_CUDAGRAPH_MEM_BASE_MB = "0"
VLLM_CUDAGRAPH_MEM_PER_GRAPH_MB = "12"
[target.it.shape]
model = "/models/qwen"
max_model_len = 200704
max_num_seqs = 3
kv_cache_dtype = "fp8"
tensor_parallel_size = 2
gpu_memory_utilization = 0.982
kv_cache_memory_bytes = 3166500000
extra_args = ["--enable-expert-offload", "--expert-precise-memory"]
"""
TRN3 = """\
backend = "neuron"
devices = [0, 1, 2, 3, 4, 5, 6, 7]
[target.it.env]
NEURON_PLATFORM_TARGET_OVERRIDE = "trn3"
[target.it.shape]
model = "openai/gpt-oss-120b"
max_model_len = 16384
max_num_batched_tokens = 8192
max_num_seqs = 4
tensor_parallel_size = 8
reserved_headroom = "4 GiB"
lnc = 2
extra_args = ["--no-disable-hybrid-kv-cache-manager"]
"""


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Loads a target from the body of its table; the backend has not checked it."""

    def make(body: str) -> LoadedTarget:
        path = tmp_path / "kvbudget.toml"
        path.write_text(f"[target.it]\n{body}")
        return load(path).pick("it")

    return make


def rendered(loaded: LoadedTarget, **changes: Any) -> tuple[Backend, Command]:
    backend = backend_of(loaded)
    shape = loaded.target.shape.merged(**changes)
    return backend, backend.render(loaded, shape, backend.slots(loaded, shape)[0], 8000)


def test_every_built_in_backend_is_found(make: Any) -> None:
    for name in BUILT_IN:
        backend = backend_of(make(f'backend = "{name}"\ndevices = [0]\n[target.it.shape]\nmodel = "m"\n'))
        assert backend.name == name
    with pytest.raises(ConfigError, match="expected one of mock, neuron, rdna4, vllm"):
        backend_of(make('backend = "sglang"\n'))


# -- flags that the shape renders itself

VLLM_SERVED = 'devices = [0]\n{command}[target.it.shape]\nmodel = "m"\n{extra}'


@pytest.mark.parametrize("backend", [*BUILT_IN])
@pytest.mark.parametrize(
    ("words", "flag", "key"),
    [
        (["--max-num-seqs", "4"], "--max-num-seqs", "max_num_seqs of the shape"),
        (["--max_num_seqs=4"], "--max_num_seqs", "max_num_seqs of the shape"),
        (["--gpu-memory-util", "0.95"], "--gpu-memory-util, short for --gpu-memory-utilization,", "gpu_memory_util"),
        (["--load-format", "dummy", "--kv-cache-memory-bytes", "2000000000"], "--kv-cache-mem", "kv_cache_memory_byt"),
        (["-tp", "2"], "-tp", "tensor_parallel_size of the shape"),
        (["--tensor-parallel-size=2"], "--tensor-parallel-size", "tensor_parallel_size of the shape"),
        (["--max-model-len", "4096"], "--max-model-len", "max_model_len of the shape"),
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype", "kv_cache_dtype of the shape"),
        (["--max-num-batched-tokens", "1"], "--max-num-batched-tokens", "max_num_batched_tokens of the shape"),
        (["--no-enforce-eager"], "--no-enforce-eager", "enforce_eager of the shape"),
        (["--model", "other"], "--model", "model of the shape"),
        (["--port", "8000"], "--port", "port of the target"),
        (["--host=0.0.0.0"], "--host", "host of the target"),
    ],
)
def test_a_flag_that_the_shape_renders_is_refused_beside_it(
    make: Any, backend: str, words: list[str], flag: str, key: str
) -> None:
    head = f'backend = "{backend}"\n'
    with pytest.raises(ConfigError) as refused:
        backend_of(make(head + VLLM_SERVED.format(command="", extra=f"extra_args = {words}\n")))
    assert "kvbudget.toml [target.it] shape.extra_args: " + flag in str(refused.value)
    assert key in str(refused.value)
    command = ["numactl", "--membind=0", "vllm", "serve", *words]
    loaded = make(head + VLLM_SERVED.format(command=f"command = {command}\n", extra=""))
    with pytest.raises(ConfigError, match=r"\[target\.it\] command: " + flag):
        backend_of(loaded)


@pytest.mark.parametrize(
    "command",
    [
        ["podman", "run", "--host", "a", "--model=b", "image", "vllm", "serve", "--max-log-len", "10"],
        ["./serve.sh", "--port", "8000", "--m", "x"],
        ["python", "-m", "vllm.entrypoints.openai.api_server", "--model-impl", "auto", "--max-seq-len-to-capture", "1"],
    ],
)
def test_flags_of_a_wrapper_and_flags_that_only_look_alike_are_passed_on(make: Any, command: list[str]) -> None:
    extra = 'extra_args = ["--model-loader-extra-config", "{}", "--port-range", "1", "--served-model-name", "m"]\n'
    _, rendering = rendered(
        make('backend = "vllm"\n' + VLLM_SERVED.format(command=f"command = {command}\n", extra=extra))
    )
    assert rendering.argv[: len(command)] == tuple(command)


def test_a_wrapper_that_sets_what_the_shape_sets_is_refused(make: Any) -> None:
    command = ["./serve.sh", "--max-model-len", "4096"]
    with pytest.raises(ConfigError, match="command: --max-model-len would override the shape's max_model_len"):
        backend_of(make('backend = "vllm"\n' + VLLM_SERVED.format(command=f"command = {command}\n", extra="")))


# -- rdna4


def test_the_documents_shape_as_command_and_environment(make: Any) -> None:
    backend, command = rendered(make(R9700))
    assert command.argv == (
        "vllm", "serve", "/models/qwen",
        "--max-model-len", "200704", "--max-num-seqs", "3", "--kv-cache-dtype", "fp8",
        "--tensor-parallel-size", "2", "--gpu-memory-utilization", "0.982", "--kv-cache-memory-bytes", "3166500000",
        "--enable-expert-offload", "--expert-precise-memory", "--host", "127.0.0.1", "--port", "8000",
    )  # fmt: skip
    assert command.env_added == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "HIP_VISIBLE_DEVICES": "0,1",
        "VLLM_CUDAGRAPH_MEM_BASE_MB": "0",
        "VLLM_CUDAGRAPH_MEM_PER_GRAPH_MB": "12",
    }
    assert (backend.grammar, backend.simulated) == ("rdna4", False)


def test_cards_are_cut_into_pairs_and_leased_as_vllm_leases_them(make: Any) -> None:
    loaded = make(R9700)
    backend = backend_of(loaded)
    assert backend.slots(loaded, loaded.target.shape) == (("0", "1"), ("2", "3"))
    mainline = backend_of(make('backend = "vllm"\ndevices = [0, 1]\n[target.it.shape]\nmodel = "m"\n'))
    assert backend.lease_names(loaded, ("0", "1")) == mainline.lease_names(loaded, ("0", "1"))


def test_a_survivor_must_leave_more_than_a_corpse_had(make: Any) -> None:
    least = backend_of(make(R9700)).min_free_bytes(make(R9700))
    assert least is not None
    assert 0.13 * GIB < least < 0.89 * GIB


@pytest.mark.parametrize(
    ("found", "instead", "named"),
    [
        ('model = "/models/qwen"', "", r"shape\.model: is missing"),
        ("devices = [0, 1, 2, 3]", "", "devices: is missing"),
        ("devices = [0, 1, 2, 3]", 'devices = ["cpu"]', "'cpu' is no card"),
        ("max_num_seqs = 3", "lnc = 2", r"shape\.lnc: is a Neuron setting"),
        ("max_num_seqs = 3", 'reserved_headroom = "1 GiB"', r"shape\.reserved_headroom"),
        ('PER_GRAPH_MB = "12"', 'PER_GRAPH_MB = "twelve"', "'twelve'; expected a number of MiB"),
        ('BASE_MB = "0"', 'BASE_MB = "0"\nHIP_VISIBLE_DEVICES = "3"', r"env\.HIP_VISIBLE_DEVICES: is '3'"),
        ('"--enable-expert-offload", ', "", "--expert-precise-memory without --enable-expert-offload"),
        ("max_num_seqs = 3", "max_num_seqs = 3\n[target.it.mock]\nranks = 1", "mock: is for backend 'mock'"),
    ],
)
def test_what_rdna4_refuses(make: Any, found: str, instead: str, named: str) -> None:
    assert found in R9700
    body = R9700.replace(found, instead)
    if "[target.it.mock]" in body:
        head, tail = body.split("[target.it.mock]\nranks = 1")
        body = f"{head}{tail}\n[target.it.mock]\nranks = 1\n"
    with pytest.raises(ConfigError, match=named):
        backend_of(make(body))


# -- neuron


def test_a_neuron_shape_as_command_and_environment(make: Any) -> None:
    backend, command = rendered(make(TRN3))
    assert command.argv == (
        "vllm", "serve", "openai/gpt-oss-120b",
        "--max-model-len", "16384", "--max-num-seqs", "4", "--max-num-batched-tokens", "8192",
        "--tensor-parallel-size", "8", "--no-disable-hybrid-kv-cache-manager", "--host", "127.0.0.1", "--port", "8000",
    )  # fmt: skip
    assert command.env_added == {
        "NEURON_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
        "NEURON_PLATFORM_TARGET_OVERRIDE": "trn3",
        "VLLM_NEURON_RESERVED_HEADROOM_GIB": "4",
        "NEURON_LOGICAL_NC_CONFIG": "2",
    }
    assert backend.grammar == "neuron"


def test_a_sweep_turns_the_reserve_whatever_the_targets_environment_says(make: Any) -> None:
    loaded = make(TRN3.replace('reserved_headroom = "4 GiB"\n', "").replace(
        'OVERRIDE = "trn3"', 'OVERRIDE = "trn3"\nVLLM_NEURON_RESERVED_HEADROOM_GIB = "9"'
    ))  # fmt: skip
    _, kept = rendered(loaded)
    assert kept.env["VLLM_NEURON_RESERVED_HEADROOM_GIB"] == "9"
    _, turned = rendered(loaded, reserved_headroom=5 * GIB)
    assert turned.env["VLLM_NEURON_RESERVED_HEADROOM_GIB"] == "5"
    _, none = rendered(loaded, reserved_headroom=0)
    assert none.env["VLLM_NEURON_RESERVED_HEADROOM_GIB"] == "0"  # an explicit zero selects the reserve policy


@pytest.mark.parametrize("size", [0, GIB, int(4.5 * GIB), int(3.000000001 * GIB), 7, 36 * GIB - 1])
def test_the_reserve_reads_back_as_the_same_bytes(size: int) -> None:
    assert int(float(gib_text(size)) * GIB) == size


def test_logical_cores_that_share_a_stack_are_never_two_engines(make: Any) -> None:
    body = TRN3.replace("lnc = 2", "lnc = 1").replace("tensor_parallel_size = 8", "tensor_parallel_size = 1")
    loaded = make(body)
    backend = backend_of(loaded)
    assert backend.slots(loaded, loaded.target.shape) == (("0",), ("2",), ("4",), ("6",))
    # the second logical core of a stack is the same memory
    assert backend.lease_names(loaded, ("0", "1", "2")) == ("neuron-hbm-0", "neuron-hbm-0", "neuron-hbm-1")
    wide = loaded.target.shape.merged(tensor_parallel_size=4)
    assert backend.slots(loaded, wide) == (("0", "1", "2", "3"), ("4", "5", "6", "7"))


def test_leases_are_equal_for_equal_memory(make: Any) -> None:
    whole = make(TRN3)
    assert backend_of(whole).lease_names(whole, ("0", "1")) == ("neuron-hbm-0", "neuron-hbm-1")
    unnamed = make(TRN3.replace('NEURON_PLATFORM_TARGET_OVERRIDE = "trn3"', ""))
    assert backend_of(unnamed).lease_names(unnamed, ("3",)) == ("neuron-hbm-3",)
    first = make(TRN3.replace('"trn3"', '"trn1"').replace("lnc = 2", "lnc = 1"))
    assert backend_of(first).lease_names(first, ("3",)) == ("neuron-hbm-3",)  # one core on a stack


def test_cores_default_to_those_of_the_shape(make: Any) -> None:
    loaded = make(TRN3.replace("devices = [0, 1, 2, 3, 4, 5, 6, 7]", ""))
    assert backend_of(loaded).slots(loaded, Shape(tensor_parallel_size=2)) == (("0", "1"),)


@pytest.mark.parametrize("variable", ["VLLM_NEURON_CPU_MODE", "VLLM_NEURON_CPU_COMPILE"])
def test_no_device_is_needed_on_the_cpu(make: Any, variable: str) -> None:
    loaded = make(TRN3.replace('OVERRIDE = "trn3"', f'OVERRIDE = "trn3"\n{variable} = "1"'))
    backend, command = rendered(loaded)
    assert backend.slots(loaded, loaded.target.shape) == (("cpu",),)
    assert backend.probe(loaded, ("cpu",)) is None
    assert "NEURON_VISIBLE_DEVICES" not in command.env_added
    assert command.env[variable] == "1"


def test_the_platform_comes_from_the_environment(make: Any) -> None:
    loaded = make(TRN3)
    assert platform_of(loaded, loaded.target.shape) == "trn3"
    assert platform_of(loaded, Shape(env={"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"})) == "trn2"


@pytest.mark.parametrize(
    ("found", "instead", "named"),
    [
        ('model = "openai/gpt-oss-120b"', "", r"shape\.model"),
        ("max_num_seqs = 4", 'kv_cache_memory_bytes = "1 GiB"', r"shape\.kv_cache_memory_bytes: is not read"),
        ("lnc = 2", "lnc = 3", "3 on trn3; expected 1 or 2"),
        ('"trn3"', '"trn1"', "2 on trn1; expected 1"),
        ("devices = [0,", 'devices = ["nc0",', "'nc0' is no logical core"),
        ('"trn3"', '"trn3"\nNEURON_RT_VISIBLE_CORES = "0-7"', r"env\.NEURON_RT_VISIBLE_CORES"),
        ('"trn3"', '"trn3"\nNEURON_VISIBLE_DEVICES = "0-7"', r"env\.NEURON_VISIBLE_DEVICES"),
        ('"trn3"', '"trn3"\nNEURON_LOGICAL_NC_CONFIG = "2"', r"shape\.lnc: is set and so is NEURON_LOGICAL_NC_CONFIG"),
        ('"trn3"', '"trn3"\nVLLM_NEURON_RESERVED_HEADROOM_GIB = "4"', r"shape\.reserved_headroom: is set and so is"),
        ('reserved_headroom = "4 GiB"', '', None),
    ],
)  # fmt: skip
def test_what_neuron_refuses(make: Any, found: str, instead: str, named: str | None) -> None:
    assert found in TRN3
    loaded = make(TRN3.replace(found, instead))
    if named is None:
        assert backend_of(loaded).name == "neuron"
        return
    with pytest.raises(ConfigError, match=named):
        backend_of(loaded)


def test_a_runtime_variable_of_the_shell_is_refused(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0")
    with pytest.raises(ConfigError, match="environment of this process"):
        backend_of(make(TRN3))


# -- probes


def test_memory_that_no_source_shows_says_why_at_every_reading(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object, **__: object) -> None:
        raise ProbeError("no source shows the memory of these")

    monkeypatch.setattr(probes, "choose", nothing)
    for body, device in ((R9700, "0"), (TRN3, "0")):
        loaded = make(body)
        probe = backend_of(loaded).probe(loaded, (device,))
        assert probe is not None
        with pytest.raises(ProbeError, match="no source shows the memory"):
            probe.read()


def test_the_cpu_has_no_device_memory_and_an_unknown_gpu_none_that_is_known(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "detect", lambda: "host")
    cpu = make('backend = "vllm"\n[target.it.shape]\nmodel = "m"\n')
    assert backend_of(cpu).probe(cpu, ("cpu",)) is None
    gpu = make('backend = "vllm"\ndevices = [0]\n[target.it.shape]\nmodel = "m"\n')
    assert backend_of(gpu).probe(gpu, ("0",)) is None
    monkeypatch.setattr(probes, "detect", lambda: "nvidia")
    asked = []
    monkeypatch.setattr(probes, "choose", lambda kind, devices, lnc: asked.append((kind, tuple(devices))))
    backend_of(gpu).probe(gpu, ("0",))
    assert asked == [("nvidia", ("0",))]


def test_visible_devices_of_a_gpu_target_are_the_leases(make: Any) -> None:
    body = 'backend = "vllm"\ndevices = [2, 3]\n[target.it.shape]\nmodel = "m"\ntensor_parallel_size = 2\n'
    _, command = rendered(make(body))
    assert command.env["HIP_VISIBLE_DEVICES"] == command.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    with pytest.raises(ConfigError, match=r"env\.CUDA_VISIBLE_DEVICES"):
        backend_of(make(f'{body}[target.it.env]\nCUDA_VISIBLE_DEVICES = "0"\n'))
