"""What a search is expected to cost, what it may cost, what earlier runs and several devices make of it."""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import combinations

import pytest

from pytest_kvbudget.config import load
from pytest_kvbudget.device.leases import acquire
from pytest_kvbudget.engine.backends.mock import MockBackend
from pytest_kvbudget.records import AttemptRecord
from pytest_kvbudget.search.model import SetBound
from pytest_kvbudget.verdict import FindingKind, Verdict
from tests.conftest import Project, rows
from tests.plugin.searching import GIB, card, chances, gib, largest, neuron, smallest

DISTRIBUTIONS = pytest.mark.parametrize("how", [(), ("-n2",)], ids=["here", "n2"])

LADDER = """
import pytest

@pytest.mark.ladder(start=131_072, floor=4_096{more})
def test_window(kv_engine): ...
"""
RUNGS = range(4096, 131_073, 4096)
SWEEP = """
import pytest

@pytest.mark.headroom_sweep(knob="reserved_headroom", start="4 GiB")
def test_headroom(kv_engine): ...
"""


def ladder(project: Project, more: str = "") -> None:
    project.tests(LADDER.format(more=more))


def last(project: Project) -> AttemptRecord:
    return project.attempts()[-1]


# -- before anything starts


def test_a_dry_run_says_what_to_expect_where_nothing_is_known(project: Project) -> None:
    ladder(project)

    result = project.run("--kvbudget-dry-run")

    assert result.ret == 0
    assert project.attempts() == []
    result.stdout.fnmatch_lines(
        [
            "test_it.py::test_window",
            "  ladder: max_model_len from 131072 down to 4096 by 4096, predict; first rung max_model_len=*",
            # 33 answers are told apart by six boots, and two more are allowed
            "  expected: * boots, at most 8 for 32 rungs (nothing is known beforehand)",
            "  minutes: no boot of this target is in the archive",
            "  shape: * max_model_len=* *",
        ]
    )


def test_a_dry_run_knows_the_archive(project: Project) -> None:
    ladder(project)
    project.run().assert_outcomes(passed=1)
    (before,) = project.findings()
    boots = len(project.attempts())

    result = project.run("--kvbudget-dry-run", "--kvbudget-max-boots=3")

    assert len(project.attempts()) == boots
    result.stdout.fnmatch_lines(
        [
            f"  ladder: *; first rung max_model_len={before.finding.value}",
            "  expected: * boots, at most 8 for 32 rungs (an earlier finding says where to begin)",
            "  --kvbudget-max-boots 3 may end it undecided",
            f"  about *, at most *, by {boots} earlier boots of this target (* where it passed, * where it failed)",
        ]
    )


def test_a_dry_run_knows_what_a_resumed_run_takes_over(project: Project) -> None:
    ladder(project)
    project.run("--kvbudget-max-boots=2")
    (half,) = project.findings()
    result = project.run("--kvbudget-dry-run", "--kvbudget-resume")
    result.stdout.fnmatch_lines(["  taken over from earlier runs: 2 of these boots; undecided: *"])
    (line,) = [line for line in result.outlines if "; first rung max_model_len=" in line]
    assert int(line.rpartition("=")[2]) not in {record.shape.max_model_len for record in project.attempts()}
    assert half.finding.value is not None

    project.run("--kvbudget-resume").assert_outcomes(passed=1)
    booted = len(project.attempts())
    result = project.run("--kvbudget-dry-run", "--kvbudget-resume")
    result.stdout.fnmatch_lines(["  ladder: *; first rung none", "  taken over from earlier runs: * proven with *"])
    result.stdout.no_fnmatch_line("*expected: *")
    assert len(project.attempts()) == booted


def test_a_dry_run_names_the_checks_of_a_test(project: Project) -> None:
    project.configure()
    project.tests(
        """
import pytest

@pytest.mark.boot_gate(windows=2)
@pytest.mark.knife_edge(hold=16)
@pytest.mark.kv_shape(max_model_len=4096)
def test_it(kv_engine): ...
"""
    )
    project.run("--kvbudget-dry-run").stdout.fnmatch_lines(["  checks: knife_edge(hold=16), boot_gate(windows=2)"])


