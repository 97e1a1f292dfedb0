from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvbudget.archive import (
    RecordError,
    RunArchive,
    iter_records,
    new_run_id,
    read_attempt,
    read_finding,
    schema,
)
from pytest_kvbudget.ledger.model import BootLedger, Cause, Evidence, Lever, Value
from pytest_kvbudget.records import AttemptRecord, FindingRecord, RunInfo, TargetInfo
from pytest_kvbudget.search.model import Axis, Finding, Hint, Limit
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.verdict import FindingKind, Phase, Verdict

INFO = RunInfo(run="r1", host="h", plugin_version="0", python_version="3.11")
TARGET = TargetInfo(name="t", backend="mock", launcher="process", simulated=True, origin="built-in")
CAUSE = Cause(
    phase=Phase.KV_CHECK,
    failure_class="kv_check_short",
    sentence="short",
    evidence=(Evidence(57, "ValueError: To serve"),),
    levers=(Lever("max_model_len", "lower", "helps"),),
)


def attempt(test: str = "test_a.py::test_w") -> AttemptRecord:
    return AttemptRecord(
        run=INFO,
        test=test,
        rung="max_model_len=4096",
        target=TARGET,
        shape=Shape(max_model_len=4096),
        started="2026-11-29T00:00:00.000+00:00",
        verdict=Verdict.FAIL,
        cause=CAUSE,
        message="short",
        ledger=BootLedger(
            family="vllm", facts={"kv_needed_bytes": Value(value=1, unit="bytes", evidence=Evidence(57, "x"))}
        ),
        hint=Hint(limits=(Limit(name="kv_check", margin_bytes=-1.5),), estimate=3),
    )


def finding() -> FindingRecord:
    axis = Axis(name="max_model_len", floor=4096, ceiling=8192, quantum=4096)
    return FindingRecord(
        run=INFO,
        test="test_a.py::test_w",
        target=TARGET,
        shape=Shape(),
        strategy="predict",
        pool="fixed",
        windows=1,
        finding=Finding(kind=FindingKind.EMPTY, axis=axis, value=None, boots=1, sentence="nothing"),
        attempts=("a/attempt.json",),
        started="s",
        finished="f",
    )


def test_records_read_back_as_they_were_written(tmp_path: Path) -> None:
    archive = RunArchive(tmp_path / "runs", INFO)
    assert not (tmp_path / "runs").exists(), "nothing is created before something is written"
    path = archive.write_attempt(archive.attempt_folder("test_a.py::test_w", "max_model_len=4096", 1), attempt())
    assert read_attempt(path) == attempt()
    record = archive.test_folder("test_a.py::test_w") / "a" / "attempt.json"
    found = archive.write_finding(finding(), attempts=(record,))
    assert read_finding(found) == finding()
    assert [record for _, record in iter_records(tmp_path)] == [finding(), attempt()] or [
        record for _, record in iter_records(tmp_path)
    ] == [attempt(), finding()]
    assert not list(tmp_path.rglob(".attempt*")), "no half-written file is left"


def test_documents_match_the_exported_schema(tmp_path: Path) -> None:
    archive = RunArchive(tmp_path, INFO)
    validator = jsonschema.Draft202012Validator(schema())
    jsonschema.Draft202012Validator.check_schema(schema())
    for path in (archive.write_attempt(tmp_path, attempt()), archive.write_finding(finding(), attempts=())):
        validator.validate(json.loads(path.read_text()))
    broken = json.loads(msgspec.json.encode(attempt()))
    broken["verdict"] = "MAYBE"
    assert not validator.is_valid(broken)


@pytest.mark.parametrize("asked", [True, False])
def test_a_record_of_before_tests_had_their_own_verdicts_is_read(tmp_path: Path, asked: bool) -> None:
    old = {**json.loads(msgspec.json.encode(attempt())), "schema_version": 2}
    del old["uses"]
    soak = {"sent": 30, "failed": 0, "seconds": 61.0, "verdict": "FAIL", "sentence": "short"}
    old |= {"survival": None, "soak": soak if asked else None, "gates": []}
    path = tmp_path / "attempt.json"
    path.write_text(json.dumps(old), encoding="utf-8")
    record = read_attempt(path)
    assert (record.schema_version, record.verdict, record.message) == (2, Verdict.FAIL, "short")
    if not asked:
        assert record.uses == ()
        return
    (use,) = record.uses
    assert (use.test, use.verdict, use.cause, use.message) == (record.test, Verdict.FAIL, CAUSE, "short")
    assert use.soak is not None
    assert (use.soak.sent, use.soak.verdict) == (30, Verdict.FAIL)


def test_a_folder_is_never_used_by_two_boots(tmp_path: Path) -> None:
    archive = RunArchive(tmp_path, INFO)
    folders = [archive.attempt_folder("t", "max_model_len=1", 1) for _ in range(3)]
    assert len(set(folders)) == 3


@given(st.text(min_size=1, max_size=300), st.text(min_size=1, max_size=300))
def test_folder_names_are_safe_and_distinct(one: str, other: str) -> None:
    archive = RunArchive(Path("archive"), INFO)
    first, second = archive.test_folder(one), archive.test_folder(other)
    assert first.parent == archive.folder
    assert first.name not in {".", ".."}
    assert len(first.name.encode()) < 200
    assert (first == second) == (one == other)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "is not a record"),
        (b"{", "is not a record"),
        (b"{}", "schema_version"),
        (b'{"schema_version": 99}', "schema version 99; this release reads up to 3"),
        (b'{"schema_version": 1, "verdict": "PASS"}', "missing"),
    ],
)
def test_a_record_that_cannot_be_read_is_named(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "attempt.json"
    path.write_bytes(text)
    with pytest.raises(RecordError) as caught:
        read_attempt(path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


def test_run_names_sort_by_time_and_differ() -> None:
    names = [new_run_id() for _ in range(20)]
    assert len(set(names)) == 20
    assert [name[:16] for name in names] == sorted(name[:16] for name in names)
