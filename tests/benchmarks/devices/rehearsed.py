"""Boots of a simulated target inside this process, judged and recorded as an attempt is, and ladders over them.

Nothing is told to a search but what the product would tell it: the verdict, the ledger read from the log, and the
device memory that a probe would have shown when the engine was ready.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec

from pytest_kvbudget.archive import RunArchive, timestamp
from pytest_kvbudget.attempt import POOL_SHORT
from pytest_kvbudget.climb import Climb
from pytest_kvbudget.config import LoadedTarget
from pytest_kvbudget.device.model import DeviceMemory
from pytest_kvbudget.engine.backends.mock import MockBackend
from pytest_kvbudget.engine.watch import Outcome
from pytest_kvbudget.hinting import READY, hint_of
from pytest_kvbudget.judging import judge_capacity, judge_end, with_contract_floor, with_idle_evidence
from pytest_kvbudget.ledger.reader import LedgerReader
from pytest_kvbudget.mock.arguments import parse
from pytest_kvbudget.mock.conditions import Conditions, boot_noise, shape_key
from pytest_kvbudget.mock.physics import Physics
from pytest_kvbudget.mock.probability import command_of
from pytest_kvbudget.mock.rehearsal import Rehearsal, rehearse
from pytest_kvbudget.mock.spec import MockDevice
from pytest_kvbudget.question import Known, Question, Setting
from pytest_kvbudget.recording import target_info
from pytest_kvbudget.records import AttemptRecord, MemoryReading, RunInfo
from pytest_kvbudget.request import BootRequest
from pytest_kvbudget.search.model import Finding
from pytest_kvbudget.specs import LadderSpec
from pytest_kvbudget.verdict import Verdict
from pytest_kvbudget.warmth import warm_of

INFO: Final = RunInfo(run="rehearsal", host="none", plugin_version="0", python_version="3")
NOWHERE: Final = RunArchive(Path(tempfile.gettempdir()), INFO)
"""Nothing of it is ever written."""
_BEFORE_COMPILED: Final = {
    "gpu": {"argument", "worker_init", "weights_load", "compile"},
    "neuron": {"argument", "worker_init", "weights_load", "profile", "kv_check", "kv_alloc", "compile"},
}
"""Phases whose failure leaves nothing in the compile cache."""


class Booted(msgspec.Struct, frozen=True, kw_only=True):
    """One boot of a climb."""

    request: BootRequest
    record: AttemptRecord
    boot: int
    """Which boot of the device tree it was, from 1."""


class Climbed(msgspec.Struct, frozen=True, kw_only=True):
    """A ladder's finding and the boots behind it."""

    finding: Finding
    boots: tuple[Booted, ...]
    references: int = 0
    """Boots among them of a scaled pool's reference."""


