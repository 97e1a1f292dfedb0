"""The text of all that a function depends on: its own code, and what the names in it stand for, however far away.

A gate is as often ``assert tokens >= SLOTS`` as a number in the body itself: two runs ask the same only where the
constants, helpers and modules behind the names are the same too. What an installed release brings is not looked into.
"""

from __future__ import annotations

import inspect
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from enum import Enum
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final

_OURS: Final = "pytest_kvbudget"
_ADDRESS: Final = " at 0x"
"""In what an object shows of itself: another one in every process."""
_PLAIN: Final = (int, float, complex, str, bytes, bool, type(None), type(...), range)


class _Seen:
    """What was visited. It is kept alive: an object's id is another one's as soon as it is gone."""

    def __init__(self) -> None:
        self._kept: dict[int, object] = {}

    def first(self, thing: object) -> bool:
        """It was not visited before; it is now."""
        if id(thing) in self._kept:
            return False
        self._kept[id(thing)] = thing
        return True


def dependencies(functions: Iterable[Callable[..., object]], values: Mapping[str, object]) -> Iterator[str]:
    """Source and values that decide what functions do, each once, in an order that is the same in every run.

    Args:
        functions: whose code is followed.
        values: what they are given, by name.

    Raises:
        OSError: the source of something that they depend on cannot be read.
        TypeError: something that they depend on is written in no Python file.
    """
    seen = _Seen()
    for function in functions:
        yield from _of_source(inspect.unwrap(function), seen)
    yield from _of_value("values", values, seen)


def is_foreign(thing: object) -> bool:
    """It comes with an installed release (of Python, pytest, a plugin, or us), not with the tests."""
    module = thing if isinstance(thing, ModuleType) else inspect.getmodule(thing)
    if module is None or module.__name__.partition(".")[0] == _OURS:
        return module is not None
    file = getattr(module, "__file__", None)
    return file is None or "site-packages" in file or "_pytest" in file or Path(file).is_relative_to(_standard())


@cache
def _standard() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _of_source(thing: Callable[..., object], seen: _Seen) -> Iterator[str]:
    """A function or a class: its text, and what that text names."""
    if not seen.first(thing):
        return
    yield inspect.getsource(thing)
    for function in (thing, *vars(thing).values()) if inspect.isclass(thing) else (thing,):
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            yield from _of_code(function, code, seen)


def _of_code(function: object, code: CodeType, seen: _Seen) -> Iterator[str]:
    world: Mapping[str, object] = getattr(function, "__globals__", {})
    for name in sorted(_names(code)):
        if name in world:
            yield from _of_value(name, world[name], seen)
    cells = getattr(function, "__closure__", None) or ()
    for name, cell in zip(code.co_freevars, cells, strict=True):
        yield from _of_value(name, cell.cell_contents, seen)
    # what stood in the signature is a value by now
    yield from _of_value("defaults", getattr(function, "__defaults__", None), seen)
    yield from _of_value("keyword defaults", getattr(function, "__kwdefaults__", None), seen)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _of_value(name: str, value: object, seen: _Seen) -> Iterator[str]:
    if isinstance(value, (*_PLAIN, Enum)):
        yield f"{name}={value!r}"
    elif isinstance(value, ModuleType):
        if not is_foreign(value):
            yield from _of_module(value, seen)
    elif inspect.isclass(value) or inspect.isroutine(value):
        if not is_foreign(value):
            yield from _of_source(inspect.unwrap(value), seen)
    elif not seen.first(value):
        return
    elif isinstance(value, (list, tuple, Mapping, Set)):
        yield from _of_items(name, value, seen)
    else:
        yield from _of_object(name, value, seen)


def _of_items(
    name: str, value: list[object] | tuple[object, ...] | Mapping[object, object] | Set[object], seen: _Seen
) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _of_value(f"{name}[{key!r}]", item, seen)
    else:
        # the order of a set is another one in every process
        items = sorted(value, key=repr) if isinstance(value, Set) else value
        yield f"{name} of {len(value)}"
        for item in items:
            yield from _of_value(name, item, seen)


def _of_module(module: ModuleType, seen: _Seen) -> Iterator[str]:
    """Its text, and what it may have from elsewhere."""
    if not seen.first(module):
        return
    yield inspect.getsource(module)
    for name, value in sorted(vars(module).items()):
        if not name.startswith("__"):
            yield from _of_value(f"{module.__name__}.{name}", value, seen)


def _of_object(name: str, value: object, seen: _Seen) -> Iterator[str]:
    """An object of a class: of one that the tests brought all that it holds, of another one what it shows of itself."""
    kind = type(value)
    yield f"{name}: {kind.__module__}.{kind.__qualname__}"
    if not is_foreign(kind):
        yield from _of_source(kind, seen)
        yield from _of_value(name, dict(getattr(value, "__dict__", {})), seen)
    elif _ADDRESS not in (shown := repr(value)):
        yield shown
