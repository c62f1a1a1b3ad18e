"""All figures of `registry.yaml`, and their files, whose bytes depend on the drawing alone."""

import io
import re
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from harness.errors import UserError
from harness.files import write_atomic
from plots import style
from plots.data import read

MODELLED = "-modelled"
DPI = 160
FORMATS: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
    "svg": {"Date": None},
}
"""Formats with the metadata that would differ between reruns."""
PATH, LONG_FRACTION = re.compile(rb' d="[^"]*"'), re.compile(rb"(\.\d)\d+")
"""The coordinates of an SVG's path, of which tenths of a point are enough."""

DRAWINGS: dict[str, Callable[..., Figure | None]] = {}
"""The draw function of each figure, in the order of the report."""
TABLES: dict[str, list[str]] = {}
"""The tables of each figure, in the order of its function's parameters; it may have more."""
for _entries in style.REGISTRY["pages"].values():
    for _name, _entry in _entries.items():
        if "draw" in _entry:
            _module, _function = _entry["draw"].split(".")
            DRAWINGS[_name] = getattr(import_module(f"plots.{_module}"), _function)
            TABLES[_name] = _entry.get("tables", [_name])
        if _entry.get("modelled"):
            DRAWINGS[_name + MODELLED] = DRAWINGS[_name]
            TABLES[_name + MODELLED] = [_name + MODELLED]


def draw_all(results: Path) -> list[Path]:
    """The figures of a folder, as `plots.draw_figures` says."""
    paths: list[Path] = []
    refusals: dict[str, None] = {}  # several figures read one table
    with style.applied():
        for name in DRAWINGS:
            own = [results / "tables" / f"{table}.csv" for table in TABLES[name]]
            if not any(map(Path.exists, own)):
                continue  # the shipped figure holds
            try:
                figure = figure_of(results, name)
            except UserError as refusal:
                refusals[str(refusal)] = None
                continue
            for kind, data in rendered(figure).items() if figure else ():
                paths.append(results / "figures" / f"{name}.{kind}")
                write_atomic(paths[-1], data)
    if refusals:
        raise UserError("; ".join(refusals))
    return paths


def figure_of(results: Path, name: str) -> Figure | None:
    """A figure from the tables of a results folder; None where its own has no rows for it.

    Its function is given its own table, and others without rows where they do not exist.
    """
    draw = DRAWINGS[name]
    own, *others = TABLES[name][: len(signature(draw).parameters)]
    table = read(results, own)
    if table is None or table.empty:
        return None
    beside = [read(results, other) for other in others]
    return draw(table, *(table.head(0) if other is None else other for other in beside))


def rendered(figure: Figure) -> dict[str, bytes]:
    """The figure by format, without dates."""
    files = {}
    for kind, metadata in FORMATS.items():
        data = io.BytesIO()
        figure.savefig(data, format=kind, dpi=DPI, metadata=metadata)
        files[kind] = data.getvalue()
    if "svg" in files:
        files["svg"] = PATH.sub(lambda path: LONG_FRACTION.sub(rb"\1", path[0]), files["svg"])
    return files
