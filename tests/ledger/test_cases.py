"""Public logs with expected answers: facts, absent facts, verdict, evidence lines, levers and exit status."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pytest_kvbudget import explain
from tests.ledger.support import DATA

CASES = sorted(DATA.glob("cases/*.expect.json"))


def answer(log: Path) -> tuple[dict[str, Any], int]:
    out = io.StringIO()
    status = explain.run([str(log)], as_json=True, out=out, stdin=io.BytesIO())
    loaded: dict[str, Any] = json.loads(out.getvalue())
    return loaded, status


def expectation(case: Path) -> tuple[dict[str, Any], Path]:
    loaded: dict[str, Any] = json.loads(case.read_text())
    return loaded, case.with_name(case.name.removesuffix(".expect.json") + ".log")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.removesuffix(".expect.json"))
def test_the_answer_is_the_expected_one(case: Path) -> None:
    expect, log = expectation(case)
    said, status = answer(log)
    soft = set(expect.get("from_context", ()))
    for key in ("outcome", "phase", "failure_class"):
        assert said[key] == expect[key] or (key in soft and said[key] in {"unknown", None}), key
    for name, want in expect["facts"].items():
        assert name in said["facts"], name
        got = said["facts"][name]
        if isinstance(want["value"], (bool, str)):
            assert got == want["value"], name
        else:
            assert abs(got - want["value"]) <= want.get("tolerance", 0) + 1e-9, name
    for name in expect.get("absent", ()):
        assert name not in said["facts"], name
    failed = expect["failure_class"] is not None
    assert status == (1 if failed else 0 if said["phase"] == "ready" else 2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.removesuffix(".expect.json"))
def test_every_answer_shows_its_lines(case: Path) -> None:
    expect, log = expectation(case)
    said, _ = answer(log)
    lines = log.read_text().split("\n")
    evidence = [*said["evidence"]["verdict"], *said["evidence"]["facts"].values()]
    assert set(said["evidence"]["facts"]) == set(said["facts"])
    assert said["evidence"]["verdict"]
    for shown in evidence:
        assert shown["text"] in lines[shown["line"] - 1]
    for name in expect["facts"]:
        shown = said["evidence"]["facts"][name]
        number = said["facts"][name]
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            assert re.search(r"\d", shown["text"]), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.removesuffix(".expect.json"))
def test_what_an_expert_calls_useless_is_never_said_to_help(case: Path) -> None:
    expect, log = expectation(case)
    said, _ = answer(log)
    lever = expect["lever"] or {}
    helping = {(each["name"], each["direction"]) for each in said["levers"] if each["effect"] == "helps"}
    useless = lever.get("useless") or ""
    if "max_model_len" in useless or "context" in useless:
        assert ("max_model_len", "lower") not in helping
        assert ("context size", "lower") not in helping
    if "KV bytes" in useless:
        assert not any(name == "kv_cache_memory_bytes" for name, _ in helping)
    if "raising utilization" in useless:
        assert ("gpu_memory_utilization", "raise") not in helping
    if "headroom up" in useless:
        assert ("VLLM_NEURON_RESERVED_HEADROOM_GIB", "raise") not in helping
    if "enforce-eager" in useless or "eager mode" in useless:
        assert not any(name == "enforce_eager" for name, _ in helping)
    if "scratchpad" in useless:
        assert not any("scratchpad" in name for name, _ in helping)
    if expect["failure_class"] is not None:
        assert helping


def test_ranks_are_all_there_and_named_as_the_engine_names_them() -> None:
    said, _ = answer(DATA / "cases" / "vllm-backport-34.log")
    assert set(said["ranks"]["consumed_bytes"]) == {"Worker_PP1_TP3", "Worker_PP1_TP2"}
