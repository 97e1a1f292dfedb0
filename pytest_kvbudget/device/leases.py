"""Machine-wide leases of devices: who holds the lock file's lock has the device, whatever any record says.

A lease is a ``flock`` on a file per device. The lock belongs to the open file, so that it is handed down by
descriptor: it is free exactly when the last process that has it - the keeper of an engine, mostly - is gone.
Never unlocked by name, never by force: a descriptor is closed, and that is all.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

import msgspec
from filelock import lock_descriptor

from pytest_kvbudget.device.descriptor import OwnedDescriptor
from pytest_kvbudget.device.model import Holder

FOLDER_VARIABLE: Final = "KVBUDGET_LEASE_DIR"
_FOLDER: Final = "/tmp/.kvbudget-leases"  # noqa: S108 - one for all users of the machine, whatever their TMPDIR
_SUFFIX: Final = ".lock"
_WANTED_SUFFIX: Final = ".wanted"
"""Of files that who waits for a device holds a shared lock on, so that who holds several can give one up."""
_POLL_S: Final = 0.05
_RECORD_BYTES: Final = 1 << 16

Candidate = tuple[tuple[str, ...], tuple[str, ...]]
"""Devices as the target names them, and the machine-wide names that they are leased under."""


class LeaseError(Exception):
    """The folder or a file of the leases cannot be used; says which and what to do."""


class LeaseTimeoutError(Exception):
    """No device became free in time.

    Attributes:
        holders: who holds them, as far as their records say.
    """

    def __init__(self, candidates: Sequence[Candidate], holders: tuple[Holder, ...], waited_s: float) -> None:
        self.holders = holders
        asked = " or ".join("+".join(names) for _, names in candidates)
        who = "; ".join(describe(holder) for holder in holders) or "a process that left no record"
        super().__init__(
            f"devices_busy: no lease on {asked} within {waited_s:g} s; held by {who}. Wait for it, raise "
            "limits.lease_seconds, or end what holds it (kvbudget reap ARCHIVE lists and ends what dead runs left)"
        )


class Lease:
    """Devices that are ours until the last process that has `descriptors` closes them."""

    def __init__(self, devices: tuple[str, ...], names: tuple[str, ...], locks: tuple[OwnedDescriptor, ...]) -> None:
        self.devices = devices
        """As the target names them."""
        self.names = names
        """Machine-wide, one per device."""
        self._locks = locks

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Locked descriptors, to be handed to the process that keeps the engine (``pass_fds``)."""
        return tuple(lock.fileno() for lock in self._locks)

    def tell(self, *, run: str, purpose: str, pid: int | None = None) -> None:
        """Say anew what the devices are held for: another shape is booted, or an engine was handed over.

        Args:
            run: name of the run.
            purpose: target and shape, for people.
            pid: who holds them; this process by default, the engine's first one after it was handed over.
        """
        _write_holders(self.names, self._locks, run=run, purpose=purpose, pid=pid)

    def close(self) -> None:
        """Give our hold up. The devices stay leased as long as a process lives that the descriptors were handed to."""
        for lock in self._locks:
            lock.close()


def lease_folder() -> Path:
    """Folder of the lock files, made if need be: one for the whole machine, writable for every user.

    Raises:
        LeaseError: it is no folder of that kind.
    """
    path = Path(os.environ.get(FOLDER_VARIABLE) or _FOLDER)
    hint = f"remove it, or set {FOLDER_VARIABLE} to a folder that every user of this machine's devices shares"
    try:
        path.mkdir(parents=True)
        path.chmod(0o1777)
    except FileExistsError:
        pass
    except OSError as error:
        raise LeaseError(f"{path}: cannot be made: {error.strerror}; {hint}") from None
    try:
        mode = path.lstat().st_mode if FOLDER_VARIABLE not in os.environ else path.stat().st_mode
    except OSError as error:
        raise LeaseError(f"{path}: cannot be used: {error.strerror}; {hint}") from None
    if not stat.S_ISDIR(mode):
        raise LeaseError(f"{path}: is no folder; {hint}")
    return path


def acquire(
    candidates: Sequence[Candidate],
    *,
    run: str,
    purpose: str,
    timeout_s: float,
    on_wait: Callable[[tuple[Holder, ...]], None] | None = None,
) -> Lease:
    """Lease all devices of one candidate, the first that is free; wait where none is.

    Args:
        candidates: sets of devices, tried in this order; each is leased whole or not at all.
        run: name of the run, for the holder's record.
        purpose: target and shape, for people.
        timeout_s: how long to wait.
        on_wait: told who holds the devices before the first wait and whenever that changes; it may give up leases.

    Raises:
        LeaseTimeoutError: nothing became free.
        LeaseError: the lock files cannot be used.
        ValueError: no candidates.
    """
    if not candidates:
        raise ValueError("no set of devices to lease")
    folder = lease_folder()
    begun = time.monotonic()
    told: tuple[Holder, ...] | None = None
    wish = _Wish(folder, [name for _, names in candidates for name in names])
    try:
        while True:
            for devices, names in candidates:
                locks = _try_all(folder, names)
                if locks is not None:
                    _write_holders(names, locks, run=run, purpose=purpose)
                    return Lease(devices, names, locks)
            holders = holders_of(wish.names)
            if time.monotonic() - begun >= timeout_s:
                raise LeaseTimeoutError(candidates, holders, timeout_s)
            wish.show()
            if on_wait is not None and holders != told:
                on_wait(holders)
                told = holders
            else:
                time.sleep(_POLL_S)
    finally:
        wish.close()


