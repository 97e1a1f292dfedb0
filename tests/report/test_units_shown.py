"""One unit for every size of a finding: sentence, rows, table, chart and what may be deployed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_kvbudget.report.html import write_finding_page
from pytest_kvbudget.report.text import finding_lines
from pytest_kvbudget.search import sweep_sentences
from pytest_kvbudget.search.model import Axis, Finding
from pytest_kvbudget.search.noise import Noise
from pytest_kvbudget.search.sentences import of
from pytest_kvbudget.search.sweep import Sweep
from pytest_kvbudget.units import GIB, MIB
from pytest_kvbudget.verdict import FindingKind
from tests.report.reading import read_page, table_rows
from tests.report.sweeping import HEADROOM, changed, device, sweep_record, swept, write_sweep

SIZE = re.compile(r"([0-9][0-9,.]*) (GiB|MiB|KiB|B)\b")


@pytest.mark.parametrize(
    ("step", "fine", "start", "unit"),
    [
        (GIB, None, 4 * GIB, "GiB"),
        (256 * MIB, None, 4 * GIB, "GiB"),  # two decimals write a quarter
        (64 * MIB, None, 4 * GIB, "MiB"),
        (GIB, 64 * MIB, 4 * GIB, "MiB"),
    ],
)
def test_every_size_of_a_finding_has_the_grids_unit(
    tmp_path: Path, step: int, fine: int | None, start: int, unit: str
) -> None:
    low, noise = 3 * GIB - 10 * MIB, Noise(sigma_bytes=8 * MIB, source="archive")
    search = Sweep(HEADROOM, lowest=0, highest=12 * GIB, step=step, fine_step=fine, start=start, noise=noise)
    found, attempts = swept(search, device(low, 99 * GIB))
    found = changed(found, deploy_value=(found.value or 0) + 25_000_000)
    assert {name for _, name in SIZE.findall(found.sentence)} == {unit}

    rows = table_rows(read_page(write_finding_page(write_sweep(tmp_path, found, attempts))), "boots")
    assert {row[1].split()[-1] for row in rows} == {unit}

    lines = finding_lines(sweep_record(found), attempts)
    assert {line.split("  ")[2].split()[-1] for line in lines[1 : 1 + len(attempts)]} == {unit}
    deploy = next(line for line in lines if line.startswith("  deploy "))
    number, name = SIZE.findall(deploy)[0]
    assert name == unit
    factor = GIB if unit == "GiB" else MIB
    beyond = float(number.replace(",", "")) * factor - (found.value or 0)
    assert 25_000_000 <= beyond < 25_000_000 + 0.011 * factor


def test_a_value_to_deploy_is_rounded_away_from_the_edge_in_the_sentence_too() -> None:
    """3 GiB and 192 MiB are 3.1875 GiB: 3.18 would be nearer to the edge than three sigma."""
    search = Sweep(HEADROOM, lowest=0, highest=36 * GIB, start=4 * GIB, noise=Noise(sigma_bytes=64 * MIB))
    found, _ = swept(search, device(2.5 * GIB, 99 * GIB))
    assert found.value == 3 * GIB
    said = sweep_sentences.of(search.knob, changed(found, deploy_value=3_264 * MIB), "")
    assert "deploy 3.19 GiB, three sigma away" in said
    assert "MiB" not in said


def test_a_ladder_over_bytes_counts_all_its_rungs_in_one_unit() -> None:
    axis = Axis(name="kv_cache_memory_bytes", floor=GIB, ceiling=4 * GIB, quantum=64 * MIB)
    finding = Finding(
        kind=FindingKind.PROVEN, axis=axis, value=3 * GIB, failed_at=3 * GIB + 64 * MIB, boots=2, sentence="",
        deploy_value=3 * GIB - 99_996_402,
    )  # fmt: skip
    said = of(finding, "")
    assert said.startswith("kv_cache_memory_bytes 3,072.00 MiB passed and 3,136.00 MiB failed")
    # 3,072 MiB less 95.364 MiB
    assert "deploy 2,976.63 MiB, three sigma below" in said


def test_a_raised_quantum_leaves_the_unit_of_what_was_booted_before() -> None:
    axis = Axis(name="kv_cache_memory_bytes", floor=GIB, ceiling=4 * GIB, quantum=GIB, fine=MIB)
    assert axis.show(1_925 * MIB) == "1,925.00 MiB"
    assert axis.show(2 * GIB) == "2,048.00 MiB"


@pytest.mark.parametrize("kind", [FindingKind.UNDECIDED, FindingKind.FLAKY, FindingKind.ERROR])
def test_a_sentence_without_a_proof_names_nothing_to_deploy(kind: FindingKind) -> None:
    axis = Axis(name="max_model_len", floor=4096, ceiling=65_536, quantum=4096)
    finding = Finding(
        kind=kind, axis=axis, value=49_152, failed_at=53_248, boots=2, sentence="", deploy_value=45_000
    )  # fmt: skip
    assert "deploy" not in of(finding, "something stopped it")
