"""The page and the lines of a headroom sweep, for every way in which one can end."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import pytest

from pytest_kvbudget.archive import read_attempt, read_finding
from pytest_kvbudget.cli import main
from pytest_kvbudget.ledger.model import Cause
from pytest_kvbudget.records import SweepRecord
from pytest_kvbudget.report.html import write_finding_page
from pytest_kvbudget.report.proof import proof
from pytest_kvbudget.report.text import attempt_lines, finding_lines
from pytest_kvbudget.search.knobs import KNOBS
from pytest_kvbudget.search.model import SweepFinding, SweepKey
from pytest_kvbudget.search.sweep import Sweep
from pytest_kvbudget.units import GIB, MIB
from pytest_kvbudget.verdict import FindingKind, Phase, Verdict
from tests.report.building import RUN
from tests.report.reading import Node, read_page, table_rows
from tests.report.sweeping import (
    ALLOCATION,
    HEADROOM,
    KEY,
    MINIMUM,
    Device,
    changed,
    device,
    sweep_attempt,
    sweep_record,
    swept,
    write_sweep,
)

UTILIZATION = KNOBS["gpu_memory_utilization"]
POOL = KNOBS["kv_cache_memory_bytes"]


def sweep(**changes: Any) -> Sweep:
    """From 0 to 12 GiB in steps of 1 GiB, from 4 GiB on: the Neuron document's procedure."""
    return Sweep(HEADROOM, **{"lowest": 0, "highest": 12 * GIB, "start": 4 * GIB, "key": KEY, **changes})


def paths(root: Path, search: Sweep, boots: Device, **finding: Any) -> tuple[Path, Path]:
    """Records of a sweep and its page."""
    found, attempts = swept(search, boots)
    path = write_sweep(root, changed(found, **finding), attempts)
    return path, write_finding_page(path)


def page_of(root: Path, search: Sweep, boots: Device, **finding: Any) -> Node:
    return read_page(paths(root, search, boots, **finding)[1])


def lines_of(search: Sweep, boots: Device, **finding: Any) -> list[str]:
    found, attempts = swept(search, boots)
    return finding_lines(sweep_record(changed(found, **finding)), attempts)


def figures(page: Node) -> dict[str, str]:
    return {entry.one("dt").text: entry.one("dd").text for entry in page.one("dl", "figures").all("div")}


def both_edges() -> Sweep:
    return sweep(start=8 * GIB)


BOTH = device(3.2 * GIB, 7.5 * GIB)


def test_headline_and_figures_name_both_edges(tmp_path: Path) -> None:
    path, written = paths(tmp_path, both_edges(), BOTH)
    assert written == path.with_name("sweep.html")
    page = read_page(written)
    assert page.one("h1").text.startswith("reserved_headroom 4.00 GiB passed and 3.00 GiB failed for allocation")
    assert page.one("p", "kicker").text == "Proven"
    assert figures(page) == {
        "smallest that passes": "4.00 GiB",
        "fails for allocation": "3.00 GiB",
        "fails for too little KV cache": "8.00 GiB",
        "boots to the proof": "4",
        "confirmations after it": "1",
    }


def test_each_boot_tells_which_way_it_pushes_and_leads_to_its_page(tmp_path: Path) -> None:
    _, written = paths(tmp_path, both_edges(), BOTH)
    page = read_page(written)
    rows = table_rows(page, "boots")
    assert [row[:4] for row in rows] == [
        ["1", "8.00 GiB", "FAIL (too little KV)", "min KV budget in KV check"],
        ["2", "4.00 GiB", "PASS", ""],
        ["3", "2.00 GiB", "FAIL (allocation)", "compile HBM exceeded"],
        ["4", "3.00 GiB", "FAIL (allocation)", "compile HBM exceeded"],
        ["5", "4.00 GiB", "PASS", "(confirmation)"],
    ]
    for link in page.one("table", "boots").all("a"):
        boot = read_page(written.parent / unquote(link.attributes["href"]))
        assert [node.text for node in boot.all("a") if node.attributes["href"] == "../sweep.html"] == [
            "all boots of this sweep"
        ]


