"""Laws in use: the plan before a boot, the gate that refuses what cannot boot, reconcile after it, compile parity."""

from __future__ import annotations

import pytest

from pytest_kvbudget.verdict import Verdict
from tests.conftest import Project, properties

NEURON = """
[target.core]
backend = "mock"
devices = [0]
[target.core.env]
NEURON_PLATFORM_TARGET_OVERRIDE = "trn3"
[target.core.shape]
model = "simulated"
max_model_len = 16_384
max_num_seqs = 4
reserved_headroom = {headroom}
lnc = 2
[target.core.mock]
dialect = "neuron"
platform = "trn3"
device_total = {total}
weights = "8 GiB"
non_torch = "512 MiB"
kv_bytes_per_token = 36_864
sysfs = "sysfs"
"""
STACK = 38_654_705_664  # 36 GiB, what the static table gives a trn3 stack

PARITY = """
import pytest

@pytest.mark.compile_parity
def test_parity(kv_ledger):
    assert kv_ledger.kv_cache.tokens
"""


def neuron(project: Project, *, headroom: str = '"4 GiB"', total: int = STACK) -> None:
    (project.path / "kvbudget.toml").write_text(NEURON.format(headroom=headroom, total=total))


def test_equal_totals_compile_for_one_another(project: Project) -> None:
    neuron(project)
    project.tests(PARITY)
    project.run().assert_outcomes(passed=1)
    device, compiled = project.attempts()
    # neither side is in trouble: the device's engine was ended by us, the other one did what it was for
    assert (device.verdict, compiled.verdict) == (Verdict.PASS, Verdict.PASS)
    assert compiled.message.startswith("compiled: ")
    (use,) = device.uses
    assert (use.verdict, use.cause) == (Verdict.PASS, None)
    assert "the CPU compile plans the same KV cache" in use.message
    assert device.ledger is not None
    assert compiled.ledger is not None
    assert device.ledger.number("kv_tokens") == compiled.ledger.number("kv_tokens")


def test_a_device_that_reports_less_than_the_table_stays_cold(project: Project) -> None:
    neuron(project, total=STACK - 64 * 2**20)
    project.tests(PARITY)
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*CPU compile plans * tokens of KV cache and the device *the compile cache stays cold*"]
    )
    device, compiled = project.attempts()
    assert (device.verdict, compiled.verdict) == (Verdict.PASS, Verdict.PASS)
    (use,) = device.uses
    assert use.cause is not None
    assert (use.verdict, use.cause.failure_class) == (Verdict.ERROR, "parity_missed")


def test_a_passing_parity_says_nothing_of_a_death(project: Project) -> None:
    neuron(project)
    project.tests(PARITY)
    result = project.run("-rA", "--junitxml=junit.xml")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*Engine died*")
    assert properties(project.junit()["test_parity"])["kvbudget.verdict"] == "PASS"


def test_a_compile_that_is_refused_says_why(project: Project) -> None:
    neuron(project)
    path = project.path / "kvbudget.toml"
    override = '[target.core.env]\nNEURON_PLATFORM_TARGET_OVERRIDE = "trn3"\n'
    path.write_text(path.read_text().replace(override, ""))
    project.tests(PARITY)
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*compile_parity: the CPU compile came to nothing: *",
            "*NEURON_PLATFORM_TARGET_OVERRIDE is needed with it*",
            "*log *none: nothing was started",
        ]
    )
    device, compiled = project.attempts()
    assert (device.verdict, compiled.verdict) == (Verdict.PASS, Verdict.ERROR)
    (use,) = device.uses
    assert use.cause is not None
    assert (use.verdict, use.cause.failure_class) == (Verdict.UNKNOWN, "parity_unknown")


@pytest.mark.parametrize("arguments", [(), ("-n1",)], ids=["plain", "n1"])
@pytest.mark.parametrize("dialect", ["vllm", "rdna4"])
def test_parity_of_an_engine_that_never_compiles_on_a_cpu_is_no_test(
    project: Project, dialect: str, arguments: tuple[str, ...]
) -> None:
    project.configure(shape="max_model_len = 4096", mock=f'dialect = "{dialect}"')
    project.tests("import pytest\n\n@pytest.mark.compile_parity\ndef test_p(): pass\n")
    result = project.run(*arguments)
    assert result.ret != 0
    assert "test_p: @pytest.mark.compile_parity tests nothing here: only Neuron compiles on a CPU" in (
        result.stdout.str() + result.stderr.str()
    )
    assert not project.attempts()


def test_a_shape_that_no_law_lets_boot_is_refused_before_it_starts(project: Project) -> None:
    # headroom at the whole share of a logical core: nothing is left for weights and KV cache
    neuron(project, headroom='"36 GiB"')
    project.tests("def test_boots(kv_engine): ...\n")
    result = project.run()
    result.assert_outcomes(errors=1)
    (record,) = project.attempts()
    assert record.verdict is Verdict.ERROR
    assert not record.command, "nothing was started"
    assert record.cause is not None
    assert "law" in record.cause.sentence
    assert "--kvbudget-no-gate" in result.stdout.str()


def test_without_the_gate_it_is_booted_all_the_same(project: Project) -> None:
    neuron(project, headroom='"36 GiB"')
    project.tests("def test_boots(kv_engine): ...\n")
    project.run("--kvbudget-no-gate").assert_outcomes(errors=1)
    (record,) = project.attempts()
    assert record.command, "the engine itself refused"
    assert record.verdict is not Verdict.PASS


def test_the_plan_names_its_terms_and_boots_nothing(project: Project) -> None:
    neuron(project)
    project.tests(
        """
def test_plan(kv_plan):
    assert kv_plan.left_bytes == 25_769_803_776  # 36 - 8 - 4 GiB (Neuron document, headroom policy)
"""
    )
    project.run().assert_outcomes(passed=1)
    assert project.attempts() == []


def test_predicted_terms_are_reconciled_with_what_was_measured(project: Project) -> None:
    neuron(project)
    project.tests("def test_boots(kv_engine): ...\n")
    project.run().assert_outcomes(passed=1)
    (record,) = project.attempts()
    assert record.plan is not None
    assert record.plan.left_bytes == 25_769_803_776
    assert record.reconciled
