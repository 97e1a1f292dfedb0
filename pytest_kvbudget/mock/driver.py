"""The simulated cards: one process per device tree that owns their memory and shows it as amdgpu's sysfs does.

Ranks of engines connect to it and ask for memory. It refuses what does not fit, so engines on one card contend, and
frees everything of a client whose connection closes, so memory comes back when a process dies, however it dies.
Imports only the standard library: it runs with ``-I -S`` to start quickly.
"""

from __future__ import annotations

import hashlib
import os
import selectors
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_kvbudget.mock.spec import MockDevice

DEADLINE_S: Final = 5.0
CARDS_FOLDER: Final = "class/drm"
GTT_TOTAL_BYTES: Final = 16 * 2**30


class DriverError(RuntimeError):
    """The driver cannot be started or reached, or simulates other cards; the message says what to do."""


def socket_name(sysfs: str | Path) -> str:
    """Abstract socket of the driver of a tree. Only one process can hold it, so it is the lock as well."""
    digest = hashlib.sha256(os.path.realpath(sysfs).encode()).hexdigest()[:24]
    return f"\0kvbudget-mock-{os.getuid()}-{digest}"


class Cards:
    """The memory of all cards, and the files that show it."""

    def __init__(self, sysfs: str, total_bytes: int, idle_bytes: int, vendor: str) -> None:
        self.total_bytes = total_bytes
        self.idle_bytes = idle_bytes
        self._drm = os.path.join(sysfs, CARDS_FOLDER)  # noqa: PTH118 - pathlib would double the start time
        self._vendor = vendor
        self._used: list[int] = []

    def __len__(self) -> int:
        return len(self._used)

    def plug(self, count: int) -> None:
        """Have at least ``count`` cards."""
        for card in range(len(self._used), count):
            self._used.append(self.idle_bytes)
            os.makedirs(f"{self._drm}/card{card}/device", exist_ok=True)  # noqa: PTH103
            connector = f"{self._drm}/card{card}-DP-1"
            os.makedirs(connector, exist_ok=True)  # noqa: PTH103
            _replace(f"{connector}/status", "disconnected")
            for name, value in (
                ("vendor", self._vendor),
                ("mem_info_gtt_total", GTT_TOTAL_BYTES),
                ("mem_info_gtt_used", 0),
                ("mem_info_vram_total", self.total_bytes),
            ):
                _replace(f"{self._drm}/card{card}/device/{name}", value)
            self._show(card)

    def free_bytes(self, card: int) -> int:
        """Bytes of a card that nobody uses."""
        return self.total_bytes - self._used[card]

    def take(self, card: int, size_bytes: int) -> bool:
        """Take memory (give it back when negative); whether it was there."""
        if size_bytes > self.free_bytes(card):
            return False
        self._used[card] += size_bytes
        self._show(card)
        return True

    def idle(self) -> None:
        """Show every card as idle."""
        for card in range(len(self._used)):
            self._used[card] = self.idle_bytes
            self._show(card)

    def _show(self, card: int) -> None:
        _replace(f"{self._drm}/card{card}/device/mem_info_vram_used", self._used[card])


def _replace(path: str, value: object) -> None:
    temporary = f"{path}.new"
    with open(temporary, "w", encoding="ascii") as file:  # noqa: PTH123
        file.write(f"{value}\n")
    os.replace(temporary, path)  # noqa: PTH105


