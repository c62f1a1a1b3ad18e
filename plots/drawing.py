"""All figures of `registry.yaml`, and their files, whose bytes depend on the drawing alone."""

import io
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from harness.errors import UserError, reason
from harness.files import write_atomic
from harness.settings.paths import shipped_beside
from plots import style
from plots.data import Tables

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
Draw = Callable[[Tables, str], Figure | None]


DRAWINGS: dict[str, Draw] = {}
"""The draw function of each figure, in the order of the report."""
TABLES: dict[str, list[str]] = {}
"""The tables that each figure of the registry is drawn from."""
for _entries in style.REGISTRY["pages"].values():
    for _name, _entry in _entries.items():
        TABLES[_name] = _entry.get("tables", [_name])
        if "draw" in _entry:
            _module, _function = _entry["draw"].split(".")
            DRAWINGS[_name] = getattr(import_module(f"plots.{_module}"), _function)
            if _entry.get("modelled"):
                DRAWINGS[_name + MODELLED] = DRAWINGS[_name]


def draw_all(results: Path) -> list[Path]:
    """Draw every figure whose table exists, as `plots.draw_figures` says."""
    tables = Tables(results / "tables")
    paths: list[Path] = []
    refusals: list[str] = []
    with style.applied():
        for name, draw in DRAWINGS.items():
            if _is_shipped(results, name):
                continue
            try:
                figure = draw(tables, name)
                files = {} if figure is None else rendered(figure)
            except UserError as refusal:
                refusals.append(str(refusal))
            except Exception as error:  # whatever an odd table leads matplotlib or pandas to
                refusals.append(f"{name}: not drawn ({reason(error)})")
            else:
                for kind, data in files.items():
                    path = results / "figures" / f"{name}.{kind}"
                    write_atomic(path, data)
                    paths.append(path)
    if refusals:
        raise UserError("; ".join(dict.fromkeys(refusals)))  # several figures read one table
    return paths


def _is_shipped(results: Path, name: str) -> bool:
    """Whether a figure is shipped, and nothing in it is of one's own: drawing it gives the same."""
    shipped = shipped_beside(results)
    if shipped is None or not (shipped / "figures" / f"{name}.svg").exists():
        return False
    own = [results / "tables" / f"{table}.csv" for table in TABLES.get(name, [name])]
    return not any(map(Path.exists, own))


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
