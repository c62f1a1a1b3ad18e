"""What `--help` says of the chosen method: each setting with its default, range and meaning."""

from __future__ import annotations

import textwrap
from typing import Any, get_type_hints

from harness.settings import own_method
from harness.settings.schema import options

WIDTH = 100
BY_TYPE = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
"""Range of a setting whose type says all."""


def method_help(name: str, target: str) -> str:
    """A table of the settings of a method.

    name, target: `name` and `_target_` of the composed method. A default is that of the preset.
    """
    from methods.settings import settings_of  # loads torch

    if name in options("method"):
        cls, defaults = own_method.shipped(name)
    else:
        cls, defaults = own_method.find(target)
    types = get_type_hints(cls)
    rows = []
    for setting in settings_of(cls):
        default = _as_yaml(defaults[setting.name])
        allowed = _by_type(types[setting.name])
        if setting.allowed is not None:
            allowed = setting.allowed.words
        rows.append((f"method.{setting.name}", default, allowed, setting.meaning))
    header = f"Settings of method={name}: method.SETTING=VALUE, default, meaning"
    return "\n".join([header, *_aligned(rows)])


def _by_type(kind: Any) -> str:
    return BY_TYPE.get(kind, str(kind).replace("None", "null").replace(" | ", " or "))


def _as_yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) and not value.isprintable() else str(value)


def _aligned(rows: list[tuple[str, str, str, str]]) -> list[str]:
    """A line or more for each row, its meaning and range wrapped."""
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    widths[1] = min(widths[1], 20)  # a text may be long
    indent = " " * (sum(widths) + 4)
    lines = []
    for name, default, allowed, meaning in rows:
        start = f"{name:{widths[0]}}  {default:{widths[1]}}  "
        words = f"{meaning}. Allowed: {allowed}" if meaning else f"Allowed: {allowed}"
        lines += textwrap.wrap(words, WIDTH, initial_indent=start, subsequent_indent=indent)
    return lines