def test_chart_shows_boots_edges_and_what_passes_between(tmp_path: Path) -> None:
    chart = page_of(tmp_path, both_edges(), BOTH).one("svg", "ladder")
    assert [boot.one("path").classes for boot in chart.all("g", "boot")] == [
        {"mark", "m-short"}, {"mark", "m-pass"}, {"mark", "m-fail"}, {"mark", "m-fail"}, {"mark", "m-pass"},
    ]  # fmt: skip
    assert {node.text for node in chart.all("text", "label")} == {
        "allocation fails 3.00 GiB", "smallest that passes 4.00 GiB", "too little KV 8.00 GiB",
    }  # fmt: skip
    zones = chart.all("line", "zone")
    assert [zone.classes - {"zone"} for zone in zones] == [{"fails"}, {"passes"}, {"short"}]
    ends = [float(zone.attributes[name].rstrip("%")) for zone in zones for name in ("x1", "x2")]
    assert ends == sorted(ends)
    # what follows without a boot: less than 2 GiB fails, more than 8 GiB fails; nothing between 4 and 8 GiB
    assert [line.classes - {"follows"} for line in chart.all("line", "follows")] == [{"fails"}, {"short"}]


def test_the_bracket_shrinks_towards_the_goal(tmp_path: Path) -> None:
    bands = page_of(tmp_path, both_edges(), BOTH).one("svg", "ladder").all("rect", "bracket")
    spans = [(float(band.attributes["x"].rstrip("%")), float(band.attributes["width"].rstrip("%"))) for band in bands]
    # 8 GiB failed for too little KV cache: the edge of the allocations lies below; then 4 passes, 2 and 3 fail
    widths = [width for _, width in spans]
    assert widths[0] == pytest.approx(1.5 * widths[1], rel=1e-3)
    assert widths[1] == pytest.approx(2 * widths[2], rel=1e-3)
    assert spans[0][0] == spans[1][0] == spans[2][0] < spans[3][0]
    assert len(spans) == 4


def test_contradicting_boots_have_no_window(tmp_path: Path) -> None:
    causes = {4 * GIB: None, 3 * GIB: MINIMUM}
    page = page_of(tmp_path, sweep(), lambda value: causes.get(value, ALLOCATION))
    assert page.one("p", "kicker").text == "No single boundary"
    assert not page.one("svg", "ladder").all("line", "zone")
    assert "one with less room on that side passed" in page.one("section", "proof").text


LNC = Cause(phase=Phase.MODEL_LOAD, failure_class="lnc_mismatch", sentence="Compiled for another LNC.")
UP = "A failure for allocation asks to raise reserved_headroom, one for too little KV cache asks for the opposite"


@pytest.mark.parametrize(
    ("search", "boots", "kind", "said"),
    [
        (both_edges, BOTH, FindingKind.PROVEN, [
            "An engine booted at 4.00 GiB and passed. At 3.00 GiB, one step down, it failed for allocation in compile",
            "In steps of 1.00 GiB no value lies between the two", "Both were booted; neither was calculated.",
            "The other edge was seen too: 8.00 GiB failed for too little KV cache in KV check", UP,
        ]),
        (sweep, device(3.2 * GIB, 7.5 * GIB), FindingKind.PROVEN, [
            "No boot failed for too little KV cache: where that edge lies was not asked.",
        ]),
        (sweep, device(-1, 9 * GIB), FindingKind.FLOOR_REACHED, [
            "booted at 0.00 GiB and passed, and the sweep ends there", "not that a smaller value would fail",
        ]),
        (sweep, device(31 * GIB, 99 * GIB), FindingKind.EMPTY, [
            "12.00 GiB, the value of the sweep with most room on that side, was booted and failed for allocation", UP,
            "Instead: raise tensor_parallel_size",
        ]),
        (sweep, device(-9 * GIB, -1), FindingKind.EMPTY, [
            "0.00 GiB, the value of the sweep with most room on that side, was booted and failed for too little KV",
        ]),
        (sweep, device(4.2 * GIB, 4.1 * GIB), FindingKind.EMPTY_WINDOW, [
            "4.00 GiB failed for allocation", "5.00 GiB, one step further, failed for too little KV cache",
            "Each failure asks for the value that the other one refused", UP, "Instead: raise tensor_parallel_size",
        ]),
        (lambda: sweep(max_boots=2), device(8.2 * GIB, 9.5 * GIB), FindingKind.UNDECIDED, [
            "The proof is incomplete. 9.00 GiB passed. 4.00 GiB failed for allocation.", "No verdict is not a failure.",
        ]),
        (sweep, lambda value: LNC if value < 4 * GIB else None, FindingKind.UNDECIDED, [
            "4.00 GiB passed. 2.00 GiB failed. What lies between",
        ]),
    ],
)  # fmt: skip
def test_proof_in_plain_words(tmp_path: Path, search: Any, boots: Device, kind: FindingKind, said: list[str]) -> None:
    found, attempts = swept(search(), boots)
    assert found.kind is kind
    page = read_page(write_finding_page(write_sweep(tmp_path, found, attempts)))
    proof = page.one("section", "proof").text
    for words in said:
        assert words in proof
    assert page.one("p", "kicker").one("b").text


