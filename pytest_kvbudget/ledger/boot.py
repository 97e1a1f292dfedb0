"""What is known of one boot while its lines come in."""

from __future__ import annotations

import re
from typing import Final

from pytest_kvbudget.ledger import columns
from pytest_kvbudget.ledger.facts import FactStore, Process, source_of
from pytest_kvbudget.ledger.grammar import FAMILIES, order_of
from pytest_kvbudget.ledger.grammar.common import FRAME, FRAMES, WAITING_FRAMES, WEAK_FRAMES
from pytest_kvbudget.ledger.grammar.model import CompiledRow, Failure, Row, Tier
from pytest_kvbudget.ledger.model import Evidence, Milestone, Value
from pytest_kvbudget.ledger.notation import Reading
from pytest_kvbudget.ledger.prefix import Text
from pytest_kvbudget.ledger.scan import Kind
from pytest_kvbudget.ledger.seen import Seen
from pytest_kvbudget.ledger.wrapped import Wrapped, loose_names
from pytest_kvbudget.verdict import Phase, Provenance

LONGEST_EVIDENCE: Final = 600
"""Characters kept of a line that is evidence."""
LONGEST_TEXT: Final = 16 * 1024
"""Characters of a line that are matched, half from each end; engines print lines of a few thousand."""
PLACE: Final = "place"
"""A reading of this name says which of several like things a line is about: its figures are ranks'."""
TABLE_LINES: Final = 40
"""Lines after an allocation failure that may still be its table."""
MOST_REPEATED: Final = 4096
"""Lines that are known by their look."""
MOST_FAILURES: Final = 256
"""Failure lines kept, one per wording and process; of more than that, those that the engine outlived are forgotten."""

_EXCEPTION = re.compile(
    r"^(?:\[?\w*\]?:? ?)(?:[a-z_][\w]*\.)*(?P<name>[A-Z]\w*(?:Error|Exception|Exit|Interrupt))(?::\s(?P<message>.*))?$"
)
_FINAL: Final = frozenset(
    {"startup_free", "kv_budget_nonpositive", "kv_check_short", "min_kv_budget", "plan_refused", "parallelism_refused"}
)
"""Classes of checks that raise."""
_VLLM_PROCESS: Final = re.compile(r"(?:VllmWorker|Worker_(?:TP|PP|DP|EP)|EngineCore|APIServer|DPSupervisor)")
_CONSEQUENCES: Final = frozenset(
    {
        "EngineDeadError",
        "CancelledError",
        "SystemExit",
        "GeneratorExit",
        "KeyboardInterrupt",
        "BrokenPipeError",
        "ConnectionResetError",
        "EOFError",
        "MQEngineDeadError",
        "AsyncEngineDeadError",
    }
)
_CONSEQUENCE_TEXTS: Final = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "Engine process failed to start",
    "please check the stack trace above",
    "See stack trace",
)


_HARMLESS: Final = ("DEBUG", "INFO", "WARNING")
"""Levels of records that report no failure of the boot."""


