"""What is known of one boot while its lines come in."""

from __future__ import annotations

import re
from typing import Final

from pytest_kvbudget.ledger.facts import FactStore, Process, source_of
from pytest_kvbudget.ledger.grammar import FAMILIES, order_of
from pytest_kvbudget.ledger.grammar.model import CompiledRow, Failure, Row, Tier
from pytest_kvbudget.ledger.grammar.sglang import STANDS_STILL
from pytest_kvbudget.ledger.grammar.vllm import IDLE
from pytest_kvbudget.ledger.matching import Found, find_rows
from pytest_kvbudget.ledger.model import Evidence, Milestone, Value
from pytest_kvbudget.ledger.notation import Reading, read
from pytest_kvbudget.ledger.outlived import NOBODY, is_final, outlived, reopened, replica_of
from pytest_kvbudget.ledger.prefix import Text, talks
from pytest_kvbudget.ledger.scan import Kind
from pytest_kvbudget.ledger.seen import Seen
from pytest_kvbudget.ledger.tables import Tables
from pytest_kvbudget.ledger.traces import NO_TRACE, TraceLine, Traces, read_trace
from pytest_kvbudget.ledger.wrapped import OpenSentences, Wrapped
from pytest_kvbudget.redact import text_without_secrets
from pytest_kvbudget.verdict import Phase, Provenance

LONGEST_EVIDENCE: Final = 600
"""Characters kept of a line that is evidence."""
LONGEST_TEXT: Final = 16 * 1024
"""Characters of a line that are matched, half from each end; engines print lines of a few thousand."""
PLACE: Final = "place"
"""A reading of this name says which of several like things a line is about: its figures are ranks'."""
MOST_FAILURES: Final = 256
"""Failure lines kept, one per wording and process; of more than that, those that the engine outlived are forgotten."""

_ERRORS: Final = ("ERROR", "CRITICAL")
"""Levels of records in which an exception counts without the traceback above it."""
_ANYBODYS: Final = Failure(failure_class="engine_exception", tier=Tier.DEATH)
_BEHIND: Final = Failure(failure_class="core_exception", tier=Tier.DEATH)
"""An exception in a process behind the server, also where its lines name no process."""
_ALONE: Final = Failure(failure_class="lone_exception", tier=Tier.DEATH)
"""An exception without a traceback: nothing says how far the boot was."""
_OF_THE_ENGINE: Final = re.compile(r"\b(?:core|engine|multiproc_\w+|worker_base|\w*worker|\w*model_runner)\.py:")
_OF_A_REQUEST: Final = re.compile(r"\bserving\w*\.py:")
"""Modules that answer requests: exceptions that their records show end a request, not the engine."""
_USAGE: Final = re.compile(r"(?<!CPU )KV cache usage: ([0-9]+(?:\.[0-9]+)?)%")
_ENGINE: Final = re.compile(r"\bEngine \d+:")
_VLLM_PROCESS: Final = re.compile(r"(?:VllmWorker|Worker_(?:TP|PP|DP|EP)|EngineCore|APIServer|DPSupervisor)")
_VLLM_SAID: Final = re.compile(r"(?i:vllm)|NeuronWorker")
_VLLM_RECORD: Final = re.compile(r"[A-Z]{4,8} \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./]+\.py:\d+\]")
_OF_A_DEVICE: Final = frozenset(
    {
        "oom",
        "kernel_fault",
        "devices_busy",
        "device_fault",
        "device_missing",
        "device_stats_unusable",
        "compile_failed",
        "model_not_found",
    }
)
"""Failures that need no engine's name to be told, where a Python exception is of them."""


FULL_PCT: Final = 99
"""Of a pool, from which on no step finds room for the tokens of all running requests."""


def _nothing_moves(readings: dict[str, Reading], text: str) -> bool:
    """The pool is full and nothing was generated since the line before."""
    usage = readings.get("kv_usage_pct")
    full = usage is not None and not isinstance(usage.value, str) and usage.value >= FULL_PCT
    return full and (STANDS_STILL in text or IDLE in text)


def _evidence(line: int, text: str) -> Evidence:
    """What is kept of a line, in records and on pages: never a secret that it names."""
    return Evidence(line, text_without_secrets(text[:LONGEST_EVIDENCE]))