def test_a_dry_run_of_a_sweep_names_its_ends(project: Project) -> None:
    (project.path / "kvbudget.toml").write_text(neuron())
    project.tests(SWEEP)

    result = project.run("--kvbudget-dry-run")

    assert project.attempts() == []
    result.stdout.fnmatch_lines(
        [
            "  sweep: reserved_headroom from 0.00 GiB to 36.00 GiB by 1.00 GiB, predict; first rung *=4294967296",
            "  expected: * boots, at most * for 37 rungs (nothing is known beforehand)",
            "  env: VLLM_NEURON_RESERVED_HEADROOM_GIB=4",
        ]
    )


# -- an archive


@DISTRIBUTIONS
def test_the_second_run_of_a_ladder_proves_it_in_two_boots(project: Project, how: tuple[str, ...]) -> None:
    ladder(project)
    project.run(*how).assert_outcomes(passed=1)
    (first,) = project.findings()

    result = project.run(*how)

    result.assert_outcomes(passed=1)
    second = max(project.findings(), key=lambda record: record.started)
    assert (second.finding.kind, second.finding.value) == (FindingKind.PROVEN, first.finding.value)
    assert second.finding.boots == 2
    assert [value for value, _ in rows(result.outlines)] == [str(second.finding.value), str(second.finding.failed_at)]


# -- limits


@DISTRIBUTIONS
def test_a_limit_of_boots_ends_a_ladder_undecided_with_its_bracket(project: Project, how: tuple[str, ...]) -> None:
    ladder(project, ", strategy='bisect'")
    found = chances(project, "max_model_len", RUNGS)

    result = project.run(*how, "--kvbudget-max-boots=3")

    result.assert_outcomes(failed=1)
    assert len(project.attempts()) == 3
    (record,) = project.findings()
    finding = record.finding
    assert finding.kind is FindingKind.UNDECIDED
    assert finding.value is not None
    assert finding.failed_at is not None
    assert (found[finding.value], found[finding.failed_at]) == (1, 0)
    result.stdout.fnmatch_lines(
        [
            f"undecided: the limit of 3 boots is reached; max_model_len {finding.value:,} passed, "
            f"{finding.failed_at:,} failed; 3 boots",
            f"bracket on max_model_len: {finding.value:,} passed, {finding.failed_at:,} failed",
        ]
    )


def test_a_limit_of_boots_ends_a_sweep_undecided(project: Project) -> None:
    (project.path / "kvbudget.toml").write_text(neuron())
    project.tests(SWEEP)

    result = project.run("--kvbudget-max-boots=2")

    result.assert_outcomes(failed=1)
    assert len(project.attempts()) == 2
    (record,) = project.sweeps()
    assert record.finding.kind is FindingKind.UNDECIDED
    result.stdout.fnmatch_lines(["undecided: the limit of 2 boots is reached; *; 2 boots*"])


CLOCK = """
import datetime as real
from pytest_kvbudget.plugin import quest

class Clock(real.datetime):
    ahead = real.timedelta(0)

    @classmethod
    def now(cls, tz=None):
        return real.datetime.now(tz) + cls.ahead

quest.datetime = Clock
"""
"""A clock that a test body can set."""


