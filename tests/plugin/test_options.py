"""Options, ini keys and configuration: found, checked before anything starts, and shown."""

from __future__ import annotations

import os
import signal
from datetime import datetime, timedelta

import psutil
import pytest

from pytest_kvbudget.verdict import Verdict
from tests.conftest import Project, properties, rows

DISTRIBUTIONS = pytest.mark.parametrize("how", [(), ("-n2",)], ids=["here", "n2"])

BOOT = """
import pytest
@pytest.mark.kv_shape(max_model_len=4096)
def test_boots(kv_engine, kv_target): pass
"""
LADDER = """
import pytest
@pytest.mark.ladder(start=53_248, floor=45_056)
def test_window(kv_engine): pass
"""


@DISTRIBUTIONS
def test_the_header_names_target_devices_archive_and_configuration(project: Project, how: tuple[str, ...]) -> None:
    project.tests(BOOT)

    result = project.run(*how, "--kvbudget-archive", "runs")

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "kvbudget: target card (backend mock, launcher process, devices 0), SIMULATED*",
            f"kvbudget: configuration {project.path}/kvbudget.toml",
            f"kvbudget: archive {project.path}/runs/*",
        ]
    )
    (record,) = project.attempts()
    assert (project.path / "runs" / record.run.run).is_dir()
    assert result.outlines.count(f"kvbudget: configuration {project.path}/kvbudget.toml") == 1


@DISTRIBUTIONS
def test_without_configuration_the_target_is_simulated_and_the_run_says_so(
    project: Project, how: tuple[str, ...]
) -> None:
    (project.path / "kvbudget.toml").unlink()
    project.tests(BOOT)

    result = project.run(*how)

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "kvbudget: target mock-r9700 *SIMULATED*",
            "kvbudget: configuration none found, the built-in simulated target is used",
        ]
    )
    (record,) = project.attempts()
    assert record.target.simulated


@DISTRIBUTIONS
@pytest.mark.parametrize("quiet", ["-q", "-qq"])
def test_a_simulated_target_closes_the_run_however_quiet_it_is(
    project: Project, how: tuple[str, ...], quiet: str
) -> None:
    project.tests(BOOT + LADDER)

    named = project.run(*how, quiet, "--junitxml=junit.xml")
    (project.path / "kvbudget.toml").unlink()
    found_none = project.run(*how, quiet, "-k", "test_boots", "--junitxml=none.xml")

    said = "kvbudget: SIMULATED target {}: no number of this run is a measurement"
    assert named.outlines.count(said.format("card")) == 1
    none = f"{said.format('mock-r9700')}; no configuration was found, so the built-in target was used"
    assert found_none.outlines.count(none) == 1
    for case in project.junit().values():
        assert properties(case)["kvbudget.simulated"] == "true"
        assert "kvbudget.toml [target.card]" in properties(case)["kvbudget.configured_in"]
    assert 'name="kvbudget.configured_in" value="built-in"' in (project.path / "none.xml").read_text()


@DISTRIBUTIONS
@pytest.mark.parametrize("archive", ["file", "file/below"])
def test_an_archive_that_cannot_be_is_a_usage_error(project: Project, how: tuple[str, ...], archive: str) -> None:
    (project.path / "file").touch()
    project.tests(BOOT)

    result = project.run(*how, "--kvbudget-archive", archive)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [f"ERROR: kvbudget: --kvbudget-archive: */{archive} cannot hold records: */file is no *"]
    )


def test_details_of_a_boot_gate_that_passed_are_there_for_those_who_ask(project: Project) -> None:
    project.tests("""
import pytest
@pytest.mark.boot_gate(windows=2)
@pytest.mark.kv_shape(max_model_len=20_480)
def test_holds(): pass
""")

    plain, verbose = project.run(), project.run("-v")

    plain.stdout.no_fnmatch_line("*boot_gate PASS*")
    verbose.stdout.fnmatch_lines(
        [
            "test_it.py::test_holds: boot_gate PASS: the KV cache holds 51,200 tokens*, 2.50 windows of 20,480",
            "record: *attempt.json",
        ]
    )


WRONG = {
    "unknown key": ("[target.card]\nbackend = 'mock'\ncolour = 1\n", (), "*kvbudget.toml: [[]target.card[]]*colour*"),
    "backend": ("[target.card]\nbackend = 'cuda'\n", (), "*backend: no backend 'cuda'; expected one of *"),
    "no such target": ("[target.card]\nbackend = 'mock'\n", ("--kvbudget-target=crad",), "*no target 'crad'*card*"),
    "several targets": ("[target.a]\nbackend='mock'\n[target.b]\nbackend='mock'\n", (), "*several targets (a, b)*"),
    "no such file": ("[target.a]\nbackend='mock'\n", ("--kvbudget-config=nowhere.toml",), "*nowhere.toml*not a file*"),
    "strategy": ("[target.a]\nbackend='mock'\n", ("--kvbudget-strategy=luck",), "*'luck'; expected one of *predict*"),
    "rung": ("[target.a]\nbackend='mock'\n", ("--kvbudget-rung=many",), "*--kvbudget-rung: 'many'*"),
    "hardware": ("[target.a]\nbackend='mock'\n", ("--kvbudget-require-hardware",), "*target a is simulated*"),
}


