"""A plain mapping onto a frozen dataclass, strictly.

Hydra composes untyped YAML (typed schemas in its ConfigStore break composition when frozen and let `+typo=1`
through when not), so types and names are checked here, once, against the dataclass's annotations. A refusal
is a `UserError` naming the setting as the user writes it, its value and what is allowed.
"""

import dataclasses
import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from harness.errors import UserError, nearest

T = TypeVar("T")
PathText = Annotated[str, "path"]
"""The type of a setting that names a file or folder: text that is not empty, its `~` expanded."""
MOST = 2**31 - 1
"""Of any whole number: more tokens, sequences or seeds than this mean a slip of the hand, and fit into no index."""
LARGEST = 3e38
"""Of any finite number: what float32 holds."""
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
    hints = get_type_hints(cls, include_extras=True)
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


def path_text(value: Any, where: str) -> str:
    """A path as a user writes it; UserError where it is empty, no text, or in the home of a user who is not there."""
    text = _scalar(value, str, where)
    if not text:
        raise UserError(f"{where}=: is empty; must be a path, such as . for the present folder")
    try:
        return str(Path(text).expanduser())
    except RuntimeError:
        raise UserError(f"{where}={text}: there is no such home folder") from None


def check_range(setting: str, value: float | None, low: float, *, above: bool = False, most: float = MOST) -> None:
    """UserError where `value` is given and is below `low` (above: or equals it), above `most`, or infinite."""
    if value is None:
        return
    if value < low or (above and value == low):
        raise UserError(f"{setting}={value}: must be {'above' if above else 'at least'} {low}")
    if value > most:
        raise UserError(f"{setting}={value}: must be at most {most}")


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
    if annotation == PathText:
        return path_text(value, where)
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
        check_range(where, value, -MOST)
        return value
    if kind is float and number and (abs(value) < LARGEST or value in (math.inf, -math.inf)):
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
