"""The engines of one process: which one serves, which devices are leased, what is reused and what makes room."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from pytest_kvbudget.archive import RunArchive
from pytest_kvbudget.attempt import Attempt
from pytest_kvbudget.clean import CleanGate
from pytest_kvbudget.config import LoadedTarget
from pytest_kvbudget.device.host import read_host
from pytest_kvbudget.device.leases import Lease, LeaseError, LeaseTimeoutError, acquire, describe
from pytest_kvbudget.device.model import Holder
from pytest_kvbudget.engine.backends.registry import backend_of, launcher_of
from pytest_kvbudget.engine.health import Health, probe
from pytest_kvbudget.engine.model import Command
from pytest_kvbudget.planning import Experience
from pytest_kvbudget.progress import Progress
from pytest_kvbudget.request import BootRequest
from pytest_kvbudget.shape import Shape

DRY_RUN_PORT = 8000
"""Port shown by a dry run where the target takes a free one for every boot: the engines' usual port."""


HOLDING_WAIT_S = 60.0
"""Longest wait for devices while this process holds others for an engine in use."""


class PoolError(Exception):
    """An engine cannot be booted from here; the message says why and what to do."""


class EnginePool:
    """Boots engines of one target, one lease at a time, and keeps a passing one for the next test of that shape.

    An idle engine holds its lease. Before this pool waits for any lease it gives up its own idle engines, so that two
    processes can never wait for each other.
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
        self._progress, self._on_wait = progress, on_wait
        self._clean = CleanGate(loaded.target.limits, None if self.backend.simulated else read_host)
        self._gate = gate
        self.experience = Experience()
        """What earlier boots of this pool measured, for plans and the argument gate."""
        self._idle: list[Attempt] = []
        self._in_use: list[Attempt] = []
        self._leases: dict[int, Lease] = {}
        self._spare: Lease | None = None
        self.cut_short: Attempt | None = None
        """The boot that ended with an exception: an interruption. Its record says so."""
        self._around = ExitStack()
        self._opened = False

    @property
    def simulated(self) -> bool:
        """Figures of this target are simulated."""
        return self.backend.simulated

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
        self._close_idle()
        if not self._opened:
            self._around.enter_context(self.backend.session(self.loaded))
            self._opened = True
        begun = time.monotonic()
        lease = self._lease_for(request)
        lease.tell(run=self.archive.info.run, purpose=self._purpose(request.shape))
        try:
            attempt = self._attempt(request, lease, lease_wait_s=round(time.monotonic() - begun, 4))
        except OSError as error:
            lease.close()
            raise PoolError(f"{self.archive.folder}: the record of a boot cannot be written: {error}") from None
        self._leases[id(attempt)] = lease
        self._in_use.append(attempt)
        try:
            attempt.run()
        except BaseException:
            self.cut_short = attempt
            self.retire(attempt)
            raise
        return attempt

    def _attempt(self, request: BootRequest, lease: Lease, *, lease_wait_s: float) -> Attempt:
        return Attempt(
            request,
            loaded=self.loaded,
            backend=self.backend,
            launcher=self._launcher,
            lease=lease,
            lease_wait_s=lease_wait_s,
            clean=self._clean,
            experience=self.experience,
            gate=self._gate,
            archive=self.archive,
            progress=self._progress,
        )

    def done(self, attempt: Attempt) -> None:
        """The test no longer needs it: a serving engine waits for the next test of its shape, any other is ended."""
        if attempt in self._in_use and attempt.serving:
            self._in_use.remove(attempt)
            self._idle.append(attempt)
        else:
            self.retire(attempt)

    def retire(self, attempt: Attempt) -> None:
        """End it now. Its devices stay leased for the next boot of this process until `release`."""
        for held in (self._in_use, self._idle):
            if attempt in held:
                held.remove(attempt)
        try:
            attempt.close()
        finally:
            lease = self._leases.pop(id(attempt), None)
            if lease is not None and (attempt.record.left_serving or self._spare is not None):
                lease.close()
            elif lease is not None:
                self._spare = lease

    def release(self) -> None:
        """Give up idle engines and leases."""
        self._close_idle()
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def close(self) -> None:
        """End every engine of this pool that was not handed over."""
        for attempt in [*self._in_use, *self._idle]:
            self.retire(attempt)
        self.release()
        self._around.close()

    def describe_devices(self) -> str:
        """The target's devices in words: ``"0, 1 (2 sets of 1)"``."""
        slots = self.backend.slots(self.loaded, self.loaded.target.shape)
        names = ", ".join(device for slot in slots for device in slot)
        return names if len(slots) == 1 else f"{names} ({len(slots)} sets of {len(slots[0]) if slots else 0})"

    def command(self, shape: Shape) -> Command:
        """What a boot of this shape would start on the first set of devices. Starts nothing."""
        slots = self._slots(shape)
        port = self.loaded.target.port or DRY_RUN_PORT
        return self.backend.render(self.loaded, shape, slots[0], port)

    def _slots(self, shape: Shape) -> tuple[tuple[str, ...], ...]:
        slots = self.backend.slots(self.loaded, shape)
        if not slots:
            raise PoolError(
                f"{self.loaded.origin}: {shape.describe()} needs {shape.tensor_parallel_size} devices and devices = "
                f"{list(self.loaded.target.devices)}; add devices or lower tensor_parallel_size"
            )
        return slots

    def _reusable(self, shape: Shape) -> Attempt | None:
        for attempt in self._idle:
            if attempt.request.shape == shape and attempt.serving and _healthy(attempt):
                return attempt
        return None

    def _close_idle(self) -> None:
        for attempt in list(self._idle):
            self.retire(attempt)

    def _lease_for(self, request: BootRequest) -> Lease:
        slots = self._slots(request.shape)
        if self._spare is not None:
            lease, self._spare = self._spare, None
            if lease.devices in slots:
                return lease
            lease.close()
        own = [lease.devices for lease in self._leases.values()]
        free = [slot for slot in slots if not any(set(slot) & set(devices) for devices in own)]
        if not free:
            raise PoolError(
                f"{request.test}: every device of target {self.loaded.name} is in use by an engine that this test or "
                "one of its wider fixtures still holds (kv_serve); leave its scope first"
            )
        try:
            return acquire(
                [(slot, self.backend.lease_names(self.loaded, slot)) for slot in free],
                run=self.archive.info.run,
                purpose=self._purpose(request.shape),
                timeout_s=self._lease_wait_s(),
                on_wait=self._tell_wait,
            )
        except (LeaseError, LeaseTimeoutError) as error:
            raise PoolError(str(error)) from None

    def _lease_wait_s(self) -> float:
        """An engine in use cannot be given up: two processes that each hold one would wait for each other."""
        longest = self.loaded.target.limits.lease_seconds
        return min(longest, HOLDING_WAIT_S) if self._leases else longest

    def _purpose(self, shape: Shape) -> str:
        return f"{self.loaded.name}: {shape.describe()}"

    def _tell_wait(self, holders: tuple[Holder, ...]) -> None:
        if self._on_wait is not None:
            who = "; ".join(map(describe, holders)) or "a process that left no record holds them"
            self._on_wait(f"waiting for devices of target {self.loaded.name}: {who}")


def _healthy(attempt: Attempt) -> bool:
    host, _, port = attempt.url.removeprefix("http://").rpartition(":")
    return probe(host, int(port)) is Health.READY
