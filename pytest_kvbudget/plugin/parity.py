"""Compile parity: a program compiled on the CPU is found in the cache only where both sides plan one KV shape."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Final

import pytest

from pytest_kvbudget.attempt import Attempt
from pytest_kvbudget.budget.neuron_env import CPU_COMPILE_VARIABLE
from pytest_kvbudget.config import LoadedTarget
from pytest_kvbudget.judgement import reason
from pytest_kvbudget.judging import first_line
from pytest_kvbudget.ledger.model import BootLedger
from pytest_kvbudget.plugin.items import COUNTS_AS_PASSED, RUNG, USE
from pytest_kvbudget.plugin.survival import CHECKED
from pytest_kvbudget.plugin.wording import boot_failure
from pytest_kvbudget.pool import PoolError
from pytest_kvbudget.request import BootRequest
from pytest_kvbudget.units import format_size
from pytest_kvbudget.vantage import compiles_on_cpu
from pytest_kvbudget.verdict import Phase, Verdict

if TYPE_CHECKING:
    from pytest_kvbudget.plugin.session import KvSession

MARK: Final = "compile_parity"


def tests_nothing(item: pytest.Item, loaded: LoadedTarget) -> str | None:
    """Why a test's mark would pass whatever the engine does; ``None`` where it has none, or it tests something."""
    if item.get_closest_marker(MARK) is None or compiles_on_cpu(loaded):
        return None
    return (
        f"{item.nodeid}: @pytest.mark.{MARK} tests nothing here: only Neuron compiles on a CPU what a device runs, and "
        f"target {loaded.name} is no Neuron target; take the mark off, or select one with --kvbudget-target"
    )


class CompileParity:
    """After the body of a marked test, boots its shape once more for compiling on the CPU, and compares."""

    def __init__(self, session: KvSession) -> None:
        self._session = session

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Only a worker gets here with a mark that tests nothing: there a usage error would be a crash."""
        futile = tests_nothing(item, self._session.settings.loaded)
        if futile is not None:
            pytest.fail(f"kvbudget: {futile}", pytrace=False)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """The body first, on the device."""
        yield
        if item.get_closest_marker(MARK) is None or USE not in item.stash:
            return
        use = item.stash[USE]
        item.stash[CHECKED] = True
        problem = self._compare(item, use.attempt)
        if problem is None:
            use.exercise.note("the CPU compile plans the same KV cache")
            return
        if RUNG not in item.stash:  # of a rung it is the body's refusal
            use.exercise.conclude(*reason(*problem[0], first_line(problem[1])))
        pytest.fail(f"{MARK}: {problem[1]}", pytrace=False)

    def _compare(self, item: pytest.Item, device: Attempt) -> tuple[tuple[Verdict, Phase, str], str] | None:
        """Compile; what is wrong, as verdict, phase, class and text, or ``None``."""
        ledger = device.ledger
        # The other side needs no device, but the two must not disturb each other's figures.
        self._session.pool.retire(device)
        shape = device.request.shape.merged(env={CPU_COMPILE_VARIABLE: "1"})
        request = BootRequest(test=item.nodeid, shape=shape, number=2, compiles=True)
        unknown = (Verdict.UNKNOWN, Phase.COMPILE, "parity_unknown")
        try:
            with self._session.timers.paused(item):
                compiled = self._session.pool.boot(request, reuse=False)
        except PoolError as error:
            return unknown, str(error)
        self._session.keep(compiled)
        self._session.pool.retire(compiled)
        if compiled.record.verdict not in COUNTS_AS_PASSED:
            return unknown, f"the CPU compile came to nothing: {boot_failure(compiled)}"
        problem = difference(compiled.ledger, ledger)
        if problem is None:
            return None
        where = f"{problem}\n  device record  {device.record_path}\n  compile record {compiled.record_path}"
        known = isinstance(compiled.ledger.get("kv_tokens"), int) and isinstance(ledger.get("kv_tokens"), int)
        return (Verdict.ERROR, Phase.COMPILE, "parity_missed") if known else unknown, where


def difference(compiled: BootLedger, device: BootLedger) -> str | None:
    """Why the compile cache stays cold, with the override that restores it; ``None`` where both plans meet.

    What is compared is each side's own count of its KV cache: equal counts are equal blocks of one size (Neuron
    document, section 4). A device may report some MiB less than the static table, and then they differ.
    """
    counts = compiled.get("kv_tokens"), device.get("kv_tokens")
    for side, count in zip(("CPU compile", "the device"), counts, strict=True):
        if not isinstance(count, int):
            return f"{side} states no KV cache size: parity is unknown"
    if counts[0] == counts[1]:
        return None
    budgets = compiled.get("available_kv_bytes"), device.get("available_kv_bytes")
    apart = ""
    if isinstance(budgets[0], (int, float)) and isinstance(budgets[1], (int, float)):
        apart = f", their budgets differ by {format_size(abs(budgets[0] - budgets[1]))}"
    return (
        f"CPU compile plans {counts[0]:,} tokens of KV cache and the device {counts[1]:,}{apart}: the compile cache "
        "stays cold; --num-gpu-blocks-override with the block count of the smaller on both sides restores it"
    )
