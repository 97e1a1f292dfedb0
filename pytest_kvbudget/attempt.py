"""One boot of one shape, from the clean gate to the teardown, with its record."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

from pytest_kvbudget.archive import RunArchive
from pytest_kvbudget.as_asked import with_other_shape
from pytest_kvbudget.cancel import Cancellation
from pytest_kvbudget.clean import CleanGate
from pytest_kvbudget.config import LoadedTarget
from pytest_kvbudget.device.leases import Lease
from pytest_kvbudget.device.model import ProbeError
from pytest_kvbudget.device.trace import MemoryTrace, WindowMemory
from pytest_kvbudget.ending import end_trace, teardown
from pytest_kvbudget.engine.client import EngineClient
from pytest_kvbudget.engine.health import Health, probe
from pytest_kvbudget.engine.model import Backend, Launcher
from pytest_kvbudget.engine.ports import Ports, owned_by
from pytest_kvbudget.engine.watch import Outcome, Watch
from pytest_kvbudget.exercise import Exercise
from pytest_kvbudget.hinting import hint_of
from pytest_kvbudget.judgement import Judgement, reason
from pytest_kvbudget.judging import (
    by_gate,
    first_line,
    judge_capacity,
    judge_end,
    with_contract_floor,
    with_idle_evidence,
    with_kernel_evidence,
)
from pytest_kvbudget.launching import Launched, Site, launch
from pytest_kvbudget.ledger.model import BootLedger
from pytest_kvbudget.ledger.reader import LedgerReader
from pytest_kvbudget.memory import READY, REQUEST, AttemptMemory
from pytest_kvbudget.plan_check import reconcile
from pytest_kvbudget.planning import Experience
from pytest_kvbudget.progress import Progress, Ticker
from pytest_kvbudget.recording import CALLED_OFF, INTERRUPTED, Recording, target_info
from pytest_kvbudget.records import LOG_FILE, AttemptRecord
from pytest_kvbudget.redact import Scrubber, secret_values
from pytest_kvbudget.request import BootRequest
from pytest_kvbudget.search.model import Hint
from pytest_kvbudget.starting import SetLabel, allowed, devices_clean
from pytest_kvbudget.verdict import Phase, Verdict
from pytest_kvbudget.warmth import warm_of

POOL_SHORT: Final = frozenset(("kv_windows_short", "kv_check_short"))
"""Failure classes of a pool that does not hold what it must."""


class Attempt:
    """One boot. `run` boots and judges; `close` tears down. The record on disk is never behind the truth for long.

    It is one thread's at a time; only `cancel` may be called by another while it runs.
    """

    def __init__(
        self,
        request: BootRequest,
        *,
        loaded: LoadedTarget,
        backend: Backend,
        launcher: Launcher,
        lease: Lease,
        lease_wait_s: float,
        clean: CleanGate,
        ports: Ports,
        set_label: SetLabel,
        experience: Experience,
        gate: bool,
        archive: RunArchive,
        progress: Progress | None,
    ) -> None:
        self.request = request
        self._site = Site(loaded, backend, launcher, lease, ports)
        self._experience, self._gate, self._set_label = experience, gate, set_label
        self._cancellation = Cancellation()
        self._limits = limits = loaded.target.limits
        self._memory = AttemptMemory(backend.probe(loaded, lease.devices), clean, lease.names, rate_hz=limits.trace_hz)
        self._reader = LedgerReader(backend.grammar, simulated=backend.simulated, patterns=loaded.patterns)
        self._watch: Watch | None = None
        self._launched: Launched | None = None
        self._closed = False
        self._recording = Recording(
            archive,
            request,
            target_info(loaded, backend, lease.devices),
            ledger=self._reader.ledger,
            lease_wait_s=lease_wait_s,
        )
        self._ticker = Ticker(request.rung or request.test, progress)
        self._min_free = backend.min_free_bytes(loaded)

    # -- what callers see

    @property
    def record(self) -> AttemptRecord:
        """The record as it stands."""
        return self._recording.record

    @property
    def record_path(self) -> Path:
        """Where the record is."""
        return self._recording.path

    @property
    def lost(self) -> str | None:
        """Why the record on disk does not say what happened; ``None`` where it does."""
        return self._recording.lost

    @property
    def folder(self) -> Path:
        """Where the record and everything beside it are."""
        return self._recording.folder

    @property
    def log_path(self) -> Path:
        """The complete engine log; it may not exist where nothing was started."""
        return self.folder / LOG_FILE

    @property
    def ledger(self) -> BootLedger:
        """What the boot said so far about memory."""
        return self._reader.ledger()

    @property
    def serving(self) -> bool:
        """An engine of ours is up, and neither it nor its core has died as far as the keeper knows."""
        return self._watch is not None and not self._closed and self._watch.living

    @property
    def answering(self) -> bool:
        """Its health endpoint says 200."""
        command = None if self._launched is None else self._launched.command
        return command is not None and probe(command.host, command.port) is Health.READY

    @property
    def closed(self) -> bool:
        """It was ended by us, or handed over: what becomes of it says nothing about the boot."""
        return self._closed

    @property
    def url(self) -> str:
        """Base address of the engine."""
        if self._launched is None:
            raise RuntimeError("nothing was started")
        return f"http://{self._launched.command.host}:{self._launched.command.port}"

    @property
    def root_pid(self) -> int:
        """Process id of the engine's first process."""
        if self._launched is None:
            raise RuntimeError("nothing was started")
        return self._launched.process.root_pid

    def pids(self) -> Sequence[int]:
        """Every living process of the engine."""
        return () if self._launched is None else self._launched.process.pids()

    def memory_since(self, phase: str) -> tuple[WindowMemory | None, ...]:
        """Device memory of every rank since a phase began; empty where nobody can read it."""
        self._take_phases()
        return self._memory.since(phase)

    def memory_trace(self) -> MemoryTrace | None:
        """The memory trace so far."""
        self._take_phases()
        return self._memory.snapshot()

    @cached_property
    def client(self) -> EngineClient:
        """Client of the engine's HTTP interface."""
        return EngineClient(self.url)

    # -- the boot

    def run(self) -> None:
        """Boot and judge. The verdict, whatever it is, is in the record; nothing is raised for it.

        Raises:
            CancelledError: it was called off before it had a verdict; the record goes on saying that it was
                interrupted. What is left of the engine is for `close`.
        """
        if not devices_clean(self._recording, self._memory, self._cancellation, self._set_label):
            return
        if not allowed(self._recording, self.request, self._site.loaded, self._experience, gate=self._gate):
            return
        self._cancellation.check()
        launched = launch(self._site, self.request, self._recording, self._memory)
        if launched is None:
            return
        self._launched = launched
        self._watch = self._make_watch(launched)
        self._judge(self._watch.until_ready())

    def _make_watch(self, launched: Launched) -> Watch:
        command, process = launched.command, launched.process
        return Watch(
            process,
            self._reader,
            host=command.host,
            port=command.port,
            limits=self._limits,
            owns_port=lambda: owned_by(process.pids(), command.host, command.port),
            tick=self._tick,
            critical=self._site.backend.critical,
            kernel=launched.kernel,
            launched=launched.at,
            scrubber=Scrubber(secret_values(command.env_added, command.argv)),
        )

    def _tick(self, phase: Phase, elapsed_s: float, text: str) -> None:
        """At each step of the watch, before it looks for deaths: one that a cancellation causes is never judged."""
        self._cancellation.check()
        self._ticker.tick(phase, elapsed_s, text)

    def _judge(self, outcome: Outcome) -> None:
        ledger = self._reader.ledger()
        self.record.exit_status = outcome.status
        self._take_phases()
        if outcome.kind == "ready":
            self._recording.timed(boot_s=self._since_launch(outcome.at))
            self._memory.mark(READY, outcome.at)
            self._read_memory("ready")
            judged = self._if_scaled(
                judge_capacity(
                    ledger, self.request.shape, self.request.windows, ready_s=self.record.timings.boot_s or 0.0
                )
            )
        else:
            if self.record.timings.boot_s is None:
                # The last lines of a log may be read a moment after the death that they explain.
                last_s = max((phase.start_s for phase in self.record.timings.phases), default=0.0)
                self._recording.timed(ended_s=max(last_s, self._since_launch(outcome.at)))
            kills = () if self._watch is None else self._watch.kernel_kills()
            idle = [device for reading in self.record.memory if reading.moment == "idle" for device in reading.devices]
            end = judge_end(outcome, ledger, compiles=self.request.compiles)
            ended = with_idle_evidence(with_kernel_evidence(end, kills), ledger, idle)
            ended = with_other_shape(ended, ledger, self.request.shape)
            judged = self._if_scaled(with_contract_floor(ended, ledger, self.request.shape))
        self.record.hint = self._hint(ledger)
        self.record.warm = warm_of(ledger)
        self._reconcile(ledger)
        self._recording.decide(*judged, at=outcome.at)

    def _reconcile(self, ledger: BootLedger) -> None:
        """Predicted against measured, and what this boot measured kept for the next plan."""
        self._experience.tell(self.request.shape, ledger, self.record.target.devices)
        if self.record.plan is not None:
            self.record.reconciled = reconcile(self.record.plan, ledger)

    def _take_phases(self) -> None:
        """Phases that the log has shown since the last time, for the record and as marks of the trace."""
        if self._watch is None:
            return
        for phase in self._watch.phases[len(self.record.timings.phases) :]:
            if phase.phase is Phase.READY:
                continue  # marked when /health said so
            self._memory.mark(str(phase.phase), self._watch.launched + phase.start_s)
        self._recording.timed(phases=tuple(self._watch.phases))

    def _if_scaled(self, judged: Judgement) -> Judgement:
        """A pool that was only scaled to this rung and came out too small is no verdict on the rung."""
        _, cause, _ = judged
        if self.request.pool != "scaled" or cause is None or cause.failure_class not in POOL_SHORT:
            return judged
        self.record.pool_short = True
        return Verdict.UNKNOWN, cause, f"the scaled pool came out too small: {cause.sentence}"

    def _hint(self, ledger: BootLedger) -> Hint:
        asked = self._memory.since(REQUEST) if any(use.survival is not None for use in self.record.uses) else ()
        return hint_of(ledger, self.request, self.record.memory, asked)

    def cancel(self) -> None:
        """Call the boot off, from any thread: `run` ends at its next step, unless it has its verdict by then."""
        self._cancellation.ask()

    def unwanted(self) -> None:
        """Nobody asked for the verdict: what served was judged by no test body; what failed had failed by itself."""
        if self.record.message == INTERRUPTED:
            self.record.message = CALLED_OFF
        elif self.record.verdict in {Verdict.PASS, Verdict.MARGINAL}:
            said = "interrupted: this boot was called off before a test body judged it"
            self._recording.decide(*reason(Verdict.UNKNOWN, Phase.READY, "interrupted", said))

    @property
    def cancelled(self) -> bool:
        """It was called off, before or after its verdict."""
        return self._cancellation.asked

    # -- what tests add

    def used_by(self, test: str) -> Exercise:
        """A test has the engine from now on; what it asks and what comes of it is a part of the record of its own."""
        return Exercise(
            self,
            self._recording,
            self._memory,
            self._limits,
            test=test,
            min_free=self._min_free,
        )

    def hint_again(self) -> None:
        """The least that was free while the engine was asked counts too."""
        self.record.hint = self._hint(self.ledger)

    def gate_failed(self, message: str) -> None:
        """The test body refused this rung: FAIL by its gate, unless the engine had died underneath it."""
        if not self.died():
            self._recording.decide(*by_gate(first_line(message)))

    def body_unknown(self, message: str) -> None:
        """The body ran out of time: no verdict."""
        self._body_said(Verdict.UNKNOWN, "body_timeout", f"no verdict from the test body: {first_line(message)}")

    def body_skipped(self, message: str) -> None:
        """The body judged nothing: it was skipped, or expects to fail."""
        self._body_said(Verdict.UNKNOWN, "body_skipped", f"the test body judged nothing: {first_line(message)}")

    def body_error(self, message: str) -> None:
        """The body raised something that is no judgement of the rung."""
        self._body_said(Verdict.ERROR, "body_error", f"the test body raised {first_line(message)}")

    def _body_said(self, verdict: Verdict, failure_class: str, said: str) -> None:
        if not self.died():
            self._recording.decide(*reason(verdict, Phase.READY, failure_class, said))

    def body_interrupted(self) -> None:
        """The run ended while the body ran: no verdict, and nothing is waited for."""
        said = "the run ended before the test body did"
        self._recording.decide(*reason(Verdict.UNKNOWN, Phase.READY, "interrupted", said))

    def settle(self) -> None:
        """Boot, body and checks are over: the verdict is final."""
        self.record.settled = True
        self._recording.save()

    def died(self) -> bool:
        """Whether the engine is dead; if so, its end is judged from its log and becomes the verdict."""
        if self._watch is None or self._closed:
            return False
        dead = self._watch.until_dead()
        if dead is None:
            return False
        self._watch.read_to_end()
        self._judge(dead)
        return True

    # -- the end

    def leave(self) -> None:
        """Hand a serving engine over: it is not ours any more and nothing here will end it."""
        if self._launched is None or not self.serving:
            raise RuntimeError(f"{self.request.test}: no serving engine to leave")
        self._launched.process.leave()
        pid = self.root_pid
        name = self._site.loaded.name
        what = f"{name}, left serving {self.record.shape.describe()} on {self.url}; to end it: kill {pid}"
        self._site.lease.tell(run=self.record.run.run, purpose=what, pid=pid)
        self.record.left_serving = True
        self.record.endpoint = self.url
        self._closed = True
        if self._watch is not None:
            self._watch.close()
        end_trace(self._recording, self._memory, self._limits, self.ledger)
        self._recording.finish()

    def close(self) -> None:
        """End the engine and wait until device memory is back. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        if "client" in self.__dict__:
            self.client.close()
        if self._launched is not None:
            alive = self._watch is not None and self._watch.living
            passed = {Verdict.PASS, Verdict.MARGINAL}
            healthy = alive and self.record.verdict in passed and all(use.bore for use in self.record.uses)
            teardown(self._launched.process, self._recording, self._memory, self._limits, healthy=healthy)
            self._site.ports.give_back(self._launched.command.port)
        if self._watch is not None:
            self._watch.close()
        end_trace(self._recording, self._memory, self._limits, self.ledger)
        self._recording.finish()

    # -- small things

    def _read_memory(self, moment: str) -> None:
        try:
            self._recording.memory(moment, self._memory.read())
        except ProbeError as error:
            self._recording.note(f"device memory cannot be read when {moment}: {error}")

    def _since_launch(self, at: float) -> float:
        return at - self._watch.launched if self._watch is not None else 0.0
