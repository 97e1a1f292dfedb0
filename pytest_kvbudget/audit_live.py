"""What can be read of a running engine without touching it: environment, command line, image, restarts, one completion.

Everything is asked read-only, and what does not answer is a trouble that is named, never a value.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import psutil

from pytest_kvbudget.budget.gate import flag_value, has_flag
from pytest_kvbudget.budget.graphs import PER_GRAPH_VARIABLE
from pytest_kvbudget.budget.levers import Carry
from pytest_kvbudget.budget.rdna4 import PRECISE_FLAG, UTILIZATION_FLAG
from pytest_kvbudget.device.command import find_tool, run_tool
from pytest_kvbudget.device.model import DeviceMemory, ProbeError
from pytest_kvbudget.engine.client import ClientError, EngineClient

PACKAGE: Final = "vllm"
LEVERS: Final = (UTILIZATION_FLAG, PER_GRAPH_VARIABLE, PRECISE_FLAG)
"""Levers that an image can read: flags, and variables of its environment."""
CONTAINER_TOOLS: Final = ("podman", "docker")
GREP_S: Final = 60.0
"""For a search through an image's sources that are in no cache."""
CHAT_S: Final = 300.0
_CHUNK_BYTES: Final = 1 << 20
_GREP: Final = 'test -d "$2" || exit 3; grep -rlFs --include="*.py" -e "$1" -- "$2" | head -n 1'
_FIND: Final = f"import importlib.util as u; print(u.find_spec({PACKAGE!r}).submodule_search_locations[0])"


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """A running engine as far as it could be read; ``None`` is "not read"."""

    environ: Mapping[str, str] | None = None
    argv: tuple[str, ...] | None = None
    restarts: int | None = None
    reads: Mapping[str, str | None] = {}
    """By lever: the file of the image that has its name; ``None`` where no file has it. Missing: not searched."""
    said: tuple[str, ...] = ()
    """What was read where."""
    troubles: tuple[str, ...] = ()

    def carried(self) -> dict[str, Carry]:
        """By lever: whether the image reads it, and whether it was seen in the environment or on the command line."""
        return {
            lever: Carry(
                image_reads=None if lever not in self.reads else self.reads[lever] is not None,
                carries=self._carries(lever),
            )
            for lever in LEVERS
        }

    def _carries(self, lever: str) -> bool | None:
        if lever.startswith("-"):
            if self.argv is None:
                return None
            return flag_value(self.argv, lever) is not None or has_flag(self.argv, lever)
        return None if self.environ is None else lever in self.environ

    def beside(self, other: Engine) -> Engine:
        """Both readings of one engine together; this one's where both have a value."""
        return Engine(
            environ=other.environ if self.environ is None else self.environ,
            argv=other.argv if self.argv is None else self.argv,
            restarts=other.restarts if self.restarts is None else self.restarts,
            reads={**other.reads, **self.reads},
            said=self.said + other.said,
            troubles=self.troubles + other.troubles,
        )


def from_process(pid: int, source: Path | None = None) -> Engine:
    """The engine in the process tree of ``pid``.

    Args:
        pid: a process of the engine, or what started it.
        source: folder of the engine's package; default: beside the process' own Python.
    """
    said, troubles = list[str](), list[str]()
    try:
        root = psutil.Process(pid)
        process = _engine_process(root)
        if process is None and source is None:
            trouble = f"process {pid} ({root.name()}): neither it nor a child of it has {PACKAGE!r} in its command line"
            return Engine(troubles=(f"{trouble}; an engine of another name is read with --source",))
        process = process or root
        argv = tuple(process.cmdline())
    except psutil.Error as error:
        return Engine(troubles=(f"process {pid}: {error}",))
    said.append(f"command line of process {process.pid}")
    environ: dict[str, str] | None = None
    try:
        environ = process.environ()
        said.append(f"environment of process {process.pid}")
    except (psutil.Error, OSError) as error:
        troubles.append(f"environment of process {process.pid} cannot be read: {error}")
    folder = source or _package_of(process.pid, argv, environ or {})
    reads: dict[str, str | None] = {}
    if folder is None:
        troubles.append(f"process {process.pid}: no package {PACKAGE!r} beside its Python; name it with --source")
    else:
        reads = _search(folder)
        said.append(f"sources in {folder}")
    return Engine(environ=environ, argv=argv, reads=reads, said=tuple(said), troubles=tuple(troubles))


