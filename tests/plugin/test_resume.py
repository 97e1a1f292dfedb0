"""A search that was killed at any step goes on from the boots that it finished, and from nothing else."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pytest_kvbudget.archive import read_attempt
from pytest_kvbudget.records import AttemptRecord
from pytest_kvbudget.verdict import FindingKind
from tests.conftest import Project, properties, rows
from tests.plugin.searching import chances, gib, largest, neuron, smallest

KILLER = """
import os, pathlib, signal, threading, time

WHEN, _, COUNT = os.environ.get("STOP_AT", "never:0").partition(":")
seen = {"boot": 0, "body": 0, "row": 0}

def pytest_configure(config):
    seen["worker"] = hasattr(config, "workerinput")

def reached(when):
    seen[when] += 1
    if when == WHEN and seen[when] == int(COUNT):
        if seen["worker"]:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

def while_it_boots(known):
    while not (set(pathlib.Path().rglob("engine.log")) - known):
        time.sleep(0.002)
    reached("boot")

def pytest_fixture_setup(fixturedef, request):
    if fixturedef.argname == "kv_engine":
        seen["running"] = True
        if WHEN == "boot" and seen["boot"] == int(COUNT) - 1:
            known = set(pathlib.Path().rglob("engine.log"))
            threading.Thread(target=while_it_boots, args=(known,), daemon=True).start()
        elif WHEN == "boot":
            seen["boot"] += 1

def pytest_pyfunc_call(pyfuncitem):
    reached("body")

def pytest_runtest_logreport(report):
    mark = getattr(report, "kvbudget", None) or {}
    if report.when == "call" and mark.get("kind") == "rung" and seen.pop("running", False):
        reached("row")
"""
"""Kills its own pytest, and with it xdist's controller: while a boot runs, before its body judges, after its row."""
SLOW = "seconds = { weights_load = 0.15 }"
"""Long enough to be killed in."""
LADDER = """
import pytest

@pytest.mark.ladder(start=131_072, floor=4_096, strategy="bisect")
def test_window(kv_engine): ...
"""
SWEEP = """
import pytest

@pytest.mark.headroom_sweep(knob="reserved_headroom", start="4 GiB")
def test_headroom(kv_engine): ...
"""
DISTRIBUTIONS = pytest.mark.parametrize("how", [(), ("-n2",)], ids=["here", "n2"])


def settled(project: Project) -> list[AttemptRecord]:
    return [record for record in project.attempts() if record.settled]


