from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import pytest

from pytest_kvbudget.archive import RunArchive
from pytest_kvbudget.ledger.model import Cause, Lever
from pytest_kvbudget.records import AttemptRecord
from pytest_kvbudget.report.history import boots
from pytest_kvbudget.report.html import write_finding_page
from pytest_kvbudget.report.proof import proof
from pytest_kvbudget.search.model import Axis
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import GIB, MIB
from pytest_kvbudget.verdict import FindingKind, Phase, Verdict
from tests.report.building import AXIS, RUN, attempt, finding_record, target, write_attempt, write_ladder
from tests.report.reading import read_page, table_rows


def rungs_of_the_document() -> list[AttemptRecord]:
    """262,144 and 245,760 fail at graph capture, 241,664 passes; one boot in between gave no verdict."""
    hang = Cause(phase=Phase.GRAPH_CAPTURE, failure_class="deadline", sentence="No output for 3,600 s.")
    return [
        attempt(262_144, Verdict.FAIL),
        attempt(212_992),
        attempt(245_760, Verdict.FAIL),
        attempt(241_664, Verdict.UNKNOWN, cause=hang),
        attempt(241_664, number=2, rung="max_model_len=241664#2"),
        attempt(241_664, number=3, rung="max_model_len=241664#3"),
    ]


def test_headline_is_the_finding(tmp_path: Path) -> None:
    path = write_finding_page(write_ladder(tmp_path, rungs_of_the_document(), boots=5, retries=1, confirmations=1))
    assert path.name == "ladder.html"
    page = read_page(path)
    assert page.one("h1").text.startswith("The largest window that serves is 241,664 tokens;")
    assert [(entry.one("dt").text, entry.one("dd").text) for entry in page.one("dl", "figures").all("div")] == [
        ("largest that passes", "241,664 tokens"),
        ("fails at", "245,760 tokens"),
        ("boots to the proof", "5"),
        ("confirmations after it", "1"),
    ]
    assert not page.all("div", "simulated")


def test_every_boot_is_in_the_table_in_order_and_its_link_leads_to_its_page(tmp_path: Path) -> None:
    path = write_finding_page(write_ladder(tmp_path, rungs_of_the_document(), boots=5, retries=1, confirmations=1))
    page = read_page(path)
    rows = table_rows(page, "boots")
    assert [row[:4] for row in rows] == [
        ["1", "262,144", "FAIL", "graph capture OOM"],
        ["2", "212,992", "PASS", ""],
        ["3", "245,760", "FAIL", "graph capture OOM"],
        ["4", "241,664", "UNKNOWN", "deadline in graph capture"],
        ["5", "241,664", "PASS", ""],
        ["6", "241,664", "PASS", "(confirmation)"],
    ]
    assert rows[2][4] == "tried to allocate 76.00 MiBfree 0 Bshort by 76.00 MiB"
    assert [row[5] for row in rows[:2]] == ["≥ 2 min 39 s", "6 min 52 s"]
    links = [node.attributes["href"] for node in page.one("table", "boots").all("a")]
    assert len(set(links)) == 6
    for link, row in zip(links, rows, strict=True):
        rung = read_page(path.parent / unquote(link))
        assert rung.one("h1").one("span", "word").text == row[2]


def test_chart_shows_every_boot_where_it_stands(tmp_path: Path) -> None:
    path = write_finding_page(write_ladder(tmp_path, rungs_of_the_document(), boots=5, retries=1, confirmations=1))
    chart = read_page(path).one("svg", "ladder")
    boots = chart.all("g", "boot")
    assert [boot.one("tspan", "value").text for boot in boots] == [
        "262,144", "212,992", "245,760", "241,664", "241,664", "241,664",
    ]  # fmt: skip
    assert [boot.one("path").classes for boot in boots] == [
        {"mark", "m-fail"}, {"mark", "m-pass"}, {"mark", "m-fail"}, {"mark", "m-unknown", "hollow"}, {"mark", "m-pass"},
        {"mark", "m-pass"},
    ]  # fmt: skip
    across = [float(boot.all("svg")[0].attributes["x"].rstrip("%")) for boot in boots]
    assert across[0] > across[2] > across[3] == across[4] > across[1]
    assert len(chart.all("line", "rung-tick")) == len(AXIS) == 33
    assert len([boot for boot in boots if boot.all("circle", "halo")]) == 4
    assert [node.text for node in chart.all("text", "label")] == ["fails 245,760", "largest that passes 241,664"]


