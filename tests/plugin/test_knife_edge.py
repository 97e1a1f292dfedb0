"""Booted is not survived: two documented shapes of the RDNA4 budget document, on cards worked out by hand."""

from __future__ import annotations

import pytest

from pytest_kvbudget.records import AttemptRecord
from pytest_kvbudget.verdict import FindingKind, Phase, Verdict
from tests.conftest import Project

GIB = 2**30
MIB = 2**20
TOTAL = 34_208_743_424
DRIVER = int(0.57 * GIB)
NON_TORCH = int(1.45 * GIB)
ACTIVATION = 512 * MIB + 2048 * 128 * 1024  # base, and vLLM's 2,048 batched tokens

CARD = """
[target.card]
backend = "mock"
devices = [0]
[target.card.shape]
model = "simulated"
max_num_seqs = {seqs}
max_model_len = {length}
gpu_memory_utilization = 0.98
kv_cache_dtype = "fp8"
kv_cache_memory_bytes = {pool}
[target.card.mock]
dialect = "rdna4"
weights = {weights}
kv_bytes_per_token = {rate}
request_peak_per_token = {peak}
sysfs = "sysfs"
"""


def graphs(seqs: int) -> int:
    """Capture sizes 1, 2, 4 and every 8 up to twice the sequences, at 12 MiB each on a base of 64 MiB."""
    sizes = [size for size in (1, 2, 4, *range(8, 256, 8)) if size <= 2 * seqs]
    return 64 * MIB + 12 * MIB * len(sizes)


def card(*, seqs: int, length: int, pool: int, rate: int, peak: int, free: int) -> str:
    """A card on which exactly ``free`` bytes are left once the engine is ready."""
    blocks = pool // (16 * rate)
    weights = TOTAL - DRIVER - NON_TORCH - ACTIVATION - graphs(seqs) - blocks * 16 * rate - free
    return CARD.format(seqs=seqs, length=length, pool=pool, weights=weights, rate=rate, peak=peak)


def only(project: Project) -> AttemptRecord:
    (record,) = project.used()
    return record


@pytest.mark.parametrize("arguments", [(), ("-n2",)], ids=["plain", "n2"])
def test_the_documented_corpse_boots_answers_and_dies_on_its_largest_request(
    project: Project, arguments: tuple[str, ...]
) -> None:
    # 5 x 262,144 fp8: 1,350,182 tokens at 7,701 B; 50 MiB asked for with nothing left (section 5). The small request
    # of 5 + 4 tokens takes the last bytes, and torch's allocator keeps them.
    pool = 1_350_182 * 7_701
    per_token = 50 * MIB // 262_144
    text = card(seqs=5, length=262_144, pool=pool, rate=7_701, peak=per_token, free=9 * per_token)
    (project.path / "kvbudget.toml").write_text(text)
    project.tests(
        """
import pytest

@pytest.mark.knife_edge(prompt_tokens=995, max_tokens=261_149)
def test_survives(kv_engine):
    assert kv_engine.complete([1, 2, 3, 4, 5], max_tokens=4, ignore_eos=True)["choices"]
"""
    )
    result = project.run(*arguments)
    result.assert_outcomes(failed=1)
    output = result.stdout.str()
    record = only(project)
    assert record.verdict is Verdict.FAIL
    assert record.cause is not None
    assert (record.cause.phase, record.cause.failure_class) == (Phase.REQUEST, "request_oom")
    assert record.ledger is not None
    assert record.ledger.number("tried_alloc_bytes") == 50 * MIB
    assert record.ledger.number("free_bytes") == 0
    assert record.uses[-1].survival is not None
    assert [request.ended for request in record.uses[-1].survival.requests] == ["died"]
    assert record.uses[-1].survival.verdict is Verdict.FAIL
    # both sides: lines of the engine's log, and what its client was told
    assert [bool(entry.line) for entry in record.cause.evidence][-1:] == [False]
    assert record.cause.evidence[-1].text.startswith("client: the generation of 995 prompt and 261,149 answer tokens: ")
    assert any(entry.line for entry in record.cause.evidence)
    # 1,350,182 tokens hold 39,462 more than 5 x 262,144: 0.28 GiB at 7,701 B a token
    assert "kv_cache_memory_bytes: it is 0.28 GiB over its contract floor of 5 x 262,144 tokens" in output
    assert "tried to allocate 50.00 MiB" in output
    assert "Engine died during the test" not in output, "it is said once"


