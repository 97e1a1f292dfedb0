"""One pytest process' use of us: its settings, archive and engines, and what fixtures get from them."""

from __future__ import annotations

import platform
import socket
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

import pytest

from pytest_kvbudget.archive import RunArchive, new_run_id
from pytest_kvbudget.attempt import Attempt
from pytest_kvbudget.booting import Booting
from pytest_kvbudget.budget.model import Plan
from pytest_kvbudget.config import ConfigError
from pytest_kvbudget.engine.backends.flags import check_extra_args
from pytest_kvbudget.exercise import Exercise
from pytest_kvbudget.history import Booted, History, Resume
from pytest_kvbudget.identity import device_readings, identity_of
from pytest_kvbudget.planning import plan_for
from pytest_kvbudget.plugin import BOOT_FIXTURE
from pytest_kvbudget.plugin.asking import remember
from pytest_kvbudget.plugin.checks import (
    MarkerError,
    boot_gate_of,
    decode_shape,
    one_rung,
    shape_changes,
    specs_of,
    sweep_of,
)
from pytest_kvbudget.plugin.contradictions import contradiction
from pytest_kvbudget.plugin.engine import KvEngine, KvRung
from pytest_kvbudget.plugin.header import header_lines, simulated_warning
from pytest_kvbudget.plugin.items import COUNTS_AS_PASSED, RUNG, USE, RungContext, Use, must_be_recorded, searches
from pytest_kvbudget.plugin.pages import Pages
from pytest_kvbudget.plugin.progress import ProgressLine
from pytest_kvbudget.plugin.settings import Settings, misplaced, read_settings
from pytest_kvbudget.plugin.timers import Timers
from pytest_kvbudget.plugin.wording import boot_failure, described
from pytest_kvbudget.pool import DRY_RUN_PORT, EnginePool, PoolError
from pytest_kvbudget.records import AttemptRecord, BootIdentity, RunInfo
from pytest_kvbudget.request import BootRequest
from pytest_kvbudget.search.turn import turned
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.vantage import turns_nothing
from pytest_kvbudget.verdict import Verdict
from pytest_kvbudget.warmth import cache_stands

if TYPE_CHECKING:
    from pytest_kvbudget.plugin.rows import Rows


class NoEngineError(Exception):
    """There is no engine, and that says nothing about the shape that was asked for."""


class Serve(Protocol):
    """What ``kv_serve`` is."""

    def __call__(self, shape: Shape | None = None, **changes: Any) -> KvEngine:  # noqa: ANN401 - fields of Shape
        """Boot (or reuse) an engine at ``shape``, by default the target's, with some fields changed."""
        ...


def start(config: pytest.Config) -> KvSession:
    """Register the machinery with a run in which some test is ours.

    Raises:
        pytest.UsageError: for wrong options or configuration.
    """
    from pytest_kvbudget.plugin.ladders import Ladders  # noqa: PLC0415 - ladders build on the session
    from pytest_kvbudget.plugin.outcomes import Outcomes  # noqa: PLC0415 - as above
    from pytest_kvbudget.plugin.parity import CompileParity  # noqa: PLC0415 - as above
    from pytest_kvbudget.plugin.rows import Rows  # noqa: PLC0415 - as above
    from pytest_kvbudget.plugin.survival import KnifeEdges  # noqa: PLC0415 - as above

    session = KvSession(config, read_settings(config))
    plugins: dict[str, object] = {
        "kvbudget-session": session,
        "kvbudget-timers": session.timers,
        "kvbudget-pages": session.pages,
        "kvbudget-ladders": Ladders(session),
        "kvbudget-outcomes": Outcomes(session),
        "kvbudget-knife-edges": KnifeEdges(session),
        "kvbudget-compile-parity": CompileParity(session),
    }
    if not session.is_worker:
        session.rows = plugins["kvbudget-rows"] = Rows(config)
    for name, plugin in plugins.items():
        config.pluginmanager.register(plugin, name)
    return session