class BootState:
    """Everything one boot said so far. Grows with the number of processes and of kinds of lines, not with the log."""

    def __init__(self, family: str | None, *, simulated: bool) -> None:
        self.simulated = simulated
        self.asked_family = family
        self.families: dict[str, int] = {}
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
        self._current: dict[Process, Phase] = {}
        self._frames: dict[Process, tuple[Phase, bool] | None] = {}
        self._wrapped: list[Wrapped] = []
        self._marked: set[int] = set()
        self._table: tuple[int, Process] | None = None
        self._heads: list[Evidence] = []
        self._cells = 0
        self.quiet = False
        """The last line stated no figure, reported no failure and was no event."""
        self.repeated: set[tuple[bytes, bytes]] = set()
        """Looks of lines that say nothing new when they come again."""

    @property
    def family(self) -> str:
        """Grammar table that read it; ``"unknown"`` where no line was recognised."""
        for family in FAMILIES:
            if family in self.families:
                return family
        if "" in self.families:
            return self.asked_family or "torch"
        return "unknown"

    @property
    def peak_usage(self) -> float | None:
        """The highest usage of the KV cache seen, in percent."""
        values = self.facts.values.get("kv_usage_pct", {}).values()
        return max((float(value.value) for value in values), default=None)

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
    def settled(self) -> bool:
        """It serves, and one more line that says so says nothing new."""
        return self.served is not None and self.requests and self.calm

    @property
    def calm(self) -> bool:
        """No failure is open."""
        return not self.failures or all(seen.survived for seen in self.failures)

    def repeat(self, look: tuple[bytes, bytes]) -> None:
        """Remember the look of a piece that says nothing new when it comes again."""
        if len(self.repeated) < MOST_REPEATED:
            self.repeated.add(look)

    @property
    def waits_for_more(self) -> bool:
        """A wrapped sentence is open: the next lines are needed whatever they contain."""
        return bool(self._wrapped)

    def take(self, line: int, text: Text, kind: Kind, *, partial: bool = False) -> list[Milestone]:
        """Read one line; returns the milestones that it shows for the first time.

        Of a ``partial`` line, whose end has not come, no figure counts that its last character belongs to.
        """
        process = self._process(text)
        if len(text.text) > LONGEST_TEXT:
            text = text._replace(text=text.text[: LONGEST_TEXT // 2] + text.text[-LONGEST_TEXT // 2 :])
        if self._wrapped:
            self._continue(line, text, process)
        before = len(self.milestones)
        self.quiet = not self._wrapped
        matched = sum(self._match(compiled, line, text, process, partial=partial) for compiled in kind.rows)
        if kind.trace:
            self._traceback(line, text.text, process, matched=matched > 0 or partial)
        return self.milestones[before:]

    def _process(self, text: Text) -> Process:
        name = text.process
        if name is not None and _VLLM_PROCESS.match(name):
            self.families.setdefault("vllm", 0)
        if text.pid is not None:
            known = self.names.get(text.pid)
            if name is not None and (known is None or len(name) > len(known)) and len(self.names) < 65536:
                self.names[text.pid] = known = name
            return known if text.pid in self.names else name, text.pid
        return name, None

    def _match(self, compiled: CompiledRow, line: int, text: Text, process: Process, *, partial: bool) -> bool:
        row = compiled.row
        if row.follows and not self._in_table(line, process):
            return False
        if compiled.needle not in text.text:
            return False
        if row.failure is not None and row.failure.tier is Tier.ROOT and _talks(text):
            return False
        match = compiled.main.regex.search(text.text)
        evidence = Evidence(line, text.text.strip()[:LONGEST_EVIDENCE])
        if match is None:
            if row.wraps and not partial and compiled.needle in text.text:
                self._wrap(compiled, evidence, process, text)
            return False
        end = len(text.text) - 1 if partial else None
        readings = compiled.main.readings(match, end)
        loose = loose_names(compiled.main, match)
        complete = True
        for part in compiled.parts:
            found = part.regex.search(text.text)
            complete &= found is not None
            if found is not None:
                loose |= loose_names(part, found)
                for name, reading in part.readings(found, end).items():
                    readings.setdefault(name, reading)
        seen = self._accept(compiled, readings, evidence, process)
        wanted = row.wraps and not partial and (loose or not complete)
        if wanted and (seen is not None or row.failure is None):
            self._wrap(compiled, evidence, process, text, loose=loose, seen=seen, found=True)
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
        if row.scope in {"rank", "rank0"}:
            self.workers.add(process)
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
            self._alive(row, readings, evidence)
        elif row.event == "stopping" and self.stopping is None and not any(not seen.survived for seen in self.failures):
            self.stopping = evidence

    def _tabulate(self, row: Row, evidence: Evidence, process: Process) -> None:
        if row.event == "table":
            self._table = (evidence.line, process)
        elif row.event == "head":
            if self._heads and (self._heads[-1].line == evidence.line or self._heads[-1].line < self._cells):
                self._heads = [] if self._heads[-1].line < self._cells else self._heads[:-1]
            self._heads = [*self._heads, evidence][-columns.MOST_HEADS :]
        else:
            self._cells = evidence.line
            for name, reading in columns.readings([head.text for head in self._heads], evidence.text).items():
                self.facts.add(name, process, self.value(name, reading, evidence, row.provenance))

    def _alive(self, row: Row, readings: dict[str, Reading], evidence: Evidence) -> None:
        if self.served is None:
            self.served = evidence
            self.phases.setdefault(Phase.READY, evidence)
            self.now = Phase.READY
            for seen in self.failures:
                seen.survived = True
        if row.event == "served":
            return
        waiting, running = readings.get("waiting"), readings.get("running")
        if waiting is not None and running is not None:
            self.requests = self.requests or running.value != 0 or waiting.value != 0
            self.ran = self.ran or running.value != 0
            if waiting.value != 0 and running.value == 0:
                self.starved = [*self.starved[:1], evidence]
            else:
                self.starved.clear()
        else:
            self.requests = self.requests or "POST" in evidence.text
            self.ran = self.ran or "POST" in evidence.text
            if "GET" in evidence.text:
                return
        if not self.dead:
            for seen in self.failures:
                seen.survived = True

    def _milestone(self, row: Row, evidence: Evidence, process: Process) -> None:
        assert row.phase is not None, "only rows with a phase are milestones"
        order = order_of(self.family)
        for seen in self.failures:
            bare = seen.process == (None, None) and seen.failure.tier is not Tier.ROOT
            # a process cannot go on after these: the line is a late one
            final = seen.failure.failure_class in _FINAL and process[1] is not None
            if (bare or seen.process == process) and not final and order[row.phase] > order[seen.phase] > 0:
                seen.survived = True
        self.phases.setdefault(row.phase, evidence)
        after = row.then or row.phase
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
        frame = self._frames.get(process)
        phase = failure.phase or (frame[0] if frame is not None else self._current.get(process, self.now))
        if failure.failure_class.startswith("hbm"):
            self._table = (evidence.line, process)
        seen = Seen(
            failure=failure,
            row=row,
            evidence=evidence,
            process=process,
            phase=phase,
            framed=frame is not None,
            served=self.served is not None,
            readings=readings,
        )
        for position, known in enumerate(self.failures):
            if known.row is row and known.process == process:
                if known.survived:
                    self.failures[position] = seen
                    return seen
                return None
        if len(self.failures) >= MOST_FAILURES:
            self.failures = [known for known in self.failures if not known.survived]
        if len(self.failures) < MOST_FAILURES:
            self.failures.append(seen)
            return seen
        return None

    def _in_table(self, line: int, process: Process) -> bool:
        if self._table is None:
            return False
        begun, owner = self._table
        return line - begun <= TABLE_LINES and (process in (owner, (None, None)))

    def _wrap(
        self,
        compiled: CompiledRow,
        evidence: Evidence,
        process: Process,
        text: Text,
        *,
        loose: set[str] | None = None,
        seen: Seen | None = None,
        found: bool = False,
    ) -> None:
        wrapped = Wrapped(
            row=compiled,
            evidence=evidence,
            process=process,
            header=text.header,
            spaced=text.text,
            tight=text.text,
            loose=loose or set(),
            seen=seen,
            found=found,
        )
        self._wrapped.append(wrapped)
        self.quiet = False

    def _continue(self, line: int, text: Text, process: Process) -> None:
        still = []
        for wrapped in self._wrapped:
            if process not in {wrapped.process, (None, None)}:
                still.append(wrapped)
                continue
            another = text.record and text.header != wrapped.header
            if another or _EXCEPTION.match(text.text) or text.text.startswith(("Traceback", "  File")):
                continue
            number = wrapped.join(text.text)
            if wrapped.found:
                self._complete(wrapped, line, text.text, number_goes_on=number)
            else:
                self._begin(wrapped)
            if wrapped.left > 0:
                still.append(wrapped)
        self._wrapped = still

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
        evidence = Evidence(line, text.strip()[:LONGEST_EVIDENCE])
        for name, reading in wrapped.readings().items():
            if wrapped.seen is not None:
                if name in loose or name not in wrapped.seen.readings:
                    wrapped.seen.readings[name] = reading
                    wrapped.seen.places[name] = evidence
            elif name in loose or name not in self.facts:
                self.facts.add(name, wrapped.process, self.value(name, reading, evidence, wrapped.row.row.provenance))

    def _traceback(self, line: int, text: str, process: Process, *, matched: bool) -> None:
        stripped = text.lstrip()
        if stripped.startswith("Traceback (most recent call last)"):
            self._frames[process] = None
            return
        frame = FRAME.match(text)
        if frame is not None:
            self._frame(frame["function"], text, process)
            return
        exception = _EXCEPTION.match(stripped)
        if exception is None:
            return
        name, message = exception["name"], exception["message"] or ""
        passed_on = name in _CONSEQUENCES or any(part in message for part in _CONSEQUENCE_TEXTS)
        if not matched and not passed_on and process in self._frames:
            failure = Failure(failure_class="engine_exception", tier=Tier.DEATH)
            self._fail(failure, None, Evidence(line, stripped[:LONGEST_EVIDENCE]), process, {})
        self._frames.pop(process, None)

    def _frame(self, function: str, text: str, process: Process) -> None:
        if "/vllm/" in text:
            self.families.setdefault("vllm", 0)
        phase = FRAMES.get(function)
        if function in WAITING_FRAMES:
            order = order_of(self.family)
            phase = max(self.now, Phase.WORKER_INIT, key=order.__getitem__)
        if phase is None:
            self._frames.setdefault(process, None)
            return
        known = self._frames.get(process)
        if known is None or known[1]:
            self._frames[process] = (phase, function in WEAK_FRAMES)


def _talks(text: Text) -> bool:
    """A record of a level at which nothing has failed: what it names is a hint, a setting or somebody's prompt."""
    return text.record and text.header.lstrip("[ ").startswith(_HARMLESS)
