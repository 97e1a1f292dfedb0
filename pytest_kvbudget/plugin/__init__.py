"""The pytest plugin's entry: options, markers, fixtures and the check for tests of ours; the rest loads on demand.

Every pytest run pays for this module, also where nothing of ours is used. It imports nothing but pytest, and no
hook of it runs once per test.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from pytest_kvbudget.budget.model import Plan
    from pytest_kvbudget.config import LoadedTarget
    from pytest_kvbudget.ledger.model import BootLedger
    from pytest_kvbudget.plugin.engine import KvEngine, KvRung, KvTrace
    from pytest_kvbudget.plugin.session import KvSession, Serve
    from pytest_kvbudget.plugin.survival import KvSurvival
    from pytest_kvbudget.shape import Shape

SESSION_FIXTURE: Final = "_kvbudget"
"""All our fixtures depend on it, and on no other one of ours: a test that has it in its closure is ours."""
BOOT_FIXTURE: Final = "_kvbudget_boot"
"""Added to tests that our markers boot whether or not they ask for an engine; defined where it is used."""

MARKERS: Final = {
    "ladder": "ladder(axis='max_model_len', start, floor, quantum, strategy, pool, windows, confirm, first, verify): "
    "find the largest value that boots and serves, one boot per rung; several on one function climb one after the "
    "other, the top one first",
    "headroom_sweep": "headroom_sweep(knob, start, step, fine_step, floor, ceiling, strategy, windows, confirm=1, "
    "classes): find the least headroom (smallest pool, largest fraction) that passes, moved by the class of failure",
    "boot_gate": "boot_gate(windows=1, min_tokens=None): the engine boots, and by its own count its KV cache holds "
    "that many windows (and tokens)",
    "knife_edge": "knife_edge(prompt_tokens=16, max_tokens=None, min_free=None, max_used=None, max_growth=None, "
    "hold=4096, prefill=True, concurrency=1, timeout=1800): after the body, the engine lives through its largest real "
    "request",
    "kv_soak": "kv_soak(requests=None, minutes=None, concurrency=4, max_growth_per_hour=None, timeout=600): after "
    "the body, the engine lives through mixed traffic, and its device memory does not grow",
    "compile_parity": "compile_parity(): after the body, the shape is booted once more for compiling on the CPU, and "
    "both sides must plan the same KV cache",
    "kv_shape": "kv_shape(**fields): what this test asks of its engine; sizes as text ('76 MiB') or bytes",
}
_OURS: Final = frozenset(MARKERS) - {"ladder"}
"""Marks that are ours whatever they look like: no public suite uses these names."""
SEARCHES: Final = ("ladder", "headroom_sweep")
"""Marks whose test is many boots and one finding."""
BOOTING: Final = (*SEARCHES, "boot_gate", "knife_edge", "kv_soak", "compile_parity")
"""Marks that boot an engine, whatever fixtures their test asks for."""
_session: Final = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare options; only what may last beyond one run has an ini key."""
    group = parser.getgroup(
        "kvbudget",
        "measured KV and HBM budgets. A boot has deadlines of its own (limits in the configuration): pytest-timeout's "
        "--timeout is for test bodies",
    )
    add = group.addoption
    add("--kvbudget-target", metavar="NAME", help="target of the configuration to boot on")
    add(
        "--kvbudget-archive",
        metavar="DIR",
        help="folder for records and logs (default: kvbudget-archive in the rootdir)",
    )
    add("--kvbudget-config", metavar="FILE", help="kvbudget.toml or pyproject.toml (default: nearest to the tests)")
    add("--kvbudget-strategy", metavar="NAME", help="how ladders choose rungs: predict (default), bisect, step")
    add(
        "--kvbudget-rung",
        metavar="VALUE",
        help="boot only this rung of each ladder or sweep (a size on an axis of bytes; of stacked ladders its whole "
        "label); it proves nothing about other rungs",
    )
    add(
        "--kvbudget-resume",
        action="store_true",
        help="take over finished boots of earlier runs in the archive where everything they depend on is the same",
    )
    add("--kvbudget-max-boots", metavar="N", help="most boots of each ladder or sweep; it then ends undecided")
    add(
        "--kvbudget-until",
        metavar="HH:MM",
        help="start no boot that would not be over at this time (local; the next one that comes)",
    )
    add("--kvbudget-leave-serving", action="store_true", help="leave the ladder's winner serving when pytest ends")
    add("--kvbudget-require-hardware", action="store_true", help="refuse to run on a simulated target")
    add("--kvbudget-no-gate", action="store_true", help="boot even what the budget laws say cannot boot")
    add("--kvbudget-dry-run", action="store_true", help="print commands, environment and first rungs; start nothing")
    for name in ("target", "archive", "config", "strategy"):
        parser.addini(f"kvbudget_{name}", f"default of --kvbudget-{name}")
    parser.addini("kvbudget_require_hardware", "default of --kvbudget-require-hardware", type="bool")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """A dry run collects and does not run."""
    if config.option.kvbudget_dry_run:
        config.option.collectonly = True


