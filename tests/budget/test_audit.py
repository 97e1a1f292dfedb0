"""The audit of a public plan table (65,536 tokens, utilization 0.90, 8192 batched tokens), figures as printed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pytest_kvbudget.budget.audit import Audit, Observed, audit, closure
from pytest_kvbudget.budget.levers import Carry, Figure, LeverWorth, overhead_mode, slot_price
from pytest_kvbudget.budget.rdna4 import OverheadMode
from pytest_kvbudget.budget.render import audit_lines
from pytest_kvbudget.budget.utilization import FreeAtInit
from pytest_kvbudget.units import GIB, MIB

CENT = 0.01 * GIB
TOTAL = 34_208_743_424


def printed(gib: float, digits: int = 2) -> Figure:
    return Figure(round(gib * GIB), 0.5 * 10**-digits * GIB)


PUBLIC = Observed(
    rows={
        "budget": printed(28.67),
        "non-expert weights": printed(4.47),
        "KV reserve": printed(0.64),
        "CUDA graphs": printed(0.40),
        "runtime overhead": printed(8.48),
        "expert cache": printed(14.68),
    },
    overhead_measured=printed(6.38),
    resident=printed(1.87),
    resident_layers=3,
    registry_bytes_per_token=9190,
    kv_tokens=79_953,
    max_model_len=65_536,
)


def audited(**changes: Any) -> Audit:
    return audit(msgspec.structs.replace(PUBLIC, **changes))


def lever(result: Audit, name: str) -> LeverWorth:
    return next(one for one in result.levers if one.name.startswith(name))


def test_the_sum_closes() -> None:
    closed = audited().closure
    assert closed is not None
    assert closed.closes
    assert abs(closed.residual_bytes) < 0.005 * GIB
    wrong = {**PUBLIC.rows, "CUDA graphs": printed(0.55)}
    opened = closure(wrong)
    assert opened is not None
    assert not opened.closes
    assert closure({"budget": printed(28.67)}) is None


def test_overhead_slack_is_not_deployable() -> None:
    slack = lever(audited(), "runtime overhead slack")
    assert slack.claim == "image edit"
    assert slack.worth_bytes == pytest.approx(2.10 * GIB, abs=CENT)
    assert "not deployable" in slack.sentence
    assert lever(audited(overhead_measured=None), "runtime overhead slack").worth_bytes is None


def test_precise_memory_is_harmful_there() -> None:
    precise = lever(audited(), "--expert-precise-memory")
    assert precise.claim == "harmful"
    assert "6.13 GiB" in precise.sentence
    assert "6.38 GiB" in precise.sentence
    unmeasured = lever(audited(overhead_measured=None), "--expert-precise-memory")
    assert unmeasured.claim == "unverified"
    assert "not measured" in unmeasured.sentence


def test_planned_overhead_tells_its_constant() -> None:
    assert overhead_mode(printed(8.48), None, precise=None) == (OverheadMode.DEFAULT, 8192)
    assert overhead_mode(printed(5.25), None, precise=None) == (OverheadMode.PRECISE, 4096)
    assert overhead_mode(printed(6.25), None, precise=False) == (OverheadMode.GLM, 4096)
    assert overhead_mode(printed(7.0), None, precise=None) is None
    already = lever(audited(rows={**PUBLIC.rows, "runtime overhead": printed(5.25)}), "--expert-precise-memory")
    assert already.claim == "spent"


def test_the_price_of_a_slot_comes_from_this_plan() -> None:
    slot = audited().slot
    assert slot is not None
    assert slot.slot_bytes / MIB == pytest.approx(1.245, abs=0.004)
    assert "resident-layer" in slot.source
    assert abs(slot.slots_per_gib - 437) > 300  # another model's
    assert audited(resident=None).slot is None


def test_the_price_from_a_printed_slot_count_brackets_the_truth() -> None:
    # row G: 17.77 GiB and 7,762 slots of 2,457,600 bytes
    slot = slot_price(slots=7762, expert_cache=printed(17.77), resident=None, resident_layers=None)
    assert slot is not None
    assert abs(slot.slot_bytes - 2_457_600) <= slot.precision_bytes


def test_worth_of_utilization_needs_total_and_utilization() -> None:
    unknown = lever(audited(), "--gpu-memory-utilization")
    assert unknown.worth_bytes is None
    assert unknown.worth_slots is None
    assert "until the card's total and the utilization" in unknown.sentence
    known = lever(audited(total_bytes=TOTAL, utilization=0.90), "--gpu-memory-utilization")
    assert "0.3186 GiB per 0.01" in known.sentence
    assert "ceiling is unknown" in known.sentence
    assert known.worth_slots == pytest.approx(262, abs=1)  # 0.3186 GiB of 1.245 MiB
    assert known.worth_tokens == pytest.approx(37_224, abs=5)  # 342,087,434 bytes at 9190
    mismatched = lever(audited(total_bytes=TOTAL, utilization=0.98), "--gpu-memory-utilization")
    assert "is not the budget printed" in mismatched.sentence


def test_worth_of_utilization_to_its_ceiling() -> None:
    free = FreeAtInit(free_bytes=int(31.29 * GIB), total_bytes=TOTAL, source="refusal line")
    low = lever(audited(total_bytes=TOTAL, utilization=0.90, free=free), "--gpu-memory-utilization")
    assert low.worth_bytes == pytest.approx(0.082 * TOTAL, abs=1)
    spent = lever(audited(total_bytes=TOTAL, utilization=0.982, free=free), "--gpu-memory-utilization")
    assert (spent.claim, spent.worth_bytes) == ("spent", 0)


def test_graph_charge_without_a_capture_is_not_measured() -> None:
    charge = lever(audited(), "VLLM_CUDAGRAPH")
    assert charge.worth_bytes is None
    assert "not measured" in charge.sentence
    assert "plan row" in charge.sentence


def test_graph_charge_against_captures() -> None:
    over = lever(audited(graph_captured={"TP0": printed(0.31), "TP1": printed(0.17)}), "VLLM_CUDAGRAPH")
    assert over.worth_bytes == pytest.approx(0.09 * GIB, abs=CENT)
    assert "TP0" in over.sentence
    under = lever(audited(graph_estimate=printed(0.07), graph_captured={"TP0": printed(0.31)}), "VLLM_CUDAGRAPH")
    assert under.worth_bytes == pytest.approx(-0.24 * GIB, abs=CENT)
    assert "must rise" in under.sentence
    inside = lever(audited(graph_captured={"TP0": printed(-0.06)}), "VLLM_CUDAGRAPH")
    assert inside.worth_bytes == pytest.approx(0.40 * GIB, abs=CENT)


@pytest.mark.parametrize(
    ("carry", "claim"),
    [
        (Carry(), "unverified"),
        (Carry(image_reads=True), "unverified"),
        (Carry(image_reads=True, carries=True), "reachable"),
        (Carry(image_reads=True, carries=False), "unverified"),
        (Carry(image_reads=False, carries=True), "image edit"),
    ],
)
def test_a_lever_is_claimed_only_where_it_was_seen_to_be_carried(carry: Carry, claim: str) -> None:
    result = audited(carried={"VLLM_CUDAGRAPH_MEM_PER_GRAPH_MB": carry})
    assert lever(result, "VLLM_CUDAGRAPH").claim == claim


def test_reserve_against_measured_price() -> None:
    assert lever(audited(), "KV reserve").worth_bytes is None
    over = lever(audited(measured_bytes_per_token=7_701), "KV reserve")
    assert over.claim == "image edit"
    assert over.worth_bytes == pytest.approx(0.64 * GIB - 7_701 * 65_536, abs=2)
    short = lever(audited(measured_bytes_per_token=11_597), "KV reserve")
    assert "no shorter window" in short.sentence


def test_verification_says_what_was_not_read() -> None:
    states = {check.name: check.state for check in audited().checks}
    assert states == {
        "plan lines": "ok",
        "size against ask": "unknown",
        "estimate against capture": "not measured",
        "high-water per card": "not measured",
        "restart count": "not measured",
        "chat completion from a peer": "unknown",
    }
    peer = next(check for check in audited().checks if check.name.startswith("chat"))
    assert "not an outage" in peer.sentence


def test_verification_of_a_good_and_of_a_bad_deploy() -> None:
    good = audited(
        windows=1, graph_captured={"TP0": printed(0.31)}, total_bytes=TOTAL, restarts=0, peer_answered=True,
        high_water_bytes={"card0": TOTAL - int(0.89 * GIB), "card1": TOTAL - GIB},
    )  # fmt: skip
    assert {check.state for check in good.checks} == {"ok"}
    assert good.free_memory.startswith("0.89 GiB were never used on card0")
    assert "not arena" in good.free_memory
    bad = audited(
        windows=2, graph_captured={"TP0": printed(0.55)}, total_bytes=TOTAL, restarts=3, peer_answered=False,
        rows={**PUBLIC.rows, "budget": printed(29.0)},
    )  # fmt: skip
    assert [check.state for check in bad.checks] == ["wrong", "wrong", "wrong", "not measured", "wrong", "wrong"]


def test_nothing_read_gives_nothing() -> None:
    empty = audit(Observed())
    assert empty.rows == ()
    assert empty.slot is None
    assert empty.closure is None
    assert len(empty.missing) == 6
    assert all(one.worth_bytes is None for one in empty.levers)


def test_text_for_people() -> None:
    text = "\n".join(audit_lines(audited(total_bytes=TOTAL, utilization=0.90)))
    assert "the sum closes" in text
    assert "1.245 MiB" in text or "1.244 MiB" in text
    assert "not deployable" in text
    assert "[harmful]" in text
    assert "0.3186 GiB per 0.01" in text
    assert "price of a slot: not measured" in "\n".join(audit_lines(audit(Observed())))
