"""All figures there are: `registry.yaml`, with the functions that it names. The report reads the same file."""

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import yaml
from matplotlib.figure import Figure

from plots.data import Tables

REGISTRY = Path(__file__).with_name("registry.yaml")

Draw = Callable[[Tables, str], Figure | None]
"""Makes the figure of a name from the tables; None where it has no rows."""


def _drawings() -> Iterator[tuple[str, Draw]]:
    for name, entry in yaml.safe_load(REGISTRY.read_text(encoding="utf-8")).items():
        if "draw" in entry:
            module, _, function = entry["draw"].partition(".")
            yield name, getattr(import_module(f"plots.{module}"), function or "draw")


DRAWINGS = dict(_drawings())
"""What draws each figure, in the order of the report."""
