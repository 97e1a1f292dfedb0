"""Compile parity: a program compiled on the CPU is found in the cache only where both sides plan one KV shape."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Final

import pytest

from pytest_kvbudget.budget.neuron_env import CPU_COMPILE_VARIABLE
from pytest_kvbudget.ledger.model import BootLedger
from pytest_kvbudget.plugin.items import USE
from pytest_kvbudget.pool import PoolError
from pytest_kvbudget.request import BootRequest
from pytest_kvbudget.units import format_size

if TYPE_CHECKING:
    from pytest_kvbudget.plugin.session import KvSession

MARK: Final = "compile_parity"


class CompileParity:
    """After the body of a marked test, boots its shape once more for compiling on the CPU, and compares."""

    def __init__(self, session: KvSession) -> None:
        self._session = session

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """The body first, on the device."""
        yield
        if item.get_closest_marker(MARK) is None or USE not in item.stash:
            return
        device = item.stash[USE].attempt
        ledger = device.ledger
        # The other side needs no device, but the two must not disturb each other's figures.
        self._session.pool.retire(device)
        shape = device.request.shape.merged(env={CPU_COMPILE_VARIABLE: "1"})
        try:
            with self._session.timers.paused(item):
                compiled = self._session.pool.boot(BootRequest(test=item.nodeid, shape=shape, number=2), reuse=False)
        except PoolError as error:
            pytest.fail(f"{MARK}: {error}", pytrace=False)
        self._session.attempts.append(compiled)
        self._session.pool.retire(compiled)
        problem = difference(compiled.ledger, ledger)
        if problem is not None:
            pytest.fail(
                f"{MARK}: {problem}\n  device record  {device.record_path}\n  compile record {compiled.record_path}",
                pytrace=False,
            )


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
