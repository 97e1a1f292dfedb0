"""What failing tests say: the boot's verdict with its cause, levers, record and the end of its log."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pytest_kvbudget.attempt import Attempt
from pytest_kvbudget.plugin.items import Use
from pytest_kvbudget.records import LOG_FILE, AttemptRecord
from pytest_kvbudget.redact import text_without_secrets
from pytest_kvbudget.report.text import attempt_lines
from pytest_kvbudget.shape import Shape

TAIL_LINES: Final = 20
FROM_THE_BODY: Final = frozenset(("gate", "body_error", "body_timeout", "interrupted"))
"""Failure classes that the test's own code decides."""
NOT_IN_THE_LOG: Final = FROM_THE_BODY | {
    *("devices_busy", "launch_failed", "window_not_served", "shape_not_served", "request_rejected", "memory_unseen"),
    *("memory_grows", "soak_too_short", "max_used_missed", "max_growth_missed", "kv_windows_short"),
}
"""Failure classes to which the end of the engine's log adds nothing."""
_TAIL_BYTES: Final = 64 * 1024


def boot_failure(attempt: Attempt) -> str:
    """A failed boot for people: verdict, cause, levers, where the record is, the end of the log."""
    return attempt_text(attempt.record, attempt.record_path)


def use_failure(use: Use) -> str:
    """What one test asked of its engine and did not get, for people."""
    return attempt_text(use.record, use.attempt.record_path)


def attempt_text(record: AttemptRecord, path: Path) -> str:
    """An attempt's record for people; the end of its log where that may explain what no line of it was named for."""
    cause = record.cause
    log_matters = cause is None or cause.failure_class not in NOT_IN_THE_LOG
    tail = log_tail(path.with_name(LOG_FILE)) if log_matters else []
    return "\n".join(attempt_lines(record, tail, where=path))


def log_tail(path: Path) -> list[str]:
    """The last lines of a log; none where there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [text_without_secrets(line.rstrip("\r")[:400]) for line in text.splitlines()[-TAIL_LINES:]]


def verdict_detail(record: AttemptRecord) -> str:
    """What a verdict rests on, in one line: ``graph_capture: ...``."""
    cause = record.cause
    if cause is None:
        return record.message
    return cause.sentence if cause.by_gate else f"{cause.phase}: {cause.sentence}"


def described(shape: Shape) -> str:
    """A shape in one line, secrets of its environment removed."""
    return shape.describe() or "the engine's defaults"