def holders_of(names: Sequence[str]) -> tuple[Holder, ...]:
    """Records of those of these leases that somebody holds now; a lease held by someone without a record is left out.

    Raises:
        LeaseError: the lock files cannot be used.
    """
    folder = lease_folder()
    found: list[Holder] = []
    for name in dict.fromkeys(names):
        lock = _open(_lock_path(folder, name))
        try:
            # Reading first: the record of a lock that is free is a dead holder's.
            record = os.pread(lock.fileno(), _RECORD_BYTES, 0)
            if lock_descriptor(lock.fileno(), blocking=False):
                continue
        finally:
            lock.close()
        try:
            found.append(msgspec.json.decode(record, type=Holder))
        except msgspec.DecodeError:
            continue
    return tuple(found)


def wanted(names: Sequence[str]) -> bool:
    """Whether some process waits for one of these leases at this moment.

    Raises:
        LeaseError: the lock files cannot be used.
    """
    folder = lease_folder()
    for name in dict.fromkeys(names):
        file = _open(_lock_path(folder, name, _WANTED_SUFFIX))
        try:
            if not lock_descriptor(file.fileno(), blocking=False):
                return True
        finally:
            file.close()
    return False


class _Wish:
    """What shows that this process waits for any of these leases."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.names = tuple(dict.fromkeys(names))
        self._folder = folder
        self._shown: dict[str, OwnedDescriptor] = {}

    def show(self) -> None:
        """Show it for those where that did not work yet: who looks locks the file for a moment."""
        for name in self.names:
            if name in self._shown:
                continue
            file = _open(_lock_path(self._folder, name, _WANTED_SUFFIX))
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
            else:
                self._shown[name] = file

    def close(self) -> None:
        """It waits no more."""
        for file in self._shown.values():
            file.close()


def other_holders(own: Sequence[str]) -> tuple[Holder, ...]:
    """Records of every lease on this machine that is held now, those named in ``own`` left out.

    Raises:
        LeaseError: the lock files cannot be used.
    """
    names = (unquote(path.name.removesuffix(_SUFFIX)) for path in lease_folder().glob(f"*{_SUFFIX}"))
    return holders_of([name for name in names if name not in own])


def describe(holder: Holder) -> str:
    """A holder in words."""
    here = holder.host == socket.gethostname()
    gone = " - gone, what it started or handed over lives on" if here and not _is_alive(holder) else ""
    return (
        f"run {holder.run} (pid {holder.pid} on {holder.host}{gone}, since {holder.since}) holds {holder.device} "
        f"for {holder.purpose}"
    )


def _is_alive(holder: Holder) -> bool:
    return _start_ticks(holder.pid) == holder.start_ticks


def _start_ticks(pid: int) -> int | None:
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(line.rpartition(b")")[2].split()[19])


def _write_holders(
    names: Sequence[str], locks: Sequence[OwnedDescriptor], *, run: str, purpose: str, pid: int | None = None
) -> None:
    """Record in each lock's file who holds it. A file of another user that cannot be written keeps no record."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    pid = os.getpid() if pid is None else pid
    ticks = _start_ticks(pid) or 0
    host = socket.gethostname()
    for name, lock in zip(names, locks, strict=True):
        holder = Holder(device=name, run=run, pid=pid, start_ticks=ticks, host=host, since=since, purpose=purpose)
        with suppress(OSError):
            os.ftruncate(lock.fileno(), 0)
            os.pwrite(lock.fileno(), msgspec.json.encode(holder), 0)


def _try_all(folder: Path, names: Sequence[str]) -> tuple[OwnedDescriptor, ...] | None:
    """All locks or none, without waiting. In sorted order, so that no two processes hold what the other wants."""
    held: dict[str, OwnedDescriptor] = {}
    for name in sorted(set(names)):
        lock = _try(_lock_path(folder, name))
        if lock is None:
            for other in held.values():
                other.close()
            return None
        held[name] = lock
    return tuple(held[name] for name in names)


def _try(path: Path) -> OwnedDescriptor | None:
    while True:
        lock = _open(path)
        if not lock_descriptor(lock.fileno(), blocking=False):
            lock.close()
            return None
        if _is_current(lock, path):
            return lock
        # A cleaner of temporary files removed it between our open and our lock: its lock protects nothing.
        lock.close()


def _is_current(lock: OwnedDescriptor, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    ours = os.fstat(lock.fileno())
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def _open(path: Path) -> OwnedDescriptor:
    """Open the lock file, whoever made it.

    Without ``O_CREAT`` first: in a sticky folder ``fs.protected_regular`` refuses that for other users' files.
    """
    problem: OSError | None = None
    for flags in (os.O_RDWR, os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_RDWR, os.O_RDONLY):
        try:
            descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except (FileNotFoundError, FileExistsError, PermissionError) as error:
            problem = error
            continue
        except OSError as error:
            problem = error
            break
        if flags & os.O_CREAT:
            os.fchmod(descriptor, 0o666)  # every user leases the same devices: the umask is not asked
        return OwnedDescriptor(descriptor)
    raise LeaseError(
        f"{path}: cannot be opened: {problem.strerror if problem else 'no reason given'}; every user of this machine's "
        f"devices must be able to read it, or set {FOLDER_VARIABLE} to a folder that they share"
    )


def _lock_path(folder: Path, name: str, suffix: str = _SUFFIX) -> Path:
    return folder / f"{quote(name, safe='')}{suffix}"