def _engine_process(root: psutil.Process) -> psutil.Process | None:
    """The first process of a tree that looks like the engine: units and shells stand before it."""
    for process in (root, *root.children(recursive=True)):
        try:
            words = process.cmdline()[:4]
        except psutil.Error:
            continue
        if any(PACKAGE in Path(word).name.lower() for word in words):
            return process
    return None


def _package_of(pid: int, argv: Sequence[str], environ: Mapping[str, str]) -> Path | None:
    """The engine's package in the file system that the process sees, beside the Python that runs it."""
    prefixes = [
        environ.get("VIRTUAL_ENV", ""),
        *(str(Path(word).parent.parent) for word in argv[:2] if word[:1] == "/"),
    ]
    root = Path(f"/proc/{pid}/root")
    for prefix in filter(None, prefixes):
        for pattern in (f"lib/python3*/site-packages/{PACKAGE}", f"lib/python3*/dist-packages/{PACKAGE}"):
            try:
                found = next(root.joinpath(prefix.lstrip("/")).glob(pattern), None)
            except OSError:
                continue
            if found is not None:
                return found
    return None


def _search(folder: Path) -> dict[str, str | None]:
    """The first source file that has each lever's name."""
    found: dict[str, str | None] = dict.fromkeys(LEVERS)
    needles = {lever: needle_of(lever).encode() for lever in LEVERS}
    for path in sorted(folder.rglob("*.py")):
        missing = [lever for lever, where in found.items() if where is None]
        if not missing:
            break
        try:
            text = path.read_bytes()
        except OSError:
            continue
        for lever in missing:
            if needles[lever] in text:
                found[lever] = str(path.relative_to(folder))
    return found


def needle_of(lever: str) -> str:
    """What source that reads a lever contains: the variable's name, or the field that a flag fills."""
    return lever.lstrip("-").replace("-", "_") if lever.startswith("-") else lever


def from_container(name: str, tool: str | None = None, source: str | None = None) -> Engine:
    """The engine in a container, through ``podman`` or ``docker``: inspected, and its image's sources searched.

    Args:
        name: of the container.
        tool: the command; default: the first of `CONTAINER_TOOLS` that is installed.
        source: folder of the engine's package inside; default: where the container's Python finds it.
    """
    command = tool or next((one for one in CONTAINER_TOOLS if find_tool(one)), CONTAINER_TOOLS[0])
    try:
        entry = _inspected(run_tool([command, "inspect", name]), f"{command} inspect {name}")
    except ProbeError as error:
        return Engine(troubles=(str(error),))
    config, state = entry.get("Config") or {}, entry.get("State") or {}
    environ = dict(pair.partition("=")[::2] for pair in config.get("Env") or [])
    argv = tuple(str(word) for word in (entry.get("Path"), *(entry.get("Args") or ())) if word)
    restarts = entry.get("RestartCount", state.get("RestartCount"))
    said, troubles = [f"{command} inspect {name}: environment, command line"], list[str]()
    reads: dict[str, str | None] = {}
    try:
        folder = source or run_tool([command, "exec", name, "python3", "-c", _FIND], timeout_s=GREP_S).strip()
        for lever in LEVERS:
            where = run_tool(
                [command, "exec", name, "sh", "-c", _GREP, "sh", needle_of(lever), folder], timeout_s=GREP_S
            ).strip()
            reads[lever] = where or None
        said.append(f"sources in {folder} of container {name}")
    except ProbeError as error:
        troubles.append(f"sources of container {name}: {error}")
    return Engine(
        environ=environ,
        argv=argv or None,
        restarts=restarts if isinstance(restarts, int) else None,
        reads=reads,
        said=tuple(said),
        troubles=tuple(troubles),
    )


