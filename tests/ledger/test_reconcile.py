"""Identities between stated figures: real ones close, and what does not close is a finding."""

from __future__ import annotations

import pytest

from pytest_kvbudget.ledger.reconcile import Finding, reconcile
from tests.ledger.support import DATA, GIB, MIB, read, read_bytes

SUMMARY = (
    "Free memory on device (31.5/31.86 GiB) on startup. Desired GPU memory utilization is (0.97, 30.9 GiB). Actual "
    "usage is "
    "24.57 GiB for consumed memory (weights + non-torch), 1.46 GiB for peak activation, and 0.31 GiB for CUDAGraph "
    "memory."
)


def named(findings: tuple[Finding, ...], name: str) -> list[Finding]:
    return [finding for finding in findings if finding.name == name]


def test_a_real_budget_closes_within_what_was_rounded() -> None:
    (finding,) = named(reconcile(read("Available KV cache memory: 4.87 GiB", SUMMARY)), "kv_budget")
    assert finding.agrees
    assert [evidence.line for evidence in finding.evidence] == [1, 2]


def test_a_budget_that_does_not_close_is_worth_the_difference() -> None:
    (finding,) = named(reconcile(read("Available KV cache memory: 4.37 GiB", SUMMARY)), "kv_budget")
    assert not finding.agrees
    assert finding.worth_bytes == pytest.approx(0.5 * GIB, abs=1)


def test_the_v0_record_closes() -> None:
    ledger = read(
        "the current vLLM instance can use total_gpu_memory (15.77GiB) x gpu_memory_utilization (0.90) = 14.20GiB",
        "model weights take 7.51GiB; non_torch_memory takes 0.39GiB; PyTorch activation peak memory takes 2.53GiB; the "
        "rest "
        "of the memory reserved for KV Cache is 3.76GiB.",
    )
    assert named(reconcile(ledger), "kv_budget")[0].agrees


def test_the_suggestion_of_a_real_boot_follows_from_its_own_terms_and_it_is_overcommitted() -> None:
    findings = reconcile(read_bytes((DATA / "cases" / "vllm-backport-34.log").read_bytes()))
    suggestions, overcommitted = named(findings, "kv_suggestion"), named(findings, "kv_overcommit")
    assert [finding.agrees for finding in suggestions] == [True, True]
    assert [finding.agrees for finding in overcommitted] == [False, False]
    assert overcommitted[0].worth_bytes == pytest.approx(-0.25 * GIB, abs=0.01 * GIB)
    assert "estimate 0.58 GiB, captured 0.10 GiB" in named(findings, "graphs")[0].sentence


@pytest.mark.parametrize(
    ("tokens", "window", "concurrency", "agrees"),
    [
        ("401,408", "200,704", "2.00", True),
        ("79,953", "65,536", "1.22", True),
        ("75,840", "120,000", "2.48", False),
        ("154,496", "16,384", "33.47", False),
        ("290,864", "32,768", "33.04", False),
    ],
)
def test_a_hybrid_is_told_by_its_capacity(tokens: str, window: str, concurrency: str, agrees: bool) -> None:
    ledger = read(
        f"GPU KV cache size: {tokens} tokens, Maximum concurrency for {window} tokens per request: {concurrency}x"
    )
    (finding,) = named(reconcile(ledger), "kv_capacity")
    assert finding.agrees is agrees


def test_a_plan_table_closes_and_its_overhead_is_worth_slots() -> None:
    findings = reconcile(read_bytes((DATA / "cases" / "rdna4-plan-65536.log").read_bytes()))
    assert named(findings, "plan_sum")[0].agrees
    (overhead,) = named(findings, "plan_overhead")
    assert not overhead.agrees
    assert overhead.worth_bytes == pytest.approx(2.10 * GIB, abs=1)
    assert overhead.worth_slots is None


def test_a_difference_is_worth_slots_where_the_plan_says_what_a_slot_takes() -> None:
    ledger = read(
        "budget (total x util)                          31.29 GiB",
        "expert cache space 17.77 GiB 7,762 slots",
        "expert offload plan check (this rank): runtime overhead planned 5.25 GiB, measured 4.25 GiB (-1.00)",
    )
    (overhead,) = named(reconcile(ledger), "plan_overhead")
    assert overhead.worth_slots == pytest.approx(GIB / (2.34375 * MIB), abs=1)


def test_pinned_bytes_are_no_budget() -> None:
    ledger = read(
        "Initial free memory 31.5 GiB, reserved 2.95 GiB memory for KV Cache as specified by kv_cache_memory_bytes "
        "config",
        SUMMARY,
    )
    assert named(reconcile(ledger), "kv_budget") == []


def test_nothing_is_compared_that_is_not_stated() -> None:
    assert reconcile(read("Available KV cache memory: 4.87 GiB")) == ()
