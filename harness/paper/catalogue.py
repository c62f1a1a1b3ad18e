"""The paper's figures and tables, as the report shows them: those of the registry that the figures are drawn by.

Read as a file, since what measures knows nothing of what draws.
"""

from pathlib import Path
from typing import NamedTuple

import yaml

REGISTRY = Path(__file__).resolve().parents[2] / "plots" / "registry.yaml"
MODELLED = "-modelled"
"""The end of the name of what the cost model predicts."""


class Entry(NamedTuple):
    """A figure or table. name: that of `results/figures/<name>.png`. tables: of `results/tables`, the one with its own
    numbers first."""

    name: str
    title: str
    command: str
    tables: tuple[str, ...]


def _entries() -> tuple[Entry, ...]:
    said = yaml.safe_load(REGISTRY.read_text(encoding="utf-8"))
    return tuple(
        Entry(name, entry["title"], entry["command"], tuple(entry.get("tables", [name])))
        for name, entry in said.items()
    )


ENTRIES = _entries()