@pytest.mark.parametrize("kind", FindingKind)
def test_every_kind_of_finding_has_a_page_and_lines(tmp_path: Path, kind: FindingKind) -> None:
    found, attempts = swept(sweep(), device(3.2 * GIB, 7.5 * GIB))
    path = write_sweep(tmp_path, changed(found, kind=kind), attempts)
    page = read_page(write_finding_page(path))
    assert page.one("p", "kicker").one("b").text
    assert "asks for the opposite" in page.one("section", "proof").text
    assert any(line.startswith("  proof ") for line in finding_lines(sweep_record(changed(found, kind=kind)), attempts))


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ({"failed_at": None}, "4.00 GiB passed. What lies below 4.00 GiB was not decided."),
        ({"value": None}, "No value passed. 3.00 GiB failed. What lies above it was not decided."),
        ({"value": None, "failed_at": None, "short_at": 8 * GIB, "short_by": MINIMUM},
         "No value passed. 8.00 GiB failed for too little KV cache. What lies below 8.00 GiB was not decided."),
        ({"value": None, "failed_at": None}, "No value passed. Nothing was decided."),
    ],
)  # fmt: skip
def test_what_was_not_decided_is_named_by_the_ends_that_there_are(ends: dict[str, Any], said: str) -> None:
    found, _ = swept(sweep(), device(3.2 * GIB, 7.5 * GIB))
    open_end = changed(found, kind=FindingKind.UNDECIDED, bounded_by=None, short_at=None, short_by=None)
    assert said in proof(sweep_record(changed(open_end, **ends)))


def test_failure_classes_of_the_test_have_the_side_that_the_finding_gives_them(tmp_path: Path) -> None:
    own = msgspec.structs.replace(ALLOCATION, failure_class="our_scratch_oom", phase=Phase.WARMUP)
    search = sweep(classes={"our_scratch_oom": "allocation"})
    page = page_of(tmp_path, search, lambda value: own if value < 3.2 * GIB else None)
    verdicts = {row[2] for row in table_rows(page, "boots")}
    assert verdicts == {"PASS", "FAIL (allocation)"}


def test_an_error_is_no_statement_about_an_edge(tmp_path: Path) -> None:
    port = Cause(phase=Phase.ARGUMENT, failure_class="port_in_use", sentence="Port 8000 is taken.")
    attempts = [sweep_attempt(HEADROOM, 4 * GIB, port, verdict=Verdict.ERROR)]
    found = SweepFinding(
        kind=FindingKind.ERROR, knob="reserved_headroom", lowest=0, highest=12 * GIB, step=GIB, value=None, boots=1,
        sentence="error: reserved_headroom 4.00 GiB ended for another reason than memory: Port 8000 is taken.; 1 boot",
    )  # fmt: skip
    page = read_page(write_finding_page(write_sweep(tmp_path, found, attempts)))
    assert table_rows(page, "boots")[0][2] == "ERROR"
    assert "says nothing about where the edge is. No value passed." in page.one("section", "proof").text


def test_a_fraction_goes_up_and_its_turns_are_the_other_way_round() -> None:
    search = Sweep(UTILIZATION, lowest=8_000, highest=9_900, start=9_700)
    lines = lines_of(search, device(8_300, 9_450, UTILIZATION))
    rows = [line.split()[1] for line in lines if line[:4].strip().isdigit()]
    assert rows[0] == "0.97"
    assert {"0.94", "0.95"} <= set(rows)
    text = " ".join(" ".join(lines).split())
    assert "At 0.95, one step up, it failed for allocation" in text
    assert "so 0.94 is the largest that passes" in text
    assert "A failure for allocation asks to lower gpu_memory_utilization" in text
    assert "  for more" in "\n".join(lines)


def test_a_pool_ends_at_too_little_kv_cache(tmp_path: Path) -> None:
    search = Sweep(POOL, lowest=GIB, highest=4 * GIB, step=64 * MIB)
    page = page_of(tmp_path, search, device(1.85 * GIB, 3 * GIB, POOL))
    assert figures(page)["smallest that passes"] == "1,920.00 MiB"
    assert figures(page)["fails for too little KV cache"] == "1,856.00 MiB"
    assert "A failure for too little KV cache asks to raise kv_cache_memory_bytes" in page.one("section", "proof").text


