"""Ladders stacked on one function: one after the other, each at the winner of the one before, no shape booted twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pytest_kvbudget.archive import read_attempt
from pytest_kvbudget.verdict import FindingKind, Verdict
from tests.conftest import Project, properties
from tests.plugin.searching import chances, largest, target_shape

DISTRIBUTIONS = pytest.mark.parametrize("how", [(), ("-n2",)], ids=["here", "n2"])

STACKED = """
import pytest

@pytest.mark.ladder(axis="max_num_seqs", start=64, floor={floor}, quantum=8)
@pytest.mark.ladder(start=65_536, floor=16_384)
def test_deploy(kv_engine, kv_rung):
    assert kv_engine.shape.max_num_seqs in range(8, 65, 8)
    assert int(kv_rung) in (kv_engine.shape.max_num_seqs, kv_engine.shape.max_model_len)
"""
WINDOW = 16_384
"""Of the shape, and the floor of the second ladder: the winner of the first is a rung of the second."""


def hybrid(project: Project, *, state: int = 1_048_576, floor: int = 8) -> None:
    """A model with a state of 1 MiB for each sequence, in a pool of 50 MiB."""
    project.configure(shape=f"max_model_len = {WINDOW}\nmax_num_seqs = 16", mock=f"state_bytes_per_seq = {state}")
    project.tests(STACKED.format(floor=floor))


def truth(project: Project) -> tuple[tuple[int, int], tuple[int, int]]:
    """Most sequences at the shape's window and the next that fail; the same of windows with so many sequences."""
    seqs, more = largest(chances(project, "max_num_seqs", range(8, 65, 8)))
    base = target_shape(project).merged(max_num_seqs=int(seqs))
    window, longer = largest(chances(project, "max_model_len", range(16_384, 65_537, 4096), base=base))
    assert more is not None
    assert longer is not None
    return (int(seqs), int(more)), (int(window), int(longer))


def booted(project: Project) -> Counter[tuple[int | None, int | None]]:
    return Counter((record.shape.max_num_seqs, record.shape.max_model_len) for record in project.attempts())


@DISTRIBUTIONS
def test_the_second_ladder_is_climbed_at_the_winner_of_the_first(project: Project, how: tuple[str, ...]) -> None:
    hybrid(project)
    (seqs, more), (window, longer) = truth(project)

    result = project.run(*how, "--junitxml=junit.xml")

    result.assert_outcomes(passed=1)
    found = {record.finding.axis.name: record for record in project.findings()}
    assert set(found) == {"max_num_seqs", "max_model_len"}
    first, second = found["max_num_seqs"].finding, found["max_model_len"].finding
    assert (first.kind, first.value, first.failed_at) == (FindingKind.PROVEN, seqs, more)
    assert (second.kind, second.value, second.failed_at) == (FindingKind.PROVEN, window, longer)
    assert found["max_num_seqs"].shape.max_model_len == WINDOW
    assert found["max_model_len"].shape.max_num_seqs == seqs

    # rows name every axis, the one that moves last
    text = result.stdout.str()
    assert f"test_it.py::test_deploy[max_model_len={WINDOW},max_num_seqs={seqs}] PASS" in text
    assert f"test_it.py::test_deploy[max_model_len={WINDOW},max_num_seqs={more}] FAIL" in text
    assert f"test_it.py::test_deploy[max_num_seqs={seqs},max_model_len={window}] PASS" in text
    assert f"test_it.py::test_deploy[max_num_seqs={seqs},max_model_len={longer}] FAIL" in text
    result.stdout.fnmatch_lines(
        [
            "test_it.py::test_deploy:",
            f"max_num_seqs {seqs} passed and {more} failed for memory in kv_check; proven with *",
            f"max_model_len {window:,} passed and {longer:,} failed for memory in kv_check; proven with * boots*1 *",
        ]
    )
    cases = project.junit()
    assert properties(cases[f"test_deploy[max_num_seqs={seqs},max_model_len={window}]"])["kvbudget.verdict"] == "PASS"
    names = [entry.get("name") for entry in cases["test_deploy"].iter("property")]
    assert len(names) == len(set(names)), "readers of JUnit keep one property of a name"
    said = properties(cases["test_deploy"])
    assert (said["kvbudget.axis"], said["kvbudget.value"]) == ("max_model_len", str(window))
    assert said["kvbudget.max_model_len.value"] == str(window)
    assert (said["kvbudget.max_num_seqs.finding"], said["kvbudget.max_num_seqs.value"]) == ("proven", str(seqs))
    assert said["kvbudget.max_num_seqs.record"] != said["kvbudget.record"]


