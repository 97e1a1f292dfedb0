"""An engine that runs with other values than were asked proves nothing of the shape."""

from __future__ import annotations

import pytest

from pytest_kvbudget.as_asked import not_as_asked
from pytest_kvbudget.ledger.model import BootLedger
from pytest_kvbudget.ledger.reader import LedgerReader
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import GIB, MIB
from pytest_kvbudget.verdict import Verdict


def boot(printed_gib: str) -> BootLedger:
    """What an engine says that was left for its KV cache."""
    reader = LedgerReader()
    line = f"(Worker pid=7) INFO 11-30 10:00:00 [gpu_worker.py:1] Available KV cache memory: {printed_gib} GiB\n"
    reader.feed(line.encode())
    return reader.ledger()


@pytest.mark.parametrize(
    ("printed_gib", "pinned_bytes"),
    [
        ("0.05", 50 * MIB),  # a real vLLM 0.32 on CPU
        ("0.06", 64 * MIB),
        ("2.50", int(2.5 * GIB)),
        ("1.20", int(2.5 * GIB)),  # an expert plan caps the pool
    ],
)
def test_a_pool_of_the_pinned_bytes_or_fewer_is_as_asked(printed_gib: str, pinned_bytes: int) -> None:
    assert not_as_asked(boot(printed_gib), Shape(kv_cache_memory_bytes=pinned_bytes)) is None


def test_a_budget_of_a_neuron_worker_is_no_pool() -> None:
    reader = LedgerReader()
    reader.feed(
        b"(EngineCore pid=102) INFO 11-30 10:00:00 [neuron_worker.py:512] Neuron memory: logical-core HBM 36.00 GiB, "
        b"model weights 10.13 GiB, reserved headroom 18.78 GiB, KV cache budget 7.09 GiB\n"
    )
    assert not_as_asked(reader.ledger(), Shape(kv_cache_memory_bytes=7 * GIB)) is None


def test_a_pool_that_a_variable_made_larger_is_none_of_the_shape() -> None:
    """``VLLM_CPU_KVCACHE_SPACE=1`` beside 64 MiB, on a real vLLM 0.32 on CPU."""
    judged = not_as_asked(boot("1.00"), Shape(kv_cache_memory_bytes=64 * MIB))
    assert judged is not None
    verdict, cause, said = judged
    assert verdict is Verdict.ERROR
    assert "the engine has a KV pool of 1.00 GiB, not the 64.00 MiB that was asked for" in said
    assert cause is not None
    assert "Available KV cache memory: 1.00 GiB" in cause.evidence[0].text
    assert "environment" in cause.levers[0].why
