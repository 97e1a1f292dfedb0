"""The engine log on a page: evidence marked and anchored, a large log cut to its beginning, its end and what counts."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from pytest_kvbudget.ledger.model import BootLedger, Value
from pytest_kvbudget.records import AttemptRecord
from pytest_kvbudget.redact import text_without_secrets
from pytest_kvbudget.report.elements import Element, element
from pytest_kvbudget.report.numbers import plural, words

HEAD_LINES: Final = 200
TAIL_LINES: Final = 400
CONTEXT_LINES: Final = 3
LINE_CHARACTERS: Final = 4_000


class Line(NamedTuple):
    """A line of the log with its 1-based number; line feeds count, carriage returns do not."""

    number: int
    text: str


class Excerpt(NamedTuple):
    """What is shown of a log."""

    lines: tuple[Line, ...]
    total: int


def evidence_marks(record: AttemptRecord) -> dict[int, tuple[str, ...]]:
    """Line number to what the line gave: names of facts, ``phase`` milestones, and ``cause``."""
    marks: defaultdict[int, dict[str, None]] = defaultdict(dict)
    cause = record.cause or (record.ledger.cause if record.ledger else None)
    for evidence in cause.evidence if cause else ():
        marks[evidence.line]["cause"] = None
    for name, value in _values(record.ledger):
        marks[value.evidence.line][name] = None
    for milestone in record.ledger.milestones if record.ledger else ():
        marks[milestone.evidence.line][f"phase {words(milestone.phase)}"] = None
    return {line: tuple(names) for line, names in marks.items()}


def _values(ledger: BootLedger | None) -> Iterator[tuple[str, Value]]:
    if ledger is not None:
        yield from ledger.facts.items()
        for name, by_rank in ledger.ranks.items():
            yield from ((name, value) for value in by_rank.values())


def read_excerpt(path: Path, wanted: frozenset[int]) -> Excerpt | None:
    """The first and last lines of a log and every wanted one with its neighbours; ``None`` where there is no log."""
    near = {line + offset for line in wanted for offset in range(-CONTEXT_LINES, CONTEXT_LINES + 1)}
    kept: dict[int, bytes] = {}
    tail: deque[tuple[int, bytes]] = deque(maxlen=TAIL_LINES)
    total = 0
    try:
        with path.open("rb") as file:
            for total, raw in enumerate(file, 1):
                if total <= HEAD_LINES or total in near:
                    kept[total] = raw
                else:
                    tail.append((total, raw))
    except OSError:
        return None
    kept.update(entry for entry in tail if entry[0] > total - TAIL_LINES)
    lines = (Line(number, _text(raw, whole=number in wanted)) for number, raw in sorted(kept.items()))
    return Excerpt(tuple(lines), total)


def _text(raw: bytes, *, whole: bool) -> str:
    text = raw.decode("utf-8", "replace").rstrip("\r\n")
    states = [state for state in text.split("\r") if state.strip()]
    if len(states) > 1 and not whole:
        # a progress bar redrew its line; its last state is what a terminal would show
        text = states[-1]
    elif states:
        text = " ⏎ ".join(states)
    left_out = len(text) - LINE_CHARACTERS
    shown = text_without_secrets(text[:LINE_CHARACTERS])
    return shown if left_out <= 0 else f"{shown} … ({left_out:,} more characters)"


def log_section(excerpt: Excerpt | None, marks: dict[int, tuple[str, ...]], name: str) -> list[Element]:
    """The log as elements; each line is the target ``#L<number>``."""
    if excerpt is None:
        return [element("p", f"The log {name} is not beside this record.", class_="absent")]
    rows: list[Element] = []
    previous = 0
    for line in excerpt.lines:
        if line.number > previous + 1:
            rows.append(_gap(line.number - previous - 1, name))
        rows.append(_row(line, marks.get(line.number, ())))
        previous = line.number
    if excerpt.total > previous:
        rows.append(_gap(excerpt.total - previous, name))
    shown = len(excerpt.lines)
    told = plural(excerpt.total, "line")
    if shown < excerpt.total:
        told += (
            f", {shown:,} shown: the first {HEAD_LINES}, the last {TAIL_LINES}, and every line that a number came from"
        )
    return [
        element("p", element("code", name), f", {told}. Marked lines are evidence.", class_="note"),
        element("div", rows, class_="log", role="region", aria_label="engine log", tabindex=0),
    ]


def _gap(lines: int, name: str) -> Element:
    return element("div", f"⋯ {plural(lines, 'line')} left out, see {name}", class_="gap")


def _row(line: Line, marks: tuple[str, ...]) -> Element:
    class_ = "l cause" if "cause" in marks else "l ev" if marks else "l"
    return element(
        "div",
        element("a", str(line.number), href=f"#L{line.number}", class_="n"),
        element("code", line.text),
        element("span", " · ".join(marks), class_="gives") if marks else None,
        id=f"L{line.number}",
        class_=class_,
    )
