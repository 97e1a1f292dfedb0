"""The largest window that boots, and what it holds."""

from __future__ import annotations

import pytest

from pytest_kvbudget.ledger.model import BootLedger
from pytest_kvbudget.plugin.engine import KvEngine


@pytest.mark.ladder(axis="max_model_len", start=262_144, floor=131_072)
def test_window(kv_engine: KvEngine, kv_ledger: BootLedger) -> None:
    assert kv_ledger.kv_cache.max_concurrency >= 1
    assert kv_engine.complete("Where did every GiB go?", max_tokens=8)


@pytest.mark.boot_gate
@pytest.mark.kv_shape(max_model_len=131_072)
def test_boots(kv_ledger: BootLedger) -> None:
    assert kv_ledger.kv_cache.tokens >= 131_072
