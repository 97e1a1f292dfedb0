"""Every kind of finding of a headroom sweep and every knob, against the physics of the device, with the words shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from pytest_kvbudget.search.knobs import KNOBS
from pytest_kvbudget.search.model import SweepFinding
from pytest_kvbudget.search.turn import turned
from pytest_kvbudget.verdict import FindingKind, Verdict
from tests.conftest import Project, properties
from tests.plugin.searching import GIB, MIB, card, chances, gib, largest, neuron, smallest

DISTRIBUTIONS = pytest.mark.parametrize("how", [(), ("-n2",)], ids=["here", "n2"])

SWEEP = """
import pytest

@pytest.mark.headroom_sweep({arguments})
def test_headroom(kv_engine): ...
"""


def sweep(project: Project, config: str, arguments: str, *, marks: Sequence[str] = ()) -> None:
    (project.path / "kvbudget.toml").write_text(config)
    lines = "".join(f"@pytest.mark.{mark}\n" for mark in marks)
    project.tests(SWEEP.format(arguments=arguments).replace("def ", f"{lines}def "))


def only_finding(project: Project) -> SweepFinding:
    (record,) = project.sweeps()
    return record.finding


def boots(project: Project, knob: str) -> Counter[tuple[int, Verdict]]:
    """How often each value, in the knob's whole numbers, ended so."""
    found: Counter[tuple[int, Verdict]] = Counter()
    for record in project.attempts():
        setting = turned(record.shape, knob)
        assert setting is not None
        found[KNOBS[knob].value(setting), record.verdict] += 1
    return found


def said(result: pytest.RunResult, *lines: str) -> None:
    result.stdout.fnmatch_lines([line.replace("[", "[[]") for line in lines])


# -- kinds


@DISTRIBUTIONS
def test_the_least_headroom_is_proven_and_booted_once_more(project: Project, how: tuple[str, ...]) -> None:
    """1.5 GiB of scratch, 2 GiB of collectives, 0.5 GiB of activation and code: five GiB do not hold them beside KV."""
    sweep(project, neuron(), "knob='reserved_headroom', start='4 GiB', step='1 GiB'")
    value, failed_at = smallest(chances(project, "reserved_headroom", gib(0, 27)))
    assert failed_at is not None

    result = project.run(*how, "--junitxml=junit.xml")

    result.assert_outcomes(passed=1)
    finding = only_finding(project)
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, value, failed_at)
    assert finding.confirmations == 1
    ended = boots(project, "reserved_headroom")
    assert ended[int(value), Verdict.PASS] >= 2
    assert ended[int(value), Verdict.FAIL] == 0
    assert next(iter(ended)) == (4 * GIB, Verdict.FAIL), "the first boot is the one that was asked for"
    said(
        result,
        f"reserved_headroom {value / GIB:.2f} GiB passed and {failed_at / GIB:.2f} GiB failed for allocation in *; "
        "proven; * boots*; 1 confirming boot*",
    )
    case = properties(project.junit()["test_headroom"])
    assert (case["kvbudget.finding"], case["kvbudget.value"]) == ("proven", str(value))
    assert f"test_headroom[reserved_headroom={value}]" in project.junit()


def test_a_smallest_value_that_passes_is_the_floor_and_says_so(project: Project) -> None:
    sweep(project, neuron(), "knob='reserved_headroom', floor='7 GiB', ceiling='12 GiB'")
    assert set(chances(project, "reserved_headroom", gib(7, 12)).values()) == {1.0}

    result = project.run()

    result.assert_outcomes(passed=1)
    finding = only_finding(project)
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.FLOOR_REACHED, 7 * GIB, None)
    said(result, "reserved_headroom 7.00 GiB passed and is the smallest of the sweep; proven; *")


SHARE = card(
    mock='graph_estimate = 0\ngraph_base = "1 GiB"', shape="max_model_len = 8192\ngpu_memory_utilization = 0.98"
)
"""Graphs are charged nothing and take 1.6 GiB."""


def test_a_largest_value_that_passes_is_the_ceiling_and_says_so(project: Project) -> None:
    sweep(project, SHARE, "knob='gpu_memory_utilization', floor=0.85, ceiling=0.90")
    shares = [0.85, 0.86, 0.87, 0.88, 0.89, 0.90]
    assert set(chances(project, "gpu_memory_utilization", shares).values()) == {1.0}

    result = project.run()

    result.assert_outcomes(passed=1)
    finding = only_finding(project)
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.CEILING_REACHED, 9000, None)
    said(result, "gpu_memory_utilization 0.9 passed and is the largest of the sweep; proven; *")


