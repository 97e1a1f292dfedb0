"""The page of one attempt: what it proved, why, where each GiB went, and the lines that say so."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from pytest_kvbudget.archive import RecordError, read_finding
from pytest_kvbudget.ledger.model import BootLedger, Cause, Evidence, Value
from pytest_kvbudget.records import FINDING_FILE, AttemptRecord, SweepRecord
from pytest_kvbudget.report import bars, labels, levers, logview, marks, parts, terms
from pytest_kvbudget.report.after_boot import after_boot
from pytest_kvbudget.report.deciding import figures
from pytest_kvbudget.report.elements import Child, Element, document, element, table
from pytest_kvbudget.report.numbers import (
    NOT_STATED,
    duration,
    exact_text,
    moment,
    shape_fields,
    size,
    stated_duration,
    value_text,
    words,
)
from pytest_kvbudget.report.plain import message_text, says
from pytest_kvbudget.report.searched import page_name
from pytest_kvbudget.report.timeline import timeline
from pytest_kvbudget.report.trace_view import trace_section


def attempt_page(record: AttemptRecord, path: Path) -> str:
    """The page as text; ``path`` is where the record was read from, its log lies beside it."""
    evidence = logview.evidence_marks(record)
    # a record says its log lies beside it; one that was made elsewhere must not name another file
    excerpt = logview.read_excerpt(path.parent / Path(record.log).name, frozenset(evidence))
    shown = frozenset(line.number for line in excerpt.lines) if excerpt else frozenset()
    mark = marks.mark_of(record.verdict, record.cause)
    name = labels.shown(record.rung) if record.rung else record.test
    title = f"{'[simulated] ' if record.target.simulated else ''}{mark.word} {name}"
    return document(
        title,
        _header(record, mark, path),
        _cause(record, shown),
        parts.section("Where each GiB went", _memory(record)),
        parts.section("Device memory over time", trace_section(record, path.parent)),
        after_boot(record),
        parts.section("Time", timeline(record.timings), _time_pairs(record)),
        parts.section("What the boot said", _facts(record.ledger, shown)),
        _command(record),
        parts.section("Record", _record_pairs(record, path), _notes(record)),
        parts.section("Log", logview.log_section(excerpt, evidence, record.log), class_="log-section"),
        band=parts.simulated_band(record.target),
    )


def _header(record: AttemptRecord, mark: marks.Mark, path: Path) -> Element:
    number = f"boot {record.number}" if record.number > 1 else None
    rung = labels.shown(record.rung) if record.rung else None
    crumbs = [record.target.name, record.test, rung, number]
    shape = [
        element("span", element("span", field, class_="key"), f" {text}", class_="chip")
        for field, text in shape_fields(record.shape)
    ]
    return element(
        "header",
        element(
            "p",
            " / ".join(crumb for crumb in crumbs if crumb),
            [[" · ", link] for link in _finding_links(record, path)],
            class_="crumbs",
        ),
        element(
            "h1",
            marks.symbol(mark, large=True),
            element("span", mark.word, class_="word"),
            element("span", mark.sentence, class_="meaning"),
            parts.simulated_badge(record.target),
            class_=f"v-{mark.key}",
        ),
        element("p", message_text(record.message), class_="lead"),
        parts.figures_list(figures(record)),
        element("p", shape, class_="chips"),
    )


def _finding_links(record: AttemptRecord, path: Path) -> Iterator[Element]:
    """Links to the pages of the ladders and sweeps whose findings, in the test's folder or below it, name this boot."""
    if record.rung is None:
        return
    folder = path.parent.parent
    for file in (folder / FINDING_FILE, *sorted(folder.glob(f"*/{FINDING_FILE}"))):
        try:
            finding = read_finding(file)
        except RecordError:
            continue
        if any(os.path.normpath(file.parent / name) == os.path.normpath(path) for name in finding.attempts):
            text = "all boots of this sweep" if isinstance(finding, SweepRecord) else "all rungs of this ladder"
            page = file.with_name(page_name(finding)).relative_to(folder)
            yield element("a", text, href=f"../{quote(page.as_posix(), safe='/=')}")