def test_the_bracket_shrinks_from_boot_to_boot(tmp_path: Path) -> None:
    path = write_finding_page(write_ladder(tmp_path, rungs_of_the_document(), boots=5, retries=1, confirmations=1))
    bands = read_page(path).one("svg", "ladder").all("rect", "bracket")
    widths = [float(band.attributes["width"].rstrip("%")) for band in bands]
    # the confirmation (boot 6) narrows nothing; an UNKNOWN (boot 4) did not narrow what boot 5 began with
    assert len(widths) == 5
    assert widths[0] == widths[1] > widths[2] > widths[3] == widths[4]


def test_a_simulated_finding_says_so_everywhere(tmp_path: Path) -> None:
    attempts = [attempt(241_664, simulated=True), attempt(245_760, Verdict.FAIL, simulated=True)]
    path = write_finding_page(write_ladder(tmp_path, attempts, simulated=True))
    for page in [read_page(path), *(read_page(rung) for rung in path.parent.rglob("rung.html"))]:
        assert page.one("head").one("title").text.startswith("[simulated] ")
        assert page.one("div", "simulated").text.startswith("SIMULATED")
        assert page.one("header").all("span", "badge-simulated")
    assert "no statement about hardware" in read_page(path).text


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        (FindingKind.PROVEN, {}, "An engine booted at 241,664 tokens and passed. At 245,760 tokens, the next rung"),
        (FindingKind.CEILING_REACHED, {"failed_at": None, "bounded_by": None}, "not that more would fail"),
        (FindingKind.EMPTY, {"value": None, "failed_at": 131_072}, "its lowest rung, 131,072 tokens, was booted and"),
        (FindingKind.NON_MONOTONE, {}, "there is no single boundary"),
        (FindingKind.UNDECIDED, {}, "no verdict is not a failure"),
        (FindingKind.ERROR, {}, "says nothing about where the boundary is"),
    ],
)
def test_proof_in_plain_words(tmp_path: Path, kind: FindingKind, changes: dict[str, Any], said: str) -> None:
    page = read_page(write_finding_page(write_ladder(tmp_path, [attempt(241_664)], kind=kind, **changes)))
    assert said in page.one("p", "prose").text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "What lies between them was not decided; no verdict is not a failure."),
        ({"failed_at": None}, "The largest rung that passed is 241,664 tokens. What lies above it was not decided;"),
        ({"value": None}, "No rung passed. The smallest that failed is 245,760 tokens. What lies below it was not"),
        ({"value": None, "failed_at": None}, "No rung passed. Nothing was decided; no verdict is not a failure."),
    ],
)
def test_what_was_not_decided_is_named_by_the_ends_that_there_are(changes: dict[str, Any], said: str) -> None:
    assert said in proof(finding_record((), kind=FindingKind.UNDECIDED, **changes))


def test_a_number_without_a_unit_goes_with_its_name() -> None:
    axis = Axis(name="max_num_seqs", floor=1, ceiling=16, quantum=1)
    said = proof(finding_record((), axis=axis, value=7, failed_at=8))
    assert said.startswith("An engine booted at max_num_seqs 7 and passed. At max_num_seqs 8, the next rung")


def test_neighbours_of_the_proof_are_counted_apart() -> None:
    assert "This took 4 boots, and 2 boots beside the proof." in proof(finding_record((), boots=4, neighbours=2))


def test_a_confirmation_that_was_taken_over_is_called_one() -> None:
    record = finding_record(("a", "b", "c", "d"), boots=0, reused=4)
    record.why = ("known", "known", "confirm", "verify")
    attempts = [
        attempt(241_664, run=EARLIER), attempt(245_760, Verdict.FAIL, run=EARLIER),
        attempt(241_664, run=EARLIER, number=2), attempt(237_568, run=EARLIER),
    ]  # fmt: skip
    taken = f"taken over from run {EARLIER.run}"
    assert [boot.remarks for boot in boots(record, attempts)] == [
        (taken,), (taken,), ("confirmation", taken), ("beside the proof", taken),
    ]  # fmt: skip