EMPTY = {
    "allocation": (
        neuron(),
        "knob='reserved_headroom', ceiling='3 GiB'",
        gib(0, 3),
        "nothing passes: reserved_headroom 3.00 GiB, the largest of the sweep, still failed for allocation in "
        "model_load; * boots*; raise tensor_parallel_size instead",
    ),
    "minimum_kv": (
        neuron(weights="31 GiB", compiler='min_kv = "3 GiB"'),
        "knob='reserved_headroom', floor='4 GiB', ceiling='12 GiB'",
        gib(4, 12),
        "nothing passes: reserved_headroom 4.00 GiB, the smallest of the sweep, already failed for too little KV "
        "cache in kv_check; * boots; raise tensor_parallel_size instead",
    ),
}


@pytest.mark.parametrize(("config", "arguments", "values", "words"), EMPTY.values(), ids=EMPTY.keys())
def test_where_no_value_passes_its_end_was_booted_and_another_lever_is_named(
    project: Project, config: str, arguments: str, values: list[int], words: str
) -> None:
    sweep(project, config, arguments)
    assert set(chances(project, "reserved_headroom", values).values()) == {0.0}

    result = project.run()

    result.assert_outcomes(failed=1)
    finding = only_finding(project)
    assert (finding.kind, finding.value) == (FindingKind.EMPTY, None)
    assert len(project.attempts()) <= 3
    said(result, words)


@DISTRIBUTIONS
def test_two_neighbours_that_fail_for_opposite_reasons_are_an_empty_window(
    project: Project, how: tuple[str, ...]
) -> None:
    """30 of 36 GiB are weights: KV cache and headroom share 6, of which 3 are the minimum and 4 are needed."""
    sweep(
        project, neuron(weights="30 GiB", compiler='load_extra = "2 GiB"\nmin_kv = "3 GiB"'), "knob='reserved_headroom'"
    )
    assert set(chances(project, "reserved_headroom", gib(0, 36)).values()) == {0.0}

    result = project.run(*how)

    result.assert_outcomes(failed=1)
    finding = only_finding(project)
    assert (finding.kind, finding.value) == (FindingKind.EMPTY_WINDOW, None)
    assert (finding.failed_at, finding.short_at) == (3 * GIB, 4 * GIB)
    said(
        result,
        "empty window: reserved_headroom 3.00 GiB failed for allocation in model_load, and 4.00 GiB failed for too "
        "little KV cache in kv_check; * boots*; raise tensor_parallel_size instead",
    )


def test_flaky_gives_the_value_that_held_and_the_one_that_never_did(project: Project) -> None:
    """Boots of one shape differ by 1 GiB, four steps of this grid."""
    noisy = neuron(mock='noise_boot = "1 GiB"\nseed = 2')
    sweep(
        project,
        noisy,
        "knob='reserved_headroom', floor='2 GiB', ceiling='12 GiB', step='256 MiB', confirm=3, strategy='bisect'",
    )

    result = project.run()

    result.assert_outcomes(failed=1)
    finding = only_finding(project)
    assert finding.kind is FindingKind.FLAKY, finding.sentence
    ended = boots(project, "reserved_headroom")
    values = {value for value, _ in ended}
    truth = chances(project, "reserved_headroom", values)
    mixed = {value for value in values if ended[value, Verdict.PASS] and ended[value, Verdict.FAIL]}
    assert mixed
    assert all(0 < truth[value] < 1 for value in mixed)
    held, never = finding.steady_value, finding.refused_at
    assert held is not None
    assert never is not None
    assert never < min(mixed) <= max(mixed) < held
    assert ended[held, Verdict.FAIL] == ended[never, Verdict.PASS] == 0
    assert ended[held, Verdict.PASS] >= 3
    assert ended[never, Verdict.FAIL] >= 2
    said(
        result,
        f"flaky: * passed and failed, {held / GIB:.2f} GiB passed three of three, {never / GIB:.2f} GiB failed two of "
        "two; *",
    )


def test_a_pool_that_fails_for_allocation_below_one_that_passes_is_no_boundary(project: Project) -> None:
    """Shapes differ by sigma 1.5 GiB that nothing predicts: the device itself has no single boundary."""
    config = card(
        mock='weights = "26 GiB"\nactivation_base = "1 GiB"\nnoise_shape = "1500 MiB"\nseed = 3',
        shape="max_model_len = 8192",
    )
    sweep(
        project,
        config,
        "knob='kv_cache_memory_bytes', floor='256 MiB', ceiling='2 GiB', step='256 MiB', strategy='bisect'",
    )
    truth = chances(project, "kv_cache_memory_bytes", [768 * MIB, 1280 * MIB])
    assert truth == {768 * MIB: 0.0, 1280 * MIB: 1.0}

    result = project.run()

    result.assert_outcomes(failed=1)
    finding = only_finding(project)
    assert finding.kind is FindingKind.NON_MONOTONE
    said(
        result,
        "no single boundary: kv_cache_memory_bytes 0.75 GiB failed for allocation although 1.25 GiB passed, *twice*",
    )


