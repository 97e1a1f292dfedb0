"""Which boots of an archive may stand for new ones, and that a run which was killed goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvbudget.archive import read_attempt
from pytest_kvbudget.history import MOST_RUNS, History, Resume, same_identity, stands_for
from pytest_kvbudget.records import AttemptRecord, BootIdentity
from pytest_kvbudget.search.ladder import Ladder
from pytest_kvbudget.search.model import Axis, Finding, Trial
from pytest_kvbudget.search.noise import Noise
from pytest_kvbudget.search.predict import Predict
from pytest_kvbudget.verdict import FindingKind, Verdict
from tests.archives import IDENTITY, Archive, identity

OLD, NEW = "20260101T000000Z-aaaaaa", "20260102T000000Z-bbbbbb"
OPTIONAL = ("driver", "engine", "asked")
PARTS = tuple(BootIdentity.__struct_fields__)
OTHER = {"schema_version": 1, "devices": ("gpu-1 34208743424",)}


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "runs")


def always(record: AttemptRecord) -> bool:
    return record.warm is not None


def never(record: AttemptRecord) -> bool:
    return record.warm is None


def reusable(archive: Archive, now: BootIdentity = IDENTITY) -> list[Path]:
    return [path for path, _ in History.read(archive.root).reusable(now)]


# -- reading


def test_no_archive_is_no_history(tmp_path: Path) -> None:
    assert History.read(tmp_path / "none") == History()
    (tmp_path / "file").write_text("no folder")
    assert History.read(tmp_path / "file") == History()


def test_records_come_oldest_first_and_this_run_is_left_out(archive: Archive) -> None:
    paths = [
        archive.boot(run=NEW),
        archive.boot(run=OLD),
        archive.boot(run=OLD),
        archive.boot(run="20270101T000000Z-c"),
    ]
    history = History.read(archive.root, without="20270101T000000Z-c")
    assert [booted.path for booted in history.attempts] == [paths[1], paths[2], paths[0]]


def test_what_is_no_whole_record_is_skipped(archive: Archive) -> None:
    whole = archive.boot()
    text = whole.read_text(encoding="utf-8")
    newer = json.dumps({**json.loads(text), "schema_version": 99})
    foreign = json.dumps({"kind": "attempt", "accuracy": 0.9})
    broken = [
        "",
        text[: len(text) // 2],
        "\x00" * 64,
        "[" * 100_000,
        "null",
        "42",
        newer,
        foreign,
        '{"schema_version": 2}',
    ]
    for number, content in enumerate(broken):
        folder = archive.root / OLD / f"test-{number}" / "boot"
        folder.mkdir(parents=True)
        (folder / "attempt.json").write_text(content, encoding="utf-8")
        (folder / "finding.json").write_text(content, encoding="utf-8")
    (archive.root / OLD / "attempt.json").mkdir()
    history = History.read(archive.root)
    assert [booted.path for booted in history.attempts] == [whole]
    assert history.findings == ()
    assert len(history.skipped) == 2 * len(broken) + 1


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_half_written_record_never_stands(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        archive = Archive(Path(folder))
        path = archive.boot()
        whole = path.read_bytes()
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 3))])
        assert reusable(archive) == []


def test_an_older_layout_is_read_and_stands_for_nothing(archive: Archive) -> None:
    path = archive.boot()
    old = json.loads(path.read_text(encoding="utf-8"))
    for name in ("identity", "warm", "device_set", "settled"):
        del old[name]
    path.write_text(json.dumps({**old, "schema_version": 1}), encoding="utf-8")
    history = History.read(archive.root)
    assert [booted.path for booted in history.attempts] == [path]
    assert history.reusable(IDENTITY) == []


def test_only_the_newest_runs_are_looked_at(archive: Archive) -> None:
    runs = [f"2026{day:04}T000000Z-aaaaaa" for day in range(MOST_RUNS + 3)]
    for run in reversed(runs):
        archive.boot(run=run)
    history = History.read(archive.root)
    assert [booted.record.run.run for booted in history.attempts] == runs[3:]


def test_a_finding_knows_its_boots(archive: Archive) -> None:
    first, second = archive.boot(run=OLD), archive.boot(run=NEW, length=8192)
    archive.finding(second, first, run=NEW)
    history = History.read(archive.root)
    assert [booted.path for booted in history.boots_of(history.findings[0])] == [second, first]
    first.unlink()
    history = History.read(archive.root)
    assert [booted.path for booted in history.boots_of(history.findings[0])] == [second]


# -- what stands


@pytest.mark.parametrize("verdict", list(Verdict))
def test_only_a_verdict_stands(archive: Archive, verdict: Verdict) -> None:
    path = archive.boot(verdict=verdict)
    expected = [path] if verdict in {Verdict.PASS, Verdict.MARGINAL, Verdict.FAIL} else []
    assert reusable(archive) == expected


def test_a_short_pool_stands_for_the_rate_that_it_measured(archive: Archive) -> None:
    path = archive.boot(verdict=Verdict.UNKNOWN, pool_short=True)
    assert reusable(archive) == [path]


def test_a_boot_that_was_not_over_stands_for_nothing(archive: Archive) -> None:
    archive.boot(settled=False)
    assert reusable(archive) == []


def test_an_engine_that_was_left_serving_answers_for_itself(archive: Archive) -> None:
    archive.boot(left_serving=True)
    assert reusable(archive) == []


@pytest.mark.parametrize("part", PARTS)
def test_every_part_must_be_equal(archive: Archive, part: str) -> None:
    archive.boot()
    assert reusable(archive) != []
    assert reusable(archive, identity(**{part: OTHER.get(part, "other")})) == []


@pytest.mark.parametrize("part", OPTIONAL)
def test_what_is_not_known_equals_nothing(archive: Archive, part: str) -> None:
    unknown = identity(**{part: None})
    archive.boot(identity=unknown)
    assert reusable(archive, unknown) == []
    assert reusable(archive) == []


def test_an_image_may_be_none_on_both_sides_only(archive: Archive) -> None:
    archive.boot()
    archive.boot(identity=identity(image="sha256:1"))
    assert len(reusable(archive)) == len(reusable(archive, identity(image="sha256:1"))) == 1


@given(st.sampled_from(PARTS), st.sampled_from(PARTS))
def test_parts_that_may_differ_do_not_count(part: str, other: str) -> None:
    changed = identity(**{part: OTHER.get(part, "other")})
    assert same_identity(changed, IDENTITY, but=(part,))
    assert same_identity(changed, IDENTITY, but=(other,)) is (part == other)


def test_records_without_identity_stand_for_nothing(archive: Archive) -> None:
    record = read_attempt(archive.boot(identity=None))
    assert not stands_for(record, IDENTITY)


def test_the_newest_run_comes_first_and_goes_the_way_it_went(archive: Archive) -> None:
    old = [archive.boot(run=OLD), archive.boot(run=OLD)]
    new = [archive.boot(run=NEW), archive.boot(run=NEW)]
    assert reusable(archive) == [*new, *old]


# -- handing out


def test_each_boot_is_handed_out_once(archive: Archive) -> None:
    old, new = archive.boot(run=OLD), archive.boot(run=NEW)
    resume = Resume(History.read(archive.root), always)
    found = [resume.take(IDENTITY) for _ in range(3)]
    assert [one and one[0] for one in found] == [new, old, None]
    assert resume.taken == (new, old)


def test_other_rungs_are_not_touched(archive: Archive) -> None:
    path = archive.boot(length=8192)
    resume = Resume(History.read(archive.root), always)
    assert resume.take(IDENTITY) is None
    taken = resume.take(identity(shape="8192"))
    assert taken is not None
    assert taken[0] == path


def test_a_rung_is_looked_for_on_every_device_set(archive: Archive) -> None:
    there = identity(devices=("gpu-1 34208743424",))
    first, second = archive.boot(run=NEW, identity=there), archive.boot(run=NEW)
    older = archive.boot(run=OLD)
    resume = Resume(History.read(archive.root), always)
    found = [resume.take(IDENTITY, there) for _ in range(4)]
    assert [one and one[0] for one in found] == [first, second, older, None]


@pytest.mark.parametrize("warm", [True, False, None])
def test_a_warm_boot_stands_only_while_its_cache_does(archive: Archive, warm: bool | None) -> None:
    path = archive.boot(warm=warm)
    history = History.read(archive.root)
    kept, gone = Resume(history, lambda _: True).take(IDENTITY), Resume(history, lambda _: False).take(IDENTITY)
    assert kept is not None
    assert kept[0] == path
    assert (gone is None) is (warm is True)


# -- killed and resumed

LADDER = Axis(name="max_model_len", floor=1, ceiling=20, quantum=1)


class Device:
    """Boots whose verdict depends on the rung, on how often it was booted and on the compile cache."""

    def __init__(self, boundary: int, *, flips: frozenset[int], cold: frozenset[int]) -> None:
        self.boundary, self.flips, self.cold = boundary, flips, cold
        self.boots: list[int] = []

    def boot(self, archive: Archive, run: str, value: int) -> Path:
        attempt = self.boots.count(value) + 1
        self.boots.append(value)
        cold = value in self.cold and attempt == 1
        passed = value <= self.boundary and not cold
        if value in self.flips and attempt % 2 == 0:
            passed = not passed
        return archive.boot(run=run, length=value, verdict=Verdict.PASS if passed else Verdict.FAIL, warm=not cold)


def search(archive: Archive, device: Device, run: str, *, most: int, noise: Noise | None) -> Finding | None:
    """Climb, taking over earlier boots; ``None`` where the run is killed after so many boots of its own."""
    resume = Resume(History.read(archive.root, without=run), lambda _: True)
    ladder = Ladder(LADDER, Predict(), noise=noise, cold_extra_bytes=None)
    while (ask := ladder.next()) is not None:
        taken = resume.take(identity(shape=str(ask.value)))
        if taken is None:
            if most == 0:
                return None
            most -= 1
            path = device.boot(archive, run, ask.value)
            taken = path, read_attempt(path)
        ladder.tell(
            Trial(
                value=ask.value,
                verdict=taken[1].verdict,
                warm=taken[1].warm,
                reused=taken[1].run.run != run,
            )
        )
    return ladder.finding()


@settings(max_examples=40, deadline=None)
@given(
    boundary=st.integers(0, 20),
    flips=st.frozensets(st.integers(1, 20), max_size=2),
    cold=st.frozensets(st.integers(1, 20), max_size=3),
    noisy=st.booleans(),
    data=st.data(),
)
def test_killed_at_any_moment_a_search_finds_the_same(
    boundary: int, flips: frozenset[int], cold: frozenset[int], noisy: bool, data: st.DataObject
) -> None:
    noise = Noise(sigma_bytes=0.0, source="residuals") if noisy else None
    with TemporaryDirectory() as folder:
        straight = Device(boundary, flips=flips, cold=cold)
        whole = search(Archive(Path(folder, "a")), straight, OLD, most=10**6, noise=noise)
        assert whole is not None
        archive, device = Archive(Path(folder, "b")), Device(boundary, flips=flips, cold=cold)
        killed_after = data.draw(st.integers(0, len(straight.boots)))
        search(archive, device, OLD, most=killed_after, noise=noise)
        resumed = search(archive, device, NEW, most=10**6, noise=noise)
        assert resumed is not None
        assert device.boots == straight.boots, "a finished boot was repeated, or the search went another way"
        assert (resumed.kind, resumed.value, resumed.failed_at) == (whole.kind, whole.value, whole.failed_at)
        assert resumed.boots + resumed.reused == whole.boots


def test_a_finished_search_is_not_booted_again(archive: Archive) -> None:
    device = Device(13, flips=frozenset(), cold=frozenset())
    search(archive, device, OLD, most=100, noise=None)
    booted = len(device.boots)
    found = search(archive, device, NEW, most=0, noise=None)
    assert found is not None
    assert (found.kind, found.value, found.boots) == (FindingKind.PROVEN, 13, 0)
    assert found.reused == booted == len(device.boots)


def test_identities_travel_through_records(archive: Archive) -> None:
    found = read_attempt(archive.boot()).identity
    assert found == msgspec.convert(msgspec.to_builtins(IDENTITY), BootIdentity)
