"""The largest window of which two fit, in a shape that lives through its largest request and keeps its experts."""

from __future__ import annotations

import pytest

from pytest_kvbudget.ledger.model import BootLedger
from pytest_kvbudget.plugin.engine import KvEngine

SLOTS = 7_500
"""Experts on the card; with fewer, decoding waits for the host."""


@pytest.mark.ladder(axis="max_model_len", start=262_144, floor=131_072, windows=2)
@pytest.mark.knife_edge(prompt_tokens=995, min_free="512 MiB")
def test_window(kv_engine: KvEngine, kv_ledger: BootLedger) -> None:
    assert kv_ledger.number("plan_slots") >= SLOTS


@pytest.mark.boot_gate(windows=2)
@pytest.mark.kv_shape(max_model_len=200_704)
def test_the_deployed_shape_boots_and_answers(kv_engine: KvEngine, kv_ledger: BootLedger) -> None:
    assert kv_ledger.kv_cache.tokens >= 401_408
    assert kv_engine.complete("Where did every GiB go?", max_tokens=8)
