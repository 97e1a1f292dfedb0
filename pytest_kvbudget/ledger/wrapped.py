"""Sentences that terminals and log shippers break over several lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from typing import Final, Self

import msgspec

from pytest_kvbudget.ledger.facts import Process
from pytest_kvbudget.ledger.grammar.model import CompiledRow
from pytest_kvbudget.ledger.model import Evidence
from pytest_kvbudget.ledger.notation import Pattern, Reading
from pytest_kvbudget.ledger.prefix import Text
from pytest_kvbudget.ledger.seen import Seen
from pytest_kvbudget.ledger.traces import EXCEPTION

WRAPPED_LINES: Final = 6
"""Lines that one wrapped sentence may run over."""

_NUMBER_GOES_ON = re.compile(
    r"(?:[0-9]\.?|-)\n[0-9]|[0-9]\n[.,][0-9]|(?<![0-9.])[0-9]{1,3}(?:,[0-9]{3})*,\n[0-9]{3}(?![0-9.])"
)
_REST_OF_NUMBER = re.compile(r"[0-9,]{0,9}(?:\.[0-9]{1,4})?(?:[\s;)x%]|[.,](?:\s|$)|$)")


class Wrapped(msgspec.Struct, kw_only=True):
    """A sentence whose end has not come."""

    row: CompiledRow
    evidence: Evidence
    process: Process
    header: str
    spaced: str
    """The lines so far, joined where words end."""
    tight: str
    """The lines so far, joined as they are: a terminal breaks in the middle of a word."""
    seen: Seen | None = None
    """The failure that the sentence reports."""
    found: bool = False
    """The row was recognised; else only the plain text that it begins with."""
    loose: set[str]
    """Figures that stand at the end of a line: their last digits may be on the next."""
    left: int = WRAPPED_LINES

    @classmethod
    def of(
        cls,
        text: Text,
        row: CompiledRow,
        evidence: Evidence,
        process: Process,
        *,
        loose: Set[str] = frozenset(),
        seen: Seen | None = None,
        found: bool = False,
    ) -> Self:
        """The sentence that begins in ``text``."""
        return cls(
            row=row,
            evidence=evidence,
            process=process,
            header=text.header,
            spaced=_unescaped(text.text),
            tight=_unescaped(text.text),
            loose=set(loose),
            seen=seen,
            found=found,
        )

    def join(self, text: str) -> bool:
        """Add the next line; returns whether a figure at the end of the last one goes on in it."""
        goes_on = _NUMBER_GOES_ON.search(f"{self.spaced[-24:]}\n{text[:24]}") is not None
        number = goes_on and _REST_OF_NUMBER.match(text) is not None
        text = _unescaped(text)
        self.spaced = f"{self.spaced.rstrip()}{'' if goes_on else ' '}{text.strip()}"
        self.tight += text.rstrip()
        self.left -= 1
        return number

    def search(self, pattern: Pattern) -> re.Match[str] | None:
        """Where the pattern stands in the joined lines."""
        return pattern.regex.search(self.spaced) or pattern.regex.search(self.tight)

    def readings(self) -> dict[str, Reading]:
        """The figures of the joined lines; call it once after every `join`."""
        found: dict[str, Reading] = {}
        ends: set[str] = set()
        for part in (self.row.main, *self.row.parts):
            match = self.search(part)
            if match is None:
                continue
            for name, reading in part.readings(match).items():
                if name not in found:
                    found[name] = reading
                    ends |= {name} if match.end(name) == len(match.string) else set()
        self.loose = ends
        return found


def _unescaped(text: str) -> str:
    """A line without the backslash that says that it goes on."""
    return text.rstrip().removesuffix("\\")


class OpenSentences:
    """The sentences of a boot whose ends have not come."""

    def __init__(self) -> None:
        self._open: list[Wrapped] = []

    @property
    def any(self) -> bool:
        """The next line is needed whatever it contains."""
        return bool(self._open)

    def add(self, wrapped: Wrapped) -> None:
        """A sentence begins."""
        self._open.append(wrapped)

    def joined_by(self, text: Text, process: Process) -> Iterator[tuple[Wrapped, bool]]:
        """The sentences that a line goes on with, joined with it, and whether a figure goes on in it."""
        still = []
        for wrapped in self._open:
            if process not in {wrapped.process, (None, None)}:
                still.append(wrapped)
                continue
            another = text.record and text.header != wrapped.header
            if another or EXCEPTION.match(text.text) or text.text.startswith(("Traceback", "  File")):
                continue
            number_goes_on = wrapped.join(text.text)
            yield wrapped, number_goes_on
            if wrapped.left > 0:
                still.append(wrapped)
        self._open = still


def loose_names(pattern: Pattern, match: re.Match[str]) -> set[str]:
    """Figures of a match that end where the line ends."""
    return {
        name
        for name in pattern.kinds
        if match[name] and match.end(name) == len(match.string) and match[name][-1].isdigit()
    }
