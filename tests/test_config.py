from __future__ import annotations

from pathlib import Path

import pytest

from pytest_kvbudget.config import Config, ConfigError, built_in, find, load
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.verdict import Phase


def write(folder: Path, text: str, name: str = "kvbudget.toml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def loaded(folder: Path, text: str, name: str = "kvbudget.toml") -> Config:
    return load(write(folder, text, name))


def test_reads_a_whole_target(tmp_path: Path) -> None:
    (tmp_path / "serve.env").write_text("# production\nexport HSA_ENABLE_SDMA=0\nNAME='a b'\nA=file\n")
    target = loaded(
        tmp_path,
        """
        [target.r9700-qwen]
        backend = "vllm"
        command = "podman exec engine vllm serve"
        devices = [0, 1]
        env = { A = "table" }
        env_file = "serve.env"
        port = 8000
        [target.r9700-qwen.shape]
        model = "/models/qwen"
        max_model_len = 200704
        kv_cache_memory_bytes = "2.5 GiB"
        gpu_memory_utilization = 0.982
        extra_args = ["--enable-expert-offload"]
        [target.r9700-qwen.limits]
        boot_seconds = 900
        release_tolerance = "64 MiB"
        [target.r9700-qwen.limits.phase_seconds]
        graph_capture = 300
        """,
    ).pick("r9700-qwen")
    assert target.target.command == ("podman", "exec", "engine", "vllm", "serve")
    assert target.target.shape == Shape(
        model="/models/qwen",
        max_model_len=200_704,
        kv_cache_memory_bytes=2_684_354_560,
        gpu_memory_utilization=0.982,
        extra_args=("--enable-expert-offload",),
    )
    assert target.environment == {"HSA_ENABLE_SDMA": "0", "NAME": "a b", "A": "table"}
    assert target.target.limits.phase_seconds == {Phase.GRAPH_CAPTURE: 300}
    assert target.target.limits.release_tolerance == 67_108_864
    assert target.folder == str(tmp_path)


def test_reads_pyproject(tmp_path: Path) -> None:
    config = loaded(tmp_path, '[tool.kvbudget.target.a]\nbackend = "mock"\n', "pyproject.toml")
    assert config.pick(None).name == "a"


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ('[target.a]\nbackend = "mock"\nbackends = 1\n', "backends", "did you mean 'backend'?"),
        ("[target.a]\nbackend = 3\n", "backend", "is a number; expected text"),
        ("[target.a]\nlauncher = 'process'\n", "[target.a] backend", "is missing; expected text"),
        ('[target.a]\nbackend = "mock"\nport = 70000\n', "port", "65535"),
        (
            '[target.a]\nbackend = "mock"\n[target.a.shape]\nmax_model_len = "4096"\n',
            "shape.max_model_len",
            "is '4096'; expected a whole number of 1 or more",
        ),
        (
            '[target.a]\nbackend = "mock"\n[target.a.shape]\nmax_model_len = 0\n',
            "shape.max_model_len",
            "is 0; expected a whole number of 1 or more",
        ),
        ('[target.a]\nbackend = "mock"\n[target.a.shape]\nwindow = 1\n', "shape.window", "unknown key"),
        (
            '[target.a]\nbackend = "mock"\n[target.a.shape]\ngpu_memory_utilization = 1.2\n',
            "utilization",
            "is 1.2; expected a number above 0 and at most 1",
        ),
        ('[target.a]\nbackend = "mock"\nshape.kv_cache_memory_bytes = "3 GB"\n', "shape.kv_cache_memory_bytes", "GiB"),
        ('[target.a]\nbackend = "mock"\n[target.a.mock]\nweights = "3 GB"\n', "mock.weights", "write '3 GiB'"),
        ('[target.a]\nbackend = "mock"\n[target.a.mock]\nweight = 3\n', "mock.weight", "did you mean 'weights'?"),
        (
            '[target.a]\nbackend = "mock"\nlimits.phase_seconds.boot = 3\n',
            "limits.phase_seconds.boot",
            "expected one of ",
        ),
        (
            '[target.a]\nbackend = "mock"\nlimits.boot_seconds = 0\n',
            "limits.boot_seconds",
            "is 0; expected a number above 0",
        ),
        (
            '[target.a]\nbackend = "mock"\nlimits.phase_seconds.graphcapture = 3\n',
            "limits.phase_seconds.graphcapture",
            "did you mean 'graph_capture'? expected one of",
        ),
        (
            '[target.a]\nbackend = "mock"\nmock.faults.hang_in = "profiling"\n',
            "mock.faults.hang_in",
            "did you mean 'profile'? expected one of",
        ),
        ('[target.a]\nbackend = "mock"\nenv = { HF_TOKEN = 12345 }\n', "env.HF_TOKEN", "is a number; expected text"),
        ('[target.a]\nbackend = "mock"\ndevices = [0, 1.5]\n', "devices[1]", "is 1.5; expected a whole number or text"),
        (
            '[target.a]\nbackend = "mock"\nlimits.trace_hz = 0.5\n',
            "limits.trace_hz",
            "a number of 1 or more and at most 100",
        ),
        ('[target.a]\nbackend = "mock"\n[tagret.b]\nbackend = "mock"\n', "tagret", "did you mean 'target'?"),
        ('[target.a]\nbackend = "mock"\nshape = 3\n', "shape", "is 3; expected a table"),
        ('[target.a]\nbackend = "mock"\nshape.enforce_eager = "no"\n', "shape.enforce_eager", "expected true or false"),
        ('[target.a]\nbackend = "mock"\ndevices = []\n', "devices", "is empty; expected at least one"),
        ('[target.a]\nbackend = "mock"\nenv_file = "none.env"\n', "env_file", "none.env"),
        ('[target.a]\nbackend = "mock"\ndevices = [0, 0]\n', "devices", "expected each once"),
        ("[targets.a]\n", "targets", "[target.NAME]"),
        ("", "no target", "[target.NAME]"),
        ("target = 3\n", "no target", "[target.NAME]"),
        ("[target]\na = 3\n", "target.a", "table"),
        ("[target.a\n", "is not TOML", "line 1"),
    ],
)
def test_wrong_configuration_names_file_key_and_what_was_expected(
    tmp_path: Path, text: str, key: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text)
    message = str(caught.value)
    assert str(tmp_path / "kvbudget.toml") in message
    assert key in message
    assert said in message
    assert "12345" not in message  # a secret that lost its quotes


