"""Settings of methods: each field of a dataclass has a default, a meaning and an allowed range.

    budget: float = setting(0.2, "share of the cached tokens that a row reads", share())

`Method` checks the ranges when it is made, and `--help` prints them. A subclass that gives a field
another default keeps its meaning and range; `setting(32, allowed=least(1))` changes the range.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

MEANING, ALLOWED = "meaning", "allowed"


class Allowed(NamedTuple):
    """A range. words: complete "must be ..."; holds: True for a value within it."""

    words: str
    holds: Callable[[Any], bool]


class Setting(NamedTuple):
    """A field of a method. meaning: one line, "" if unsaid; allowed: None if the type says all."""

    name: str
    default: Any
    meaning: str
    allowed: Allowed | None


def setting(default: Any, meaning: str | None = None, allowed: Allowed | None = None) -> Any:
    """A dataclass field. None takes the meaning or the range of the class that it derives from."""
    return dataclasses.field(default=default, metadata={MEANING: meaning, ALLOWED: allowed})


def settings_of(cls: Any) -> tuple[Setting, ...]:
    """All settings of a dataclass, in the order of its fields."""
    return _read_once(cls)


@cache
def _read_once(cls: Any) -> tuple[Setting, ...]:
    """Methods are made often while a budget is looked for, each with a check of its settings."""
    found = []
    for field in dataclasses.fields(cls):
        meaning = _said(cls, field.name, MEANING) or ""
        found.append(Setting(field.name, field.default, meaning, _said(cls, field.name, ALLOWED)))
    return tuple(found)


def _said(cls: type, name: str, key: str) -> Any:
    """Metadata of a field, of the class or of the nearest one that it derives from."""
    for owner in cls.__mro__:
        field = vars(owner).get("__dataclass_fields__", {}).get(name)
        if field is not None and field.metadata.get(key) is not None:
            return field.metadata[key]
    return None


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raise ValueError naming the setting, its value and what is allowed, unless `condition`."""
    if not condition:
        raise ValueError(f"method.{field}={value}: must be {allowed}")


# Ranges


def least(number: int, *, null: bool = False) -> Allowed:
    """Whole numbers from `number` on."""
    if null:
        return Allowed(f">= {number} or null", lambda value: value is None or value >= number)
    return Allowed(f"an integer >= {number}", lambda value: value >= number)


def zero_or_more() -> Allowed:
    """Numbers from 0 on."""
    return Allowed("a number >= 0", lambda value: value >= 0)


def share(*, zero: bool = False, null: bool = False) -> Allowed:
    """Numbers up to 1, above 0 (or from 0 on)."""

    def holds(value: Any) -> bool:
        if value is None:
            return null
        return 0 < value <= 1 or (zero and value == 0)

    interval = "in [0, 1]" if zero else "in (0, 1]"
    return Allowed(f"{interval} or null" if null else interval, holds)


def odd() -> Allowed:
    """Widths of a filter with a middle."""
    return Allowed("an odd integer >= 1", lambda value: value >= 1 and value % 2 == 1)


def one_of(*choices: str | int | None) -> Allowed:
    """One of some words or numbers; None is written null."""
    words = ["null" if choice is None else str(choice) for choice in choices]
    return Allowed(f"one of {', '.join(words)}", lambda value: value in choices)
