"""The simulated cards: one process per device tree that owns their memory and shows it in sysfs.

Cards are shown as amdgpu shows them. On Neuron a "card" is a physical NeuronCore, shown as AWS' driver 2.24 shows it,
and the memory belongs to the HBM stack that some of them share.

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
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_kvbudget.mock.spec import MockDevice

DEADLINE_S: Final = 5.0
CARDS_FOLDER: Final = "class/drm"
GTT_TOTAL_BYTES: Final = 16 * 2**30
AMD_VENDOR: Final = "0x1002"
IDLE_KIND: Final = "driver_memory"
NEURON_DRIVER: Final = "2.24.7.0"
NEURON_DEVICES: Final = {
    "trn1": ("Trainium1", 2, 1),
    "trn2": ("Trainium2", 8, 2),
    "trn3": ("Trainium3", 8, 2),
    "inf2": ("Inferentia2", 2, 1),
}
"""Name of a device, its physical cores, and those that share an HBM stack (facts, section 4)."""
NEURON_CATEGORIES: Final = (
    "collectives", "constants", "dma_rings", "driver_memory", "model_code", "model_shared_scratchpad",
    "nonshared_scratchpad", "notifications", "runtime_memory", "tensors", "uncategorized",
)  # fmt: skip


class DriverError(RuntimeError):
    """The driver cannot be started or reached, or simulates other cards; the message says what to do."""


def socket_name(sysfs: str | Path) -> str:
    """Abstract socket of the driver of a tree. Only one process can hold it, so it is the lock as well."""
    digest = hashlib.sha256(os.fsencode(os.path.realpath(sysfs))).hexdigest()[:24]
    return f"\0kvbudget-mock-{os.getuid()}-{digest}"


class Tree(Protocol):
    """Shows cards."""

    sharing: int
    """Cards that share one memory."""

    def plug(self, card: int, total_bytes: int) -> None:
        """Make a card's files."""
        ...

    def show(self, card: int, held: dict[str, int], changed: str) -> None:
        """Show what is held; ``changed`` is the kind of memory that did."""
        ...


class DrmTree:
    """Cards of amdgpu below ``class/drm``."""

    def __init__(self, sysfs: str, vendor: str) -> None:
        self._drm = os.path.join(sysfs, CARDS_FOLDER)  # noqa: PTH118 - pathlib would double the start time
        self._vendor = vendor
        self.sharing = 1

    def plug(self, card: int, total_bytes: int) -> None:
        """Make a card's files."""
        os.makedirs(f"{self._drm}/card{card}/device", exist_ok=True)  # noqa: PTH103
        connector = f"{self._drm}/card{card}-DP-1"
        os.makedirs(connector, exist_ok=True)  # noqa: PTH103
        _replace(f"{connector}/status", "disconnected")
        for name, value in (
            ("vendor", self._vendor),
            ("mem_info_gtt_total", GTT_TOTAL_BYTES),
            ("mem_info_gtt_used", 0),
            ("mem_info_vram_total", total_bytes),
        ):
            _replace(f"{self._drm}/card{card}/device/{name}", value)

    def show(self, card: int, held: dict[str, int], changed: str) -> None:
        """Show what is held; ``changed`` is the kind of memory that did."""
        del changed
        _replace(f"{self._drm}/card{card}/device/mem_info_vram_used", sum(held.values()))


class NeuronTree:
    """Neuron devices below ``devices/virtual/neuron_device``: of memory, ``total`` is what is in use now."""

    def __init__(self, sysfs: str, platform: str) -> None:
        self._root = f"{sysfs}/devices/virtual/neuron_device"
        self._module = f"{sysfs}/module/neuron"
        self._name, self._cores, self.sharing = NEURON_DEVICES[platform]
        self._peaks: dict[tuple[int, str], int] = {}
        self._totals: dict[tuple[int, str], int] = {}

    def _core(self, core: int) -> str:
        device, number = divmod(core, self._cores)
        return f"{self._root}/neuron{device}/neuron_core{number}/stats/memory_usage/device_mem"

    def plug(self, core: int, total_bytes: int) -> None:
        """Make the files of a core, and of its device with the first one."""
        del total_bytes
        device, number = divmod(core, self._cores)
        if number == 0:
            os.makedirs(self._module, exist_ok=True)  # noqa: PTH103
            _replace(f"{self._module}/version", NEURON_DRIVER)
            os.makedirs(f"{self._root}/neuron{device}/info/architecture", exist_ok=True)  # noqa: PTH103
            _replace(f"{self._root}/neuron{device}/info/architecture/device_name", self._name)
            _replace(f"{self._root}/neuron{device}/core_count", self._cores)
        for category in ("", *NEURON_CATEGORIES):
            os.makedirs(f"{self._core(core)}/{category}", exist_ok=True)  # noqa: PTH103
            self._write(core, category, 0)

    def show(self, core: int, held: dict[str, int], changed: str) -> None:
        """Show what is held; ``changed`` is the category that did."""
        self._write(core, changed, held.get(changed, 0))
        self._write(core, "", sum(held.values()))

    def _write(self, core: int, category: str, now_bytes: int) -> None:
        key, folder = (core, category), f"{self._core(core)}/{category}"
        self._peaks[key] = max(now_bytes, self._peaks.get(key, 0))
        _replace(f"{folder}/present", now_bytes - self._totals.get(key, 0))
        _replace(f"{folder}/peak", self._peaks[key])
        _replace(f"{folder}/total", now_bytes)
        self._totals[key] = now_bytes


