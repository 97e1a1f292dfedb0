"""What earlier runs tell a search: where to begin, what boots differ by, what being cold costs, how long boots take."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvbudget import lessons
from pytest_kvbudget.engine.survival import RequestResult, SurvivalResult
from pytest_kvbudget.history import History
from pytest_kvbudget.records import Timings, UseRecord
from pytest_kvbudget.search.model import Axis, Prior
from pytest_kvbudget.search.noise import Noise
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import GIB, MIB
from pytest_kvbudget.verdict import FindingKind, Verdict
from tests.archives import AXIS, BASE, IDENTITY, TEST, Archive, identity

OLD, NEW = "20260101T000000Z-aaaaaa", "20260102T000000Z-bbbbbb"
LIKE = identity(shape="another rung", asked="another question")
FREE = (500 * MIB, 510 * MIB, 490 * MIB, 505 * MIB, 495 * MIB)


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "runs")


def prior(archive: Archive, **changes: object) -> Prior | None:
    asked = {"like": LIKE, "axis": AXIS, "base": BASE, "pool": "fixed", "windows": 1, **changes}
    return lessons.prior(History.read(archive.root), **asked)  # type: ignore[arg-type]


def sigma(archive: Archive, base: Shape = BASE) -> Noise | None:
    return lessons.sigma(History.read(archive.root), LIKE, base=base)


def cold_extra(archive: Archive) -> float | None:
    return lessons.cold_extra(History.read(archive.root), LIKE, base=BASE)


# -- where to begin


def test_the_boundary_is_between_winner_and_failure(archive: Archive) -> None:
    archive.finding(archive.boot(), value=16_384, failed_at=20_480)
    assert prior(archive) == Prior(value=18_432, relative=0.01, source="archive")


def test_a_ceiling_that_passed_is_below_the_boundary(archive: Archive) -> None:
    archive.finding(archive.boot(), value=65_536, failed_at=None, kind=FindingKind.CEILING_REACHED)
    found = prior(archive)
    assert found is not None
    assert found.value == 65_536 + 4096


def test_the_newest_finding_counts(archive: Archive) -> None:
    archive.finding(archive.boot(run=NEW), run=NEW, value=32_768, failed_at=36_864)
    archive.finding(archive.boot(run=OLD), run=OLD)
    assert prior(archive) == Prior(value=34_816, relative=0.01, source="archive")


@pytest.mark.parametrize("part", ["engine", "driver", "devices", "host"])
def test_another_engine_or_device_is_less_sure(archive: Archive, part: str) -> None:
    archive.finding(archive.boot())
    changed = identity(**{part: ("gpu-1",) if part == "devices" else "other"})
    assert prior(archive, like=changed) == Prior(value=18_432, relative=0.03, source="archive")


def test_an_engine_that_is_not_known_is_another(archive: Archive) -> None:
    archive.finding(archive.boot(identity=identity(engine=None)))
    found = prior(archive, like=identity(engine=None))
    assert found is not None
    assert found.relative == 0.03


def test_another_release_of_this_plugin_is_as_sure(archive: Archive) -> None:
    archive.finding(archive.boot(identity=identity(plugin_version="0.0.1", schema_version=1)))
    assert prior(archive) == Prior(value=18_432, relative=0.01, source="archive")


@pytest.mark.parametrize(
    "changes",
    [
        {"like": identity(target="other")},
        {"axis": Axis(name="max_num_seqs", floor=1, ceiling=8, quantum=1)},
        {"axis": Axis(name="max_model_len", floor=1, ceiling=8, quantum=1, scale=10)},
        {"base": Shape(model="other")},
        {"base": BASE.merged(max_num_seqs=2)},
        {"pool": "scaled"},
        {"windows": 2},
    ],
)
def test_another_question_says_nothing(archive: Archive, changes: dict[str, object]) -> None:
    archive.finding(archive.boot())
    assert prior(archive, **changes) is None


@pytest.mark.parametrize("kind", sorted(set(FindingKind) - {FindingKind.PROVEN, FindingKind.CEILING_REACHED}))
def test_only_a_proof_says_where(archive: Archive, kind: FindingKind) -> None:
    archive.finding(archive.boot(), kind=kind)
    assert prior(archive) is None


def test_a_finding_whose_boots_are_gone_says_nothing(archive: Archive) -> None:
    path = archive.boot()
    archive.finding(path)
    path.unlink()
    assert prior(archive) is None


def test_the_base_may_stand_anywhere_on_the_axis_unless_the_pool_is_scaled_from_there(archive: Archive) -> None:
    pinned = BASE.merged(max_model_len=8192, kv_cache_memory_bytes=GIB)
    for pool in ("fixed", "scaled"):
        archive.finding(archive.boot(), shape=pinned, pool=pool)
    moved = pinned.merged(max_model_len=4096)
    assert prior(archive, base=moved) is not None
    assert prior(archive, base=pinned, pool="scaled") is not None
    assert prior(archive, base=moved, pool="scaled") is None


def test_secrets_of_the_base_are_not_needed_to_know_it(archive: Archive) -> None:
    base = BASE.merged(env={"API_KEY": "abc"})
    archive.finding(archive.boot(), shape=base.redacted())
    assert prior(archive, base=base) is not None


# -- what the same boot differs by


def test_five_boots_of_one_identity_have_a_deviation(archive: Archive) -> None:
    for free in FREE[:4]:
        archive.boot(free_bytes=free)
    assert sigma(archive) is None
    archive.boot(free_bytes=FREE[4], verdict=Verdict.MARGINAL)
    assert sigma(archive) == Noise(sigma_bytes=stdev(FREE), source="archive")


def test_where_the_pool_takes_what_is_left_its_size_tells(archive: Archive) -> None:
    """Then what is free on the device is what utilization leaves, the same every time."""
    for size in FREE:
        archive.boot(free_bytes=GIB, available_bytes=size)
    found = sigma(archive)
    assert found is not None
    assert found.sigma_bytes == pytest.approx(math.hypot(stdev(FREE), 1024 / math.sqrt(3)))


def test_a_pinned_pool_is_no_finding(archive: Archive) -> None:
    shape = BASE.merged(kv_cache_memory_bytes=GIB)
    for size in FREE:
        archive.boot(shape=shape, available_bytes=size)
    assert sigma(archive) is None


def test_what_is_printed_alike_may_differ_below_its_last_digit(archive: Archive) -> None:
    for _ in FREE:
        archive.boot(available_bytes=GIB)
    found = sigma(archive)
    assert found is not None
    assert found.sigma_bytes == pytest.approx(1024 / math.sqrt(3))


@pytest.mark.parametrize(
    "last",
    [
        {"warm": False},
        {"device_set": "other"},
        {"identity": identity(shape="8192")},
        {"identity": identity(engine="vllm 0.31.0")},
        {"identity": identity(engine=None)},
        {"identity": None},
        {"verdict": Verdict.FAIL},
        {"verdict": Verdict.UNKNOWN},
        {"settled": False},
        {"shape": Shape(model="moe", max_model_len=4096, tensor_parallel_size=2)},
    ],
)
def test_another_kind_of_boot_is_no_repeat(archive: Archive, last: dict[str, Any]) -> None:
    for free in FREE[:4]:
        archive.boot(free_bytes=free)
    archive.boot(free_bytes=FREE[4], **last)
    assert sigma(archive) is None


def test_what_the_test_asked_does_not_matter(archive: Archive) -> None:
    for number, free in enumerate(FREE):
        archive.boot(free_bytes=free, identity=identity(asked=str(number)))
    assert sigma(archive) is not None


def test_the_identity_with_most_boots_counts(archive: Archive) -> None:
    for free in FREE:
        archive.boot(free_bytes=100 * free, length=8192)
    for free in (*FREE, FREE[0]):
        archive.boot(free_bytes=free)
    assert sigma(archive) == Noise(sigma_bytes=stdev((*FREE, FREE[0])), source="archive")


def test_another_model_says_nothing_about_this_one(archive: Archive) -> None:
    for free in FREE:
        archive.boot(free_bytes=free)
    assert sigma(archive, Shape(model="other")) is None


# -- what being cold costs


def test_cold_and_warm_boots_of_one_shape_are_compared(archive: Archive) -> None:
    archive.boot(free_bytes=400 * MIB, warm=False)
    assert cold_extra(archive) is None
    archive.boot(free_bytes=500 * MIB, warm=True, length=8192)
    assert cold_extra(archive) is None, "another shape"
    archive.boot(free_bytes=500 * MIB, warm=True)
    assert cold_extra(archive) == 100 * MIB


def test_the_largest_difference_counts_and_none_is_negative(archive: Archive) -> None:
    archive.boot(free_bytes=500 * MIB, warm=False)
    archive.boot(free_bytes=490 * MIB, warm=True)
    assert cold_extra(archive) == 0
    for available, warm in ((100, False), (300, True), (320, True), (310, True)):
        archive.boot(available_bytes=available * MIB, warm=warm, length=8192)
    assert cold_extra(archive) == 210 * MIB


@settings(max_examples=30, deadline=None)
@given(cold=st.lists(st.integers(1, 2**40), min_size=1, max_size=3), extra=st.integers(0, 2**40))
def test_a_constant_extra_is_found(tmp_path_factory: pytest.TempPathFactory, cold: list[int], extra: int) -> None:
    archive = Archive(tmp_path_factory.mktemp("runs"))
    for free in cold:
        archive.boot(free_bytes=free, warm=False)
        archive.boot(free_bytes=free + extra, warm=True)
    assert cold_extra(archive) == extra


# -- how long boots take


def request(seconds: float) -> RequestResult:
    return RequestResult(kind="generation", ended="done", prompt_tokens=1, max_tokens=1, seconds=seconds)


def test_minutes_are_means_without_waits(archive: Archive) -> None:
    archive.boot(
        timings=Timings(lease_wait_s=1e6, clean_wait_s=1e6, boot_s=100, verdict_s=2, teardown_s=10, release_s=8)
    )
    survival = SurvivalResult(window=1, pool_tokens=1, requests=(request(90.0), request(90.0)))
    use = UseRecord(test=TEST, verdict=Verdict.PASS, message="m", survival=survival)
    archive.boot(timings=Timings(lease_wait_s=1e6, boot_s=60), uses=(use,))
    archive.boot(timings=Timings(lease_wait_s=1e6, ended_s=30), verdict=Verdict.FAIL, length=8192)
    found = lessons.minutes(History.read(archive.root), LIKE)
    assert found == lessons.Minutes(passing=3.0, failing=0.5, boots=3)


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.FAIL])
def test_one_kind_speaks_for_the_other(archive: Archive, verdict: Verdict) -> None:
    archive.boot(timings=Timings(boot_s=60), verdict=verdict)
    assert lessons.minutes(History.read(archive.root), LIKE) == lessons.Minutes(1.0, 1.0, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"identity": None},
        {"identity": identity(target="other")},
        {"verdict": Verdict.UNKNOWN},
        {"settled": False},
        {"timings": Timings()},
    ],
)
def test_no_history_has_no_minutes(archive: Archive, changes: dict[str, Any]) -> None:
    archive.boot(**changes)
    assert lessons.minutes(History.read(archive.root), LIKE) is None


def test_nothing_is_learned_from_nothing(archive: Archive) -> None:
    assert prior(archive) is None
    assert sigma(archive) is None
    assert cold_extra(archive) is None
    assert lessons.minutes(History.read(archive.root), IDENTITY) is None
