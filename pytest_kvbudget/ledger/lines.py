"""Bytes of a log, in any chunks, to numbered pieces of text lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

HEAD_BYTES: Final = 64 * 1024
"""What is kept from the beginning of one piece."""
TAIL_BYTES: Final = 64 * 1024
"""What is kept from the end of a piece that is longer than the head."""

LONGEST_PIECE: Final = HEAD_BYTES + TAIL_BYTES
"""Bytes kept of one piece."""

_END = re.compile(rb"[\r\n]")


def capped(piece: bytes) -> bytes:
    """A piece without the middle that is not kept."""
    return piece if len(piece) <= LONGEST_PIECE else piece[:HEAD_BYTES] + piece[-TAIL_BYTES:]


def after_first_end(data: bytes) -> int:
    """Where the second piece of ``data`` begins; its length where no piece ends."""
    match = _END.search(data)
    return match.end() if match is not None else len(data)


def after_last_end(data: bytes, start: int, stop: int) -> int:
    r"""Behind the last end of a piece in a part of ``data``, a ``\n`` before any ``\r``; ``0`` where none ends."""
    return data.rfind(b"\n", start, stop) + 1 or data.rfind(b"\r", start, stop) + 1


class LineSplitter:
    r"""Cuts a stream into pieces that end in ``\n`` or ``\r``; memory does not grow with the length of a line.

    A progress bar redraws itself with ``\r``: each drawing is a piece of its own, seen as soon as the next one begins.
    Line numbers are 1-based and count ``\\n`` only, as editors and ``grep -n`` do.
    """

    def __init__(self) -> None:
        self.line: int = 1
        """Number of the line that the next byte belongs to."""
        self._head = bytearray()
        self._tail = bytearray()
        self._any = False

    @property
    def begun(self) -> bool:
        """A piece is begun: the next bytes belong to it."""
        return bool(self._head)

    @property
    def lines(self) -> int:
        """Lines begun so far; the last one counts as soon as it has a byte."""
        return self.line - 1 + (1 if self._any else 0)

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield ``(line number, piece)`` for every piece that ``data`` completes, without its end; empty ones too."""
        start = 0
        for match in _END.finditer(data):
            end = match.start()
            yield self.line, self._take(data[start:end])
            start = end + 1
            self._any = data[end] == 0x0D
            if not self._any:
                self.line += 1
        if start < len(data):
            self._keep(data[start:])
            self._any = True

    def skip(self, lines: int, *, within: bool) -> None:
        r"""Count lines that were read elsewhere, where no piece is begun; ``within``: they ended in a ``\r``."""
        self.line += lines
        self._any = within

    def rest(self) -> tuple[int, bytes] | None:
        """Take the piece that no end has come for, ``None`` when the stream stopped at an end."""
        if not self._head:
            return None
        return self.line, self._take(b"")

    def _take(self, last: bytes) -> bytes:
        if not self._head:
            return capped(last)
        self._keep(last)
        piece = bytes(self._head + self._tail)
        self._head.clear()
        self._tail.clear()
        return piece

    def _keep(self, part: bytes) -> None:
        room = HEAD_BYTES - len(self._head)
        if room > 0:
            self._head += part[:room]
            part = part[room:]
        if part:
            self._tail += part[-TAIL_BYTES:]
            del self._tail[:-TAIL_BYTES]
