"""``kvbudget plan`` as a user runs it."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import pytest

from pytest_kvbudget import plan
from pytest_kvbudget.config import built_in
from pytest_kvbudget.units import GIB

LADDER = (
    "--policy", "rdna4", "--total", "34208743424", "--overhead", "5.25 GiB", "--slot", "2457600", "--graphs", "6",
    "--non-expert-and-kv", "8.199 GiB", "--utilization", "0.98", "--graph-charge", "256+52",
    "--row", "--utilization 0.982 --graph-charge 256+12", "--row", "--graph-charge 0+12",
)  # fmt: skip


def run(*arguments: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser(prog="kvbudget plan")
    plan.add_arguments(parser)
    out = io.StringIO()
    return plan.run(parser.parse_args(arguments), out=out), out.getvalue()


def document(*arguments: str) -> tuple[int, dict[str, Any]]:
    status, text = run(*arguments, "--json")
    return status, json.loads(text)


def neuron(platform: str, lnc: int, weights: str, *more: str) -> tuple[int, dict[str, Any]]:
    return document("--policy", "neuron", "--platform", platform, "--lnc", str(lnc), "--weights", weights, *more)


@pytest.mark.parametrize(
    ("target", "more", "available", "status"),
    [
        (("trn3", 2, "8 GiB"), ("--headroom", "4 GiB"), 25769803776, 0),
        (("trn3", 2, "8 GiB"), ("--headroom", "4.5 GiB"), 25232932864, 0),
        (("trn3", 2, "8 GiB"), ("--utilization", "0.9"), 10436770529, 0),
        (("trn3", 1, "8 GiB"), ("--gpu-memory-utilization", "0.9"), 5218385264, 0),
        (("trn3", 1, "16 GiB"), ("--utilization", "0.9"), 214748364, 1),
        (("trn2", 1, "8 GiB"), ("--headroom", "3 GiB"), 1073741824, 0),
        (("trn2", 1, "8 GiB"), ("--headroom", "3.000000001 GiB"), 1073741823, 1),
        (("trn2", 1, "8 GiB"), ("--headroom", "3.000000001"), 1073741823, 1),  # the engine's own unit
    ],
)
def test_neuron_figures(target: tuple[str, int, str], more: tuple[str, ...], available: int, status: int) -> None:
    found, plan_document = neuron(*target, *more)
    assert plan_document["available_bytes"] == available
    assert plan_document["refused"] is bool(status)
    assert found == status


@pytest.mark.parametrize(("platform", "lnc", "most_gib"), [("trn3", 2, 27), ("trn3", 1, 9), ("trn2", 1, 3)])
def test_maximum_headroom(platform: str, lnc: int, most_gib: int) -> None:
    _, plan_document = neuron(platform, lnc, "8 GiB", "--headroom", "3 GiB")
    assert plan_document["maximum_headroom_bytes"] == most_gib * GIB


def test_ladder_rows_from_one_set_of_inputs() -> None:
    status, first = document(*LADDER)
    assert status == 0
    assert [row["slots"] for row in first["rows"]] == [7522, 7653, 7762]
    assert first["slots"] == 7522
    assert first["rows"][2]["gained_bytes"] == GIB // 4
    assert first["rows"][2]["gained_slots"] == 109
    assert [round(row["left_bytes"] / GIB, 2) for row in first["rows"]] == [17.22, 17.52, 17.77]


def test_full_utilization_is_refused() -> None:
    status, first = document(*LADDER, "--row", "--utilization 1.0")
    assert status == 1
    assert first["rows"][3]["refused"] is True
    assert first["rows"][3]["refusals"][0]["law"] == "utilization"
    assert not any(row["refused"] for row in first["rows"][:3])


def test_text_shows_terms_sum_and_both_policies() -> None:
    status, text = run(
        "--policy", "neuron", "--platform", "trn3", "--lnc", "2", "--weights", "8 GiB", "--utilization", "0.9",
    )  # fmt: skip
    assert status == 0
    assert "HBM stack" in text
    assert "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION" in text
    assert "10,436,770,529 bytes" in text
    assert "headroom policy beside it: at most 30,064,771,072 bytes" in text
    assert "only after a boot" in text


def test_switching_down_is_not_warned_about() -> None:
    _, plan_document = neuron("trn3", 2, "8 GiB", "--headroom", "4 GiB", "--utilization", "0.9")
    assert plan_document["other_policy"]["available_bytes"] == 10436770529
    assert plan_document["other_policy"]["upper_bound"] is False
    assert plan_document["warnings"] == []


def test_terms_sum_in_json() -> None:
    _, plan_document = neuron("trn3", 1, "16 GiB", "--utilization", "0.9")
    signed = [term["size_bytes"] * (1 if term["role"] == "gives" else -1) for term in plan_document["terms"]]
    assert sum(signed) == plan_document["left_bytes"] == 214748364
    assert all({"reach", "how", "law", "provenance"} <= set(term) for term in plan_document["terms"])


def test_release_without_lnc_division() -> None:
    _, old = neuron("trn2", 1, "5 GiB", "--utilization", "0.9", "--release", "0.24.0.1.1.0")
    assert old["available_bytes"] == 6957847019
    assert any("LNC 2" in warning for warning in old["warnings"])


def test_environment_selects_the_policy() -> None:
    _, plan_document = neuron("trn3", 2, "8 GiB", "--env", "VLLM_NEURON_RESERVED_HEADROOM_GIB=0")
    assert plan_document["mode"] == "headroom"
    assert plan_document["available_bytes"] == 28 * GIB
    status, bad = neuron("trn3", 2, "8 GiB", "--utilization", "0.9", "--cap-fraction", "nan")
    assert status == 1
    assert bad["available_bytes"] is None
    assert bad["refusals"][0]["law"] == "environment"


def test_blocks_and_parity_with_a_device_that_reports_less() -> None:
    _, plan_document = neuron(
        "trn2", 2, "5 GiB", "--utilization", "0.9", "--kv-layers", "32", "--kv-heads", "1", "--head-size", "128",
    )  # fmt: skip
    assert (plan_document["blocks"], plan_document["kv_tokens"]) == (13271, 424_672)
    _, device = neuron(
        "trn2", 2, "5 GiB", "--utilization", "0.9", "--kv-layers", "32", "--kv-heads", "1", "--head-size", "128",
        "--device-stack", str(24 * GIB - 3 * 2**20),
    )  # fmt: skip
    assert device["parity"]["equal"] is False
    assert any("--num-gpu-blocks-override" in note for note in device["notes"])


def test_cpu_inference_plan() -> None:
    status, plan_document = document(
        "--policy", "neuron", "--host-available", "68719489081", "--local-workers", "4", "--utilization", "0.9"
    )
    assert status == 0
    assert plan_document["available_bytes"] == 4638565512


def test_vllm_plan_prices_a_window(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "hidden_size": 256,
                "torch_dtype": "bfloat16",
            }
        )
    )
    _, plan_document = document(
        "--policy", "vllm", "--kv-cache-memory-bytes", "50 MiB", "--model-config", str(config), "--max-model-len",
        "131072", "--block-size", "128",
    )  # fmt: skip
    assert plan_document["need_bytes"] == 134_217_728
    assert "does not fit: 0.39x" in plan_document["notes"][0]


VLLM = ("--policy", "vllm", "--total", "80 GiB", "--weights", "40 GiB", "--utilization", "0.9")


def test_what_nobody_gave_is_no_zero() -> None:
    status, text = run(*VLLM)
    assert status == 0
    assert "at most 32.00 GiB left for the KV cache" in text
    assert " 0.00 GiB" not in text
    assert "peak activation             not given" in text
    assert "not given, and so not taken off: peak activation (--activation), CUDA graphs (--graph-estimate)" in text
    _, found = document(*VLLM, "--activation", "2 GiB")
    assert (found["upper_bound"], found["left_bytes"]) == (True, 30 * GIB)
    assert [term["name"] for term in found["terms"]] == ["requested", "weights and non-torch", "peak activation"]
    _, found = document(*VLLM, "--activation", "2 GiB", "--graph-estimate", "1 GiB")
    assert ("upper_bound" in found, found["left_bytes"]) == (False, 29 * GIB)
    # from 0.27 on the peak that is printed has the graphs in it
    _, found = document(*VLLM, "--activation", "2 GiB", "--release", "0.27.0")
    assert ("upper_bound" in found, found["left_bytes"]) == (False, 30 * GIB)


def test_vllm_release_gives_the_default_utilization() -> None:
    _, plan_document = document("--policy", "vllm", "--release", "0.32.0", "--total", "100 GiB", "--weights", "50 GiB")
    assert plan_document["available_bytes"] == 42 * GIB


def test_a_target_brings_shape_and_environment(tmp_path: Path) -> None:
    config = tmp_path / "kvbudget.toml"
    config.write_text(
        "[target.trn]\nbackend = 'neuron'\n[target.trn.env]\nVLLM_NEURON_RESERVED_HEADROOM_GIB = '4'\n"
        "NEURON_PLATFORM_TARGET_OVERRIDE = 'trn3'\n[target.trn.shape]\nmodel = 'm'\nlnc = 1\n"
    )
    status, plan_document = document("--target", "trn", "--config", str(config), "--weights", "8 GiB")
    assert status == 0
    assert plan_document["available_bytes"] == 6442450944  # H2


def test_the_simulated_target_is_planned_without_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, plan_document = document("--target", "mock-r9700")
    assert status == 0
    assert plan_document["policy"] == "vllm"  # nothing is offloaded there
    target = built_in(tmp_path).pick(None).target
    assert target.mock is not None
    step_bytes = target.mock.activation_base + 2048 * target.mock.activation_per_batched_token
    taken_bytes = target.mock.weights + target.mock.non_torch + step_bytes
    utilization = target.shape.gpu_memory_utilization or 0
    assert plan_document["available_bytes"] == pytest.approx(34_208_743_424 * utilization - taken_bytes, abs=3)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "--policy nor --target"),
        (("--policy", "neuron", "--weights", "8 GiB", "--utilization", "0.9"), "--platform"),
        (("--policy", "neuron", "--platform", "trn3", "--utilization", "0.9"), "--weights"),
        (("--policy", "neuron", "--platform", "trn3", "--weights", "8 GiB"), "0.9, 0.92"),
        (("--policy", "neuron", "--platform", "gpu", "--weights", "8 GiB"), "'gpu'"),
        (("--policy", "rdna4", "--utilization", "0.9"), "--graphs"),
        (("--policy", "rdna4", "--utilization", "0.9", "--graphs", "6"), "--max-model-len"),
        (
            ("--policy", "rdna4", "--utilization", "95", "--graphs", "6"),
            "is 95.0; expected a number above 0 and at most 1",
        ),
        (
            ("--policy", "rdna4"),
            "--utilization is not given: read it from the deploy, its default differs by release; --graphs",
        ),
        (
            ("--policy", "rdna4"),
            "--max-model-len is not given: the KV reserve is priced for one window; --weights is not",
        ),
        (("--policy", "vllm"), "--total is not given: the device's memory; --weights is not given"),
        (("--policy", "neuron"), "it sizes the HBM; --weights is not given"),
        (("--policy", "vllm"), "--release"),
        (("--target", "nobody", "--config", "/nonexistent/kvbudget.toml"), "cannot be read"),
        (("--policy", "neuron", "--env", "X"), "NAME=VALUE"),
        (("--policy", "neuron", "--env", "VLLM_NEURON_CPU_MODE=1", "--utilization", "0.9"), "--host-available"),
    ],
)
def test_what_is_missing_is_named(arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(*arguments)
    assert (status, text) == (2, "")
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--headroom", "4294967296"), "4294967296 B"),
        (("--headroom", "4 GB"), "4 GiB"),
        (("--weights", "8G"), "8 GiB"),
        (("--graph-charge", "a+b"), "BASE"),
        (("--overhead", "much"), "not a size"),
    ],
)
def test_values_that_cannot_be_read(arguments: tuple[str, str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run("--policy", "neuron", *arguments)
    assert left.value.code == 2
    assert named in capsys.readouterr().err


def test_footprint_with_a_pinned_pool() -> None:
    _, plan_document = document(
        "--policy", "rdna4", "--non-expert", "6.34 GiB", "--max-model-len", "200704", "--graphs", "6", "--utilization",
        "0.982", "--overhead", "precise", "--graph-charge", "0+12", "--kv-cache-memory-bytes", "3166500000",
        "--free-at-init", "31.29 GiB",
    )  # fmt: skip
    names = [term["name"] for term in plan_document["footprint"]["terms"]]
    assert "pinned pool" in names
    assert "pinned pool" not in [term["name"] for term in plan_document["terms"]]
    assert plan_document["largest_utilization"] == 0.982
