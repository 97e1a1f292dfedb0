"""What a log says about the compile cache, and whether that cache is still there."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_kvbudget.ledger.model import BootLedger, Evidence, Value
from pytest_kvbudget.records import AttemptRecord, RunInfo, TargetInfo
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import MIB
from pytest_kvbudget.verdict import Verdict
from pytest_kvbudget.warmth import cache_stands, warm_of
from tests.ledger.support import DATA, read, read_bytes
from tests.mock.harness import BASE, UTILIZATION
from tests.mock.rehearsing import CORE, FORK, HEADROOM, PRECISE, WINDOW, core, rehearsed
from tests.mock.rehearsing import read as read_simulated

WORKER = "(Worker pid=9) INFO 06-21 07:20:11 "
CACHE = WORKER + "[backends.py:1089] Using cache directory: /c/torch_compile_cache/da3c/rank_0_0/backbone for vLLM's "
CACHE += "torch.compile"
DYNAMO = WORKER + "[backends.py:1148] Dynamo bytecode transform time: 1.47 s"
COMPILING = WORKER + "[backends.py:390] Compiling a graph for compile range (1, 8192) takes 12.47 s"
SAVED = (
    WORKER + "[decorators.py:743] [backbone] saved AOT compiled function to /c/torch_aot_compile/6ee4/rank_0_0/model"
)
GRAPH = (
    WORKER + "[backends.py:292] Directly load the compiled graph(s) for compile range (1, 8192) from the cache, took"
)
GRAPH += " 0.717 s"
OLD_GRAPH = (
    WORKER + "[backends.py:134] Directly load the compiled graph(s) for dynamic shape from the cache, took 4.5 s"
)
AOT = WORKER + "[decorators.py:311] Directly load AOT compilation from path /c/torch_aot_compile/6ee4/rank_0_0/model"
AGAIN = WORKER + "[decorators.py:333] [backbone] Compiling model again due to a load failure from "
AGAIN += "/c/torch_aot_compile/6ee4/rank_0_0/model, reason: 'function' object has no attribute 'finalize_loading'"
TOTAL = WORKER + "[monitor.py:53] torch.compile took 3.10 s in total"


@pytest.mark.parametrize(
    ("lines", "warm"),
    [
        ((CACHE, DYNAMO, COMPILING, TOTAL), False),
        ((SAVED,), False),
        ((CACHE, DYNAMO, GRAPH, TOTAL), True),
        ((CACHE, DYNAMO, OLD_GRAPH, TOTAL), True),
        ((AOT, TOTAL), True),
        # one model of two, or one size of several, was compiled
        ((CACHE, DYNAMO, GRAPH, COMPILING, TOTAL), False),
        ((GRAPH, COMPILING), False),
        # the second boot of a real vLLM 0.32 on CPU: it compiles again whatever is there
        ((AGAIN, SAVED), None),
        # nothing is kept: every boot compiles, and none is colder than another
        ((DYNAMO, COMPILING, TOTAL), None),
        ((CACHE, DYNAMO), None),
        ((TOTAL,), None),
    ],
)
def test_vllm_says_what_it_compiles_and_what_it_loads(lines: tuple[str, ...], warm: bool | None) -> None:
    assert warm_of(read(*lines)) is warm


def test_a_real_first_boot_is_cold() -> None:
    ledger = read_bytes((DATA / "boots" / "l_compiled_default.log").read_bytes())
    assert warm_of(ledger) is False
    hashed = "59ca5694bf446afd70d523ee065f13efb8b21f8662b0a0fd97b6fa4bb49576a4"
    assert ledger.get("compile_cache_folder") == f"/path/to/cache/torch_compile_cache/torch_aot_compile/{hashed}"


def test_a_real_eager_boot_is_neither() -> None:
    assert warm_of(read_bytes((DATA / "boots" / "a_plain.log").read_bytes())) is None


def test_neuron_names_what_it_compiles() -> None:
    said = "(Worker_TP0 pid=9) 2026-01-01 00:00:00,000 - INFO - neuron_model_runner.py:1 - "
    loading, done = f"{said}Loading model on NeuronWorker", f"{said}Compilation complete in 3.21 seconds"
    compiled = f"{said}Compiled HLO 0123456789abcdef0123456789abcdef in 412.1s"
    assert warm_of(read(loading, compiled, done)) is False
    assert warm_of(read(loading, compiled)) is False
    assert warm_of(read(loading, done)) is True
    assert warm_of(read(loading)) is None
    assert warm_of(read(loading, f"{said}Cache miss for key 0123", done)) is False
    assert warm_of(read(loading, f"{said}Cache hit for key 0123")) is True


@pytest.mark.parametrize("cold", [True, False])
def test_every_dialect_of_the_simulated_engine_says_it(cold: bool) -> None:
    for spec, flags, env in (
        (replace(BASE, cold_extra=MIB), (*UTILIZATION, "--max-model-len", "16"), {}),
        (replace(FORK, cold_extra=MIB), PRECISE, {}),
        (CORE, WINDOW, HEADROOM),
    ):
        log = rehearsed(spec, *flags, env=env, cold=cold).log
        assert warm_of(read_simulated(spec, log)) is (not cold), log


def test_a_simulated_engine_that_keeps_nothing_is_neither() -> None:
    log = rehearsed(BASE, *UTILIZATION, "--max-model-len", "16", cold=True).log
    assert warm_of(read_simulated(BASE, log)) is None


def test_a_simulated_compile_failure_is_the_same_cold_and_warm() -> None:
    spec = core(scratch_base=14 * 1024 * MIB)
    log = rehearsed(spec, *WINDOW, cold=True).log
    assert warm_of(read_simulated(spec, log)) is not True


# -- the cache itself


def record(folder: Path | None = None) -> AttemptRecord:
    facts = {}
    if folder is not None:
        facts["compile_cache_folder"] = Value(value=str(folder), unit="text", evidence=Evidence(1, "x"))
    return AttemptRecord(
        run=RunInfo(run="r", host="h", plugin_version="0", python_version="3.11"),
        test="t",
        target=TargetInfo(name="t", backend="vllm", launcher="process", simulated=False, origin="o"),
        shape=Shape(),
        started="2026-01-01T00:00:00.000+00:00",
        verdict=Verdict.PASS,
        message="m",
        ledger=BootLedger(family="vllm", facts=facts),
    )


def filled(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "graph.bin").touch()
    return folder


def test_the_folder_that_the_log_names_counts(tmp_path: Path) -> None:
    elsewhere = {"VLLM_CACHE_ROOT": str(filled(tmp_path / "root" / "torch_compile_cache").parent)}
    named = tmp_path / "named"
    assert not cache_stands(record(named), elsewhere)
    (named / "rank_0_0").mkdir(parents=True)
    assert not cache_stands(record(named), elsewhere), "empty folders hold nothing"
    (named / "rank_0_0" / "model").touch()
    assert cache_stands(record(named), elsewhere)


@pytest.mark.parametrize(
    ("folder", "variable", "value"),
    [
        ("c/torch_compile_cache", "VLLM_CACHE_ROOT", "c"),
        ("c/torch_aot_compile", "VLLM_CACHE_ROOT", "c"),
        ("c/neuron/compile_cache", "VLLM_CACHE_ROOT", "c"),
        ("c/vllm/torch_compile_cache", "XDG_CACHE_HOME", "c"),
        ("c/.cache/vllm/torch_compile_cache", "HOME", "c"),
        ("c", "NEURON_COMPILE_CACHE_URL", "c"),
        ("c", "TORCHINDUCTOR_CACHE_DIR", "c"),
        ("c/mock/compile_cache", "KVBUDGET_MOCK_SYSFS", "c"),
    ],
)
def test_else_the_environment_says_where_it_is(tmp_path: Path, folder: str, variable: str, value: str) -> None:
    environ = {"HOME": str(tmp_path / "home"), variable: str(tmp_path / value)}
    assert not cache_stands(record(), environ)
    filled(tmp_path / folder)
    assert cache_stands(record(), environ)


def test_a_cache_that_cannot_be_looked_at_does_not_stand(tmp_path: Path) -> None:
    assert not cache_stands(record(), {"HOME": str(tmp_path), "NEURON_COMPILE_CACHE_URL": "s3://bucket/cache"})


def test_of_a_simulated_device_only_its_own_cache_counts(tmp_path: Path) -> None:
    filled(tmp_path / "vllm" / "torch_compile_cache")
    environ = {"VLLM_CACHE_ROOT": str(tmp_path / "vllm"), "KVBUDGET_MOCK_SYSFS": str(tmp_path / "sysfs")}
    assert not cache_stands(record(), environ)
