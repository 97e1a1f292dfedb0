"""The page of a finding: what a ladder established, its proof, and every boot on one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from urllib.parse import quote

from pytest_kvbudget.records import AttemptRecord, FindingRecord
from pytest_kvbudget.report import levers, marks, parts
from pytest_kvbudget.report.deciding import Figure, figures
from pytest_kvbudget.report.elements import Element, document, element, table
from pytest_kvbudget.report.history import Boot, boots, pool_bytes, took, why
from pytest_kvbudget.report.ladder_chart import ladder_chart
from pytest_kvbudget.report.numbers import (
    NOT_STATED,
    amount,
    moment,
    plain_amount,
    plural,
    shape_fields,
    size,
)
from pytest_kvbudget.report.proof import proof
from pytest_kvbudget.verdict import FindingKind, Verdict

RUNG_PAGE = "rung.html"

_KIND_MARK = {
    FindingKind.PROVEN: marks.PASS,
    FindingKind.CEILING_REACHED: marks.PASS,
    FindingKind.FLOOR_REACHED: marks.PASS,
    FindingKind.EMPTY: marks.FAIL,
    FindingKind.EMPTY_WINDOW: marks.FAIL,
    FindingKind.NON_MONOTONE: marks.UNKNOWN,
    FindingKind.FLAKY: marks.UNKNOWN,
    FindingKind.UNDECIDED: marks.UNKNOWN,
    FindingKind.ERROR: marks.ERROR,
}
_KIND_WORD = {
    FindingKind.PROVEN: "Proven",
    FindingKind.CEILING_REACHED: "Proven up to the ceiling",
    FindingKind.FLOOR_REACHED: "Proven down to the floor",
    FindingKind.EMPTY: "Nothing passes",
    FindingKind.EMPTY_WINDOW: "Nothing passes",
    FindingKind.NON_MONOTONE: "No single boundary",
    FindingKind.FLAKY: "Flaky",
    FindingKind.UNDECIDED: "Not decided",
    FindingKind.ERROR: "Stopped by an error",
}


def finding_page(record: FindingRecord, attempts: Mapping[str, AttemptRecord | None], where: str) -> str:
    """The page as text.

    Args:
        record: the finding.
        attempts: each path of ``record.attempts`` to its record, ``None`` where it could not be read.
        where: path of the finding's file.
    """
    readable = [(path, attempt) for path in record.attempts if (attempt := attempts.get(path)) is not None]
    history = boots([attempt for _, attempt in readable], record.finding.axis, record.finding.boots)
    links = {number: rung_link(path) for number, (path, _) in enumerate(readable, 1)}
    lost = [path for path in record.attempts if attempts.get(path) is None]
    prefix = "[simulated] " if record.target.simulated else ""
    return document(
        f"{prefix}{_KIND_WORD[record.finding.kind]}: {record.test}",
        _header(record, [attempt for _, attempt in readable]),
        parts.section("Boots on the axis", ladder_chart(record.finding, history, links)),
        parts.section("Boots in order", _boots_table(record, history, links), [_lost(path) for path in lost]),
        parts.section(
            "Proof",
            element("p", proof(record.finding, simulated=record.target.simulated), class_="prose"),
            _for_more(record),
        ),
        _origin(record, [attempt for _, attempt in readable], where),
        band=parts.simulated_band(record.target),
    )


def rung_link(attempt_path: str) -> str:
    """The page beside an attempt's record, as a relative link."""
    return quote(str(PurePosixPath(attempt_path).with_name(RUNG_PAGE)), safe="/=")