@DISTRIBUTIONS
def test_a_time_ends_a_ladder_undecided_and_keeps_the_best_so_far(project: Project, how: tuple[str, ...]) -> None:
    """The body of the second rung takes a day: no third one begins."""
    project.tests(CLOCK, "conftest.py")
    project.tests(
        """
import datetime
import pytest
from pytest_kvbudget.plugin import quest

passed = []

@pytest.mark.ladder(start=131_072, floor=4_096, strategy="bisect")
def test_window(kv_rung):
    passed.append(int(kv_rung))
    if len(passed) == 2:
        quest.datetime.ahead = datetime.timedelta(days=1)
"""
    )
    found = chances(project, "max_model_len", RUNGS)
    until = datetime.now() + timedelta(hours=2)

    result = project.run(*how, f"--kvbudget-until={until:%Y-%m-%dT%H:%M}")

    result.assert_outcomes(failed=1)
    (record,) = project.findings()
    finding = record.finding
    assert finding.kind is FindingKind.UNDECIDED
    passed = [attempt.shape.max_model_len for attempt in project.attempts() if attempt.verdict is Verdict.PASS]
    assert len(passed) == 2
    assert finding.value == max(length for length in passed if length is not None)
    assert found[finding.value] == 1
    assert last(project).verdict is Verdict.PASS, "nothing was booted after that"
    result.stdout.fnmatch_lines(
        [f"undecided: --kvbudget-until {until:%H:%M} is reached, and a boot takes *; max_model_len {finding.value:,} *"]
    )


@DISTRIBUTIONS
def test_a_boot_that_would_not_be_over_in_time_does_not_begin(project: Project, how: tuple[str, ...]) -> None:
    """By the clock there is no time left before the first boot: that is said, and nothing is booted."""
    project.tests(CLOCK + "\nClock.ahead = real.timedelta(days=1)\n", "conftest.py")
    ladder(project)
    until = datetime.now() + timedelta(hours=2)

    result = project.run(*how, f"--kvbudget-until={until:%Y-%m-%dT%H:%M}")

    result.assert_outcomes(failed=1)
    assert project.attempts() == []
    result.stdout.fnmatch_lines([f"*undecided: --kvbudget-until {until:%H:%M} is reached*"])


BUSY = """
import os
from pytest_kvbudget.plugin import quest

def pytest_runtest_logstart():
    until = real.datetime.fromisoformat(os.environ["TEST_UNTIL"])
    quest.datetime.ahead = until - real.datetime.now() - real.timedelta(seconds=1)
"""
"""The test begins one second before the time."""


@pytest.mark.parametrize("devices", ["0", "0, 1"])
def test_devices_are_not_waited_for_past_the_time(
    project: Project, monkeypatch: pytest.MonkeyPatch, devices: str
) -> None:
    """Another run holds them: nothing is booted once they are free, and the limit is the reason."""
    project.configure(devices=devices)
    project.tests(CLOCK + BUSY, "conftest.py")
    ladder(project)
    until = (datetime.now() + timedelta(hours=2)).replace(second=0, microsecond=0)
    monkeypatch.setenv("TEST_UNTIL", until.isoformat())
    loaded = load(project.path / "kvbudget.toml").pick(None)
    held = [
        acquire(
            [((device,), MockBackend().lease_names(loaded, [device]))], run="other", purpose="a deploy", timeout_s=1
        )
        for device in devices.split(", ")
    ]
    try:
        result = project.run(f"--kvbudget-until={until.isoformat()}")
    finally:
        for lease in held:
            lease.close()

    result.assert_outcomes(failed=1)
    assert project.attempts() == []
    result.stdout.fnmatch_lines([f"*undecided: --kvbudget-until {until:%H:%M} is reached; nothing was booted"])


def test_a_search_that_a_limit_ends_after_a_pass_shows_no_healthy_boot(project: Project) -> None:
    project.tests(LADDER.format(more=", strategy='bisect'").replace("131_072", "32_768"))

    result = project.run("--kvbudget-max-boots=1")

    result.assert_outcomes(failed=1)
    assert last(project).verdict is Verdict.PASS
    result.stdout.fnmatch_lines(["undecided: the limit of 1 boots is reached; *", "finding: *finding.json"])
    result.stdout.no_fnmatch_line("the deciding boot:*")
    result.stdout.no_fnmatch_line("*log ends*")


# -- several device sets


