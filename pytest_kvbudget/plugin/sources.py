"""The text of all that a function depends on: its own code, and what the names in it stand for, however far away.

A gate is as often ``assert tokens >= SLOTS`` as a number in the body itself: two runs ask the same only where the
constants, helpers and modules behind the names are the same too. What an installed release brings is not looked into.
"""

from __future__ import annotations

import dis
import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final

_OURS: Final = "pytest_kvbudget"
_OF_EVERY_CLASS: Final = frozenset(
    ("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__firstlineno__")
)
"""Of a class, what says nothing of what it does."""
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
        functions: functions and classes whose code is followed.
        values: what they are given, by name.

    Raises:
        OSError: the source of something that they depend on cannot be read.
        TypeError: something that they depend on is written in no Python file.
        ImportError, LookupError: they look something up by a name that only the run knows.
    """
    seen = _Seen()
    for function in functions:
        yield from _of_source(function, seen)
    yield from _of_value("values", values, seen)


def is_foreign(thing: object) -> bool:
    """It comes with an installed release (of Python, pytest, a plugin, or us), not with the tests."""
    module = thing if isinstance(thing, ModuleType) else inspect.getmodule(thing)
    if module is None or module.__name__.partition(".")[0] == _OURS:
        return module is not None
    file = getattr(module, "__file__", None)
    return file is None or _installed(file)


def _installed(file: str) -> bool:
    return "site-packages" in file or "_pytest" in file or Path(file).is_relative_to(_standard())


@cache
def _standard() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _of_source(thing: object, seen: _Seen) -> Iterator[str]:
    """A function or a class: its text, and what that text names."""
    if not seen.first(thing):
        return
    if inspect.isclass(thing):
        yield from _of_class(thing, seen)
        return
    code = getattr(thing, "__code__", None)
    if not isinstance(code, CodeType):
        raise TypeError(f"{thing!r} is no function")
    # what a program wrote (a dataclass's methods) is in no file: its code says the same
    generated = code.co_filename.startswith("<")
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames}" if generated else inspect.getsource(code)
    yield from _of_code(thing, code, seen)
    if (wrapped := getattr(thing, "__wrapped__", None)) is not None:
        yield from _of_value("wrapped", wrapped, seen)


def _of_class(kind: type, seen: _Seen) -> Iterator[str]:
    """A class: its bases, its methods and the values that it holds; its text is in them."""
    yield f"class {kind.__qualname__}"
    for base in kind.__bases__:
        yield from _of_value("base", base, seen)
    for name, value in sorted(vars(kind).items()):
        if name not in _OF_EVERY_CLASS:
            yield from _of_value(f"{kind.__name__}.{name}", value, seen)


def _of_code(function: object, code: CodeType, seen: _Seen) -> Iterator[str]:
    world: Mapping[str, object] = getattr(function, "__globals__", {})
    for part in _parts(code):
        if "getfixturevalue" in part.co_names:
            raise LookupError("getfixturevalue names a fixture that only the run knows")
        for name in sorted(part.co_names):
            if name in world:
                yield from _of_value(name, world[name], seen)
        level = 0
        for instruction in dis.get_instructions(part):
            if instruction.opname == "IMPORT_NAME":
                yield from _of_import(str(instruction.argval), level, str(world.get("__package__") or ""), seen)
            elif isinstance(instruction.argval, int):
                level = instruction.argval  # of a relative import: the number that was put on the stack for it
    cells = getattr(function, "__closure__", None) or ()
    for name, cell in zip(code.co_freevars, cells, strict=True):
        with suppress(ValueError):  # a cell that is empty yet
            yield from _of_value(name, cell.cell_contents, seen)
    # what stood in the signature is a value by now
    yield from _of_value("defaults", getattr(function, "__defaults__", None), seen)
    yield from _of_value("keyword defaults", getattr(function, "__kwdefaults__", None), seen)


def _of_import(name: str, level: int, package: str, seen: _Seen) -> Iterator[str]:
    """What an import statement inside a function brings; not imported for this where nothing else did.

    Args:
        name: as the statement has it.
        level: dots before it.
        package: of the module that the statement stands in.
        seen: what was visited.
    """
    full = importlib.util.resolve_name("." * level + name, package) if level else name
    module = sys.modules.get(full)
    if module is not None:
        yield from _of_value(full, module, seen)
        return
    top = full.partition(".")[0]  # to look for more would import it
    found = importlib.util.find_spec(top)
    if found is None or found.origin is None or (top != full and not _installed(found.origin)):
        raise LookupError(f"nothing tells what {full} is before it is imported")
    if found.origin.endswith(".py") and not _installed(found.origin):
        yield Path(found.origin).read_text(encoding="utf-8")


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)


def _of_value(name: str, value: object, seen: _Seen) -> Iterator[str]:
    if isinstance(value, (*_PLAIN, Enum)):
        yield f"{name}={value!r}"
    elif isinstance(value, ModuleType):
        if not is_foreign(value):
            yield from _of_module(value, seen)
    elif (held := _held(value)) is not None:
        yield from _of_value(name, held, seen)
    elif inspect.isroutine(value) or inspect.isclass(value):
        yield from _of_callable(name, value, seen)
    elif not seen.first(value):
        return
    elif isinstance(value, (list, tuple, Mapping, Set)):
        yield from _of_items(name, value, seen)
    else:
        yield from _of_object(name, value, seen)


def _of_callable(name: str, value: object, seen: _Seen) -> Iterator[str]:
    if inspect.ismethod(value):
        yield from _of_value(name, (value.__func__, value.__self__), seen)
    elif inspect.isclass(value) or inspect.isfunction(value):
        # a wrapper may come from an installed release; what it wraps or closes over need not
        if not is_foreign(value) or (inspect.isfunction(value) and value.__closure__):
            yield from _of_source(value, seen)
    else:
        yield f"{name}: {getattr(value, '__qualname__', name)}"


def _held(value: object) -> tuple[object, ...] | None:
    """What decides what an object of Python's own does, where its text does not show it."""
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, property):
        return value.fget, value.fset
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    return None


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
        yield from _of_value("class", kind, seen)
        yield from _of_value(name, dict(getattr(value, "__dict__", {})), seen)
    elif _ADDRESS not in (shown := repr(value)):
        yield shown