def run_until_killed(project: Project, moment: str, *arguments: str) -> bool:
    """Run pytest that kills itself at a moment; whether it was over before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOP_AT", moment)
        result = project.run("--kvbudget-resume", *arguments)
    assert result.ret in {pytest.ExitCode.OK, -signal.SIGKILL}
    return result.ret == pytest.ExitCode.OK


def kill_at_every_step(project: Project, moment: str, *arguments: str) -> int:
    """Run, killed, and resumed, again and again; how often it was killed."""
    kills = 0
    while not run_until_killed(project, moment, *arguments):
        kills += 1
        assert len(settled(project)) >= kills, "a killed run has finished a boot more than the one before"
    return kills


@pytest.mark.parametrize(
    ("moment", "how"),
    [("row:1", ()), ("row:1", ("-n2",)), ("row:2", ()), ("body:2", ()), ("boot:2", ()), ("boot:2", ("-n2",))],
    ids=["after a boot", "after a boot, n2", "after two", "before the body judged", "in a boot", "in a boot, n2"],
)
def test_a_ladder_that_is_killed_at_every_step_finds_the_same_and_boots_nothing_twice(
    project: Project, moment: str, how: tuple[str, ...]
) -> None:
    project.configure(mock=SLOW)
    project.tests(LADDER)
    project.tests(KILLER, "conftest.py")
    value, failed_at = largest(chances(project, "max_model_len", range(4096, 131_073, 4096)))
    project.run("--kvbudget-archive=undisturbed").assert_outcomes(passed=1)
    (undisturbed,) = project.findings()
    boots = len(list((project.path / "undisturbed").rglob("attempt.json")))

    # a body runs only where an engine serves
    assert kill_at_every_step(project, moment, *how) >= (1 if moment == "body:2" else 2)

    found = [record for record in project.findings() if record.run.run != undisturbed.run.run]
    finding = found[-1].finding
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, value, failed_at)
    before = undisturbed.finding
    assert (finding.kind, finding.value, finding.failed_at) == (before.kind, before.value, before.failed_at)
    assert finding.reused > 0
    assert finding.boots + finding.reused == before.boots
    records = [record for record in settled(project) if record.run.run != undisturbed.run.run]
    windows = Counter(record.shape.max_model_len for record in records)
    assert max(windows.values()) == 1, "a finished boot was made again"
    assert len(records) == boots


@pytest.mark.parametrize("moment", ["row:1", "boot:2"])
def test_a_sweep_that_is_killed_at_every_step_finds_the_same_and_boots_nothing_twice(
    project: Project, moment: str
) -> None:
    (project.path / "kvbudget.toml").write_text(neuron(mock=SLOW))
    project.tests(SWEEP)
    project.tests(KILLER, "conftest.py")
    value, failed_at = smallest(chances(project, "reserved_headroom", gib(0, 27)))

    assert kill_at_every_step(project, moment) >= 2

    finding = project.sweeps()[-1].finding
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, value, failed_at)
    assert finding.reused > 0
    boots = Counter((record.shape.reserved_headroom, record.number) for record in settled(project))
    assert max(boots.values()) == 1, "a finished boot was made again"


@DISTRIBUTIONS
def test_what_was_reused_is_said_with_its_run(project: Project, how: tuple[str, ...]) -> None:
    project.configure(mock=SLOW)
    project.tests(LADDER)
    project.tests(KILLER, "conftest.py")
    assert not run_until_killed(project, "row:2")
    first, second = settled(project)

    result = project.run(*how, "--kvbudget-resume", "--junitxml=junit.xml")

    result.assert_outcomes(passed=1)
    for record in (first, second):
        label, run = f"max_model_len={record.shape.max_model_len}", record.run.run
        row = (
            f"test_it.py::test_window[[]{label}[]] {record.verdict} *not booted: taken over from run {run}, simulated)"
        )
        result.stdout.fnmatch_lines([row])
        (case,) = [case for name, case in project.junit().items() if label in name]
        reused = {entry.get("name"): entry.get("value") for entry in case.iter("property")}
        assert reused["kvbudget.reused"] == run
        assert Path(reused["kvbudget.record"] or "").is_file()
    result.stdout.fnmatch_lines(["max_model_len * passed and * failed *; proven with * boots and 2 taken over*"])
    numbers = [
        properties(project.junit()[f"test_window[max_model_len={value}]"])["kvbudget.boot"]
        for value, _ in rows(result.outlines)
    ]
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    result.stdout.fnmatch_lines(["test_it.py::test_window[[]max_model_len=*, boot 3, simulated)"])


def test_without_the_option_everything_is_booted(project: Project) -> None:
    project.configure()
    project.tests(LADDER)
    project.run().assert_outcomes(passed=1)
    boots = len(project.attempts())

    result = project.run()

    result.stdout.no_fnmatch_line("*taken over*")
    assert len(project.attempts()) > boots


def test_a_search_that_was_over_is_resumed_without_a_boot(project: Project) -> None:
    project.configure()
    project.tests(LADDER)
    project.run().assert_outcomes(passed=1)
    boots = len(project.attempts())

    result = project.run("--kvbudget-resume")

    result.assert_outcomes(passed=1)
    assert len(project.attempts()) == boots
    first, second = project.findings()
    assert (second.finding.kind, second.finding.value) == (first.finding.kind, first.finding.value)
    assert (second.finding.boots, second.finding.reused) == (0, boots)
    result.stdout.fnmatch_lines([f"max_model_len * passed and * failed *; proven with 0 boots and {boots} taken over*"])


ENGINE = """#!{python}
# release {release}
import runpy

