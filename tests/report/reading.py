"""Reading a page back as a browser would."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path


class Node:
    """An element with its attributes, its own and its descendants' text."""

    def __init__(self, tag: str, attributes: dict[str, str]) -> None:
        self.tag, self.attributes = tag, attributes
        self.pieces: list[str] = []
        self.nodes: list[Node] = []

    @property
    def text(self) -> str:
        """All text inside, white space as one space."""
        return " ".join("".join(self.pieces).split())

    @property
    def classes(self) -> set[str]:
        """Words of the class attribute."""
        return set(self.attributes.get("class", "").split())

    def all(self, tag: str | None = None, class_: str | None = None) -> list[Node]:
        """Descendants with this tag and class, in document order."""
        return [
            node
            for node in self.nodes
            if (tag is None or node.tag == tag) and (class_ is None or class_ in node.classes)
        ]

    def one(self, tag: str | None = None, class_: str | None = None) -> Node:
        """The only descendant with this tag and class."""
        (found,) = self.all(tag, class_)
        return found


class _Reader(HTMLParser):
    _VOID = frozenset(("meta", "br", "hr", "img", "input", "link"))

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        node = Node(tag, {name: value or "" for name, value in attrs})
        for parent in self.open:
            parent.nodes.append(node)
        if tag not in self._VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        closed = self.open.pop()
        assert closed.tag == tag, f"</{tag}> closes <{closed.tag}>"

    def handle_data(self, data: str) -> None:
        for node in self.open:
            node.pieces.append(data)


def read_text(text: str) -> Node:
    """The page as a tree; fails where elements do not nest."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == [reader.root], f"left open: {[node.tag for node in reader.open]}"
    return reader.root


def read_page(path: Path) -> Node:
    """A page's file as a tree."""
    return read_text(path.read_text(encoding="utf-8"))


def table_rows(page: Node, class_: str) -> list[list[str]]:
    """Texts of the body cells of the table with this class."""
    body = page.one("table", class_).one("tbody")
    return [[cell.text for cell in row.nodes if cell.tag in {"th", "td"}] for row in body.all("tr")]
