"""`python -m docs.methods_page`: write docs/methods.md.

The rule of each method, and where it differs from official code, stand in the docstring of its
module, behind `MARK`. Its row in the table stands in the docstring of its class, as paragraphs
`Source: ...`, `Keeps: ...` and `Reads: ...`; names are those of the files of `conf/method`, and
settings are the class's fields. `docs/methods.template` has everything that is not about one
method. In it stand `{{table}}`, `{{rules:evict}}` and `{{rules:select}}` for all methods that evict
or select, in the order of their names, and `{{module}}` for another module's text.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

from harness.files import write_atomic
from harness.settings.schema import options, shipped
from methods.base import Method
from methods.selection import ChoosingBy, Selecting, SelectingBy
from methods.settings import settings_of

MARK = "The rule, and where it differs (made into docs/methods.md):"
COLUMNS = ("Source", "Keeps", "Reads")
SHARED = {setting.name for setting in settings_of(SelectingBy)}
"""Settings that have a table of their own."""
PAGE = Path(__file__).with_name("methods.md")


def rule_of(module: str) -> str:
    """What the docstring of a module of `methods`, such as `h2o`, says behind `MARK`."""
    docstring = inspect.getdoc(importlib.import_module(f"methods.{module}")) or ""
    return docstring.split(MARK)[1].strip()


def _methods() -> dict[type[Method], list[str]]:
    """The classes of shipped methods but the full cache, each with its names in `conf/method`:
    those that evict first, in the order of their names."""
    found: dict[type[Method], list[str]] = {}
    for name in options("method"):
        cls: type[Method] = shipped(name)[0]
        if cls.state is not None:
            found.setdefault(cls, []).append(name)
    return dict(sorted(found.items(), key=lambda item: (_group(item[0]), item[1][0])))


def _group(cls: type[Method]) -> str:
    """Whether a method evicts, or selects of what is cached."""
    return "evict" if cls().when == "kept" else "select"


def _row(cls: type[Method], names: list[str]) -> str:
    """A method's row of the table."""
    paragraphs = dict.fromkeys(COLUMNS, "")
    column = None
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        start, colon, rest = line.partition(":")
        if colon and start in COLUMNS:
            column, line = start, rest
        elif not line.startswith(" "):
            column = None
        if column is not None:
            paragraphs[column] += f" {line.strip()}"
    shared = SHARED if issubclass(cls, (Selecting, ChoosingBy)) else {"dense_layers"}
    settings = []
    for setting in settings_of(cls):
        if setting.name not in shared:
            settings.append(f"`{setting.name}`")
    cells = [" ".join(f"`{name}`" for name in names)]
    cells += [words.strip() for words in paragraphs.values()]
    cells.append(" ".join(settings))
    return "| " + " | ".join(cells) + " |"


def _filled(place: str) -> str:
    """The text that goes to a place of the template."""
    if place == "table":
        return "\n".join(_row(cls, names) for cls, names in _methods().items())
    kind, _, group = place.partition(":")
    if not group:
        return rule_of(kind)
    modules = []
    for cls in _methods():
        module = cls.__module__.removeprefix("methods.")
        if _group(cls) == group and module not in modules:
            modules.append(module)
    return "\n\n".join(rule_of(module) for module in modules)


def render() -> str:
    """The page."""
    template = PAGE.with_suffix(".template").read_text(encoding="utf-8")
    return re.sub(r"\{\{([\w.:]+)\}\}", lambda place: _filled(place[1]), template)


if __name__ == "__main__":
    write_atomic(PAGE, render())
    print(PAGE)
