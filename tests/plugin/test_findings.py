"""Every kind of finding of a ladder, with the words that the terminal shows. What is true, the device's physics say."""

from __future__ import annotations

from collections import Counter

import pytest

from pytest_kvbudget.search.model import Finding
from pytest_kvbudget.verdict import FindingKind, Phase, Verdict
from tests.conftest import POOL_TOKENS, Project, rows
from tests.plugin.searching import card, chances, largest

DISTRIBUTIONS = pytest.mark.parametrize("how", [(), ("-n2",)], ids=["here", "n2"])

EACH_KIND = """
import pytest

@pytest.mark.ladder(start=65_536, floor=16_384)
def test_proven(kv_engine): ...

@pytest.mark.ladder(start=49_152, floor=16_384)
def test_ceiling(kv_engine): ...

@pytest.mark.ladder(start=65_536, floor=57_344)
def test_empty(kv_engine): ...

@pytest.mark.ladder(start=65_536, floor=16_384)
def test_error(kv_rung):
    raise LookupError("no such metric")

@pytest.mark.ladder(start=65_536, floor=16_384)
def test_undecided(kv_engine):
    pytest.fail("Timeout (>60.0s) from pytest-timeout.")
"""
LADDER = """
import pytest

@pytest.mark.ladder({arguments})
def test_window(kv_engine): ...
"""


def ladder(project: Project, arguments: str) -> None:
    project.tests(LADDER.format(arguments=arguments))


def only_finding(project: Project) -> Finding:
    (record,) = project.findings()
    return record.finding


def said(result: pytest.RunResult, *lines: str) -> None:
    """Each of these is a whole line of the terminal; only ``*`` stands for anything."""
    result.stdout.fnmatch_lines([line.replace("[", "[[]") for line in lines])


@DISTRIBUTIONS
def test_each_kind_is_said_in_the_terminal_with_its_proof(project: Project, how: tuple[str, ...]) -> None:
    """A pool of `POOL_TOKENS` on rungs of 4096: one test per kind that needs no other device."""
    value, failed_at = largest(chances(project, "max_model_len", range(16_384, 65_537, 4096)))
    assert (value, failed_at) == (49_152, 53_248)
    assert 49_152 <= POOL_TOKENS < 53_248
    project.tests(EACH_KIND)

    result = project.run(*how)

    result.assert_outcomes(passed=2, failed=3)
    kinds = {record.test.rpartition("::test_")[2]: record.finding for record in project.findings()}
    assert {name: finding.kind.value for name, finding in kinds.items()} == {
        "proven": "proven",
        "ceiling": "ceiling_reached",
        "empty": "empty",
        "error": "error",
        "undecided": "undecided",
    }
    text = result.stdout.str()
    for line in (
        "max_model_len 49,152 passed and 53,248 failed for memory in kv_check; proven with ",
        "max_model_len 49,152 passed and is the ceiling of the ladder; proven with ",
        "nothing passes: max_model_len 57,344, the floor, failed for memory in kv_check; ",
        "; raise kv_cache_memory_bytes instead",
        "the test body raised LookupError: no such metric",
        " gave no verdict twice: ",
    ):
        assert line in text, line
    assert (kinds["proven"].value, kinds["proven"].failed_at) == (value, failed_at)
    assert (kinds["ceiling"].value, kinds["ceiling"].failed_at) == (value, None)
    assert (kinds["empty"].value, kinds["empty"].failed_at) == (None, 57_344)
    assert (kinds["error"].boots, kinds["undecided"].boots, kinds["undecided"].retries) == (1, 2, 1)
    # only what is no proof is a failed test, and it says what is known
    said(result, "bracket on max_model_len: nothing passed, 57,344 failed")
    said(result, "bracket on max_model_len: nothing passed, nothing failed")


def test_where_the_axis_is_not_the_lever_three_boots_are_enough_and_the_lever_is_named(project: Project) -> None:
    """State of 64 sequences of 1 MiB does not go into 50 MiB, whatever the window (rdna4 hybrids; vllm#35288)."""
    project.configure(shape="max_num_seqs = 64", mock="state_bytes_per_seq = 1_048_576")
    found = chances(project, "max_model_len", range(8192, 131_073, 4096))
    assert set(found.values()) == {0.0}
    ladder(project, "start=131_072, floor=8_192")

    result = project.run()

    result.assert_outcomes(failed=1)
    finding = only_finding(project)
    assert finding.kind is FindingKind.EMPTY
    assert len(project.attempts()) <= 3
    assert finding.lever is not None
    assert (finding.lever.name, finding.lever.direction) == ("max_num_seqs", "lower")
    said(
        result,
        "nothing passes: max_model_len 8,192, the floor, failed for memory in kv_check; * boots; lower max_num_seqs "
        "instead",
    )


