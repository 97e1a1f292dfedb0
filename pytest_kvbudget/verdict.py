"""The words for how an attempt and a search end. One vocabulary for records, terminal, JUnit and HTML."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Verdict(StrEnum):
    """What one boot of one shape proved."""

    PASS = "PASS"  # noqa: S105 - a verdict, not a password
    MARGINAL = "MARGINAL"
    """Survived with less margin than was asked for."""
    FAIL = "FAIL"
    """Refused or died for memory, or its gate (the test body) said no; `Cause.by_gate` tells the two apart."""
    UNKNOWN = "UNKNOWN"
    """No verdict: a lost log, a hang, a vanished process, a disturbed measurement."""
    ERROR = "ERROR"
    """Failed for another reason than memory: an argument, a port, a model, the harness."""


class FindingKind(StrEnum):
    """What a search established."""

    PROVEN = "proven"
    """The winner passed and the next quantum failed."""
    CEILING_REACHED = "ceiling_reached"
    """The winner passed and the axis ends there."""
    FLOOR_REACHED = "floor_reached"
    """A sweep's winner passed and is the smallest value there is."""
    EMPTY = "empty"
    """The floor itself was booted and failed: nothing passes."""
    NON_MONOTONE = "non_monotone"
    """A rung failed below one that passed, and both did so again: there is no single boundary."""
    FLAKY = "flaky"
    """The same rungs pass and fail: the boundary is a band."""
    EMPTY_WINDOW = "empty_window"
    """A sweep's neighbours fail for opposite reasons: too little room, and one step further too little KV cache."""
    UNDECIDED = "undecided"
    """The proof is incomplete: a second UNKNOWN, a limit, an interruption; the bracket says how far it got."""
    ERROR = "error"
    """An attempt failed for another reason than memory; the search stopped there."""


class Phase(StrEnum):
    """Where a boot is or ended, in boot order."""

    ARGUMENT = "argument"
    WORKER_INIT = "worker_init"
    WEIGHTS_LOAD = "weights_load"
    PROFILE = "profile"
    KV_CHECK = "kv_check"
    KV_ALLOC = "kv_alloc"
    COMPILE = "compile"
    MODEL_LOAD = "model_load"
    GRAPH_CAPTURE = "graph_capture"
    WARMUP = "warmup"
    READY = "ready"
    REQUEST = "request"
    SHUTDOWN = "shutdown"
    UNKNOWN = "unknown"


STARTING: Final = "starting"
"""What people are told of a boot whose log has not named a phase yet."""


class Provenance(StrEnum):
    """Where a number comes from; only the first one counts as an answer."""

    MEASURED = "measured"
    ASSUMED = "assumed"
    CONFIGURED = "configured"
    DERIVED = "derived"
    SIMULATED = "simulated"