def test_the_documented_survivor_holds_its_margin(project: Project) -> None:
    # row G: 401,408 tokens from 3,166,500,000 B, 0.89 GiB free held through a live 4,096-token generation
    rate = 3_166_500_000 // 401_408
    free = int(0.89 * GIB)
    text = card(seqs=2, length=200_704, pool=rate * 401_424, rate=rate, peak=0, free=free)
    (project.path / "kvbudget.toml").write_text(text)
    project.tests(
        """
import pytest

@pytest.mark.knife_edge(prefill=False)
def test_survives(kv_engine, kv_ledger):
    assert kv_ledger.kv_cache.tokens >= 401_408
"""
    )
    result = project.run()
    result.assert_outcomes(passed=1)
    record = only(project)
    assert record.verdict is Verdict.PASS
    assert record.uses[-1].survival is not None
    (request,) = record.uses[-1].survival.requests
    assert (request.ended, request.generated_tokens) == ("held", 4096)
    (gate,) = record.uses[-1].gates  # rdna4 asks for 512 MiB where nobody asks for more
    assert (gate.gate, gate.limit_bytes, gate.verdict) == ("min_free", 512 * MIB, Verdict.PASS)
    assert gate.measured_bytes == pytest.approx(free, abs=16 * rate)
    assert record.trace is not None
    assert {phase.phase for phase in record.trace.phases} >= {"launch", "ready", "request", "teardown"}
    assert record.trace.leaks == ()


def test_less_margin_than_asked_for_is_marginal_and_said(project: Project) -> None:
    project.configure(shape="max_model_len = 4096")
    project.tests(
        """
import pytest

@pytest.mark.knife_edge(hold=8, min_free="31 GiB")
def test_survives(kv_engine): ...
"""
    )
    result = project.run()
    result.assert_outcomes(passed=1)
    record = only(project)
    assert record.verdict is Verdict.MARGINAL
    result.stdout.fnmatch_lines(["*test_survives: MARGINAL: min_free: rank 0 (device 0) had *at least 31.00 GiB free*"])


def test_another_test_of_the_same_engine_is_not_said_to_be_marginal(project: Project) -> None:
    project.configure(shape="max_model_len = 4096")
    project.tests(
        """
import pytest

def test_before(kv_engine): ...

@pytest.mark.knife_edge(hold=8, min_free="31 GiB")
def test_survives(kv_engine): ...

def test_after(kv_engine): ...
"""
    )
    result = project.run()
    result.assert_outcomes(passed=3)
    (record,) = project.attempts()
    verdicts = {use.test: use.verdict for use in record.uses}
    assert verdicts == {
        "test_it.py::test_before": Verdict.PASS,
        "test_it.py::test_survives": Verdict.MARGINAL,
        "test_it.py::test_after": Verdict.PASS,
    }
    said = [line.partition(": MARGINAL: ")[0] for line in result.outlines if ": MARGINAL: " in line]
    assert said == ["test_it.py::test_survives"]


def test_what_a_request_took_and_kept_is_seen_however_short_it_was(project: Project) -> None:
    """1 MiB for each of its tokens, kept by the allocator; one sample a second, and no gate that would ask for one."""
    project.configure(shape="max_model_len = 4096", mock="request_peak_per_token = 1_048_576", limits="trace_hz = 1")
    project.tests(
        """
import pytest

@pytest.mark.knife_edge(prompt_tokens=64, max_tokens=64, prefill=False)
def test_survives(kv_engine): ...
"""
    )
    project.run().assert_outcomes(passed=1)
    record = only(project)
    assert record.trace is not None
    (ready,) = [reading for reading in record.memory if reading.moment == "ready"]
    (window,) = next(phase for phase in record.trace.phases if phase.phase == "request").devices
    assert window is not None
    assert window.peak_used_bytes >= ready.devices[0].used_bytes + 64 * MIB


def test_a_rung_passes_only_if_it_survives(project: Project) -> None:
    # with 1 MiB per token of a request and 8 GiB free, about 8,000 tokens are survived; all 51,072 boot
    project.configure(
        mock="request_peak_per_token = 1_048_576\n",
    )
    project.tests(
        """
import pytest

@pytest.mark.ladder(start=49_152, floor=4_096, quantum=4_096)
@pytest.mark.knife_edge(hold=8)
def test_window(kv_engine): ...
"""
    )
    result = project.run()
    (finding,) = project.findings()
    found = finding.finding
    assert found.kind is FindingKind.PROVEN, result.stdout.str()
    assert found.bounded_by is not None
    assert (found.bounded_by.phase, found.bounded_by.by_gate) == (Phase.REQUEST, False)
    result.assert_outcomes(passed=1)


def test_a_request_that_asks_too_much_is_an_error_of_the_test(project: Project) -> None:
    project.configure(shape="max_model_len = 4096")
    project.tests(
        """
import pytest

def test_survives(kv_survival): kv_survival.check(prompt_tokens=5_000, max_tokens=16)
"""
    )
    project.run().assert_outcomes(failed=1)
    record = only(project)
    assert record.verdict is Verdict.ERROR
    assert record.cause is not None
    assert record.cause.failure_class == "request_rejected"


