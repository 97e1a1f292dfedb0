"""The keeper's side of its owner: where orders come from and events go to. Standard library only."""

from __future__ import annotations

import json
import os
import time

from pytest_kvbudget.engine.processes import alive, open_pidfd


class Owner:
    """The process that the keeper works for. It may be gone at any moment."""

    def __init__(self, control: int, events: int) -> None:
        self.control = control
        self.events = events
        self.gone = False
        self.left = False
        self.pidfd: int | None = None
        self.identity = (0, 0)
        self._received = b""
        self._unsent: list[bytes] = []
        for descriptor in (control, events):
            os.set_inheritable(descriptor, False)
        os.set_blocking(events, False)

    def first_order(self) -> dict[str, object] | None:
        """Wait for the first order; ``None`` where the owner went away before it was complete."""
        while b"\n" not in self._received:
            data = os.read(self.control, 1 << 16)
            if not data:
                return None
            self._received += data
        os.set_blocking(self.control, False)
        return self._next_order()

    def watch(self, pid: int, ticks: int) -> None:
        """From now on notice when this process, the owner, is gone."""
        self.identity = (pid, ticks)
        self.pidfd = open_pidfd(pid, ticks)
        self.look()

    def look(self) -> None:
        """Notice a dead owner where there is no pidfd of it."""
        if self.pidfd is None and not alive(*self.identity):
            self.gone = True

    def orders(self) -> list[dict[str, object]]:
        """Orders that have come, without waiting. Whatever the owner said before it died is among them."""
        while True:
            try:
                data = os.read(self.control, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                self.gone = True
                break
            self._received += data
        found = []
        while (order := self._next_order()) is not None:
            found.append(order)
        return found

    def _next_order(self) -> dict[str, object] | None:
        line, end, rest = self._received.partition(b"\n")
        if not end:
            return None
        self._received = rest
        order: dict[str, object] = json.loads(line)
        return order

    def send(self, kind: str, **fields: object) -> None:
        """Send an event, later if the owner is slow to read."""
        message = {"kind": kind, "at": time.monotonic(), **fields}
        self._unsent.append(json.dumps(message).encode())
        self.flush()

    def flush(self) -> None:
        """Send what can be sent now."""
        try:
            while self._unsent:
                os.write(self.events, self._unsent[0])
                del self._unsent[0]
        except BlockingIOError:
            if self.left:
                self._unsent.clear()
        except OSError:
            self._unsent.clear()

    @property
    def unsent(self) -> bool:
        """Events wait for the owner to read, and it may still do so."""
        return bool(self._unsent) and not self.gone and not self.left
