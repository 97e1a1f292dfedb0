"""Lines that only talk: a word of failure in a healthy record is no failure, and a prompt states no figure."""

from __future__ import annotations

import pytest

from pytest_kvbudget.ledger.reader import LedgerReader
from pytest_kvbudget.verdict import Provenance

BOOT = (
    "(EngineCore pid=2) INFO 11-29 18:07:56 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: "
    "model='m'\n"
    "(EngineCore pid=2) INFO 11-29 18:08:12 [gpu_model_runner.py:68] Starting to load model m...\n"
)
TALK = (
    "(EngineCore pid=2) INFO 11-29 18:08:14 [x.py:1] not an issue: torch.OutOfMemoryError: CUDA out of memory.",
    "(EngineCore pid=2) WARNING 11-29 18:08:14 [x.py:1] OOM detected, falling back: torch.OutOfMemoryError: CUDA out "
    "of memory. Tried to allocate 1.00 GiB.",
    "(APIServer pid=1) INFO 11-29 18:08:14 [logger.py:1] Received request cmpl-1: prompt: 'why does vllm say "
    "ValueError: No available memory for the cache blocks. Try increasing', params: x",
    "(APIServer pid=1) INFO 11-29 18:07:43 [api_utils.py:286] non-default args: {'chat_template': "
    "'torch.OutOfMemoryError: CUDA out of memory.'}",
)


def read(text: str) -> LedgerReader:
    reader = LedgerReader("vllm")
    reader.feed(text.encode())
    reader.close()
    return reader


@pytest.mark.parametrize("line", TALK)
def test_healthy_records_are_no_cause(line: str) -> None:
    assert read(f"{BOOT}{line}\n").ledger().cause is None


@pytest.mark.parametrize("level", ["ERROR", "CRITICAL"])
def test_the_same_words_in_a_record_of_failure_are(level: str) -> None:
    line = TALK[0].replace("INFO", level).replace("not an issue: ", "")
    cause = read(f"{BOOT}{line}\n").ledger().cause
    assert cause is not None
    assert cause.failure_class == "weights_oom"


def test_a_prompt_states_no_size() -> None:
    line = (
        "(APIServer pid=1) INFO 11-29 18:08:14 [logger.py:1] Received request c: prompt: 'GPU KV cache size: 9 tokens'"
    )
    assert read(f"{BOOT}{line}\n").ledger().get("kv_tokens") is None


def test_a_simulated_engine_is_known_by_its_first_line() -> None:
    text = "INFO 11-29 18:07:55 [x.py:1] pytest-kvbudget simulated device: cards 0 of 31.86 GiB\n" + BOOT
    size = "(EngineCore pid=2) INFO 11-29 18:08:13 [kv_cache_utils.py:2327] GPU KV cache size: 16 tokens, Maximum "
    ledger = read(text + size + "concurrency for 16 tokens per request: 1.00x\n").ledger()
    assert ledger.facts["kv_tokens"].provenance is Provenance.SIMULATED
