"""The records: one JSON document per attempt and per finding, from which everything shown anywhere is made."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from pytest_kvbudget.budget.model import Plan
from pytest_kvbudget.device.gates import GateResult
from pytest_kvbudget.device.host import HostMemory, TreeMemory
from pytest_kvbudget.device.model import DeviceMemory
from pytest_kvbudget.engine.soak import SoakResult
from pytest_kvbudget.engine.survival import SurvivalResult
from pytest_kvbudget.ledger.model import BootLedger, Cause
from pytest_kvbudget.memory import TraceSummary
from pytest_kvbudget.plan_check import Reconciled
from pytest_kvbudget.search.model import Finding, Hint, SweepFinding
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.verdict import Phase, Verdict

SCHEMA_VERSION: Final = 3
ATTEMPT_FILE: Final = "attempt.json"
FINDING_FILE: Final = "finding.json"
LOG_FILE: Final = "engine.log"

SchemaVersion = Annotated[int, msgspec.Meta(ge=1, description="version of this document's layout")]


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The run an attempt belongs to."""

    run: str
    host: str
    plugin_version: str
    python_version: str
    pytest_version: str | None = None
    worker: str | None = None
    """Name of the xdist worker, ``None`` without xdist."""


class TargetInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What was deployed on what."""

    name: str
    backend: str
    launcher: str
    simulated: bool
    origin: str
    devices: tuple[str, ...] = ()
    config: dict[str, Any] = {}
    """The target as configured, secrets removed."""


class PhaseTiming(msgspec.Struct, frozen=True, kw_only=True):
    """When a phase began, in seconds after the launch."""

    phase: Phase
    start_s: float


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the wall time of an attempt went, in seconds. ``None`` where it did not get that far."""

    lease_wait_s: float = 0
    clean_wait_s: float = 0
    boot_s: float | None = None
    """Launch to ready."""
    ended_s: float | None = None
    """Launch to the end of a boot that did not get ready: its death, or the deadline that passed."""
    verdict_s: float | None = None
    """From the death or the ready signal as the keeper saw it to the verdict."""
    teardown_s: float | None = None
    release_s: float | None = None
    """Until device memory was back."""
    phases: tuple[PhaseTiming, ...] = ()


class MemoryReading(msgspec.Struct, frozen=True, kw_only=True):
    """Device memory at a named moment of the attempt: ``idle``, ``ready``, ``released``."""

    moment: str
    devices: tuple[DeviceMemory, ...]


class BootIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal for one boot to stand for another. A part that cannot be known is ``None`` and equals nothing.

    Digests, not values: a record holds no secret, and two secrets that differ still make two identities.
    """

    schema_version: int
    """Layout of the record that was written."""
    plugin_version: str
    host: str
    devices: tuple[str, ...]
    """Machine-wide names of the leased devices, each with its total memory in bytes where a probe tells."""
    driver: str | None = None
    """Kernel driver of the devices and its version; ``"none"`` on a CPU, ``"simulated"``."""
    engine: str | None = None
    """The engine's build: version and files of what the command resolves to, and of what is installed beside it."""
    image: str | None = None
    """Digest of the container image, where it runs in one. Missing on both sides is equal."""
    target: str
    """Digest of what configuration and environment decide whatever the shape: backend, launcher, command, variables,
    limits that decide verdicts, patterns, simulated physics."""
    shape: str
    """Digest of the shape, the axis' value included, and of the files that its command line names: its model's too."""
    asked: str | None = None
    """Digest of what the test asks of a boot: its marks, its body, windows and pool."""


class BootGateResult(msgspec.Struct, frozen=True, kw_only=True):
    """What ``boot_gate`` asked of the engine's own count of its KV cache."""

    windows: int
    min_tokens: int | None = None
    tokens: int | None = None
    """The engine's count; ``None`` where no line states one."""
    verdict: Verdict
    sentence: str


class UseRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What one test asked of an engine that it may share with others, and what came of it."""

    test: str
    """Node id; what a fixture of a wider scope asked for is its scope's."""
    verdict: Verdict
    """Of the engine and of everything that this test asked of it. What the test's own body said is pytest's."""
    cause: Cause | None = None
    message: str
    """The verdict in one sentence for people."""
    boot_gate: BootGateResult | None = None
    """``None`` where the test has no such mark."""
    survival: SurvivalResult | None = None
    """What the engine did on its largest real request; ``None`` where none was sent."""
    soak: SoakResult | None = None
    """Mixed traffic for a while, and whether memory grew; ``None`` where none was asked for."""
    gates: tuple[GateResult, ...] = ()
    """Limits on memory that were asked for, each at the rank nearest to it."""

    @property
    def bore(self) -> bool:
        """The engine stood everything that it was sent; where it was sent nothing, that is so."""
        checks = (check for check in (self.survival, self.soak) if check is not None)
        return all(check.verdict in {Verdict.PASS, Verdict.MARGINAL} for check in checks)


class AttemptRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One boot of one shape, from lease to teardown."""

    schema_version: SchemaVersion = SCHEMA_VERSION
    kind: str = "attempt"
    run: RunInfo
    test: str
    """Node id of the test that asked."""
    rung: str | None = None
    """Label of the rung, ``"max_model_len=245760"``; ``None`` outside ladders."""
    number: int = 1
    """Which boot of this test (or rung) it is, from 1."""
    target: TargetInfo
    shape: Shape
    command: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    """What was added to the environment, secrets removed."""
    started: str
    """ISO 8601, UTC."""
    verdict: Verdict
    """Of the boot, and of the engine's death where it died later; of a rung, of everything that its test asked too."""
    cause: Cause | None = None
    message: str
    """The verdict in one sentence for people."""
    ledger: BootLedger | None = None
    plan: Plan | None = None
    """The memory terms that were predicted before the boot; ``None`` where the law lacks an input."""
    reconciled: tuple[Reconciled, ...] = ()
    """Each predicted term against what was measured, within printed precision."""
    hint: Hint = Hint()
    identity: BootIdentity | None = None
    """What it may stand for in a later run; ``None`` in records of before schema version 2."""
    warm: bool | None = None
    """What the boot compiles was in the cache; ``None`` where nothing is compiled or the log does not say."""
    device_set: str | None = None
    """Equal for device sets on which a boot is the same boot; ``None`` where the target has only one."""
    settled: bool = False
    """The verdict is final: boot, test body and checks are over. Only such a record may stand for a later boot."""
    pool_short: bool = False
    """A scaled pool came out too small for the windows: no verdict on the rung, but a rate for its next boot."""
    memory: tuple[MemoryReading, ...] = ()
    host: HostMemory | None = None
    """The host's memory before the launch: what offloaded experts are bounded by; ``None`` where it cannot be read."""
    engine_host: TreeMemory | None = None
    """Host memory of the engine's own processes at the end of its work; ``None`` where it did not serve until then."""
    trace: TraceSummary | None = None
    """Device memory over the whole attempt; ``None`` where nobody could read it."""
    uses: tuple[UseRecord, ...] = ()
    """The tests that used the engine, in order; of a rung the one that it is about, with the record's own verdict."""
    timings: Timings = Timings()
    exit_status: int | None = None
    """Of the engine's root process; proves nothing (a dead vLLM exits 0)."""
    left_serving: bool = False
    endpoint: str | None = None
    log: str = LOG_FILE
    """File name of the complete engine log, beside this record."""
    notes: tuple[str, ...] = ()
    """Things worth knowing that changed no verdict: telemetry that could not be read, memory that came back late."""


def as_used(record: AttemptRecord, use: UseRecord) -> AttemptRecord:
    """A boot as one of the tests that used it saw it: with that test's verdict, in place of the boot's own."""
    return msgspec.structs.replace(
        record, test=use.test, verdict=use.verdict, cause=use.cause, message=use.message, uses=(use,)
    )


class FindingRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a ladder established, with the attempts that prove it."""

    schema_version: SchemaVersion = SCHEMA_VERSION
    kind: str = "finding"
    run: RunInfo
    test: str
    target: TargetInfo
    shape: Shape
    """Base shape; the axis' value is that of the rung."""
    strategy: str
    pool: str
    windows: int
    finding: Finding
    attempts: tuple[str, ...]
    """Paths of the attempt records, relative to this file's folder, in boot order."""
    why: tuple[str, ...] = ()
    """What each of them was booted for: ``search``, ``repeat``, ``confirm``, ...; none in older records."""
    started: str
    finished: str


class SweepRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a headroom sweep established, with the attempts that prove it."""

    schema_version: SchemaVersion = SCHEMA_VERSION
    kind: str = "sweep"
    run: RunInfo
    test: str
    target: TargetInfo
    shape: Shape
    """Base shape; the knob's value is that of the boot."""
    strategy: str
    windows: int
    finding: SweepFinding
    attempts: tuple[str, ...]
    """Paths of the attempt records, relative to this file's folder, in boot order."""
    why: tuple[str, ...] = ()
    """As in a ladder's record."""
    started: str
    finished: str
