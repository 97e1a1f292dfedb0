"""What clients wrote, as a serving engine records it: found, and cut out of blocks before anything looks at it."""

from __future__ import annotations

from typing import Final

QUOTES: Final = (b"Received request ", b"Receive: obj=", b"Finish: obj=", b"Generated response ")
"""Lines that quote what clients wrote: whatever they contain, the engine did not say it."""
QUOTE_WITHIN: Final = 240
"""Bytes of a line in which the quotation begins, prefixes included."""
_SHORT_BYTES: Final = QUOTE_WITHIN // 2


def quote_of(piece: bytes) -> bytes:
    """Which of `QUOTES` makes the piece the engine's record of what a client wrote; empty where none does."""
    for quote in QUOTES:
        if piece.find(quote, 0, QUOTE_WITHIN) >= 0:
            return quote
    return b""


class Quotations:
    """Cuts quotations of the kinds that the log had lately; a log without any pays nothing."""

    def __init__(self) -> None:
        self._lately: tuple[bytes, ...] = ()

    def quotes(self, piece: bytes) -> bool:
        """Whether the piece is the engine's record of what a client wrote; the next blocks are then cut for such."""
        quote = quote_of(piece)
        if quote and quote not in self._lately:
            self._lately = (*self._lately, quote)
        return quote != b""

    def cut(self, block: bytes) -> bytes:
        r"""Lines with what is quoted left out: each keeps what precedes it. As it is where one ends in ``\r``."""
        if self._lately and b"\r" in block:
            return block
        for quote in self._lately:
            block = self._cut(block, quote)
        return block

    def _cut(self, block: bytes, quote: bytes) -> bytes:
        parts = block.split(quote)
        if len(parts) == 1:
            self._lately = tuple(other for other in self._lately if other != quote)
            return block
        ends = [part.find(b"\n") for part in parts[1:]]
        kept = [parts[0], *[part[end:] for part, end in zip(parts[1:], ends, strict=True)]]
        # too far from its line's beginning, or a client that wrote the same words: rare, and left as it is
        if min(ends) < 0 or _longest_last_line(kept) > QUOTE_WITHIN - len(quote):
            return block
        return quote.join(kept)


def _longest_last_line(texts: list[bytes]) -> int:
    """Bytes of the longest last line; of short texts it is not worth finding."""
    long = [text for text in texts if len(text) > _SHORT_BYTES]
    return max((len(text) - text.rfind(b"\n") - 1 for text in long), default=0)
