"""The grammar tables, compiled: every wording of every family, found by the plain text that its line contains."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Final

from pytest_kvbudget.ledger.grammar import common, llamacpp, neuron, rdna4, sglang, vllm, vllm_failures
from pytest_kvbudget.ledger.grammar.model import CompiledRow, Row, Table
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

FAMILIES: Final = ("vllm", "rdna4", "neuron", "sglang", "llama.cpp")
"""Names of the engine families, as `BootLedger.family` gives them."""

_ALWAYS: Final = ("Traceback (most recent call last)", 'File "', "Error", "Exception", "KeyboardInterrupt")


class Grammar:
    """All tables, and the lines that they can match."""

    def __init__(self, tables: Sequence[Table] = TABLES, extra: Sequence[Row] = ()) -> None:
        """Compile the tables, and ``extra`` rows that a user wrote.

        Raises:
            NotationError: for a pattern that does not compile or has no plain text to find its line by.
        """
        every = [(row, table.family) for table in tables for row in table.rows] + [(row, None) for row in extra]
        rows = [CompiledRow(row, family, index) for index, (row, family) in enumerate(every)]
        self._by_needle: dict[str, list[CompiledRow]] = {}
        for compiled in rows:
            self._by_needle.setdefault(compiled.row.literal_needle(), []).append(compiled)
        self._needles = tuple(self._by_needle.items())
        self._orders = {table.family: table.order for table in tables if table.order}
        words = sorted({*self._by_needle, *_ALWAYS})
        self._any = re.compile(b"|".join(re.escape(word.encode()) for word in words))

    def concerns(self, piece: bytes) -> bool:
        """Whether any row could match this piece: one pass over its bytes."""
        return self._any.search(piece) is not None

    def rows_for(self, text: str) -> Iterator[CompiledRow]:
        """The rows whose plain text stands in the line."""
        for needle, rows in self._needles:
            if needle in text:
                yield from rows

    def order(self, family: str) -> dict[Phase, int]:
        """Position of every phase in a boot of the family."""
        phases = self._orders.get(family, self._orders["vllm"])
        return {phase: position for position, phase in enumerate(phases)}


@cache
def standard() -> Grammar:
    """The grammar without rows of a user; compiled once."""
    return Grammar()
