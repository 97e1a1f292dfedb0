"""Where one boot ends and the next begins in a stream of many."""

from __future__ import annotations

import re
from enum import Enum, auto
from functools import lru_cache
from typing import Final

from pytest_kvbudget.ledger.boot import BootState
from pytest_kvbudget.ledger.prefix import Text
from pytest_kvbudget.ledger.scan import Kind
from pytest_kvbudget.verdict import Phase

_START: Final = re.compile(
    r"vLLM API server version |█\s+version \d|Clav Version|non-default args: |args: Namespace\(|"
    r"server_args=ServerArgs\(|llama_server: initializing"
)
_PLAN: Final = re.compile(r"budget \(total x util\)")
_ENGINE: Final = re.compile(r"Initializing (?:a V[01] LLM|an LLM) engine \(v")
_SINGLE: Final = re.compile(r"APIServer(?:_\d+)?$|EngineCore(?:_DP\d+|_\d+)?$|DPSupervisor$")
"""Processes of which a boot has one of each name; of workers a boot may have several under one name."""

MOST_PIDS: Final = 65536
"""Process ids remembered of one boot."""


class _Banner(Enum):
    """What the first lines of a boot are."""

    NONE = auto()
    START = auto()
    PLAN = auto()
    ENGINE = auto()


@lru_cache(maxsize=256)
def _banner(text: str) -> _Banner:
    """Remembered because the longest lines of a log are among them, and come again with every boot of a crash loop."""
    if _START.search(text):
        return _Banner.START
    if _PLAN.search(text):
        return _Banner.PLAN
    return _Banner.ENGINE if _ENGINE.search(text) else _Banner.NONE


@lru_cache(maxsize=256)
def _single(process: str | None) -> bool:
    return process is not None and _SINGLE.match(process) is not None


class Cutter:
    """Watches processes and banners.

    A boot begins where a process that exists once comes with another pid, or where a banner, a plan table or an engine
    start comes after the boot had got beyond that point.
    """

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._retired: set[int] = set()
        self._own: set[int] = set()
        self._engine_started = False

    def shows_engine(self, text: Text, kind: Kind) -> bool:
        """Whether a line of another service shows an engine beside this one, and not a further part of it."""
        if text.process is not None and _single(text.process):
            return text.process in self._pids or not self._pids
        return kind.starts and _banner(text.text) is not _Banner.NONE

    def begins_boot(self, state: BootState, text: Text, kind: Kind) -> bool:
        """Whether this line is the first of another boot; lines of the old one's processes are then not read."""
        if self.retired(text):
            return False
        banner = _banner(text.text) if kind.starts else _Banner.NONE
        begins = self._new_pid(text) or self._again(state, text, banner)
        if begins:
            # in a container every boot has the same pids: then none of them tells an old process from a new one
            again = text.pid is None or text.pid in self._own
            self._retired = set() if again else set(self._own)
            self._own.clear()
            self._pids.clear()
            self._engine_started = False
        if text.pid is not None:
            if len(self._own) < MOST_PIDS:
                self._own.add(text.pid)
            if text.process is not None and _single(text.process):
                self._pids[text.process] = text.pid
        if banner is _Banner.ENGINE:
            self._engine_started = True
        return begins

    def retired(self, text: Text) -> bool:
        """Whether a process of the boot before this one printed the line."""
        return text.pid is not None and text.pid in self._retired

    def _new_pid(self, text: Text) -> bool:
        if text.pid is None or text.process is None or not _single(text.process):
            return False
        known = self._pids.get(text.process)
        return known is not None and known != text.pid

    def _again(self, state: BootState, text: Text, banner: _Banner) -> bool:
        if banner is _Banner.NONE:
            return False
        beyond = state.now not in {Phase.UNKNOWN, Phase.ARGUMENT}
        ended = any(not seen.survived for seen in state.failures) or state.stopping is not None
        if banner is _Banner.START:
            return beyond or ended
        if banner is _Banner.PLAN:
            return state.planned
        return text.process is None and (self._engine_started or (ended and beyond))
