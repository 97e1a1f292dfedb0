"""Services that log into one stream: each has boots of its own, however their lines take turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import chain, pairwise, zip_longest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvbudget.ledger.model import BootLedger
from pytest_kvbudget.ledger.reader import LedgerReader
from pytest_kvbudget.ledger.services import LONGEST_WAIT
from tests.ledger.support import DATA, GIB

SERVED = (DATA / "boots" / "h1_maxlen_auto.log").read_text().partition("[shutdown]")[0].splitlines()
REFUSED = (DATA / "boots" / "b1_kv_too_small.log").read_text().splitlines()

SHIPPERS: dict[str, Callable[[str], str]] = {
    "compose": lambda name: f"{name}-1  | ",
    "swarm": lambda name: f"{name}.1.q8x2k@node3    | ",
    "kubectl": lambda name: f"[pod/{name}-7d9f-x2x/engine] ",
    "journal": lambda name: f"Oct 03 10:00:00 host1 {name}[{400 + len(name)}]: ",
    "journal-iso": lambda name: f"2025-10-03T10:00:00+0200 host1 {name}[{400 + len(name)}]: ",
}


def shipped(lines: Iterable[str], prefix: str) -> list[str]:
    return [f"{prefix}{line}" for line in lines]


def reader_of(lines: Iterable[str]) -> LedgerReader:
    reader = LedgerReader()
    reader.feed(("\n".join(lines) + "\n").encode())
    reader.close()
    return reader


def told(ledger: BootLedger) -> tuple[object, ...]:
    """What a ledger says, but for where its lines stand."""
    facts = {name: value.value for name, value in ledger.facts.items()}
    ranks = {name: {rank: value.value for rank, value in by_rank.items()} for name, by_rank in ledger.ranks.items()}
    return ledger.outcome, ledger.phase, ledger.failure_class, facts, ranks, ledger.states


def turns(one: list[str], other: list[str]) -> list[str]:
    return [line for line in chain.from_iterable(zip_longest(one, other)) if line is not None]


@pytest.mark.parametrize("shipper", SHIPPERS)
@pytest.mark.parametrize("first", ["served", "refused"])
def test_lines_of_two_services_take_turns(shipper: str, first: str) -> None:
    names = ("vllm-a", "vllm-bb")
    prefixes = [SHIPPERS[shipper](name) for name in names]
    logs = {"served": shipped(SERVED, prefixes[0]), "refused": shipped(REFUSED, prefixes[1])}
    order = sorted(logs, key=lambda name: name != first)
    reader = reader_of(turns(*(logs[name] for name in order)))
    boots = dict(zip(order, reader.boots(), strict=True))
    for name, alone in (("served", SERVED), ("refused", REFUSED)):
        assert told(boots[name]) == told(reader_of(alone).ledger())
    services = dict(zip(order, reader.services, strict=True))
    assert names[0] in str(services["served"])
    assert names[1] in str(services["refused"])


@given(st.integers(0, 2**32), st.lists(st.integers(0, 1 << 20), max_size=8))
@settings(max_examples=25, deadline=None)
def test_any_turns_in_any_chunks(seed: int, cuts: list[int]) -> None:
    logs = [shipped(SERVED, "vllm-a-1  | "), shipped(REFUSED, "vllm-b-1  | "), shipped(SERVED, "vllm-c-1  | ")]
    order = [number for number, log in enumerate(logs) for _ in log]
    random.Random(seed).shuffle(order)
    left = [iter(log) for log in logs]
    data = "".join(next(left[number]) + "\n" for number in order).encode()
    reader = LedgerReader()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        reader.feed(data[start:end])
    reader.close()
    by_service = dict(zip(reader.services, reader.boots(), strict=True))
    served, refused = told(reader_of(SERVED).ledger()), told(reader_of(REFUSED).ledger())
    assert {name: told(ledger) for name, ledger in by_service.items()} == {
        "vllm-a-1": served,
        "vllm-b-1": refused,
        "vllm-c-1": served,
    }


def test_each_service_has_a_crash_loop_of_its_own() -> None:
    one, other = shipped(REFUSED, "vllm-a-1  | "), shipped(SERVED, "vllm-b-1  | ")
    third = [line.replace("pid=9", "pid=19") for line in one]
    reader = reader_of([*turns(one, other), *third])
    assert reader.services == ("vllm-a-1", "vllm-b-1", "vllm-a-1")
    assert [boot.outcome for boot in reader.boots()] == ["failed", "booted", "failed"]
    assert reader.starts[2] > len(one) + len(other)
    assert reader.ledger() == reader.boots()[2]


def test_one_service_is_not_named() -> None:
    reader = reader_of(shipped([*SERVED, *REFUSED], "vllm-1  | "))
    assert len(reader.boots()) == 2
    assert reader.services == (None, None)


def test_the_kernel_and_other_programs_run_no_engine() -> None:
    """Their lines are read with those of the engine that logged last: they tell why it is gone."""
    stamp = "Oct 03 10:00:00 host1 "
    lines = [f"{stamp}vllm[7]: {line}" for line in SERVED[:20]]
    kill = f"{stamp}kernel: Out of memory: Killed process 7 (VLLM::Worker) total-vm:1kB, anon-rss:1kB"
    reader = reader_of([*lines, f"{stamp}nginx[9]: Error", kill])
    assert len(reader.boots()) == 1
    assert reader.ledger().failure_class == "host_oom_killed"


def test_parts_of_one_engine_in_services_of_their_own_are_one_boot() -> None:
    worker = [line for line in SERVED if line.startswith("(Worker")]
    assert worker
    split = [f"{'worker' if line in worker else 'head'}-1  | {line}" for line in SERVED]
    reader = reader_of(split)
    assert len(reader.boots()) == 1
    assert told(reader.ledger()) == told(reader_of(SERVED).ledger())


def test_files_of_the_ranks_of_one_engine_name_services_of_their_own() -> None:
    reader = LedgerReader()
    for rank, figure in ((0, "2.97"), (1, "2.31")):
        reader.feed(
            f"node{rank}-1  | (Worker_TP{rank} pid=7) INFO [a.py:1] Available KV cache memory: {figure} GiB\n"
            f"node{rank}-1  | (EngineCore pid=5) INFO [a.py:1] GPU KV cache size: 1,024 tokens\n".encode()
        )
        reader.end_line()
    reader.close()
    (ledger,) = reader.boots()
    assert {rank: value.value for rank, value in ledger.ranks["available_kv_bytes"].items()} == {
        "Worker_TP0": round(2.97 * GIB),
        "Worker_TP1": round(2.31 * GIB),
    }


def test_a_sentence_that_never_ends_does_not_hold_up_the_others() -> None:
    """The broken line of a service that says no more is given up."""
    first = "vllm-a-1  | (APIServer pid=1) INFO [a.py:1] vLLM API server version 0.11.0"
    broken = "vllm-a-1  | ValueError: To serve at least one request with the models's max seq len (8192),"
    other = "vllm-b-1  | (APIServer pid=1) INFO [a.py:1] vLLM API server version 0.11.0"
    reader = LedgerReader()
    reader.feed("\n".join([first, broken, other, ""]).encode())
    assert reader._boots.waits_for_more
    reader.feed(b"vllm-b-1  | (APIServer pid=1) INFO [a.py:1] Chat template\n" * (LONGEST_WAIT + 1))
    assert not reader._boots.waits_for_more
