from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvbudget.ledger.model import Cause, Direction, Effect, Evidence, Lever
from pytest_kvbudget.records import Timings
from pytest_kvbudget.report.text import attempt_lines, finding_lines
from pytest_kvbudget.search.model import Hint, Limit
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import GIB, MIB
from pytest_kvbudget.verdict import FindingKind, Phase, Verdict
from tests.report.building import RUN, attempt, finding_record, target

WORDS = st.text(max_size=60)
CAUSES = st.builds(
    Cause,
    phase=st.sampled_from(Phase),
    failure_class=WORDS,
    sentence=WORDS,
    evidence=st.lists(st.builds(Evidence, st.integers(1, 10**9), WORDS), max_size=5).map(tuple),
    levers=st.lists(
        st.builds(Lever, WORDS, st.sampled_from(get_args(Direction)), st.sampled_from(get_args(Effect)), WORDS),
        max_size=4,
    ).map(tuple),
    rank=st.none() | WORDS,
    by_gate=st.booleans(),
)


def test_a_failure_says_what_happened_what_to_turn_and_where_to_look() -> None:
    lines = attempt_lines(attempt(245_760, Verdict.FAIL), where=Path("runs/r1/w/attempt.json"))
    assert lines == [
        "FAIL max_model_len=245760 (≥ 2 min 39 s)",
        "            Graph capture asked for 76.00 MiB with 0 B free on Worker_TP0.",
        "  where     graph capture on Worker_TP0 (graph_capture_oom)",
        "  numbers   tried to allocate 76.00 MiB, free 0 B, short by 76.00 MiB",
        "  turn      lower max_model_len: a margin of this size is gone within one step of the ladder",
        "            lower gpu_memory_utilization: +0.01 is 0.32 GiB on a card of 31.86 GiB",
        "  no use    lower max_num_seqs: the reserve is for one request of max_model_len",
        "  worse     raise gpu_memory_utilization: the phase that allocates last gets even less",
        "  evidence  line 10: torch.OutOfMemoryError: HIP out of memory. Tried to allocate 76.00 MiB.",
        "  log       runs/r1/w/engine.log",
        "  record    runs/r1/w/attempt.json",
    ]


def test_a_gate_failure_is_not_blamed_on_memory() -> None:
    gate = Cause(phase=Phase.READY, failure_class="gate", sentence="assert 3 > 4", by_gate=True)
    lines = attempt_lines(attempt(245_760, Verdict.FAIL, cause=gate, message="The test refused it."))
    assert lines[0].startswith("FAIL (gate) ")
    assert any("says nothing about memory" in line for line in lines)
    assert "  numbers   KV cache 245,760 tokens, full windows 1.00×" in lines
    assert not any("MiB" in line for line in lines)


def test_the_same_number_is_not_said_twice() -> None:
    nearest = attempt(241_664, hint=Hint(limits=(Limit(name="device_memory", margin_bytes=58 * MIB),)))
    (numbers,) = [line for line in attempt_lines(nearest) if "numbers" in line]
    assert numbers.count("58.00 MiB") == 1
    other = attempt(241_664, hint=Hint(limits=(Limit(name="kv_check", margin_bytes=20 * MIB),)))
    (numbers,) = [line for line in attempt_lines(other) if "numbers" in line]
    assert "slack at KV check 20.00 MiB, device memory free when ready 58.00 MiB" in numbers


def test_a_scaled_pool_is_named_as_the_winner_had_it() -> None:
    attempts = [
        attempt(length, verdict, shape=Shape(max_model_len=length, kv_cache_memory_bytes=pool))
        for length, verdict, pool in ((241_664, Verdict.PASS, 2 * GIB), (245_760, Verdict.FAIL, 3 * GIB))
    ]
    record = msgspec.structs.replace(finding_record(("a", "b")), pool="scaled")
    assert "  pool      2.00 GiB per rank, scaled to the winner" in finding_lines(record, attempts)
    assert not any("scaled" in line for line in finding_lines(finding_record(("a", "b")), attempts))


def test_the_log_tail_stands_in_for_missing_evidence_only() -> None:
    tail = ["loading", "\x1b[31mkilled\x1b[0m\r"]
    silent = attempt(4_096, Verdict.UNKNOWN, cause=None, message="The engine vanished.")
    assert [line for line in attempt_lines(silent, tail) if "loading" in line or "killed" in line] == [
        "  log ends  loading",
        "            killed␍",
    ]
    assert not any("loading" in line for line in attempt_lines(attempt(4_096, Verdict.FAIL), tail))


def test_simulated_stands_in_the_second_line() -> None:
    line = "SIMULATED DEVICE: no number here was measured on hardware"
    simulated = attempt(4_096, simulated=True)
    assert attempt_lines(simulated)[1] == line
    assert finding_lines(finding_record(("a",), simulated=True), [simulated])[1] == line
    assert line not in attempt_lines(attempt(4_096))


