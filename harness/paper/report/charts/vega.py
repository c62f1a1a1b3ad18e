"""Charts as Vega-Lite: a specification that answers a hover, and the same drawn as SVG, which needs no script.

Colours are Okabe and Ito's, safe for the common kinds of colour blindness; shapes tell series apart without them. All
else is `currentColor`, the page's own, so that a chart follows its scheme, and prints. Words of tables are data in a
specification, and never part of an expression or the name of a field.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import inf, log10
from typing import Any, NamedTuple

from harness.paper.report.charts.chart import Chart, Point
from harness.paper.report.charts.scales import Json, encoding
from harness.paper.report.charts.slim import slim
from harness.tables.columns import MISSING

VEGA_LITE = "6.4"
PAGE = "currentColor"
COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#8A8A8A", PAGE)
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right")
"""Their number shares no factor with the colours', so that every pair comes before one comes again."""
WIDTH, HEIGHT = 480, 300
LINE_HEIGHT = 11
ROW, OFFSET_ROW = 26, 13
"""Pixels of a name's line, and of each series of one that has several."""
LARGEST = 1e100
"""What is larger, infinite or no number has no place on an axis."""
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
        drawn.append(Drawn(chart, spec, slim(svg)))
    return drawn


@cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed (BSD-3-Clause) as one script, which sets `vegaEmbed`."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", VEGA_LITE)


def _finite(chart: Chart) -> Chart:
    """The chart without what has no place on its axes."""
    points = [
        point._replace(stderr=point.stderr if point.stderr and point.stderr < LARGEST else None)
        for point in chart.points
        if all(abs(value) < LARGEST for value in (point.x, point.y) if not isinstance(value, str))
        and (not chart.y.log or point.y > 1 / LARGEST)
    ]
    return chart._replace(points=points, levels=[level for level in chart.levels if abs(level.value) < LARGEST])


def _looks(charts: Sequence[Chart]) -> Looks:
    """Of every series; a line that joins several has the page's colour, and so has what is published alone."""
    points = [point for chart in charts for point in chart.points]
    series = dict.fromkeys(point.series for point in points if not point.hollow)
    published = {point.series for point in points} - {*series}
    joining = dict.fromkeys(point.line for point in points if point.line and point.line not in series)
    own = {name: (COLORS[i % len(COLORS)], SHAPES[i % len(SHAPES)]) for i, name in enumerate(series)}
    return own | dict.fromkeys(sorted(published), (PAGE, "diamond")) | dict.fromkeys(joining, (PAGE, "stroke"))


def _spec(chart: Chart, looks: Looks, beside: Sequence[Chart]) -> Json:
    axes = {name: encoding(name, chart, beside) for name in ("x", "y")}
    color, shape = (_look({name: looks[name][part] for name in _looks([chart])}) for part in (0, 1))
    headings = list(dict.fromkeys(heading for point in chart.points for heading in point.details))
    tooltip = [{"field": f"d{i}", "type": "nominal", "title": heading} for i, heading in enumerate(headings)]
    return {
        "description": f"{chart.pane}, {chart.title}",
        "height": _height(chart, beside),
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": _data(chart, headings, axes[chart.value_axis]["scale"])},
        "layer": [*_levels(chart, axes), *_layers(chart, axes, color, shape, tooltip)],
        "config": CONFIG,
    }


def _height(chart: Chart, beside: Sequence[Chart]) -> int:
    if not chart.y.words:
        return HEIGHT
    points = [point for each in beside for point in each.points]
    names, series = ({getattr(point, field) for point in points} for field in ("y", "series"))
    return len(names) * (ROW if chart.stacked else max(ROW, OFFSET_ROW * len(series)))


def _layers(chart: Chart, axes: Mapping[str, Json], color: Json, shape: Json, tooltip: list[Json]) -> Iterator[Json]:
    """Lines, errors, bars, points and names, in the order in which they lie on each other."""
    along, apart = chart.value_axis, _apart(chart, color)
    solid = {"field": "solid", "type": "quantitative", "scale": None, "legend": None}
    looks = {"stroke": color, "fill": color, "shape": shape, "fillOpacity": solid, "tooltip": tooltip}
    ends = {along: axes[along] | {"field": "low"}, f"{along}2": {"field": "high"}}
    name = {"y": axes["y"] | {"field": "named"}, "text": {"field": "name", "type": "nominal"}}
    if any(point.line for point in chart.points):
        yield _layer("line", {**axes, "stroke": color | {"field": "line"}}, needs="line", strokeWidth=1.5)
    if any(point.stderr is not None for point in chart.points):
        yield _layer("rule", {**axes, **apart, **ends, "stroke": color}, needs="low")
    if chart.stacked:
        bar = {
            **axes,
            "x": axes["x"] | {"stack": "zero"},
            "fill": color,
            "order": {"field": "part"},
            "tooltip": tooltip,
        }
        yield _layer("bar", bar, needs="part", stroke=PAGE, strokeWidth=0.5)
    yield _layer("point", {**axes, **apart, **looks}, needs="dot", size=60, opacity=0.9)
    if any(point.name for point in chart.points):
        yield _layer("text", {**axes, **name}, needs="name", align="left", dx=7, fontSize=10, fill=PAGE)


def _apart(chart: Chart, color: Json) -> Json:
    """The encoding that keeps the series of a name off each other."""
    if chart.stacked or not chart.y.words:
        return {}
    return {"yOffset": {"field": "s", "type": "nominal", "scale": {"domain": color["scale"]["domain"]}}}


def _data(chart: Chart, headings: Sequence[str], scale: Json) -> list[Json]:
    order = [*_looks([chart])]
    places = [None] * len(chart.points) if chart.y.words else _name_places(chart, scale)
    return [
        _datum(point, headings, chart.value_axis, scale["domain"][0])
        | {"named": place}
        | _mark(point, chart.stacked, order)
        for point, place in zip(chart.points, places, strict=True)
    ]


def _datum(point: Point, headings: Sequence[str], along: str, least: float) -> Json:
    """A point by the fields of the specification, None where it lacks one. An error bar ends where its axis does."""
    value, spread = getattr(point, along), point.stderr
    return {
        "s": point.series,
        "x": _rounded(point.x),
        "y": _rounded(point.y),
        "low": None if spread is None else _rounded(max(value - spread, least)),
        "high": None if spread is None else _rounded(value + spread),
        "line": point.line or None,
        "name": point.name or None,
        "solid": 0 if point.hollow else 1,
    } | {f"d{i}": point.details.get(heading, MISSING) for i, heading in enumerate(headings)}


def _mark(point: Point, stacked: bool, order: Sequence[str]) -> Json:
    """Whether it is part of a bar, and which, or a dot."""
    is_part = stacked and not point.hollow
    return {"part": order.index(point.series) if is_part else None, "dot": None if is_part else 1}


def _rounded(value: Any) -> Any:
    """A number as it is drawn; a word as it is."""
    return value if isinstance(value, str) else float(f"{value:.{DIGITS}g}")


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
    ends: Json = {"x": {"y": {"value": 0}}, "y": {"x": {"value": "width"}}}
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
