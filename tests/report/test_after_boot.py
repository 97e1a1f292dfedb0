from __future__ import annotations

import re
from pathlib import Path

from pytest_kvbudget.device.gates import GateResult
from pytest_kvbudget.device.trace import Gap, MemoryTrace, PhaseMark, Series, encode, phases
from pytest_kvbudget.engine.soak import GrowthTrend, SoakResult
from pytest_kvbudget.engine.survival import RequestResult, SurvivalResult
from pytest_kvbudget.memory import TraceSummary
from pytest_kvbudget.records import AttemptRecord, UseRecord
from pytest_kvbudget.report.html import write_attempt_page
from pytest_kvbudget.units import GIB, MIB
from pytest_kvbudget.verdict import Verdict
from tests.report.building import TOTAL_BYTES, attempt, write_attempt
from tests.report.reading import Node, read_page, table_rows

IDLE = 600 * MIB
PEAK = TOTAL_BYTES - 58 * MIB


def trace(*, gap: bool = False) -> MemoryTrace:
    """Two ranks, sampled each second for 20 s: loading from 5 s, 58 MiB free from 10 s on, over at 18 s."""
    used = (0, IDLE, 5, 20 * GIB, 5, PEAK - 20 * GIB - IDLE, 8, IDLE - PEAK)
    lighter = (0, IDLE, 5, 20 * GIB, 13, -20 * GIB)
    room = (0, TOTAL_BYTES)
    return MemoryTrace(
        source="sysfs", limits="order of cards", rate_hz=1, started="2026-10-05T02:15:03+00:00",
        runs=(0, 7, 3, 11) if gap else (0, 21),
        gaps=(Gap(start_s=7, samples=3, reason="busy"),) if gap else (),
        marks=(
            PhaseMark(phase="launch", at_s=1), PhaseMark(phase="weights_load", at_s=5),
            PhaseMark(phase="ready", at_s=12), PhaseMark(phase="teardown", at_s=18),
        ),
        series=(Series(device="0", used=used, room=room), Series(device="1", used=lighter, room=room)),
    )  # fmt: skip


def page_of(root: Path, record: AttemptRecord, seen: MemoryTrace | None) -> Node:
    if seen is not None:
        record.trace = TraceSummary(
            file="memory.json", source=seen.source, limits=seen.limits, phases=phases(seen), leaks=()
        )
    path = write_attempt(root, record)
    if seen is not None:
        path.with_name("memory.json").write_bytes(encode(seen))
    return read_page(write_attempt_page(path))


def test_each_rank_has_its_memory_over_time_with_phases_and_the_least_free_point(tmp_path: Path) -> None:
    page = page_of(tmp_path, attempt(241_664), trace())
    first, _ = page.all("svg", "trace")
    assert [node.text for node in first.all("text", "phase-label")] == ["launch", "weights load", "ready", "teardown"]
    # launched 1 s after the first sample, and everything on the page counts from there
    assert [node.text for node in page.all("span", "least")] == [
        "least free 58.00 MiB after 9.0 s",
        "least free 11.27 GiB after 4.0 s",  # 31.86 - 20 - 0.59
    ]
    assert "least free 58.00 MiB after 9.0 s" in first.attributes["aria-label"]
    # steps: idle until 5 s of 20, then 20 GiB more until 10 s
    path = first.one("path", "trace-line").attributes["d"]
    steps = [(float(x), float(y)) for x, y in re.findall(r"H([0-9.]+)V([0-9.]+)", path)]
    assert steps[0][0] == 1000 * 5 / 20
    assert steps[0][1] == round(100 * (1 - (20 * GIB + IDLE) / TOTAL_BYTES), 2)
    assert steps[1] == (500.0, round(100 * 58 * MIB / TOTAL_BYTES, 2))


def test_nothing_is_drawn_where_nothing_was_read(tmp_path: Path) -> None:
    page = page_of(tmp_path, attempt(241_664), trace(gap=True))
    assert len(page.all("svg", "trace")[0].all("path", "trace-line")) == 2


