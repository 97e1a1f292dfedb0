"""What the kernel says about a process that vanished: whether it was killed for memory."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Final

import msgspec

KERNEL_LOG: Final = "/dev/kmsg"
_RECORD_BYTES: Final = 8192
"""The kernel gives one record per read, and refuses a smaller buffer than the record."""
_KILLED: Final = re.compile(r"(?:[Oo]ut of memory|oom-kill)\S*:? .*?[Kk]illed process (?P<pid>\d+) \((?P<name>[^)]*)\)")


class KernelKill(msgspec.Struct, frozen=True, kw_only=True):
    """A process that the kernel killed for memory, of a control group or of the host."""

    pid: int
    name: str
    """Its short name, 15 characters at most."""
    text: str
    """The kernel's line."""


def killed_for_memory(pids: Collection[int], since_s: float, *, log: str = KERNEL_LOG) -> tuple[KernelKill, ...]:
    """Which of these processes the kernel killed for memory since a moment on the monotonic clock.

    Empty where the kernel log cannot be read, as for most users and in most containers: then nothing is known. The
    kernel numbers processes as the host does; in a container of another numbering nothing matches.
    """
    found = []
    for at_s, text in _records(log):
        match = _KILLED.search(text)
        if match is not None and at_s >= since_s and int(match["pid"]) in pids:
            found.append(KernelKill(pid=int(match["pid"]), name=match["name"], text=text))
    return tuple(found)


def _records(log: str) -> Iterator[tuple[float, str]]:
    """Time in seconds and text of every record, oldest first. ``priority,number,microseconds,flags;text``."""
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        while True:
            try:
                record = os.read(descriptor, _RECORD_BYTES)
            except BrokenPipeError:
                continue  # records were overwritten while we read; the next read is further on
            except OSError:
                return
            if not record:
                return
            head, _, text = record.decode("utf-8", "replace").partition(";")
            fields = head.split(",")
            with suppress(IndexError, ValueError):
                yield int(fields[2]) / 1e6, text.splitlines()[0]
    finally:
        os.close(descriptor)
