"""One boot of one shape, from the clean gate to the teardown, with its record."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from pytest_kvbudget.archive import RunArchive, timestamp
from pytest_kvbudget.clean import CleanGate
from pytest_kvbudget.config import LoadedTarget
from pytest_kvbudget.device.cgroup import room_of
from pytest_kvbudget.device.gates import MemoryGates
from pytest_kvbudget.device.host import read_host
from pytest_kvbudget.device.leases import Lease
from pytest_kvbudget.device.model import ProbeError
from pytest_kvbudget.device.trace import LAUNCH, TRACE_FILE, MemoryTrace, WindowMemory
from pytest_kvbudget.engine.client import EngineClient
from pytest_kvbudget.engine.health import Health, probe
from pytest_kvbudget.engine.kernel import KernelKill, killed_for_memory
from pytest_kvbudget.engine.model import (
    Backend,
    Command,
    EngineControlError,
    EngineProcess,
    Launcher,
    LaunchError,
)
from pytest_kvbudget.engine.ports import free_port, owned_by
from pytest_kvbudget.engine.reap import STATE_FILE
from pytest_kvbudget.engine.soak import Soak, SoakSpec
from pytest_kvbudget.engine.survival import SurvivalRun, SurvivalSpec
from pytest_kvbudget.engine.watch import Outcome, Watch
from pytest_kvbudget.gate import cautions_for, refusal_for
from pytest_kvbudget.judging import (
    Judgement,
    by_gate,
    first_line,
    judge_capacity,
    judge_end,
    judge_gates,
    judge_soak,
    judge_survival,
    launch_failed,
    reason,
    with_contract_floor,
    with_kernel_evidence,
)
from pytest_kvbudget.ledger.classes import verdict_of
from pytest_kvbudget.ledger.model import BootLedger, Cause
from pytest_kvbudget.ledger.reader import LedgerReader
from pytest_kvbudget.memory import READY, REQUEST, SOAK, AttemptMemory
from pytest_kvbudget.plan_check import reconcile
from pytest_kvbudget.planning import Experience, footprint_of, plan_for
from pytest_kvbudget.records import LOG_FILE, AttemptRecord, MemoryReading, TargetInfo, Timings
from pytest_kvbudget.redact import Scrubber, command_without_secrets, secret_values, without_secrets
from pytest_kvbudget.search.hints import hint_from
from pytest_kvbudget.search.model import Hint
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.verdict import Phase, Verdict

FAILED_STOP_S: Final = 5.0
"""Grace for what is left of an engine whose boot failed: it has nothing to finish."""
_PROGRESS_S: Final = 0.1


POOL_SHORT: Final = frozenset(("kv_windows_short", "kv_check_short"))
"""Failure classes of a pool that does not hold what it must."""

INTERRUPTED: Final = "interrupted: the run ended before this boot had a verdict"


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a boot is doing, for people who wait for it."""

    label: str
    phase: Phase
    elapsed_s: float
    text: str


Progress = Callable[[Snapshot], None]
"""Called from the thread that boots, about ten times a second at most, and at each change of phase."""


class BootRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks for which shape."""

    test: str
    shape: Shape
    rung: str | None = None
    number: int = 1
    windows: int | None = None
    """How many full windows the KV cache must hold by the engine's own count; ``None`` asks for nothing."""
    pool: Literal["fixed", "scaled"] = "fixed"
    axis: str = "max_model_len"