def test_a_gate_bound_is_not_called_memory(tmp_path: Path) -> None:
    gate = Cause(phase=Phase.READY, failure_class="gate", sentence="assert 3 > 4", by_gate=True)
    attempts = [attempt(241_664), attempt(245_760, Verdict.FAIL, cause=gate, message="The test refused it.")]
    page = read_page(write_finding_page(write_ladder(tmp_path, attempts, bounded_by=gate)))
    assert "not a statement about memory (assert 3 > 4)" in page.one("p", "prose").text
    assert table_rows(page, "boots")[1][2:5] == [
        "FAIL (gate)",
        "refused by the test",
        "KV cache 245,760 tokensfull windows 1.00×",
    ]
    assert page.one("svg", "ladder").all("path", "m-gate")


def test_a_lost_record_is_unknown_and_the_others_are_shown(tmp_path: Path) -> None:
    finding = write_ladder(tmp_path, [attempt(241_664), attempt(245_760, Verdict.FAIL)])
    next(finding.parent.glob("*245760*/attempt.json")).write_text("{", encoding="utf-8")
    page = read_page(write_finding_page(finding))
    assert [row[1] for row in table_rows(page, "boots")] == ["241,664"]
    assert "UNKNOWN the record max_model_len=245760/attempt.json cannot be read." in page.text


def test_an_axis_of_bytes_is_shown_as_sizes(tmp_path: Path) -> None:
    pools = {3 * GIB: Verdict.FAIL, 2 * GIB: Verdict.PASS}
    attempts = [
        attempt(200_704, verdict, rung=f"kv_cache_memory_bytes={pool}", shape=Shape(kv_cache_memory_bytes=pool))
        for pool, verdict in pools.items()
    ]
    axis = Axis(name="kv_cache_memory_bytes", floor=1 * GIB, ceiling=4 * GIB, quantum=512 * MIB)
    page = read_page(write_finding_page(write_ladder(tmp_path, attempts, axis=axis, value=2 * GIB, failed_at=3 * GIB)))
    assert [row[1] for row in table_rows(page, "boots")] == ["3.00 GiB", "2.00 GiB"]
    ticks = [node.text for node in page.one("svg", "ladder").all("text", "tick")]
    assert (ticks[0], ticks[-1]) == ("1.00 GiB", "4.00 GiB")


def test_a_page_can_be_rebuilt_in_another_place(tmp_path: Path) -> None:
    finding = write_ladder(tmp_path / "here", [attempt(241_664), attempt(245_760, Verdict.FAIL)])
    first = write_finding_page(finding).read_text(encoding="utf-8")
    moved = tmp_path / "there"
    (tmp_path / "here").rename(moved)
    again = write_finding_page(moved / finding.relative_to(tmp_path / "here")).read_text(encoding="utf-8")
    assert again == first.replace(str(tmp_path / "here"), str(moved))
    assert msgspec.json.decode((moved / finding.relative_to(tmp_path / "here")).read_bytes())["kind"] == "finding"


def test_devices_engine_and_what_gives_more_are_those_of_the_boots(tmp_path: Path) -> None:
    finding = write_ladder(tmp_path, [attempt(241_664), attempt(245_760, Verdict.FAIL)])
    page = read_page(write_finding_page(finding))
    pairs = {
        entry.one("dt").text: entry.one("dd").text for node in page.all("dl", "pairs") for entry in node.all("div")
    }
    assert (pairs["devices"], pairs["engine"]) == ("0, 1", "vLLM 0.29.1")
    assert page.one("p", "for-more").text == "For more: lower gpu_memory_utilization"


