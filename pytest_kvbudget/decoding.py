"""Tables as people write them, decoded strictly: sizes as text, and messages that say what was expected."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final, TypeVar

import msgspec
from msgspec import inspect

from pytest_kvbudget.units import SizeError, parse_memory, parse_size

_T = TypeVar("_T")

_PARSERS: Final[Mapping[object, Callable[[object], int]]] = {"size": parse_size, "memory": parse_memory}
"""How a field's type in `pytest_kvbudget.shape` has its text read."""


class KeyedError(Exception):
    """Something wrong at one key of a table: which key, what was found and what was expected."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def decoded(raw: Mapping[str, Any], kind: type[_T]) -> _T:
    """A table as ``kind``.

    Raises:
        KeyedError: for the first unknown key, wrong type or impossible value.
    """
    try:
        return msgspec.convert(_checked(raw, inspect.type_info(kind), ""), kind, strict=True)
    except msgspec.ValidationError as error:
        raise KeyedError("", str(error)) from None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``did you mean 'x'? `` where a known word is close, else nothing."""
    near = get_close_matches(str(name), list(known), 1)
    return f"did you mean {near[0]!r}? " if near else ""


def _checked(raw: object, info: inspect.Type, key: str) -> object:
    """``raw`` with sizes written as text replaced by bytes, wherever ``info`` has a size."""
    if isinstance(info, inspect.Metadata):
        return _sized(raw, info, key)
    if isinstance(info, inspect.UnionType):
        return _one_of(raw, info, key)
    if not _fits(raw, info):
        # text may be a secret that lost its quotes
        shown = _kind(raw) if isinstance(info, inspect.StrType) else _written(raw)
        raise KeyedError(key, f"is {shown}; {_near(raw, info)}expected {_expected(info)}")
    if isinstance(raw, Mapping):
        return _table(raw, info, key)
    if isinstance(raw, (list, tuple)) and isinstance(info, (inspect.VarTupleType, inspect.ListType)):
        return [_checked(value, info.item_type, f"{key}[{index}]") for index, value in enumerate(raw)]
    return raw


def _sized(raw: object, info: inspect.Metadata, key: str) -> object:
    parse = _PARSERS.get((info.extra or {}).get("kvbudget"))
    if parse is None:
        return _checked(raw, info.type, key)
    try:
        return parse(raw)
    except SizeError as error:
        raise KeyedError(key, str(error)) from None


def _one_of(raw: object, info: inspect.UnionType, key: str) -> object:
    members = [member for member in info.types if not isinstance(member, inspect.NoneType)]
    if raw is None and len(members) < len(info.types):
        return None
    if len(members) == 1:
        return _checked(raw, members[0], key)
    if not any(_fits(raw, member) for member in members):
        raise KeyedError(key, f"is {_written(raw)}; expected {' or '.join(map(_expected, members))}")
    return raw


def _table(raw: Mapping[Any, object], info: inspect.Type, key: str) -> Mapping[Any, object]:
    below = f"{key}." if key else ""
    if isinstance(info, inspect.DictType):
        for name in raw:
            if not _fits(name, info.key_type):
                near = _near(name, info.key_type)
                raise KeyedError(f"{below}{name}", f"unknown key; {near}expected {_expected(info.key_type)}")
        return {name: _checked(value, info.value_type, f"{below}{name}") for name, value in raw.items()}
    if not isinstance(info, inspect.StructType):
        return raw
    fields = {field.encode_name: field for field in info.fields}
    for name in raw:
        if name not in fields:
            raise KeyedError(f"{below}{name}", f"unknown key; {did_you_mean(name, fields)}expected {', '.join(fields)}")
    for name, field in fields.items():
        if field.required and name not in raw:
            raise KeyedError(f"{below}{name}", f"is missing; expected {_expected(field.type)}")
    return {name: _checked(value, fields[name].type, f"{below}{name}") for name, value in raw.items()}


def _fits(raw: object, info: inspect.Type) -> bool:
    """Whether a plain value is of a type and within its bounds."""
    if isinstance(info, (inspect.IntType, inspect.FloatType)):
        number = isinstance(raw, int if isinstance(info, inspect.IntType) else (int, float))
        return number and not isinstance(raw, bool) and _is_within(raw, info)
    if isinstance(info, inspect.EnumType):
        return raw in {member.value for member in info.cls}
    if isinstance(info, inspect.LiteralType):
        return raw in info.values
    plain = _PLAIN.get(type(info))
    return True if plain is None else isinstance(raw, plain)


_PLAIN: Final[Mapping[type, type | tuple[type, ...]]] = {
    inspect.StrType: str,
    inspect.BoolType: bool,
    inspect.DictType: Mapping,
    inspect.StructType: Mapping,
    inspect.VarTupleType: (list, tuple),
    inspect.ListType: (list, tuple),
}


def _is_within(raw: object, info: inspect.IntType | inspect.FloatType) -> bool:
    assert isinstance(raw, (int, float)), "asked of numbers only"
    return (
        (info.gt is None or raw > info.gt)
        and (info.ge is None or raw >= info.ge)
        and (info.lt is None or raw < info.lt)
        and (info.le is None or raw <= info.le)
    )


def _expected(info: inspect.Type) -> str:
    """What a type takes, in words."""
    words = "text"
    if isinstance(info, inspect.Metadata):
        words = "a size" if (info.extra or {}).get("kvbudget") in _PARSERS else _expected(info.type)
    elif isinstance(info, inspect.UnionType):
        words = " or ".join(_expected(member) for member in info.types if not isinstance(member, inspect.NoneType))
    elif isinstance(info, (inspect.IntType, inspect.FloatType)):
        words = ("a whole number" if isinstance(info, inspect.IntType) else "a number") + _bounds(info)
    elif isinstance(info, (inspect.EnumType, inspect.LiteralType)):
        words = f"one of {', '.join(_choices(info))}"
    elif isinstance(info, (inspect.VarTupleType, inspect.ListType)):
        words = f"a list, each {_expected(info.item_type)}"
    elif isinstance(info, (inspect.DictType, inspect.StructType)):
        words = "a table"
    elif isinstance(info, inspect.BoolType):
        words = "true or false"
    return words


def _choices(info: inspect.EnumType | inspect.LiteralType) -> list[str]:
    if isinstance(info, inspect.LiteralType):
        return [str(value) for value in info.values]
    return [str(member.value) for member in info.cls]


def _bounds(info: inspect.IntType | inspect.FloatType) -> str:
    least = f"above {info.gt:g}" if info.gt is not None else f"of {info.ge:g} or more" if info.ge is not None else ""
    most = f"below {info.lt:g}" if info.lt is not None else f"at most {info.le:g}" if info.le is not None else ""
    return (f" {least}" if least else "") + (" and" if least and most else "") + (f" {most}" if most else "")


def _near(raw: object, info: inspect.Type) -> str:
    return did_you_mean(raw, _choices(info)) if isinstance(info, (inspect.EnumType, inspect.LiteralType)) else ""


def _written(raw: object) -> str:
    """A value as people wrote it; of a table or list only what it is."""
    if isinstance(raw, bool):
        return str(raw).lower()
    return _kind(raw) if isinstance(raw, (Mapping, list, tuple)) else repr(raw)


def _kind(raw: object) -> str:
    kinds = ((Mapping, "a table"), ((list, tuple), "a list"), (bool, "true or false"), ((int, float), "a number"))
    return next((words for kind, words in kinds if isinstance(raw, kind)), type(raw).__name__)
