"""The grammar tables: every wording of every engine family."""

from __future__ import annotations

from typing import Final

from pytest_kvbudget.ledger.grammar import common, llamacpp, neuron, rdna4, sglang, vllm, vllm_failures
from pytest_kvbudget.ledger.grammar.model import Table
from pytest_kvbudget.verdict import Phase

TABLES: Final[tuple[Table, ...]] = (
    vllm.TABLE,
    vllm_failures.TABLE,
    rdna4.TABLE,
    neuron.TABLE,
    sglang.TABLE,
    llamacpp.TABLE,
    common.TABLE,
)

FAMILIES: Final = ("rdna4", "neuron", "sglang", "llama.cpp", "vllm")
"""Engine families, as `BootLedger.family` names them; a line of an earlier one tells it from a later one.

Where only wording came that engines share, the family is the backend's, or ``"torch"``."""

_ORDERS: Final = {
    table.family: {phase: position for position, phase in enumerate(table.order)} for table in TABLES if table.order
}


def order_of(family: str) -> dict[Phase, int]:
    """Position of every phase in a boot of the family."""
    return _ORDERS.get(family, _ORDERS["vllm"])
