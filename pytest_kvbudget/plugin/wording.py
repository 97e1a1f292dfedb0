"""What failing tests say: the boot's verdict with its cause, levers, record and the end of its log."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pytest_kvbudget.attempt import Attempt
from pytest_kvbudget.records import LOG_FILE, AttemptRecord
from pytest_kvbudget.redact import text_without_secrets
from pytest_kvbudget.report.text import attempt_lines
from pytest_kvbudget.shape import Shape

TAIL_LINES: Final = 20
_TAIL_BYTES: Final = 64 * 1024


def boot_failure(attempt: Attempt) -> str:
    """A failed boot for people: verdict, cause, levers, where the record is, the end of the log."""
    return attempt_text(attempt.record, attempt.record_path)


def attempt_text(record: AttemptRecord, path: Path) -> str:
    """An attempt's record for people, with the end of its log."""
    lines = attempt_lines(record, where=path)
    tail = log_tail(path.with_name(LOG_FILE))
    if tail:
        lines += [f"the last {len(tail)} lines of its log:", *(f"  {line}" for line in tail)]
    return "\n".join(lines)


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
