"""Blocks are judged at once where that is possible; line by line, the same log says the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvbudget.ledger.grammar import TABLES
from pytest_kvbudget.ledger.grammar.model import CompiledRow
from pytest_kvbudget.ledger.lines import after_first_end, after_last_end
from pytest_kvbudget.ledger.prefix import LONGEST_KNOWN, clean
from pytest_kvbudget.ledger.quotes import QUOTE_WITHIN, Quotations
from pytest_kvbudget.ledger.reader import BLOCK_BYTES, SHORT_BYTES, LedgerReader
from pytest_kvbudget.ledger.scan import NOTHING, Scanner
from tests.benchmarks.log_reading import KINDS
from tests.ledger.support import DATA, GIB

SERVED = (DATA / "boots" / "h1_maxlen_auto.log").read_bytes().partition(b"[shutdown]")[0] + b"\n"
REFUSED = (DATA / "boots" / "b1_kv_too_small.log").read_bytes()
LOGS = sorted([*DATA.glob("boots/*.log"), *DATA.glob("cases/*.log")])
OUTER = (
    b"",
    b"svc-1  | ",
    b"Oct 03 05:14:05 host podman[9]: ",
    b"2025-10-03T10:00:00.123Z stdout F ",
    b"[rank3]: ",
    b"\x1b[1;36m",
    b"(RayWorkerWrapper pid=12, ip=192.0.2.7) ",
    b"[2025-10-03 10:00:00 TP0 DP1] ",
)
STATISTICS = (
    "(APIServer pid=1) INFO 10-03 10:00:00 [loggers.py:257] Engine 000: Avg prompt throughput: 1.0 tokens/s, Running: "
    "{} reqs, Waiting: {} reqs, GPU KV cache usage: {}%, Prefix cache hit rate: 0.0%\n"
)
PROMPT = (
    "(APIServer pid=1) INFO 10-03 10:00:{:02} [logger.py:43] Received request chatcmpl-{:x}: prompt: '{}', params: x\n"
)
BAR = "{}Capturing CUDA graphs (decode, FULL): {:3}%|{:10}| {}/100 [00:01<00:{:02},  2.{}it/s]\r"


def said(reader: LedgerReader) -> tuple[object, ...]:
    reader.close()
    return reader.boots(), reader.starts, reader.times, reader.services, reader.lines, reader.phase, reader.last_line


def at_once(data: bytes) -> tuple[object, ...]:
    reader = LedgerReader()
    reader.feed(data)
    return said(reader)


def by_line(data: bytes) -> tuple[object, ...]:
    reader = LedgerReader()
    for line in data.splitlines(keepends=True):
        reader.feed(line)
    return said(reader)


def bars(speaker: str) -> str:
    return "".join(BAR.format(speaker, step, "#" * (step // 10), step, step % 60, step % 10) for step in range(100))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_hours_of_one_kind_of_lines(kind: str, end: str) -> None:
    text = "".join(KINDS[kind](number) for number in range(400 if kind != "crash loop" else 3))
    data = SERVED + text.replace("\n", end).encode()
    assert at_once(data) == by_line(data)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(sorted(KINDS)), st.integers(0, 9999), st.integers(1, 200)),
            st.tuples(st.sampled_from(LOGS), st.integers(0, 300), st.integers(1, 60)),
        ),
        max_size=6,
    )
)
@settings(max_examples=40, deadline=None)
def test_any_mixture(parts: list[tuple[str | Path, int, int]]) -> None:
    data = SERVED
    for source, start, count in parts:
        if isinstance(source, str):
            numbers = range(start, start + (count if source != "crash loop" else 1))
            data += "".join(KINDS[source](number) for number in numbers).encode()
        else:
            data += b"\n".join(source.read_bytes().split(b"\n")[start : start + count]) + b"\n"
    assert at_once(data) == by_line(data)


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 3), st.floats(0, 100).map(lambda usage: round(usage, 1))),
        min_size=1,
        max_size=60,
    )
)
@settings(max_examples=60, deadline=None)
def test_statistics_are_all_judged(lines: list[tuple[int, int, float]]) -> None:
    calm = STATISTICS.format(1, 0, 0.1) * (SHORT_BYTES // 100)
    data = SERVED + (calm + "".join(STATISTICS.format(*line) for line in lines)).encode()
    reader = LedgerReader()
    reader.feed(SERVED)
    reader.feed(data[len(SERVED) :])
    ledger = reader.ledger()
    assert ledger.get("kv_usage_pct") == max(0.1, *(usage for _, _, usage in lines))
    assert said(reader) == by_line(data)


def test_one_starving_request_among_thousands_of_lines() -> None:
    calm = STATISTICS.format(1, 0, 0.1) * 2000
    starving = STATISTICS.format(0, 1, 0.0)
    reader = LedgerReader()
    reader.feed(SERVED + calm.encode())
    reader.feed((calm + starving * 2).encode())
    assert reader.ledger().failure_class == "request_starved"
    reader.feed(calm.encode())
    assert reader.ledger().failure_class is None


@pytest.mark.parametrize("speaker", ["", "(Worker_TP0 pid=17) "])
def test_what_follows_redrawn_bars_is_read(speaker: str) -> None:
    size = f"{speaker}Graph capturing finished in 5 secs, took 0.20 GiB\n"
    data = (bars(speaker) * 40 + "\n" + bars(speaker) * 40 + size).encode()
    assert at_once(data) == by_line(data)
    reader = LedgerReader()
    reader.feed(data)
    assert reader.ledger().facts["graph_capture_bytes"].evidence.line == 2


def test_another_rank_begins_the_same_bar() -> None:
    """Digits tell speakers apart: what one rank said again, another says for the first time."""
    first, second = (bars(f"(Worker_TP{rank} pid={20 + rank}) ") for rank in (0, 1))
    data = REFUSED + (first * 20 + second * 20).encode() + b"\n"
    assert at_once(data) == by_line(data)


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=300), min_size=1, max_size=30)
)
@settings(max_examples=60, deadline=None)
def test_whatever_clients_write(prompts: list[str]) -> None:
    lines = [PROMPT.format(n % 60, n * 2654435761 % 2**64, prompt) for n, prompt in enumerate(prompts)]
    data = SERVED + ("".join(lines) * 20).encode("utf-8", "replace")
    reader = LedgerReader()
    reader.feed(SERVED)
    before = reader.ledger().facts
    reader.feed(data[len(SERVED) :])
    assert reader.ledger().facts == before
    assert said(reader) == by_line(data)


def test_a_prompt_is_cut_and_the_line_after_it_is_read() -> None:
    prompt = PROMPT.format(0, 1, "Available KV cache memory: 9.99 GiB. Received request x")
    size = "(Worker_TP0 pid=7) INFO [a.py:1] Available KV cache memory: 2.97 GiB\n"
    reader = LedgerReader()
    for _ in range(3):
        reader.feed((prompt * 100).encode())
    reader.feed((prompt * 100 + size + prompt * 100).encode())
    assert reader.ledger().get("available_kv_bytes") == round(2.97 * GIB)


def test_quotations_leave_as_many_lines() -> None:
    quotations = Quotations()
    line = b"INFO Received request 1: prompt: 'x'"
    assert quotations.cut(line + b"\n") == line + b"\n"
    assert quotations.quotes(line)
    assert quotations.cut(line + b"\nnext\n") == b"INFO Received request \nnext\n"
    far = b"x" * QUOTE_WITHIN + b"Received request 1\n"
    assert not quotations.quotes(far)
    assert quotations.cut(far) == far
    assert quotations.cut(b"nothing of the kind\n") == b"nothing of the kind\n"
    assert quotations.cut(line + b"\n") == line + b"\n", "a log that quotes nobody any more is not searched for it"


@given(st.sampled_from(LOGS), st.integers(0, 1 << 20), st.sampled_from(OUTER), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_a_remembered_layout_is_the_line_s_own(log: Path, index: int, outer: bytes, random: object) -> None:
    """Layouts are remembered for lines that differ in digits only; longer lines are looked at each on its own."""
    lines = log.read_bytes().replace(b"\r", b"\n").split(b"\n")
    line = outer + lines[index % len(lines)]
    other = bytes(
        random.randrange(48, 58) if 48 <= byte < 58 else byte  # type: ignore[attr-defined]
        for byte in line
    )
    list(clean(line))
    assert list(clean(other)) == list(clean(other + b" " * LONGEST_KNOWN))


@pytest.mark.parametrize("row", [row for table in TABLES for row in table.rows], ids=lambda row: row.pattern[:40])
def test_no_row_is_lost_where_letters_are_left_out(row: object) -> None:
    compiled = CompiledRow(row, None)  # type: ignore[arg-type]
    kind = Scanner([compiled]).kind(b"(Worker_TP0 pid=7) INFO 12 " + compiled.needle.encode() + b" 34")
    assert kind is not NOTHING
    assert compiled in kind.rows


def test_ends_of_pieces() -> None:
    assert after_first_end(b"ab") == 2
    assert after_first_end(b"a\rb\n") == 2
    assert after_last_end(b"a\nb\rc", 0, 5) == 2, "a line feed counts before any carriage return"
    assert after_last_end(b"ab\rc", 0, 4) == 3
    assert after_last_end(b"a\nbc", 2, 4) == 0


@pytest.mark.parametrize("filler", ["x", "x\r"])
def test_blocks_larger_than_are_read_at_once(filler: str) -> None:
    size = "\nAvailable KV cache memory: 2.97 GiB\n"
    data = (filler * (3 * BLOCK_BYTES // len(filler)) + size).encode()
    reader = LedgerReader()
    reader.feed(data)
    assert reader.ledger().get("available_kv_bytes") == round(2.97 * GIB)
    assert reader.ledger().facts["available_kv_bytes"].evidence.line == 2
    assert reader.lines == 2


@pytest.mark.parametrize("kind", ["serving", "requests", "progress bars", "bars of ranks"])
def test_of_everyday_lines_next_to_none_is_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose plain text is short looks like any line, and would make every gigabyte slow."""
    data = "".join(KINDS[kind](number) for number in range(600)).encode()
    read: list[bytes] = []

    def spy(piece: bytes) -> object:
        read.append(piece)
        return clean(piece)

    reader = LedgerReader()
    reader.feed(SERVED + data)
    monkeypatch.setattr("pytest_kvbudget.ledger.reader.clean", spy)
    reader.feed(data)
    assert len(read) <= 5


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(sorted({*KINDS} - {"crash loop"})), st.integers(0, 9999)),
        min_size=1,
        max_size=60,
    ),
    st.integers(1, 40),
)
@settings(max_examples=30, deadline=None)
def test_services_that_serve_together(turns: list[tuple[int, str, int]], times: int) -> None:
    def shipped(service: int, text: str) -> str:
        return "".join(f"vllm-{service}-1  | {line}" for line in text.splitlines(keepends=True))

    served = SERVED.decode()
    boots = "".join(shipped(service, served) for service in (0, 1))
    lines = "".join(shipped(service, KINDS[kind](number)) for service, kind, number in turns)
    data = (boots + lines * times + "\n" + shipped(2, REFUSED.decode()) + lines).encode()
    assert at_once(data) == by_line(data)
