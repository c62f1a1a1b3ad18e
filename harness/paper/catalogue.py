"""The paper's figures and tables, as the report shows them: those of the registry that the figures are drawn by.

Read as a file, since what measures knows nothing of what draws.
"""

from pathlib import Path
from typing import NamedTuple

import yaml

REGISTRY = Path(__file__).resolve().parents[2] / "plots" / "registry.yaml"
MODELLED = "-modelled"
"""The end of the name of what the cost model predicts."""
PAGES = ("leaderboard", "frontier", "index", "long decode", "accuracy", "speed", "analysis")
"""Those of the report, in their order."""


class Entry(NamedTuple):
    """A figure or table. name: that of `results/figures/<name>.png`. tables: of `results/tables`, the one with its own
    numbers first. page: one of `PAGES`. chart: of `harness.paper.report.charts`, None where there is none."""

    name: str
    title: str
    command: str
    tables: tuple[str, ...]
    page: str
    chart: str | None = None


def _entries() -> tuple[Entry, ...]:
    said = yaml.safe_load(REGISTRY.read_text(encoding="utf-8"))
    return tuple(
        Entry(name, each["title"], each["command"], tuple(each.get("tables", [name])), each["page"], each.get("chart"))
        for name, each in said.items()
    )


ENTRIES = _entries()
