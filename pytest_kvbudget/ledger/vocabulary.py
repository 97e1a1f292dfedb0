"""The names of all facts that the grammar tables can read, and the unit of each."""

from __future__ import annotations

from functools import cache

from pytest_kvbudget.ledger.columns import FACTS
from pytest_kvbudget.ledger.grammar import TABLES
from pytest_kvbudget.ledger.model import Unit
from pytest_kvbudget.ledger.notation import places


@cache
def fact_units() -> dict[str, Unit]:
    """Every fact by name; patterns of a configuration may add others."""
    found: dict[str, Unit] = {}
    for table in TABLES:
        for row in table.rows:
            for pattern in (row.pattern, *row.parts):
                found.update(places(pattern))
            found.update(dict.fromkeys(row.flags, "flag"))
    found.update(dict.fromkeys(FACTS.values(), "bytes"))
    return found
