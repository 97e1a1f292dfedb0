"""What the process tests share."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pytest_kvbudget.engine.launchers.process import KeptEngine, ProcessLauncher
from pytest_kvbudget.engine.model import Command, EngineEvent
from pytest_kvbudget.engine.processes import look_up

TREE = Path(__file__).with_name("tree.py")
CRITICAL = "^VLLM::EngineCore"
DEADLINE_S = 20.0
TOKEN = "KVBUDGET_TEST_TOKEN"

T = TypeVar("T")


def wait_for(what: str, look: Callable[[], T | None], *, deadline_s: float = DEADLINE_S) -> T:
    """Look until there is something; the caller's pause is the test's only wait."""
    end = time.monotonic() + deadline_s
    while not (found := look()):
        assert time.monotonic() < end, f"no {what} within {deadline_s} s"
        time.sleep(0.005)
    return found


def command(argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str = "/") -> Command:
    added = dict(env or {})
    return Command(argv=tuple(argv), env={**os.environ, **added}, env_added=added, cwd=cwd, host="127.0.0.1", port=0)


def tree(*arguments: str) -> Sequence[str]:
    return (sys.executable, "-I", "-S", str(TREE), *arguments)


class Engines:
    """Starts engines in a folder and ends what a test left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[KeptEngine] = []

    def launch(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        leases: Sequence[int] = (),
        critical: str = CRITICAL,
    ) -> KeptEngine:
        number = len(self.started)
        engine = ProcessLauncher("run-1").launch(
            command(argv, env=env, cwd=cwd),
            log_path=self.folder / f"engine{number}.log",
            state_path=self.folder / f"keeper{number}.json",
            lease_descriptors=leases,
            critical=critical,
        )
        self.started.append(engine)
        return engine

    def state_path(self, engine: KeptEngine) -> Path:
        return self.folder / f"keeper{self.started.index(engine)}.json"

    def close(self) -> None:
        for engine in self.started:
            engine.stop(0.0)


def log_of(engine: KeptEngine) -> str:
    return engine.log_path.read_text()


def up(engine: KeptEngine, *names: str) -> dict[str, int]:
    """Wait until these processes said that they are up; their ids by name."""

    def look() -> dict[str, int] | None:
        found = {m[1]: int(m[2]) for m in re.finditer(r"^up (\w+) (\d+)$", log_of(engine), re.MULTILINE)}
        return found if set(names) <= set(found) else None

    return wait_for(f"processes {names}", look)


def events_until(engine: KeptEngine, kind: str) -> list[EngineEvent]:
    """All events up to and including the first of a kind."""
    found: list[EngineEvent] = []

    def look() -> bool:
        found.extend(engine.events())
        return any(event.kind == kind for event in found)

    wait_for(f"event {kind!r}", look)
    return found


def running_with(token: str) -> list[int]:
    """Every living process that has the token in its environment, whoever its parent is."""
    wanted = f"{TOKEN}={token}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        process = look_up(int(folder.name))
        if wanted in environment.split(b"\0") and process is not None and process.running:
            found.append(process.pid)
    return found