def _cause(record: AttemptRecord, shown: frozenset[int]) -> Element | None:
    cause = record.cause
    if cause is None:
        return None
    facts = [f"in {words(cause.phase)}", cause.failure_class]
    if cause.rank:
        facts.append(f"on {cause.rank}")
    gate = "The test body refused this rung. That says nothing about memory." if cause.by_gate else None
    return parts.section(
        "Why",
        None if says(record.message, cause.sentence) else element("p", cause.sentence, class_="cause-sentence"),
        element("p", gate, class_="note") if gate else None,
        element("p", [element("code", text, class_="tag") for text in facts]),
        [_quote(evidence, shown) for evidence in cause.evidence],
        _levers(cause),
    )


def _quote(evidence: Evidence, shown: frozenset[int]) -> Element:
    place = _line_link(evidence.line, shown, "line ") if evidence.line else None
    return element("blockquote", place, element("code", evidence.text))


def _line_link(line: int, shown: frozenset[int], before: str = "") -> Element:
    text = f"{before}{line:,}"
    return (
        element("a", text, href=f"#L{line}", class_="line") if line in shown else element("span", text, class_="line")
    )


def _levers(cause: Cause) -> Element | None:
    groups = [
        element(
            "div",
            element("h3", group.title),
            element("ul", [
                element(
                    "li",
                    element("span", levers.arrow(lever), class_="arrow", aria_hidden="true"),
                    element("b", levers.wording(lever)),
                    element("span", lever.why, class_="why") if lever.why else None,
                )
                for lever in group.levers
            ]),
            class_=f"levers e-{group.effect}",
        )
        for group in levers.grouped(cause)
    ]  # fmt: skip
    return element("div", groups, class_="lever-groups") if groups else None


def _memory(record: AttemptRecord) -> Iterator[Child]:
    stacks = terms.memory_bars(record)
    if stacks:
        scale = bars.scale_of(stacks)
        yield bars.hatch_definitions()
        yield [bars.bar_figure(bar, scale) for bar in stacks]
    else:
        yield element(
            "p", "No line of this log states a memory term, and no device reading was taken.", class_="absent"
        )
    compared = terms.comparisons(record)
    if compared:
        yield element("h3", "Planned against measured")
        head = ("term", _num("planned"), _num("measured"), _num("difference"))
        yield table(head, (_comparison(entry) for entry in compared), class_="numbers")
    if record.memory:
        yield element("h3", "Device memory as the driver showed it")
        yield _readings(record)


def _num(text: Child, tag: str = "th") -> Element:
    return element(tag, text, class_="num", scope="col" if tag == "th" else None)


def _comparison(entry: terms.Comparison) -> Element:
    planned, measured = float(entry.planned.value), float(entry.measured.value)
    difference = measured - planned
    if entry.planned.unit == "bytes":
        text = size(difference, max(entry.planned.precision, entry.measured.precision))
    else:
        text = f"{difference:,.10g}"
    sign = "+" if difference > 0 else ""
    cells = (value_text(entry.planned), value_text(entry.measured), f"{sign}{text}".replace("-", "−"))
    return element("tr", element("th", entry.name, scope="row"), [_num(cell, "td") for cell in cells])


def _readings(record: AttemptRecord) -> Element:
    idle = {
        device.device: device.used_bytes
        for reading in record.memory
        if reading.moment == "idle"
        for device in reading.devices
    }
    rows = []
    for reading in record.memory:
        for device in reading.devices:
            base = idle.get(device.device)
            above = NOT_STATED if base is None else size(device.used_bytes - base)
            cells = (size(device.used_bytes), size(device.free_bytes), size(device.total_bytes), above)
            rows.append(
                element(
                    "tr",
                    element("th", reading.moment, scope="row"),
                    element("td", device.device),
                    [_num(cell, "td") for cell in cells],
                    element("td", device.source),
                )
            )
    head = ("moment", "device", _num("used"), _num("free"), _num("total"), _num("above idle"), "source")
    return table(head, rows, class_="numbers")


