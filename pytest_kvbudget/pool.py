"""The engines of one process: which one serves, which devices are leased, what is reused and what makes room."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from threading import Condition
from typing import Final

import msgspec

from pytest_kvbudget.archive import RunArchive
from pytest_kvbudget.attempt import Attempt
from pytest_kvbudget.booting import Booting
from pytest_kvbudget.clean import CleanGate
from pytest_kvbudget.config import Limits, LoadedTarget
from pytest_kvbudget.device.host import read_host
from pytest_kvbudget.device.leases import Lease
from pytest_kvbudget.device_sets import DeviceSets, PoolError
from pytest_kvbudget.engine.backends.registry import backend_of, launcher_of
from pytest_kvbudget.engine.health import Health, probe
from pytest_kvbudget.engine.model import Command
from pytest_kvbudget.engine.ports import Ports
from pytest_kvbudget.planning import Experience
from pytest_kvbudget.progress import Latest, Progress, Snapshot
from pytest_kvbudget.request import BootRequest
from pytest_kvbudget.shape import Shape

__all__ = ["DRY_RUN_PORT", "Booting", "EnginePool", "PoolError"]

DRY_RUN_PORT: Final = 8000
"""Port shown by a dry run where the target takes a free one for every boot: the engines' usual port."""
_SHOW_S: Final = 0.1
"""Between two looks at what boots in threads say of themselves."""


