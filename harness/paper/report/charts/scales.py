"""The axes of charts as Vega-Lite encodes them: those of one pane hold the values of all its charts."""

from collections.abc import Iterator, Sequence
from math import ceil, floor, log10
from typing import Any

from harness.paper.report.charts.chart import Axis, Chart

Json = dict[str, Any]
MANY_DECADES = 4


def encoding(name: str, chart: Chart, beside: Sequence[Chart]) -> Json:
    """The axis "x" or "y" of a chart, wide enough for those beside it."""
    axis: Axis = getattr(chart, name)
    if axis.words:
        names = dict.fromkeys(point.y for each in beside for point in each.points)
        scale = {"type": "band", "domain": [*names], "paddingInner": 0.35, "paddingOuter": 0.2}
        looks = {"labelLimit": 200, "ticks": False, "grid": True}
        return {"field": name, "type": "nominal", "title": axis.title, "scale": scale, "axis": looks}
    values = [value for each in beside for value in _along(each, name)]
    return {"field": name, "type": "quantitative", "title": axis.title, **_numbers(axis, min(values), max(values))}


def _along(chart: Chart, name: str) -> Iterator[float]:
    """All that an axis of numbers must hold."""
    yield from (level.value for level in chart.levels if level.axis == name)
    if chart.stacked:
        yield 0
        yield from _sums(chart).values()
    for point in chart.points:
        value, stderr = getattr(point, name), (point.stderr or 0) if name == chart.value_axis else 0
        yield from (value, value + stderr)
        if not getattr(chart, name).log:
            yield value - stderr


def _sums(chart: Chart) -> dict[str | float, float]:
    """The ends of the bars, by name."""
    sums: dict[str | float, float] = {}
    for point in chart.points:
        if not point.hollow:
            sums[point.y] = sums.get(point.y, 0) + point.x
    return sums


def _numbers(axis: Axis, least: float, most: float) -> Json:
    if axis.log:
        ends = [least / 1.4, most * 1.4]
        return {"scale": {"type": "log", "domain": ends}, "axis": {"format": "~g", "values": _decades(*ends)}}
    room = 0.04 * (most - min(least, 0) if axis.zero else most - least) or 1
    ends = [min(least, 0) if axis.zero else least - room, most + room]
    return {"scale": {"domain": ends, "zero": False, "nice": False}, "axis": {"tickCount": 6}}


def _decades(least: float, most: float) -> list[float]:
    """Powers of ten between these, and where they are few also twice and five times each."""
    powers = range(floor(log10(least)), ceil(log10(most)))
    steps = (1, 2, 5) if len(powers) < MANY_DECADES else (1,)
    return [step * 10.0**power for power in powers for step in steps if least <= step * 10.0**power <= most]
