"""Reading a text as a boot log."""

from __future__ import annotations

from pathlib import Path

from pytest_kvbudget.ledger.model import BootLedger
from pytest_kvbudget.ledger.reader import LedgerReader

DATA = Path(__file__).parent / "data"
GIB = 2**30
MIB = 2**20


def read(*lines: str) -> BootLedger:
    """The ledger of these lines."""
    return read_bytes(("\n".join(lines) + "\n").encode())


def read_bytes(data: bytes, *, simulated: bool = False) -> BootLedger:
    """The ledger of this log."""
    reader = LedgerReader(simulated=simulated)
    reader.feed(data)
    reader.close()
    return reader.ledger()


def lever_effects(ledger: BootLedger) -> dict[tuple[str, str], str]:
    """Effect by lever and direction."""
    assert ledger.cause is not None
    return {(lever.name, lever.direction): lever.effect for lever in ledger.cause.levers}
