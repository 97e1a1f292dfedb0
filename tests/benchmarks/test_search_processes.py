"""Findings on simulated engines agree with a boot of every rung, and real processes do what is rehearsed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pytest_kvbudget.search.model import Finding
from pytest_kvbudget.specs import LadderSpec
from pytest_kvbudget.verdict import FindingKind
from tests.benchmarks import search_processes
from tests.benchmarks.devices.exhaustive import Truth, disagreement, truth
from tests.benchmarks.devices.targets import MAKERS, subject

FAMILIES = (*MAKERS, search_processes.ODD)
UNSEEN = """
[target.unseen]
backend = "mock"
[target.unseen.shape]
max_num_seqs = 4
gpu_memory_utilization = 0.85
[target.unseen.mock]
device_total = "48 GiB"
free_at_start = "42 GiB"
weights = "20 GiB"
kv_bytes_per_token = 61_440
chunked_prefill = "off above 100000"
activation_per_batched_token = 60_000
estimate = "huge"
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_findings_agree_with_a_boot_of_every_rung(family: str) -> None:
    rows = [row for seed in range(4000, 4006) for row in search_processes.searched(family, seed)]
    assert [row.wrong for row in rows if row.wrong is not None] == []
    # ceil(log2(rungs + 1)) + 2 boots for 64 rungs; odd targets have up to 512
    assert max(row.search for row in rows) <= (9 if family in MAKERS else 12)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_real_engine_does_what_is_rehearsed(family: str) -> None:
    assert search_processes.as_processes(family, 4000, [0]) == [None]


def test_targets_are_the_same_everywhere_and_boundaries_lie_where_they_were_put() -> None:
    for family in MAKERS:
        assert msgspec.to_builtins(subject(family, 7).loaded) == msgspec.to_builtins(subject(family, 7).loaded)
    chosen = subject("plain", 4001)
    real = truth(chosen.loaded, chosen.ladder)
    passing = [value for value, chance in real.chances.items() if chance == 1]
    assert passing[-1] <= chosen.end < passing[-1] + chosen.ladder.quantum


def test_boots_for_processes_are_one_in_a_hundred_and_chosen_by_seed() -> None:
    first = [4] * 1000
    chosen = search_processes.chosen_boots("plain", first)
    assert sum(map(len, chosen.values())) == 40
    assert chosen == search_processes.chosen_boots("plain", first)
    assert chosen != search_processes.chosen_boots("cpu", first)
    assert sum(map(len, search_processes.chosen_boots("plain", [4] * 30).values())) == 20
    assert sum(map(len, search_processes.chosen_boots("plain", [4] * 2).values())) == 8


LADDER = LadderSpec(axis="max_model_len", start=20, floor=10, quantum=5)


def found(kind: FindingKind, value: int | None, failed_at: int | None) -> Finding:
    return Finding(kind=kind, axis=LADDER.rungs, value=value, failed_at=failed_at, boots=2, sentence="said")


@pytest.mark.parametrize(
    ("chances", "right", "wrong"),
    [
        (
            (1, 1, 0),
            [found(FindingKind.PROVEN, 15, 20)],
            [found(FindingKind.PROVEN, 10, 15), found(FindingKind.CEILING_REACHED, 20, None)],
        ),
        ((1, 1, 1), [found(FindingKind.CEILING_REACHED, 20, None)], [found(FindingKind.PROVEN, 15, 20)]),
        ((0, 0, 0), [found(FindingKind.EMPTY, None, 10)], [found(FindingKind.UNDECIDED, None, None)]),
        # no single boundary: what is proven has to be true, and may be called what it is
        (
            (1, 0, 1),
            [found(FindingKind.PROVEN, 10, 15), found(FindingKind.NON_MONOTONE, 20, None)],
            [found(FindingKind.PROVEN, 15, 20), found(FindingKind.EMPTY, None, 10)],
        ),
        ((0, 0, 1), [found(FindingKind.NON_MONOTONE, 20, None)], [found(FindingKind.EMPTY, None, 10)]),
        ((1, 0.4, 0), [found(FindingKind.PROVEN, 10, 15), found(FindingKind.FLAKY, 10, 15)], [
            found(FindingKind.PROVEN, 15, 20),
        ]),
        ((1, 1, 0), [], [found(FindingKind.FLAKY, 15, 20), found(FindingKind.NON_MONOTONE, 15, 20)]),
    ],
)  # fmt: skip
def test_a_finding_that_differs_from_the_truth_is_told(
    chances: tuple[float, ...], right: list[Finding], wrong: list[Finding]
) -> None:
    real = Truth(chances=dict(zip((10, 15, 20), map(float, chances), strict=True)))
    assert [disagreement(finding, real) for finding in right] == [None] * len(right)
    assert None not in [disagreement(finding, real) for finding in wrong]


def test_one_target_of_a_file_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kvbudget.toml"
    path.write_text(UNSEEN, encoding="utf-8")
    asked = ["--config", str(path), "--target", "unseen"]
    window = ["--floor", "8192", "--ceiling", "262144", "--quantum", "4096"]
    assert search_processes.command([*asked, *window]) == 0
    lines = capsys.readouterr().out.splitlines()
    # 40.8 GiB less 20 of weights, 1.45 outside torch, 0.5 of activation and 112 MiB of graphs: 18.74 GiB for a step
    # that beyond 100,000 tokens is as long as the window, and the KV cache: 60,000 + 61,440 bytes a token
    assert lines[0] == "every rung: 39 of 63 pass, 8,192 to 163,840; a boundary; simulated"
    assert lines[1].startswith("finding: max_model_len 163,840 passed and 167,936 failed for memory in kv_check; ")
    assert lines[2] == "they agree"
    share = ["--axis", "gpu_memory_utilization", "--floor", "0.5", "--ceiling", "0.95"]
    assert search_processes.command([*asked, *share]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "they agree"


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_processes, "LEAST_PROCESSES", 1)
    assert search_processes.main(3) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["cold", "plan", "archive"]
    assert lines[-2] == "6 boots also as real processes: 6 with the same verdict, cause and hint"
    assert lines[-1] == "wrong 0"
