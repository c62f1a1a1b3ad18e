"""What the explorer of the leaderboard shows: a point per method and size, the quantities to
choose, and the looks.

`report.js` makes one Vega-Lite specification of them. Words of tables are data in it, never part of
an expression or of a field name. Colours and shapes are those of the figures
(`plots/registry.yaml`).
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from harness.results import columns
from harness.results.columns import BOARD_TASKS, KL, SIZE, STEP, Column, TableRow
from harness.results.leaderboard import COSTS, is_best

Json = dict[str, Any]

VEGA_LITE = "6.4"
COST_COLUMNS: Sequence[Column] = (SIZE, STEP, columns.DEVICE_FRAC, columns.RESIDENT_FRAC)
QUALITY_COLUMNS: Sequence[Column] = (KL, columns.TOP1, columns.NLL, *BOARD_TASKS)
LOGARITHMIC = (KL, SIZE, STEP)
LARGEST = 1e100
OWN_SIZE = "of its own"
OTHER = {"color": "currentColor", "shape": "cross"}
"""The look of a family that the registry does not list."""
LONG_FRACTION = re.compile(r"\d+\.\d{4,}(?:e[-+]?\d+)?|\d+(?:\.\d+)?e[-+]?\d+")
"""A number in the words of a setting with more digits than a reader wants."""


@cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed (BSD-3-Clause) as one script, which sets `vegaEmbed`."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", VEGA_LITE)


def explorer(rows: Sequence[TableRow], families: Mapping[str, Mapping[str, str]]) -> Json | None:
    """What `report.js` needs of the rows of leaderboards; None without points.

    points: by field. choices: of `x`, `y`, `size` and `model`, from a value to its words. axes:
    title and scale of each quantity. tooltip: titles of the words that a hover answers, by field.
    fronts: the name of the front of a cost. families: their looks, those of the figures first.
    """
    points = [_point(row) for row in rows if row.get(KL.name) is not None and is_best(row)]
    if not points:
        return None
    shown = [
        column
        for column in (*COST_COLUMNS, *QUALITY_COLUMNS)
        if any(point[column.name] is not None for point in points)
    ]
    costs, qualities = (
        {column.name: column.heading for column in shown if column in group}
        for group in (COST_COLUMNS, QUALITY_COLUMNS)
    )
    sizes = sorted({point["asked"] for point in points}, key=lambda size: (size == OWN_SIZE, size))
    found = dict.fromkeys(point["family"] for point in points)
    known = {family: dict(look) for family, look in families.items() if family in found}
    words = {"name": "method", "family": "family", "asked": "asked size"}
    return {
        "points": points,
        "choices": {
            "x": costs | qualities,
            "y": qualities | costs,
            "size": {"": "all"} | {size: size for size in sizes},
            "model": {point["model"]: point["model"] for point in points},
        },
        "axes": {
            column.name: [column.heading, "log" if column in LOGARITHMIC else "linear"]
            for column in shown
        },
        "tooltip": words
        | {f"text_{column.name}": column.heading for column in shown}
        | {"settings": "settings"},
        "fronts": {cost: name for name, cost in COSTS.items()},
        "families": known | {family: OTHER for family in found if family not in known},
    }


def _point(row: TableRow) -> Json:
    """A row: numbers as the axes show them, words as a hover answers them."""
    size = row.get(columns.ASKED_SIZE.name)
    asked = OWN_SIZE if size is None else f"{columns.ASKED_SIZE.show(size)} %"
    settings = row.get("settings") or columns.MISSING
    point: Json = {
        "name": row["label"],
        "label": row["label"] if size is None else f"{row['label']} {asked}",
        "family": row["family"],
        "model": row["model"],
        "asked": asked,
        "front": row.get(columns.FRONT.name) or "",
        "modelled": row.get(columns.STEP_SOURCE.name) == "modelled",
        "settings": LONG_FRACTION.sub(lambda found: f"{float(found[0]):.3g}", settings),
    }
    for column in (*COST_COLUMNS, *QUALITY_COLUMNS):
        value, stderr = row.get(column.name), row.get(f"{column.name}_stderr")
        point[column.name] = _number(value, column)
        point[f"text_{column.name}"] = column.show(value, stderr)
        low = high = None
        if value is not None and stderr is not None:
            low, high = value - stderr, value + stderr
            low = max(low, value / 10) if column in LOGARITHMIC else low
        point |= {
            f"{column.name}_low": _number(low, column),
            f"{column.name}_high": _number(high, column),
        }
    for task in BOARD_TASKS:
        name = f"{task.name}_{SIZE.name}"
        point[name] = _number(row.get(name), SIZE)
    return point


def _number(value: float | None, column: Column) -> float | None:
    """A number in the unit of its heading with five digits; None where no axis has a place for
    it."""
    return (
        None if value is None or not abs(value) < LARGEST else float(f"{column.factor * value:.5g}")
    )
