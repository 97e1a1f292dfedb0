"""Server-sent events, whole and in pieces."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pytest_kvbudget.engine.sse import SseReader, sse_data

LINE = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\x00"), max_size=20)
END = st.sampled_from(["\n", "\r", "\r\n"])


def encode(events: list[list[str]], comments: list[str], ends: list[str]) -> bytes:
    """Events of data lines, comments and other fields between them, any mixture of line ends."""
    lines: list[str] = []
    for index, data in enumerate(events):
        if comments:
            lines += [f":{comments[index % len(comments)]}", "event: x", "id"]
        lines += [*(f"data: {part}" for part in data), ""]
    text = ""
    for number, line in enumerate(lines):
        end = ends[number % len(ends)] if ends else "\n"
        # An empty line that ends in LF would be taken for the rest of a CR LF.
        text += line + ("\r" if not line and text.endswith("\r") else end)
    return text.encode()


def cut(data: bytes, places: list[int]) -> list[bytes]:
    marks = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(marks)]


@given(
    st.lists(st.lists(LINE, min_size=1, max_size=3), max_size=4),
    st.lists(LINE, max_size=2),
    st.lists(END, max_size=5),
    st.lists(st.integers(0, 400), max_size=30),
)
def test_events_come_whole_however_the_stream_is_cut(
    events: list[list[str]], comments: list[str], ends: list[str], places: list[int]
) -> None:
    stream = encode(events, comments, ends)
    expected = ["\n".join(data) for data in events]
    assert list(sse_data(cut(stream, places))) == expected
    assert list(sse_data(bytes([byte]) for byte in stream)) == expected


@given(st.lists(st.binary(max_size=50), max_size=10))
def test_garbage_gives_the_same_events_whole_and_in_pieces(pieces: list[bytes]) -> None:
    assert list(sse_data(pieces)) == list(sse_data([b"".join(pieces)]))


def test_examples_of_the_standard() -> None:
    """From the WHATWG HTML standard, section on server-sent events."""
    assert list(sse_data([b"data: YHOO\ndata: +2\ndata: 10\n\n"])) == ["YHOO\n+2\n10"]
    assert list(sse_data([b"data\n\ndata\ndata\n\ndata:"])) == ["", "\n"]
    assert list(sse_data([b"data:test\n\ndata: test\n\n"])) == ["test", "test"]
    assert list(
        sse_data([b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event"])
    ) == [
        "first event",
        "second event",
    ]
    assert list(sse_data([b"\xef\xbb\xbfdata: after a mark\n\n"])) == ["after a mark"]


def test_event_comes_with_its_last_byte_not_later() -> None:
    reader = SseReader()
    pieces = [b"data: 1\r\n\r", b"\ndata: 2\n", b"\n"]
    assert [reader.feed(piece) for piece in pieces] == [["1"], [], ["2"]]
