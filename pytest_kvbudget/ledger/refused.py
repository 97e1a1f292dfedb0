"""Which argument or setting a refusal is about, and what to do with it."""

from __future__ import annotations

import re
from typing import Final

from pytest_kvbudget.ledger.boot import BootState
from pytest_kvbudget.ledger.model import Direction, Lever
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
_NAMED: Final = re.compile(
    r"\b((?:VLLM|NEURON)_[A-Z0-9_]{3,})\b|error: (?:argument |unrecognized arguments: )(--?[\w-]+)"
)
_BOUND: Final = re.compile(r"should be (less|greater) than")
_CHECKED: Final = ("gpu_memory_utilization", "max_num_seqs", "max_model_len")
"""Arguments whose rejected value is read from a validator's lines."""
_CORRECTIONS: Final[tuple[tuple[str, str, Direction, str], ...]] = (
    ("is only supported on GPUs with compute capability", "dtype", "none", "half: this device has no bfloat16"),
    ("requires you to execute", "trust_remote_code", "none", "if the code of the model may run here"),
    ("trust_remote_code", "trust_remote_code", "none", "if the code of the model may run here"),
    ("custom code which must be executed", "trust_remote_code", "none", "if the code of the model may run here"),
    ("is smaller than max_model_len", "max_num_batched_tokens", "raise", "to the window, or lower the window"),
    ("must be greater than or equal to max_num_seqs", "max_num_batched_tokens", "raise", "or lower max_num_seqs"),
    ("cannot currently support max_model_len", "max_model_len", "lower", "to what the message says"),
    ("is greater than max_lora_rank", "max_lora_rank", "raise", "to the rank of the adapter"),
    ("large swap space", "swap_space", "lower", "to a part of the host's memory"),
    ("is not valid for this configuration", "attention backend", "none", "leave the choice to the engine"),
    ("utilization must be less than", "gpu_memory_utilization", "lower", "the message names the bound"),
    ("uantization ", "quantization", "none", "a format that this device and release know"),
    ("uantization:", "quantization", "none", "a format that this device and release know"),
)
"""What a refusal says, the argument to correct, and how."""
_LAYOUTS: Final[tuple[tuple[str, Direction, str], ...]] = (
    ("is larger than the number of", "lower", "to the devices that there are"),
    (" exceeds the total number of ", "lower", "to the devices that there are"),
    (" provide a placement group of", "lower", "to the devices that there are"),
    ("too large tensor parallel size", "lower", "each shard must hold whole blocks of the quantized weights"),
    ("min_thread_", "lower", "each shard must hold whole tiles of the kernel"),
    ("divisible by ", "none", "a divisor of what the message names"),
)
"""What a refused layout says, and which number of ranks would do."""
_TOO_LONG: Final = "is greater than the derived max_model_len"
_BUDGET: Final = frozenset({Phase.PROFILE, Phase.KV_CHECK})


def misread(state: BootState, seen: Seen) -> bool:
    """Whether an exception says that a variable of the environment is no number that can be used.

    On Neuron the budget is worked out from such variables alone; elsewhere the traceback must show that one was read.
    """
    if _NO_NUMBER.search(seen.evidence.text) is None:
        return False
    return _read(state, seen) is not None or (state.family == "neuron" and seen.phase in _BUDGET)


def blamed(state: BootState, seen: Seen) -> Lever | None:
    """What to correct, by the engine's own name for it; ``None`` where the lines name nothing."""
    text = seen.evidence.text
    if misread(state, seen):
        return _lever(_misread_variable(state, seen), "none", "give it a finite number, or leave it out")
    if _TOO_LONG in text:
        native = seen.readings.get("native_max_model_len")
        most = f"to at most {native.value:,}, " if native is not None and isinstance(native.value, int) else ""
        return _lever("max_model_len", "lower", f"{most}what the model was made for")
    bound, checked = _BOUND.search(text), _checked(state)
    if bound is not None and len(checked) == 1:
        direction: Direction = "lower" if bound[1] == "less" else "raise"
        return _lever(checked.pop(), direction, "the message names the bound")
    match = _NAMED.search(text)
    if match is None:
        return next((_lever(name, way, why) for part, name, way, why in _CORRECTIONS if part in text), None)
    why = "give it a value that the message allows, leave it out, or use an image that knows it"
    return _lever(match[1] or match[2], "none", why)


def fitting_layout(text: str) -> Lever | None:
    """Which number of ranks a refused layout asks for; ``None`` where it is not about that number alone."""
    return next((_lever("tensor_parallel_size", way, why) for part, way, why in _LAYOUTS if part in text), None)


def _lever(name: str, direction: Direction, why: str) -> Lever:
    return Lever(name, direction, "helps", why)


def _checked(state: BootState) -> set[str]:
    return {name for seen in state.failures for name in seen.readings if name in _CHECKED}


def _misread_variable(state: BootState, seen: Seen) -> str:
    """The variable that is no number.

    NaN passes the check of the cap and stops where the cap is worked out; an infinite minimum stops at its own
    conversion, and no other variable of the budget gets that far.
    """
    match, read = _NO_NUMBER.search(seen.evidence.text), _read(state, seen)
    if match is not None and match["float"] and state.family == "neuron" and seen.phase in _BUDGET:
        return CAP_VARIABLE if match["float"] == "NaN" else MINIMUM_VARIABLE
    return read or f"{CAP_VARIABLE}, {MINIMUM_VARIABLE} or {HEADROOM_VARIABLE}"


def _read(state: BootState, seen: Seen) -> str | None:
    """The variable that the traceback read last."""
    value = state.facts.values.get("env_variable", {}).get(seen.process)
    if value is None or not 0 <= seen.evidence.line - value.evidence.line <= READ_WITHIN_LINES:
        return None
    return str(value.value)
