"""Types of records that users fill in from Python: what the command line and the HTTP schemas check by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

__all__ = ["WrongType", "wrong_type"]


class WrongType(NamedTuple):
    """A field that holds what it must not.

    Attributes:
        field: the field's name.
        value: what it holds.
        allowed: what it may hold, for a message.
    """

    field: str
    value: object
    allowed: str


def wrong_type(record: object) -> WrongType | None:
    """Return the first field of a dataclass whose value is not of its annotation, or None.

    Knows what records of settings need: plain types, None, ``Literal``, ``tuple[T, ...]``, ``Mapping[K, V]``, and
    unions of them. An int is a float; a bool is no int.
    """
    hints = _hints(type(record))  # type: ignore[arg-type]  # to mypy, type[object] cannot be hashed
    for name, annotation in hints.items():
        value = getattr(record, name)
        if not _is(value, annotation):
            return WrongType(name, value, _named(annotation))
    return None


@cache
def _hints(record_type: type) -> dict[str, Any]:
    return get_type_hints(record_type)


def _is(value: object, annotation: Any) -> bool:  # noqa: ANN401 - an annotation can be anything
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return any(_is(value, arg) for arg in args)
    if origin is Literal:
        return isinstance(value, str)  # which of them, the record says in its own words
    if origin is tuple:
        return isinstance(value, tuple) and all(_is(item, args[0]) for item in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_is(k, args[0]) and _is(v, args[1]) for k, v in value.items())
    if annotation is float:
        return type(value) in (int, float)
    return type(value) is annotation


def _named(annotation: Any) -> str:  # noqa: ANN401
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(_named(arg) for arg in args)
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is tuple:
        return f"a tuple, as a sequence of which each is {_named(args[0])}"
    if origin is Mapping:
        return f"a mapping of {_named(args[0])} to {_named(args[1])}"
    named = {NoneType: "None", int: "an int", float: "a number", str: "a text", bool: "True or False"}
    return named.get(annotation) or f"a {annotation.__name__}"
