"""One phase of an item as pytest's own runner does it, and what its exception says about the test's own code."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import _pytest
import pluggy
import pytest

import pytest_kvbudget
from pytest_kvbudget.judging import first_line
from pytest_kvbudget.plugin.items import USE

When = Literal["setup", "call", "teardown"]

ENDS_THE_LADDER: Final = (pytest.skip.Exception, pytest.xfail.Exception)
"""What a test says about itself, not about a rung."""
_MACHINERY: Final = tuple(
    Path(module.__file__).parent for module in (_pytest, pluggy, pytest_kvbudget) if module.__file__ is not None
)


_NO_ASYNC: Final = "async def functions are not natively supported"
"""How pytest begins to say, from 8.4 on by `pytest.fail`, that it cannot run a body; before that it skips."""


class LadderFailed(Exception):  # noqa: N818 - what a report names
    """The ladder did not establish what its test asks for; the text is for people."""


@dataclass(frozen=True)
class PhaseEnd:
    """How one phase of an item ended."""

    report: pytest.TestReport
    error: BaseException | None = None
    text: str = ""
    """The exception in words, without a traceback."""
    where: str | None = None
    """The line of the test's own code that it came from: ``test_it.py:12``."""
    trace: str = ""
    """Its traceback in pytest's short style, from the test's own code on."""

    @property
    def said(self) -> str:
        """The exception in one line, with the line of code that it came from."""
        text = first_line(self.text)
        return text if self.where is None else f"{text} ({self.where})"


def refused_by_test(error: BaseException) -> bool:
    """Whether an exception is a judgement of the test's own code, and not pytest's about a body that it cannot run."""
    if isinstance(error, pytest.fail.Exception):
        return not str(error).startswith(_NO_ASYNC)
    return isinstance(error, AssertionError)


def run_phase(
    item: pytest.Item,
    when: When,
    *,
    around: AbstractContextManager[None] | None = None,
    **arguments: Any,  # noqa: ANN401 - the hook's own
) -> PhaseEnd:
    """Run one phase without logging its report. What ends the session passes through."""
    config = item.config
    reraise: tuple[type[BaseException], ...] = (pytest.exit.Exception,)
    if not config.getoption("usepdb", False):
        reraise += (KeyboardInterrupt,)
    hook = getattr(item.ihook, f"pytest_runtest_{when}")

    def run() -> None:
        with around or nullcontext():
            hook(item=item, **arguments)

    call: pytest.CallInfo[None] = pytest.CallInfo.from_call(run, when=when, reraise=reraise)
    report: pytest.TestReport = item.ihook.pytest_runtest_makereport(item=item, call=call)
    if call.excinfo is None:
        return PhaseEnd(report)
    error = call.excinfo.value
    use = item.stash.get(USE, None)
    expected = isinstance(error, (pytest.skip.Exception, LadderFailed)) or (use is not None and use.boot_failed)
    if not expected and not hasattr(report, "wasxfail"):
        item.ihook.pytest_exception_interact(node=item, call=call, report=report)
    return _ended(item, report, call.excinfo)


def _ended(item: pytest.Item, report: pytest.TestReport, excinfo: pytest.ExceptionInfo[BaseException]) -> PhaseEnd:
    error = excinfo.value
    if isinstance(error, (pytest.fail.Exception, pytest.skip.Exception)):
        text = str(error)
        trace = "" if error.pytrace else text
    else:
        text = excinfo.exconly(tryshort=True)
        trace = ""
    if not trace:
        trace = str(excinfo.getrepr(style="short", tbfilter=_from_the_test_on))
    return PhaseEnd(report, error, text, _line_of_the_test(item, excinfo), trace)


def _from_the_test_on(excinfo: pytest.ExceptionInfo[BaseException]) -> Any:  # noqa: ANN401 - pytest has no public name
    """The traceback without the frames of pytest and of this plugin that it begins with."""
    entries = excinfo.traceback
    first = next((index for index, entry in enumerate(entries) if not _is_machinery(entry.path)), 0)
    return entries[first:].filter(excinfo)


def _line_of_the_test(item: pytest.Item, excinfo: pytest.ExceptionInfo[BaseException]) -> str | None:
    """The innermost line of the project's own code, libraries left out."""
    root = item.config.rootpath
    for entry in reversed(excinfo.traceback):
        path = Path(entry.path)
        if path.is_relative_to(root) and "site-packages" not in path.parts and not _is_machinery(path):
            return f"{path.relative_to(root)}:{entry.lineno + 1}"
    return None


def _is_machinery(path: Path | str) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in _MACHINERY)
