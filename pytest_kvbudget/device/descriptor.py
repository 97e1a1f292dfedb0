"""Descriptors whose being open means something to another process."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress


class OwnedDescriptor:
    """A descriptor that only this process, and whom it is handed to on purpose, may hold.

    It is closed at exec (Python's default) and in children that are forked: a worker that a test forked must not
    keep a device leased, or an engine alive, after this process is gone.
    """

    __slots__ = ("__weakref__", "_number")

    def __init__(self, number: int) -> None:
        self._number = number
        _owned.add(self)

    def fileno(self) -> int:
        """The descriptor's number; -1 once closed."""
        return self._number

    def close(self) -> None:
        """Close it. Calling it again does nothing."""
        number, self._number = self._number, -1
        if number >= 0:
            with suppress(OSError):
                os.close(number)

    def __del__(self) -> None:
        self.close()


_owned: weakref.WeakSet[OwnedDescriptor] = weakref.WeakSet()


def _close_in_child() -> None:
    for descriptor in tuple(_owned):
        descriptor.close()


os.register_at_fork(after_in_child=_close_in_child)
