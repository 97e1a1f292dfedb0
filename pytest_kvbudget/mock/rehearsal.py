"""A boot of the simulated engine inside this process: the same ranks on cards in memory, the same log, no time passes.

Searches can be tried on thousands of devices so, and the truth about a shape can be asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from pytest_kvbudget.mock import announce
from pytest_kvbudget.mock.arguments import Arguments, UsageError, parse
from pytest_kvbudget.mock.base import BaseRank
from pytest_kvbudget.mock.boot import Boot
from pytest_kvbudget.mock.conditions import Conditions
from pytest_kvbudget.mock.driver import NEURON_DEVICES, Cards
from pytest_kvbudget.mock.failures import Failure, log_exception, uncaught
from pytest_kvbudget.mock.neuron.announce import check
from pytest_kvbudget.mock.physics import Physics
from pytest_kvbudget.mock.process import Log
from pytest_kvbudget.mock.spec import Faults, MockDevice, PhaseSeconds
from pytest_kvbudget.mock.workers import answer_of, in_core, make_rank, settle

_PIDS: Final = (101, 102, 103)
"""Of the server, the core and the first worker, in the log."""


class Rehearsal(msgspec.Struct, frozen=True, kw_only=True):
    """How a boot went."""

    log: str
    phase: str | None
    """Phase that failed (``"argument"`` before there is an engine, ``"request"`` after the boot); ``None``: none."""
    failure: Failure | None = None
    used_bytes: tuple[int, ...] = ()
    """In use on each card, or on each HBM stack, in the end, by number."""

    @property
    def passed(self) -> bool:
        """It booted, and lived through its request."""
        return self.phase is None


class _NoTree:
    """Shows nothing."""

    def __init__(self, sharing: int) -> None:
        self.sharing = sharing

    def plug(self, card: int, total_bytes: int) -> None:
        """See `DrmTree`."""

    def show(self, card: int, held: dict[str, int], changed: str) -> None:
        """See `DrmTree`."""


class _Memory:
    """What the driver's client is to a rank. Cores are not claimed: there is one engine."""

    def __init__(self, cards: Cards) -> None:
        self._cards = cards

    def fileno(self) -> int:
        raise NotImplementedError

    def free_bytes(self, card: int) -> int:
        return self._cards.free_bytes(card)

    def alloc(self, card: int, size_bytes: int, kind: str = "", limit_bytes: int | None = None) -> tuple[bool, int]:
        return self._cards.take(card, size_bytes, kind, limit_bytes), self._cards.free_bytes(card)

    def free(self, card: int, size_bytes: int, kind: str = "") -> None:
        self._cards.take(card, -size_bytes, kind)

    def claim(self, card: int) -> bool:
        del card
        return True

    def kinds(self, card: int) -> dict[tuple[int, str], int]:
        return self._cards.held(card)


class _Ranks:
    """All ranks in this process, in turn."""

    def __init__(self, ranks: Sequence[tuple[BaseRank, Log]]) -> None:
        self._ranks = ranks

    def run(self, method: str, *arguments: int) -> list[int]:
        """See `Executor`."""
        if len(self._ranks) == 1:
            return [in_core(self._ranks[0][0], method, arguments)]
        return settle([answer_of(rank, log, method, arguments) for rank, log in self._ranks], method)


class _Cache:
    """A compile cache that has everything or nothing."""

    def __init__(self, *, cold: bool) -> None:
        self._cold = cold

    def has(self, key: str) -> bool:
        """See `CompileCache`."""
        del key
        return not self._cold

    def fill(self, key: str) -> None:
        """See `CompileCache`."""


def rehearse(
    spec: MockDevice,
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    cards: Sequence[int] | None = None,
    conditions: Conditions | None = None,
    cold: bool = False,
    request_tokens: int = 0,
) -> Rehearsal:
    """Boot the simulated engine without a process.

    Args:
        spec: the device; its faults and times do not count.
        argv: ``serve MODEL --flag value ...``.
        environ: the engine's environment.
        cards: cards, or on Neuron logical cores, by rank; default: the first ones.
        conditions: what this boot meets.
        cold: whether the compile cache is empty.
        request_tokens: prompt and answer of a request after the boot; 0: none.

    Raises:
        UsageError: for a command line that the engine refuses.
    """
    spec = msgspec.structs.replace(spec, faults=Faults(), seconds=PhaseSeconds())
    arguments = parse(list(argv), fork=spec.dialect == "rdna4")
    text: list[str] = []

    def sink(said: str | bytes) -> None:
        text.append(said if isinstance(said, str) else said.decode(errors="replace"))

    where = list(range(arguments.tensor_parallel_size or spec.ranks) if cards is None else cards)
    server = Log("APIServer", pid=_PIDS[0], sink=sink)
    announce.banner(server, spec, arguments, where, "memory")
    try:
        physics = _configured(server, spec, arguments, environ or {}, conditions or Conditions())
    except Failure as failure:
        uncaught(failure, (), sink=sink)
        return Rehearsal(log="".join(text), phase="argument", failure=failure)
    core, memory = Log("EngineCore", pid=_PIDS[1], sink=sink), _cards(spec, where)
    phase, failed = _engine(physics, core, where, memory, cold=cold, request_tokens=request_tokens)
    used = tuple(spec.device_total - memory.free_bytes(card) for card in range(0, len(memory), memory.sharing))
    return Rehearsal(log="".join(text), phase=phase, failure=failed, used_bytes=used)


def _configured(
    log: Log, spec: MockDevice, arguments: Arguments, environ: Mapping[str, str], conditions: Conditions
) -> Physics:
    announce.check_model(arguments)
    announce.check_arguments(spec, arguments)
    if spec.dialect == "neuron":
        check(arguments, environ)
    physics = Physics(spec, arguments, environ, conditions)
    announce.configured(log, physics)
    return physics


def _cards(spec: MockDevice, where: Sequence[int]) -> Cards:
    sharing = NEURON_DEVICES[spec.platform][2] if spec.dialect == "neuron" else 1
    cards = Cards(_NoTree(sharing), "memory", spec.device_total, spec.idle_bytes, spec.device_skew)
    cards.plug((max(where) + 1) * sharing)
    return cards


def _engine(
    physics: Physics, core: Log, where: list[int], cards: Cards, *, cold: bool, request_tokens: int
) -> tuple[str | None, Failure | None]:
    """The engine core's part: phase and failure, or neither."""
    memory, alone = _Memory(cards), physics.ranks == 1
    logs = [
        core if alone else Log(f"Worker_TP{rank}", pid=_PIDS[2] + rank, sink=core.raw) for rank in range(physics.ranks)
    ]
    executor = _Ranks([(make_rank(physics, rank, where, log, memory), log) for rank, log in enumerate(logs)])
    phase, title = "worker_init", "EngineCore failed to start."

    def entering(name: str) -> None:
        nonlocal phase
        phase = name

    if physics.spec.keeps_cache and not physics.neuron:
        physics.cold = cold
    announce.engine(core, physics)
    try:
        Boot(physics, core, _Cache(cold=cold), executor).run(entering)
        announce.serving(Log("APIServer", pid=_PIDS[0], sink=core.raw), "127.0.0.1:8000")
        if request_tokens:
            phase, title = "request", "EngineCore encountered a fatal error."
            executor.run("prefill", request_tokens)
    except Failure as failure:
        log_exception(core, "core.py:1510", title, failure, ())
        return phase, failure
    return None, None


__all__ = ["Rehearsal", "UsageError", "rehearse"]
