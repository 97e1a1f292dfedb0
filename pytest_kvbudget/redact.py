"""Secrets stay out of records, messages and pages: the names of variables and flags tell which values are removed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from pytest_kvbudget.shape import Shape

REMOVED: Final = "<removed>"
_SECRET_WORDS: Final = frozenset(
    ("token", "secret", "secrets", "password", "passwd", "passphrase", "credential", "credentials", "key", "apikey")
)


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


def shape_without_secrets(shape: Shape) -> Shape:
    """The shape with secrets removed from its environment and its further flags."""
    return msgspec.structs.replace(
        shape, env=without_secrets(shape.env), extra_args=command_without_secrets(shape.extra_args)
    )
