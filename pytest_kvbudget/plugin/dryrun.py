"""A dry run: what would be started for each test, without starting it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pytest

from pytest_kvbudget.config import ConfigError
from pytest_kvbudget.plugin import BOOTING, SEARCHES
from pytest_kvbudget.plugin.items import searches
from pytest_kvbudget.plugin.quest import Quest, QuestError
from pytest_kvbudget.plugin.session import KvSession
from pytest_kvbudget.plugin.wording import described
from pytest_kvbudget.pool import DRY_RUN_PORT, PoolError
from pytest_kvbudget.question import Question, RungPlan
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
        if question is not None:
            taken, plan = _taken_over(quest, question)
            shape = shape if plan is None else plan.shape
            lowest, highest = question.ends
            way = "down to" if question.kind == "ladder" else "to"
            yield (
                f"  {question.kind}: {question.name} from {lowest} {way} {highest} by {question.step}, "
                f"{question.strategy}; first rung {'none' if plan is None else plan.label}"
            )
            if quest.only is None and plan is not None:
                yield from (f"  {line}" for line in quest.estimate(question))
            if taken:
                yield f"  taken over from earlier runs: {taken} of these boots; {question.finding().sentence}"
            if quest.more:
                yield f"  then, at its winner: {', '.join(quest.more)}"
    asked = [mark for mark in item.iter_markers() if mark.name in BOOTING and mark.name not in SEARCHES]
    if asked:
        yield f"  checks: {', '.join(map(_written, asked))}"
    yield from _command_lines(session, shape)


def _written(mark: pytest.Mark) -> str:
    """A mark as its test has it: ``knife_edge(prompt_tokens=995)``."""
    return f"{mark.name}({', '.join(f'{name}={value!r}' for name, value in mark.kwargs.items())})"


def _taken_over(quest: Quest, question: Question) -> tuple[int, RungPlan | None]:
    """How many finished boots of earlier runs stand for boots of this search, and the first rung that none does."""
    taken = 0
    for known, path, record in quest.known(question):
        question.tell(known, record, path, reused=True, known=True)
        taken += 1
    while (plan := question.next()) is not None and (found := quest.earlier(question, plan)) is not None:
        question.tell(plan, found[1], found[0], reused=True)
        taken += 1
    return taken, plan


def _command_lines(session: KvSession, shape: Shape) -> Iterator[str]:
    command = session.pool.command(shape)
    yield f"  shape: {described(shape)}"
    for name, value in sorted(without_secrets(command.env_added).items()):
        yield f"  env: {name}={shlex.quote(value)}"
    yield f"  command: {shlex.join(command_without_secrets(command.argv))}"
