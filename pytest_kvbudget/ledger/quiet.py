"""Which lines of a boot say nothing new, told by their look and without reading them.

A settled engine says every few seconds that it serves, a progress bar is redrawn hundreds of times. Such lines are
judged by the block where that is possible: one search for the few that do say something.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from pytest_kvbudget.ledger.boot import FULL_PCT, BootState
from pytest_kvbudget.ledger.grammar.sglang import STANDS_STILL
from pytest_kvbudget.ledger.grammar.vllm import IDLE
from pytest_kvbudget.ledger.scan import Kind, Survey, split_pieces

_DIGITS: Final = bytes.maketrans(b"123456789", b"000000000")
MOST_REPEATED: Final = 4096
"""Pieces that are known by their look."""
_SPEAKER_WITHIN: Final = 160
_SPEAKER_BYTES: Final = 48
_LOAD = re.compile(
    rb"(?:Running: |#running-req: )([0-9]+).*?(?:Waiting: |Pending: |#queue-req: )([0-9]+)(?:.*?usage: ([0-9.]+)%)?"
)
_STATISTICS: Final = " reqs, Waiting: "
_QUEUE: Final = "#queue-req: "
_QUEUED = re.compile(rb"#queue-req: [1-9]")
_SHARE = re.compile(rb"(?<!swa )token usage: ([0-9.]+)")
_IDLE: Final = IDLE.encode()
_IDLE_WITHIN: Final = 160
"""Before `_RARE`, where a record says what was generated."""
_STAND_STILL: Final = (STANDS_STILL.encode(), _IDLE)
_RARE: Final = ord("W")
"""Begins ``Waiting``, and little else in a log: one byte is found quicker than a word."""
_BEFORE_BYTES: Final = 20
_BEHIND_BYTES: Final = 45
"""Around `_RARE`, what statistics say: ``Running: 3 reqs, Waiting: 0 reqs, GPU KV cache usage: 12.3%``."""
_WAITING: Final = b"Waiting: "
_SAID = re.compile(
    rb"(?:Running: (?P<running>[0-9]+) reqs, )?(?P<at>Waiting: )(?P<waiting>[0-9]+) reqs, "
    rb"(?:GPU )?KV cache usage: (?P<usage>[0-9]{1,3}(?:\.[0-9]+)?)%"
)
_MOST_KNOWN: Final = 4096
"""Statistics that are remembered before all are forgotten."""


def _look(piece: bytes) -> tuple[bytes, bytes]:
    """Who says a piece, and the piece as far as it does not matter which digits it has."""
    return piece[: _speaker_end(piece)], piece.translate(_DIGITS)


def _speaker_end(piece: bytes) -> int:
    end = piece.find(b")", 0, _SPEAKER_WITHIN)
    return end + 1 if end >= 0 else _SPEAKER_BYTES


class Quiet:
    """Tells what one boot says again; a new boot needs a new one."""

    def __init__(self, state: BootState) -> None:
        """``state``: what the boot said so far; it is asked, never changed."""
        self._state = state
        self._repeated: set[tuple[bytes, bytes]] = set()
        """Looks of pieces that say nothing new when they come again."""
        self._known: set[bytes] = set()
        """Statistics in which no request waits alone and the KV cache is not fuller than it was."""

    def known(self, piece: bytes, kind: Kind) -> bool:
        """Whether a piece says nothing new."""
        if self._state.waits_for_more:
            return False
        if kind.alive:
            return self._state.settled and self._serves_on(piece)
        return kind.repeats and self._state.calm and _look(piece) in self._repeated

    def remember(self, piece: bytes, kind: Kind) -> None:
        """Of a piece that was read last: where it said nothing, none that looks like it will."""
        if kind.repeats and self._state.quiet and len(self._repeated) < MOST_REPEATED and not piece.startswith(b"{"):
            self._repeated.add(_look(piece))

    def loud(self, survey: Survey, block: bytes) -> Mapping[bytes, Kind]:
        """Keys of the pieces that have to be looked at, as long as the boot `stays` quiet."""
        state = self._state
        picked = survey.picked
        if not picked or state.waits_for_more or not state.calm:
            return picked
        quiet: set[bytes] = set()
        if state.settled and not state.starving:
            alive = {key: kind for key, kind in picked.items() if kind.alive and not kind.quotes}
            any_loud = self._any_loud(frozenset[str]().union(*(kind.load for kind in alive.values())), block)
            quiet.update(key for key, kind in alive.items() if not (any_loud and kind.load))
        if survey.zeroed:
            quiet |= self._redrawn(survey, block)
        return {key: kind for key, kind in picked.items() if key not in quiet} if quiet else picked

    def stays(self) -> bool:
        """What was no reason to look at a line is none now."""
        state = self._state
        return state.calm and not state.starving and not state.waits_for_more

    def _any_loud(self, load: frozenset[str], block: bytes) -> bool:
        """Whether a line among those that tell how many requests run and wait says something new."""
        if load - {_STATISTICS, _QUEUE}:
            return True
        if _QUEUE in load and (_QUEUED.search(block) or self._fuller(block)):
            return True
        return _STATISTICS in load and self._any_loud_statistics(block)

    def _fuller(self, text: bytes) -> bool:
        """Whether SGLang's pool is fuller than it was."""
        peak = self._state.peak_usage
        return any(peak is None or 100 * float(share) > peak for share in set(_SHARE.findall(text)))

    def _any_loud_statistics(self, block: bytes) -> bool:
        if _WAITING in block[: _BEFORE_BYTES + len(_WAITING)]:
            return True  # no line of an engine begins so
        known, find = self._known, block.find
        at = find(_RARE, _BEFORE_BYTES)
        while True:
            while (said := block[at - _BEFORE_BYTES : at + _BEHIND_BYTES]) in known:
                at = find(_RARE, at + _BEHIND_BYTES)
            if at < 0:
                return False
            if block.startswith(_WAITING, at) and not self._harmless(said, block[max(at - _IDLE_WITHIN, 0) : at]):
                return True
            at = find(_RARE, at + 1)

    def _harmless(self, said: bytes, before: bytes) -> bool:
        match, peak = _SAID.search(said), self._state.peak_usage
        if match is None or match.start("at") != _BEFORE_BYTES or peak is None or float(match["usage"]) > peak:
            return False
        if int(match["waiting"]):
            if not int(match["running"] or 0):
                return False
            if float(match["usage"]) >= FULL_PCT:
                return _IDLE not in before  # not in ``said``: it is looked for each time
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known.add(said)
        return True

    def _serves_on(self, piece: bytes) -> bool:
        """Of a line that only says that a settled engine serves: no request waits alone, no new peak of the usage."""
        if self._fuller(piece):
            return False
        said = _LOAD.findall(piece)
        if not said:
            return True
        if self._state.starving:
            return False
        peak, still = self._state.peak_usage, any(word in piece for word in _STAND_STILL)
        return all(
            (waiting == b"0" or (running != b"0" and not still))
            and (not usage or (peak is not None and float(usage) <= peak))
            for running, waiting, usage in said
        )

    def _redrawn(self, survey: Survey, block: bytes) -> set[bytes]:
        """Keys of whole pieces of which every one is known by its look."""
        repeated = self._repeated
        found: set[bytes] = set()
        speakers: dict[bytes, int] = {}
        for key, kind in survey.picked.items():
            if kind.alive or not kind.repeats or kind.quotes:
                continue
            end = _speaker_end(key)
            if b"0" in key[:end]:
                speakers[key] = end
            elif (key[:end], key) in repeated:
                found.add(key)
        if speakers:
            pieces = split_pieces(block)
            said = {
                (piece[: speakers[key]], key) for key, piece in zip(survey.keys, pieces, strict=True) if key in speakers
            }
            found |= speakers.keys() - {key for speaker, key in said - repeated}
        return found
