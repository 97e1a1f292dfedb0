"""Does the reserve hold for every sequence, and how long may the window be before it does not?"""

from __future__ import annotations

import pytest

from pytest_kvbudget.ledger.model import BootLedger
from pytest_kvbudget.plugin.engine import KvEngine


@pytest.mark.boot_gate(windows=4)
def test_every_sequence_has_its_window(kv_engine: KvEngine, kv_ledger: BootLedger) -> None:
    assert kv_ledger.kv_cache.tokens >= 4 * 16_384
    assert kv_engine.complete("Where did every GiB go?", max_tokens=8)


@pytest.mark.ladder(axis="max_model_len", start=131_072, floor=16_384, quantum=16_384)
def test_window(kv_engine: KvEngine) -> None:
    assert kv_engine.complete("Hello", max_tokens=8)


@pytest.mark.headroom_sweep(knob="reserved_headroom", start="4 GiB", step="1 GiB")
def test_smallest_headroom(kv_engine: KvEngine) -> None:
    assert kv_engine.complete("Hello", max_tokens=8)