NO_VERDICT = {
    "died": ("die_in", FindingKind.UNDECIDED, 2, "undecided: reserved_headroom 4.00 GiB gave no verdict twice: *"),
    "error": (
        "error_in",
        FindingKind.ERROR,
        1,
        "error: reserved_headroom 4.00 GiB ended for another reason than memory: a kernel failed; *; nothing passed; "
        "1 boot",
    ),
}


@pytest.mark.parametrize(("fault", "kind", "count", "words"), NO_VERDICT.values(), ids=NO_VERDICT.keys())
def test_what_is_no_verdict_on_memory_moves_nothing(
    project: Project, fault: str, kind: FindingKind, count: int, words: str
) -> None:
    config = neuron(mock=f'faults = {{ {fault} = "weights_load" }}')
    sweep(project, config, "knob='reserved_headroom', start='4 GiB'")

    result = project.run()

    result.assert_outcomes(failed=1)
    assert only_finding(project).kind is kind
    assert len(project.attempts()) == count
    said(result, words)


def test_the_tests_own_refusal_pushes_neither_way(project: Project) -> None:
    sweep(project, neuron(), "knob='reserved_headroom', start='8 GiB'")
    project.tests(SWEEP.format(arguments="knob='reserved_headroom', start='8 GiB'").replace("...", "assert 0, 'slow'"))

    result = project.run()

    result.assert_outcomes(failed=1)
    assert only_finding(project).kind is FindingKind.UNDECIDED
    assert len(project.attempts()) == 1
    said(
        result,
        "undecided: reserved_headroom 8.00 GiB was refused by the test's own gate, which pushes neither way: *slow*",
    )


# -- knobs


def test_an_allocation_failure_lowers_the_cap_of_the_default_policy(project: Project) -> None:
    """0.5 of 0.95 of 36 GiB, 12 of weights and 7.5 of everything else are more than there is."""
    config = neuron(weights="12 GiB", shape="gpu_memory_utilization = 0.95", compiler='load_extra = "4 GiB"')
    sweep(project, config, "knob='kv_cap_fraction', step=0.05, floor=0.05")
    fractions = [round(0.05 * step, 2) for step in range(1, 21)]
    value, failed_at = largest(chances(project, "kv_cap_fraction", fractions))

    result = project.run()

    result.assert_outcomes(passed=1)
    finding = only_finding(project)
    knob = KNOBS["kv_cap_fraction"]
    assert finding.value is not None
    assert finding.failed_at is not None
    assert (finding.kind, knob.setting(finding.value), knob.setting(finding.failed_at)) == (
        FindingKind.PROVEN,
        value,
        failed_at,
    )
    assert {record.shape.gpu_memory_utilization for record in project.attempts()} == {0.95}, "it is never raised"
    said(result, f"kv_cap_fraction {value} passed and {failed_at} failed for allocation in model_load; proven; *")


def test_the_largest_share_of_the_device(project: Project) -> None:
    sweep(project, SHARE, "knob='gpu_memory_utilization'")
    value, failed_at = largest(chances(project, "gpu_memory_utilization", [step / 100 for step in range(80, 99)]))

    result = project.run()

    result.assert_outcomes(passed=1)
    finding = only_finding(project)
    assert finding.kind is FindingKind.PROVEN
    said(result, f"gpu_memory_utilization {value} passed and {failed_at} failed for allocation in graph_capture; *")


@DISTRIBUTIONS
def test_the_smallest_pool_that_serves_a_window(project: Project, how: tuple[str, ...]) -> None:
    """32,768 tokens at 1024 bytes are 32 MiB, and vLLM keeps one block of 16 tokens for itself."""
    project.configure(shape="max_model_len = 32_768")
    sweep(project, (project.path / "kvbudget.toml").read_text(), "knob='kv_cache_memory_bytes', ceiling='64 MiB'")
    value, failed_at = smallest(chances(project, "kv_cache_memory_bytes", [step * MIB for step in range(1, 65)]))

    result = project.run(*how)

    result.assert_outcomes(passed=1)
    finding = only_finding(project)
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, value, failed_at)
    assert finding.boots - finding.repeats <= 4
    assert failed_at is not None
    said(
        result,
        f"kv_cache_memory_bytes {value / MIB:.2f} MiB passed and {failed_at / MIB:.2f} MiB failed for too little KV "
        "cache in kv_check; proven; *",
    )


