"""The device sets that one process has leased for engines of one target, and how it comes by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from pytest_kvbudget.config import LoadedTarget
from pytest_kvbudget.device.host import read_numa
from pytest_kvbudget.device.leases import Lease, LeaseError, LeaseTimeoutError, acquire, describe, wanted
from pytest_kvbudget.device.model import DeviceMemory, Holder, ProbeError
from pytest_kvbudget.device.probes import Choice
from pytest_kvbudget.engine.model import Backend
from pytest_kvbudget.set_labels import SetLabels
from pytest_kvbudget.shape import Shape

HOLDING_WAIT_S: Final = 60.0
"""Longest wait for devices while this process holds others for an engine in use."""

_Devices = tuple[str, ...]


class PoolError(Exception):
    """An engine cannot be booted from here; the message says why and what to do."""


class DeviceSets:
    """Leases of whole device sets: *taken* ones have an engine, *spare* ones are held for the next boots.

    Only a process without a spare set waits for one, and it holds nothing but sets of engines that are in use then: two
    processes that each want several sets do not wait for each other. A set that somebody else waits for is given up
    where another one is left to go on with. One thread's, but for `names` and `label`.

    Args:
        loaded: the target.
        backend: knows its sets.
        run: name of the run, for the leases' records.
        on_wait: told who holds the devices that are waited for, in words.
    """

    def __init__(
        self, loaded: LoadedTarget, backend: Backend, *, run: str, on_wait: Callable[[str], None] | None
    ) -> None:
        self._loaded, self._backend, self._run, self._on_wait = loaded, backend, run, on_wait
        # Replaced, never changed: another thread may read them.
        self._taken: tuple[Lease, ...] = ()
        self._spare: tuple[Lease, ...] = ()
        self._most_spare = 1
        self._labels = SetLabels(_node_bytes if not backend.simulated else dict)

    def all_for(self, shape: Shape) -> tuple[_Devices, ...]:
        """Every set of the target that an engine of this shape could run on.

        Raises:
            PoolError: the shape needs more devices than the target has.
        """
        found = self._backend.slots(self._loaded, shape)
        if not found:
            raise PoolError(
                f"{self._loaded.origin}: {shape.describe()} needs {shape.tensor_parallel_size} devices and devices = "
                f"{list(self._loaded.target.devices)}; add devices or lower tensor_parallel_size"
            )
        return found

    def names(self) -> tuple[str, ...]:
        """Machine-wide names of everything that is leased, from any thread."""
        return tuple(name for lease in (*self._spare, *self._taken) for name in lease.names)

    def label(self, shape: Shape, devices: _Devices, readings: Sequence[DeviceMemory]) -> str | None:
        """What records call this set, from any thread; ``None`` where the target has only this one for the shape."""
        return self._labels.learn(devices, readings) if len(self.all_for(shape)) > 1 else None

    # -- holding

    def hold(self, shape: Shape, at_most: int, *, who: str, wait: bool, longest_s: float | None = None) -> int:
        """Hold spare sets for a shape, others no more; returns how many.

        Args:
            shape: of the boots to come.
            at_most: so many sets.
            who: asks, for messages.
            wait: for the first one, where none is spare or free.
            longest_s: wait no longer than this, where the target's limit is not shorter still.

        Raises:
            PoolError: see `take`.
        """
        fitting = self.all_for(shape)
        self._most_spare = at_most
        self._drop(lease for lease in self._spare if lease.devices not in fitting)
        self._give_up_wanted(1 if wait else 0)
        self._drop(self._spare[at_most:])
        if wait and not self._spare:
            self._spare = (self._wait_for(self._free(shape, who), shape, longest_s),)
        for devices in self._free(shape):
            if len(self._spare) >= at_most:
                break
            # Whoever waits for a first set goes before our second one.
            if not self._is_wanted(devices) and (lease := self._try(devices, shape)) is not None:
                self._spare += (lease,)
        return len(self._spare)

    def take(self, shape: Shape, *, who: str, label: str | None = None, longest_s: float | None = None) -> Lease:
        """A set for a boot that begins now, waiting for it where none is spare or free.

        Args:
            shape: of the boot.
            who: asks, for messages.
            label: of the set that is asked for; any other is given where none has it, or it cannot be had.
            longest_s: see `hold`.

        Raises:
            PoolError: the shape needs more devices than the target has, or this process itself has them all in use, or
                none became free in time; the message names who holds them.
        """
        fitting = self.all_for(shape)
        lease = None if label is None else self._labelled(shape, label, longest_s)
        if lease is None:
            lease = next((lease for lease in self._spare if lease.devices in fitting), None)
        if lease is None:
            self.release()
            lease = self._wait_for(self._free(shape, who), shape, longest_s)
        self._spare = tuple(other for other in self._spare if other is not lease)
        self._taken += (lease,)
        lease.tell(run=self._run, purpose=self._purpose(shape))
        return lease

    def give_back(self, lease: Lease, *, keep: bool) -> None:
        """The engine on this set is gone, or was handed over: then it is not kept for the next boot."""
        self._taken = tuple(other for other in self._taken if other is not lease)
        if keep and len(self._spare) < self._most_spare:
            self._spare += (lease,)
        else:
            lease.close()

    def release(self) -> None:
        """Give every spare set up."""
        self._drop(self._spare)

    def _drop(self, leases: Iterable[Lease]) -> None:
        gone = tuple(leases)
        self._spare = tuple(lease for lease in self._spare if lease not in gone)
        for lease in gone:
            lease.close()

    def _give_up_wanted(self, keep: int) -> None:
        for lease in self._spare[keep:]:
            if self._is_wanted(lease.devices):
                self._drop((lease,))

    # -- getting

    def _free(self, shape: Shape, who: str | None = None) -> list[_Devices]:
        """Sets that this process does not hold.

        Raises:
            PoolError: there is none, and ``who`` needs one.
        """
        own = {device for lease in (*self._spare, *self._taken) for device in lease.devices}
        free = [devices for devices in self.all_for(shape) if own.isdisjoint(devices)]
        if not free and who is not None:
            raise PoolError(
                f"{who}: every device of target {self._loaded.name} is in use by an engine that this test or one of "
                "its wider fixtures still holds (kv_serve); leave its scope first"
            )
        return free

    def _labelled(self, shape: Shape, label: str, longest_s: float | None) -> Lease | None:
        """A lease of a set of that label: a spare one, a free one, or one that another process gives up in time."""
        for lease in self._spare:
            if lease.devices in self.all_for(shape) and self._look(lease.devices) == label:
                return lease
        busy = []
        for devices in self._free(shape):
            known = self._labels.known(devices)
            if known not in {None, label}:
                continue
            lease_there = self._try(devices, shape)
            if lease_there is None:
                busy += [devices] if known == label else []
            elif self._look(devices) == label:
                return lease_there
            else:
                lease_there.close()
        if not busy:
            return None
        self.release()  # who waits holds nothing that others may wait for
        try:
            return self._wait_for(busy, shape, longest_s)
        except PoolError:
            return None

    def _look(self, devices: _Devices) -> str:
        """Label of a set that is leased and idle."""
        known = self._labels.known(devices)
        if known is not None:
            return known
        probe = self._backend.probe(self._loaded, devices)
        try:
            readings = () if probe is None else probe.read()
        except ProbeError:
            readings = ()
        finally:
            if isinstance(probe, Choice):
                probe.close()
        return self._labels.look(devices, readings)

    def _wait_for(self, sets: Sequence[_Devices], shape: Shape, longest_s: float | None) -> Lease:
        """Lease the first of these sets that is free."""
        limits = [self._loaded.target.limits.lease_seconds]
        if longest_s is not None:
            limits.append(max(0.0, longest_s))
        if self._taken:
            # An engine in use cannot be given up: two processes that each hold one would wait for each other.
            limits.append(HOLDING_WAIT_S)
        timeout_s = min(limits)
        try:
            return self._acquire(sets, shape, timeout_s)
        except (LeaseError, LeaseTimeoutError) as error:
            raise PoolError(str(error)) from None

    def _try(self, devices: _Devices, shape: Shape) -> Lease | None:
        """Lease a set if nobody has it right now."""
        try:
            return self._acquire([devices], shape, 0.0)
        except LeaseTimeoutError:
            return None
        except LeaseError as error:
            raise PoolError(str(error)) from None

    def _acquire(self, sets: Sequence[_Devices], shape: Shape, timeout_s: float) -> Lease:
        return acquire(
            [(devices, self._backend.lease_names(self._loaded, devices)) for devices in sets],
            run=self._run,
            purpose=self._purpose(shape),
            timeout_s=timeout_s,
            on_wait=self._tell_wait,
        )

    def _is_wanted(self, devices: _Devices) -> bool:
        try:
            return wanted(self._backend.lease_names(self._loaded, devices))
        except LeaseError as error:
            raise PoolError(str(error)) from None

    def _purpose(self, shape: Shape) -> str:
        return f"{self._loaded.name}: {shape.describe()}"

    def _tell_wait(self, holders: tuple[Holder, ...]) -> None:
        if self._on_wait is not None:
            who = "; ".join(map(describe, holders)) or "a process that left no record holds them"
            self._on_wait(f"waiting for devices of target {self._loaded.name}: {who}")


def _node_bytes() -> Mapping[int, int]:
    """Total memory of the host's NUMA nodes by number; nothing where the kernel shows no nodes."""
    try:
        return {node.node: node.total_bytes for node in read_numa()}
    except ProbeError:
        return {}