def _header(record: FindingRecord, attempts: Sequence[AttemptRecord]) -> Element:
    finding = record.finding
    by_gate = finding.bounded_by is not None and finding.bounded_by.by_gate
    mark = marks.GATE if finding.kind is FindingKind.EMPTY and by_gate else _KIND_MARK[finding.kind]
    numbers = [Figure("boots to the proof" if finding.proven else "boots", f"{finding.boots:,}")]
    if finding.failed_at is not None:
        numbers.insert(0, Figure("fails at", amount(finding.axis.name, finding.failed_at)))
    if finding.value is not None:
        numbers.insert(0, Figure("largest that passes", amount(finding.axis.name, finding.value)))
    pool = pool_bytes(record, attempts)
    if pool is not None:
        numbers.append(Figure("pool per rank, scaled", size(pool)))
    if finding.confirmations:
        numbers.append(Figure("confirmations after it", f"{finding.confirmations:,}"))
    return element(
        "header",
        element("p", f"{record.target.name} / {record.test}", class_="crumbs"),
        element(
            "p",
            element("span", marks.symbol(mark), element("b", _KIND_WORD[finding.kind]), class_=f"verdict v-{mark.key}"),
            parts.simulated_badge(record.target),
            class_="kicker",
        ),
        element("h1", finding.sentence, class_="sentence"),
        parts.figures_list(numbers),
    )


def _boots_table(record: FindingRecord, history: Sequence[Boot], links: Mapping[int, str]) -> Element:
    axis = record.finding.axis.name
    head = ("boot", element("th", axis, class_="num", scope="col"), "verdict", "why", "deciding numbers",
            element("th", "boot time", class_="num", scope="col"), "page")  # fmt: skip
    return table(head, (_boot_row(boot, record, axis, links[boot.number]) for boot in history), class_="numbers boots")


def _boot_row(boot: Boot, record: FindingRecord, axis: str, link: str) -> Element:
    cause = boot.record.cause
    said = why(boot.record)
    if boot.confirmation:
        said = f"{said} (confirmation)".strip()
    numbers = [
        element("span", element("span", figure.name, class_="key"), f" {figure.text}", class_="pair")
        for figure in figures(boot.record)
    ]
    winner = boot.value == record.finding.value and boot.record.verdict in {Verdict.PASS, Verdict.MARGINAL}
    return element(
        "tr",
        element("td", str(boot.number), class_="num"),
        element("th", NOT_STATED if boot.value is None else plain_amount(axis, boot.value), scope="row", class_="num"),
        element("td", marks.label(boot.mark)),
        element("td", said, title=None if cause is None else cause.sentence),
        element("td", numbers or NOT_STATED, class_="deciding"),
        element("td", took(boot.record) or NOT_STATED, class_="num"),
        element("td", element("a", "rung page", href=link)),
        class_="winner" if winner else None,
    )


def _for_more(record: FindingRecord) -> Element | None:
    turns = levers.for_more(record.finding)
    return element("p", element("b", "For more: "), "; ".join(turns), class_="for-more") if turns else None


def _lost(path: str) -> Element:
    return element(
        "p", marks.label(marks.UNKNOWN), " the record ", element("code", path), " cannot be read.", class_="absent"
    )


def _origin(record: FindingRecord, attempts: Sequence[AttemptRecord], where: str) -> Element:
    engines = {name for attempt in attempts if (name := parts.engine_name(attempt.ledger))}
    devices = sorted({device for attempt in attempts for device in attempt.target.devices})
    axis = record.finding.axis
    ladder = (
        f"{axis.name} from {amount(axis.name, axis.ceiling)} down to {amount(axis.name, axis.floor)} "
        f"in steps of {plain_amount(axis.name, axis.quantum)}: {plural(len(axis), 'rung')}"
    )
    shape = ", ".join(f"{name} {text}" for name, text in shape_fields(record.shape) if name != axis.name)
    pairs = parts.target_pairs(record.target, ", ".join(sorted(engines)) or None, devices)
    pairs += [("shape", shape or NOT_STATED), ("ladder", ladder)]
    windows = plural(record.windows, "full window")
    pairs.append(("search", f"strategy {record.strategy}, {record.pool} pool, {windows} promised"))
    pairs += parts.run_pairs(record.run)
    pairs += [("time", f"{moment(record.started)} to {moment(record.finished)}"), ("record", element("code", where))]
    return parts.section("Target and run", parts.definitions(pairs))
