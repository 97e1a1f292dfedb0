"""Processes with several boots at once: killed at any moment, and two that want the same devices."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pytest_kvbudget.archive import read_attempt
from pytest_kvbudget.device.leases import LeaseTimeoutError, acquire
from pytest_kvbudget.device.sysfs import AmdSysfsProbe
from pytest_kvbudget.mock.spec import DRIVER_RESERVE_BYTES
from pytest_kvbudget.verdict import Verdict
from tests.engine.support import DEADLINE_S, TOKEN, running_with, wait_for

OWNER = Path(__file__).with_name("pool_owner.py")
DRIVER = "pytest_kvbudget/mock/driver.py"


class Owners:
    """Starts owners; ends them, and whatever of theirs is left, afterwards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = uuid.uuid4().hex
        self._made: list[subprocess.Popen[str]] = []

    def start(self, mode: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            (sys.executable, str(OWNER), str(self.folder), mode),
            stdout=subprocess.PIPE, env={**os.environ, TOKEN: self.token}, text=True,
        )  # fmt: skip
        self._made.append(process)
        return process

    def left(self) -> list[int]:
        """Processes of engines and keepers; the simulated cards' driver is none, it ends later."""
        return [pid for pid in running_with(self.token) if not _is_driver(pid)]

    def close(self) -> None:
        for process in self._made:
            process.kill()
            process.communicate(timeout=DEADLINE_S)
        for pid in running_with(self.token):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _is_driver(pid: int) -> bool:
    try:
        return DRIVER in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return True


@pytest.fixture
def owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Owners]:
    monkeypatch.setenv("KVBUDGET_LEASE_DIR", str(tmp_path / "leases"))
    made = Owners(tmp_path)
    yield made
    made.close()


def leases_are_free(folder: Path) -> bool:
    names = [path.name.removesuffix(".lock") for path in (folder / "leases").glob("*.lock")]
    try:
        for name in names:
            acquire([((name,), (name,))], run="after", purpose="after", timeout_s=0).close()
    except LeaseTimeoutError:
        return False
    return True


def check_nothing_left(owners: Owners) -> None:
    wait_for("end of both engines", lambda: not owners.left())
    wait_for("the leases", lambda: leases_are_free(owners.folder))
    if (owners.folder / "sysfs").exists():
        cards = AmdSysfsProbe(owners.folder / "sysfs", ["0", "1", "2", "3"])
        wait_for("the memory", lambda: all(card.used_bytes == DRIVER_RESERVE_BYTES for card in cards.read()))
    for path in (owners.folder / "archive").rglob("attempt.json"):
        record = read_attempt(path)
        assert record.verdict is Verdict.UNKNOWN
        assert record.message.startswith("interrupted")


@pytest.mark.parametrize("seed", range(5))
def test_a_kill_with_two_boots_under_way_leaves_nothing(owners: Owners, seed: int) -> None:
    owner = owners.start("hang")
    assert owner.stdout is not None
    assert owner.stdout.readline() == "begins\n"
    with pytest.raises(subprocess.TimeoutExpired):
        owner.wait(random.Random(seed).uniform(0, 0.5))  # both launches take some 0.2 s
    owner.kill()
    owner.wait(DEADLINE_S)
    check_nothing_left(owners)


def test_a_kill_with_two_engines_up_leaves_nothing(owners: Owners) -> None:
    owner = owners.start("hang")
    wait_for("both engines", lambda: all((owners.folder / name).exists() for name in ("one", "two")))
    owner.kill()
    owner.wait(DEADLINE_S)
    check_nothing_left(owners)
    assert len(list((owners.folder / "archive").rglob("attempt.json"))) == 2


def test_two_that_want_every_set_both_get_on(owners: Owners) -> None:
    first = owners.start("rounds")
    assert first.stdout is not None
    assert first.stdout.readline() == "4 PASS\n"
    # It goes on holding all sets from round to round until the second one is through a round of its own.
    second = owners.start("rounds")
    assert second.stdout is not None
    assert second.stdout.readline().endswith(" PASS\n")
    (owners.folder / "enough").touch()
    for owner in (first, second):
        out, _ = owner.communicate(timeout=DEADLINE_S)
        assert owner.returncode == 0
        assert all(line.endswith(" PASS") for line in out.splitlines())
