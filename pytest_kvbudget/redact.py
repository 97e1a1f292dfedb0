"""Secrets stay out of records, messages and pages: the names of variables and flags tell which values are removed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

REMOVED: Final = "<removed>"
_NAME_ENDS: Final = r"(?:keys?|token|passw(?:or)?ds?|passphrases?|(?:secret|credential)s?)(?![a-z])"
"""Ends a word of a secret's name, joined on or not: ``api_key``, ``PGPASSWORD``; not ``tokens``, not ``keyword``."""

SHORTEST: Final = 4
"""Characters of the shortest value that is taken out of running text."""
_HINTS: Final = ("key", "token", "secret", "passw", "passphrase", "credential")
"""What a line that names a secret has in it, in small letters: told apart faster than by a pattern."""
_PERHAPS: Final = re.compile(_NAME_ENDS)
"""Whether a name is a secret's, or a line may have such a name; both in small letters."""
_NAMED: Final = re.compile(
    r"(?<![\w-])(?=[\w.-]*(?i:" + _NAME_ENDS + r"))"
    r"(?P<name>-{1,2}\w[\w.-]*|\w[\w-]*)(?P<gap>\\?['\"]?\s*[=:]\s*|['\"],\s*(?=['\"])|\s+)"
)
"""A flag or variable before its value: ``--api-key x``, ``'--api-key', 'x'``, ``HF_TOKEN=x``, ``'api_key': 'x'``."""
_VALUE: Final = re.compile(
    # a quote or brace that never closes ends with the text, which may be cut
    r"\\\"[^\"\\]*(?:\\\"|\\?\Z)|\"(?:[^\"\\]|\\.)*(?:\"|\\?\Z)|'(?:[^'\\]|\\.)*(?:'|\\?\Z)"
    r"|\{[^{}]*(?:\}|\Z)|\{.*"
    # in API_KEYS=one,two what follows a comma is the next value, but not where it has a name of its own
    r"|(?:(?<==)-|[^\s'\",\]})\\-])[^\s'\",\]})]*(?:,(?![\w.-]+[=:])[^\s'\",\]})]+)*"
)
"""In quotes, in braces or bare."""
_QUOTE: Final = re.compile(r"\\?['\"]")
_FLAG: Final = re.compile(r"\\?['\"]?-")
_OPEN: Final = re.compile(r"[\[(]\s*")
_LISTED: Final = re.compile(r"\s*,\s*")
_REPEATED: Final = re.compile(r"\s+|,\s*(?=['\"])")
"""Between the words that one flag takes, as a shell or a list shows them."""
_NUMBER: Final = re.compile(r"[\d.,_]+")
_NOTHING: Final = frozenset(("None", "null", "True", "true", "False", "false"))
_AROUND: Final = rb"[\w-]*(?:\\?['\"]?[ \t=:]+|['\"],[ \t]*)\[?(?:\\?['\"])?"
"""What stands between the first letters of a secret's name and its value."""

_Span = tuple[int, int]


def _is_secret(name: str) -> bool:
    """Whether a variable or flag holds a secret, by the words of its name; ``tokens`` and ``tokenizer`` do not."""
    return _PERHAPS.search(name.lower()) is not None


