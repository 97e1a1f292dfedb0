"""Server-sent events out of a byte stream, however it is cut into pieces.

The format is the WHATWG HTML standard's, section 9.2 (Server-sent events): lines end in CR, LF or CR LF, a colon at
the start makes a comment, several ``data`` lines make one event, an empty line ends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

_BOM = b"\xef\xbb\xbf"
MOST_BYTES: Final = 16 * 2**20
"""Of one event. A token's is a few hundred bytes."""


class OversizeError(Exception):
    """What comes is no stream of events: one of them does not end."""


class SseReader:
    """Collects events from pieces of a stream. Keeps the data only: completion streams use no other field."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._after_cr = False
        self._first = True
        self._data: list[bytes] = []
        self._bytes = 0
        """Of the event that is not complete yet."""

    def feed(self, piece: bytes) -> list[str]:
        """Take the next piece; returns the data of every event that it completes.

        Raises:
            OversizeError: an event is larger than 16 MiB.
        """
        if not piece:
            return []
        if self._after_cr:
            # The CR ended a line already; an LF that follows it belongs to that end.
            piece = piece.removeprefix(b"\n")
        self._after_cr = piece.endswith(b"\r")
        events: list[str] = []
        for part in piece.splitlines(keepends=True):
            self._line += part
            if part.endswith((b"\n", b"\r")):
                line = bytes(self._line).rstrip(b"\r\n")
                self._line.clear()
                self._take(line, events)
        if self._bytes + len(self._line) > MOST_BYTES:
            raise OversizeError(f"an event of the stream has no end within {MOST_BYTES // 2**20} MiB")
        return events

    def _take(self, line: bytes, events: list[str]) -> None:
        if self._first:
            line, self._first = line.removeprefix(_BOM), False
        if not line:
            if self._data:
                events.append(b"\n".join(self._data).decode("utf-8", "replace"))
                self._data.clear()
            self._bytes = 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._bytes += len(line)


def sse_data(pieces: Iterable[bytes]) -> Iterator[str]:
    """The data of every complete event in a stream, as soon as it is complete. An unfinished last one is dropped."""
    reader = SseReader()
    for piece in pieces:
        yield from reader.feed(piece)