def test_the_result_belongs_to_its_key(tmp_path: Path) -> None:
    page = page_of(tmp_path, sweep(), BOTH)
    section = page.one("section", "belongs")
    assert {entry.one("dt").text: entry.one("dd").text for entry in section.one("dl", "pairs").all("div")} == {
        "model": "gpt-oss-120b", "weights format": "mxfp4", "tensor parallel size": "4", "backend": "neuron",
        "LNC": "2", "hardware": "trn3",
    }  # fmt: skip
    assert "must not be carried to another" in section.text
    (line,) = [line for line in lines_of(sweep(), BOTH) if line.startswith("  valid for")]
    assert line == "  valid for gpt-oss-120b, mxfp4, TP 4, neuron, LNC 2, trn3; never carry it to another"
    (line,) = [line for line in lines_of(sweep(), BOTH, key=SweepKey()) if line.startswith("  valid for")]
    assert line == "  valid for a key that is not stated; never carry it to another"


def test_a_sweep_in_lines() -> None:
    lines = lines_of(
        both_edges(), BOTH, sigma_bytes=64.0 * MIB, sigma_source="assumed", deploy_value=4 * GIB + 192 * MIB
    )
    assert lines[0].startswith("reserved_headroom 4.00 GiB passed and 3.00 GiB failed for allocation in compile")
    assert [line.split("  ")[1:4] for line in lines[1:6]] == [
        [" 1", "8.00 GiB", "FAIL (too little KV)"],
        [" 2", "4.00 GiB", "PASS"],
        [" 3", "2.00 GiB", "FAIL (allocation)"],
        [" 4", "3.00 GiB", "FAIL (allocation)"],
        [" 5", "4.00 GiB", "PASS"],
    ]
    assert lines[5].endswith("; confirmation")
    assert "  deploy    at least 4.19 GiB: three sigma above the smallest that passed; arithmetic, not a boot" in lines
    assert "  noise     one sigma is 64.00 MiB, assumed, not measured" in lines
    # the knob itself, under whatever name a cause gives it, is no way to less of it
    assert "  for less  raise tensor_parallel_size" in lines


def test_a_narrow_window_has_no_value_to_deploy(tmp_path: Path) -> None:
    narrow = {"sigma_bytes": 400.0 * MIB, "sigma_source": "archive", "deploy_value": 4 * GIB + 1_200 * MIB}
    page = page_of(tmp_path, sweep(), BOTH, short_at=5 * GIB, short_by=MINIMUM, **narrow)
    assert figures(page)["deploy"] == "no value"


def test_boots_of_an_earlier_run_are_marked_and_their_pages_left_alone(tmp_path: Path) -> None:
    earlier = msgspec.structs.replace(RUN, run="20261004T221100Z-99aa11")
    found, attempts = swept(sweep(confirm=0), device(3.2 * GIB, 7.5 * GIB))
    attempts[0] = msgspec.structs.replace(attempts[0], run=earlier)
    path = write_sweep(tmp_path, changed(found, boots=len(attempts) - 1, reused=1), attempts)
    old = next(tmp_path.glob(f"{earlier.run}/*/*/attempt.json")).with_name("rung.html")
    old.write_text("as it was", encoding="utf-8")
    page = read_page(write_finding_page(path))
    rows = table_rows(page, "boots")
    assert rows[0][3] == f"(taken over from run {earlier.run})"
    assert not any("taken over" in row[3] or "confirmation" in row[3] for row in rows[1:])
    assert figures(page)["boots taken over"] == "1"
    assert "beside 1 finished boot taken over." in page.one("section", "proof").text
    link = page.one("table", "boots").all("a")[0].attributes["href"]
    assert (path.parent / unquote(link)).resolve() == old.resolve()
    assert old.read_text(encoding="utf-8") == "as it was"


def test_a_simulated_sweep_says_so(tmp_path: Path) -> None:
    found, attempts = swept(sweep(), BOTH)
    target = msgspec.structs.replace(attempts[0].target, simulated=True)
    path = write_sweep(tmp_path, found, attempts, target=target)
    page = read_page(write_finding_page(path))
    assert page.one("div", "simulated").text.startswith("SIMULATED")
    assert "no statement about hardware" in page.one("section", "proof").text


def test_a_boot_of_a_sweep_names_its_value_as_a_size() -> None:
    assert attempt_lines(sweep_attempt(HEADROOM, 3 * GIB, ALLOCATION))[0] == (
        "FAIL reserved_headroom=3221225472 (3.00 GiB) (15 min 12 s)"
    )


def test_the_command_rebuilds_the_pages_of_sweeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, attempts = swept(sweep(), BOTH)
    path = write_sweep(tmp_path, found, attempts)
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "tests/test_headroom.py::test_headroom: reserved_headroom 4.00 GiB passed" in said
    assert str(path.with_name("sweep.html")) in said
    assert path.with_name("sweep.html").is_file()
    record = read_finding(path)
    assert isinstance(record, SweepRecord)
    assert [read_attempt(path.parent / name).rung for name in record.attempts] == [one.rung for one in attempts]