def test_a_request_larger_than_the_pool_starves(project: Project) -> None:
    # an engine lets a request in whose prompt fits the window though its answer does not fit the pool
    project.configure(shape="max_model_len = 51_072\nmax_num_seqs = 2")
    project.tests(
        """
import pytest

@pytest.mark.knife_edge(prompt_tokens=40_000, max_tokens=10_000, hold=9_000, concurrency=2, timeout=20)
def test_survives(kv_engine): ...
"""
    )
    project.run().assert_outcomes(passed=1)
    record = only(project)
    assert record.uses[-1].survival is not None, "two at once do not fit, one waits for the other and both are served"
    assert all(request.survived for request in record.uses[-1].survival.requests)


def test_an_engine_that_never_answers_is_unknown(project: Project) -> None:
    project.configure(shape="max_model_len = 4096", mock="[target.card.mock.faults]\nrequest_hang = true")
    project.tests(
        """
import pytest

@pytest.mark.knife_edge(timeout=1)
def test_survives(kv_target, kv_ledger): ...
"""
    )
    project.run().assert_outcomes(failed=1)
    assert only(project).verdict is Verdict.UNKNOWN


def test_the_fixture_checks_where_the_body_wants_it_and_not_twice(project: Project) -> None:
    project.configure(shape="max_model_len = 4096")
    project.tests(
        """
import pytest

@pytest.mark.knife_edge(hold=8, prefill=False)
def test_survives(kv_survival, kv_trace):
    found = kv_survival.check(prompt_tokens=100)
    assert [request.prompt_tokens for request in found.requests] == [100]
    (rank,) = kv_trace.since("request")
    with pytest.raises(ValueError, match="phase is 'reqest'; did you mean 'request'"):
        kv_trace.since("reqest")
    assert kv_trace.since("shutdown") == (None,)
    assert rank.least_free_bytes > 0
"""
    )
    project.run().assert_outcomes(passed=1)
    record = only(project)
    assert record.uses[-1].survival is not None
    assert [request.prompt_tokens for request in record.uses[-1].survival.requests] == [100]


@pytest.mark.parametrize("arguments", [(), ("-n2",)], ids=["plain", "n2"])
@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ("min_free='3 GB', hold=1", "knife_edge: min_free: '3 GB' has the unit 'GB'"),
        ("prompt_tokens=0", "knife_edge: prompt_tokens: is 0; expected "),
        ("hold=1, tokens=3", "knife_edge: tokens: unknown key"),
    ],
)
def test_wrong_arguments_are_collection_errors(
    project: Project, arguments: tuple[str, ...], marker: str, said: str
) -> None:
    project.tests(f"import pytest\n\n@pytest.mark.knife_edge({marker})\ndef test_survives(kv_engine): ...\n")
    result = project.run(*arguments)
    assert said in result.stdout.str()
    result.assert_outcomes(errors=1)


def test_an_engine_that_was_marginal_may_not_die_unnoticed_under_the_next_body(project: Project) -> None:
    project.configure(
        shape="max_model_len = 4096",
        mock="request_peak_per_token = 4_000_000\n[target.card.mock.seconds]\nlinger = 2.0",
    )
    project.tests(
        """
import pytest, requests

@pytest.mark.knife_edge(max_tokens=16, hold=8, prefill=False, min_free="33 GiB")
def test_a(kv_engine): ...

def test_b(kv_engine):
    body = {"model": "simulated", "prompt": [1] * 4000, "max_tokens": 90}
    requests.post(kv_engine.url + "/v1/completions", json=body)
"""
    )
    project.run().assert_outcomes(passed=1, failed=1)
    record = only(project)
    assert record.cause is not None
    assert (record.verdict, record.cause.failure_class) == (Verdict.FAIL, "request_oom")


def test_a_device_that_disappears_is_unknown_and_says_what_was_missing(project: Project) -> None:
    project.configure(shape="max_model_len = 4096")
    project.tests(
        """
import pathlib, pytest

@pytest.mark.knife_edge(hold=8, min_free="512 MiB")
def test_survives(kv_engine):
    for path in pathlib.Path("sysfs").rglob("mem_info_vram_used"):
        path.rename(path.with_name("away"))
"""
    )
    result = project.run()
    result.assert_outcomes(failed=1)
    record = only(project)
    assert record.cause is not None
    assert (record.verdict, record.cause.failure_class) == (Verdict.UNKNOWN, "memory_unseen")
    assert record.uses[-1].survival is not None
    assert all(request.survived for request in record.uses[-1].survival.requests)
    result.stdout.fnmatch_lines(["*no rank's memory was seen (*mem_info_vram_used: cannot be read: No such file*"])