class Cards:
    """The memory of all cards, and the files that show it.

    Args:
        tree: what shows them.
        what: a word for them, the same for the same kind.
        total_bytes: of one memory, which ``tree.sharing`` cards have together.
        idle_bytes: in use on the first memory when it is idle.
        skew_bytes: so many more on each memory than on the one before.
    """

    def __init__(self, tree: Tree, what: str, total_bytes: int, idle_bytes: int, skew_bytes: int) -> None:
        self.what = what
        self.total_bytes = total_bytes
        self.idle_bytes = idle_bytes
        self.skew_bytes = skew_bytes
        self._tree = tree
        self._held: list[dict[str, int]] = []
        """Per card, bytes by kind of memory."""

    def __len__(self) -> int:
        return len(self._held)

    def plug(self, count: int) -> None:
        """Have at least ``count`` cards."""
        for card in range(len(self._held), count):
            self._held.append({})
            self._tree.plug(card, self.total_bytes)
            self._idle(card)

    def _idle(self, card: int) -> None:
        memory, place = divmod(card, self._tree.sharing)
        kinds = {*self._held[card], IDLE_KIND}
        self._held[card] = {IDLE_KIND: 0 if place else self.idle_bytes + memory * self.skew_bytes}
        for kind in kinds:
            self._tree.show(card, self._held[card], kind)

    def sharers(self, card: int) -> range:
        """Cards that have one memory together."""
        first = card // self._tree.sharing * self._tree.sharing
        return range(first, min(first + self._tree.sharing, len(self._held)))

    def free_bytes(self, card: int) -> int:
        """Bytes of a card that nobody uses."""
        return self.total_bytes - sum(sum(self._held[one].values()) for one in self.sharers(card))

    def take(self, card: int, size_bytes: int, kind: str = "", limit_bytes: int | None = None) -> bool:
        """Take memory (give it back when negative); whether it was there.

        ``limit_bytes`` is what can be had of the memory in all, where that is less than its size.
        """
        out_of_reach_bytes = 0 if limit_bytes is None else self.total_bytes - limit_bytes
        if size_bytes > self.free_bytes(card) - out_of_reach_bytes:
            return False
        self._held[card][kind] = self._held[card].get(kind, 0) + size_bytes
        self._tree.show(card, self._held[card], kind)
        return True

    @property
    def sharing(self) -> int:
        """Cards that have one memory together."""
        return self._tree.sharing

    def held(self, card: int) -> dict[tuple[int, str], int]:
        """What is held, by card and kind, of all cards with this one's memory."""
        return {
            (one, kind): size_bytes
            for one in self.sharers(card)
            for kind, size_bytes in self._held[one].items()
            if size_bytes
        }

    def idle(self) -> None:
        """Show every card as idle."""
        for card in range(len(self._held)):
            self._idle(card)


def _replace(path: str, value: object) -> None:
    temporary = f"{path}.new"
    with open(temporary, "w", encoding="ascii") as file:  # noqa: PTH123
        file.write(f"{value}\n")
    os.replace(temporary, path)  # noqa: PTH105


