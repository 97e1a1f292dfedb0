"""Running the vendors' tools with a deadline, and finding the JSON in what they print."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pytest_kvbudget.device.model import ProbeError

DEADLINE_S: Final = 10.0
"""For one command; ``rocm-smi`` and ``amd-smi`` are Python programs that take a second on a busy host."""
_MOST_BYTES: Final = 16 * 2**20
_CHUNK_BYTES: Final = 1 << 16
_STDERR_SHOWN: Final = 200


def find_tool(name: str, folders: Sequence[str] = ()) -> str | None:
    """Path of an executable on ``PATH``, else in one of these folders; ``None`` where it is not installed."""
    found = shutil.which(name)
    if found is not None:
        return found
    return next((path for folder in folders if (path := shutil.which(name, path=folder)) is not None), None)


def run_tool(argv: Sequence[str], *, timeout_s: float = DEADLINE_S) -> str:
    """Run a command and return what it printed.

    Args:
        argv: the command; its first word is a path or a name on ``PATH``.
        timeout_s: from start to end; then it and what it started in its process group are ended.

    Raises:
        ProbeError: it is not there, did not end in time, printed more than 16 MiB, or failed.
    """
    shown = " ".join((Path(argv[0]).name, *argv[1:]))
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )
    except OSError as error:
        raise ProbeError(f"{shown}: cannot be run: {error.strerror}; expected the tool on PATH") from None
    with process:
        try:
            output, errors = _read_all(process, shown, time.monotonic() + timeout_s, timeout_s)
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        said = (errors.strip() or output.strip()).splitlines()
        last = said[-1][:_STDERR_SHOWN] if said else "nothing"
        raise ProbeError(f"{shown}: ended with status {process.returncode} and said {last!r}; expected status 0")
    return output


def _read_all(process: subprocess.Popen[bytes], shown: str, deadline: float, timeout_s: float) -> tuple[str, str]:
    """Standard output and standard error until both end and the process is gone."""
    assert process.stdout is not None and process.stderr is not None  # noqa: PT018 - asked for as pipes
    got = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    late = f"{shown}: did not end within {timeout_s:g} s; expected an answer. The driver or the device may hang"
    with selectors.DefaultSelector() as selector:
        for descriptor in got:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready or time.monotonic() > deadline:
                raise ProbeError(late)
            for key, _ in ready:
                chunk = os.read(key.fd, _CHUNK_BYTES)
                got[key.fd] += chunk
                if not chunk:
                    selector.unregister(key.fd)
                if len(got[key.fd]) > _MOST_BYTES:
                    raise ProbeError(f"{shown}: printed more than {_MOST_BYTES} bytes; expected a short answer")
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise ProbeError(late) from None
    output, errors = (taken.decode("utf-8", "replace") for taken in got.values())
    return output, errors


def json_in(text: str, source: str) -> object:
    """The first JSON object or array that begins a line of ``text``; warnings before and after it are passed over.

    Raises:
        ProbeError: there is none.
    """
    decoder = json.JSONDecoder()
    position = 0
    for line in text.splitlines(keepends=True):
        start = position + len(line) - len(line.lstrip())
        position += len(line)
        if text[start : start + 1] not in {"{", "["}:
            continue
        try:
            found: object = decoder.raw_decode(text, start)[0]
        except (ValueError, RecursionError):
            continue
        return found
    shown = " ".join(text.split())[:80]
    raise ProbeError(f"{source}: printed {shown!r}; expected JSON")