def test_the_least_charge_of_a_graph_that_lets_the_capture_pass(project: Project) -> None:
    """What the fork's plan does not charge goes to the expert arena and is missing when seven graphs are captured."""
    config = card(
        mock="""dialect = "rdna4"
weights = "6 GiB"
kv_bytes_per_token = 9190
graph_base = "256 MiB"
graph_per_size = "120 MiB"
[target.card.mock.arena]
overhead_planned = "2350 MiB\"""",
        shape="max_model_len = 16384\nmax_num_seqs = 16\ngpu_memory_utilization = 0.97\n"
        'extra_args = ["--expert-precise-memory"]',
    )
    sweep(project, config, "knob='cudagraph_per_graph', step='8 MiB', ceiling='160 MiB'")
    value, failed_at = smallest(chances(project, "cudagraph_per_graph", [step * MIB for step in range(0, 161, 8)]))
    assert failed_at is not None

    result = project.run()

    result.assert_outcomes(passed=1)
    finding = only_finding(project)
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, value, failed_at)
    said(
        result,
        f"cudagraph_per_graph {value / MIB:.2f} MiB passed and {failed_at / MIB:.2f} MiB failed for allocation in "
        "graph_capture; proven; *",
    )


def test_a_finer_last_step_lies_between_the_two_neighbours(project: Project) -> None:
    sweep(project, neuron(), "knob='reserved_headroom', start='4 GiB', fine_step='256 MiB'")
    value, failed_at = smallest(chances(project, "reserved_headroom", gib(0, 8, 0.25)))

    result = project.run()

    result.assert_outcomes(passed=1)
    finding = only_finding(project)
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, value, failed_at)
    assert (finding.step, finding.coarse_step) == (256 * MIB, GIB)


# -- a value passes only if it survives


@DISTRIBUTIONS
def test_with_a_knife_edge_the_least_headroom_is_one_that_lives_through_the_request(
    project: Project, how: tuple[str, ...]
) -> None:
    """A request takes 1.5 GiB more than warm-up did: what boots with the least headroom dies under it."""
    arguments = "knob='reserved_headroom', start='4 GiB'"
    config = neuron(mock='request_peak_base = "1500 MiB"')
    sweep(project, config, arguments, marks=["knife_edge(hold=8, max_tokens=16)"])
    booting, _ = smallest(chances(project, "reserved_headroom", gib(0, 27)))
    value, failed_at = smallest(chances(project, "reserved_headroom", gib(0, 27), request_tokens=8192))
    assert value > booting
    assert failed_at is not None

    result = project.run(*how)

    result.assert_outcomes(passed=1)
    finding = only_finding(project)
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, value, failed_at)
    said(
        result,
        f"reserved_headroom {value / GIB:.2f} GiB passed and {failed_at / GIB:.2f} GiB failed for allocation in "
        "request; proven; *",
    )


# -- sweeps that would test nothing

FUTILE = {
    "blocks": (
        "reserved_headroom",
        "kv_shape(extra_args=['--num-gpu-blocks-override=100'])",
        "",
        "--num-gpu-blocks-override fixes the KV cache, so a sweep over reserved_headroom tests nothing; drop it",
    ),
    "headroom": (
        "kv_cap_fraction",
        "kv_shape(reserved_headroom='4 GiB')",
        "",
        "an explicit headroom bypasses kv_cap_fraction (Neuron document, section 1), so a sweep over it tests nothing;",
    ),
    "headroom of the target": (
        "kv_cap_fraction",
        "kv_shape(max_num_seqs=2)",
        '[target.card.env]\nVLLM_NEURON_RESERVED_HEADROOM_GIB = "4"\n',
        "an explicit headroom bypasses kv_cap_fraction (Neuron document, section 1), so a sweep over it tests nothing;",
    ),
}


@pytest.mark.parametrize("case", FUTILE.values(), ids=FUTILE.keys())
@DISTRIBUTIONS
def test_a_sweep_that_would_test_nothing_is_refused_and_nothing_is_booted(
    project: Project, how: tuple[str, ...], case: tuple[str, str, str, str]
) -> None:
    knob, mark, more, words = case
    sweep(project, neuron() + more, f"knob='{knob}'", marks=[mark])

    result = project.run(*how)

    assert result.ret != 0
    assert project.attempts() == []
    if how:
        # a worker cannot end the run: the test itself is refused
        result.assert_outcomes(failed=1)
        assert words in result.stdout.str()
    else:
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        (line,) = [line for line in result.errlines if line.startswith("ERROR")]
        assert line.startswith("ERROR: kvbudget: test_it.py::test_headroom: ")
        assert words in line
