"""Small things that processes of the engine share: titles, the log, and lines of messages between them."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

Message = dict[str, Any]


def set_title(title: str) -> None:
    """Show ``title`` in ``/proc/PID/cmdline`` and, cut to 15 bytes, in ``comm``, as vLLM's processes do.

    The command line is overwritten in place through ``/proc/self/mem``; where a kernel forbids that, only ``comm``
    shows it.
    """
    Path("/proc/self/comm").write_bytes(title.encode("utf-8", "surrogateescape")[:15])
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    # fields 48 and 49 of proc(5); the text after the name begins with field 3
    start, end = int(fields[45]), int(fields[46])
    with contextlib.suppress(OSError), Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(title.encode("utf-8", "surrogateescape")[: end - start - 1].ljust(end - start, b"\0"))


class Log:
    """Writes records as vLLM 0.32 does, one write per record so that processes do not mix within one.

    Args:
        process: name of the process, as records show it.
        pid: its id; default: this process.
        sink: what takes text; default: standard output.
    """

    def __init__(
        self, process: str, *, pid: int | None = None, sink: Callable[[str | bytes], None] | None = None
    ) -> None:
        self.pid = os.getpid() if pid is None else pid
        self.prefix = f"({process} pid={self.pid})"
        self.raw = raw if sink is None else sink
        """Prints as it is, without a prefix."""

    def write(self, level: str, where: str, text: str) -> None:
        """A record; every line of it carries the prefix."""
        stamp = time.strftime("%m-%d %H:%M:%S")
        self.raw("".join(f"{self.prefix} {level} {stamp} [{where}] {line}\n" for line in text.split("\n")))

    def say(self, where: str, text: str) -> None:
        """An INFO record of ``file.py:line``."""
        self.write("INFO", where, text)

    def caution(self, where: str, text: str) -> None:
        """A WARNING record."""
        self.write("WARNING", where, text)

    def fail(self, where: str, text: str) -> None:
        """An ERROR record."""
        self.write("ERROR", where, text)


def raw(text: str | bytes) -> None:
    """Print as it is, without a prefix."""
    data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    while data:
        try:
            data = data[os.write(1, data) :]
        except BrokenPipeError:
            return


class Channel:
    """JSON messages, one a line, over a socket to another process of the engine."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._partial = b""

    def fileno(self) -> int:
        """The descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send; nothing happens when the other side is gone, which reading notices."""
        with contextlib.suppress(ConnectionError, BrokenPipeError):
            self._socket.sendall(msgspec.json.encode(message) + b"\n")

    def receive(self) -> list[Message] | None:
        """What has arrived, waiting for something; ``None`` when the other side is gone."""
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            return None
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [msgspec.json.decode(line) for line in lines]

    def call(self, message: Message) -> Message | None:
        """Send and wait for the one answer; ``None`` when the other side is gone."""
        self.send(message)
        return self.answer()

    def answer(self) -> Message | None:
        """Wait for one message; ``None`` when the other side is gone."""
        while True:
            messages = self.receive()
            if messages is None:
                return None
            if messages:
                return messages[0]

    def close(self) -> None:
        """Close this side."""
        self._socket.close()


def channel_pair() -> tuple[Channel, Channel]:
    """Two connected channels; after a fork each process closes the other's."""
    left, right = socket.socketpair()
    return Channel(left), Channel(right)


def gib(size_bytes: float) -> str:
    """GiB as vLLM prints them: rounded to two decimals, a trailing zero dropped."""
    return f"{round(size_bytes / 2**30, 2)}"