def test_an_interrupted_boot_is_said_to_be_one(tmp_path: Path) -> None:
    cut_short = attempt(241_664, Verdict.UNKNOWN, cause=None, message="interrupted: the run ended before", ledger=None)
    finding = write_ladder(tmp_path, [cut_short], kind=FindingKind.UNDECIDED)
    page = read_page(write_finding_page(finding))
    assert table_rows(page, "boots")[0][2:4] == ["UNKNOWN", "interrupted"]


@pytest.mark.parametrize("kind", FindingKind)
def test_every_kind_of_finding_has_a_page(tmp_path: Path, kind: FindingKind) -> None:
    page = read_page(write_finding_page(write_ladder(tmp_path, [attempt(241_664)], kind=kind)))
    assert page.one("p", "kicker").one("b").text


EARLIER = msgspec.structs.replace(RUN, run="20261004T221100Z-99aa11")
RAISED = (
    "quantum raised from 1,024 to 4,096: below 2,096, a KV block or an arena slot, the device itself is not monotone"
)


def resumed() -> list[AttemptRecord]:
    """Two boots of an interrupted run, then three of this one on two device sets; the neighbour is booted on both."""
    return [
        attempt(262_144, Verdict.FAIL, run=EARLIER, device_set="a", warm=True),
        attempt(212_992, run=EARLIER, device_set="a", warm=True),
        attempt(
            245_760, Verdict.FAIL, device_set="b", warm=False,
            target=msgspec.structs.replace(target(), devices=("2", "3")),
        ),
        attempt(241_664, device_set="a", warm=True),
        attempt(245_760, Verdict.FAIL, number=2, rung="max_model_len=245760#2", device_set="a", warm=True),
    ]  # fmt: skip


def test_what_was_taken_over_repeated_and_noted_is_said(tmp_path: Path) -> None:
    sentence = "max_model_len 241,664 passed and 245,760 failed for memory; proven with 3 boots, 1 of them repeated"
    path = write_finding_page(
        write_ladder(
            tmp_path, resumed(), boots=3, repeats=1, reused=2, sigma_bytes=12.0 * MIB, sigma_source="archive",
            deploy_value=239_616, notes=(RAISED,), sentence=f"{sentence}; {RAISED}",
        )
    )  # fmt: skip
    page = read_page(path)
    assert page.one("h1").text == sentence
    assert [node.text for node in page.one("ul", "notes").all("li")] == [f"Note: {RAISED}"]
    assert [row[3] for row in table_rows(page, "boots")] == [
        f"graph capture OOM (warm, devices 0, 1, taken over from run {EARLIER.run})",
        f"(warm, devices 0, 1, taken over from run {EARLIER.run})",
        "graph capture OOM (cold, devices 2, 3)",
        "(warm, devices 0, 1)",
        "graph capture OOM (warm, devices 0, 1)",
    ]
    proof = page.one("section", "proof").text
    assert "This took 3 boots, of which 1 repeated one with a verdict" in proof
    assert "beside 2 finished boots taken over." in proof
    assert "Deploy at most 239,616 tokens: three sigma below the largest that passed" in proof
    assert "one sigma of what the same boot takes is 12.00 MiB, from repeated boots in the archive" in proof
    figures = {entry.one("dt").text: entry.one("dd").text for entry in page.one("dl", "figures").all("div")}
    assert (figures["deploy at most"], figures["boots taken over"]) == ("239,616 tokens", "2")
    assert "devices 0, 1: a; devices 2, 3: b" in page.text
    assert page.one("svg", "ladder").all("g", "boot")[0].one("tspan", "why").text.endswith("(taken over)")


def test_a_boot_that_another_ladder_of_the_run_made_is_marked(tmp_path: Path) -> None:
    before = attempt(212_992, started="2026-10-05T01:00:00.000+00:00")
    finding = write_ladder(tmp_path, [before, attempt(241_664), attempt(245_760, Verdict.FAIL)], boots=2, reused=1)
    rows = table_rows(read_page(write_finding_page(finding)), "boots")
    assert [row[3] for row in rows] == ["(taken over from an earlier ladder)", "", "graph capture OOM"]


