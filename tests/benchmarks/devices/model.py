"""What a simulated device is asked and what it shows. No arithmetic is shared with the search or the mock engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

from pytest_kvbudget.shape import Shape
from pytest_kvbudget.verdict import Phase

GIB: Final = 2**30
MIB: Final = 2**20


@dataclass(frozen=True)
class Printed:
    """A number as the log shows it, and half a unit of its last digit."""

    value: float
    half_digit: float = 0.0


@dataclass(frozen=True)
class Shown:
    """One boot from outside."""

    failure_class: str | None = None
    phase: Phase = Phase.READY
    facts: dict[str, Printed] = field(default_factory=dict)
    free_bytes: int | None = None
    """Device memory left when it was ready, from the memory probe."""
    minutes: float = 0.0

    @property
    def good(self) -> bool:
        """It serves."""
        return self.failure_class is None


class Device(Protocol):
    """One device with one engine on it."""

    @property
    def family(self) -> str:
        """What kind it is."""
        ...

    def boot(self, value: int, extra_bytes: float = 0.0) -> Shown:
        """Boot at one value of the axis, with so much taken beyond what the shape takes."""
        ...

    def shape(self, value: int) -> Shape:
        """What that boot asks for."""
        ...


def gib(size: float) -> Printed:
    """``12.34 GiB``."""
    return Printed(round(size / GIB, 2) * GIB, 0.005 * GIB)


def allocator(size: float) -> Printed:
    """``76.00 MiB`` or ``10.28 GiB``, as torch prints sizes."""
    unit = GIB if size >= GIB else MIB
    return Printed(round(size / unit, 2) * unit, 0.005 * unit)


def exact(number: float) -> Printed:
    """A count, printed whole."""
    return Printed(number)


def probe(size: float) -> int:
    """A memory probe's reading, in whole MiB."""
    return max(0, int(size // MIB) * MIB)
