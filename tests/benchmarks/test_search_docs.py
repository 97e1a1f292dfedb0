"""The page of the ladders has a place for the tables of the search."""

from __future__ import annotations

import pytest

from tests.benchmarks import search_docs


def test_tables_replace_those_of_before_and_nothing_else() -> None:
    page = f"above\n{search_docs.BEGIN}\nold\n{search_docs.END}below\n"
    once = search_docs.written(page, ["one\n", "two\n"])
    assert once == (f"above\n{search_docs.BEGIN}\n```text\none\n```\n\n```text\ntwo\n```\n\n{search_docs.END}below\n")
    assert search_docs.written(once, ["one\n", "two\n"]) == once
    with pytest.raises(ValueError, match="not exactly one"):
        search_docs.written("above\n", ["one\n"])


def test_the_docs_have_both_tables_and_nothing_wrong_in_them() -> None:
    page = search_docs.PAGE.read_text(encoding="utf-8")
    shown = page.split(search_docs.BEGIN)[1].split(search_docs.END)[0].splitlines()
    assert [line for line in shown if line.startswith("wrong ")] == ["wrong 0, goals missed 0", "wrong 0"]
    assert sum(line.startswith("1000 random ") for line in shown) == 2
