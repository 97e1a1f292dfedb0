"""A small builder of HTML and inline SVG over `xml.etree`: everything is escaped because nothing is a string."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import TypeAlias
from xml.etree import ElementTree as ET

from pytest_kvbudget.report.plain import visible

Element: TypeAlias = ET.Element
Child: TypeAlias = "Element | str | Iterable[Child] | None"
Attribute: TypeAlias = "str | int | float | bool | None"


def element(tag: str, *children: Child, **attributes: Attribute) -> Element:
    """One element.

    Args:
        tag: name of the element.
        children: elements, text (escaped, controls made visible), nested iterables of them; ``None`` is left out.
        attributes: ``class_`` is ``class`` and ``stroke_width`` is ``stroke-width``; ``None`` and ``False`` are
            left out, ``True`` is an attribute without a value.
    """
    made = ET.Element(tag)
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        text = "" if value is True else f"{value:.6g}" if isinstance(value, float) else visible(str(value))
        made.set(name.rstrip("_").replace("_", "-"), text)
    _append(made, children)
    return made


def _append(parent: Element, children: Iterable[Child]) -> None:
    for child in children:
        if child is None:
            continue
        if isinstance(child, ET.Element):
            parent.append(child)
        elif isinstance(child, str):
            text = visible(child)
            if len(parent):
                parent[-1].tail = (parent[-1].tail or "") + text
            else:
                parent.text = (parent.text or "") + text
        else:
            _append(parent, child)


def table(head: Iterable[Child], rows: Iterable[Element], *, class_: str | None = None) -> Element:
    """A table that scrolls sideways on narrow screens; ``head`` holds cells or texts, ``rows`` are ``tr``."""
    cells = [cell if isinstance(cell, ET.Element) else element("th", cell, scope="col") for cell in head]
    return element(
        "div",
        element("table", element("thead", element("tr", cells)), element("tbody", rows), class_=class_),
        class_="scroll",
        tabindex=0,
    )


def document(title: str, *body: Child, band: Element | None = None) -> str:
    """A whole self-contained page, no script, no reference to anything outside it; ``band`` goes across its top."""
    style = resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", style),
    )
    page = element("html", head, element("body", band, element("main", *body)), lang="en")
    return "<!DOCTYPE html>\n" + ET.tostring(page, encoding="unicode", method="html") + "\n"


def write_page(path: Path, page: str) -> Path:
    """Write a page so that a reader sees the old one or the whole new one."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(page, encoding="utf-8")
    scratch.replace(path)
    return path