def pytest_configure(config: pytest.Config) -> None:
    """Register markers, and what has to be there before the session starts."""
    for line in MARKERS.values():
        config.addinivalue_line("markers", line)
    option = config.option
    if hasattr(config, "workerinput"):
        return
    if getattr(option, "htmlpath", None):
        from pytest_kvbudget.plugin.html import HtmlColumn  # noqa: PLC0415 - only with pytest-html's --html

        config.pluginmanager.register(HtmlColumn(), "kvbudget-html")
    if getattr(option, "dist", "no") != "no" and not option.collectonly:
        from pytest_kvbudget.plugin import controller  # noqa: PLC0415 - only with pytest-xdist's -n

        controller.configure(config)
    elif option.kvbudget_target or option.kvbudget_config or option.kvbudget_require_hardware:
        from pytest_kvbudget.plugin.settings import read_settings  # noqa: PLC0415 - heavy

        read_settings(config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, Any]:
    """Wrong arguments of our markers are a collection error; tests that our markers boot get the fixture that does."""
    report = yield
    if report.passed and isinstance(collector, (pytest.Module, pytest.Class)):
        inherited = any(mark.name in MARKERS for mark in collector.iter_markers())
        marked = [
            item
            for item in report.result
            if isinstance(item, pytest.Function)
            and (inherited or (item.own_markers and any(mark.name in MARKERS for mark in item.own_markers)))
            and _is_ours(item)
        ]
        if marked:
            _accept(marked, report)
    return report


def _is_ours(item: pytest.Function) -> bool:
    """Whether a marked test is about an engine of ours: it gets what it asks for, or is told what is wrong with it.

    Only ``ladder`` is a name that other suites use, bare: it is ours on a test with a fixture of ours, and where its
    arguments are ours or look as if they were meant to be.
    """
    if SESSION_FIXTURE in item.fixturenames or any(mark.name in _OURS for mark in item.iter_markers()):
        return True
    ladders = [mark for mark in item.iter_markers("ladder") if mark.args or mark.kwargs]
    if not ladders:
        return False
    from pytest_kvbudget.plugin.lookalike import meant_for_us  # noqa: PLC0415 - rare

    return any(map(meant_for_us, ladders))


def _accept(marked: list[pytest.Function], report: pytest.CollectReport) -> None:
    from pytest_kvbudget.plugin.checks import problems  # noqa: PLC0415 - heavy

    wrong = problems(marked)
    if wrong:
        # Raising here would be an internal error; a failed report is what a CollectError becomes, under xdist too.
        report.outcome = "failed"
        report.longrepr = "\n".join(wrong)
        report.result = []
        return
    for item in marked:
        if BOOT_FIXTURE not in item.fixturenames and any(item.get_closest_marker(name) for name in BOOTING):
            item.fixturenames.append(BOOT_FIXTURE)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the machinery where a selected test is ours."""
    ours = []
    for item in items:
        names = getattr(item, "fixturenames", ())
        if SESSION_FIXTURE in names or BOOT_FIXTURE in names:
            ours.append(item)
    if ours and (config.option.kvbudget_dry_run or not config.option.collectonly):
        activate(config).collected(items, ours)


def activate(config: pytest.Config) -> KvSession:
    """This process' session, started by the first that needs it."""
    session: KvSession | None = config.stash.get(_session, None)
    if session is None:
        from pytest_kvbudget.plugin.session import start  # noqa: PLC0415 - heavy

        session = config.stash[_session] = start(config)
    return session


@pytest.fixture(scope="session")
def _kvbudget(request: pytest.FixtureRequest) -> KvSession:
    return activate(request.config)


@pytest.fixture(scope="session")
def kv_target(_kvbudget: KvSession) -> LoadedTarget:
    """The target that engines are booted on, as configured."""
    return _kvbudget.settings.loaded


@pytest.fixture(scope="session")
def kv_serve(_kvbudget: KvSession) -> Serve:
    """Boots further engines: ``kv_serve(shape=None, **changes)`` returns a `KvEngine`.

    It lives as long as the fixture that called, or the test.
    """
    return _kvbudget.serve


@pytest.fixture
def kv_shape(request: pytest.FixtureRequest, _kvbudget: KvSession) -> Shape:
    """What this test asks of its engine: the target's shape, changed by ``kv_shape`` marks and by the rung."""
    __tracebackhide__ = True
    return _kvbudget.shape_of(request.node)


@pytest.fixture
def kv_engine(request: pytest.FixtureRequest, _kvbudget: KvSession) -> KvEngine:
    """A running engine at the test's shape."""
    __tracebackhide__ = True
    return _kvbudget.engine(request)


@pytest.fixture
def kv_ledger(request: pytest.FixtureRequest, _kvbudget: KvSession) -> BootLedger:
    """What the boot of the test's engine said about memory."""
    __tracebackhide__ = True
    return _kvbudget.engine(request).ledger


@pytest.fixture
def kv_rung(request: pytest.FixtureRequest, _kvbudget: KvSession) -> KvRung:
    """The rung of a ladder that this run of the body is about; its engine is up."""
    __tracebackhide__ = True
    return _kvbudget.rung(request)


@pytest.fixture
def kv_survival(request: pytest.FixtureRequest, _kvbudget: KvSession) -> KvSurvival:
    """Sends the engine its largest real request: ``kv_survival.check()``, with the arguments of ``knife_edge``."""
    __tracebackhide__ = True
    from pytest_kvbudget.plugin.survival import KvSurvival  # noqa: PLC0415 - heavy

    _kvbudget.engine(request)
    return KvSurvival(_kvbudget, request.node)


@pytest.fixture
def kv_trace(request: pytest.FixtureRequest, _kvbudget: KvSession) -> KvTrace:
    """Device memory of the test's engine since before its launch."""
    __tracebackhide__ = True
    return _kvbudget.engine(request).trace


@pytest.fixture
def kv_plan(request: pytest.FixtureRequest, _kvbudget: KvSession) -> Plan | None:
    """The memory terms predicted for the test's shape; ``None`` where the law lacks an input. Boots nothing."""
    __tracebackhide__ = True
    return _kvbudget.plan(request.getfixturevalue("kv_shape"))