def spans(attempts: Sequence[AttemptRecord]) -> list[tuple[str, datetime, datetime]]:
    """Device, start and end of each boot."""
    found = []
    for record in attempts:
        begun = datetime.fromisoformat(record.started)
        took_s = record.timings.boot_s or record.timings.ended_s or 0.0
        found.append((record.target.devices[0], begun, begun + timedelta(seconds=took_s)))
    return found


SLOW = "seconds = { weights_load = 0.5 }"


def test_boots_of_a_round_run_side_by_side_and_find_the_same(project: Project) -> None:
    project.configure(devices="0, 1, 2, 3", mock=SLOW)
    ladder(project)
    value, failed_at = largest(chances(project, "max_model_len", RUNGS))

    result = project.run("--junitxml=junit.xml")

    result.assert_outcomes(passed=1)
    (record,) = project.findings()
    finding = record.finding
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, value, failed_at)
    made = spans(project.attempts())
    assert len({device for device, _, _ in made}) > 1
    side_by_side = [(one, two) for one, two in combinations(made, 2) if one[1] < two[2] and two[1] < one[2]]
    assert side_by_side
    assert all(one[0] != two[0] for one, two in side_by_side), "a device has one boot at a time"
    counted = [attempt for attempt in project.attempts() if attempt.verdict in {Verdict.PASS, Verdict.FAIL}]
    ended = [verdict for _, verdict in rows(result.outlines)]
    assert finding.boots == len(counted) == len(ended) - ended.count("UNKNOWN")
    assert len(record.attempts) == len(project.attempts()) == len(ended), "every boot has a row and is in the finding"


SLOW_BELOW = """#!{python}
import runpy, sys, time

window = int(sys.argv[sys.argv.index("--max-model-len") + 1])
if window < {below}:
    time.sleep(60)
runpy.run_module("pytest_kvbudget.mock", run_name="__main__", alter_sys=True)
"""


def test_boots_that_others_have_answered_are_called_off_and_are_no_verdict(project: Project) -> None:
    """Engines below 40,000 tokens take a minute to start: one above them passes long before."""
    path = project.path / "engine.py"
    path.write_text(SLOW_BELOW.format(python=sys.executable, below=40_000))
    path.chmod(0o755)
    project.configure(devices="0, 1, 2, 3")
    toml = project.path / "kvbudget.toml"
    command = 'command = ["./engine.py", "serve"]'
    toml.write_text(toml.read_text().replace("[target.card.shape]", f"{command}\n[target.card.shape]"))
    project.tests(LADDER.format(more="").replace("131_072", "65_536"))
    value, failed_at = largest(chances(project, "max_model_len", range(4096, 65_537, 4096)))

    result = project.run(timeout=50)

    result.assert_outcomes(passed=1)
    (record,) = project.findings()
    finding = record.finding
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, value, failed_at)
    called_off = [attempt for attempt in project.attempts() if attempt.verdict is Verdict.UNKNOWN]
    assert any((attempt.shape.max_model_len or 0) < 40_000 for attempt in called_off)
    assert finding.boots == len(project.attempts()) - len(called_off)
    assert {shown for shown, verdict in rows(result.outlines) if verdict == "UNKNOWN"} == {
        str(attempt.shape.max_model_len) for attempt in called_off
    }
    assert record.why.count("called off") == len(called_off)
    listed = [line for line in result.outlines if re.match(r" +\d+  [\d,]+ +UNKNOWN  called off(; .*)?$", line)]
    assert len(listed) == len(called_off)
    assert "interrupted" not in result.stdout.str()
    page = next(project.path.rglob("ladder.html")).read_text()
    assert page.count('<tspan class="why"> called off</tspan>') == len(called_off)


INTERRUPT = """
import os, pathlib, signal, threading, time

def when_several_boot():
    while len(set(pathlib.Path().rglob("engine.log"))) < 3:
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGINT)

def pytest_runtest_logstart():
    threading.Thread(target=when_several_boot, daemon=True).start()
"""