def test_phases_say_what_the_tightest_rank_had(tmp_path: Path) -> None:
    page = page_of(tmp_path, attempt(241_664), trace())
    rows = table_rows(page, "trace-phases")
    assert [row[0] for row in rows] == ["before", "launch", "weights load", "ready", "teardown"]
    assert [row[1] for row in rows] == ["", "launch", "+4.0 s", "+11 s", "+17 s"]
    # 600 MiB when idle, 58 MiB short of 31.86 GiB while the weights load: what is raised adds up to the peak
    assert [row[5] for row in rows] == ["", "0 B", "31.22 GiB", "0 B", "0 B"]
    assert rows[3][3:] == ["31.80 GiB", "58.00 MiB", "0 B", "0 (0)"]
    assert "order of cards" in page.text


def test_without_a_trace_or_its_file_the_page_says_so(tmp_path: Path) -> None:
    assert "Nobody could read device memory" in page_of(tmp_path / "none", attempt(241_664), None).text
    record = attempt(241_664)
    seen = trace()
    record.trace = TraceSummary(file="memory.json", source="sysfs", limits="", phases=phases(seen))
    page = read_page(write_attempt_page(write_attempt(tmp_path / "lost", record)))
    assert "The memory trace memory.json is not beside this record." in page.text
    assert table_rows(page, "trace-phases")


def test_requests_traffic_and_gates_are_shown(tmp_path: Path) -> None:
    requests = (
        RequestResult(
            kind="generation", ended="held", prompt_tokens=995, max_tokens=261_149, generated_tokens=4096,
            first_token_s=1.0, seconds=9.19, tokens_per_s=500.0,
        ),
        RequestResult(
            kind="prefill", ended="died", prompt_tokens=262_143, max_tokens=1, seconds=2.5, message="connection reset"
        ),
    )  # fmt: skip
    use = UseRecord(
        test="test_it.py::test_edge", verdict=Verdict.FAIL, message="died",
        survival=SurvivalResult(window=262_144, pool_tokens=1_350_182, requests=requests),
        soak=SoakResult(
            sent=30, failed=2, seconds=61.0, message="status 500",
            trends=(GrowthTrend(rank=0, bytes_per_hour=3.0 * MIB, plus_minus=1.0 * MIB), None),
        ),
        gates=(
            GateResult(
                gate="min_free", verdict=Verdict.MARGINAL, rank=1, device="1", measured_bytes=58 * MIB,
                limit_bytes=512 * MIB, sentence="min_free: too little",
            ),
        ),
    )  # fmt: skip
    page = page_of(tmp_path, attempt(241_664, uses=(use,)), None)
    assert table_rows(page, "requests") == [
        ["generation", "held", "995", "261,149", "4,096", "1.0 s", "9.2 s", "500.0", ""],
        ["prefill", "died", "262,143", "1", "0", "not stated", "2.5 s", "not stated", "connection reset"],
    ]
    assert "30 in 61 s, 2 failed" in page.text
    # a step of 2 MiB may be under way at either end of 61 s: 118.03 MiB an hour
    assert "3.00 MiB ± 119.03 MiB per hour" in page.text
    assert "not seen throughout" in page.text
    assert table_rows(page, "gates") == [
        ["min free", "MARGINAL", "1 (1)", "58.00 MiB", "512.00 MiB", "min_free: too little"]
    ]


def test_a_boot_of_which_nothing_was_asked_has_no_such_section(tmp_path: Path) -> None:
    assert "After the boot" not in page_of(tmp_path, attempt(241_664), None).text


def test_the_tests_that_shared_an_engine_have_a_verdict_each(tmp_path: Path) -> None:
    soak = SoakResult(sent=30, failed=0, seconds=61.0)
    uses = (
        UseRecord(test="test_it.py::test_before", verdict=Verdict.PASS, message="ready after 41 s"),
        UseRecord(test="test_it.py::test_soak", verdict=Verdict.UNKNOWN, message="too short", soak=soak),
    )
    page = page_of(tmp_path, attempt(241_664, rung=None, uses=uses), None)
    assert table_rows(page, "uses") == [
        ["test_it.py::test_before", "PASS", "ready after 41 s"],
        ["test_it.py::test_soak", "UNKNOWN", "too short"],
    ]
    assert page.one("h3", "use").text == "test_it.py::test_soak", "whose the traffic below is"