runpy.run_module("pytest_kvbudget.mock", run_name="__main__", alter_sys=True)
"""


def engine(project: Project, release: int) -> None:
    path = project.path / "engine.py"
    path.write_text(ENGINE.format(release=release, python=sys.executable))
    path.chmod(0o755)


def toml(project: Project, old: str, new: str) -> None:
    path = project.path / "kvbudget.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


SURVIVE = "@pytest.mark.knife_edge(hold=4, max_tokens=8)"
CHANGES: dict[str, Callable[[Project], object]] = {
    "variable of the target": lambda project: toml(project, 'EXTRA = "1"', 'EXTRA = "2"'),
    "simulated physics": lambda project: toml(project, "kv_bytes_per_token = 1024", "kv_bytes_per_token = 1025"),
    "shape": lambda project: toml(project, 'model = "simulated"', 'model = "simulated"\nmax_num_seqs = 8'),
    "engine": lambda project: engine(project, 2),
    "body": lambda project: project.tests(LADDER.replace("...", "assert kv_engine.alive")),
    "mark": lambda project: project.tests(LADDER.replace("def ", f"{SURVIVE}\ndef ")),
    "variable of this process": lambda project: os.environ.update(VLLM_CHANGED="1"),
}


CONFIGURED = "another configuration or environment"
ASKED = "the test asks something else (marks, body, fixtures)"
SAID = {
    "variable of the target": CONFIGURED,
    "simulated physics": CONFIGURED,
    "variable of this process": CONFIGURED,
    "engine": "another build of the engine",
    "body": ASKED,
    "mark": ASKED,
    "shape": None,
}


@pytest.mark.parametrize(("change", "said"), [(CHANGES[name], SAID[name]) for name in CHANGES], ids=CHANGES.keys())
def test_a_boot_of_something_else_is_booted_again(
    project: Project, monkeypatch: pytest.MonkeyPatch, change: Callable[[Project], object], said: str | None
) -> None:
    monkeypatch.delenv("VLLM_CHANGED", raising=False)
    project.configure()
    toml(project, "[target.card.shape]", 'command = ["./engine.py", "serve"]\n\n[target.card.shape]')
    toml(project, "[target.card.mock]", '[target.card.env]\nEXTRA = "1"\n\n[target.card.mock]')
    engine(project, 1)
    project.tests(LADDER)
    project.run("--kvbudget-max-boots=2")
    before = len(project.attempts())
    assert before == 2
    unchanged = project.run("--kvbudget-resume", "--kvbudget-max-boots=2")
    unchanged.stdout.fnmatch_lines(["*taken over from run*"])
    before = len(project.attempts())
    try:
        change(project)

        result = project.run("--kvbudget-resume", "--kvbudget-max-boots=2")
    finally:
        os.environ.pop("VLLM_CHANGED", None)

    result.stdout.no_fnmatch_line("*taken over from*")
    assert len(project.attempts()) == before + 2
    if said is None:
        result.stdout.no_fnmatch_line("nothing was taken over: *")
    else:
        result.stdout.fnmatch_lines([f"nothing was taken over: earlier boots of this test are others: {said}"])


def test_a_half_written_record_and_one_without_a_verdict_stand_for_nothing(project: Project) -> None:
    project.configure()
    project.tests(LADDER)
    project.run().assert_outcomes(passed=1)
    (before,) = project.findings()
    whole = {path: read_attempt(path) for path in project.path.rglob("attempt.json")}
    by_window = {record.shape.max_model_len: path for path, record in whole.items()}
    half, unsettled = by_window[before.finding.value], by_window[before.finding.failed_at]
    half.write_bytes(half.read_bytes()[:-200])
    unsettled.write_bytes(msgspec.json.encode(msgspec.structs.replace(whole[unsettled], settled=False)))

    result = project.run("--kvbudget-resume")

    result.assert_outcomes(passed=1)
    after = max(project.findings(), key=lambda record: record.started)
    kept = before.finding
    assert (after.finding.kind, after.finding.value, after.finding.failed_at) == (kept.kind, kept.value, kept.failed_at)
    assert after.finding.reused == kept.boots - 2
    again = [path for path in project.path.rglob("attempt.json") if path not in whole]
    assert {read_attempt(path).shape.max_model_len for path in again} >= {kept.value, kept.failed_at}


def test_a_stack_is_resumed_in_the_ladder_that_was_not_over(project: Project) -> None:
    project.configure(shape="max_model_len = 16_384\nmax_num_seqs = 16", mock="state_bytes_per_seq = 1_048_576")
    project.tests(
        """
import pytest

@pytest.mark.ladder(axis="max_num_seqs", start=64, floor=8, quantum=8)
@pytest.mark.ladder(start=65_536, floor=16_384)
def test_deploy(kv_engine): ...
"""
    )
    project.tests(KILLER, "conftest.py")
    project.run("--kvbudget-archive=undisturbed").assert_outcomes(passed=1)
    before = settled(project)
    runs = {record.run.run for record in before}

    assert kill_at_every_step(project, "row:1") >= 5

    after = [record for record in settled(project) if record.run.run not in runs]
    boots = Counter((record.shape.max_num_seqs, record.shape.max_model_len) for record in after)
    assert max(boots.values()) == 1
    undisturbed = Counter((record.shape.max_num_seqs, record.shape.max_model_len) for record in before)
    assert boots == undisturbed, "it went another way"
    last = {record.finding.axis.name: record.finding for record in project.findings()}
    assert {finding.kind for finding in last.values()} == {FindingKind.PROVEN}
    assert set(last) == {"max_num_seqs", "max_model_len"}
