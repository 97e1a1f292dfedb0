"""Knife edges and soaks: after the body, inside its call phase, the engine gets what a deploy will ask of it."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_kvbudget.device.gates import MemoryGates
from pytest_kvbudget.plugin.checks import KnifeEdge, KvSoak, MarkerError, knife_edge, knife_edge_of, soak_of
from pytest_kvbudget.plugin.items import COUNTS_AS_PASSED, USE, must_be_recorded
from pytest_kvbudget.plugin.wording import use_failure

if TYPE_CHECKING:
    from pytest_kvbudget.engine.survival import SurvivalResult
    from pytest_kvbudget.plugin.session import KvSession

CHECKED: Final = pytest.StashKey[bool]()
"""On items whose engine was checked: the check's verdict stands, whatever the body says afterwards."""


class KvSurvival:
    """The survival check of one test."""

    def __init__(self, session: KvSession, item: pytest.Item) -> None:
        self._session, self._item = session, item

    def check(self, **changes: Any) -> SurvivalResult:  # noqa: ANN401 - arguments of knife_edge
        """Check now, with the arguments of the test's ``knife_edge`` mark changed by these.

        An engine that does not survive fails the test here. The check after the body is then not repeated.
        """
        mark = self._item.get_closest_marker("knife_edge")
        try:
            asked = knife_edge({**({} if mark is None else mark.kwargs), **changes}, where="kv_survival:")
        except MarkerError as error:
            pytest.fail(str(error), pytrace=False)
        return run_check(self._session, self._item, asked)


class KnifeEdges:
    """Runs the check that a test's mark asks for."""

    def __init__(self, session: KvSession) -> None:
        self._session = session

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """An item that is run again (rerunfailures) begins without the engine of the try before."""
        if USE in item.stash:
            del item.stash[USE]
        if CHECKED in item.stash:
            del item.stash[CHECKED]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """The body first: where it fails there is nothing to survive for."""
        yield
        if USE not in item.stash:
            return
        self._must_live(item)
        if CHECKED not in item.stash and (asked := knife_edge_of(item)) is not None:
            run_check(self._session, item, asked)
        if (soak := soak_of(item)) is not None:
            run_soak(self._session, item, soak)
        must_be_recorded(item, item.stash[USE])

    @staticmethod
    def _must_live(item: pytest.Item) -> None:
        """An engine that died under a body is no pass, whatever the body thought of it."""
        use = item.stash[USE]
        if use.boot_failed:
            return
        use.exercise.body_ended(failed=False)
        if use.verdict not in COUNTS_AS_PASSED:
            item.stash[CHECKED] = True
            pytest.fail(use_failure(use), pytrace=False)


def run_check(session: KvSession, item: pytest.Item, asked: KnifeEdge) -> SurvivalResult:
    """Check the engine of an item; one that does not survive fails the test."""
    use = item.stash[USE]
    item.stash[CHECKED] = True
    with session.timers.paused(item):
        use.exercise.survive(
            asked.spec,
            MemoryGates(
                min_free_bytes=asked.min_free, max_used_bytes=asked.max_used, max_growth_bytes=asked.max_growth
            ),
        )
    result = use.exercise.record.survival
    if result is None or use.verdict not in COUNTS_AS_PASSED:
        pytest.fail(use_failure(use), pytrace=False)
    return result


def run_soak(session: KvSession, item: pytest.Item, asked: KvSoak) -> None:
    """Soak the engine of an item; one that dies or grows fails the test."""
    use = item.stash[USE]
    item.stash[CHECKED] = True
    with session.timers.paused(item):
        use.exercise.soak(asked.spec, max_growth_per_hour=asked.max_growth_per_hour)
    if use.verdict not in COUNTS_AS_PASSED:
        pytest.fail(use_failure(use), pytrace=False)
