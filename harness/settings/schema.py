"""A plain mapping onto a frozen dataclass, strictly.

Hydra composes untyped YAML (typed schemas in its ConfigStore break composition when frozen and let `+typo=1`
through when not), so types and names are checked here, once, against the dataclass's annotations. A refusal
is a `UserError` naming the setting as the user writes it, its value and what is allowed.
"""

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from harness.errors import UserError, nearest

T = TypeVar("T")
WORDS: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
"""What a value of each type looks like to a user."""


def build(cls: type[T], settings: Mapping[str, Any], where: str = "") -> T:
    """Make a `cls` from `settings`.

    Args:
        cls: a dataclass; nested dataclasses are built from nested mappings.
        settings: field name to plain value; a field left out keeps its default.
        where: the setting at which `settings` stands, "" at the top.

    Raises:
        UserError: unknown or missing key, wrong type, or what the dataclass's own checks say (`ValueError`).
    """
    hints = get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    for key in settings:
        if key not in names:
            raise UserError(f"unknown setting {_join(where, key)}: {nearest(key, names)}")
    values = {key: _convert(value, hints[key], _join(where, key)) for key, value in settings.items()}
    missing = [name for name in _required(cls) if name not in values]
    if missing:
        raise UserError(f"setting {_join(where, missing[0])} is missing")
    try:
        return cls(**values)
    except ValueError as error:  # `methods` knows no UserError; its messages name the setting already
        raise UserError(str(error)) from error


def _required(cls: type) -> list[str]:
    absent = dataclasses.MISSING
    fields = dataclasses.fields(cls)
    return [field.name for field in fields if field.default is absent and field.default_factory is absent]


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _convert(value: Any, annotation: Any, where: str) -> Any:
    """`value` as `annotation` wants it; only lossless readings are taken (1 for a float, 7 for a string)."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        inner = [argument for argument in arguments if argument is not type(None)]
        return _convert(value, inner[0], where) if len(inner) == 1 else _scalar(value, annotation, where)
    if origin is Literal:
        if value not in arguments:
            raise UserError(f"{where}={value}: {nearest(value, map(str, arguments))}")
        return value
    if origin is tuple:
        return tuple(_convert(item, arguments[0], where) for item in _items(value, where))
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return value if isinstance(value, annotation) else build(annotation, _mapping(value, where), where)
    if origin is Mapping:
        return _mapping(value, where)
    return _scalar(value, annotation, where)


def _scalar(value: Any, kind: Any, where: str) -> Any:
    if kind not in WORDS:
        known = ", ".join(each.__name__ for each in WORDS)
        raise UserError(f"{where}: its type {kind} is none that a setting can have: {known}, Literal, tuple; or None")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and number and isinstance(value, int):
        return value
    if kind is float and number and not math.isnan(value):
        return float(value)
    if kind is str and (isinstance(value, str) or number):
        return str(value)
    raise UserError(f"{where}={value}: must be {WORDS[kind]}")


def _items(value: Any, where: str) -> list[Any]:
    """A list may be written `[a,b]`, `'a,b'` or, for one item, `a`."""
    if isinstance(value, str):
        return [item.strip() for item in value.split(",")]
    if not isinstance(value, list | tuple):
        raise UserError(f"{where}={value}: must be a list such as [a,b]")
    return list(value)


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{where}={value}: must be a group of settings such as {where}.<name>=<value>")
    return value
