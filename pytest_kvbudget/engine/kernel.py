"""What the kernel says about a process that vanished: whether it was killed for memory."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from typing import Final

import msgspec

from pytest_kvbudget.device.descriptor import OwnedDescriptor

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


class KernelLog:
    """The kernel's log from the moment on at which this was made.

    By place in the log, not by time: its clock is neither the wall clock nor the monotonic one, which time servers
    steer, and after some days of a machine's life they are seconds apart.

    Where the log cannot be read, as for most users and in most containers, nothing is ever known. The kernel numbers
    processes as the host does; in a container of another numbering nothing matches.
    """

    def __init__(self, log: str = KERNEL_LOG) -> None:
        self._descriptor: OwnedDescriptor | None = None
        self._kills: list[KernelKill] = []
        try:
            self._descriptor = OwnedDescriptor(os.open(log, os.O_RDONLY | os.O_NONBLOCK))
            os.lseek(self._descriptor.fileno(), 0, os.SEEK_END)
        except OSError:
            self.close()

    def killed_for_memory(self, pids: Collection[int]) -> tuple[KernelKill, ...]:
        """Which of these processes the kernel has killed for memory since, oldest first."""
        for text in self._new_records():
            match = _KILLED.search(text)
            if match is not None:
                self._kills.append(KernelKill(pid=int(match["pid"]), name=match["name"], text=text))
        return tuple(kill for kill in self._kills if kill.pid in pids)

    def close(self) -> None:
        """Read no more of it. Calling it again does nothing."""
        if self._descriptor is not None:
            self._descriptor.close()
            self._descriptor = None

    def _new_records(self) -> Iterator[str]:
        """First line of every record that has come. ``priority,number,microseconds,flags;text`` (dev-kmsg)."""
        while self._descriptor is not None:
            try:
                record = os.read(self._descriptor.fileno(), _RECORD_BYTES)
            except BrokenPipeError:
                continue  # records were overwritten before we read them; the next read is further on
            except OSError:
                return
            if not record:
                return
            head, separator, text = record.decode("utf-8", "replace").partition(";")
            if separator and head.count(",") >= 3 and (lines := text.splitlines()):
                yield lines[0]
