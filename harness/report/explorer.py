"""What the explorer of the leaderboard shows: a point per method and size, the quantities to
choose, and the looks.

`report.js` makes one Vega-Lite specification of them. Words of tables are data in it, never part of
an expression or of a field name. Colours and shapes are those of the figures
(`plots/registry.yaml`).
"""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from harness.results import columns, metrics
from harness.results.columns import TableRow
from harness.results.fronts import COSTS
from harness.results.leaderboard import is_best
from harness.results.metrics import MISSING, BoardMetric, Metric

Json = dict[str, Any]

VEGA_LITE = "6.4"
LARGEST = 1e100
OWN_SIZE = "of its own"
OTHER = {"color": "currentColor", "shape": "cross"}
"""The look of a family that the registry does not list."""
LONG_FRACTION = re.compile(r"\d+\.\d{4,}(?:e[-+]?\d+)?|\d+(?:\.\d+)?e[-+]?\d+")
"""A number in the words of a setting with more digits than a reader wants."""


def _order(metric: BoardMetric) -> int:
    """Costs that have a front stand first, then other costs, then qualities."""
    if not metric.is_cost:
        return 2
    return 0 if metric.front else 1


QUANTITIES = sorted(metrics.BOARD_METRICS, key=_order)


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
    points = [_point(row) for row in columns.having(rows, metrics.KL.name) if is_best(row)]
    if not points:
        return None
    costs: dict[str, str] = {}
    qualities: dict[str, str] = {}
    axes = {}
    tooltip = {"name": "method", "family": "family", "asked": "asked size"}
    for metric in QUANTITIES:
        name, heading = metric.column.name, metric.column.heading
        if columns.having(points, name):
            choices = costs if metric.is_cost else qualities
            choices[name] = heading
            axes[name] = [heading, "log" if metric.column.logarithmic else "linear"]
            tooltip[f"text_{name}"] = heading
    tooltip["settings"] = "settings"
    sizes = set(columns.values(points, "asked"))
    return {
        "points": points,
        "choices": {
            "x": costs | qualities,
            "y": qualities | costs,
            "size": {
                "": "all",
                **_itself(sorted(sizes - {OWN_SIZE})),
                **_itself(sizes & {OWN_SIZE}),
            },
            "model": _itself(columns.values(points, "model")),
        },
        "axes": axes,
        "tooltip": tooltip,
        "fronts": {cost: name for name, cost in COSTS.items()},
        "families": _looks(columns.values(points, "family"), families),
    }


def _itself(names: Collection[str]) -> dict[str, str]:
    return dict(zip(names, names, strict=True))


def _looks(found: Sequence[str], families: Mapping[str, Mapping[str, str]]) -> Json:
    """The looks of the families found, those that the registry lists first."""
    looks: Json = {}
    for family, look in families.items():
        if family in found:
            looks[family] = dict(look)
    for family in found:
        looks.setdefault(family, OTHER)
    return looks


def _point(row: TableRow) -> Json:
    """A row: numbers as the axes show them, words as a hover answers them."""
    size = row.get(metrics.ASKED_SIZE.name)
    asked = OWN_SIZE if size is None else f"{metrics.ASKED_SIZE.show(size)} %"
    settings = row.get("settings") or MISSING
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
    for metric in QUANTITIES:
        column = metric.column
        value, stderr = row.get(column.name), row.get(f"{column.name}_stderr")
        point[column.name] = _number(value, column)
        point[f"text_{column.name}"] = column.show(value, stderr)
        low = high = None
        if value is not None and stderr is not None:
            low, high = value - stderr, value + stderr
            if metric.column.logarithmic:
                low = max(low, value / 10)
        point[f"{column.name}_low"] = _number(low, column)
        point[f"{column.name}_high"] = _number(high, column)
    for metric in metrics.board_metrics("task"):
        name = f"{metric.column.name}_{metrics.SIZE.name}"
        point[name] = _number(row.get(name), metrics.SIZE)
    return point


def _number(value: float | None, column: Metric) -> float | None:
    """A number in the unit of its heading with five digits; None where no axis has a place for
    it."""
    if value is None or not abs(value) < LARGEST:
        return None
    return float(f"{column.factor * value:.5g}")
