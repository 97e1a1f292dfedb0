"""pytest-html: a column with the verdict of rungs and boots. Imported only with ``--html``."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import pytest

from pytest_kvbudget.plugin.rows import mark_of
from pytest_kvbudget.report.labels import shown


class HtmlColumn:
    """Adds the column to every row, as pytest-html needs, and hides it where nothing of ours ran."""

    def __init__(self) -> None:
        self._used = False

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_table_header(self, cells: list[str]) -> None:
        """Name the column."""
        cells.insert(1, '<th class="sortable col-kvbudget" data-column-type="kvbudget">KV budget</th>')

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_table_row(self, report: pytest.TestReport, cells: list[str]) -> None:
        """Fill the column, and say sizes of a rung's id, which counts in bytes, in words."""
        mark = mark_of(report)
        if mark is not None and "label" in mark:
            told = escape(f"{mark['nodeid']}{shown(mark['label']).removeprefix(mark['label'])}")
            cells[:] = [cell.replace(escape(mark["nodeid"]), told) for cell in cells]
        self._used = self._used or mark is not None
        cells.insert(1, f'<td class="col-kvbudget">{"" if mark is None else escape(_verdict(mark))}</td>')

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_table_html(self, report: pytest.TestReport, data: list[str]) -> None:
        """What a row rests on as a sentence, where pytest-html shows the tuple of a skipped test."""
        if mark_of(report) is not None and isinstance(report.longrepr, tuple):
            path, line, text = report.longrepr
            data[:] = [escape(f"{text}\n{path}:{line}\n") if entry == _raw(report) else entry for entry in data]

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_summary(self, postfix: list[str]) -> None:
        """Hide an empty column."""
        if not self._used:
            postfix.append("<style>.col-kvbudget { display: none }</style>")


def _verdict(mark: Mapping[str, Any]) -> str:
    """The verdict, marked where it is that of a simulated device: such runs are all that have warnings."""
    return f"{mark['verdict']} (simulated)" if mark["warnings"] else str(mark["verdict"])


def _raw(report: pytest.TestReport) -> str:
    return f"{escape(report.longreprtext)}\n"
