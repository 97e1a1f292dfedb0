"""pytest-timeout: a boot has deadlines of its own and is not charged to the test's timeout."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from pytest_kvbudget.plugin.items import searches

_SETTINGS: Final = pytest.StashKey[Any]()
_MESSAGE: Final = "from pytest-timeout"


def is_timeout(error: BaseException) -> bool:
    """Whether pytest-timeout raised it: the same exception as `pytest.fail`, told apart by its message."""
    return isinstance(error, pytest.fail.Exception) and _MESSAGE in str(error)


class Timers:
    """Stops a test's timer while it boots, and gives each rung's body the whole of it."""

    def __init__(self) -> None:
        self._ladder_settings: dict[str, Any] = {}

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:  # noqa: ANN401 - theirs
        """Keep the settings; a ladder's own timer is not set: it is one-shot, and would run out between phases."""
        if searches(item):
            self._ladder_settings[item.nodeid] = settings
            return True
        item.stash[_SETTINGS] = settings
        return None

    @contextmanager
    def body(self, rung: pytest.Item) -> Generator[None, None, None]:
        """The ladder's timer, armed anew for one body."""
        settings = self._ladder_settings.get(rung.nodeid)
        if settings is None:
            yield
            return
        rung.ihook.pytest_timeout_set_timer(item=rung, settings=settings._replace(func_only=True))
        try:
            yield
        finally:
            rung.ihook.pytest_timeout_cancel_timer(item=rung)

    @contextmanager
    def paused(self, item: pytest.Item | None) -> Generator[None, None, None]:
        """No timer while an engine boots; the whole of it again afterwards."""
        settings = None if item is None else item.stash.get(_SETTINGS, None)
        if item is None or settings is None:
            yield
            return
        item.ihook.pytest_timeout_cancel_timer(item=item)
        try:
            yield
        finally:
            item.ihook.pytest_timeout_set_timer(item=item, settings=settings)
