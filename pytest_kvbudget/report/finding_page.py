"""The page of a finding: what a ladder or a sweep established, its proof, and every boot on one axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from urllib.parse import quote

from pytest_kvbudget.archive import AnyFinding
from pytest_kvbudget.records import AttemptRecord, FindingRecord, SweepRecord
from pytest_kvbudget.report import belongs, certainty, levers, marks, parts
from pytest_kvbudget.report.boots_chart import boots_chart
from pytest_kvbudget.report.deciding import Figure, figures
from pytest_kvbudget.report.elements import Child, Element, document, element, table
from pytest_kvbudget.report.headline import headline, kind_mark, kind_word
from pytest_kvbudget.report.history import Boot, boots, pool_bytes, set_words, took, why
from pytest_kvbudget.report.numbers import (
    NOT_STATED,
    moment,
    plural,
    shape_fields,
    size,
)
from pytest_kvbudget.report.proof import proof
from pytest_kvbudget.report.searched import RUNG_PAGE, edges_of, track_of
from pytest_kvbudget.report.sweep_proof import opposite_turns
from pytest_kvbudget.verdict import Verdict


def finding_page(record: AnyFinding, attempts: Mapping[str, AttemptRecord | None], where: str) -> str:
    """The page as text.

    Args:
        record: the finding.
        attempts: each path of ``record.attempts`` to its record, ``None`` where it could not be read.
        where: path of the finding's file.
    """
    readable = [(path, attempt) for path in record.attempts if (attempt := attempts.get(path)) is not None]
    booted = [attempt for _, attempt in readable]
    history = boots(record, booted)
    links = {number: rung_link(path) for number, (path, _) in enumerate(readable, 1)}
    lost = [path for path in record.attempts if attempts.get(path) is None]
    prefix = "[simulated] " if record.target.simulated else ""
    return document(
        f"{prefix}{kind_word(record.finding)}: {record.test}",
        _header(record, booted),
        parts.section("Boots on the axis", boots_chart(record, history, links)),
        parts.section("Boots in order", _boots_table(record, history, links), [_lost(path) for path in lost]),
        parts.section("Proof", _proof(record), class_="proof"),
        _belongs(record),
        _origin(record, booted, where),
        band=parts.simulated_band(record.target),
    )


def rung_link(attempt_path: str) -> str:
    """The page beside an attempt's record, as a relative link."""
    return quote(str(PurePosixPath(attempt_path).with_name(RUNG_PAGE)), safe="/=")


def _header(record: AnyFinding, attempts: Sequence[AttemptRecord]) -> Element:
    finding, mark = record.finding, kind_mark(record.finding)
    word = element("span", marks.symbol(mark), element("b", kind_word(finding)), class_=f"verdict v-{mark.key}")
    return element(
        "header",
        element("p", f"{record.target.name} / {record.test}", class_="crumbs"),
        element("p", word, parts.simulated_badge(record.target), class_="kicker"),
        element("h1", headline(finding), class_="sentence"),
        parts.figures_list(_figures(record, attempts)),
    )


def _figures(record: AnyFinding, attempts: Sequence[AttemptRecord]) -> Iterator[Figure]:
    finding, track = record.finding, track_of(record)
    for edge in edges_of(record):
        yield Figure("fails at" if edge.words == "fails" else edge.words, track.amount(edge.value))
    deploy, pool = certainty.deploy(record), pool_bytes(record, attempts)
    if deploy is not None:
        yield Figure(f"deploy {deploy.bound}".rstrip(), deploy.value)
    if pool is not None:
        yield Figure("pool per rank, scaled", size(pool))
    yield Figure("boots to the proof" if finding.proven else "boots", f"{finding.boots:,}")
    if finding.reused:
        yield Figure("boots taken over", f"{finding.reused:,}")
    if finding.confirmations:
        yield Figure("confirmations after it", f"{finding.confirmations:,}")


def _boots_table(record: AnyFinding, history: Sequence[Boot], links: Mapping[int, str]) -> Element:
    head = (
        "boot",
        element("th", track_of(record).name, class_="num", scope="col"),
        "verdict",
        "why",
        "deciding numbers",
        element("th", "boot time", class_="num", scope="col"),
        "page",
    )
    return table(head, (_boot_row(boot, record, links[boot.number]) for boot in history), class_="numbers boots")