def test_an_interruption_shows_every_boot_that_it_cut_short(project: Project) -> None:
    """No boot is over, and yet there is a finding: it has them all, and counts none."""
    project.configure(devices="0, 1, 2", mock="seconds = { weights_load = 40 }")
    project.tests(INTERRUPT, "conftest.py")
    ladder(project)

    result = project.run(timeout=50)

    assert result.ret == pytest.ExitCode.INTERRUPTED
    (record,) = project.findings()
    finding = record.finding
    assert (finding.kind, finding.boots, finding.value) == (FindingKind.UNDECIDED, 0, None)
    assert len(record.attempts) == len(project.attempts()) == 3
    assert {attempt.verdict for attempt in project.attempts()} == {Verdict.UNKNOWN}
    assert all(attempt.message.startswith("interrupted: ") for attempt in project.attempts())
    said = "undecided: the run was interrupted; --kvbudget-resume takes over what is finished; *"
    result.stdout.fnmatch_lines(["test_it.py::test_window:", said])
    shown = [line for line in result.outlines if re.match(r" +\d  [\d,]+  UNKNOWN  interrupted(; .*)?$", line)]
    assert len(shown) == 3
    assert [verdict for _, verdict in rows(result.outlines)] == ["UNKNOWN"] * 3
    assert record.why == ("interrupted",) * 3
    assert "called off" not in result.stdout.str()
    page = next(project.path.rglob("ladder.html")).read_text()
    assert page.count('<tspan class="why"> interrupted</tspan>') == 3
    assert len(list(project.path.rglob("rung.html"))) == 3


@pytest.mark.parametrize("skew", ["0", "512 MiB"])
def test_winner_and_neighbour_are_of_one_kind_of_device(project: Project, skew: str) -> None:
    """128 KiB a token: with a skew of 512 MiB the window is one rung shorter from card to card."""
    physics = f'kv_bytes_per_token = 1024\nactivation_per_window_token = "128 KiB"\ndevice_skew = "{skew}"\n{SLOW}'
    config = card(mock=physics, shape='kv_cache_memory_bytes = "1 GiB"', devices="0, 1, 2, 3")
    (project.path / "kvbudget.toml").write_text(config)
    ladder(project)

    result = project.run()

    result.assert_outcomes(passed=1)
    (record,) = project.findings()
    finding = record.finding
    assert finding.kind is FindingKind.PROVEN
    ended = {
        window: [attempt for attempt in project.attempts() if attempt.shape.max_model_len == window and attempt.settled]
        for window in (finding.value, finding.failed_at)
    }
    winner, failed = (ended[window] for window in (finding.value, finding.failed_at))
    shared = {attempt.device_set for attempt in winner} & {attempt.device_set for attempt in failed}
    assert shared
    halves = [[attempt.verdict for attempt in half if attempt.device_set in shared] for half in (winner, failed)]
    assert [set(verdicts) for verdicts in halves] == [{Verdict.PASS}, {Verdict.FAIL}]
    assert finding.value is not None
    cards = {int(attempt.target.devices[0]) for attempt in winner if attempt.device_set in shared}
    for number in cards:
        best, _ = largest(chances(project, "max_model_len", RUNGS, cards=[number]))
        assert best == finding.value, "of the cards that it was proven on, it is the largest window"
    bounds_hold(project, finding.sets)
    if len(finding.sets) > 1:
        result.stdout.fnmatch_lines([f"*device sets differ, and this holds for devices {finding.sets[0].devices[0]}*"])
        assert cards <= {int(device) for device in finding.sets[0].devices}


def bounds_hold(project: Project, sets: Sequence[SetBound]) -> None:
    """What a finding says of each kind of device set is so, by the physics of its cards."""
    for bound in sets:
        for device in bound.devices:
            best, _ = largest(chances(project, "max_model_len", RUNGS, cards=[int(device)]))
            assert bound.passed is None or bound.passed <= best
            assert bound.failed_at is None or bound.failed_at > best


