"""What earlier runs left in an archive, and which of their boots may stand for a boot of this one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from pytest_kvbudget.archive import RecordError, read_attempt, read_finding
from pytest_kvbudget.records import ATTEMPT_FILE, FINDING_FILE, AttemptRecord, BootIdentity, FindingRecord
from pytest_kvbudget.verdict import Verdict

COUNTED: Final = frozenset({Verdict.PASS, Verdict.MARGINAL, Verdict.FAIL})
MOST_RUNS: Final = 200
"""Runs of an archive that are looked at, the newest ones: a record takes about a millisecond to read."""
MAY_BE_UNKNOWN: Final = frozenset({"image"})
"""Parts of an identity that may be missing on both sides: an engine that runs in no container has no image."""


class Booted(msgspec.Struct, frozen=True):
    """A boot of an earlier run."""

    path: Path
    record: AttemptRecord


class Found(msgspec.Struct, frozen=True):
    """What a ladder of an earlier run established."""

    path: Path
    record: FindingRecord


class History(msgspec.Struct, frozen=True, kw_only=True):
    """What the newest runs of an archive left that can be read, oldest first: by run, then by start."""

    attempts: tuple[Booted, ...] = ()
    findings: tuple[Found, ...] = ()
    skipped: tuple[Path, ...] = ()
    """Files with a record's name that are none, or none that this release reads."""

    @classmethod
    def read(cls, root: Path, *, without: str | None = None) -> History:
        """Read an archive once. Whatever is no whole record is skipped: half written, foreign, of a newer release.

        Args:
            root: the archive's folder, with one folder a run; one that does not exist has no history.
            without: the run whose records are left out: this one.
        """
        attempts, findings, skipped = [], [], []
        for path in _files(root):
            try:
                if path.name == ATTEMPT_FILE:
                    attempts.append(Booted(path, read_attempt(path)))
                elif isinstance(finding := read_finding(path), FindingRecord):
                    findings.append(Found(path, finding))
            except (RecordError, RecursionError, MemoryError):
                skipped.append(path)
        kept = (booted for booted in attempts if booted.record.run.run != without)
        said = (found for found in findings if found.record.run.run != without)
        return cls(
            attempts=tuple(sorted(kept, key=lambda booted: (*_age(booted.record), str(booted.path)))),
            findings=tuple(sorted(said, key=lambda found: (*_age(found.record), str(found.path)))),
            skipped=tuple(skipped),
        )

    def reusable(self, identity: BootIdentity) -> list[tuple[Path, AttemptRecord]]:
        """Boots that may stand for one of this identity: the newest run first, within a run in boot order.

        In that order a search that goes on goes the way that it went. Whether a warm one still stands is the caller's
        to ask (`Resume`).
        """
        by_run: dict[str, list[Booted]] = {}
        for booted in self.attempts:
            if stands_for(booted.record, identity):
                by_run.setdefault(booted.record.run.run, []).append(booted)
        return [(booted.path, booted.record) for run in sorted(by_run, reverse=True) for booted in by_run[run]]

    def boots_of(self, found: Found) -> tuple[Booted, ...]:
        """The boots that prove a finding, in their order, as far as their records are there."""
        known = {_plain(booted.path): booted for booted in self.attempts}
        paths = (_plain(found.path.parent / path) for path in found.record.attempts)
        return tuple(known[path] for path in paths if path in known)


class Resume:
    """Hands earlier boots out in place of new ones, each of them once."""

    def __init__(self, history: History, stands: Callable[[AttemptRecord], bool]) -> None:
        """Nothing is handed out yet.

        Args:
            history: of the archive, without this run.
            stands: the compile cache that a warm boot had is still there (`warmth.cache_stands`).
        """
        self._history, self._stands = history, stands
        self._taken: list[Path] = []

    @property
    def taken(self) -> tuple[Path, ...]:
        """Records that were handed out, in that order."""
        return tuple(self._taken)

    def take(self, *identities: BootIdentity) -> tuple[Path, AttemptRecord] | None:
        """An earlier boot of any of these identities (one rung on several device sets); ``None``: boot it.

        A boot with a cold cache may stand whatever the cache holds now: a search repeats what being cold decided.
        """
        found = [
            (path, record)
            for identity in identities
            for path, record in self._history.reusable(identity)
            if path not in self._taken and (record.warm is not True or self._stands(record))
        ]
        if not found:
            return None
        newest = max(record.run.run for _, record in found)
        path, record = min(
            ((path, record) for path, record in found if record.run.run == newest), key=lambda one: one[1].started
        )
        self._taken.append(path)
        return path, record


def stands_for(record: AttemptRecord, identity: BootIdentity) -> bool:
    """A boot is over and had a verdict, is a boot of the same thing, and left nothing running that answers for it.

    A pool that was only scaled and came out short counts: it is asked again with the rate that was measured there.
    """
    settled = record.settled and (record.verdict in COUNTED or record.pool_short)
    return settled and not record.left_serving and same_identity(record.identity, identity)


def same_identity(earlier: BootIdentity | None, now: BootIdentity, *, but: Iterable[str] = ()) -> bool:
    """Every part is known and equal.

    Args:
        earlier: of a record; ``None`` of one that was written before identities were.
        now: of the boot that is wanted.
        but: names of parts that may differ.
    """
    if earlier is None:
        return False
    for name in BootIdentity.__struct_fields__:
        if name in but:
            continue
        there, here = getattr(earlier, name), getattr(now, name)
        if there != here or (here is None and name not in MAY_BE_UNKNOWN):
            return False
    return True


def _files(root: Path) -> list[Path]:
    """Files with a record's name in the newest runs; the name of a run's folder begins with its time."""
    try:
        newest = sorted(folder for folder in root.iterdir() if folder.is_dir())[-MOST_RUNS:]
        return [path for folder in newest for name in (ATTEMPT_FILE, FINDING_FILE) for path in folder.rglob(name)]
    except OSError:
        return []


def _age(record: AttemptRecord | FindingRecord) -> tuple[str, str]:
    return record.run.run, record.started


def _plain(path: Path) -> str:
    """The path without ``..``, whatever it points to."""
    return os.path.normpath(path.absolute())