def test_where_a_longer_window_gets_further_the_ceiling_is_booted_before_all_is_called_empty(project: Project) -> None:
    """What the plan reserves for a window the expert arena gives up, and the runtime needs: a short window has less."""
    physics = """dialect = "rdna4"
weights = "9 GiB"
kv_bytes_per_token = 20000
[target.card.mock.arena]
slot_bytes = 160_000_000
slots_min = 40
registry_bytes_per_token = 21_000
overhead_real = "6 GiB\""""
    shape = 'gpu_memory_utilization = 0.97\nmax_num_seqs = 4\nextra_args = ["--expert-precise-memory"]'
    (project.path / "kvbudget.toml").write_text(card(mock=physics, shape=shape))
    project.tests("""
import pytest

@pytest.mark.ladder(start=262_144, floor=4096)
def test_window(kv_engine): ...
""")
    assert chances(project, "max_model_len", [4096, 262_144]) == {4096: 0.0, 262_144: 1.0}

    result = project.run()

    result.assert_outcomes(failed=1)
    (record,) = project.findings()
    assert record.finding.kind is FindingKind.NON_MONOTONE, record.finding.sentence
    assert "although 262,144 passed, each of them twice" in record.finding.sentence
    result.stdout.fnmatch_lines(["*262,144  PASS*beside the proof*"])


NOISY = """
kv_bytes_per_token = 1024
activation_per_window_token = "128 KiB"
noise_boot = "1 GiB"
seed = 9
"""
"""A token of the window takes 128 KiB of the device, and boots of one shape differ by 8,192 tokens' worth."""


def test_flaky_gives_the_rung_that_held_and_the_one_that_never_did(project: Project) -> None:
    (project.path / "kvbudget.toml").write_text(card(mock=NOISY, shape='kv_cache_memory_bytes = "1 GiB"'))
    ladder(project, "start=131_072, floor=16_384, quantum=8_192, strategy='bisect', verify='neighbours'")

    result = project.run()

    result.assert_outcomes(failed=1)
    finding = only_finding(project)
    assert finding.kind is FindingKind.FLAKY, finding.sentence
    boots = Counter((record.shape.max_model_len, record.verdict) for record in project.attempts())
    windows = {window for window, _ in boots}
    mixed = {window for window in windows if boots[window, Verdict.PASS] and boots[window, Verdict.FAIL]}
    truth = chances(project, "max_model_len", [window for window in windows if window is not None])
    assert mixed
    assert all(0 < truth[window] < 1 for window in mixed if window is not None)
    held, never = finding.steady_value, finding.refused_at
    assert held is not None
    assert never is not None
    assert held < min(window for window in mixed if window is not None) < never
    assert (boots[held, Verdict.PASS], boots[held, Verdict.FAIL]) == (3, 0)
    assert (boots[never, Verdict.PASS], boots[never, Verdict.FAIL]) == (0, 2)
    said(
        result,
        f"flaky: max_model_len * passed and failed, and * passed; max_model_len {held:,} passed three of three, "
        f"{never:,} failed two of two; * boots, * of them repeated",
    )


def test_a_window_that_fails_between_two_that_pass_is_booted_twice_and_no_boundary_is_claimed(
    project: Project,
) -> None:
    """Prefill is chunked only above 46,000 tokens, so 45,056 takes more than 49,152 (as real ladders at 20k to 35k)."""
    project.configure(mock='chunked_prefill = "on above 46000"\nactivation_per_batched_token = 320_000')
    found = chances(project, "max_model_len", range(16_384, 65_537, 4096))
    assert [int(value) for value, chance in found.items() if chance == 0] == [45_056, 53_248, 57_344, 61_440, 65_536]
    ladder(project, "start=65_536, floor=16_384, verify='neighbours'")

    result = project.run()

    result.assert_outcomes(failed=1)
    finding = only_finding(project)
    assert finding.kind is FindingKind.NON_MONOTONE
    boots = Counter((record.shape.max_model_len, record.verdict) for record in project.attempts())
    assert boots[45_056, Verdict.FAIL] == boots[49_152, Verdict.PASS] == 2
    said(
        result,
        "no single boundary: max_model_len 45,056 failed although 49,152 passed, each of them twice; max_model_len "
        "49,152 passed, 53,248 failed; * boots, 2 of them repeated",
    )


