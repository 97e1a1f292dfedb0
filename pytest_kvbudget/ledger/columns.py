"""The Neuron runtime's out-of-memory table: columns differ between releases, one or two head lines name them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from pytest_kvbudget.ledger.notation import Reading, read

FACTS: Final[dict[str, str]] = {
    "total": "hbm_total_used_bytes",
    "model code": "hbm_model_code_bytes",
    "code": "hbm_model_code_bytes",
    "model constants": "hbm_constants_bytes",
    "constants": "hbm_constants_bytes",
    "tensors": "hbm_tensors_bytes",
    "shared scratchpad": "hbm_shared_scratchpad_bytes",
    "scratchpad": "hbm_scratchpad_bytes",
    "runtime": "hbm_runtime_bytes",
    "dma rings": "hbm_dma_rings_bytes",
    "dma rings io": "hbm_dma_rings_io_bytes",
    "dma rings spill": "hbm_dma_rings_spill_bytes",
    "dma rings collectives": "hbm_dma_rings_collectives_bytes",
    "dma rings runtime": "hbm_dma_rings_runtime_bytes",
    "collectives": "hbm_collectives_bytes",
    "profiler buffers": "hbm_profiler_bytes",
}
"""Column heads, in lower case, and the facts that they print; other columns are passed over."""

TOTAL: Final = "TOTAL"
"""Head of the first column after the label."""
MOST_HEADS: Final = 3
"""Lines that one head may have."""

_SIZE = re.compile(r"-?[0-9]+(?:\.[0-9]+)?\s?(?:[KMGT]i?B|B)")


def readings(heads: Sequence[str], row: str) -> dict[str, Reading]:
    """The sizes of a row, by fact; ``n/a`` and empty cells are not there, ``0.000B`` is a stated zero."""
    above = _aligned([[cell.strip() for cell in head.split("|")] for head in heads])
    found = {}
    for position, cell in enumerate(row.split("|")):
        words = [cells[position] for cells in above if position < len(cells) and cells[position]]
        fact = FACTS.get(" ".join(words).lower())
        if fact is not None and _SIZE.fullmatch(cell.strip()):
            found[fact] = read(cell.strip(), "size")
    return found


def _aligned(heads: list[list[str]]) -> list[list[str]]:
    """The cells of the heads with the total right after the label, as in the rows, whatever borders the heads have."""
    borders = next((cells.index(TOTAL) - 1 for cells in heads if TOTAL in cells), 0)
    return [cells[max(borders, 0) :] for cells in heads]
