"""xdist's controller: it never collects, so what it has to know is found out before the workers start.

Imported in every run with ``-n``, also where nothing of ours is used: nothing heavy here.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_kvbudget.plugin.rows import Rows


def configure(config: pytest.Config) -> None:
    """Check options and configuration, and register what shows our reports.

    Raises:
        pytest.UsageError: for wrong options or configuration: in a worker it would be an internal error.
    """
    option = config.option
    if option.kvbudget_leave_serving:
        raise pytest.UsageError("kvbudget: --kvbudget-leave-serving needs the ladder in this process; run without -n")
    rows = Rows(config)
    controller = Controller(config, rows)
    if controller.is_configured():
        controller.check()
    config.pluginmanager.register(rows, "kvbudget-rows")
    config.pluginmanager.register(controller, "kvbudget-controller")


class Controller:
    """Tells workers of which run they are, and readers what the run is about."""

    def __init__(self, config: pytest.Config, rows: Rows) -> None:
        self._config, self._rows = config, rows
        self._run = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}"
        self._header: list[str] = []
        self._until: str | None = None
        """The next 06:00, that it is not another one in a worker that starts a moment later."""

    def is_configured(self) -> bool:
        """Whether options, ini keys or a file say that this run may use us. Reads no more than it must."""
        option = self._config.option
        given = (option.kvbudget_target, option.kvbudget_config, option.kvbudget_require_hardware)
        rung = (option.kvbudget_rung, option.kvbudget_archive, option.kvbudget_strategy, option.kvbudget_resume)
        limits = (option.kvbudget_max_boots, option.kvbudget_until)
        ini = (self._config.getini(f"kvbudget_{name}") for name in ("target", "config", "strategy", "require_hardware"))
        asked = any(map(any, (given, rung, limits, ini)))
        return asked or any(_has_configuration(folder) for folder in self._folders())

    def check(self) -> None:
        """Read settings as the workers will.

        Raises:
            pytest.UsageError: for wrong options or configuration.
        """
        from pytest_kvbudget.plugin.header import header_lines  # noqa: PLC0415 - heavy
        from pytest_kvbudget.plugin.settings import read_settings  # noqa: PLC0415 - heavy

        settings = read_settings(self._config)
        self._until = None if settings.until is None else settings.until.isoformat()
        self._header = header_lines(settings, self._run)

    def pytest_report_header(self) -> list[str]:
        """Target, devices, archive, configuration; simulated or not."""
        return self._rows.show_header(self._header) if self._header else []

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:  # noqa: ANN401 - xdist's WorkerController
        """One run for all workers, in one archive."""
        from pytest_kvbudget.plugin.paths import archive_folder  # noqa: PLC0415 - once per worker

        node.workerinput["kvbudget_run"] = self._run
        node.workerinput["kvbudget_until"] = self._until
        node.workerinput["kvbudget_archive"] = str(archive_folder(self._config))

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """Say where the records of the boots of a crashed test are."""
        from pytest_kvbudget.plugin.paths import archive_folder  # noqa: PLC0415 - rare

        run = archive_folder(self._config) / self._run
        if run.is_dir():
            from pytest_kvbudget.archive import readable_records  # noqa: PLC0415 - heavy, rare

            found = [path for path, record in readable_records(run) if record.test == crashitem]
            if found:
                paths = "\n".join(f"  {path}" for path in found)
                report.longrepr = f"{report.longrepr}\nno verdict; records of its boots so far:\n{paths}"

    def _folders(self) -> Iterator[Path]:
        from pytest_kvbudget.plugin.paths import test_folders  # noqa: PLC0415 - only with xdist

        for folder in test_folders(self._config):
            yield from (folder, *folder.parents)


def _has_configuration(folder: Path) -> bool:
    project = folder / "pyproject.toml"
    return (folder / "kvbudget.toml").is_file() or (project.is_file() and b"tool.kvbudget" in project.read_bytes())
