"""Records on disk: ``ARCHIVE/RUN/TEST/RUNG/attempt.json`` beside the engine log, ``finding.json`` per ladder."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from pytest_kvbudget.records import (
    ATTEMPT_FILE,
    FINDING_FILE,
    SCHEMA_VERSION,
    AttemptRecord,
    FindingRecord,
    RunInfo,
    SweepRecord,
)

AnyFinding = FindingRecord | SweepRecord
_Record = TypeVar("_Record", AttemptRecord, FindingRecord, SweepRecord)
_NAME_LIMIT: Final = 120
_USES_SINCE: Final = 3
"""Schema version from which a record says for each test what it asked of the engine."""


class RecordError(Exception):
    """A record cannot be read; the message names file, key, what was found and what was expected."""


def new_run_id() -> str:
    """A name for a run: sorts by time, unique among runs of the same second."""
    return f"{utc_now():%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def utc_now() -> datetime:
    """The current time, UTC."""
    return datetime.now(UTC)


def timestamp() -> str:
    """The current time as records write it: ISO 8601, UTC, milliseconds."""
    return utc_now().isoformat(timespec="milliseconds")


class RunArchive:
    """The folder of one run. Nothing is created before something is written."""

    def __init__(self, root: Path, info: RunInfo) -> None:
        self.root = root
        self.info = info

    @property
    def folder(self) -> Path:
        """``ARCHIVE/RUN``."""
        return self.root / self.info.run

    def test_folder(self, test: str) -> Path:
        """Folder of a test's records."""
        return self.folder / _safe(test)

    def attempt_folder(self, test: str, rung: str | None, number: int) -> Path:
        """A new folder for one boot. An existing one is never reused: a record is not overwritten by another boot."""
        base = self.test_folder(test) / _safe(rung or "boot")
        suffix = number
        base.parent.mkdir(parents=True, exist_ok=True)
        while True:
            folder = base if suffix == 1 else base.with_name(f"{base.name}#{suffix}")
            try:
                folder.mkdir()
            except FileExistsError:
                suffix += 1
                continue
            return folder

    def write_attempt(self, folder: Path, record: AttemptRecord) -> Path:
        """Write a record atomically; returns its path."""
        return _write(folder / ATTEMPT_FILE, record)

    def write_finding(self, record: AnyFinding, *, attempts: Iterable[Path], stage: str | None = None) -> Path:
        """Write a finding atomically, with the paths of its boots relative to it; returns its path.

        Args:
            record: everything but the paths.
            attempts: records of its boots, of this run or of earlier ones.
            stage: which of several findings of the test it is.
        """
        folder = self._finding_folder(record.test, stage)
        record.attempts = tuple(os.path.relpath(path, folder) for path in attempts)
        return _write(folder / FINDING_FILE, record)

    def _finding_folder(self, test: str, stage: str | None) -> Path:
        """A folder without a finding: workers that each run the same test of one run do not overwrite each other."""
        base = self.test_folder(test) if stage is None else self.test_folder(test) / _safe(stage)
        for number in count(1):
            folder = base if number == 1 else base.with_name(f"{base.name}#{number}")
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / FINDING_FILE).exists():
                break
        return folder


def read_attempt(path: Path) -> AttemptRecord:
    """Read an attempt's record.

    Raises:
        RecordError: when it cannot be read or is not one.
    """
    return _read(path, AttemptRecord)


def read_finding(path: Path) -> AnyFinding:
    """Read what a ladder or a sweep established.

    Raises:
        RecordError: when it cannot be read or is not one.
    """
    return _read(path, SweepRecord) if _head(path).kind == "sweep" else _read(path, FindingRecord)


def iter_records(root: Path) -> Iterator[tuple[Path, AttemptRecord | AnyFinding]]:
    """Every record below a folder, in order of paths.

    Raises:
        RecordError: at the first one that cannot be read.
    """
    for path in _record_files(root):
        yield path, _read_either(path)


def records_or_troubles(root: Path) -> Iterator[tuple[Path, AttemptRecord | AnyFinding | RecordError]]:
    """Every record below a folder, in order of paths, with the error in place of one that cannot be read."""
    for path in _record_files(root):
        try:
            yield path, _read_either(path)
        except RecordError as error:
            yield path, error


def readable_records(root: Path) -> Iterator[tuple[Path, AttemptRecord | AnyFinding]]:
    """Every record below a folder that can be read, in order of paths; for reports of what went wrong."""
    for path in _record_files(root):
        with suppress(RecordError):
            yield path, _read_either(path)


def _record_files(root: Path) -> Iterator[Path]:
    yield from sorted(path for path in root.rglob("*.json") if path.name in {ATTEMPT_FILE, FINDING_FILE})


def _read_either(path: Path) -> AttemptRecord | AnyFinding:
    return read_attempt(path) if path.name == ATTEMPT_FILE else read_finding(path)


def schema() -> dict[str, Any]:
    """JSON schema of the documents: attempt, finding of a ladder, finding of a sweep."""
    kinds = (AttemptRecord, FindingRecord, SweepRecord)
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"pytest-kvbudget records, schema version {SCHEMA_VERSION}",
        "oneOf": list(schemas),
        "$defs": components,
    }


def _safe(name: str) -> str:
    """A file name for a node id or label, unique though characters are replaced and the end is cut."""
    clean = re.sub(r"[^A-Za-z0-9._=,\[\]-]+", "-", name).strip("-.") or "test"
    if clean == name and len(clean) <= _NAME_LIMIT:
        return clean
    digest = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{clean[-_NAME_LIMIT:].lstrip('-.')}-{digest}"


def _readable(value: object) -> object:
    """A record whose paths came from a file system in another encoding than this process': as people read them."""
    if isinstance(value, dict):
        return {_readable(name): _readable(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_readable(each) for each in value]
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace") if isinstance(value, str) else value


def _write(path: Path, record: AttemptRecord | AnyFinding) -> Path:
    try:
        encoded = msgspec.json.encode(record)
    except UnicodeEncodeError:
        encoded = msgspec.json.encode(_readable(msgspec.to_builtins(record)))
    text = msgspec.json.format(encoded, indent=1)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text + b"\n")
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def _read(path: Path, kind: type[_Record]) -> _Record:
    version = _head(path).schema_version
    if version > SCHEMA_VERSION:
        raise RecordError(f"{path}: schema version {version}; this release reads up to {SCHEMA_VERSION}: upgrade it")
    try:
        data = path.read_bytes()
        if kind is AttemptRecord and version < _USES_SINCE:
            return msgspec.convert(_with_uses(msgspec.json.decode(data, type=dict[str, Any])), kind)
        return msgspec.json.decode(data, type=kind)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise RecordError(f"{path}: {error}") from None


def _with_uses(data: dict[str, Any]) -> dict[str, Any]:
    """An older record in today's layout: its checks were the boot's, of whichever test came last."""
    checks = {name: data.pop(name, None) for name in ("survival", "soak", "gates")}
    if any(checks.values()) and {"test", "verdict", "message"} <= data.keys():
        said = {name: data.get(name) for name in ("test", "verdict", "cause", "message")}
        data["uses"] = [{**said, **checks, "gates": checks["gates"] or []}]
    return data


def _head(path: Path) -> _Head:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        return msgspec.json.decode(data, type=_Head)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise RecordError(f"{path}: is not a record: {error}") from None


class _Head(msgspec.Struct):
    schema_version: int
    kind: str = ""