class BootState:
    """Everything one boot said so far. Grows with the number of processes and of kinds of lines, not with the log."""

    def __init__(self, family: str | None, *, simulated: bool) -> None:
        self.simulated = simulated
        self.asked_family = family
        self.families: dict[str, int] = {}
        self._vllm_like = False
        """A record is laid out as vLLM does it, which others do who have its code."""
        self.facts = FactStore()
        self.failures: list[Seen] = []
        self.milestones: list[Milestone] = []
        self.phases: dict[Phase, Evidence] = {}
        self.names: dict[int, str] = {}
        self.workers: set[Process] = set()
        self.now = Phase.UNKNOWN
        self.served: Evidence | None = None
        self.requests = False
        self.ran = False
        """A request was served, or was being served."""
        self.stopping: Evidence | None = None
        self.began: Evidence | None = None
        self.planned = False
        self.starved: list[Evidence] = []
        self._stuck: dict[tuple[Process, str], tuple[float, Evidence]] = {}
        """Per process and engine, the usage and a line in which requests run and wait, the pool is full and nothing is
        generated."""
        self._current: dict[Process, Phase] = {}
        self._traces = Traces()
        self._open = OpenSentences()
        self._marked: set[int] = set()
        self._tables = Tables()
        self._reached = 0
        """The line of the last milestone before it served."""
        self._shared: dict[str | None, Phase] = {}
        """Per replica, how far all of its ranks are by what the engine or its first rank said."""
        self._probed = 0
        """The line of the last probe of its health that it answered."""
        self.quiet = False
        """The last line stated no figure, reported no failure and was no event."""

    @property
    def family(self) -> str:
        """Grammar table that read it; ``"unknown"`` where no line was recognised."""
        for family in FAMILIES:
            if family in self.families:
                return family
        if self._vllm_like:
            return "vllm"
        if "" in self.families:
            return self.asked_family or "torch"
        return "unknown"

    @property
    def peak_usage(self) -> float | None:
        """The highest usage of the KV cache seen, in percent."""
        values = self.facts.values.get("kv_usage_pct", {}).values()
        return max((float(value.value) for value in values), default=None)

    @property
    def of_vllm(self) -> bool:
        """A line shows that vLLM runs, on whatever device: its own settings may be turned."""
        if "vllm" in self.families or self._vllm_like or Phase.KV_CHECK in self.phases:
            return True
        said = (*(seen.evidence for seen in self.failures), *(shown.evidence for shown in self.milestones))
        checked = any(seen.failure.phase is Phase.KV_CHECK for seen in self.failures)
        return checked or any(_VLLM_SAID.search(evidence.text) for evidence in said)

    @property
    def starving(self) -> bool:
        """Requests wait that may never run, as far as the last lines show."""
        return bool(self.starved or self._stuck)

    @property
    def pinned(self) -> bool:
        """The KV cache's bytes were given, not worked out."""
        return "kv_pinned" in self.facts or "kv_cache_memory_bytes" in self.facts

    @property
    def dead(self) -> bool:
        """A line says that a process of the engine is gone or that the engine gave up."""
        return any(
            seen.failure.tier is Tier.WRAPPER or seen.failure.failure_class in {"engine_killed", "host_oom_killed"}
            for seen in self.failures
            if not seen.survived
        )

    @property
    def _alone(self) -> bool:
        """No line names a rank."""
        shards = self.facts.values.get("tensor_parallel_size", {}).values()
        return self.workers <= {NOBODY} and all(value.value == 1 for value in shards)

    @property
    def settled(self) -> bool:
        """It serves, and one more line that says so says nothing new."""
        return self.served is not None and self.requests and self.calm

    @property
    def calm(self) -> bool:
        """No failure is open."""
        return not self.failures or all(seen.survived for seen in self.failures)

    @property
    def waits_for_more(self) -> bool:
        """A wrapped sentence is open: the next lines are needed whatever they contain."""
        return self._open.any

    def wait_no_longer(self) -> None:
        """The rest of a wrapped sentence will not come."""
        self._open = OpenSentences()

    def take(self, line: int, text: Text, kind: Kind, *, partial: bool = False) -> list[Milestone]:
        """Read one line; returns the milestones that it shows for the first time.

        Of a ``partial`` line, whose end has not come, no figure counts that its last character belongs to.
        """
        process = self._process(text)
        if len(text.text) > LONGEST_TEXT:
            text = text._replace(text=text.text[: LONGEST_TEXT // 2] + text.text[-LONGEST_TEXT // 2 :])
        if self._open.any:
            self._continue(line, text, process)
        before = len(self.milestones)
        said = read_trace(text.text) if kind.trace else NO_TRACE
        self._enter(said, process)
        self.quiet = not self._open.any
        matched = partial
        for found in find_rows(text.text, kind.rows, partial=partial):
            if self._match(found, line, text, process, partial=partial):
                matched = True
        if said.raises:
            self._raised(line, text, process, matched=matched, passed_on=said.passed_on)
        return self.milestones[before:]

    def _process(self, text: Text) -> Process:
        name = text.process
        if name is not None and _VLLM_PROCESS.match(name):
            self.families.setdefault("vllm", 0)
        if not (self._vllm_like or self.families) and _VLLM_RECORD.match(text.header):
            self._vllm_like = True
        if text.pid is not None:
            known = self.names.get(text.pid)
            # of one process lines may name less, and in other containers other processes have its number
            if name is not None and (known is None or not known.startswith(name)) and len(self.names) < 65536:
                self.names[text.pid] = known = name
            return known if text.pid in self.names else name, text.pid
        return name, None

    def _match(self, found: Found, line: int, text: Text, process: Process, *, partial: bool) -> bool:
        row = found.row.row
        if row.follows or row.event == "cells":
            # its rows name no process; whoever failed prints it
            owner = self._tables.owner(line, process)
            if owner is None and row.follows:
                return False
            process = owner or process
        if row.failure is not None and row.failure.tier is Tier.ROOT and talks(text):
            return False
        evidence = _evidence(line, text.text.strip())
        if not found.whole:
            self._wrap(Wrapped.of(text, found.row, evidence, process))
            return False
        seen = self._accept(found.row, dict(found.readings), evidence, process)
        wanted = row.wraps and not partial and (found.loose or not found.complete)
        if wanted and (seen is not None or row.failure is None):
            self._wrap(Wrapped.of(text, found.row, evidence, process, loose=found.loose, seen=seen, found=True))
        return True

    def _accept(
        self, compiled: CompiledRow, readings: dict[str, Reading], evidence: Evidence, process: Process
    ) -> Seen | None:
        """What a matched row says; returns the failure that it reports for the first time."""
        row = compiled.row
        self.quiet = self.quiet and not (readings or row.flags or row.failure is not None or row.event)
        if row.known and not row.follows:
            family = compiled.family or ""
            self.families[family] = self.families.get(family, 0) + 1
        elif row.failure is not None and row.failure.failure_class in _OF_A_DEVICE and read_trace(evidence.text).raises:
            self.families.setdefault("", 0)
        if row.scope in {"rank", "rank0"}:
            self.workers.add(process)
        if row.event == "alive" and "kv_usage_pct" in readings:
            # writers that share a file join their records
            usages = [read(printed, "percent") for printed in _USAGE.findall(evidence.text)]
            readings["kv_usage_pct"] = max((*usages, readings["kv_usage_pct"]), key=lambda usage: float(usage.value))
        seen = None
        if row.failure is not None:
            seen = self._fail(row.failure, row, evidence, process, readings)
        else:
            place = readings.pop(PLACE, None)
            self._record(row, readings, evidence, process if place is None else (str(place.value), None))
        self._event(row, readings, evidence, process)
        return seen

    def _record(self, row: Row, readings: dict[str, Reading], evidence: Evidence, process: Process) -> None:
        for name, reading in readings.items():
            self.facts.add(name, process, self.value(name, reading, evidence, row.provenance))
        for flag in row.flags:
            value = Value(value=True, unit="flag", evidence=evidence, provenance=self._provenance(row.provenance))
            self.facts.add(flag, process, value)

    def value(self, name: str, reading: Reading, evidence: Evidence, stated: Provenance) -> Value:
        """A reading as a value with its line, source and precision."""
        return Value(
            value=reading.value,
            unit=reading.unit,
            evidence=evidence,
            provenance=self._provenance(source_of(name, stated)),
            precision=reading.precision,
        )

    def _provenance(self, stated: Provenance) -> Provenance:
        return Provenance.SIMULATED if self.simulated else stated

    def _event(self, row: Row, readings: dict[str, Reading], evidence: Evidence, process: Process) -> None:
        if row.phase is not None:
            self._milestone(row, evidence, process)
        if row.event == "start":
            self.began = self.began or evidence
        elif row.event == "plan":
            self.planned = True
        elif row.event == "asked":
            self.requests = True
        elif row.event == "simulated":
            self.simulated = True
        elif row.event in {"table", "head", "cells"}:
            self._tabulate(row, evidence, process)
        elif row.event in {"served", "alive"}:
            self._alive(row, readings, evidence, process)
        elif row.event == "stopping" and self.stopping is None and not any(not seen.survived for seen in self.failures):
            self.stopping = evidence

    def _tabulate(self, row: Row, evidence: Evidence, process: Process) -> None:
        if row.event == "table":
            self._tables.begin(evidence.line, process)
        elif row.event == "head":
            self._tables.head(evidence)
        else:
            for name, reading in self._tables.cells(evidence).items():
                self.facts.add(name, process, self.value(name, reading, evidence, row.provenance))

    def _alive(self, row: Row, readings: dict[str, Reading], evidence: Evidence, process: Process) -> None:
        if self.served is None:
            self.served = evidence
            self.phases.setdefault(Phase.READY, evidence)
            self.now = Phase.READY
            for seen in self.failures:
                # of ranks in files of their own, a request's failure may be read before the start of the server;
                # where a check has failed and nothing else was done since, it is somebody else's server
                another = self._reached > seen.evidence.line
                outlives = seen.phase is not Phase.REQUEST and (another or not is_final(seen))
                seen.survived = seen.survived or outlives
        if row.event == "served":
            return
        waiting, running = readings.get("waiting"), readings.get("running")
        named = _ENGINE.search(evidence.text)
        engine = (process, "" if named is None else named.group())
        if waiting is not None and running is not None:
            self.requests = self.requests or running.value != 0 or waiting.value != 0
            self.ran = self.ran or running.value != 0
            if waiting.value != 0 and running.value == 0:
                self.starved = [*self.starved[:1], evidence]
            elif waiting.value != 0 and _nothing_moves(readings, evidence.text):
                # the first step of a large batch looks so too: one line is no proof, nor are two of a pool that fills;
                # where vLLM rounds to an idle 0.0, SGLang means its 0.00
                usage = float(readings["kv_usage_pct"].value)
                before, first = self._stuck.get(engine, (usage, evidence))
                same = before == usage or STANDS_STILL in evidence.text
                self._stuck[engine] = (usage, first if same else evidence)
                self.starved = [first, evidence] if same and first is not evidence else []
            else:
                self._stuck.pop(engine, None)
                self.starved.clear()
        else:
            self.requests = self.requests or "POST" in evidence.text
            self.ran = self.ran or "POST" in evidence.text
        if self.dead:
            return
        since, probe = evidence.line, "GET" in evidence.text
        if probe:
            # one answer may come while the engine dies
            since, self._probed = self._probed, evidence.line
        for seen in self.failures:
            seen.survived = seen.survived or seen.evidence.line < since

    def _milestone(self, row: Row, evidence: Evidence, process: Process) -> None:
        assert row.phase is not None, "only rows with a phase are milestones"
        order = order_of(self.family)
        for seen in self.failures:
            if outlived(seen, row, process, order, alone=self._alone):
                seen.survived = True
        self.phases.setdefault(row.phase, evidence)
        after = row.then or row.phase
        if row.phase is not Phase.READY:
            self._reached = evidence.line
        if row.scope in {"engine", "rank0"}:
            replica = replica_of(process[0])
            if order[after] >= order[self._shared.get(replica, Phase.UNKNOWN)]:
                self._shared[replica] = after
        mine = self._current.get(process, Phase.UNKNOWN)
        if order[after] >= order[mine]:
            self._current[process] = after
        if order[after] >= order[self.now]:
            self.now = after
        if id(row) not in self._marked:
            self._marked.add(id(row))
            self.milestones.append(Milestone(phase=row.phase, evidence=evidence))

    def _fail(
        self, failure: Failure, row: Row | None, evidence: Evidence, process: Process, readings: dict[str, Reading]
    ) -> Seen | None:
        ended = self.stopping is not None or failure.phase is Phase.ARGUMENT
        if self.served is not None and ended:
            return None
        if failure.tier is Tier.WRAPPER or (failure.tier is Tier.DEATH and row is not None):
            reopened(self.failures, evidence.line, served=self.served is not None)
        framed = self._traces.phase(process)
        mine = self._phase_of(process)
        if row is not None and (failure.tier >= Tier.DEATH or failure.failure_class == "host_oom_killed"):
            mine = self.now  # it reports what happened to another process
        if framed is not None and self._traces.loose(process):
            # of what this frame is around, the last milestone may be further on
            framed = max(framed, mine, key=order_of(self.family).__getitem__)
        phase = failure.phase or framed or mine
        if failure.failure_class.startswith("hbm"):
            self._tables.begin(evidence.line, process)
        seen = Seen(
            failure=failure,
            row=row,
            evidence=evidence,
            process=process,
            phase=phase,
            framed=framed is not None,
            served=self.served is not None,
            readings=readings,
        )
        for position, known in enumerate(self.failures):
            if known.row is row and known.process == process:
                if known.survived:
                    self.failures[position] = seen
                    return seen
                if known.phase is Phase.UNKNOWN and seen.framed:
                    # loggers print the message first, then the traceback that ends in it
                    known.phase, known.framed = seen.phase, True
                return None
        if len(self.failures) >= MOST_FAILURES:
            self.failures = [known for known in self.failures if not known.survived]
        if len(self.failures) < MOST_FAILURES:
            self.failures.append(seen)
            return seen
        return None

    def _phase_of(self, process: Process) -> Phase:
        """Where a process is: at its own last milestone, or where all ranks are by what the engine or rank 0 said."""
        own = self._current.get(process)
        if own is None:
            return self.now
        replica = replica_of(process[0])
        shared = (phase for other, phase in self._shared.items() if replica is None or other in {None, replica})
        return max((own, *shared), key=order_of(self.family).__getitem__)

    def _wrap(self, wrapped: Wrapped) -> None:
        self._open.add(wrapped)
        self.quiet = False

    def _continue(self, line: int, text: Text, process: Process) -> None:
        for wrapped, number_goes_on in self._open.joined_by(text, process):
            if wrapped.found:
                self._complete(wrapped, line, text.text, number_goes_on=number_goes_on)
            else:
                self._begin(wrapped)

    def _begin(self, wrapped: Wrapped) -> None:
        """The first line said too little to be recognised: look at the joined ones."""
        match = wrapped.search(wrapped.row.main)
        if match is None:
            return
        readings = wrapped.readings()
        wrapped.seen = self._accept(wrapped.row, readings, wrapped.evidence, wrapped.process)
        wrapped.found = True
        if wrapped.seen is None and wrapped.row.row.failure is not None:
            wrapped.left = 0

    def _complete(self, wrapped: Wrapped, line: int, text: str, *, number_goes_on: bool) -> None:
        loose = wrapped.loose if number_goes_on else set()
        evidence = _evidence(line, text.strip())
        for name, reading in wrapped.readings().items():
            if wrapped.seen is not None:
                if name in loose or name not in wrapped.seen.readings:
                    wrapped.seen.readings[name] = reading
                    wrapped.seen.places[name] = evidence
            elif name in loose or name not in self.facts:
                self.facts.add(name, wrapped.process, self.value(name, reading, evidence, wrapped.row.row.provenance))

    def _enter(self, said: TraceLine, process: Process) -> None:
        """What a line says of where a process is in its code, before its own figures and failures count."""
        if said.begins:
            self._traces.begin(process)
        if said.frame:
            if said.family:
                self.families.setdefault(said.family, 0)
            phase = said.phase
            if said.waits:
                phase = max(self.now, Phase.WORKER_INIT, key=order_of(self.family).__getitem__)
            self._traces.frame(process, phase, weak=said.weak)

    def _raised(self, line: int, text: Text, process: Process, *, matched: bool, passed_on: bool) -> None:
        if _OF_A_REQUEST.search(text.header):
            matched = True  # the client was told; the engine knows nothing of it
        # of a cut log the last line of a traceback may be all there is
        alone = text.header.startswith(_ERRORS) and self.served is None
        if not matched and not passed_on and (alone or process in self._traces):
            failure = _BEHIND if _OF_THE_ENGINE.search(text.header) else _ANYBODYS
            if process not in self._traces:
                failure = _ALONE
            self._fail(failure, None, _evidence(line, text.text.lstrip()), process, {})
        self._traces.end(process)