def _inspected(text: str, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    entry = found[0] if isinstance(found, list) and found else None
    if not isinstance(entry, dict):
        raise ProbeError(f"{what}: printed {text[:80]!r}; expected a list with one object")
    return entry


def from_unit(unit: str, source: Path | None = None) -> Engine:
    """The engine of a systemd unit: its restart count, and the process tree of its main process."""
    for scope in ((), ("--user",)):
        argv = ["systemctl", *scope, "show", unit, "--property=LoadState,NRestarts,MainPID"]
        try:
            shown = dict(line.partition("=")[::2] for line in run_tool(argv).splitlines())
        except ProbeError as error:
            if scope:
                return Engine(troubles=(str(error),))
            continue
        if shown.get("LoadState") == "loaded":
            break
    else:
        return Engine(troubles=(f"systemctl show {unit}: no such unit is loaded, of the system or of this user",))
    count, pid = shown.get("NRestarts", ""), shown.get("MainPID", "")
    own = Engine(
        restarts=int(count) if count.isdecimal() else None,
        said=(f"systemctl show {unit}: {count or 'no'} restarts",),
    )
    if not pid.isdecimal() or int(pid) == 0:
        return own.beside(Engine(troubles=(f"unit {unit} has no main process: it does not run",)))
    return own.beside(from_process(int(pid), source))


def log_of(pid: int) -> Path | None:
    """The file that a process writes its standard output to; ``None`` where that is no file that can be read."""
    try:
        path = Path(f"/proc/{pid}/fd/1").resolve(strict=True)
        return path if path.is_file() else None
    except OSError:
        return None


def stream(argv: Sequence[str], take: Callable[[bytes], object]) -> str | None:
    """Hand what a command prints to ``take``, both streams together; returns what went wrong, ``None`` if nothing."""
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        return f"{' '.join(argv)}: cannot be run: {error.strerror}"
    with process:
        assert process.stdout is not None, "asked for as a pipe"
        while chunk := os.read(process.stdout.fileno(), _CHUNK_BYTES):
            take(chunk)
    return None if process.returncode == 0 else f"{' '.join(argv)}: ended with status {process.returncode}"


def ask_peer(url: str) -> tuple[bool | None, str]:
    """One real chat completion through an address: whether it was answered, and what came of it.

    Silence from this very host is ``None``: its loopback may not be where the engine listens.
    """
    local = is_loopback(urlsplit(url).hostname or "")
    client = EngineClient(url, timeout_s=CHAT_S)
    try:
        answer = client.chat([{"role": "user", "content": "Say one word."}], 16)
    except ClientError as error:
        return (None if local else False), f"no completion through {url} ({error})"
    finally:
        client.close()
    if not answer.get("choices"):
        return (None if local else False), f"{url} answered without a choice"
    if local:
        return None, f"a completion came through {url}, which is this host: whether a peer gets one was not tried"
    return True, f"a completion came through {url}"


def is_loopback(host: str) -> bool:
    """Whether a host's name or address leads back to this machine's loopback."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return any(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def read_cards(devices: Sequence[str]) -> tuple[tuple[DeviceMemory, ...], str]:
    """What the driver shows of these devices now, and why it cannot be read where it cannot.

    After traffic torch has given no slab back, so the reading is the high-water mark (RDNA4 document, section 3).
    """
    from pytest_kvbudget.device.probes import choose, detect  # noqa: PLC0415 - only for a live engine

    kind = detect()
    if kind == "host":
        return (), "no accelerator is known on this host"
    try:
        choice = choose(kind, devices)
        try:
            return choice.read(), ""
        finally:
            choice.close()
    except ProbeError as error:
        return (), str(error)
