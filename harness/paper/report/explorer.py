"""The explorer of the leaderboard and its fronts: one Vega-Lite specification, whose axes and points a reader chooses.

`report.js` puts the chosen axes and filters into it. Words of tables are data in the specification, never part of an
expression or the name of a field. Colours and shapes are those of the figures (`plots/registry.yaml`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from harness.tables.columns import (
    ASKED_SIZE,
    BOARD_TASKS,
    DEVICE_FRAC,
    FRONT,
    KL,
    MISSING,
    NLL,
    RESIDENT_FRAC,
    SIZE,
    STEP,
    STEP_SOURCE,
    TOP1,
    Column,
    TableRow,
)
from harness.tables.frontier import COSTS

Json = dict[str, Any]

VEGA_LITE = "6.4"
COST_COLUMNS: Sequence[Column] = (SIZE, STEP, DEVICE_FRAC, RESIDENT_FRAC)
QUALITY_COLUMNS: Sequence[Column] = (KL, TOP1, NLL, *BOARD_TASKS)
LOGARITHMIC = (KL, SIZE, STEP)
LEAST = 1e-6
"""What a logarithmic axis shows at least: a smaller KL is that of the full cache itself."""
LARGEST = 1e100
OWN_SIZE = "of its own"
PAGE = "currentColor"
LONG_FRACTION = re.compile(r"\d+\.\d{4,}(?:e[-+]?\d+)?|\d+(?:\.\d+)?e[-+]?\d+")
"""A number in the words of a setting with more digits than a reader wants."""
CONFIG: Json = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": PAGE, "titleColor": PAGE, "domainColor": PAGE, "tickColor": PAGE, "gridColor": PAGE,
        "gridOpacity": 0.15, "titleFontWeight": "normal", "titleFontSize": 12, "labelFontSize": 11, "format": "~g",
    },
    "legend": {"labelColor": PAGE, "orient": "top", "labelFontSize": 12, "symbolOpacity": 1, "title": None},
}  # fmt: skip


@cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed (BSD-3-Clause) as one script, which sets `vegaEmbed`."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", VEGA_LITE)


def explorer(rows: Sequence[TableRow], families: Mapping[str, Mapping[str, str]]) -> Json | None:
    """The specification of the rows of leaderboards, with the first choice of everything; None without points.

    Under `usermeta` are the choices: `x`, `y`, `model` and `size`, each from a value to its words; and `axes`, the
    encoding of each quantity.
    """
    points = [_point(row) for row in rows if row.get(KL.name) is not None]
    if not points:
        return None
    quantities = (*COST_COLUMNS, *QUALITY_COLUMNS)
    shown = [column for column in quantities if any(point[column.name] is not None for point in points)]
    axes = {column.name: _axis(column) for column in shown}
    sizes = sorted({point["asked"] for point in points}, key=lambda size: (size == OWN_SIZE, size))
    costs = {column.name: column.heading for column in shown if column in COST_COLUMNS}
    qualities = {column.name: column.heading for column in shown if column in QUALITY_COLUMNS}
    choices = {
        "x": costs | qualities,
        "y": qualities | costs,
        "size": {"": "all"} | dict(zip(sizes, sizes, strict=True)),
        "model": {name: name for name in dict.fromkeys(point["model"] for point in points)},
    }
    fronts = {cost: words for words, cost in COSTS.items()}
    looks = {family: families.get(family, {"color": PAGE, "shape": "cross"}) for family in _families(points, families)}
    color, shape = (
        {"domain": [*looks], "range": [look[part] for look in looks.values()]} for part in ("color", "shape")
    )
    chosen = {"and": [{"param": "method"}, {"param": "family"}]}
    words = {"name": "method", "family": "family", "asked": "asked size"}
    words |= {f"said_{column.name}": column.heading for column in shown} | {"settings": "settings"}
    only_chosen = [{"filter": {"param": "method", "empty": False}}]
    series = {"field": "family", "type": "nominal"}
    return {
        "description": "The leaderboard: every method at every size",
        "usermeta": {"axes": axes, "choices": choices, "fronts": fronts},
        "width": "container",
        "height": 420,
        "data": {"values": points},
        "transform": [],
        "encoding": {"x": axes[SIZE.name], "y": axes[KL.name]},
        "layer": [
            {
                "name": "front",
                "transform": [],
                "mark": {"type": "line", "stroke": PAGE, "strokeWidth": 1, "opacity": 0.5},
            },
            {
                "name": "line",
                "transform": only_chosen,
                "mark": {"type": "line", "strokeWidth": 1.5, "strokeDash": [4, 3], "stroke": PAGE},
                "encoding": {"detail": {"field": "name", "type": "nominal"}},
            },
            {
                "name": "error",
                "transform": [],
                "mark": {"type": "rule", "strokeWidth": 1},
                "encoding": {"stroke": {**series, "scale": color}, "opacity": _if(chosen, 0.5, 0.05)},
            },
            {
                "name": "point",
                "params": [
                    {"name": "method", "select": {"type": "point", "fields": ["name"], "toggle": "event.shiftKey"}},
                    {"name": "family", "select": {"type": "point", "fields": ["family"]}, "bind": "legend"},
                ],
                "mark": {"type": "point", "size": 70, "cursor": "pointer"},
                "encoding": {
                    "stroke": {**series, "scale": color},
                    "fill": {**series, "scale": color},
                    "shape": {**series, "scale": shape},
                    "fillOpacity": _if({"field": "step_source", "equal": "modelled"}, 0.25, 0.9),
                    "opacity": _if(chosen, 1, 0.12),
                    "tooltip": [{"field": field, "type": "nominal", "title": title} for field, title in words.items()],
                },
            },
            {
                "name": "label",
                "transform": only_chosen,
                "mark": {"type": "text", "align": "left", "dx": 8, "dy": -6, "fontSize": 11, "fill": PAGE},
                "encoding": {"text": {"field": "label", "type": "nominal"}},
            },
        ],
        "config": CONFIG,
    }


def _point(row: TableRow) -> Json:
    """A row by the fields of the specification: numbers as the axes show them, words as a hover answers them."""
    asked = OWN_SIZE if row.get(ASKED_SIZE.name) is None else f"{ASKED_SIZE.show(row[ASKED_SIZE.name])} %"
    point: Json = {"name": row["label"], "family": row["family"], "model": row["model"], "asked": asked}
    point |= {"front": row.get(FRONT.name) or "", "step_source": row.get(STEP_SOURCE.name) or ""}
    point["label"] = row["label"] + ("" if asked == OWN_SIZE else f" {asked}")
    for column in (*COST_COLUMNS, *QUALITY_COLUMNS):
        value, stderr = row.get(column.name), row.get(f"{column.name}_stderr")
        point[column.name] = _number(value, column)
        if column in QUALITY_COLUMNS:
            low = high = None
            if value is not None and stderr is not None:
                low, high = value - stderr, value + stderr
                low = max(low, value / 10) if column in LOGARITHMIC else low
            point |= {f"{column.name}_low": _number(low, column), f"{column.name}_high": _number(high, column)}
        if f"{column.name}_{SIZE.name}" in row:
            point[f"{column.name}_{SIZE.name}"] = _number(row[f"{column.name}_{SIZE.name}"], SIZE)
        point[f"said_{column.name}"] = column.show(value, stderr)
    point["settings"] = LONG_FRACTION.sub(lambda found: f"{float(found[0]):.3g}", row.get("settings") or MISSING)
    return point


def _number(value: float | None, column: Column) -> float | None:
    """A number in the unit of its heading with five digits; None where no axis has a place for it."""
    if value is None or not abs(value) < LARGEST:
        return None
    return float(f"{column.factor * value:.5g}")


def _axis(column: Column) -> Json:
    scale: Json = {"type": "log"} if column in LOGARITHMIC else {"type": "linear", "zero": False}
    return {
        "field": column.name,
        "type": "quantitative",
        "title": column.heading,
        "scale": scale | {"nice": False, "padding": 12},
    }


def _families(points: Sequence[Json], known: Mapping[str, Any]) -> Iterator[str]:
    """The families of the points, those of the figures first."""
    found = dict.fromkeys(point["family"] for point in points)
    yield from (family for family in known if family in found)
    yield from (family for family in found if family not in known)


def _if(test: Json, value: float, otherwise: float) -> Json:
    return {"condition": {"test": test, "value": value}, "value": otherwise}