def test_one_device_set_needs_no_number(tmp_path: Path) -> None:
    finding = write_ladder(tmp_path, [attempt(241_664, device_set="a"), attempt(245_760, Verdict.FAIL, device_set="a")])
    page = read_page(write_finding_page(finding))
    assert "device sets" not in page.text
    rung = read_page(next(finding.parent.rglob("rung.html")))
    pairs = {
        entry.one("dt").text: entry.one("dd").text for node in rung.all("dl", "pairs") for entry in node.all("div")
    }
    assert pairs["device set"] == "a"
    assert "compile cache" not in pairs


def test_a_flaky_band_is_shown_with_the_ends_that_held(tmp_path: Path) -> None:
    attempts = [attempt(237_568), attempt(241_664), attempt(241_664, Verdict.FAIL), attempt(249_856, Verdict.FAIL)]
    page = read_page(
        write_finding_page(
            write_ladder(
                tmp_path, attempts, kind=FindingKind.FLAKY, value=237_568, failed_at=241_664, steady_value=237_568,
                refused_at=249_856,
            )
        )
    )  # fmt: skip
    figures = {entry.one("dt").text: entry.one("dd").text for entry in page.one("dl", "figures").all("div")}
    assert figures["passed three of three"] == "237,568 tokens"
    assert figures["failed two of two"] == "249,856 tokens"
    assert "237,568 tokens passed three of three, and 249,856 tokens failed two of two" in page.one("p", "prose").text


def test_where_nothing_passes_something_else_is_to_be_turned(tmp_path: Path) -> None:
    lever = Lever("max_num_seqs", "lower", "helps", "each sequence needs a state block")
    finding = write_ladder(
        tmp_path, [attempt(131_072, Verdict.FAIL)], kind=FindingKind.EMPTY, value=None, failed_at=131_072, lever=lever
    )
    page = read_page(write_finding_page(finding))
    assert page.one("p", "for-more").text == "Instead: lower max_num_seqs: each sequence needs a state block"


def test_a_ladder_over_a_fraction_under_other_axes(tmp_path: Path) -> None:
    attempts = [
        attempt(131_072, verdict, rung=f"max_num_seqs=3,gpu_memory_utilization={share:g}", shape=Shape(max_num_seqs=3))
        for share, verdict in ((0.97, Verdict.FAIL), (0.9, Verdict.PASS), (0.96, Verdict.PASS))
    ]
    axis = Axis(name="gpu_memory_utilization", floor=9_000, ceiling=9_900, quantum=100, scale=10_000)
    page = read_page(
        write_finding_page(write_ladder(tmp_path, attempts, axis=axis, value=9_600, failed_at=9_700, boots=3))
    )
    assert [row[1] for row in table_rows(page, "boots")] == ["0.97", "0.90", "0.96"]
    ticks = [node.text for node in page.one("svg", "ladder").all("text", "tick")]
    assert (ticks[0], ticks[-1]) == ("0.90", "0.99")
    assert (
        "booted at gpu_memory_utilization 0.96 and passed. At gpu_memory_utilization 0.97, the next"
        in page.one("p", "prose").text
    )
    assert "In steps of 0.01 there is no rung between the two" in page.one("p", "prose").text
    assert "from 0.99 down to 0.90 in steps of 0.01: 10 rungs" in page.text


def test_the_findings_of_stacked_ladders_lie_beside_each_other(tmp_path: Path) -> None:
    records = [attempt(241_664, rung="max_num_seqs=3,max_model_len=241664"), attempt(245_760, Verdict.FAIL)]
    paths = [write_attempt(tmp_path, record) for record in records]
    archive = RunArchive(tmp_path, RUN)
    for stage, booted in (("max_num_seqs=3", paths), ("max_num_seqs=4", paths[1:])):
        finding = archive.write_finding(finding_record(()), attempts=booted, stage=stage)
        write_finding_page(finding)
    links = [
        [node.attributes["href"] for node in read_page(path.with_name("rung.html")).all("a")
         if node.text == "all rungs of this ladder"]
        for path in paths
    ]  # fmt: skip
    one, both = "../max_num_seqs=3/ladder.html", ["../max_num_seqs=3/ladder.html", "../max_num_seqs=4/ladder.html"]
    assert links == [[one], both]
