"""Settings of the environment that are no number, found out where the engine first calculates with them."""

from __future__ import annotations

import re
from typing import Final

from pytest_kvbudget.ledger.boot import BootState
from pytest_kvbudget.ledger.seen import Seen
from pytest_kvbudget.verdict import Phase

CAP_VARIABLE: Final = "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION"
MINIMUM_VARIABLE: Final = "VLLM_NEURON_MIN_KV_BUDGET_GIB"
HEADROOM_VARIABLE: Final = "VLLM_NEURON_RESERVED_HEADROOM_GIB"

READ_WITHIN_LINES: Final = 16
"""Lines of a traceback between the code that reads a variable and the exception."""

_NO_NUMBER: Final = re.compile(
    r"ValueError: (?:could not convert string to float: |invalid literal for int\(\) with base \d+: )"
    r"|(?:Value|Overflow)Error: cannot convert float (?P<float>NaN|infinity) to integer"
)
_BUDGET: Final = frozenset({Phase.PROFILE, Phase.KV_CHECK})


def misread(state: BootState, seen: Seen) -> bool:
    """Whether an exception says that a variable of the environment is no number that can be used.

    On Neuron the budget is worked out from such variables alone; elsewhere the traceback must show that one was read.
    """
    if _NO_NUMBER.search(seen.evidence.text) is None:
        return False
    return _read(state, seen) is not None or (state.family == "neuron" and seen.phase in _BUDGET)


def blamed_variable(state: BootState, seen: Seen) -> str | None:
    """The variable that is no number; ``None`` where the lines leave it open, or where it is no such failure.

    NaN passes the check of the cap and stops where the cap is worked out; an infinite minimum stops at its own
    conversion, and no other variable of the budget gets that far.
    """
    match = _NO_NUMBER.search(seen.evidence.text)
    if match is None or not misread(state, seen):
        return None
    if state.family == "neuron" and seen.phase in _BUDGET and match["float"]:
        return CAP_VARIABLE if match["float"] == "NaN" else MINIMUM_VARIABLE
    read = _read(state, seen)
    if read is None and match["float"] is None:
        return f"{CAP_VARIABLE}, {MINIMUM_VARIABLE} or {HEADROOM_VARIABLE}"
    return read


def _read(state: BootState, seen: Seen) -> str | None:
    """The variable that the traceback read last."""
    value = state.facts.values.get("env_variable", {}).get(seen.process)
    if value is None or not 0 <= seen.evidence.line - value.evidence.line <= READ_WITHIN_LINES:
        return None
    return str(value.value)
