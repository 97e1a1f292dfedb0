"""Writing the pages beside the records they are made from."""

from __future__ import annotations

from pathlib import Path

from pytest_kvbudget.archive import RecordError, read_attempt, read_finding
from pytest_kvbudget.records import AttemptRecord
from pytest_kvbudget.report.attempt_page import attempt_page
from pytest_kvbudget.report.elements import write_page
from pytest_kvbudget.report.finding_page import finding_page
from pytest_kvbudget.report.searched import RUNG_PAGE, page_name


def write_attempt_page(attempt_path: Path) -> Path:
    """Write ``rung.html`` beside an attempt's record; returns its path.

    Raises:
        RecordError: the record cannot be read; the message names file and key.
        OSError: the page cannot be written.
    """
    page = attempt_page(read_attempt(attempt_path), attempt_path)
    return write_page(attempt_path.with_name(RUNG_PAGE), page)


def write_finding_page(finding_path: Path) -> Path:
    """Write a finding's page beside its record, and the page of each of its boots; returns the former's path.

    The page of a ladder is ``ladder.html``, that of a sweep ``sweep.html``. An attempt whose record cannot be read is
    shown as UNKNOWN. A page that an earlier run wrote of a boot that was taken over stays as it is.

    Raises:
        RecordError: the finding cannot be read; the message names file and key.
        OSError: a page cannot be written.
    """
    record = read_finding(finding_path)
    attempts: dict[str, AttemptRecord | None] = {}
    for name in record.attempts:
        path = finding_path.parent / name
        try:
            attempts[name] = attempt = read_attempt(path)
        except RecordError:
            attempts[name] = None
            continue
        if attempt.run.run == record.run.run or not path.with_name(RUNG_PAGE).is_file():
            write_attempt_page(path)
    return write_page(finding_path.with_name(page_name(record)), finding_page(record, attempts, str(finding_path)))
