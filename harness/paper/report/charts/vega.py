"""Charts as Vega-Lite: a specification that answers a hover, and the same drawn as SVG, which needs no script.

Colours are Okabe and Ito's, safe for the common kinds of colour blindness; shapes tell series apart without them. All
else is `currentColor`, the page's own, so that a chart follows its scheme, and prints. Words of tables are data in a
specification, and never part of an expression or the name of a field.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import ceil, floor, inf, log10
from typing import Any, NamedTuple

from harness.paper.report.charts.chart import Axis, Chart, Point
from harness.tables.columns import MISSING

VEGA_LITE = "6.4"
PAGE = "currentColor"
COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#8A8A8A", PAGE)
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right")
"""Their number shares no factor with the colours', so that every pair comes before one comes again."""
WIDTH, HEIGHT = 480, 300
LINE_HEIGHT = 11
LARGEST = 1e100
"""What is larger, infinite or no number has no place on an axis."""
MANY_DECADES = 4
DIGITS = 5
"""Of a number that is drawn; a hover answers with the table's own."""
CONFIG = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": PAGE, "titleColor": PAGE, "domainColor": PAGE, "tickColor": PAGE, "gridColor": PAGE,
        "gridOpacity": 0.15, "titleFontWeight": "normal", "titleFontSize": 12, "labelFontSize": 11,
    },
    "legend": {
        "labelColor": PAGE, "orient": "bottom", "columns": 2, "labelFontSize": 11, "labelLimit": 190, "symbolLimit": 0,
        "title": None,
    },
}  # fmt: skip

Json = dict[str, Any]
Looks = Mapping[str, tuple[str, str]]
"""Colour and shape of each series."""


class Drawn(NamedTuple):
    """A chart for the page."""

    chart: Chart
    spec: Json
    svg: str


def draw(charts: Iterable[Chart]) -> list[Drawn]:
    """The charts of a section that have points: a series looks the same in all, and those of a pane share axes."""
    import vl_convert

    shown = [chart for chart in map(_finite, charts) if chart.points]
    looks = _looks(shown)
    drawn = []
    for chart in shown:
        spec = _spec(chart, looks, [other for other in shown if other.pane == chart.pane])
        svg = vl_convert.vegalite_to_svg(spec | {"width": WIDTH}, VEGA_LITE, allowed_base_urls=[])
        drawn.append(Drawn(chart, spec, svg))
    return drawn


@cache
def with_library(script: str) -> str:
    """Vega, Vega-Lite and Vega-Embed (BSD-3-Clause), and after them a script that has them, as one script."""
    import vl_convert

    return vl_convert.javascript_bundle(script, VEGA_LITE)


def _finite(chart: Chart) -> Chart:
    """The chart without what has no place on its axes."""
    points = [
        point._replace(stderr=point.stderr if point.stderr and point.stderr < LARGEST else None)
        for point in chart.points
        if abs(point.x) < LARGEST and abs(point.y) < LARGEST and (point.y > 1 / LARGEST or not chart.y.log)
    ]
    return chart._replace(points=points, levels=[level for level in chart.levels if abs(level.value) < LARGEST])


def _looks(charts: Sequence[Chart]) -> Looks:
    """Of every series; a line that joins several has the page's colour."""
    points = [point for chart in charts for point in chart.points]
    series = dict.fromkeys(point.series for point in points)
    joining = dict.fromkeys(point.line for point in points if point.line and point.line not in series)
    own = {name: (COLORS[i % len(COLORS)], SHAPES[i % len(SHAPES)]) for i, name in enumerate(series)}
    return own | dict.fromkeys(joining, (PAGE, "stroke"))


def _spec(chart: Chart, looks: Looks, beside: Sequence[Chart]) -> Json:
    x = _quantity("x", chart.x, [value for each in beside for value in _along_x(each)])
    y = _quantity("y", chart.y, [value for each in beside for value in _along_y(each)])
    color, shape = (_look({name: looks[name][part] for name in _looks([chart])}) for part in (0, 1))
    headings = list(dict.fromkeys(heading for point in chart.points for heading in point.details))
    tooltip = [{"field": f"d{i}", "type": "nominal", "title": heading} for i, heading in enumerate(headings)]
    solid = {"field": "solid", "type": "quantitative", "scale": None, "legend": None}
    points = {"x": x, "y": y, "stroke": color, "fill": color, "shape": shape, "fillOpacity": solid, "tooltip": tooltip}
    errors = {"x": x, "y": y | {"field": "low"}, "y2": {"field": "high"}, "stroke": color}
    name = {"x": x, "y": y | {"field": "named"}, "text": {"field": "name", "type": "nominal"}}
    layers = [
        *_levels(chart, {"x": x, "y": y}),
        _layer("line", {"x": x, "y": y, "stroke": color | {"field": "line"}}, needs="line", strokeWidth=1.5),
        _layer("rule", errors, needs="low"),
        {"mark": {"type": "point", "size": 60, "opacity": 0.9, "aria": False}, "encoding": points},
        _layer("text", name, needs="name", align="left", dx=7, fontSize=10, fill=PAGE),
    ]
    return {
        "description": f"{chart.pane}, {chart.title}",
        "height": HEIGHT,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": _data(chart, headings, y["scale"])},
        "layer": layers,
        "config": CONFIG,
    }