PICKED = """
from pytest_kvbudget.search.strategies import Bisect
from pytest_kvbudget.device_sets import DeviceSets

rungs = [{passing}, {failing}]
take, index = DeviceSets.take, Bisect.next_index

def picked(self, shape, *, who, label=None, **more):
    card = "0"
    if label is None and shape.max_model_len in rungs:
        rungs.remove(shape.max_model_len)
        card = "1"
    wanted = [lease for lease in self._spare if lease.devices == (card,)]
    self._spare = (*wanted, *(lease for lease in self._spare if lease not in wanted))
    return take(self, shape, who=who, label=label, **more)

def first(self, axis, history):
    told = {{trial.value for trial in history}}
    left = [value for value in ({passing}, {failing}) if value not in told]
    return axis.index_at_or_below(left[0]) if left else index(self, axis, history)

DeviceSets.take, Bisect.next_index = picked, first
"""
"""Two rungs are booted first, and on card 1; every other boot is on card 0 unless another set is asked for."""


def test_a_lesser_card_is_named_with_what_it_is_good_for(project: Project) -> None:
    """Card 1 has 1 GiB less free: eight thousand tokens at 128 KiB."""
    physics = f'kv_bytes_per_token = 1024\nactivation_per_window_token = "128 KiB"\ndevice_skew = "1 GiB"\n{SLOW}'
    config = card(mock=physics, shape='kv_cache_memory_bytes = "1 GiB"', devices="0, 1")
    (project.path / "kvbudget.toml").write_text(config)
    ladder(project, ", strategy='bisect'")
    strong, weak = (largest(chances(project, "max_model_len", RUNGS, cards=[number])) for number in (0, 1))
    assert weak[0] < strong[0]
    project.tests(PICKED.format(passing=weak[0], failing=strong[0]), "conftest.py")

    result = project.run()

    result.assert_outcomes(passed=1)
    (record,) = project.findings()
    finding = record.finding
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, *strong)
    bounds_hold(project, finding.sets)
    assert [bound.devices for bound in finding.sets] == [("0",), ("1",)]
    assert (finding.sets[1].passed, finding.sets[1].failed_at) == (weak[0], strong[0])
    (label,) = {attempt.device_set for attempt in project.attempts() if attempt.target.devices == ("1",)}
    said = (
        f"on devices 1 ({label}) max_model_len {strong[0]:,} failed: deploy at most {weak[0]:,} there, "
        "the largest that passed"
    )
    assert said in finding.sentence
    assert said in " ".join(" ".join(result.outlines).split())
    assert said in html.unescape(next(project.path.rglob("ladder.html")).read_text())


def test_a_sweep_uses_several_devices_too(project: Project) -> None:
    (project.path / "kvbudget.toml").write_text(neuron(devices="0, 1, 2, 3", mock="seconds = { weights_load = 0.3 }"))
    project.tests(SWEEP)
    value, failed_at = smallest(chances(project, "reserved_headroom", gib(0, 27)))

    result = project.run()

    result.assert_outcomes(passed=1)
    (record,) = project.sweeps()
    finding = record.finding
    assert (finding.kind, finding.value, finding.failed_at) == (FindingKind.PROVEN, value, failed_at)
    made = spans(project.attempts())
    assert any(one[1] < two[2] and two[1] < one[2] for one, two in combinations(made, 2))
    assert value % GIB == 0


def test_two_workers_share_the_devices(project: Project) -> None:
    """Two ladders in two workers on two cards: neither waits for ever, and both find the same."""
    project.configure(devices="0, 1", mock="seconds = { weights_load = 0.2 }")
    for name in ("a", "b"):
        project.tests(LADDER.format(more=""), f"test_{name}.py")
    value, failed_at = largest(chances(project, "max_model_len", RUNGS))

    result = project.run("-n2", "--dist=loadfile")

    result.assert_outcomes(passed=2)
    for record in project.findings():
        assert (record.finding.value, record.finding.failed_at) == (value, failed_at)
    for one, two in combinations(spans(project.attempts()), 2):
        assert one[0] != two[0] or one[2] <= two[1] or two[2] <= one[1]