class Driver:
    """Serves clients until the last one and the last owner are gone.

    Requests are lines: ``spec``, ``plug COUNT``, ``owner PID``, ``mem CARD``, ``kinds CARD``, ``claim CARD``,
    ``alloc CARD BYTES [KIND [LIMIT]]`` and ``free CARD BYTES [KIND]``.
    """

    def __init__(self, listener: socket.socket, cards: Cards, owner_pid: int) -> None:
        self._cards = cards
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._clients: dict[socket.socket, dict[tuple[int, str], int]] = {}
        self._claimed: dict[int, socket.socket] = {}
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
            for (card, kind), size_bytes in self._clients.pop(client).items():
                self._cards.take(card, -size_bytes, kind)
            self._claimed = {card: owner for card, owner in self._claimed.items() if owner is not client}
            return
        *lines, self._partial[client] = (self._partial[client] + data).split(b"\n")
        for line in lines:
            try:
                client.sendall(self._answer(client, line.decode("ascii").split()).encode() + b"\n")
            except ConnectionError:
                return

    def _answer(self, client: socket.socket, words: list[str]) -> str:
        verb, *arguments = words
        cards = self._cards
        if verb == "spec":
            return f"{cards.total_bytes} {cards.idle_bytes} {cards.skew_bytes} {cards.what}"
        if verb in {"plug", "owner"}:
            (cards.plug if verb == "plug" else self._own)(int(arguments[0]))
            return "ok"
        card = int(arguments[0])
        if not 0 <= card < len(cards):
            return f"no-card {len(cards)}"
        return self._of_card(client, verb, card, arguments[1:])

    def _of_card(self, client: socket.socket, verb: str, card: int, arguments: list[str]) -> str:
        if verb == "mem":
            return f"mem {self._cards.free_bytes(card)}"
        if verb == "kinds":
            held = self._cards.held(card)
            return " ".join(("kinds", *(f"{one}:{kind}={size_bytes}" for (one, kind), size_bytes in held.items())))
        if verb == "claim":
            return f"claimed {int(self._claimed.setdefault(card, client) is client)}"
        size, kind, limit = (*arguments, "", "")[:3]
        return self._memory(client, verb, (card, kind), int(size), int(limit) if limit else None)

    def _memory(
        self, client: socket.socket, verb: str, key: tuple[int, str], size_bytes: int, limit_bytes: int | None
    ) -> str:
        cards, held, (card, kind) = self._cards, self._clients[client], key
        if verb == "free":
            size_bytes = -min(size_bytes, held.get(key, 0))
        if not cards.take(card, size_bytes, kind, limit_bytes):
            return f"refused {cards.free_bytes(card)}"
        held[key] = held.get(key, 0) + size_bytes
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

    def alloc(self, card: int, size_bytes: int, kind: str = "", limit_bytes: int | None = None) -> tuple[bool, int]:
        """Ask for memory: whether it was there, and the free bytes after (or without) it."""
        words = [] if limit_bytes is None else [limit_bytes]
        verb, free_bytes = self.ask("alloc", card, size_bytes, *([kind] if kind else []), *words)
        return verb == "ok", int(free_bytes)

    def free(self, card: int, size_bytes: int, kind: str = "") -> None:
        """Give memory back."""
        self.ask("free", card, size_bytes, *([kind] if kind else []))

    def claim(self, card: int) -> bool:
        """Ask for a card for this client alone; whether it is. It stays so until the connection is closed."""
        return self.ask("claim", card)[1] == "1"

    def kinds(self, card: int) -> dict[tuple[int, str], int]:
        """Bytes by card and kind of memory, for all cards that have this one's memory."""
        found = {}
        for word in self.ask("kinds", card)[1:]:
            name, _, size_bytes = word.partition("=")
            where, _, kind = name.partition(":")
            found[int(where), kind] = int(size_bytes)
        return found

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
        found = client.ask("spec")
        expected = [str(word) for word in (spec.device_total, spec.idle_bytes, spec.device_skew, _what(spec))]
        if found == expected:
            client.ask("plug", _units(spec, cards))
            client.ask("owner", owner_pid)
            return
    except DriverError as error:
        # it was about to leave; the next one will not be
        raise ConnectionResetError(str(error)) from None
    raise DriverError(
        f"{sysfs}: a running driver simulates cards of {found[0]} bytes with {found[1]} in use when idle ({found[2]}"
        f" more on each, {found[3]}), not {expected[0]} and {expected[1]} ({expected[2]}, {expected[3]}); let its runs"
        " end, or give this target another folder with 'sysfs'"
    )


def _what(spec: MockDevice) -> str:
    return spec.platform if spec.dialect == "neuron" else "amdgpu"


def _units(spec: MockDevice, cards: int) -> int:
    """Cards that the driver has: on Neuron all physical cores of as many devices as the logical cores may take."""
    if spec.dialect != "neuron":
        return cards
    _, cores, sharing = NEURON_DEVICES[spec.platform]
    return -(-cards * sharing // cores) * cores


def _start(sysfs: str | Path, spec: MockDevice, owner_pid: int, cards: int) -> None:
    """Run the driver's launcher, which ends as soon as the driver listens, or another one does."""
    argv = [sys.executable, "-I", "-S", __file__, "--sysfs", str(sysfs), "--cards", str(_units(spec, cards)),
            "--total", str(spec.device_total), "--idle", str(spec.idle_bytes), "--skew", str(spec.device_skew),
            "--what", _what(spec), "--owner-pid", str(owner_pid)]  # fmt: skip
    null = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1)]
    pid = os.posix_spawn(sys.executable, argv, os.environ, file_actions=null)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        raise DriverError(
            f"the driver of the simulated cards ended with status {status}; is {sysfs} a writable folder?"
        )


def main(arguments: list[str]) -> int:
    """Go to background and serve.

    Options: ``--sysfs DIR --cards N --total BYTES --idle BYTES --skew BYTES --what KIND --owner-pid PID``.
    """
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    sysfs = options["--sysfs"]
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(socket_name(sysfs))
    except OSError:
        return 0
    what = options["--what"]
    tree: Tree = DrmTree(sysfs, AMD_VENDOR) if what == "amdgpu" else NeuronTree(sysfs, what)
    cards = Cards(tree, what, int(options["--total"]), int(options["--idle"]), int(options["--skew"]))
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
