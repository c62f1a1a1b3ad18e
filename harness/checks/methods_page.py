"""`python -m harness.checks.methods_page`: write docs/methods.md.

The rule of each method, and where it differs from official code, stand in the docstring of its
module, behind `MARK`. `docs/methods.template` has the tables and everything that is not about one
module, and `{{module}}` where a module's text goes.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from harness.errors import exit_code
from harness.files import write_atomic
from harness.settings.paths import PACKAGES_DIR

MARK = "The rule, and where it differs (made into docs/methods.md):"
TEMPLATE = PACKAGES_DIR / "docs" / "methods.template"
PAGE = PACKAGES_DIR / "docs" / "methods.md"


def rule_of(module: str) -> str:
    """What the docstring of a module of `methods`, such as `h2o`, says behind `MARK`."""
    path = PACKAGES_DIR.joinpath("methods", *module.split(".")).with_suffix(".py")
    source = path.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source)) or ""
    _, mark, rule = docstring.partition(MARK)
    if not mark:
        raise ValueError(f"{path}: its docstring has no line {MARK!r}")
    return rule.strip()


def render(template: Path = TEMPLATE) -> str:
    """The page."""
    text = template.read_text(encoding="utf-8")
    return re.sub(r"\{\{([\w.]+)\}\}", lambda place: rule_of(place[1]), text)


def main() -> None:
    """Write the page, and print its path."""
    write_atomic(PAGE, render())
    print(PAGE)


if __name__ == "__main__":
    sys.exit(exit_code(main))