def test_a_wrong_line_of_an_environment_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "serve.env").write_text("A=1\nB\n")
    with pytest.raises(ConfigError, match=r"serve\.env line 2 is 'B'; expected NAME=value"):
        loaded(tmp_path, '[target.a]\nbackend = "mock"\nenv_file = "serve.env"\n')


def test_the_nearest_file_upward_is_found(tmp_path: Path) -> None:
    outer = write(tmp_path, '[target.a]\nbackend = "mock"\n')
    write(tmp_path / "x", "[project]\nname = 'x'\n", "pyproject.toml")
    (tmp_path / "x" / "y").mkdir()
    assert find(tmp_path / "x" / "y") == outer
    inner = write(tmp_path / "x", '[tool.kvbudget.target.b]\nbackend = "mock"\n', "pyproject.toml")
    assert find(tmp_path / "x" / "y") == inner


def test_two_configurations_in_one_folder_are_an_error(tmp_path: Path) -> None:
    write(tmp_path, '[target.a]\nbackend = "mock"\n')
    write(tmp_path, '[tool.kvbudget.target.b]\nbackend = "mock"\n', "pyproject.toml")
    with pytest.raises(ConfigError, match="keep one"):
        find(tmp_path)


def test_picking_a_target(tmp_path: Path) -> None:
    config = loaded(tmp_path, '[target.a]\nbackend = "mock"\n[target.b]\nbackend = "mock"\n')
    assert config.pick("b").name == "b"
    with pytest.raises(ConfigError, match=r"several targets \(a, b\); name one with --kvbudget-target"):
        config.pick(None)
    with pytest.raises(ConfigError, match=r"no target 'c'; it has a, b"):
        config.pick("c")


def test_the_built_in_target_is_a_simulated_r9700(tmp_path: Path) -> None:
    target = built_in(tmp_path).pick(None)
    assert (target.name, target.target.backend) == ("mock-r9700", "mock")
    assert target.target.mock is not None
    assert target.target.mock.device_total == 34_208_743_424  # as the driver of a real R9700 reports it
