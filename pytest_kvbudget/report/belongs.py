"""What the result of a headroom sweep belongs to (Neuron document, section 3)."""

from __future__ import annotations

from typing import Final

from pytest_kvbudget.report.numbers import NOT_STATED
from pytest_kvbudget.search.model import SweepKey

NEVER_CARRIED: Final = "never carry it to another"
SENTENCE: Final = (
    "This result belongs to this key alone and must not be carried to another: with another model, weights format, "
    "parallelism, backend, LNC or hardware the edges lie elsewhere, and the sweep has to be run again."
)


def key_pairs(key: SweepKey) -> list[tuple[str, str]]:
    """Every part of the key with its name."""
    parts = (
        ("model", key.model),
        ("weights format", key.weights_format),
        ("tensor parallel size", key.tensor_parallel_size),
        ("backend", key.backend),
        ("LNC", key.lnc),
        ("hardware", key.hardware),
    )
    return [(name, NOT_STATED if value is None else str(value)) for name, value in parts]


def key_words(key: SweepKey) -> str:
    """The key in one line, without what is not stated."""
    words = {"tensor parallel size": "TP {}", "LNC": "LNC {}"}
    stated = [words.get(name, "{}").format(value) for name, value in key_pairs(key) if value != NOT_STATED]
    return ", ".join(stated) or f"a key that is {NOT_STATED}"
