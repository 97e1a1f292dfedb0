"""Making hostile text safe to show: no terminal escapes, no invisible or direction-changing characters."""

from __future__ import annotations

import re
from typing import Final

_ANSI: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
"""Control sequences (ECMA-48 CSI), operating system commands and two-character escapes."""

_UNSAFE: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def visible(text: str) -> str:
    """The text with control characters shown as their pictures, and line breaks and tabs kept.

    Direction marks and lone surrogates become the replacement character: a log line must not be able to reorder
    what a page says about it.
    """
    return _UNSAFE.sub(lambda found: _picture(found[0]), _ANSI.sub("", text))


def one_line(text: str) -> str:
    """`visible` text on one line, runs of white space as one space: what a terminal line may hold."""
    return " ".join(visible(text).split())


def message_text(message: str) -> str:
    """A record's message without a failure class that it names twice; of a boot that was called off, only that."""
    head, colon, rest = message.partition(": ")
    if colon and rest.startswith(f"{head}: "):
        message, (head, _, rest) = rest, rest.partition(": ")
    if head != "interrupted" or "called off" not in rest:
        return message
    return "called off: other boots had answered" if "other boots had answered" in rest else rest


def says(message: str, sentence: str) -> bool:
    """Whether a message holds a sentence already, so that it need not be shown twice."""
    return one_line(sentence).rstrip(".").casefold() in one_line(message).casefold()


def _picture(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else "\ufffd"
