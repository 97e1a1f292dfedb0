from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from pytest_kvbudget.report.elements import document, element
from pytest_kvbudget.report.plain import one_line, visible
from tests.report.reading import read_text


@given(text=st.text(), attribute=st.text())
def test_text_and_attributes_come_back_as_they_were(text: str, attribute: str) -> None:
    page = read_text(document("t", element("p", text, title=attribute, class_="it")))
    node = page.one("p", "it")
    assert "".join(node.pieces) == visible(text)
    assert node.attributes["title"] == visible(attribute)


@given(parts=st.lists(st.text(st.characters(exclude_characters="\x1b")), max_size=6))
def test_children_keep_their_order(parts: list[str]) -> None:
    mixed = [element("b", part) if index % 2 else part for index, part in enumerate(parts)]
    page = read_text(document("t", element("p", mixed, class_="it")))
    assert "".join(page.one("p", "it").pieces) == visible("".join(parts))


@given(st.text(alphabet=st.characters(categories=("Cc", "Cf", "Cs", "Lu", "Zs"))))
def test_visible_leaves_no_control_and_no_direction_mark(text: str) -> None:
    shown = visible(text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", shown)
    assert "\n" not in one_line(text)
    shown.encode("utf-8")


def test_terminal_escapes_are_taken_out_whole() -> None:
    # the engine's own coloured prefix (vLLM up to 0.12), and a window title
    assert visible("\x1b[1;36m(EngineCore pid=7)\x1b[0;0m INFO\x1b]0;title\x07 up") == "(EngineCore pid=7) INFO up"


def test_absent_attributes_and_children() -> None:
    page = read_text(document("t", element("p", None, "x", title=None, hidden=True, draggable=False)))
    assert page.one("p").attributes == {"hidden": ""}
    assert page.one("p").text == "x"