def _data(chart: Chart, headings: Sequence[str], scale: Json) -> list[Json]:
    points = zip(chart.points, _name_places(chart, scale), strict=True)
    return [_datum(point, headings, scale["domain"][0]) | {"named": place} for point, place in points]


def _datum(point: Point, headings: Sequence[str], least: float) -> Json:
    """A point by the fields of the specification, None where it lacks one. An error bar ends where its axis does."""
    spread = point.stderr
    return {
        "s": point.series,
        "x": _rounded(point.x),
        "y": _rounded(point.y),
        "low": None if spread is None else _rounded(max(point.y - spread, least)),
        "high": None if spread is None else _rounded(point.y + spread),
        "line": point.line or None,
        "name": point.name or None,
        "solid": 0 if point.hollow else 1,
    } | {f"d{i}": point.details.get(heading, MISSING) for i, heading in enumerate(headings)}


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _along_x(chart: Chart) -> list[float]:
    return [point.x for point in chart.points] + [level.value for level in chart.levels if level.axis == "x"]


def _along_y(chart: Chart) -> list[float]:
    ends = [end for point in chart.points for end in (point.y, point.y + (point.stderr or 0))]
    lower = [] if chart.y.log else [point.y - (point.stderr or 0) for point in chart.points]
    return ends + lower + [level.value for level in chart.levels if level.axis == "y"]


def _name_places(chart: Chart, scale: Json) -> list[float | None]:
    """The y at which the name of each point stands: its own, or lower, so that no name is on another."""
    on, back = (log10, lambda value: 10.0**value) if chart.y.log else (float, float)
    least, most = map(on, scale["domain"])
    line = LINE_HEIGHT / HEIGHT * (most - least)
    places: list[float | None] = [None] * len(chart.points)
    free = inf
    for index, point in sorted(enumerate(chart.points), key=lambda item: -item[1].y):
        if point.name:
            place = min(on(point.y), free)
            places[index], free = _rounded(back(place)), place - line
    return places


def _quantity(field: str, axis: Axis, values: Sequence[float]) -> Json:
    """The encoding of an axis that shows all the values."""
    least, most = min(values), max(values)
    if axis.log:
        scale: Json = {"type": "log", "domain": [least / 1.4, most * 1.4]}
        shown: Json = {"format": "~g", "values": _decades(least / 1.4, most * 1.4)}
    else:
        room = 0.04 * (most - min(least, 0) if axis.zero else most - least) or 1
        scale = {"domain": [min(least, 0) if axis.zero else least - room, most + room], "zero": False, "nice": False}
        shown = {"tickCount": 6}
    return {"field": field, "type": "quantitative", "title": axis.title, "scale": scale, "axis": shown}


def _decades(least: float, most: float) -> list[float]:
    """Powers of ten between these, and where they are few also twice and five times each."""
    powers = range(floor(log10(least)), ceil(log10(most)))
    steps = (1, 2, 5) if len(powers) < MANY_DECADES else (1,)
    return [step * 10.0**power for power in powers for step in steps if least <= step * 10.0**power <= most]


def _look(values: Mapping[str, str]) -> Json:
    """The encoding of a series by a colour or a shape each."""
    return {"field": "s", "type": "nominal", "scale": {"domain": [*values], "range": [*values.values()]}}


def _layer(mark: str, encoding: Json, *, needs: str, **looks: Any) -> Json:
    """Marks of those points that have a field."""
    transform = [{"filter": {"not": {"field": needs, "equal": None}}}]
    return {"mark": {"type": mark, "aria": False, **looks}, "transform": transform, "encoding": encoding}


def _levels(chart: Chart, axes: Mapping[str, Json]) -> Iterator[Json]:
    """Dashed lines over the whole of the other axis, each with its name."""
    text = {"type": "text", "align": "right", "dx": -4, "dy": -5, "fontSize": 10, "fill": PAGE, "aria": False}
    ends: Json = {"x": {"y": {"value": 12}}, "y": {"x": {"value": "width"}}}
    for axis, end in ends.items():
        values = [{axis: level.value, "name": level.name} for level in chart.levels if level.axis == axis]
        if values:
            at = {axis: axes[axis]}
            yield {
                "data": {"values": values},
                "layer": [
                    {"mark": {"type": "rule", "strokeDash": [6, 3], "stroke": PAGE, "aria": False}, "encoding": at},
                    {"mark": text, "encoding": at | end | {"text": {"field": "name", "type": "nominal"}}},
                ],
            }
