"""Is an engine ready? One cheap question to its health endpoint, asked many times a second."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from enum import StrEnum, unique
from typing import Final

from pytest_kvbudget.engine.ports import free_port, reachable

__all__ = ["Health", "free_port", "probe"]

PATH: Final = "/health"
_LINE_BYTES: Final = 4096


@unique
class Health(StrEnum):
    """What the health endpoint says."""

    REFUSED = "refused"
    """Nobody listens: an engine that still loads, or one that is dead. Only its processes tell which."""
    LOADING = "loading"
    """503 before it was ever ready: llama.cpp, proxies and supervisors say so; vLLM itself never does."""
    READY = "ready"
    """200."""
    DEAD = "dead"
    """503 (vLLM before 0.11: 500) from an engine that was ready: it lost its core and will leave."""
    FOREIGN = "foreign"
    """Something answers, and it is not ours."""
    ERROR = "error"
    """No HTTP answer in time, or another status."""


def probe(
    host: str,
    port: int,
    *,
    path: str = PATH,
    timeout_s: float = 1.0,
    was_ready: bool = False,
    owns_port: Callable[[], bool] | None = None,
) -> Health:
    """Ask once.

    Args:
        host: the address the engine was told to listen on; a wildcard is asked at loopback.
        port: its port.
        path: the health endpoint.
        timeout_s: for the whole exchange, however slowly the answer trickles in.
        was_ready: it has been ready before, so that 503 and 500 mean a dead engine.
        owns_port: asked whether the port is the engine's own, whenever something answers.
    """
    try:
        status = _status(reachable(host), port, path, time.monotonic() + timeout_s)
    except ConnectionRefusedError:
        return Health.REFUSED
    except OSError:
        return Health.ERROR
    if owns_port is not None and not owns_port():
        return Health.FOREIGN
    if status == 200:
        return Health.READY
    if was_ready and status in {500, 503}:
        return Health.DEAD
    return Health.LOADING if status == 503 else Health.ERROR


def _status(host: str, port: int, path: str, deadline: float) -> int | None:
    """Status of one GET; ``None`` where the answer is no HTTP.

    Raises:
        OSError: refused, reset, or not answered in time.
    """
    with socket.create_connection((host, port), timeout=_left(deadline)) as connection:
        name = f"[{host}]" if ":" in host else host
        request = f"GET {path} HTTP/1.1\r\nHost: {name}:{port}\r\nConnection: close\r\n\r\n"
        connection.sendall(request.encode("ascii"))
        answer = b""
        while b"\n" not in answer and len(answer) < _LINE_BYTES:
            connection.settimeout(_left(deadline))
            data = connection.recv(_LINE_BYTES)
            if not data:
                break
            answer += data
    version, _, rest = answer.partition(b" ")
    code = rest[:4].rstrip()
    return int(code) if version.startswith(b"HTTP/") and len(code) == 3 and code.isdigit() else None


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