def _boot_row(boot: Boot, record: AnyFinding, link: str) -> Element:
    cause = boot.record.cause
    said = why(boot.record)
    if boot.remarks:
        said = f"{said} ({', '.join(boot.remarks)})".strip()
    numbers = [
        element("span", element("span", figure.name, class_="key"), f" {figure.text}", class_="pair")
        for figure in figures(boot.record)
    ]
    winner = boot.value == record.finding.value and boot.record.verdict in {Verdict.PASS, Verdict.MARGINAL}
    return element(
        "tr",
        element("td", str(boot.number), class_="num"),
        element(
            "th", NOT_STATED if boot.value is None else track_of(record).show(boot.value), scope="row", class_="num"
        ),
        element("td", marks.label(boot.mark)),
        element("td", said, title=None if cause is None else cause.sentence),
        element("td", numbers or NOT_STATED, class_="deciding"),
        element("td", took(boot.record) or NOT_STATED, class_="num"),
        element("td", element("a", "boot page" if isinstance(record, SweepRecord) else "rung page", href=link)),
        class_="winner" if winner else None,
    )


def _proof(record: AnyFinding) -> Iterator[Child]:
    finding = record.finding
    yield element("p", proof(record), class_="prose")
    if isinstance(record, SweepRecord):
        yield element("p", element("b", "Opposite turns: "), opposite_turns(record), class_="turns")
    turns = levers.for_more(record)
    if finding.lever is not None:
        yield element("p", element("b", "Instead: "), levers.with_why(finding.lever), class_="for-more")
    elif turns:
        yield element("p", element("b", f"For {track_of(record).wanted}: "), "; ".join(turns), class_="for-more")
    deploy = certainty.deploy(record)
    noise = certainty.noise(record, "one sigma of what the same boot takes")
    if deploy is not None:
        yield element("p", element("b", f"Deploy {deploy.text}: "), deploy.why, ".", class_="certainty")
    if noise is not None:
        yield element("p", element("b", "Noise: "), f"{noise}.", class_="certainty")
    if finding.notes:
        notes = [element("li", element("b", "Note: "), note) for note in finding.notes]
        yield element("ul", notes, class_="notes")


def _belongs(record: AnyFinding) -> Element | None:
    if not isinstance(record, SweepRecord):
        return None
    key = parts.definitions(belongs.key_pairs(record.finding.key))
    return parts.section("What it belongs to", element("p", belongs.SENTENCE, class_="prose"), key, class_="belongs")


def _lost(path: str) -> Element:
    return element(
        "p", marks.label(marks.UNKNOWN), " the record ", element("code", path), " cannot be read.", class_="absent"
    )


def _origin(record: AnyFinding, attempts: Sequence[AttemptRecord], where: str) -> Element:
    engines = {name for attempt in attempts if (name := parts.engine_name(attempt.ledger))}
    devices = sorted({device for attempt in attempts for device in attempt.target.devices})
    name = track_of(record).name
    shape = ", ".join(f"{field} {text}" for field, text in shape_fields(record.shape) if field != name)
    pairs = parts.target_pairs(record.target, ", ".join(sorted(engines)) or None, devices)
    sets = set_words(attempts)
    if sets:
        pairs.append(("device sets", "; ".join(sets)))
    pairs += [("shape", shape or NOT_STATED), _searched(record)]
    pool = f", {record.pool} pool" if isinstance(record, FindingRecord) else ""
    windows = plural(record.windows, "full window")
    pairs.append(("search", f"strategy {record.strategy}{pool}, {windows} promised"))
    pairs += parts.run_pairs(record.run)
    pairs += [("time", f"{moment(record.started)} to {moment(record.finished)}"), ("record", element("code", where))]
    return parts.section("Target and run", parts.definitions(pairs))


def _searched(record: AnyFinding) -> tuple[str, Child]:
    track = track_of(record)
    low, high, step = track.amount(track.low), track.amount(track.high), track.show(track.step)
    if isinstance(record, SweepRecord):
        return "sweep", f"{track.name} from {low} to {high}; steps of {step} where the proof is"
    return "ladder", f"{track.name} from {high} down to {low} in steps of {step}: {plural(track.rungs, 'rung')}"