class Driver:
    """Serves clients until the last one and the last owner are gone.

    Requests are lines: ``spec``, ``plug COUNT``, ``owner PID``, ``mem CARD``, ``alloc CARD BYTES`` and
    ``free CARD BYTES``.
    """

    def __init__(self, listener: socket.socket, cards: Cards, owner_pid: int) -> None:
        self._cards = cards
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._clients: dict[socket.socket, dict[int, int]] = {}
        self._partial: dict[socket.socket, bytes] = {}
        self._owners: dict[int, int] = {}
        """Descriptor to pid."""
        self._own(owner_pid)

    def run(self) -> None:
        """Serve; leaves idle values in the tree."""
        try:
            while self._clients or self._owners:
                self._step()
        finally:
            # while the socket is held, no other driver writes these files
            self._cards.idle()
            self._listener.close()

    def _step(self) -> None:
        for key, _ in self._selector.select():
            if key.fileobj is self._listener:
                client, _ = self._listener.accept()
                self._clients[client], self._partial[client] = {}, b""
                self._selector.register(client, selectors.EVENT_READ)
            elif isinstance(key.fileobj, socket.socket):
                self._read(key.fileobj)
            else:
                self._selector.unregister(key.fd)
                del self._owners[key.fd]
                os.close(key.fd)

    def _read(self, client: socket.socket) -> None:
        try:
            data = client.recv(4096)
        except ConnectionError:
            data = b""
        if not data:
            self._selector.unregister(client)
            client.close()
            del self._partial[client]
            for card, size_bytes in self._clients.pop(client).items():
                self._cards.take(card, -size_bytes)
            return
        *lines, self._partial[client] = (self._partial[client] + data).split(b"\n")
        for line in lines:
            try:
                client.sendall(self._answer(client, line.decode("ascii").split()).encode() + b"\n")
            except ConnectionError:
                return

    def _answer(self, client: socket.socket, words: list[str]) -> str:
        verb, *arguments = words
        if verb == "spec":
            return f"{self._cards.total_bytes} {self._cards.idle_bytes}"
        if verb in {"plug", "owner"}:
            (self._cards.plug if verb == "plug" else self._own)(int(arguments[0]))
            return "ok"
        return self._memory(client, verb, int(arguments[0]), *map(int, arguments[1:]))

    def _memory(self, client: socket.socket, verb: str, card: int, size_bytes: int = 0) -> str:
        cards = self._cards
        if not 0 <= card < len(cards):
            return f"no-card {len(cards)}"
        if verb == "mem":
            return f"mem {cards.free_bytes(card)}"
        held = self._clients[client]
        if verb == "free":
            size_bytes = -min(size_bytes, held.get(card, 0))
        if not cards.take(card, size_bytes):
            return f"refused {cards.free_bytes(card)}"
        held[card] = held.get(card, 0) + size_bytes
        return f"ok {cards.free_bytes(card)}"

    def _own(self, pid: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        self._owners[descriptor] = pid
        self._selector.register(descriptor, selectors.EVENT_READ)


class DriverClient:
    """One connection to a driver. What it allocates is freed when the connection, or this process, is gone.

    Raises:
        DriverError: there is no driver, or it went away.
    """

    def __init__(self, sysfs: str | Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(DEADLINE_S)
        self._sysfs = sysfs
        try:
            self._socket.connect(socket_name(sysfs))
        except OSError as error:
            self._socket.close()
            raise DriverError(f"no driver answers for the simulated cards in {sysfs}: {error}") from None

    def ask(self, *words: object) -> list[str]:
        """One request; the words of its answer."""
        try:
            self._socket.sendall(" ".join(map(str, words)).encode() + b"\n")
            answer = b""
            while not answer.endswith(b"\n"):
                data = self._socket.recv(256)
                if not data:
                    raise ConnectionResetError("connection closed")
                answer += data
        except OSError as error:
            raise DriverError(f"the driver of the simulated cards in {self._sysfs} went away: {error}") from None
        return answer.decode().split()

    def fileno(self) -> int:
        """The connection's descriptor; while any process has it open, nothing is given back."""
        return self._socket.fileno()

    def free_bytes(self, card: int) -> int:
        """Free bytes of a card.

        Raises:
            DriverError: there is no such card.
        """
        verb, number = self.ask("mem", card)
        if verb != "mem":
            raise DriverError(f"the simulated host in {self._sysfs} has {number} cards; card {card} is not there")
        return int(number)

    def alloc(self, card: int, size_bytes: int) -> tuple[bool, int]:
        """Ask for memory: whether it was there, and the free bytes after (or without) it."""
        verb, free_bytes = self.ask("alloc", card, size_bytes)
        return verb == "ok", int(free_bytes)

    def free(self, card: int, size_bytes: int) -> None:
        """Give memory back."""
        self.ask("free", card, size_bytes)

    def close(self) -> None:
        """Give everything back."""
        self._socket.close()


def ensure_driver(sysfs: str | Path, spec: MockDevice, owner_pid: int, *, cards: int) -> None:
    """Have a driver for this tree; returns when it answers and shows at least ``cards`` cards.

    Args:
        sysfs: folder of the device tree, made where missing.
        spec: the cards.
        owner_pid: process whose end allows the driver to leave, once its last client is gone too.
        cards: number of cards.

    Raises:
        DriverError: it did not answer in time, or simulates other cards.
    """
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            client = DriverClient(sysfs)
        except DriverError as error:
            if time.monotonic() > deadline:
                raise DriverError(f"{error} (within {DEADLINE_S:.0f} s)") from None
            _start(sysfs, spec, owner_pid, cards)
            continue
        try:
            _adopt(client, sysfs, spec, owner_pid, cards)
        except ConnectionResetError:
            continue
        finally:
            client.close()
        return


def _adopt(client: DriverClient, sysfs: str | Path, spec: MockDevice, owner_pid: int, cards: int) -> None:
    try:
        found = [int(word) for word in client.ask("spec")]
        expected = [spec.device_total, spec.idle_bytes]
        if found == expected:
            client.ask("plug", cards)
            client.ask("owner", owner_pid)
            return
    except DriverError as error:
        # it was about to leave; the next one will not be
        raise ConnectionResetError(str(error)) from None
    raise DriverError(
        f"{sysfs}: a running driver simulates cards of {found[0]} bytes with {found[1]} in use when idle, not"
        f" {expected[0]} and {expected[1]}; let its runs end, or give this target another folder with 'sysfs'"
    )


def _start(sysfs: str | Path, spec: MockDevice, owner_pid: int, cards: int) -> None:
    """Run the driver's launcher, which ends as soon as the driver listens, or another one does."""
    argv = [sys.executable, "-I", "-S", __file__, "--sysfs", str(sysfs), "--cards", str(cards),
            "--total", str(spec.device_total), "--idle", str(spec.idle_bytes),
            "--owner-pid", str(owner_pid)]  # fmt: skip
    null = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1)]
    pid = os.posix_spawn(sys.executable, argv, os.environ, file_actions=null)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        raise DriverError(
            f"the driver of the simulated cards ended with status {status}; is {sysfs} a writable folder?"
        )


def main(arguments: list[str]) -> int:
    """``--sysfs DIR --cards N --total BYTES --idle BYTES --owner-pid PID [--vendor 0x1002]``; goes to background."""
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    sysfs = options["--sysfs"]
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(socket_name(sysfs))
    except OSError:
        return 0
    cards = Cards(sysfs, int(options["--total"]), int(options["--idle"]), options.get("--vendor", "0x1002"))
    cards.plug(int(options["--cards"]))
    listener.listen(128)
    if os.fork():
        return 0
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.closerange(3, listener.fileno())
    os.closerange(listener.fileno() + 1, 4096)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Driver(listener, cards, int(options["--owner-pid"])).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