@DISTRIBUTIONS
@pytest.mark.parametrize(("config", "options", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_a_usage_error_and_nothing_starts(
    project: Project, config: str, options: tuple[str, ...], message: str, how: tuple[str, ...]
) -> None:
    (project.path / "kvbudget.toml").write_text(config)
    project.tests(BOOT)

    result = project.run(*how, *options)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: kvbudget: {message}"])
    assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()
    assert not (project.path / "kvbudget-archive").exists()


def test_hardware_can_be_required_for_good_and_binds_only_tests_of_ours(project: Project) -> None:
    (project.path / "pytest.ini").write_text("[pytest]\nkvbudget_require_hardware = true\n")
    project.tests(BOOT)
    project.tests("def test_plain(): pass\n", "test_plain.py")

    assert project.run("test_it.py").ret == pytest.ExitCode.USAGE_ERROR
    project.run("test_plain.py").assert_outcomes(passed=1)


def test_the_configuration_is_the_nearest_one_upward_from_the_tests(project: Project) -> None:
    (project.path / "kvbudget.toml").rename(project.path / "elsewhere.toml")
    for name in ("a", "b"):
        project.tests(BOOT, f"{name}/deep/test_{name}.py")
        (project.path / name / "kvbudget.toml").write_text(f"[target.{name}]\nbackend = 'mock'\n")

    one = project.run("a/deep/test_a.py", "--kvbudget-dry-run")
    both = project.run("a", "b")
    named = project.run("a", "b", "--kvbudget-config=elsewhere.toml", "--kvbudget-dry-run")

    one.stdout.fnmatch_lines(["kvbudget: target a *"])
    assert both.ret == pytest.ExitCode.USAGE_ERROR
    both.stderr.fnmatch_lines(["ERROR: kvbudget: *two configurations, */a/kvbudget.toml and */b/kvbudget.toml*"])
    named.stdout.fnmatch_lines(["kvbudget: target card *"])


@DISTRIBUTIONS
@pytest.mark.parametrize("above", [True, False])
def test_a_test_below_another_configuration_is_not_booted_on_the_wrong_target(
    project: Project, how: tuple[str, ...], above: bool
) -> None:
    own, deeper = project.path / "kvbudget.toml", project.path / "svc" / "kvbudget.toml"
    deeper.parent.mkdir()
    deeper.write_text(own.read_text())
    if not above:
        own.unlink()
    project.tests(BOOT + LADDER, "svc/test_svc.py")
    project.tests("def test_plain(): pass", "other/test_other.py")

    result = project.run(*how, *(() if above else ("--kvbudget-target=mock-r9700",)))
    named = project.run(*how, "--kvbudget-config", str(deeper), "-k", "not window")
    alone = project.run(*how, "svc", "-k", "not window")

    text = result.stdout.str() + result.stderr.str()
    assert result.ret == (4 if not how else 1)
    assert f"belongs to {deeper}, and this run's arguments lead to " in text
    assert f"lead to {own}; run" in text or "lead to the built-in simulated target mock-r9700" in text
    assert f"pytest {deeper.parent}, or name one for all with --kvbudget-config" in text
    assert "INTERNALERROR" not in text
    assert named.parseoutcomes()["passed"] == 2
    assert alone.parseoutcomes()["passed"] == 1
    assert {record.target.name for record in project.attempts()} == {"card"}
    assert len(project.attempts()) == 2


def test_pyproject_can_hold_the_configuration(project: Project) -> None:
    (project.path / "kvbudget.toml").unlink()
    (project.path / "pyproject.toml").write_text("[tool.kvbudget.target.mine]\nbackend = 'mock'\n")
    project.tests(BOOT)

    project.run("--kvbudget-dry-run").stdout.fnmatch_lines(["kvbudget: target mine *"])


def test_ini_keys_are_defaults_and_their_paths_are_relative_to_the_file(project: Project) -> None:
    (project.path / "kvbudget.toml").rename(project.path / "mine.toml")
    (project.path / "pytest.ini").write_text(
        "[pytest]\nkvbudget_config = mine.toml\nkvbudget_target = card\n"
        "kvbudget_archive = kept\nkvbudget_strategy = step\n"
    )
    project.tests(LADDER, "sub/test_it.py")
    os.chdir(project.path / "sub")

    project.run("test_it.py").assert_outcomes(passed=1)

    (finding,) = project.findings()
    assert finding.strategy == "step"
    assert list((project.path / "kept").rglob("finding.json"))


def test_the_strategy_of_the_run_is_that_of_ladders_that_name_none(project: Project) -> None:
    project.tests(LADDER + LADDER.replace("45_056", "45_056, strategy='step'").replace("test_window", "test_own"))

    project.run("--kvbudget-strategy=bisect").assert_outcomes(passed=2)

    assert {finding.test: finding.strategy for finding in project.findings()} == {
        "test_it.py::test_window": "bisect",
        "test_it.py::test_own": "step",
    }


@DISTRIBUTIONS
def test_a_dry_run_shows_commands_environment_and_first_rungs_and_starts_nothing(
    project: Project, how: tuple[str, ...]
) -> None:
    project.configure(shape='env = { A_TOKEN = "hidden", EXTRA = "shown" }')
    project.tests(BOOT + LADDER + "def test_plain(): pass\n")

    result = project.run(*how, "--kvbudget-dry-run")

    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "kvbudget dry run: nothing is started*",
            "port 8000 stands for a free one*",
            "test_it.py::test_boots",
            "  shape: *max_model_len=4096*",
            "  env: EXTRA=shown",
            "  command: *-m pytest_kvbudget.mock serve simulated *--max-model-len 4096*",
            "test_it.py::test_window",
            "  ladder: max_model_len from 53248 down to 45056 by 4096, predict; first rung max_model_len=*",
            "  command: *",
        ]
    )
    assert "hidden" not in result.stdout.str()
    assert not (project.path / "kvbudget-archive").exists()
    assert not (project.path / "sysfs").exists()