class EnginePool:
    """Boots engines of one target, and keeps a passing one for the next test of that shape.

    One boot at a time runs in the calling thread (`boot`), several run in threads of their own (`reserve`, `start`,
    `first_of`, `finish`); everything here is called from one thread. An idle engine holds its lease. Before this pool
    waits for any lease it gives up its own idle engines, so that two processes can never wait for each other.
    """

    def __init__(
        self,
        loaded: LoadedTarget,
        archive: RunArchive,
        *,
        progress: Progress | None = None,
        on_wait: Callable[[str], None] | None = None,
        gate: bool = True,
    ) -> None:
        self.loaded = loaded
        self.archive = archive
        self.backend = backend_of(loaded)
        self._launcher = launcher_of(loaded, run=archive.info.run)
        self._progress = progress
        self._sets = DeviceSets(loaded, self.backend, run=archive.info.run, on_wait=on_wait)
        host = None if self.backend.simulated else read_host
        self._clean = CleanGate(_limits(loaded), host, leased=self._sets.names)
        self._ports = Ports()
        self._gate = gate
        self.experience = Experience()
        """What earlier boots of this pool measured, for plans and the argument gate."""
        self._idle: list[Attempt] = []
        self._in_use: list[Attempt] = []
        self._running: list[Booting] = []
        """Boots in threads whose verdict nobody has asked for yet."""
        self._changed = Condition()
        """Held to say, or to see, that one of them is done."""
        self._leases: dict[int, Lease] = {}
        self.cut_short: Attempt | None = None
        """The boot that ended with an exception: an interruption. Its record says so."""
        self.cancelled: list[Attempt] = []
        """Further boots that were ended before their verdict was asked for. Their records say so."""
        self._around = ExitStack()
        self._opened = False

    @property
    def simulated(self) -> bool:
        """Figures of this target are simulated."""
        return self.backend.simulated

    # -- one boot

    def boot(self, request: BootRequest, *, reuse: bool = True) -> Attempt:
        """An attempt with its verdict: a healthy idle engine of the same shape, or a fresh boot.

        Raises:
            PoolError: when the shape needs more devices than the target has, or this process itself holds them, or no
                device became free in time; the message names who holds them.
        """
        if reuse and (idle := self._reusable(request.shape)) is not None:
            self._idle.remove(idle)
            self._in_use.append(idle)
            return idle
        self._open()
        attempt = self._make(request, self._tell)
        if not self._running:
            self._sets.release()
        self._in_use.append(attempt)
        try:
            attempt.run()
        except BaseException:
            self.cut_short = attempt
            self.retire(attempt)
            raise
        return self._recorded(attempt)

    # -- several boots at once

    def reserve(self, shape: Shape, at_most: int, *, longest_s: float | None = None) -> int:
        """Hold free device sets for boots of this shape; returns how many can start now, from 1 to ``at_most``.

        Idle engines are given up first. Only the first set is waited for, and only while no boot of this pool runs:
        beside running boots the answer may be 0. Further sets are taken where they are free right now and no other
        process waits for them. A target with a fixed port boots one at a time.

        Args:
            shape: of the boots to come.
            at_most: so many sets.
            longest_s: wait no longer than this, where the target's limit is not shorter still.

        Raises:
            PoolError: as `boot`.
        """
        self._open()
        if self.loaded.target.port:
            at_most = 0 if self._running else 1
        who = f"boots of {shape.describe()}"
        return self._sets.hold(shape, at_most, who=who, wait=not self._running, longest_s=longest_s)

    def start(
        self,
        request: BootRequest,
        *,
        device_set: str | None = None,
        longest_s: float | None = None,
        known: Callable[[Booting], None] | None = None,
    ) -> Booting:
        """Begin a boot in a thread of its own, on a set that `reserve` holds; one is leased where it holds none.

        Args:
            request: what to boot.
            device_set: label of the set to boot on (`AttemptRecord.device_set`). A set that another process holds is
                waited for; where none of that label can be had, any set is taken, and the record says which.
            longest_s: see `reserve`.
            known: called before the engine is started: whoever shows boots knows of it, whatever interrupts this call.

        Raises:
            PoolError: as `boot`.
        """
        self._open()
        latest = Latest()
        attempt = self._make(request, latest, device_set=device_set, longest_s=longest_s)
        booting = Booting(attempt, latest, self._changed)
        self._running.append(booting)
        if known is not None:
            known(booting)
        booting.start()
        return booting

    def first_of(self, bootings: Sequence[Booting]) -> Booting:
        """The first of these that has its verdict, waiting for it in the calling thread.

        Whatever is raised in the calling thread meanwhile - KeyboardInterrupt, a signal handler's exception - cancels
        every boot that runs: `cut_short` is the first of these, `cancelled` has the others.

        Raises:
            ValueError: there are none.
        """
        if not bootings:
            raise ValueError("no boot to wait for")
        try:
            while True:
                with self._changed:
                    done = [booting for booting in bootings if booting.done]
                    if not done:
                        self._changed.wait(_SHOW_S)
                if done:
                    return min(done, key=lambda booting: booting.done_at or 0.0)
                self._tell()
        except BaseException:
            self.cut_short = bootings[0].attempt
            self._cancel_all()
            raise

    def finish(self, booting: Booting) -> Attempt:
        """Wait for a boot's verdict as `first_of` does; the attempt is then in use as after `boot`.

        Raises:
            BaseException: what the boot itself raised; it is `cut_short` then.
        """
        self.first_of([booting])
        attempt = booting.attempt
        if booting.error is not None:
            self.cut_short = attempt
            self.retire(attempt)
            raise booting.error
        if booting in self._running:
            self._running.remove(booting)
            self._in_use.append(attempt)
        return self._recorded(attempt)

    def _recorded(self, attempt: Attempt) -> Attempt:
        """A boot that nothing on disk tells of is none."""
        if attempt.lost is None:
            return attempt
        said = attempt.lost
        self.retire(attempt)
        raise PoolError(said)

    def _cancel_all(self) -> None:
        """End every boot that runs, all at the same time."""
        for booting in self._running:
            booting.attempt.cancel()
        for booting in list(self._running):
            self.retire(booting.attempt)

    def _tell(self, *boots: Snapshot) -> None:
        """Show every boot that runs now: ``boots`` in the calling thread, and those in theirs."""
        others = tuple(snapshot for booting in self._running if (snapshot := booting.snapshot) is not None)
        if self._progress is not None and (boots or others):
            with suppress(OSError):  # a terminal that went away is no reason to lose a boot
                self._progress(*boots, *others)

    def _make(
        self,
        request: BootRequest,
        progress: Progress,
        *,
        device_set: str | None = None,
        longest_s: float | None = None,
    ) -> Attempt:
        """An attempt on a set of its own that nothing has been started for."""
        begun = time.monotonic()
        shape = request.shape
        lease = self._sets.take(shape, who=request.test, label=device_set, longest_s=longest_s)
        try:
            attempt = Attempt(
                request,
                loaded=self.loaded,
                backend=self.backend,
                launcher=self._launcher,
                lease=lease,
                lease_wait_s=round(time.monotonic() - begun, 4),
                clean=self._clean,
                ports=self._ports,
                set_label=lambda readings: self._sets.label(shape, lease.devices, readings),
                experience=self.experience,
                gate=self._gate,
                archive=self.archive,
                progress=progress,
            )
        except OSError as error:
            self._sets.give_back(lease, keep=False)
            said = f"the record of a boot cannot be written: {error.strerror or error}"
            raise PoolError(f"{self.archive.folder}: {said}") from None
        self._leases[id(attempt)] = lease
        return attempt

    def _open(self) -> None:
        """Give idle engines up, and see to it that what engines need beside them is there."""
        for attempt in list(self._idle):
            self.retire(attempt)
        if not self._opened:
            self._around.enter_context(self.backend.session(self.loaded))
            self._opened = True

    # -- the end

    def done(self, attempt: Attempt) -> None:
        """The test no longer needs it: a serving engine waits for the next test of its shape, any other is ended."""
        if attempt in self._in_use and attempt.serving:
            self._in_use.remove(attempt)
            self._idle.append(attempt)
        else:
            self.retire(attempt)

    def call_off(self, attempt: Attempt) -> None:
        """End a boot that other boots have answered: its record says so, unless it had failed by itself."""
        for booting in self._running:
            booting.called_off |= booting.attempt is attempt
        self.retire(attempt)

    def retire(self, attempt: Attempt) -> None:
        """End it now, whether it serves or still boots. Its devices stay leased for the next boots until `release`.

        The record of one whose verdict was not asked for says that it was interrupted, unless it had failed by itself.
        """
        booting = next((booting for booting in self._running if booting.attempt is attempt), None)
        if booting is not None:
            attempt.cancel()
            booting.join()
            self._running.remove(booting)
            booting.unjudged()
            if attempt is not self.cut_short:
                self.cancelled.append(attempt)
        for held in (self._in_use, self._idle):
            if attempt in held:
                held.remove(attempt)
        try:
            attempt.close()
        finally:
            lease = self._leases.pop(id(attempt), None)
            if lease is not None:
                self._sets.give_back(lease, keep=not attempt.record.left_serving)

    def spare(self) -> None:
        """Give up leases that no engine has: others may want them while this process does something else."""
        self._sets.release()

    def release(self) -> None:
        """Give up idle engines, and leases that no engine has."""
        for attempt in list(self._idle):
            self.retire(attempt)
        self._sets.release()

    def close(self) -> None:
        """End every engine of this pool that was not handed over, and every boot."""
        self._cancel_all()
        for attempt in [*self._in_use, *self._idle]:
            self.retire(attempt)
        self.release()
        self._around.close()

    # -- without starting anything

    def describe_devices(self) -> str:
        """The target's devices in words: ``"0, 1 (2 sets of 1)"``."""
        slots = self.backend.slots(self.loaded, self.loaded.target.shape)
        names = ", ".join(device for slot in slots for device in slot)
        return names if len(slots) == 1 else f"{names} ({len(slots)} sets of {len(slots[0]) if slots else 0})"

    def command(self, shape: Shape) -> Command:
        """What a boot of this shape would start on the first set of devices. Starts nothing.

        Raises:
            PoolError: the shape needs more devices than the target has.
        """
        port = self.loaded.target.port or DRY_RUN_PORT
        return self.backend.render(self.loaded, shape, self._sets.all_for(shape)[0], port)

    def _reusable(self, shape: Shape) -> Attempt | None:
        for attempt in self._idle:
            if attempt.request.shape == shape and attempt.serving and _healthy(attempt):
                return attempt
        return None


def _healthy(attempt: Attempt) -> bool:
    host, _, port = attempt.url.removeprefix("http://").rpartition(":")
    return probe(host, int(port)) is Health.READY


def _limits(loaded: LoadedTarget) -> Limits:
    """The target's limits. What a simulated device has in use when it is idle is in its table, and nobody else's."""
    limits, mock = loaded.target.limits, loaded.target.mock
    if mock is None:
        return limits
    last = max(
        (int(device) for device in loaded.target.devices),
        default=(loaded.target.shape.tensor_parallel_size or mock.ranks) - 1,
    )
    idle_bytes = mock.idle_bytes + last * mock.device_skew
    return msgspec.structs.replace(limits, idle_used=max(limits.idle_used, idle_bytes))
