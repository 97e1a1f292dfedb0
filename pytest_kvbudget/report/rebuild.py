"""Rebuilding the pages of an archive, with a line for each answer in it."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from pytest_kvbudget.archive import AnyFinding, RecordError, records_or_troubles
from pytest_kvbudget.records import AttemptRecord, as_used
from pytest_kvbudget.report.headline import headline
from pytest_kvbudget.report.history import CALLED_OFF, why
from pytest_kvbudget.report.html import write_attempt_page, write_finding_page
from pytest_kvbudget.report.marks import mark_of
from pytest_kvbudget.report.numbers import moment, plural
from pytest_kvbudget.report.plain import message_text, one_line


def rebuild(root: Path, *, out: TextIO, err: TextIO) -> bool:
    """Write the page of every record below a folder, and say what it holds; returns whether something went wrong.

    A record that cannot be read is named, and the others have their pages all the same.

    Args:
        root: an archive, a run's folder, or any folder below one.
        out: receives findings, and what no finding names: each plain test with what it asked of its engine, boots of
            ladders that were cut short. Boots that were called off count nowhere.
        err: receives what went wrong.
    """
    written, wrong = 0, 0
    named: set[Path] = set()
    boots: list[tuple[Path, AttemptRecord, Path]] = []
    for path, record in records_or_troubles(root):
        try:
            if isinstance(record, RecordError):
                raise record
            page = write_attempt_page(path) if isinstance(record, AttemptRecord) else write_finding_page(path)
        except (RecordError, OSError) as error:
            wrong += 1
            err.write(f"kvbudget report: {error}\n")
            continue
        written += 1
        if isinstance(record, AttemptRecord):
            boots.append((path, record, page))
            continue
        named.update((path.parent / name).resolve() for name in record.attempts)
        out.write(_entry(record, headline(record.finding), page))
    for path, record, page in boots:
        if path.resolve() not in named and why(record) != CALLED_OFF:
            for seen in [record] if record.rung else [as_used(record, use) for use in record.uses] or [record]:
                mark, rung = mark_of(seen.verdict, seen.cause), f" at {seen.rung}" if seen.rung else ""
                out.write(_entry(seen, f"{mark.word}{rung}: {message_text(seen.message)}", page))
    if written:
        out.write(f"{plural(written, 'page')} written\n")
    elif not wrong:
        err.write(f"kvbudget report: no records below {root}\n")
    return bool(wrong) or not written


def _entry(record: AttemptRecord | AnyFinding, said: str, page: Path) -> str:
    simulated = "SIMULATED " if record.target.simulated else ""
    about = f"run {record.run.run}, {moment(record.started)}"
    return f"{one_line(f'{simulated}{record.test}: {said}')}\n  {about}\n  {page}\n"
