"""Starts simulated engines and cleans up after them: every process that was ever seen is ended by pid."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import requests

from pytest_kvbudget.mock.spec import MockDevice
from pytest_kvbudget.units import GIB, MIB

DEADLINE_S = 20.0
_T = TypeVar("_T")

BASE = MockDevice(
    device_total=10 * GIB,
    free_at_start=10 * GIB,
    weights=4 * GIB,
    non_torch=1 * GIB,
    activation_base=512 * MIB,
    activation_per_batched_token=0,
    graph_base=64 * MIB,
    graph_per_size=0,
    kv_bytes_per_token=64 * 1024,
    block_size=16,
)
"""A card of round numbers. One KV block is 16 x 64 KiB = 1 MiB. At utilization 0.75 an engine may use 7.5 GiB; less
weights and non-torch (5 GiB), activation (0.5 GiB) and graphs (64 MiB) that leaves 1984 MiB: 1984 blocks, of which one
is never handed out, so the longest window is 1983 x 16 = 31728 tokens."""
UTILIZATION = ("--gpu-memory-utilization", "0.75")
LONGEST = 31_728


def until(what: str, check: Callable[[], _T | None]) -> _T:
    """The first true value of ``check``; fails when there is none in time."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        value = check()
        if value:
            return value
        time.sleep(0.005)
    raise AssertionError(f"{what}: not within {DEADLINE_S} s")


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Engine:
    """One simulated engine."""

    def __init__(self, log: Path, environ: dict[str, str], model: str, port: int, flags: tuple[str, ...]) -> None:
        self.port = port
        self.log_path = log
        self._seen: set[psutil.Process] = set()
        argv = [sys.executable, "-m", "pytest_kvbudget.mock", "serve", model, "--host", "127.0.0.1"]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*argv, "--port", str(self.port), *flags], env={**os.environ, **environ}, stdout=output, stderr=output
            )
        self.pid = self.process.pid
        self.tree()

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def tree(self) -> list[psutil.Process]:
        """Living processes of the engine."""
        try:
            root = psutil.Process(self.pid)
            self._seen |= {root, *(child for child in root.children(recursive=True) if _is_ours(child))}
        except psutil.NoSuchProcess:
            pass
        return [process for process in self._seen if _alive(process)]

    def titled(self, title: str) -> psutil.Process | None:
        """The process of that title."""
        return next((process for process in self.tree() if _title(process) == title), None)

    def wait_titled(self, title: str) -> psutil.Process:
        return until(f"a process titled {title}", lambda: self.titled(title))

    def wait_log(self, text: str) -> None:
        until(f"{text!r} in the log", lambda: text in self.log())

    def wait_ready(self) -> Engine:
        def ready() -> bool:
            self.tree()
            assert self.process.poll() is None, f"exit status {self.process.returncode}\n{self.log()[-3000:]}"
            return self.health() == 200

        until("/health 200", ready)
        self.tree()
        return self

    def wait_exit(self) -> int:
        def exited() -> bool:
            self.tree()
            return self.process.poll() is not None

        until("the server's end", exited)
        return self.process.wait()

    def health(self) -> int | None:
        """Status of ``/health``, ``None`` for a refused or lost connection."""
        try:
            return requests.get(self.url("/health"), timeout=5).status_code
        except requests.ConnectionError:
            return None

    def complete(self, prompt: int | str, max_tokens: int, **more: Any) -> requests.Response:
        """A completion of a prompt of text, or of so many token ids."""
        tokens = prompt if isinstance(prompt, str) else [1] * prompt
        body = {"prompt": tokens, "max_tokens": max_tokens, **more}
        return requests.post(
            self.url("/v1/completions"), json=body, timeout=DEADLINE_S, stream=bool(more.get("stream"))
        )

    def metric(self, name: str) -> float:
        for line in requests.get(self.url("/metrics"), timeout=5).text.splitlines():
            if line.startswith(f"vllm:{name}{{"):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no metric {name}")

    def end(self) -> None:
        for process in self.tree():
            with suppress(psutil.NoSuchProcess):  # a sibling's end may have ended it meanwhile
                process.send_signal(signal.SIGKILL)
        self.process.wait()
        until("the engine's end", lambda: not self.tree())


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_ours(process: psutil.Process) -> bool:
    """The driver of the cards may be started by an engine; it is no part of it."""
    try:
        return "driver.py" not in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _title(process: psutil.Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")[0].decode()
    except OSError:
        return ""


class Host:
    """A simulated host: a tree of cards and the engines on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = folder / "sysfs"
        self._engines: list[Engine] = []

    def start(self, spec: MockDevice = BASE, *flags: str, visible: str | None = None, model: str = "sim",
              port: int | None = None, env: dict[str, str] | None = None) -> Engine:  # fmt: skip
        log = self.folder / f"engine{len(self._engines)}.log"
        environ = {
            "KVBUDGET_MOCK_DEVICE": msgspec.json.encode(spec).decode(),
            "KVBUDGET_MOCK_SYSFS": str(self.tree),
            **({} if visible is None else {"KVBUDGET_MOCK_VISIBLE": visible}),
            **(env or {}),
        }
        engine = Engine(log, environ, model, port or free_port(), flags)
        self._engines.append(engine)
        return engine

    def used(self, card: int = 0) -> int:
        """Bytes in use as the device tree shows them."""
        path = self.tree / f"class/drm/card{card}/device/mem_info_vram_used"
        text = path.read_text(encoding="ascii") if path.exists() else "0\n"
        assert text.endswith("\n")
        return int(text)

    def wait_used(self, size_bytes: int, card: int = 0) -> None:
        until(f"{size_bytes} bytes in use on card {card}", lambda: self.used(card) == size_bytes)

    def end(self) -> None:
        for engine in self._engines:
            engine.end()
