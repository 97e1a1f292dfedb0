"""A dry run: what would be started for each test, without starting it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pytest

from pytest_kvbudget.config import ConfigError
from pytest_kvbudget.plugin.items import searches
from pytest_kvbudget.plugin.quest import Quest, QuestError
from pytest_kvbudget.plugin.session import KvSession
from pytest_kvbudget.plugin.wording import described
from pytest_kvbudget.pool import DRY_RUN_PORT, PoolError
from pytest_kvbudget.redact import command_without_secrets, without_secrets
from pytest_kvbudget.shape import Shape


def dry_run_lines(session: KvSession, items: list[pytest.Item]) -> Iterator[str]:
    """What each test would start first: rung, shape, environment added, command. Overrides in conftest are unknown."""
    yield "kvbudget dry run: nothing is started; kv_shape overrides of conftest files are not evaluated"
    if not session.settings.loaded.target.port:
        yield f"port {DRY_RUN_PORT} stands for a free one, which every boot takes anew"
    for item in items:
        yield f"{item.nodeid}"
        try:
            yield from _item_lines(session, item)
        except (ConfigError, PoolError, QuestError) as error:
            yield f"  cannot boot: {error}"


def _item_lines(session: KvSession, item: pytest.Item) -> Iterator[str]:
    shape = session.base_shape(item)
    if isinstance(item, pytest.Function) and searches(item):
        quest = Quest(session, item)
        question = quest.next()
        plan = None if question is None else question.next()
        if question is not None and plan is not None:
            shape = plan.shape
            lowest, highest = question.ends
            way = "down to" if question.kind == "ladder" else "to"
            yield (
                f"  {question.kind}: {question.name} from {lowest} {way} {highest} by {question.step}, "
                f"{question.strategy}; first rung {plan.label}"
            )
            if quest.only is None:
                yield from (f"  {line}" for line in quest.estimate(question))
            if quest.more:
                yield f"  then, at its winner: {', '.join(quest.more)}"
    yield from _command_lines(session, shape)


def _command_lines(session: KvSession, shape: Shape) -> Iterator[str]:
    command = session.pool.command(shape)
    yield f"  shape: {described(shape)}"
    for name, value in sorted(without_secrets(command.env_added).items()):
        yield f"  env: {name}={shlex.quote(value)}"
    yield f"  command: {shlex.join(command_without_secrets(command.argv))}"