def test_what_the_body_printed_goes_with_the_row_that_is_taken_over(project: Project) -> None:
    hybrid(project)
    project.tests(STACKED.format(floor=8) + "    print('the body was here')\n")
    (seqs, _), _ = truth(project)

    project.run("--junitxml=junit.xml", "-o", "junit_logging=all").assert_outcomes(passed=1)

    case = project.junit()[f"test_deploy[max_num_seqs={seqs},max_model_len={WINDOW}]"]
    assert "the body was here" in "".join(case.itertext())


@DISTRIBUTIONS
def test_the_winner_of_the_first_is_known_to_the_second_and_not_booted_again(
    project: Project, how: tuple[str, ...]
) -> None:
    hybrid(project)
    (seqs, _), _ = truth(project)

    result = project.run(*how)

    result.assert_outcomes(passed=1)
    boots = booted(project)
    assert boots[seqs, WINDOW] == 1
    assert max(boots.values()) == 1
    result.stdout.fnmatch_lines(
        [
            f"test_it.py::test_deploy[[]max_num_seqs={seqs},max_model_len={WINDOW}[]] PASS *taken over from "
            f"max_model_len={WINDOW},max_num_seqs={seqs} of this run, where the body ran*"
        ]
    )
    second = next(record for record in project.findings() if record.finding.axis.name == "max_model_len")
    assert second.finding.reused == 1
    assert second.finding.boots == sum(count for (given, _), count in boots.items() if given == seqs) - 1
    folder = next(path for path in project.path.rglob("finding.json") if path.parent.name == "max_model_len").parent
    proofs = [read_attempt(Path(folder, path)) for path in second.attempts]
    assert (seqs, WINDOW) in {(record.shape.max_num_seqs, record.shape.max_model_len) for record in proofs}


def test_what_the_first_does_not_prove_the_second_does_not_build_on(project: Project) -> None:
    """With 8 MiB for each sequence not even eight of them fit."""
    hybrid(project, state=8 * 1_048_576)
    assert set(chances(project, "max_num_seqs", range(8, 65, 8)).values()) == {0.0}

    result = project.run()

    result.assert_outcomes(failed=1)
    (record,) = project.findings()
    assert (record.finding.axis.name, record.finding.kind) == ("max_num_seqs", FindingKind.EMPTY)
    assert {window for _, window in booted(project)} == {WINDOW}
    result.stdout.fnmatch_lines(["nothing passes: max_num_seqs 8, the floor, failed for memory in *"])


def test_one_rung_of_a_stack_is_asked_for_by_its_whole_label(project: Project) -> None:
    hybrid(project)

    result = project.run("--kvbudget-rung", "max_num_seqs=32,max_model_len=20480")

    result.assert_outcomes(passed=1)
    (record,) = project.attempts()
    assert (record.shape.max_num_seqs, record.shape.max_model_len) == (32, 20_480)
    assert record.verdict is Verdict.PASS
    result.stdout.fnmatch_lines(
        ["rung max_num_seqs=32,max_model_len=20480: PASS; it proves nothing about other rungs", "record: *"]
    )


def test_the_label_of_a_row_is_one_that_the_option_takes(project: Project) -> None:
    hybrid(project)
    everything = project.run("--kvbudget-max-boots=1")
    (row,) = [line for line in everything.outlines if line.startswith("test_it.py::test_deploy[")]
    label = row.partition("[")[2].partition("]")[0]

    again = project.run("--kvbudget-rung", label)

    again.assert_outcomes(passed=1)
    first, second = project.attempts()
    assert first.shape == second.shape


WRONG = {
    "a bare value": (
        "16384",
        "has 2 ladders; name each axis: max_num_seqs=VALUE,max_model_len=VALUE",
    ),
    "another axis": (
        "max_num_seqs=32,kv_cache_memory_bytes=1",
        "test_it.py::test_deploy moves max_num_seqs, max_model_len, not kv_cache_memory_bytes",
    ),
    "no rung": ("max_num_seqs=33,max_model_len=16384", "max_num_seqs from 64 down to 8 by 8; the nearest is 32"),
}


@pytest.mark.parametrize(("rung", "words"), WRONG.values(), ids=WRONG.keys())
@DISTRIBUTIONS
def test_a_label_that_is_none_is_an_error_that_says_what_is_accepted(
    project: Project, how: tuple[str, ...], rung: str, words: str
) -> None:
    hybrid(project)

    result = project.run(*how, "--kvbudget-rung", rung)

    assert result.ret != 0
    assert project.attempts() == []
    assert words in result.stdout.str() + result.stderr.str()