def _takes_several(flag: str) -> bool:
    """Whether every word up to the next flag is a value, as with vLLM's ``--api-key``."""
    return flag.lower().rstrip("s").endswith("key")


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with the values of names that look like secrets replaced, and what other values name so."""
    return {name: REMOVED if _is_secret(name) else text_without_secrets(value) for name, value in environment.items()}


def command_without_secrets(argv: Sequence[str]) -> tuple[str, ...]:
    """The command line with the values of flags that look like secrets replaced (``--api-key X Y``, ``--api-key=X``).

    So are those that a word itself names, as in the JSON of ``--hf-overrides``.
    """
    return tuple(_replaced(word, spans) for word, spans in zip(argv, _in_command(argv), strict=True))


def _in_command(argv: Sequence[str]) -> Iterator[list[_Span]]:
    """Where the secrets stand in each word."""
    hide, several = False, False
    for word in argv:
        flag, equals, _ = word.partition("=")
        if word.startswith("-"):
            several = _takes_several(flag)
            secret = _is_secret(flag)
            hide = secret and (several or not equals)
            yield [(len(flag) + 1, len(word))] if secret and equals else list(_in_text(word))
        else:
            yield [(0, len(word))] if hide else list(_in_text(word))
            hide = hide and several


def text_without_secrets(text: str) -> str:
    """Running text, as an engine prints it, with the values of flags and variables that look like secrets replaced."""
    return _replaced(text, _in_text(text))


def _replaced(text: str, spans: Iterable[_Span]) -> str:
    shown, at = "", 0
    for begin, end in spans:
        shown += text[at:begin] + REMOVED
        at = end
    return shown + text[at:] if at or shown else text


def _in_text(text: str) -> Iterator[_Span]:
    """Where the secrets stand that the text names itself."""
    small = text.lower()
    if not any(hint in small for hint in _HINTS) or _PERHAPS.search(small) is None:
        return
    at = 0
    while match := _NAMED.search(text, at):
        name, gap = match["name"], match["gap"]
        at = match.end()
        flag, stated = name.startswith("-"), "=" in gap or ":" in gap
        if not _is_secret(name) or not (flag or stated):
            at = match.end("name")
            continue
        between = _REPEATED if flag and ":" not in gap and _takes_several(name) else None
        if stated and (listed := _OPEN.match(text, at)):
            at, between = listed.end(), _LISTED
        elif not stated and _FLAG.match(text, at):
            continue
        while (value := _VALUE.match(text, at)) and _is_named(name, gap, value[0]):
            quote = _QUOTE.match(value[0])
            width = len(quote[0]) if quote else 0
            closed = quote is not None and len(value[0]) >= 2 * width and value[0].endswith(quote[0])
            yield value.start() + width, value.end() - (width if closed else 0)
            at = value.end()
            more = between.match(text, at) if between else None
            if more is None or (between is _REPEATED and _FLAG.match(text, more.end())):
                break
            at = more.end()


def _is_named(name: str, gap: str, value: str) -> bool:
    """Whether a secret word before a value names it: ``bytes per token: 7701`` and ``key: value`` are prose."""
    if value in _NOTHING:
        return False
    if name.startswith("-") or name.isupper():
        return True
    compound = "_" in name or "-" in name or "=" in gap or "'" in gap or '"' in gap
    return compound and _NUMBER.fullmatch(value) is None


class Scrubber:
    """Takes known secrets out of a stream of bytes, at any chunking. Lines stay where they are.

    Args:
        values: the secrets. Those shorter than `SHORTEST` are too common to be taken out wherever they stand; they go
            where a name that looks like a secret's stands before them.
    """

    def __init__(self, values: Iterable[str]) -> None:
        secrets = {value.encode("utf-8", "surrogateescape") for value in values if value}
        # the longest first: one secret may be part of another
        ordered = sorted(secrets, key=len, reverse=True)
        long = [secret for secret in ordered if len(secret) >= SHORTEST]
        short = [secret for secret in ordered if len(secret) < SHORTEST]
        self._pattern = re.compile(b"|".join(map(re.escape, long))) if long else None
        self._short = _behind_a_name(short) if short else None
        self._hold = len(long[0]) - 1 if long else 0
        self._kept = b""

    def feed(self, data: bytes) -> bytes:
        """What may be shown now; the end of it is kept back where a secret may have begun."""
        if self._pattern is None and self._short is None:
            return data
        clean = self._kept + data
        if self._pattern is not None:
            clean = self._pattern.sub(REMOVED.encode(), clean)
        # a line is never kept back: no secret has a line's end in it
        line = clean.rfind(b"\n") + 1
        if self._short is not None:
            # the name may be anywhere before its value in the line
            whole, self._kept = clean[:line], clean[line:]
            return self._without_short(whole, self._short)
        cut = max(len(clean) - self._hold, line)
        self._kept = clean[cut:]
        return clean[:cut]

    def flush(self) -> bytes:
        """What was kept back."""
        kept, self._kept = self._kept, b""
        return kept if self._short is None else self._without_short(kept, self._short)

    def _without_short(self, line: bytes, short: re.Pattern[bytes]) -> bytes:
        """A name may have several: the last one found goes first, until there is none."""
        found = 1
        while found:
            line, found = short.subn(rb"\1" + REMOVED.encode(), line)
        return line


def _behind_a_name(values: Iterable[bytes]) -> re.Pattern[bytes]:
    secrets = b"|".join(map(re.escape, values))
    more = b"(?:" + REMOVED.encode() + rb"['\"]?[ \t,]+['\"]?)*"
    return re.compile(b"((?i:" + _NAME_ENDS.encode() + b")" + _AROUND + more + b")(?:" + secrets + rb")(?!\w)")


def secret_values(environment: Mapping[str, str], argv: Sequence[str]) -> tuple[str, ...]:
    """The values that `without_secrets` and `command_without_secrets` replace."""
    named = [value for name, value in environment.items() if _is_secret(name)]
    others = [value for name, value in environment.items() if not _is_secret(name)]
    cut = [(value, list(_in_text(value))) for value in others]
    cut += zip(argv, _in_command(argv), strict=True)
    return (*named, *(text[begin:end] for text, spans in cut for begin, end in spans))
