"""The vocabulary of failure classes, and what each one proves about a shape."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from pytest_kvbudget.verdict import Verdict

if TYPE_CHECKING:
    from pytest_kvbudget.ledger.model import Cause


class Proof(StrEnum):
    """What a failure of a class says about the shape that was booted."""

    MEMORY = "memory"
    """The shape does not fit: a verdict, and a search may step."""
    OTHER = "other"
    """Failed for another reason: every shape fails so until somebody repairs it."""
    NO_VERDICT = "no_verdict"
    """Something outside the shape ended it: the same shape may boot on the next try."""


CLASSES: Final[dict[str, Proof]] = {
    # argument and configuration
    "argument_rejected": Proof.OTHER,
    "command_not_found": Proof.OTHER,
    "install_broken": Proof.OTHER,
    "model_not_found": Proof.OTHER,
    "plan_refused": Proof.OTHER,
    "parallelism_refused": Proof.OTHER,
    "port_in_use": Proof.OTHER,
    # device and host, before or beside the shape
    "startup_free_below_request": Proof.MEMORY,
    "foreign_process_memory": Proof.NO_VERDICT,
    "devices_busy": Proof.NO_VERDICT,
    "device_stats_unusable": Proof.NO_VERDICT,
    "device_missing": Proof.OTHER,
    "device_fault": Proof.NO_VERDICT,
    "device_resource_exhausted": Proof.OTHER,
    "host_memory_limit": Proof.OTHER,
    "host_oom_killed": Proof.NO_VERDICT,
    "host_memory_short": Proof.OTHER,
    "disk_full": Proof.OTHER,
    # weights, profile, KV
    "device_oom": Proof.MEMORY,
    "weights_oom": Proof.MEMORY,
    "profile_oom": Proof.MEMORY,
    "profile_disturbed": Proof.NO_VERDICT,
    "kv_budget_nonpositive": Proof.MEMORY,
    "kv_check_short": Proof.MEMORY,
    "kv_reserve_underpriced": Proof.MEMORY,
    "min_kv_budget": Proof.MEMORY,
    "max_num_seqs_exceeds_state": Proof.MEMORY,
    "kv_alloc_oom": Proof.MEMORY,
    "single_alloc_limit": Proof.MEMORY,
    # compile and load of compiled programs
    "compile_hbm_exceeded": Proof.MEMORY,
    "compile_failed": Proof.OTHER,
    "compile_desync": Proof.NO_VERDICT,
    "compile_cache_miss": Proof.OTHER,
    "runtime_hbm_oom": Proof.MEMORY,
    "lnc_mismatch": Proof.OTHER,
    "program_load_failed": Proof.OTHER,
    "profiler_reserve": Proof.OTHER,
    # capture, warm-up, serving
    "graph_capture_oom": Proof.MEMORY,
    "warmup_oom": Proof.MEMORY,
    "request_oom": Proof.MEMORY,
    "workspace_locked": Proof.OTHER,
    "request_starved": Proof.NO_VERDICT,
    # ends without a word about memory
    "engine_killed": Proof.NO_VERDICT,
    "engine_hung": Proof.NO_VERDICT,
    "ready_timeout": Proof.NO_VERDICT,
    "kernel_fault": Proof.OTHER,
    "engine_exception": Proof.OTHER,
    "unexplained": Proof.NO_VERDICT,
}
"""Every failure class that a diagnosis may name, with what it proves."""

_VERDICTS: Final = {Proof.MEMORY: Verdict.FAIL, Proof.OTHER: Verdict.ERROR, Proof.NO_VERDICT: Verdict.UNKNOWN}


def proof_of(failure_class: str) -> Proof:
    """What a failure class proves.

    Raises:
        KeyError: for a word outside the vocabulary; the message lists the vocabulary.
    """
    if failure_class not in CLASSES:
        raise KeyError(f"{failure_class!r} is no failure class; known: {', '.join(sorted(CLASSES))}")
    return CLASSES[failure_class]


def verdict_of(failure_class: str) -> Verdict:
    """The verdict on an attempt that ended with this failure class: FAIL, ERROR or UNKNOWN, never PASS.

    Raises:
        KeyError: for a word outside the vocabulary.
    """
    return _VERDICTS[proof_of(failure_class)]


_SLOTS: Final = re.compile(r"\bslots?\b|\bhost-backed experts\b", re.IGNORECASE)


def counts_slots(failure_class: str, text: str) -> bool:
    """An expert plan was refused for its size: too few slots for the resident layers, or too many experts for the host.

    That is memory, which window and utilization move; every other refusal of a plan is about model or image.
    """
    return failure_class == "plan_refused" and _SLOTS.search(text) is not None


def verdict_on(cause: Cause) -> Verdict:
    """The verdict on an attempt that ended for this cause: as `verdict_of` its class, and a plan by what it lacked.

    Raises:
        KeyError: for a class outside the vocabulary.
    """
    said = " ".join((cause.sentence, *(evidence.text for evidence in cause.evidence)))
    return Verdict.FAIL if counts_slots(cause.failure_class, said) else verdict_of(cause.failure_class)