def test_nothing_is_claimed_where_nothing_was_stated() -> None:
    bare = attempt(4_096, Verdict.UNKNOWN, ledger=None, memory=(), timings=Timings(), cause=None, message="No answer.")
    assert attempt_lines(bare) == [
        "UNKNOWN max_model_len=4096",
        "            No answer.",
        "  log       engine.log beside the record, run 20261005T021500Z-4f1c22 on bench-2",
    ]


def test_finding_has_a_line_per_boot_in_boot_order() -> None:
    attempts = [attempt(262_144, Verdict.FAIL), attempt(241_664), attempt(245_760, Verdict.FAIL)]
    lines = finding_lines(finding_record(("a", "b", "c")), attempts, where=Path("runs/r1/finding.json"))
    assert lines[0].startswith("The largest window that serves is 241,664 tokens;")
    assert [line.split("  ")[1:4] for line in lines[1:4]] == [
        [" 1", "262,144", "FAIL"],
        [" 2", "241,664", "PASS"],
        [" 3", "245,760", "FAIL"],
    ]
    assert "tried to allocate 76.00 MiB; free 0 B; short by 76.00 MiB" in lines[1]
    assert "KV cache 241,664 tokens; slack at graph capture 58.00 MiB" in lines[2]
    # to lower the window is no way to a larger window
    assert "  for more  lower gpu_memory_utilization" in lines
    assert lines[-1] == "  record    runs/r1/finding.json"


def test_a_finding_says_what_else_belongs_to_it_in_few_lines() -> None:
    earlier = msgspec.structs.replace(RUN, run="20261004T221100Z-99aa11")
    attempts = [
        attempt(262_144, Verdict.FAIL, run=earlier, warm=True, device_set="x"),
        attempt(241_664, warm=True, device_set="x"),
        attempt(
            245_760,
            Verdict.FAIL,
            warm=False,
            device_set="y",
            target=msgspec.structs.replace(target(), devices=("2", "3")),
        ),
    ]
    note = "rungs above 262,144 were not booted"
    record = finding_record(
        ("a", "b", "c"), boots=2, repeats=1, reused=1, notes=(note,), sigma_bytes=80.0 * MIB, sigma_source="residuals",
        deploy_value=239_616, sentence=f"241,664 passed; {note}",
    )  # fmt: skip
    lines = finding_lines(record, attempts)
    assert lines[0] == "241,664 passed"
    assert lines[1].endswith("; warm; devices 0, 1; taken over from run 20261004T221100Z-99aa11")
    assert lines[2].endswith("; warm; devices 0, 1")
    assert lines[3].endswith("; cold; devices 2, 3")
    assert "  sets      devices 0, 1: x; devices 2, 3: y" in lines
    assert (
        "  deploy    at most 239,616 tokens: three sigma below the largest that passed; arithmetic, not a boot" in lines
    )
    assert "  noise     one sigma is 80.00 MiB, from this search's own boots" in lines
    assert f"  note      {note}" in lines
    assert "of which 1 repeated one with a verdict" in " ".join(" ".join(lines).split())


def test_where_nothing_passes_the_lever_is_named() -> None:
    lever = Lever("max_num_seqs", "lower", "helps", "each sequence needs a state block")
    record = finding_record(("a",), kind=FindingKind.EMPTY, value=None, failed_at=131_072, lever=lever)
    lines = finding_lines(record, [attempt(131_072, Verdict.FAIL)])
    assert "  instead   lower max_num_seqs: each sequence needs a state block" in lines
    assert not any(line.startswith("  for more") for line in lines)


def test_an_estimate_is_in_the_unit_of_the_axis_that_was_climbed() -> None:
    record = attempt(
        4_096, Verdict.FAIL, ledger=None, cause=None, rung="max_model_len=4096,gpu_memory_utilization=0.97",
        hint=Hint(estimate=9_500),
    )  # fmt: skip
    (numbers,) = [line for line in attempt_lines(record) if "numbers" in line]
    assert numbers == "  numbers   engine's estimate 0.95"


@given(cause=CAUSES, message=WORDS, rung=WORDS, note=WORDS, tail=st.lists(WORDS, max_size=3))
def test_lines_are_lines_whatever_the_engine_printed(
    cause: Cause, message: str, rung: str, note: str, tail: list[str]
) -> None:
    record = attempt(4_096, Verdict.FAIL, cause=cause, message=message, rung=rung, notes=(note,))
    finding = finding_record(("a",), kind=FindingKind.UNDECIDED, bounded_by=cause, sentence=message)
    for line in [*attempt_lines(record, tail), *finding_lines(finding, [record])]:
        assert len(line.splitlines()) <= 1
        assert line == line.rstrip()
        assert line.isprintable() or not any(
            ord(character) < 0xA0 and not character.isprintable() for character in line
        )
        line.encode("utf-8")