FAULTS = {
    "died": (
        "die_in",
        FindingKind.UNDECIDED,
        2,
        "undecided: max_model_len * gave no verdict twice: the engine left in *, and no line of its log says why; "
        "nothing passed or failed; 2 boots, 1 of them repeated",
    ),
    "error": (
        "error_in",
        FindingKind.ERROR,
        1,
        "error: max_model_len * ended for another reason than memory: a kernel failed; *; nothing passed or failed; "
        "1 boot",
    ),
}


@pytest.mark.parametrize(("fault", "kind", "boots", "words"), FAULTS.values(), ids=FAULTS.keys())
def test_what_is_no_verdict_on_memory_moves_nothing(
    project: Project, fault: str, kind: FindingKind, boots: int, words: str
) -> None:
    project.configure(mock=f'faults = {{ {fault} = "weights_load" }}')
    ladder(project, "start=65_536, floor=16_384")

    result = project.run()

    result.assert_outcomes(failed=1)
    finding = only_finding(project)
    assert (finding.kind, finding.value, finding.failed_at) == (kind, None, None)
    assert len(rows(result.outlines)) == boots
    said(result, words)


# -- axes


def test_a_share_of_the_device_is_an_axis(project: Project) -> None:
    """Graphs are charged nothing by the estimate and take 1.6 GiB: above some share the capture runs out of memory."""
    (project.path / "kvbudget.toml").write_text(
        card(mock='graph_estimate = 0\ngraph_base = "1 GiB"', shape="max_model_len = 8192")
    )
    shares = [round(0.80 + 0.01 * step, 2) for step in range(19)]
    value, failed_at = largest(chances(project, "gpu_memory_utilization", shares))
    ladder(project, "axis='gpu_memory_utilization', start=0.98, floor=0.80")

    result = project.run("--junitxml=junit.xml")

    result.assert_outcomes(passed=1)
    finding = only_finding(project)
    assert finding.kind is FindingKind.PROVEN
    assert finding.axis.setting(finding.value or 0) == value
    assert finding.axis.setting(finding.failed_at or 0) == failed_at
    said(result, f"gpu_memory_utilization {value} passed and {failed_at} failed for memory in graph_capture; *")
    assert f"test_window[gpu_memory_utilization={value}]" in project.junit()


def test_batched_tokens_are_an_axis(project: Project) -> None:
    project.configure(shape="max_model_len = 2048", mock='activation_per_batched_token = "512 KiB"')
    value, failed_at = largest(chances(project, "max_num_batched_tokens", range(2048, 65_537, 2048)))
    ladder(project, "axis='max_num_batched_tokens', start=65_536, floor=2_048, quantum=2_048")

    result = project.run()

    result.assert_outcomes(passed=1)
    finding = only_finding(project)
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, value, failed_at)
    said(result, f"max_num_batched_tokens {value:,} passed and {failed_at:,} failed for memory in graph_capture; *")


# -- a rung passes only if it survives


@DISTRIBUTIONS
def test_with_a_knife_edge_the_window_is_the_largest_that_lives_through_its_request(
    project: Project, how: tuple[str, ...]
) -> None:
    """A request of the whole window takes 400 kB a token: every rung boots, and the larger ones die under it."""
    project.configure(mock="request_peak_per_token = 400_000")
    rungs = range(4096, 49_153, 4096)
    assert set(chances(project, "max_model_len", rungs).values()) == {1.0}
    alive: dict[float, float] = {
        rung: chances(project, "max_model_len", [rung], request_tokens=rung)[rung] for rung in rungs
    }
    value, failed_at = largest(alive)
    project.tests(
        """
import pytest

@pytest.mark.ladder(start=49_152, floor=4_096)
@pytest.mark.knife_edge(hold=8, max_tokens=16)
def test_window(kv_engine): ...
"""
    )

    result = project.run(*how)

    result.assert_outcomes(passed=1)
    finding = only_finding(project)
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, value, failed_at)
    assert finding.bounded_by is not None
    assert finding.bounded_by.phase is Phase.REQUEST
    said(result, f"max_model_len {value:,} passed and {failed_at:,} failed for memory in request; *")
