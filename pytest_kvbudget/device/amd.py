"""What the sources of AMD memory share: which cards are integrated, and HIP's order against a tool's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from pytest_kvbudget.device.fields import decimal
from pytest_kvbudget.device.model import ProbeError

_T = TypeVar("_T")

_INTEGRATED: Final = 8
"""An integrated GPU shows the part of host memory that the firmware gave it, 512 MiB mostly, as its own."""

UNCHECKED_ORDER: Final = (
    "device numbers are taken as the order of cards; whether HIP counts them the same was not checked"
)


class AmdGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One line of ``amd-smi list -e``."""

    number: int
    """``amd-smi``'s own."""
    address: str
    """On the PCI bus: ``"0000:03:00.0"``."""
    hip: int | None = None
    """HIP's ordinal, the number that ``HIP_VISIBLE_DEVICES`` takes; ``None`` where HIP does not see the GPU."""


def discrete(totals: Mapping[_T, int]) -> tuple[_T, ...]:
    """Those cards that are no integrated GPU beside a real one: at least an eighth of the largest one's memory.

    An integrated GPU that is the only one is kept: there it is the target.
    """
    largest = max(totals.values(), default=0)
    return tuple(card for card, total_bytes in totals.items() if total_bytes * _INTEGRATED >= largest)


def pick(device: str, cards: Sequence[_T], source: str, names: Iterable[str] = ()) -> _T:
    """The card that a target's device means: a number among ``cards`` in their order, or one of their names.

    Raises:
        ProbeError: there is none.
    """
    named = dict(zip(names, cards, strict=False))
    if device in named:
        return named[device]
    number = decimal(device)
    if number is not None and number < len(cards):
        return cards[number]
    there = ", ".join([f"{position}" for position in range(len(cards))] + list(named)) or "none"
    raise ProbeError(f"{source}: no device {device!r}; expected one of {there}: check the target's devices")
