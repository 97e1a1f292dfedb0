"""Which build of an engine a command would start, read before the boot: nothing is started or imported."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from pytest_kvbudget.engine.installed import Installed, digest, tree_digest
from pytest_kvbudget.engine.model import Command

SIMULATED_ENGINE: Final = "pytest_kvbudget.mock"
SIMULATED_DEVICE: Final = "KVBUDGET_MOCK_DEVICE"
ENGINE_PACKAGES: Final = ("vllm", "vllm_neuron", "sglang", "neuronx_distributed_inference", "libtorch_neuronx_lite")
"""Packages of engines: their files count beside their version, for forks are patched where they are installed."""

_STARTERS: Final = frozenset({
    "env", "numactl", "taskset", "nice", "ionice", "chrt", "stdbuf", "setsid", "nohup", "timeout", "prlimit",
})  # fmt: skip
"""Programs that start the one they are given, from the same file system."""
_ELSEWHERE: Final = frozenset({
    "sh", "bash", "dash", "ash", "zsh", "fish", "ksh", "csh", "tcsh",
    "docker", "podman", "nerdctl", "apptainer", "singularity", "enroot", "ssh", "srun", "mpirun", "mpiexec", "kubectl",
    "sudo", "doas", "su", "systemd-run",
    "uv", "uvx", "pipx", "poetry", "pdm", "hatch", "pipenv", "conda", "mamba", "micromamba", "pixi", "rye",
})  # fmt: skip
"""Programs whose arguments do not tell which file is run in the end."""
_PYTHON: Final = re.compile(r"(?:python|pypy)(?:\d[\d.]*)?")
_EXEC: Final = re.compile(r"^'''exec' (?P<rest>.+) \"\$0\"", re.MULTILINE)
"""Second line of a console script whose interpreter's path is too long or relative (pip, uv)."""
_ENTRY: Final = re.compile(rb"^(?:from|import) ([A-Za-z_]\w*)(?:[. ])", re.MULTILINE)
_OWN_LIBRARY: Final = frozenset({b"re", b"sys", b"os", b"__future__", b"importlib"})
"""What console scripts import beside the engine."""
_VALUED: Final = frozenset({"-X", "-W", "--check-hash-based-pycs"})
_HEAD_BYTES: Final = 4096


def engine_build(command: Command) -> str | None:
    """What the command resolves to: ``"vllm 0.32.0, files 1f3a..., environment 77c0..."``.

    Of a Python program its package's version and files count, the engines that are installed beside it, and names and
    versions of everything else in its environment (torch decides memory too); of any other program its own file.

    Args:
        command: as rendered, with the environment that it would be started with. Host and port do not matter.

    Returns:
        ``None`` where that cannot be known: no such command, a shell script, a container, another host.
    """
    environ = dict(command.env)
    found = _engine(command.argv, environ, command.cwd)
    if found is None:
        return None
    program, arguments = found
    if _PYTHON.fullmatch(program.name):
        return _of_python(program, arguments, environ, command.cwd)
    interpreter = _interpreter(program, environ)
    if interpreter is not None:
        return _of_python(interpreter, (str(program), *arguments), environ, command.cwd)
    if _is_text(program) or any(_resolved(word, environ, command.cwd) for word in arguments if word[:1] != "-"):
        return None  # it may start anything
    return f"{program.resolve().name}, file {tree_digest(program.resolve())}"


def _engine(argv: Sequence[str], environ: dict[str, str], cwd: str) -> tuple[Path, tuple[str, ...]] | None:
    """The program behind those that only start another one, and its arguments; ``environ`` takes what ``env`` sets."""
    program: Path | None = None
    for position, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if program is not None and equals and name.isidentifier():
            environ[name] = value
            continue
        found = None if word.startswith("-") else _resolved(word, environ, cwd)
        if found is None:
            if program is None:
                return None
            continue
        program = found
        if program.name in _ELSEWHERE:
            return None
        if program.name not in _STARTERS:
            return program, tuple(argv[position + 1 :])
    return None


def _resolved(word: str, environ: Mapping[str, str], cwd: str) -> Path | None:
    """The executable file that a word names, as ``execvp`` would find it."""
    if os.sep in word:
        path = Path(cwd, word)
        return path if path.is_file() and os.access(path, os.X_OK) else None
    found = shutil.which(word, path=environ.get("PATH", os.defpath))
    return None if found is None else Path(cwd, found)


def _is_text(program: Path) -> bool:
    return _head(program).startswith(b"#!")


def _interpreter(program: Path, environ: Mapping[str, str]) -> Path | None:
    """The Python that a script names in its first lines; ``None`` for anything else."""
    head = _head(program)
    if not head.startswith(b"#!"):
        return None
    text = head.decode("utf-8", "replace")
    words = text[2:].partition("\n")[0].split()
    if not words:
        return None
    if Path(words[0]).name == "env":
        name = next((word for word in words[1:] if not word.startswith("-") and "=" not in word), "")
        found = shutil.which(name, path=environ.get("PATH", os.defpath))
        named = None if found is None else Path(found)
    elif Path(words[0]).name == "sh":
        named = _after_exec(text, program)
    else:
        named = Path(words[0])
    return named if named is not None and _PYTHON.fullmatch(named.name) and named.is_file() else None


def _after_exec(text: str, program: Path) -> Path | None:
    match = _EXEC.search(text)
    if match is None:
        return None
    rest = match["rest"]
    if "dirname" in rest:  # uv's relocatable scripts: the interpreter beside the script
        return program.resolve().parent / rest.rpartition("/")[2].strip("'\"")
    return Path(rest.strip("'\""))


def _of_python(python: Path, arguments: Sequence[str], environ: Mapping[str, str], cwd: str) -> str | None:
    words = list(arguments)
    while words and words[0].startswith("-") and words[0] not in {"-m", "-c", "-"}:
        del words[: 2 if words[0] in _VALUED else 1]
    entry: str | None
    script: Path | None = None
    if len(words) > 1 and words[0] == "-m":
        if words[1] == SIMULATED_ENGINE:
            return _simulated(environ)
        entry = words[1].partition(".")[0]
    elif words and not words[0].startswith("-") and Path(cwd, words[0]).is_file():
        script = Path(cwd, words[0])
        entry = _entry(script)
    else:
        return None  # a program that stands in the command line, or none
    installed = Installed(python, environ, cwd=cwd, first=Path(cwd) if script is None else script.resolve().parent)
    packages = {name: path for name in (entry, *ENGINE_PACKAGES) if name and (path := installed.package(name))}
    if script is None and entry not in packages:
        return None
    parts = [f"{name} {installed.version(name) or 'of no known version'}" for name in packages]
    if script is not None and not packages:
        parts = [script.name]
    files = digest(*([] if script is None else [_content_digest(script)]), *map(tree_digest, packages.values()))
    return ", ".join((*parts, f"files {files}", f"environment {installed.digest()}"))


def _simulated(environ: Mapping[str, str]) -> str:
    """The simulated engine is a part of this package, whose version is a part of its own of every identity."""
    folder = Path(__file__).parent.parent / "mock"
    return f"simulated, files {tree_digest(folder)}, device {digest(environ.get(SIMULATED_DEVICE, ''))}"


def _entry(script: Path) -> str | None:
    """The package that a console script starts."""
    found = (name for name in _ENTRY.findall(_head(script)) if name not in _OWN_LIBRARY)
    return next((name.decode() for name in found), None)


def _content_digest(script: Path) -> str:
    # by content: pip writes console scripts anew and the same
    try:
        return digest(script.read_bytes())
    except OSError:
        return ""


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b""
