"""Secrets stay out of records, messages and pages: the names of variables and flags tell which values are removed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

REMOVED: Final = "<removed>"
_SECRET_WORDS: Final = frozenset(
    ("token", "secret", "secrets", "password", "passwd", "passphrase", "credential", "credentials", "key", "apikey")
)

SHORTEST: Final = 4
"""Characters of the shortest value that is taken out of running text."""
_NAMED: Final = re.compile(
    r"(?P<name>--[A-Za-z][\w-]*|\b[A-Za-z][\w-]*)(?P<gap>(?<=\w)['\"]?\s?[=:]\s?\[?['\"]?)(?P<value>[^\s'\",\]})-][^\s'\",\]})]*)"
    r"|(?P<flag>--[A-Za-z][\w-]*)(?P<space>\s+)(?P<word>[^\s'\",-][^\s'\",]*)"
)
"""A flag or variable and its value: ``--api-key x``, ``HF_TOKEN=x``, ``'api_key': ['x']``."""
_HINTS: Final = ("key", "token", "secret", "passw", "passphrase", "credential")
"""What a line that names a secret has in it, in small letters: told apart faster than by a pattern."""
_PERHAPS: Final = re.compile(r"(?:key|token|passw(?:or)?d|passphrase|(?:secret|credential)s?)(?![a-z])")
"""Whether such a line may name a secret at all: ``tokens`` and ``keyword`` do not."""
_NUMBER: Final = re.compile(r"[\d.,_]+")
_AROUND: Final = rb"[\w-]*['\"]?[\s=:]+\[?['\"]?"
"""What stands between the first letters of a secret's name and its value."""


def _is_secret(name: str) -> bool:
    """Whether a variable or flag holds a secret, by the words of its name; ``tokens`` and ``tokenizer`` do not."""
    return not _SECRET_WORDS.isdisjoint(re.split(r"[^a-z]+", name.lower()))


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with the values of names that look like secrets replaced."""
    return {name: REMOVED if _is_secret(name) else value for name, value in environment.items()}


def command_without_secrets(argv: Sequence[str]) -> tuple[str, ...]:
    """The command line with the values of flags that look like secrets replaced (``--api-key X``, ``--api-key=X``)."""
    shown: list[str] = []
    hide_next = False
    for word in argv:
        flag, equals, _ = word.partition("=")
        secret = flag.startswith("-") and _is_secret(flag)
        if hide_next and not word.startswith("-"):
            shown.append(REMOVED)
        else:
            shown.append(f"{flag}={REMOVED}" if secret and equals else word)
        hide_next = secret and not equals
    return tuple(shown)


def text_without_secrets(text: str) -> str:
    """Running text, as an engine prints it, with the values of flags and variables that look like secrets replaced."""

    def shown(match: re.Match[str]) -> str:
        name, gap = (match["name"], match["gap"]) if match["name"] else (match["flag"], match["space"])
        value = match["value"] or match["word"]
        return f"{name}{gap}{REMOVED}" if _is_secret(name) and _is_named(name, gap, value) else match[0]

    small = text.lower()
    perhaps = any(hint in small for hint in _HINTS) and _PERHAPS.search(small) is not None
    return _NAMED.sub(shown, text) if perhaps else text


def _is_named(name: str, gap: str, value: str) -> bool:
    """Whether a secret word before a value names it: ``bytes per token: 7701`` and ``key: value`` are prose."""
    if name.startswith("--") or name.isupper():
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
            return self._short.sub(rb"\1" + REMOVED.encode(), whole)
        cut = max(len(clean) - self._hold, line)
        self._kept = clean[cut:]
        return clean[:cut]

    def flush(self) -> bytes:
        """What was kept back."""
        kept, self._kept = self._kept, b""
        return kept if self._short is None else self._short.sub(rb"\1" + REMOVED.encode(), kept)


def _behind_a_name(values: Iterable[bytes]) -> re.Pattern[bytes]:
    names = b"|".join(word.encode() for word in sorted(_SECRET_WORDS, key=len, reverse=True))
    secrets = b"|".join(map(re.escape, values))
    return re.compile(b"((?i:" + names + b")(?![A-Za-z])" + _AROUND + b")(?:" + secrets + rb")(?!\w)")


def secret_values(environment: Mapping[str, str], argv: Sequence[str]) -> tuple[str, ...]:
    """The values that `without_secrets` and `command_without_secrets` replace."""
    shown = command_without_secrets(argv)
    flags = (word.partition("=")[2] or word for word, seen in zip(argv, shown, strict=True) if word != seen)
    return (*(value for name, value in environment.items() if _is_secret(name)), *flags)