def _time_pairs(record: AttemptRecord) -> Element:
    timings = record.timings
    return parts.definitions(
        [
            ("launch to ready", stated_duration(timings.boot_s)),
            ("waited for the lease", duration(timings.lease_wait_s)),
            ("waited for clean devices", duration(timings.clean_wait_s)),
            ("signal to verdict", stated_duration(timings.verdict_s)),
            ("teardown", stated_duration(timings.teardown_s)),
            ("memory back after", stated_duration(timings.release_s)),
        ]
    )


def _facts(ledger: BootLedger | None, shown: frozenset[int]) -> Child:
    if ledger is None or not (ledger.facts or ledger.states):
        return element("p", "No line of this log states a number.", class_="absent")
    rows: list[Element] = []
    for name, value in sorted(ledger.facts.items()):
        rows.append(_fact(name, value, shown))
        others = ledger.ranks.get(name, {})
        rows += [
            _fact("", other, shown, class_="other-rank") for rank, other in sorted(others.items()) if rank != value.rank
        ]
    rows += [
        element("tr", element("th", name, scope="row"), element("td", element("i", NOT_STATED), class_="num"),
                element("td", state, colspan=4), class_="absent")
        for name, state in sorted(ledger.states.items()) if name not in ledger.facts
    ]  # fmt: skip
    head = (
        "fact",
        _num("value"),
        element("th", "exactly", class_="num exact", scope="col"),
        "provenance",
        "rank",
        _num("line"),
    )
    return table(head, rows, class_="numbers facts")


def _fact(name: str, value: Value, shown: frozenset[int], class_: str | None = None) -> Element:
    return element(
        "tr",
        element("th", element("code", name) if name else None, scope="row"),
        element("td", value_text(value), class_="num" if not isinstance(value.value, str) else "num text"),
        element("td", exact_text(value), class_="num exact"),
        element("td", element("span", value.provenance, class_=f"kind k-{value.provenance}")),
        element("td", value.rank or "", class_="rank"),
        element("td", _line_link(value.evidence.line, shown), class_="num", title=value.evidence.text),
        class_=class_,
    )


def _command(record: AttemptRecord) -> Element | None:
    if not record.command and not record.environment:
        return None
    children: list[Child] = []
    if record.environment:
        children += [element("h3", "Environment added"), parts.code_block(_environment_lines(record))]
    if record.command:
        children += [element("h3", "Command"), parts.code_block(_command_lines(record.command))]
    return parts.section("What was started", children)


def _environment_lines(record: AttemptRecord) -> list[str]:
    return [f"{name}={shlex.quote(value)}" for name, value in sorted(record.environment.items())]


def _command_lines(argv: tuple[str, ...]) -> list[str]:
    """The command with each flag on a line of its own, still one command for a shell."""
    lines: list[str] = []
    for argument in argv:
        quoted = shlex.quote(argument)
        if lines and not argument.startswith("-"):
            lines[-1] += f" {quoted}"
        else:
            lines.append(quoted)
    return " \\\n    ".join(lines).split("\n")


def _record_pairs(record: AttemptRecord, path: Path) -> Element:
    engine = parts.engine_name(record.ledger)
    pairs: list[tuple[str, Child]] = [("verdict", marks.label(marks.mark_of(record.verdict, record.cause)))]
    pairs += parts.target_pairs(record.target, engine)
    pairs += parts.run_pairs(record.run)
    pairs.append(("started", moment(record.started)))
    status = NOT_STATED if record.exit_status is None else f"{record.exit_status} (proves nothing by itself)"
    pairs.append(("exit status", status))
    if record.warm is not None:
        pairs.append(("compile cache", "warm" if record.warm else "cold: this boot compiled"))
    if record.device_set is not None:
        pairs.append(("device set", record.device_set))
    if record.left_serving:
        pairs.append(("left serving", record.endpoint or "yes"))
    pairs += [("record", element("code", str(path))), ("log", element("code", record.log))]
    return parts.definitions(pairs)


def _notes(record: AttemptRecord) -> Child:
    if not record.notes:
        return None
    return [element("h3", "Notes"), element("ul", [element("li", note) for note in record.notes])]
