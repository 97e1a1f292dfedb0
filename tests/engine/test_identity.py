"""The build behind a command, from environments as pip, uv and distributions lay them out. Nothing in them can run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from pytest_kvbudget.engine.identity import engine_build
from pytest_kvbudget.engine.model import Command

CONSOLE = """\
#!{python}
# -*- coding: utf-8 -*-
import re
import sys
from vllm.entrypoints.cli.main import main
if __name__ == '__main__':
    sys.exit(main())
"""


class Venv:
    """A virtual environment that has vLLM and torch."""

    def __init__(self, folder: Path, *, python: str = "python3.11", engine: str = "0.32.0") -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.site = folder / "lib" / python / "site-packages"
        self.bin.mkdir(parents=True)
        executable(self.bin / "python")
        write(folder / "pyvenv.cfg", "home = /nowhere/bin\ninclude-system-site-packages = false\n")
        self.install("vllm", engine)
        self.install("torch", "2.10.0")
        self.script = executable(self.bin / "vllm", CONSOLE.format(python=self.bin / "python"))

    def install(self, name: str, version: str, text: str = "") -> Path:
        for old in self.site.glob(f"{name}-*.dist-info"):
            old.rename(old.with_suffix(".gone"))
        write(self.site / f"{name}-{version}.dist-info" / "METADATA", f"Name: {name}\nVersion: {version}\n")
        return write(self.site / name / "__init__.py", text)

    def build(self, *argv: str, **env: str) -> str | None:
        return build(*(argv or ("vllm", "serve", "m")), PATH=str(self.bin), **env)


def build(*argv: str, **env: str) -> str | None:
    return engine_build(Command(argv=argv, env=env, env_added={}, cwd="/", host="127.0.0.1", port=8000))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    os.utime(path, ns=(10**18, 10**18))  # what a test changes is to be told by itself
    return path


def executable(path: Path, text: str = "\x7fELF") -> Path:
    write(path, text).chmod(0o755)
    return path


@pytest.fixture
def venv(tmp_path: Path) -> Venv:
    return Venv(tmp_path / "venv")


def test_a_console_script_is_its_package_in_its_environment(venv: Venv) -> None:
    found = venv.build()
    assert found is not None
    assert found.startswith("vllm 0.32.0, files ")
    assert "environment " in found


def test_ways_to_the_same_program_are_the_same_build(venv: Venv) -> None:
    executable(venv.bin / "numactl")
    executable(venv.bin / "env")
    named = venv.build()
    assert venv.build(str(venv.script), "serve", "m") == named
    assert venv.build("vllm", "serve", "m", "--port", "1") == named
    assert venv.build("env", "A=1", "numactl", "--membind", "0", "vllm", "serve", "m") == named
    assert build("env", f"PATH={venv.bin}", "vllm", "serve", "m", PATH=str(venv.bin)) == named
    assert venv.build("python", str(venv.script), "serve", "m") == named


def test_a_module_is_found_without_its_console_script(venv: Venv) -> None:
    found = venv.build("python", "-X", "utf8", "-O", "-m", "vllm.entrypoints.openai.api_server", "--model", "m")
    assert found is not None
    assert found.startswith("vllm 0.32.0, files ")


def test_an_interpreter_too_long_for_a_first_line(venv: Venv) -> None:
    named = venv.build()
    body = CONSOLE.partition("\n")[2]
    pip = f"#!/bin/sh\n'''exec' {venv.bin}/python \"$0\" \"$@\"\n' '''\n{body}"
    uv = "#!/bin/sh\n'''exec' \"$(dirname -- \"$(realpath -- \"$0\")\")\"/'python' \"$0\" \"$@\"\n' '''\n" + body
    for text in (pip, uv):
        executable(venv.script, text)
        found = venv.build()
        assert found is not None
        assert named is not None
        # the script itself differs, the environment is the same
        assert found.split(", ")[0] == named.split(", ")[0]
        assert found.split(", ")[2] == named.split(", ")[2]


def test_an_interpreter_from_the_path(venv: Venv) -> None:
    executable(venv.script, CONSOLE.format(python="/usr/bin/env python"))
    found = venv.build()
    assert found is not None
    assert found.startswith("vllm 0.32.0, ")


@pytest.mark.parametrize("change", ["engine", "dependency", "patched", "plugin", "source"])
def test_what_changes_the_engine_changes_the_build(venv: Venv, change: str) -> None:
    before = venv.build()
    if change == "engine":
        venv.install("vllm", "0.32.1")
    elif change == "dependency":
        venv.install("torch", "2.10.1")
    elif change == "patched":
        write(venv.site / "vllm" / "__init__.py", "x = 1\n")
    elif change == "plugin":
        venv.install("vllm_rdna4_plugin", "0.1")
    else:
        write(venv.folder / "patch" / "vllm" / "__init__.py", "x = 1\n")
        assert venv.build(PYTHONPATH=str(venv.folder / "patch")) != before
        return
    assert venv.build() != before


def test_a_folder_is_no_package(venv: Venv) -> None:
    found = venv.build()
    write(venv.folder / "logs" / "vllm" / "engine.log", "")
    assert venv.build(PYTHONPATH=str(venv.folder / "logs")) == found


def test_running_an_engine_changes_nothing(venv: Venv) -> None:
    before = venv.build()
    write(venv.site / "vllm" / "__pycache__" / "__init__.cpython-311.pyc", "byte code")
    write(venv.site / "vllm" / ".cache" / "kernel.json", "{}")
    assert venv.build() == before


def test_an_environment_of_another_place_is_the_same_build(tmp_path: Path) -> None:
    one, other = Venv(tmp_path / "one"), Venv(tmp_path / "other")
    found = one.build("python", "-m", "vllm.serve")
    assert found is not None
    assert found == other.build("python", "-m", "vllm.serve")


def test_sources_that_are_worked_on_count_and_what_lies_beside_them_does_not(venv: Venv, tmp_path: Path) -> None:
    project = tmp_path / "my fork"
    source = write(project / "src" / "vllm" / "__init__.py", "")
    (venv.site / "vllm" / "__init__.py").unlink()
    (venv.site / "vllm").rmdir()
    origin = {"url": (project.as_uri()), "dir_info": {"editable": True}}
    write(venv.site / "vllm-0.32.0.dist-info" / "direct_url.json", json.dumps(origin))
    before = venv.build()
    assert before is not None
    assert before.startswith("vllm 0.32.0, ")
    write(project / "kvbudget-archive" / "run" / "attempt.json", "{}")
    write(project / "tests" / "test_it.py", "")
    assert venv.build() == before
    write(source, "x = 1\n")
    assert venv.build() != before


def test_the_same_script_elsewhere_is_no_engine(tmp_path: Path) -> None:
    script = write(tmp_path / "server.py", "import argparse\n")
    venv = Venv(tmp_path / "venv")
    (venv.site / "vllm" / "__init__.py").unlink()
    (venv.site / "vllm").rmdir()
    before = venv.build("python", str(script))
    assert before is not None
    assert before.startswith("server.py, files ")
    write(script, "import argparse, sys\n")
    assert venv.build("python", str(script)) != before


def test_a_native_program_is_its_file(tmp_path: Path) -> None:
    program = executable(tmp_path / "llama-server")
    before = build("llama-server", "-m", "model.gguf", PATH=str(tmp_path))
    assert before is not None
    assert before.startswith("llama-server, file ")
    executable(program, "\x7fELF, built again")
    assert build("llama-server", "-m", "model.gguf", PATH=str(tmp_path)) != before


@pytest.mark.parametrize(
    "argv",
    [
        ("no-such-engine",),
        ("bash", "-c", "vllm serve m"),
        ("podman", "run", "image", "vllm"),
        ("uv", "run", "vllm", "serve", "m"),
        ("serve.sh", "m"),
        ("profiler", "vllm", "serve", "m"),
        ("numactl", "--membind", "0"),
        ("numactl", "ssh", "host", "vllm"),
        ("python", "-c", "import vllm"),
        ("python", "-m", "no_such_module"),
        ("python", "no_such_script.py"),
        ("python",),
    ],
)
def test_what_may_start_anything_is_not_known(venv: Venv, argv: tuple[str, ...]) -> None:
    for name in ("bash", "podman", "uv", "profiler", "numactl", "ssh"):
        executable(venv.bin / name)
    executable(venv.bin / "serve.sh", '#!/bin/bash\nexec vllm serve "$@"\n')
    assert venv.build(*argv) is None


def test_the_simulated_engine_is_ours_and_its_device() -> None:
    command = (sys.executable, "-m", "pytest_kvbudget.mock", "serve", "m")
    found = build(*command, KVBUDGET_MOCK_DEVICE="{}")
    assert found is not None
    assert found.startswith("simulated, ")
    assert build(*command, KVBUDGET_MOCK_DEVICE="{}", HOME="/") == found
    assert build(*command, KVBUDGET_MOCK_DEVICE='{"seed":1}') != found


def test_this_environment_can_be_read() -> None:
    """A real one: its pytest is imported to see that what was read of it is true."""
    found = build(sys.executable, "-m", "pytest")
    assert found is not None
    assert found.startswith(f"pytest {pytest.__version__}, files ")