class Attempt:
    """One boot. `run` boots and judges; `close` tears down. The record on disk is never behind the truth for long."""

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
        experience: Experience,
        gate: bool,
        archive: RunArchive,
        progress: Progress | None,
    ) -> None:
        self.request = request
        self._loaded, self._backend, self._launcher = loaded, backend, launcher
        self._lease, self._archive, self._progress = lease, archive, progress
        self._experience, self._gate = experience, gate
        self._memory = AttemptMemory(
            backend.probe(loaded, lease.devices), clean, lease.names, rate_hz=loaded.target.limits.trace_hz
        )
        self._reader = LedgerReader(backend.grammar, simulated=backend.simulated, patterns=loaded.patterns)
        self._process: EngineProcess | None = None
        self._watch: Watch | None = None
        self._command: Command | None = None
        self._shown = (Phase.UNKNOWN, 0.0)
        self._closed = False
        self.folder = archive.attempt_folder(request.test, request.rung, request.number)
        self.record = AttemptRecord(
            run=archive.info,
            test=request.test,
            rung=request.rung,
            number=request.number,
            target=target_info(loaded, backend, lease.devices),
            shape=request.shape.redacted(),
            started=timestamp(),
            verdict=Verdict.UNKNOWN,
            message=INTERRUPTED,
            timings=Timings(lease_wait_s=lease_wait_s),
        )
        self.record_path = self._save()

    # -- what callers see

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
        return self._command is not None and probe(self._command.host, self._command.port) is Health.READY

    @property
    def url(self) -> str:
        """Base address of the engine."""
        if self._command is None:
            raise RuntimeError("nothing was started")
        return f"http://{self._command.host}:{self._command.port}"

    @property
    def root_pid(self) -> int:
        """Process id of the engine's first process."""
        if self._process is None:
            raise RuntimeError("nothing was started")
        return self._process.root_pid

    def pids(self) -> Sequence[int]:
        """Every living process of the engine."""
        return () if self._process is None else self._process.pids()

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
        """Boot and judge. The verdict, whatever it is, is in the record; nothing is raised for it."""
        if not self._wait_clean() or not self._plan():
            return
        target = self._loaded.target
        try:
            port = target.port or free_port(target.host)
        except OSError as error:
            self._decide(
                *launch_failed(f"host {target.host!r} is no address of this machine: {error.strerror or error}")
            )
            return
        self._command = command = self._backend.render(self._loaded, self.request.shape, self._lease.devices, port)
        self.record.command = command_without_secrets(command.argv)
        self.record.environment = without_secrets(command.env_added)
        self.log_path.touch()
        self._save()
        self._memory.start()
        try:
            self._process = self._launcher.launch(
                command,
                log_path=self.log_path,
                state_path=self.folder / STATE_FILE,
                lease_descriptors=self._lease.descriptors,
                critical=self._backend.critical,
            )
        except LaunchError as error:
            self._decide(*launch_failed(str(error)))
            return
        self._watch = self._make_watch(self._process, command)
        self._judge(self._watch.until_ready())

    def _plan(self) -> bool:
        """Price the shape; what the law forbids is not booted, and the attempt ends here with the law's numbers."""
        self.record.plan = plan_for(self._loaded, self.request.shape, self._experience)
        for caution in cautions_for(self._loaded, self.request.shape, axis=self.request.axis):
            self._note(caution)
        cause = refusal_for(self._loaded, self.request.shape, self._experience) if self._gate else None
        is_rung = self.request.rung is not None
        if cause is None or (is_rung and verdict_of(cause.failure_class) is Verdict.FAIL):
            # Arithmetic may save a boot, but never bounds a finding: a rung that may fail for memory is booted.
            return True
        said = f"{cause.failure_class}: {cause.sentence}; --kvbudget-no-gate boots it all the same"
        self._decide(Verdict.ERROR, cause, said)
        return False

    def _make_watch(self, process: EngineProcess, command: Command) -> Watch:
        return Watch(
            process,
            self._reader,
            host=command.host,
            port=command.port,
            limits=self._loaded.target.limits,
            owns_port=lambda: owned_by(process.pids(), command.host, command.port),
            tick=self._tick,
            critical=self._backend.critical,
            scrubber=Scrubber(secret_values(command.env_added, command.argv)),
        )

    def _wait_clean(self) -> bool:
        """Device memory is back at its idle level, or the attempt ends here."""
        begun = time.monotonic()
        try:
            readings = self._memory.wait_clean()
        except ProbeError as error:
            self._note(f"device memory cannot be read: {error}")
            readings = ()
        except TimeoutError as error:
            self._timed(clean_wait_s=time.monotonic() - begun)
            self._decide(*reason(Verdict.ERROR, Phase.WORKER_INIT, "devices_not_clean", str(error)))
            return False
        self._timed(clean_wait_s=time.monotonic() - begun)
        with suppress(ProbeError):
            self.record.host = read_host()
        if readings:
            self.record.memory += (MemoryReading(moment="idle", devices=readings),)
        return True

    def _judge(self, outcome: Outcome) -> None:
        ledger = self._reader.ledger()
        self.record.exit_status = outcome.status
        self._take_phases()
        if outcome.kind == "ready":
            self._timed(boot_s=self._since_launch(outcome.at))
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
                self._timed(ended_s=max(last_s, self._since_launch(outcome.at)))
            ended = with_kernel_evidence(judge_end(outcome, ledger), self._kernel_kills())
            judged = self._if_scaled(with_contract_floor(ended, ledger, self.request.shape))
        self.record.hint = self._hint(ledger)
        self._reconcile(ledger)
        self._decide(*judged, at=outcome.at)

    def _reconcile(self, ledger: BootLedger) -> None:
        """Predicted against measured, and what this boot measured kept for the next plan."""
        self._experience.tell(self.request.shape, ledger)
        if self.record.plan is not None:
            self.record.reconciled = reconcile(self.record.plan, ledger)

    def _kernel_kills(self) -> tuple[KernelKill, ...]:
        if self._watch is None or not self._watch.gone:
            return ()
        return killed_for_memory(self._watch.gone, self._watch.launched)

    def _take_phases(self) -> None:
        """Phases that the log has shown since the last time, for the record and as marks of the trace."""
        if self._watch is None:
            return
        for phase in self._watch.phases[len(self.record.timings.phases) :]:
            if phase.phase is Phase.READY:
                continue  # marked when /health said so
            self._memory.mark(str(phase.phase), self._watch.launched + phase.start_s)
        self._timed(phases=tuple(self._watch.phases))

    def _if_scaled(self, judged: Judgement) -> Judgement:
        """A pool that was only scaled to this rung and came out too small is no verdict on the rung."""
        _, cause, _ = judged
        if self.request.pool != "scaled" or cause is None or cause.failure_class not in POOL_SHORT:
            return judged
        self.record.pool_short = True
        return Verdict.UNKNOWN, cause, f"the scaled pool came out too small: {cause.sentence}"

    def _hint(self, ledger: BootLedger) -> Hint:
        ready = [reading for reading in self.record.memory if reading.moment == "ready"]
        free = [device.free_bytes for reading in ready for device in reading.devices]
        return hint_from(
            ledger,
            axis=self.request.axis,
            shape=self.request.shape,
            windows=self.request.windows or 1,
            scaled=self.request.pool == "scaled",
            free_bytes=min(free, default=None),
        )

    # -- what the test body adds

    def body_ended(self, *, failed: bool) -> None:
        """The body is over. An engine that died under it is not a pass; gates on memory have the last word.

        Args:
            failed: the body raised something: then it is not for the gates to judge.
        """
        if self.record.verdict is not Verdict.PASS or self._died(wait=True) or failed:
            return
        if not self.answering:
            said = f"the engine lives, and {self.url}/health answers no more"
            self._decide(*reason(Verdict.UNKNOWN, Phase.REQUEST, "health_lost", said))
            return
        if self.record.survival is not None:
            return
        limits = self._loaded.target.limits
        gates = MemoryGates(
            min_free_bytes=limits.min_free, max_used_bytes=limits.max_used, max_growth_bytes=limits.max_growth
        )
        judged = self._judge_memory(gates, since=LAUNCH)
        if judged is not None:
            self._decide(*judged)

    def survive(self, spec: SurvivalSpec, asked: MemoryGates) -> None:
        """Send the engine its largest real request, and judge what it did and what memory was left.

        Limits that ``asked`` leaves open are the target's; of free memory then the backend's.
        """
        window = self._window()
        tokens = self._reader.ledger().get("kv_tokens")
        self._memory.mark(REQUEST)
        self.record.survival = result = SurvivalRun(
            self.client,
            spec,
            window=window,
            pool_tokens=tokens if isinstance(tokens, int) else None,
            alive=lambda: self.serving,
            host_free=room_of(self.root_pid),
        ).run()
        if result.first_bad is not None and self._died(wait=True):
            self.record.survival = result.after_death()
            self._save()
            return
        limits = self._loaded.target.limits
        gates = MemoryGates(
            min_free_bytes=_first(asked.min_free_bytes, limits.min_free, self._backend.min_free_bytes(self._loaded)),
            max_used_bytes=_first(asked.max_used_bytes, limits.max_used),
            max_growth_bytes=_first(asked.max_growth_bytes, limits.max_growth),
        )
        judged = judge_survival(result) or self._judge_memory(gates, since=REQUEST)
        if judged is None:
            slowest = result.requests[0]
            judged = Verdict.PASS, None, f"survived {slowest.generated_tokens:,} tokens of its largest request"
        self._decide(*judged)

    def soak(self, spec: SoakSpec, *, max_growth_per_hour: int | None = None) -> None:
        """Send mixed traffic for a while, and judge whether the engine lived and memory stayed."""
        window = self._window()
        self._memory.mark(SOAK)
        result = Soak(self.client, spec, window=window, alive=lambda: self.serving).run()
        self.record.soak = msgspec.structs.replace(result, trends=self._memory.trends(SOAK))
        if (result.failed or not self.serving) and self._died(wait=True):
            return
        judged = judge_soak(self.record.soak, max_growth_per_hour)
        if judged is not None:
            self._decide(*judged)
        self._save()

    def _window(self) -> int:
        """Tokens of one request that the engine takes."""
        if self._watch is None or self.record.verdict not in {Verdict.PASS, Verdict.MARGINAL}:
            raise RuntimeError(f"{self.request.test}: no engine that could be sent anything")
        return self.request.shape.max_model_len or int(self._reader.ledger().number("max_model_len"))

    def _judge_memory(self, gates: MemoryGates, *, since: str) -> Judgement | None:
        survival = self.record.survival
        host_free = None if survival is None else survival.least_host_free_bytes
        self.record.gates = self._memory.judge(gates, since=since, host_free_bytes=host_free)
        return judge_gates(self.record.gates)

    def gate_failed(self, message: str) -> None:
        """The test body refused this rung: FAIL by its gate, unless the engine had died underneath it."""
        if not self._died(wait=True):
            self._decide(*by_gate(first_line(message)))

    def body_unknown(self, message: str) -> None:
        """The body ran out of time: no verdict."""
        if not self._died(wait=True):
            said = f"no verdict from the test body: {first_line(message)}"
            self._decide(*reason(Verdict.UNKNOWN, Phase.READY, "body_timeout", said))

    def body_skipped(self, message: str) -> None:
        """The body judged nothing: it was skipped, or expects to fail."""
        if not self._died(wait=True):
            said = f"the test body judged nothing: {first_line(message)}"
            self._decide(*reason(Verdict.UNKNOWN, Phase.READY, "body_skipped", said))

    def body_error(self, message: str) -> None:
        """The body raised something that is no judgement of the rung."""
        if not self._died(wait=True):
            said = f"the test body raised {first_line(message)}"
            self._decide(*reason(Verdict.ERROR, Phase.READY, "body_error", said))

    def body_interrupted(self) -> None:
        """The run ended while the body ran: no verdict, and nothing is waited for."""
        said = "the run ended before the test body did"
        self._decide(*reason(Verdict.UNKNOWN, Phase.READY, "interrupted", said))

    def _died(self, *, wait: bool) -> bool:
        """Whether the engine is dead; if so, its end is judged from its log and becomes the verdict."""
        if self._watch is None or self._closed:
            return False
        dead = self._watch.until_dead() if wait else self._watch.look()
        if dead is None:
            return False
        self._watch.read_to_end()
        self._judge(dead)
        return True

    # -- the end

    def leave(self) -> None:
        """Hand a serving engine over: it is not ours any more and nothing here will end it."""
        if self._process is None or not self.serving:
            raise RuntimeError(f"{self.request.test}: no serving engine to leave")
        self._process.leave()
        pid = self._process.root_pid
        what = f"{self._loaded.name}, left serving {self.record.shape.describe()} on {self.url}; to end it: kill {pid}"
        self._lease.tell(run=self.record.run.run, purpose=what, pid=pid)
        self.record.left_serving = True
        self.record.endpoint = self.url
        self._closed = True
        if self._watch is not None:
            self._watch.close()
        self._end_trace()
        self._finish_record()

    def close(self) -> None:
        """End the engine and wait until device memory is back. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        if "client" in self.__dict__:
            self.client.close()
        if self._process is not None:
            self._teardown(self._process)
        if self._watch is not None:
            self._watch.close()
        self._end_trace()
        self._finish_record()

    def _teardown(self, process: EngineProcess) -> None:
        begun = time.monotonic()
        alive = self._watch is not None and self._watch.living
        healthy = alive and self.record.verdict in {Verdict.PASS, Verdict.MARGINAL}
        self._memory.teardown()
        try:
            process.stop(self._loaded.target.limits.stop_seconds if healthy else FAILED_STOP_S)
        except EngineControlError as error:
            self._note(str(error))
        stopped = time.monotonic()
        self._timed(teardown_s=stopped - begun)
        try:
            readings = self._memory.wait_clean()
        except (ProbeError, TimeoutError) as error:
            # Not this rung's fault any more: the next boot's clean gate decides what it means.
            self._note(f"device memory did not come back: {error}")
            return
        if readings:
            self._timed(release_s=time.monotonic() - stopped)
            self.record.memory += (MemoryReading(moment="released", devices=readings),)

    def _end_trace(self) -> None:
        try:
            tolerance = self._loaded.target.limits.release_tolerance
            self.record.trace = self._memory.finish(self.folder / TRACE_FILE, tolerance_bytes=tolerance)
        except OSError as error:
            self._note(f"the memory trace cannot be written: {error}")
        self._reconcile_footprint()
        for problem in self._memory.problems():
            self._note(f"memory trace: {problem}")
        self._memory.close()

    def _reconcile_footprint(self) -> None:
        """What the footprint law of an expert plan expected, against the most that the driver showed: it only warns."""
        trace = self.record.trace
        seen = () if trace is None else (window for phase in trace.phases for window in phase.devices if window)
        high_water = max((window.peak_used_bytes for window in seen), default=None)
        totals = [device.total_bytes for reading in self.record.memory for device in reading.devices]
        expected = footprint_of(self._reader.ledger(), min(totals, default=None))
        if expected is not None:
            self.record.reconciled += reconcile(expected, self._reader.ledger(), high_water_bytes=high_water)

    def _finish_record(self) -> None:
        self.record.ledger = self._reader.ledger()
        self._save()

    # -- the record

    def _decide(self, verdict: Verdict, cause: Cause | None, message: str, *, at: float | None = None) -> None:
        if at is not None:
            self._timed(verdict_s=time.monotonic() - at)
        self.record.verdict, self.record.cause, self.record.message = verdict, cause, message
        self._finish_record()

    def _save(self) -> Path:
        return self._archive.write_attempt(self.folder, self.record)

    def _timed(self, **changes: Any) -> None:  # noqa: ANN401 - fields of Timings
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in changes.items()}
        self.record.timings = msgspec.structs.replace(self.record.timings, **rounded)

    def _note(self, text: str) -> None:
        self.record.notes += (text,)

    def _read_memory(self, moment: str) -> None:
        try:
            readings = self._memory.read()
            if readings:
                self.record.memory += (MemoryReading(moment=moment, devices=readings),)
        except ProbeError as error:
            self._note(f"device memory cannot be read when {moment}: {error}")

    def _since_launch(self, at: float) -> float:
        return at - self._watch.launched if self._watch is not None else 0.0

    def _tick(self, phase: Phase, elapsed_s: float, text: str) -> None:
        shown_phase, shown_at = self._shown
        if self._progress is None or (phase is shown_phase and elapsed_s - shown_at < _PROGRESS_S):
            return
        self._shown = (phase, elapsed_s)
        label = self.request.rung or self.record.shape.describe()
        with suppress(OSError):  # a terminal that went away is no reason to lose a boot
            self._progress(Snapshot(label=label, phase=phase, elapsed_s=elapsed_s, text=text))


def _first(*sizes: int | None) -> int | None:
    """The first that is given."""
    return next((size for size in sizes if size is not None), None)


def target_info(loaded: LoadedTarget, backend: Backend, devices: tuple[str, ...]) -> TargetInfo:
    """What records say about the target."""
    target = loaded.target
    shown = msgspec.structs.replace(
        target,
        env=without_secrets(target.env),
        command=None if target.command is None else command_without_secrets(target.command),
        shape=target.shape.redacted(),
    )
    return TargetInfo(
        name=loaded.name,
        backend=loaded.target.backend,
        launcher=loaded.target.launcher,
        simulated=backend.simulated,
        origin=loaded.origin,
        devices=devices,
        config=msgspec.to_builtins(shown),
    )
