"""Imports point one way: what a module is built on does not know it."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest_kvbudget

ROOT = Path(str(pytest_kvbudget.__file__)).parent
LAYERS = ("ledger", "budget", "search", "device", "engine", "report", "plugin")
"""Packages, the lower first. ``mock`` is beside them: its spec is low, its engine imports what it is started by."""
PURE = ("budget", "ledger", "search")
IO = frozenset({"os", "subprocess", "socket", "requests", "psutil", "threading", "tempfile", "shutil"})


def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name, without the package's own."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imported(tree: ast.Module) -> set[str]:
    """What a module imports when it is imported: not in functions, nor for type checkers only."""
    found: set[str] = set()
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        statement = waiting.pop()
        if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            found.add(statement.module)
            found |= {f"{statement.module}.{alias.name}" for alias in statement.names}
        elif isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" not in ast.unparse(statement.test):
            waiting += [*statement.body, *statement.orelse]
        elif isinstance(statement, ast.Try):
            waiting += statement.body
    return found


def own(tree: ast.Module, known: dict[str, ast.Module]) -> set[str]:
    """The modules of this package among its imports."""
    names = {name.removeprefix("pytest_kvbudget.") for name in imported(tree) if name.startswith("pytest_kvbudget.")}
    return names & set(known)


def test_no_module_is_built_on_itself() -> None:
    known = modules()
    graph = {name: own(tree, known) - {name} for name, tree in known.items()}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None
    assert len(order) == len(known)


def test_lower_packages_know_no_higher_one() -> None:
    known = modules()
    wrong = []
    for name, tree in known.items():
        package = name.partition(".")[0]
        if package not in LAYERS:
            continue
        above = LAYERS[LAYERS.index(package) + 1 :]
        wrong += [f"{name} imports {other}" for other in own(tree, known) if other.partition(".")[0] in above]
    assert wrong == []


def test_only_the_plugin_imports_pytest() -> None:
    users = [name for name, tree in modules().items() if imported(tree) & {"pytest", "_pytest", "pluggy"}]
    assert [name for name in users if name.partition(".")[0] != "plugin"] == []


def test_what_decides_touches_nothing() -> None:
    """Budget, ledger and search get everything as values."""
    users = {name: imported(tree) & IO for name, tree in modules().items() if name.partition(".")[0] in PURE}
    assert {name: found for name, found in users.items() if found} == {}
