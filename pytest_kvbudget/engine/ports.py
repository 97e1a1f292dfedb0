"""Whose port is it: which processes hold the socket that would answer at an address."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

_LISTENING: Final = "0A"
_MAPPED: Final = bytes(10) + b"\xff\xff"
"""Prefix of an IPv4 address inside IPv6."""


def reachable(host: str) -> str:
    """Where to connect to reach a server that listens on ``host``: loopback for a wildcard."""
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - not bound here


def free_port(host: str) -> int:
    """A TCP port on ``host`` that nobody uses at this moment. Another process may take it before it is bound.

    Raises:
        OSError: ``host`` is not an address of this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.bind(address)
        return int(probe.getsockname()[1])


class Ports:
    """Ports of this process' engines. Several boot at once: none is given one that another may not have bound yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given: set[int] = set()

    def take(self, host: str) -> int:
        """A port as `free_port` finds it, and no other engine of this process was given.

        Raises:
            OSError: ``host`` is not an address of this machine.
        """
        with self._lock:
            while (port := free_port(host)) in self._given:
                pass
            self._given.add(port)
            return port

    def give_back(self, port: int) -> None:
        """The engine that was given it is gone."""
        with self._lock:
            self._given.discard(port)


def owned_by(pids: Iterable[int], host: str, port: int) -> bool:
    """Whether a connection to ``host`` and ``port`` is answered by one of these processes, and by no other.

    Looks at listening sockets only: nothing is connected. Processes of another network namespace, or of a user
    whose descriptors cannot be read, own nothing.
    """
    processes = tuple(pids)
    for pid in processes:
        answering = _answering(pid, host, port)
        if answering:
            return answering <= {inode for process in processes for inode in _socket_inodes(process)}
    return False


def _answering(pid: int, host: str, port: int) -> set[int]:
    """Inodes of the sockets that the kernel would pick for a connection, in the network namespace of ``pid``."""
    addresses = _packed_addresses(reachable(host), port)
    # In the kernel's order of preference: the address itself, the wildcard of its family, a dual-stack wildcard.
    exact, wildcard, dual = set[int](), set[int](), set[int]()
    for address, listening_port, inode in _listeners(pid):
        if listening_port != port:
            continue
        if address.removeprefix(_MAPPED) in addresses:
            exact.add(inode)
        elif not any(address) and len(address) in map(len, addresses):
            wildcard.add(inode)
        elif not any(address) or address == _MAPPED + bytes(4):
            dual.add(inode)
    return exact or wildcard or dual


def _packed_addresses(host: str, port: int) -> set[bytes]:
    return {
        socket.inet_pton(family, str(address[0]).partition("%")[0])
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    }


def _listeners(pid: int) -> Iterator[tuple[bytes, int, int]]:
    """Packed address, port and inode of every listening TCP socket in the network namespace of ``pid``."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING:
                    address, _, port = fields[1].partition(":")
                    yield _packed(address), int(port, 16), int(fields[9])


def _packed(text: str) -> bytes:
    """An address in network order from the kernel's form: 32-bit words, each printed as a native integer."""
    words = (int(text[start : start + 8], 16) for start in range(0, len(text), 8))
    return b"".join(word.to_bytes(4, sys.byteorder) for word in words)


def _socket_inodes(pid: int) -> Iterator[int]:
    folder = Path(f"/proc/{pid}/fd")
    with suppress(OSError):
        for entry in folder.iterdir():
            with suppress(OSError):
                target = str(entry.readlink())
                if target.startswith("socket:["):
                    yield int(target[8:-1])
