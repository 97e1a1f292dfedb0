"""The reader: chunks, boots, bytes that are no text."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvbudget.ledger.grammar.model import Row
from pytest_kvbudget.ledger.lines import HEAD_BYTES, TAIL_BYTES, LineSplitter
from pytest_kvbudget.ledger.model import BootLedger
from pytest_kvbudget.ledger.notation import NotationError
from pytest_kvbudget.ledger.reader import LedgerReader
from pytest_kvbudget.ledger.services import MOST_BOOTS
from pytest_kvbudget.verdict import Phase, Provenance
from tests.ledger.support import DATA, GIB, read, read_bytes

LOGS = sorted([*DATA.glob("boots/*.log"), *DATA.glob("cases/*.log")])
BOOT = (DATA / "boots" / "b1_kv_too_small.log").read_bytes()
SERVED = (DATA / "boots" / "h1_maxlen_auto.log").read_bytes()


def in_chunks(data: bytes, cuts: list[int]) -> tuple[BootLedger, int]:
    reader = LedgerReader()
    edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    milestones = sum(len(reader.feed(data[start:end])) for start, end in pairwise(edges))
    reader.close()
    return reader.ledger(), milestones


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
@given(cuts=st.lists(st.integers(0, 1 << 20), max_size=30))
@settings(max_examples=5, deadline=None)
def test_chunking_changes_nothing(log: Path, cuts: list[int]) -> None:
    data = log.read_bytes()
    assert in_chunks(data, cuts) == in_chunks(data, [])


@given(data=st.binary(max_size=400), cuts=st.lists(st.integers(0, 400), max_size=10))
def test_any_bytes_in_any_chunks_are_the_same_pieces(data: bytes, cuts: list[int]) -> None:
    whole, parts = LineSplitter(), LineSplitter()
    edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    expected = [*whole.feed(data), whole.rest()]
    got = [piece for start, end in pairwise(edges) for piece in parts.feed(data[start:end])]
    assert [*got, parts.rest()] == expected
    assert whole.lines == parts.lines


@given(cut=st.integers(0, len(BOOT)))
@settings(max_examples=60, deadline=None)
def test_a_cut_log_states_nothing_that_the_whole_does_not(cut: int) -> None:
    whole, part = read_bytes(BOOT), read_bytes(BOOT[:cut])
    for name, value in part.facts.items():
        known = {each.value for each in [whole.facts[name], *whole.ranks.get(name, {}).values()]}
        assert value.value in known
    assert part.failure_class in {None, "unexplained", whole.failure_class}


@given(
    st.lists(st.tuples(st.integers(0, len(SERVED)), st.integers(0, 4000)), max_size=6),
    st.randoms(use_true_random=False),
)
@settings(max_examples=40, deadline=None)
def test_mutilated_logs_never_break_the_reader(holes: list[tuple[int, int]], random: object) -> None:
    data = bytearray(SERVED + BOOT)
    for start, length in holes:
        del data[start : start + length]
    lines = bytes(data).split(b"\n")
    random.shuffle(lines)  # type: ignore[attr-defined]
    for mutated in (bytes(data), b"\n".join(lines), bytes(data[::-1])):
        ledger = read_bytes(mutated)
        assert ledger.lines >= 0


def test_a_line_of_megabytes_keeps_its_head_and_tail_only() -> None:
    splitter = LineSplitter()
    assert list(splitter.feed(b"a" * 3_000_000)) == []
    assert list(splitter.feed(b"b" * 3_000_000)) == []
    ((line, piece),) = splitter.feed(b"\n")
    assert line == 1
    assert piece == b"a" * HEAD_BYTES + b"b" * TAIL_BYTES


@pytest.mark.parametrize("text", ["█ version ", "NCC_EVRF009 ", "KV budget below ", "(", "| Model ", '{"message": '])
def test_no_line_takes_longer_than_its_length(text: str) -> None:
    ledger = read(text * (200_000 // len(text)), "Available KV cache memory: 2.97 GiB")
    assert ledger.get("available_kv_bytes") == round(2.97 * GIB)


def test_line_numbers_count_newlines_and_not_carriage_returns() -> None:
    ledger = read("a\rb\rc", "d\r", "Available KV cache memory: 2.97 GiB\r")
    assert ledger.facts["available_kv_bytes"].evidence.line == 3
    assert ledger.lines == 3


def test_broken_text_is_read_around() -> None:
    ledger = read_bytes(b"\xff\xfe\x00(Worker_TP0 pid=7) INFO [a.py:1] Available KV cache memory: 2.97 GiB \xc3\n")
    assert ledger.get("available_kv_bytes") == round(2.97 * GIB)


def test_the_last_line_counts_without_its_end_and_a_cut_figure_does_not() -> None:
    whole = read_bytes(b"GPU KV cache size: 401,408 tokens, Maximum concurrency for 200,704 tokens per request: 2.00x")
    assert whole.get("max_concurrency") == 2.0
    cut = read_bytes(b"# GPU blocks: 14")
    assert "gpu_blocks" not in cut.facts
    assert read_bytes(b"# GPU blocks: 14\n").get("gpu_blocks") == 14


def test_the_ledger_can_be_asked_at_any_moment() -> None:
    reader = LedgerReader()
    assert reader.ledger().outcome == "unknown"
    phases = []
    for line in SERVED.splitlines(keepends=True):
        reader.feed(line)
        phases.append(reader.phase)
    assert reader.ledger().outcome == "booted"
    seen = list(dict.fromkeys(phases))
    assert seen == [
        Phase.UNKNOWN,
        Phase.ARGUMENT,
        Phase.WORKER_INIT,
        Phase.WEIGHTS_LOAD,
        Phase.KV_CHECK,
        Phase.KV_ALLOC,
        Phase.WARMUP,
        Phase.READY,
    ]


def test_milestones_come_once_and_with_their_lines() -> None:
    reader = LedgerReader()
    found = [milestone for line in SERVED.splitlines(keepends=True) for milestone in reader.feed(line)]
    assert tuple(found) == reader.ledger().milestones
    texts = SERVED.decode().split("\n")
    for milestone in found:
        assert milestone.evidence.text in texts[milestone.evidence.line - 1]


def test_a_progress_bar_shows_its_phase_before_its_line_ends() -> None:
    reader = LedgerReader()
    reader.feed(b"(Worker_TP0 pid=7) Capturing CUDA graphs (decode, FULL):   0%|  | 0/3\r")
    assert reader.phase is Phase.GRAPH_CAPTURE
    assert reader.last_line.startswith("Capturing CUDA graphs")


def test_the_last_line_is_the_last_that_says_anything() -> None:
    reader = LedgerReader()
    reader.feed(b"\x1b[1;36m(Worker pid=7)\x1b[0;0m INFO 09-30 10:00:00 [a.py:1] loading\n\n   \n")
    assert reader.last_line == "loading"


def test_every_value_of_a_simulated_engine_is_simulated() -> None:
    ledger = read_bytes(BOOT, simulated=True)
    assert ledger.facts
    assert {value.provenance for value in ledger.facts.values()} == {Provenance.SIMULATED}


def test_feeding_a_closed_reader_is_an_error() -> None:
    reader = LedgerReader()
    reader.close()
    with pytest.raises(ValueError, match=r"after close\(\)"):
        reader.feed(b"x")


def test_a_crash_loop_is_many_boots_and_no_value_crosses() -> None:
    reader = LedgerReader()
    first = BOOT.replace(b"pid=9605", b"pid=1").replace(b"pid=9665", b"pid=2").replace(b"pid=9749", b"pid=3")
    reader.feed(SERVED + first + BOOT)
    reader.close()
    boots = reader.boots()
    assert [boot.outcome for boot in boots] == ["booted", "failed", "failed"]
    assert boots[0].get("kv_tokens") == 51200
    assert "kv_tokens" not in boots[2].facts
    assert boots[-1] == reader.ledger()


def test_a_crash_loop_without_end_keeps_its_last_boots() -> None:
    reader = LedgerReader()
    line = "(APIServer pid={0}) INFO 09-30 10:00:00 [a.py:1] vLLM API server version 0.23.0\n(Worker pid=9{0}) INFO x\n"
    for number in range(1, MOST_BOOTS + 11):
        reader.feed(line.format(number).encode())
    assert len(reader.boots()) == MOST_BOOTS + 1
    assert reader.forgotten == 9
    assert reader.starts[0] == 2 * 9 + 1


def test_late_lines_of_an_earlier_boot_are_not_read_as_the_next() -> None:
    reader = LedgerReader()
    start = "(APIServer pid={}) INFO 09-30 10:00:00 [a.py:1] vLLM API server version 0.23.0\n"
    reader.feed(
        (start.format(1) + "(Worker_TP0 pid=2) INFO 09-30 10:00:00 [a.py:1] Starting to load model x\n").encode()
    )
    reader.feed(start.format(3).encode())
    reader.feed(b"(Worker_TP0 pid=2) INFO 09-30 10:00:00 [a.py:1] Available KV cache memory: 2.97 GiB\n")
    assert len(reader.boots()) == 2
    assert "available_kv_bytes" not in reader.ledger().facts


def test_boots_of_a_container_have_the_same_pids() -> None:
    reader = LedgerReader()
    boot = (
        "(APIServer pid=1) INFO 09-30 10:00:00 [a.py:1] vLLM API server version 0.23.0\n"
        "(Worker_TP0 pid=230) INFO 09-30 10:00:00 [a.py:1] Available KV cache memory: {} GiB\n"
        "(EngineCore_DP0 pid=99) ERROR [a.py:1] ValueError: No available memory for the cache blocks.\n"
    )
    reader.feed((boot.format("2.97") + boot.format("2.31") + boot.format("-0.10")).encode())
    assert [boot.get("available_kv_bytes") for boot in reader.boots()] == [
        round(figure * GIB) for figure in (2.97, 2.31, -0.10)
    ]


def test_a_plan_table_begins_a_boot() -> None:
    reader = LedgerReader()
    table = b"budget (total x util)    28.67 GiB\nnon-expert weights    4.47\n"
    reader.feed(table + table)
    assert len(reader.boots()) == 2


def test_a_pattern_of_a_user_is_read_beside_the_tables() -> None:
    row = Row(
        pattern="Headroom plan: reserve {reserved_headroom_bytes:size}, pool {available_kv_bytes:size}", literal=True
    )
    reader = LedgerReader(patterns=[row])
    reader.feed(b"INFO Headroom  plan: reserve 4.00 GiB, pool 24.00 GiB\n")
    assert reader.ledger().get("available_kv_bytes") == 24 * GIB


def test_a_pattern_that_cannot_be_found_by_its_text_is_refused() -> None:
    with pytest.raises(NotationError, match="no plain text"):
        LedgerReader(patterns=[Row(pattern="{available_kv_bytes:size}")])


STATISTICS = (
    "(APIServer pid=1) INFO 10-03 10:00:{0:02} [loggers.py:257] Engine 000: Avg prompt throughput: {0}.1 tokens/s, Avg "
    "generation throughput: 0.0 tokens/s, Running: {1} reqs, Waiting: {2} reqs, GPU KV cache usage: {3}%, Prefix cache "
    "hit rate: 0.0%\n"
    '(APIServer pid=1) INFO:     192.0.2.{0}:{0} - "POST /v1/completions HTTP/1.1" 200 OK\n'
)


def test_the_peak_and_a_starving_request_are_found_in_hours_of_serving() -> None:
    """What the quick path passes over says nothing new: the slow path, line by line, finds the same."""
    lines = [STATISTICS.format(n % 60, 1, 0, (n * 7 % 500) / 10) for n in range(3000)]
    lines[1234] = STATISTICS.format(3, 2, 5, 93.7)
    lines += [STATISTICS.format(n, 0, 1, 0.0) for n in range(3)]
    data = SERVED.partition(b"[shutdown]")[0] + b"\n" + "".join(lines).encode()
    quick, slow = LedgerReader(), LedgerReader()
    for start in range(0, len(data), 100_000):
        quick.feed(data[start : start + 100_000])
    for line in data.splitlines(keepends=True):
        slow.feed(line)
    quick.close()
    slow.close()
    assert quick.ledger() == slow.ledger()
    assert quick.ledger().get("kv_usage_pct") == 93.7
    assert quick.ledger().failure_class == "request_starved"
    assert quick.last_line == slow.last_line


def test_bars_that_say_the_same_again_are_passed_over_and_the_next_phase_is_not() -> None:
    bar = "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE): {0:3}%|{1:10}| {0}/100 [00:01<00:02,  2.9it/s]\r"
    bars = "".join(bar.format(step, "#" * (step // 10)) for step in range(100)) * 20
    data = f"{bars}\n{bars}\n(Worker_TP0 pid=7) Graph capturing finished in 5 secs, took 0.20 GiB\n".encode()
    quick, slow = read_bytes(data), LedgerReader()
    for start in range(0, len(data), 37):
        slow.feed(data[start : start + 37])
    slow.close()
    assert quick == slow.ledger()
    assert quick.facts["graph_capture_bytes"].evidence.line == 3
    assert [milestone.evidence.line for milestone in quick.milestones] == [1, 3]


@pytest.mark.parametrize("cut", ["179.3", "179.", "179", "17"])
def test_a_figure_at_the_end_of_a_text_that_is_not_over_is_none(cut: str) -> None:
    """``179.`` may be the beginning of ``179.3``: the rest of the line has not come."""
    plan = (DATA / "cases" / "rdna4-plan-65536.log").read_bytes()
    line = next(line for line in plan.splitlines() if b"MemAvailable 179.3" in line)
    before = plan[: plan.index(line)]
    begun = line[: line.index(b"179.3")] + cut.encode()
    assert read_bytes(before + line + b"\n").get("host_mem_available_bytes") is not None
    assert read_bytes(before + begun).get("host_mem_available_bytes") is None
