"""What a boot adds to the reports of its test: JUnit properties, pytest-html links and column."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from pytest_kvbudget.attempt import Attempt
from pytest_kvbudget.plugin.items import COUNTS_AS_PASSED, RUNG, USE
from pytest_kvbudget.plugin.rows import ATTRIBUTE
from pytest_kvbudget.plugin.session import KvSession
from pytest_kvbudget.plugin.survival import CHECKED
from pytest_kvbudget.plugin.wording import described, use_failure
from pytest_kvbudget.records import AttemptRecord, TargetInfo
from pytest_kvbudget.verdict import Verdict

PREFIX: Final = "kvbudget."


def properties(
    record: AttemptRecord, path: Path, *, boot: int | None = None, rung: str | None = None
) -> list[tuple[str, object]]:
    """A boot as JUnit properties: builtins only, anything else breaks xdist.

    Args:
        record: the boot.
        path: its record on disk.
        boot: its number in its ladder, from 1.
        rung: its rung's label.
    """
    found: list[tuple[str, object]] = [
        ("kvbudget.verdict", str(record.verdict)),
        ("kvbudget.shape", described(record.shape)),
        ("kvbudget.boot", int(boot or record.number)),
        ("kvbudget.record", str(path)),
        *target_properties(record.target),
    ]
    if rung is not None:
        found.append(("kvbudget.rung", rung))
    if record.cause is not None:
        found.append(("kvbudget.cause", f"{record.cause.phase}: {record.cause.sentence}"))
    return found


def target_properties(target: TargetInfo) -> list[tuple[str, object]]:
    """What a boot ran on, and where that is configured, as JUnit properties."""
    found: list[tuple[str, object]] = [("kvbudget.target", target.name), ("kvbudget.configured_in", target.origin)]
    return [*found, ("kvbudget.simulated", "true")] if target.simulated else found


def add_links(report: pytest.TestReport, config: pytest.Config, files: Mapping[str, Path | None]) -> None:
    """Link files from a report, for pytest-html."""
    found = [link(config, name, path) for name, path in files.items() if path is not None]
    report.__dict__.setdefault("extras", []).extend(found)


def files_of(attempt: Attempt) -> dict[str, Path]:
    """What a boot leaves on disk; its page is written when its ladder or the session ends."""
    record = attempt.record_path
    return {"record": record, "log": attempt.log_path, "page": record.with_name("rung.html")}


def link(config: pytest.Config, name: str, path: Path) -> dict[str, Any]:
    """One link as pytest-html's `extras.url` makes it, relative to its report so that both can be moved together."""
    report = config.getoption("htmlpath", None)
    target = str(path)
    if report:
        target = os.path.relpath(path, (config.invocation_params.dir / os.path.expandvars(report)).parent)
    return {"name": name, "format_type": "url", "content": target, "mime_type": None, "extension": None}


class Outcomes:
    """Adds a boot to the reports of a test that is no ladder."""

    def __init__(self, session: KvSession) -> None:
        self._session = session

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Properties go in before the report copies them, the rest after."""
        use = item.stash.get(USE, None)
        if use is None or RUNG in item.stash:
            return (yield)
        attempt = use.attempt
        ended = call.when == "call" and not use.boot_failed
        if ended:
            # An engine that died under the test is not a pass, whatever the test thought of it.
            use.exercise.body_ended(failed=call.excinfo is not None)
        record = use.record
        item.user_properties[:] = [
            *(entry for entry in item.user_properties if not entry[0].startswith(PREFIX)),
            *properties(record, attempt.record_path),
        ]
        report = yield
        if ended and record.verdict not in COUNTS_AS_PASSED and CHECKED not in item.stash:
            report.sections.append(("Engine died during the test", use_failure(use)))
        more: dict[str, object] = {}
        # Others that share the engine were not asked how much is left.
        judged_here = CHECKED in item.stash or attempt.record.test == item.nodeid
        gate = use.exercise.record.boot_gate
        if ended and judged_here and record.verdict is Verdict.MARGINAL:
            more["summary"] = [f"{item.nodeid}: MARGINAL: {record.message}", f"record: {attempt.record_path}"]
        elif ended and report.passed and gate is not None:
            more["details"] = [
                f"{item.nodeid}: boot_gate {gate.verdict}: {gate.sentence}",
                f"record: {attempt.record_path}",
            ]
        setattr(report, ATTRIBUTE, self._session.mark("boot", str(record.verdict), **more))
        # pytest-html shows the links of every phase together.
        if report.when == "call" or report.failed:
            add_links(report, self._session.config, files_of(attempt))
        return report