@pytest.mark.parametrize("devices", ["0", "0, 1, 2"])
def test_the_winner_can_be_left_serving(project: Project, devices: str) -> None:
    project.configure(devices=devices)
    project.tests(LADDER + "def test_plain(kv_target): pass\n")

    result = project.run("--kvbudget-leave-serving")

    result.assert_outcomes(passed=2)
    assert rows(result.outlines)[-1] == ("49152#2", "PASS")
    line = next(line for line in result.outlines if line.startswith("left serving: "))
    pid = int(line.rpartition(" ")[2])
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    try:
        assert process.is_running()
        *_, left = project.attempts()
        assert left.left_serving
        assert str(left.endpoint) in line
        assert left.verdict is Verdict.PASS
        (finding,) = project.findings()
        assert (finding.finding.value, finding.finding.confirmations) == (49_152, 1)
    finally:
        os.kill(pid, signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=20)
        for other in alive:
            other.kill()
    assert not alive


@pytest.mark.parametrize("devices", ["0", "0, 1, 2"])
def test_what_is_no_proof_leaves_nothing_serving_and_says_so(project: Project, devices: str) -> None:
    project.configure(devices=devices)
    project.tests(LADDER)

    result = project.run("--kvbudget-leave-serving", "--kvbudget-max-boots=1")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["nothing is left serving: the finding is no proof"])
    assert not any(record.left_serving for record in project.attempts())


def test_only_one_ladder_can_be_left_serving(project: Project) -> None:
    project.tests(LADDER + LADDER.replace("test_window", "test_second"))

    result = project.run("--kvbudget-leave-serving")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--kvbudget-leave-serving with 2 ladders and sweeps selected*"])
    assert project.attempts() == []


@DISTRIBUTIONS
def test_a_time_is_shown_with_its_day(project: Project, how: tuple[str, ...]) -> None:
    """A minute ago means tomorrow."""
    project.tests(LADDER)
    before = datetime.now() - timedelta(minutes=2)

    result = project.run(*how, f"--kvbudget-until={before:%H:%M}", "--kvbudget-max-boots=1")

    tomorrow = before + timedelta(days=1)
    result.stdout.fnmatch_lines([f"kvbudget: until {tomorrow:%Y-%m-%d %H:%M} (local time): no boot of a search *"])
    assert len(project.attempts()) == 1


@DISTRIBUTIONS
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("kvbudget_strategy = luck", "kvbudget_strategy in */pytest.ini is 'luck'; expected one of *"),
        ("kvbudget_require_hardware = true", "*is simulated*and kvbudget_require_hardware in */pytest.ini is set*"),
        ("kvbudget_config = no.toml", "kvbudget_config in */pytest.ini: */no.toml is not a file"),
        (
            "kvbudget_target = crad",
            "*no target 'crad' (kvbudget_target in */pytest.ini); did you mean 'card'? it has card",
        ),
        ("kvbudget_archive = test_it.py", "kvbudget_archive in */pytest.ini: */test_it.py cannot hold records*"),
    ],
)
def test_a_wrong_value_of_the_ini_file_is_not_blamed_on_the_command_line(
    project: Project, how: tuple[str, ...], line: str, message: str
) -> None:
    project.tests(BOOT)
    (project.path / "pytest.ini").write_text(f"[pytest]\n{line}\n")

    result = project.run(*how)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: kvbudget: {message}"])


def test_the_default_archive_is_the_same_from_every_folder(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    (project.path / "pytest.ini").write_text("[pytest]\n")
    project.tests(BOOT, "svc/test_it.py")
    project.run().assert_outcomes(passed=1)
    monkeypatch.chdir(project.path / "svc")
    project.run().assert_outcomes(passed=1)

    assert len(list((project.path / "kvbudget-archive").rglob("attempt.json"))) == 2