class Bench:
    """A simulated target on its own device tree: counts boots and keeps a compile cache, as the tree would."""

    def __init__(self, loaded: LoadedTarget) -> None:
        self.loaded = loaded
        self.spec = loaded.target.mock or MockDevice()
        self._backend = MockBackend()
        self._info = target_info(loaded, self._backend, ())
        self._keys: list[str] = []
        self._compiled: set[str] = set()
        self._known: dict[tuple[str, Conditions, bool], tuple[AttemptRecord, bool]] = {}

    def fresh(self) -> None:
        """An idle tree with empty caches; what was rehearsed before is remembered, and need not be again."""
        self._keys.clear()
        self._compiled.clear()

    def boot(self, request: BootRequest) -> Booted:
        """One boot.

        Raises:
            UsageError: the engine refuses the command line.
        """
        argv, environ = command_of(request.shape, self.loaded.environment)
        arguments = parse(argv, fork=self.spec.dialect == "rdna4")
        key = shape_key(arguments, environ)
        self._keys.append(key)
        conditions = self._conditions(key)
        compiled = Physics(self.spec, arguments, environ, conditions).compile_key()
        cold = compiled not in self._compiled
        same = (key, conditions, cold)
        if same not in self._known:
            cards = [int(card) for card in self._backend.slots(self.loaded, request.shape)[0]]
            boot = rehearse(self.spec, argv, environ, cards=cards, conditions=conditions, cold=cold)
            kind = "neuron" if self.spec.dialect == "neuron" else "gpu"
            self._known[same] = self._record(request, boot), boot.phase not in _BEFORE_COMPILED[kind]
        record, fills = self._known[same]
        if fills:
            self._compiled.add(compiled)
        return Booted(request=request, record=record, boot=len(self._keys))

    def _conditions(self, key: str) -> Conditions:
        """As `conditions.begin` draws them: only where it matters which boot this is."""
        if not self.spec.noise_boot and self.spec.estimate != "alternating":
            return Conditions()
        boot = len(self._keys) if self.spec.noise_boot else 2 - len(self._keys) % 2
        return Conditions(boot=boot, noise_bytes=boot_noise(self.spec, key, Counter(self._keys)[key]))

    def _record(self, request: BootRequest, boot: Rehearsal) -> AttemptRecord:
        reader = LedgerReader(self._backend.grammar, simulated=True, patterns=self.loaded.patterns)
        reader.feed(boot.log.encode())
        reader.close()
        ledger = reader.ledger()
        readings: tuple[MemoryReading, ...] = ()
        if boot.passed:
            judged = judge_capacity(ledger, request.shape, request.windows, ready_s=0.0)
            readings = (MemoryReading(moment=READY, devices=self._devices(boot)),)
        else:
            ended = judge_end(Outcome(kind="dead", at=0.0, status=1), ledger)
            judged = with_contract_floor(with_idle_evidence(ended, ledger, self._idle()), ledger, request.shape)
        verdict, cause, message = judged
        short = request.pool == "scaled" and cause is not None and cause.failure_class in POOL_SHORT
        return AttemptRecord(
            run=INFO,
            test=request.test,
            rung=request.rung,
            number=request.number,
            target=self._info,
            shape=request.shape,
            started=timestamp(),
            verdict=Verdict.UNKNOWN if short else verdict,
            cause=cause,
            message=message,
            ledger=ledger,
            hint=hint_of(ledger, request, readings),
            warm=warm_of(ledger),
            pool_short=short,
            memory=readings,
        )

    def _idle(self) -> tuple[DeviceMemory, ...]:
        spec = self.spec
        return tuple(
            DeviceMemory(
                device=str(card),
                total_bytes=spec.device_total,
                used_bytes=spec.idle_bytes + card * spec.device_skew,
                source="rehearsal",
            )
            for card in range(spec.ranks)
        )

    def _devices(self, boot: Rehearsal) -> tuple[DeviceMemory, ...]:
        total = self.spec.device_total
        return tuple(
            DeviceMemory(device=str(card), total_bytes=total, used_bytes=used, source="rehearsal")
            for card, used in enumerate(boot.used_bytes)
        )


def question(loaded: LoadedTarget, ladder: LadderSpec, known: Known | None = None) -> Climb:
    """The ladder as a test of this target would ask it."""
    about = Setting(test="rehearsal", target=target_info(loaded, MockBackend(), ()), known=known or Known())
    return Climb(ladder, loaded.target.shape, about, NOWHERE)


def climb(bench: Bench, ladder: LadderSpec, known: Known | None = None) -> Climbed:
    """Climb with fresh caches until the ladder wants no further boot."""
    bench.fresh()
    asked = question(bench.loaded, ladder, known)
    boots, references = [], 0
    while (plan := asked.next()) is not None:
        references += plan.why == "reference"
        booted = bench.boot(asked.request(plan, plan.shape))
        boots.append(booted)
        Question.tell(asked, plan, booted.record, Path("rehearsed"))
    return Climbed(finding=asked.finding(), boots=tuple(boots), references=references)
