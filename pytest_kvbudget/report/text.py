"""Attempts and findings as lines of plain text, for terminals and failure messages.

Written for somebody tired: what happened, with which numbers, what to turn and what not, and where to look.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Final

from pytest_kvbudget.archive import AnyFinding
from pytest_kvbudget.records import AttemptRecord, SweepRecord
from pytest_kvbudget.report import certainty, labels, levers
from pytest_kvbudget.report.belongs import NEVER_CARRIED, key_words
from pytest_kvbudget.report.deciding import figures
from pytest_kvbudget.report.headline import headline
from pytest_kvbudget.report.history import Boot, boots, pool_bytes, set_words, took, why
from pytest_kvbudget.report.marks import mark_of
from pytest_kvbudget.report.numbers import NOT_STATED, shape_fields, size, words
from pytest_kvbudget.report.plain import message_text, one_line, says
from pytest_kvbudget.report.proof import proof
from pytest_kvbudget.report.searched import track_of
from pytest_kvbudget.report.sweep_proof import opposite_turns

EVIDENCE_LINES: Final = 3
FIGURES: Final = 3
"""Deciding numbers in a boot's line; its page has all."""
SIMULATED: Final = "SIMULATED DEVICE: no number here was measured on hardware"
_WIDTH: Final = 9
COLUMNS: Final = 110
"""Longest line of running text; figures and log lines are never broken."""


def attempt_lines(record: AttemptRecord, log_tail: Sequence[str] = (), *, where: Path | None = None) -> list[str]:
    """An attempt in a few lines.

    Args:
        record: the attempt.
        log_tail: last lines of its log, shown where no line of the log could be named as evidence.
        where: the record's file, to say where record and log lie.
    """
    return [*_attempt(record, log_tail, where)]


def finding_lines(record: AnyFinding, attempts: Sequence[AttemptRecord], *, where: Path | None = None) -> list[str]:
    """A finding with one line per boot, in boot order; ``where`` is the finding's file."""
    return [*_finding(record, attempts, where)]


def _attempt(record: AttemptRecord, log_tail: Sequence[str], where: Path | None) -> Iterator[str]:
    mark = mark_of(record.verdict, record.cause)
    asked = ", ".join(f"{name} {text}" for name, text in shape_fields(record.shape))
    subject = labels.shown(record.rung) if record.rung else asked or record.test
    facts = ", ".join(filter(None, (f"boot {record.number}" if record.number > 1 else "", took(record))))
    yield one_line(f"{mark.word}  {subject}{f' ({facts})' if facts else ''}")
    if record.target.simulated:
        yield SIMULATED
    yield _line("", message_text(record.message))
    cause = record.cause
    if cause is not None:
        if not says(record.message, cause.sentence):
            yield _line("cause", cause.sentence)
        rank = f" on {cause.rank}" if cause.rank else ""
        yield _line("where", f"{words(cause.phase)}{rank} ({cause.failure_class})")
        if cause.by_gate:
            yield _line("", "the test body refused it; that says nothing about memory")
    numbers = figures(record)
    if numbers:
        yield _line("numbers", ", ".join(f"{figure.name} {figure.text}" for figure in numbers))
    yield from _levers(record)
    yield from _evidence(record, log_tail)
    for note in record.notes:
        yield _line("note", note)
    yield from _places(record, where)


def _levers(record: AttemptRecord) -> Iterator[str]:
    titles = {"helps": "turn", "useless": "no use", "harms": "worse"}
    for group in levers.grouped(record.cause):
        for index, lever in enumerate(group.levers):
            yield _line("" if index else titles[group.effect], levers.with_why(lever))


def _evidence(record: AttemptRecord, log_tail: Sequence[str]) -> Iterator[str]:
    evidence = () if record.cause is None else record.cause.evidence
    for index, entry in enumerate(evidence[:EVIDENCE_LINES]):
        where = f"line {entry.line}: " if entry.line else ""
        yield _line("" if index else "evidence", f"{where}{entry.text}")
    if not any(entry.line for entry in evidence):  # what client or kernel said does not stand for the log
        for index, text in enumerate(log_tail):
            yield _line("" if index else "log ends", text)


def _places(record: AttemptRecord, where: Path | None) -> Iterator[str]:
    if record.left_serving:
        yield _line("serving", record.endpoint or "yes")
    if where is None:
        yield _line("log", f"{record.log} beside the record, run {record.run.run} on {record.run.host}")
    else:
        log = where.parent / record.log
        yield _line("log", str(log) if record.command or log.exists() else "none: nothing was started")
        yield _line("record", str(where))


def _finding(record: AnyFinding, attempts: Sequence[AttemptRecord], where: Path | None) -> Iterator[str]:
    finding, track = record.finding, track_of(record)
    yield one_line(headline(finding))
    if record.target.simulated:
        yield SIMULATED
    history = boots(record, attempts)
    values = [NOT_STATED if boot.value is None else track.show(boot.value) for boot in history]
    width = max((len(value) for value in values), default=0)
    verdicts = max((len(boot.mark.word) for boot in history), default=0)
    for boot, value in zip(history, values, strict=True):
        yield one_line_kept(f"  {boot.number:>2}  {value:>{width}}  {boot.mark.word:<{verdicts}}  {_boot(boot)}")
    yield from _sets(attempts)
    yield from _wrapped("proof", proof(record))
    if isinstance(record, SweepRecord):
        yield from _wrapped("turns", opposite_turns(record))
    pool = pool_bytes(record, attempts)
    if pool is not None:
        yield _line("pool", f"{size(pool)} per rank, scaled to the winner")
    yield from _certainty(record)
    if isinstance(record, SweepRecord):
        yield from _wrapped("valid for", f"{key_words(record.finding.key)}; {NEVER_CARRIED}")
    if finding.lever is not None:
        yield from _wrapped("instead", levers.with_why(finding.lever))
    turns = levers.for_more(record) if finding.lever is None else []
    if turns:
        yield _line(f"for {track.wanted}", "; ".join(turns))
    for note in finding.notes:
        yield from _wrapped("note", note)
    if where is not None:
        yield _line("record", str(where))


def _boot(boot: Boot) -> str:
    said = list(filter(None, [why(boot.record)]))
    said += [f"{figure.name} {figure.text}" for figure in figures(boot.record)[:FIGURES]]
    time = took(boot.record)
    said += [time] if time else []
    return "; ".join([*said, *boot.remarks])


def _sets(attempts: Sequence[AttemptRecord]) -> Iterator[str]:
    sets = set_words(attempts)
    if sets:
        yield _line("sets", "; ".join(sets))


def _certainty(record: AnyFinding) -> Iterator[str]:
    deploy, noise = certainty.deploy(record), certainty.noise(record)
    if deploy is not None:
        yield from _wrapped("deploy", f"{deploy.text}: {deploy.why}")
    if noise is not None:
        yield _line("noise", noise)


def _line(label: str, text: str) -> str:
    return f"  {label:<{_WIDTH}} {one_line(text)}".rstrip()


def _wrapped(label: str, text: str) -> Iterator[str]:
    for index, part in enumerate(wrap(one_line(text), COLUMNS - _WIDTH - 3)):
        yield _line("" if index else label, part)


def one_line_kept(text: str) -> str:
    """A row whose columns are aligned with spaces: made safe, but not squeezed."""
    return " ".join(one_line(part) if part else "" for part in text.split(" ")).rstrip()