class KvSession:
    """Boots what fixtures ask for and keeps the engines of this process."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.config, self.settings = config, settings
        self.worker_input: dict[str, Any] = getattr(config, "workerinput", {})
        self.is_worker = bool(self.worker_input)
        self.timers, self.pages = Timers(), Pages()
        self.rows: Rows | None = None
        """Where reports are shown, if that is in this process."""
        self.current: pytest.Item | None = None
        """The item whose phases run: a test, or a rung's item."""
        self.attempts: list[Attempt] = []
        """Every boot of this process, in order."""
        self._progress = ProgressLine(config, silent=self.is_worker)
        self._setting_up: list[pytest.FixtureRequest] = []
        self._proven: WeakSet[Attempt] = WeakSet()
        self._ours: list[pytest.Item] = []
        self._impossible: dict[str, str] = {}
        self._header_sent = False
        self.archive = RunArchive(
            settings.archive,
            RunInfo(
                run=self.worker_input.get("kvbudget_run") or new_run_id(),
                host=socket.gethostname(),
                plugin_version=version("pytest-kvbudget"),
                python_version=platform.python_version(),
                pytest_version=pytest.__version__,
                worker=self.worker_input.get("workerid"),
            ),
        )

    @cached_property
    def pool(self) -> EnginePool:
        """The engines of this process. Making it starts nothing."""
        return EnginePool(
            self.settings.loaded,
            self.archive,
            progress=self._progress.show,
            on_wait=self._progress.line,
            gate=not self.config.option.kvbudget_no_gate,
        )

    def collected(self, items: list[pytest.Item], ours: list[pytest.Item]) -> None:
        """Take the selected tests: put equal shapes side by side.

        Raises:
            pytest.UsageError: a test belongs to another configuration or contradicts its target, more than one ladder
                is to be left serving, a ladder has no rung that is asked for, or a sweep would test nothing.
        """
        from pytest_kvbudget.plugin.ordering import arrange  # noqa: PLC0415 - needed once

        self._ours = ours
        self._impossible = misplaced(self.config, self.settings, ours)
        for item in [] if self._impossible else ours:
            said = contradiction(self.settings.loaded, item, self.base_shape(item))
            if said is not None:
                self._impossible[item.nodeid] = f"{item.nodeid}: {said}"
        if self._impossible and not self.is_worker:
            raise pytest.UsageError(f"kvbudget: {next(iter(self._impossible.values()))}")
        self._check_parity(ours)
        ladders = [item for item in ours if searches(item)]
        for item in ladders:
            if isinstance(item, pytest.Function):
                remember(item)
        self._check_rung(ladders)
        self._check_sweeps(ladders)
        if self.settings.leave_serving:
            if len(ladders) != 1:
                raise pytest.UsageError(
                    f"kvbudget: --kvbudget-leave-serving with {len(ladders)} ladders and sweeps selected; it needs "
                    "exactly one, whose winner is left serving: name it on the command line"
                )
            # Nothing may need the devices after the winner has them.
            items.remove(ladders[0])
            items.append(ladders[0])
        arrange(items, [item for item in ours if item not in ladders])

    def _check_rung(self, ladders: list[pytest.Item]) -> None:
        """In a worker this would be an internal error: there the ladder itself says so."""
        if self.settings.rung is None or self.is_worker:
            return
        if not ladders:
            raise pytest.UsageError("kvbudget: --kvbudget-rung boots a rung of a ladder, and no ladder is selected")
        for item in ladders:
            try:
                one_rung(specs_of(item), self.settings.rung, item.nodeid)
            except MarkerError as error:
                raise pytest.UsageError(f"kvbudget: {error}") from None

    def _check_parity(self, ours: list[pytest.Item]) -> None:
        """As `_check_rung`: a mark that tests nothing passes whatever the engine does."""
        from pytest_kvbudget.plugin.parity import tests_nothing  # noqa: PLC0415 - builds on the session

        for item in [] if self.is_worker else ours:
            futile = tests_nothing(item, self.settings.loaded)
            if futile is not None:
                raise pytest.UsageError(f"kvbudget: {futile}")

    def _check_sweeps(self, items: list[pytest.Item]) -> None:
        """As `_check_rung`: a sweep over something that changes nothing gives an answer that is none."""
        if self.is_worker:
            return
        for item in items:
            sweep = sweep_of(item)
            futile = None if sweep is None else turns_nothing(self.settings.loaded, sweep, self.base_shape(item))
            if futile is not None:
                raise pytest.UsageError(f"kvbudget: {item.nodeid}: {futile}")

    # -- shapes

    def base_shape(self, item: pytest.Item) -> Shape:
        """The target's shape with a test's ``kv_shape`` marks; the same in every process, no fixture evaluated."""
        return self.settings.loaded.target.shape.merged(**shape_changes(item))

    def shape_of(self, item: pytest.Item) -> Shape:
        """The shape before conftest overrides: the base shape, or that of the rung."""
        context = item.stash.get(RUNG, None)
        return self.base_shape(item) if context is None else context.plan.shape

    # -- engines

    def engine(self, request: pytest.FixtureRequest) -> KvEngine:
        """The engine of a test, booted at the first call; a boot that is no success fails the test here."""
        __tracebackhide__ = True
        item: pytest.Item = request.node
        use = item.stash.get(USE, None)
        trouble = None
        if use is None:
            try:
                use = item.stash[USE] = self._boot_for(item, request)
            except NoEngineError as error:
                trouble = str(error)
        if use is None:
            pytest.fail(str(trouble), pytrace=False)
        if use.failure is not None:
            pytest.fail(use.failure, pytrace=False)
        must_be_recorded(item, use)
        return KvEngine(use.attempt)

    def _boot_for(self, item: pytest.Item, request: pytest.FixtureRequest) -> Use:
        __tracebackhide__ = True
        shape = request.getfixturevalue("kv_shape")
        if not isinstance(shape, Shape):
            pytest.fail(f"kv_shape gave {shape!r}; expected a Shape, as in kv_shape.merged(env=...)", pytrace=False)
        try:
            check_extra_args(shape.extra_args, where="kv_shape: extra_args")
        except ConfigError as error:
            raise NoEngineError(str(error)) from None
        context = item.stash.get(RUNG, None)
        if context is not None:
            attempt = self._boot_rung(context, shape)
        elif searches(item):
            pytest.skip("a ladder boots only rungs; --setup-only runs none")
        else:
            attempt = self._boot(BootRequest(test=item.nodeid, shape=shape), reuse=True)
        # An engine that another test boots again is judged once; its boot stays what it was.
        failed = attempt not in self._proven and attempt.record.verdict not in COUNTS_AS_PASSED
        if not failed:
            self._proven.add(attempt)
        exercise = attempt.used_by(item.nodeid)
        use = Use(attempt, exercise, boot_failed=failed, failure=boot_failure(attempt) if failed else None)
        request.addfinalizer(lambda: self._give_back(attempt, exercise))
        gate = boot_gate_of(item)
        if failed or gate is None:
            return use
        exercise.capacity(gate.windows, gate.min_tokens)
        asked = exercise.record.boot_gate
        if asked is None or asked.verdict is Verdict.PASS:
            return use
        return replace(use, failure=f"{asked.sentence}; record: {attempt.record_path}")

    def _boot_rung(self, context: RungContext, shape: Shape) -> Attempt:
        question, plan = context.question, context.plan
        if not question.stands(shape, plan):
            asked = turned(shape, question.name)
            pytest.fail(f"kv_shape changed {question.name} from {plan.setting} to {asked}", pytrace=False)
        wanted = question.request(plan, shape)
        booting = context.booting
        if booting is None:
            return self._boot(wanted, reuse=False)
        if booting.attempt.request != wanted:
            self.pool.retire(booting.attempt)
            self.keep(booting.attempt)
            return self._boot(wanted, reuse=False)
        return self._finish(booting)

    def rung(self, request: pytest.FixtureRequest) -> KvRung:
        """The rung of a ladder; its engine is booted here if nothing did before."""
        __tracebackhide__ = True
        context = request.node.stash.get(RUNG, None)
        if context is None:
            pytest.fail(
                "kv_rung is there only in a test marked @pytest.mark.ladder(start=..., floor=...)", pytrace=False
            )
        self.engine(request)
        plan = context.plan
        return KvRung(
            axis=context.question.name, value=plan.setting, label=plan.label, number=plan.number, why=plan.why
        )

    def serve(self, shape: Shape | None = None, **changes: Any) -> KvEngine:  # noqa: ANN401 - fields of Shape
        """Boot (or reuse) an engine for the fixture that is being set up, else for the running test."""
        __tracebackhide__ = True
        wanted = (shape or self.settings.loaded.target.shape).merged(**decode_shape(changes, where="kv_serve:"))
        check_extra_args(wanted.extra_args, where="kv_serve: extra_args")
        request = self._setting_up[-1] if self._setting_up else None
        owner = request.node if request is not None else self.current
        asker = (owner.nodeid if owner is not None else "") or "kv_serve"  # a session has no name
        attempt = self._boot(BootRequest(test=asker, shape=wanted), reuse=True)
        exercise = attempt.used_by(asker)
        if request is not None:
            request.addfinalizer(lambda: self._give_back(attempt, exercise))
        elif owner is not None:
            owner.addfinalizer(lambda: self._give_back(attempt, exercise))
        if attempt not in self._proven and attempt.record.verdict is Verdict.FAIL:
            pytest.fail(boot_failure(attempt), pytrace=False)
        if attempt not in self._proven and attempt.record.verdict not in COUNTS_AS_PASSED:
            # A ladder's body may call this: what is no FAIL must not look like the body's refusal of its rung.
            raise NoEngineError(boot_failure(attempt))
        self._proven.add(attempt)
        return KvEngine(attempt)

    def _boot(self, request: BootRequest, *, reuse: bool) -> Attempt:
        return self._booted(request, lambda: self.pool.boot(request, reuse=reuse))

    def _finish(self, booting: Booting) -> Attempt:
        """Wait for a boot that began before its item."""
        return self._booted(booting.attempt.request, lambda: self.pool.finish(booting))

    def _booted(self, request: BootRequest, boot: Callable[[], Attempt]) -> Attempt:
        try:
            with self.timers.paused(self.current):
                attempt = boot()
        except (PoolError, TimeoutError) as error:
            raise NoEngineError(f"no engine for {described(request.shape)}: {error}") from None
        except BaseException:
            for cut_short in (self.pool.cut_short, *self.pool.cancelled):
                if cut_short is not None:
                    self.keep(cut_short)
            raise
        finally:
            self._progress.end()
            if self.rows is not None:
                self.rows.warn(self.warnings())
        self.keep(attempt)
        return attempt

    def keep(self, attempt: Attempt) -> None:
        """Know of a boot, whose page is written when the session ends."""
        if attempt not in self.attempts:
            self.attempts.append(attempt)

    def _give_back(self, attempt: Attempt, exercise: Exercise) -> None:
        """An engine that failed, or that what it was sent was too much for, is for no other test."""
        if exercise.record.bore and attempt.record.verdict in COUNTS_AS_PASSED:
            self.pool.done(attempt)
        else:
            self.pool.retire(attempt)
        if attempt.lost is not None and attempt.request.rung is None:
            pytest.fail(f"kvbudget: {attempt.lost}", pytrace=False)

    def leave(self, attempt: Attempt) -> list[str]:
        """Hand a serving engine over; says where it serves and how to end it."""
        attempt.leave()
        self.pool.retire(attempt)
        return [
            f"left serving: {attempt.record.endpoint}, process {attempt.root_pid}",
            f"  to end it: kill {attempt.root_pid}",
        ]

    # -- earlier runs

    @cached_property
    def history(self) -> History:
        """Records of earlier runs in this archive."""
        return History.read(self.archive.root, without=self.archive.info.run)

    @property
    def earlier_boots(self) -> Sequence[Booted]:
        """Boots of earlier runs that may be taken over; none without ``--kvbudget-resume``."""
        return self.history.attempts if self.settings.resume else ()

    @cached_property
    def _resume(self) -> Resume:
        return Resume(self.history, self._stands)

    def resume(self, shape: Shape, asked: str | None) -> tuple[Path, AttemptRecord] | None:
        """A finished boot of an earlier run that stands for this one; ``None`` without ``--kvbudget-resume``."""
        if not self.settings.resume or asked is None:
            return None
        slots = self.pool.backend.slots(self.settings.loaded, shape)
        return self._resume.take(*(self._identity(shape, asked, devices) for devices in slots))

    def identity(self, shape: Shape, asked: str | None) -> BootIdentity | None:
        """What a boot of this shape would be a boot of, on the first device set; ``None`` where there is none."""
        slots = self.pool.backend.slots(self.settings.loaded, shape)
        return self._identity(shape, asked, slots[0]) if slots else None

    def _identity(self, shape: Shape, asked: str | None, devices: tuple[str, ...]) -> BootIdentity:
        loaded, backend = self.settings.loaded, self.pool.backend
        command = backend.render(loaded, shape, devices, DRY_RUN_PORT)
        readings = device_readings(loaded, backend, devices)
        host = self.archive.info.host
        return identity_of(loaded, backend, shape, command, devices, host=host, asked=asked, readings=readings)

    def _stands(self, record: AttemptRecord) -> bool:
        return cache_stands(record, self.pool.command(record.shape).env)

    def plan(self, shape: Shape) -> Plan | None:
        """The memory terms predicted for a shape, from configuration and this run's earlier boots."""
        return plan_for(self.settings.loaded, shape, self.pool.experience)

    # -- what people see

    def header(self) -> list[str]:
        """The lines of the session header."""
        return header_lines(self.settings, self.archive.info.run)

    def warnings(self) -> list[str]:
        """What every reader of a verdict has to know, however quiet pytest is."""
        return [] if not self.settings.simulated else [simulated_warning(self.settings)]

    def mark(self, kind: str, verdict: str, **more: object) -> dict[str, Any]:
        """What a report of ours carries to where it is shown: builtins only.

        The header goes with the first report that a worker sends, and nowhere without xdist.
        """
        made = {"kind": kind, "verdict": verdict, "warnings": self.warnings(), **more}
        if self.is_worker and not self._header_sent:
            self._header_sent = True
            made["header"] = self.header()
        return made

    def show(self, lines: list[str]) -> None:
        """Put lines into the summary that no report will bring there."""
        if self.rows is not None:
            self.rows.show(lines)

    @pytest.hookimpl(trylast=True)
    def pytest_report_collectionfinish(self, items: Sequence[pytest.Item]) -> list[str]:
        """The header, once it is known that tests are ours; a dry run's answer."""
        option = self.config.option
        lines = self.header() if option.verbose >= 0 else []
        if option.kvbudget_dry_run:
            from pytest_kvbudget.plugin.dryrun import dry_run_lines  # noqa: PLC0415 - only then

            lines += dry_run_lines(self, [item for item in items if item in self._ours])
        return lines

    # -- hooks

    @pytest.fixture(name=BOOT_FIXTURE)
    def boot(self, request: pytest.FixtureRequest) -> None:
        """Boots for tests whose marker says so, whatever fixtures they ask for."""
        __tracebackhide__ = True
        self.engine(request)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """A test of another configuration boots nothing. Only workers get here: there a usage error is a crash."""
        if item.nodeid in self._impossible:
            pytest.fail(f"kvbudget: {self._impossible[item.nodeid]}", pytrace=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, request: pytest.FixtureRequest) -> Generator[None, Any, Any]:
        """Know which fixture is being set up: engines of ``kv_serve`` live as long as it does."""
        __tracebackhide__ = True
        self._setting_up.append(request)
        try:
            return (yield)
        finally:
            self._setting_up.pop()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """End every engine that was not handed over, and complete the pages of those that outlived their test."""
        if "pool" not in self.__dict__:
            return
        self.pool.close()
        self.pages.complete(self.attempts)
        self._progress.close()
