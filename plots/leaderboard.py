"""The leaderboard and its fronts, from `leaderboard.csv`: every method by name, and KL by size and
step time.

Left, a line per method: its KL at each size, the closest to the full cache first; the fuller a
marker, the larger the size. A cross is a method that cannot have the size and ran at the nearest.

Right, a point per method and size: its look says how the method reads less, hollow where the step
is modelled. The line is the front, of points that no other beats in both; their names stand to the
left and below, where by its meaning nothing else lies. The full cache, whose KL is 0, is a line at
its step time. One's own runs beside the shipped ones have a colour of their own, and their label in
the legend.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure, SubFigure

from harness.results import columns, metrics
from harness.results.metrics import BOARD_METRICS, SIZE, STEP, BoardMetric
from harness.settings.schema import is_unmet
from plots import data, style

KL = metrics.KL.name
STDERR = f"{KL}_stderr"
FAMILIES: Mapping[str, Mapping[str, str]] = style.REGISTRY["families"]
OTHER = {"color": style.BLACK, "marker": "P"}
"""The look of a family that the registry does not list."""
COSTS = [metric for metric in BOARD_METRICS if metric.front]
AXES = {SIZE: style.SIZE_AXIS}
"""Words for the axis of a cost; else its heading."""
ALL = "reads all"
OTHER_SIZE = "x"
"""The marker of a method that cannot have the size it was asked for."""
CLOSE, NEAR = 2, 0.2
"""Points share their names' place whose KL differs by a smaller factor and whose costs by less than
e^0.2."""
LEFT = 5
"""The x axis begins at the least cost over this, which leaves the names room."""
ALIKE = 1.02
"""Costs whose ratio is at most this are alike."""
LEAST_KL = 1e-6
"""Nats: a nearer point is the full cache itself, and off a logarithmic axis."""
LINE_INCHES, COST_INCHES, WIDTHS = 0.125, 2.7, (5.0, 4.6)


def draw(tables: data.Tables, name: str) -> Figure | None:
    """The figure; None without `leaderboard.csv`."""
    rows = tables.read("leaderboard", columns.BOARD)
    is_best = rows.exempt_choice.isin(["best", "both"])
    rows = rows[rows[KL].notna() & rows.family.notna() & is_best]
    if not (rows[KL] > LEAST_KL).any():
        return None
    shared, panels = data.split(rows, ["model", "source"])
    costs = [_costs(frame) for _, frame in panels]
    heights = []
    for (_, frame), of_panel in zip(panels, costs, strict=True):
        of_lines = LINE_INCHES * frame.label.nunique() + 0.8
        heights.append(max(of_lines, COST_INCHES * len(of_panel)))
    figure = Figure(figsize=(sum(WIDTHS), sum(heights) + 0.6), layout="constrained")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
    for part, (title, frame), of_panel in zip(parts[:, 0], panels, costs, strict=True):
        _draw_panel(part, title, frame, of_panel)
    notes = [
        shared,
        "each with the best number of exempt layers that ran",
        "left: bold on a front, bars one standard error",
    ]
    if (rows.step_source == "modelled").any():
        notes.append("right, hollow: modelled from a step timed at another size")
    return style.finish(figure, "; ".join(notes))


def _costs(panel: pd.DataFrame) -> list[BoardMetric]:
    """The costs that a panel has values of."""
    return [cost for cost in COSTS if panel[cost.column.name].notna().any()]


def _draw_panel(
    part: SubFigure, title: str, panel: pd.DataFrame, costs: Sequence[BoardMetric]
) -> None:
    """The methods by name, and beside them KL against each cost."""
    mosaic: list[Any] = [["names", cost.front] for cost in costs] or [["names"]]
    axes = part.subplot_mosaic(mosaic, width_ratios=WIDTHS[: len(mosaic[0])])
    _draw_names(axes["names"], panel)
    axes["names"].set_title(title)
    for cost in costs:
        _draw_cost(axes[cost.front], panel, cost)


def _draw_names(axes: Axes, panel: pd.DataFrame) -> None:
    """A line per method, its points by size."""
    points = panel[panel[KL] > LEAST_KL]
    sizes = sorted(points.asked_size.dropna().unique())
    lines = {label: line for line, label in enumerate(_by_distance(points, sizes))}
    for label, of_label in points.groupby("label", sort=False):
        of_label = of_label.sort_values("size")
        y = lines[label]
        color, marker = _look(of_label)
        line = [y] * len(of_label)
        axes.plot(of_label[KL], line, color=color, linewidth=0.6, alpha=0.5)
        for _, row in of_label.iterrows():
            fill = 1.0
            if not pd.isna(row.asked_size):
                fill = (sizes.index(row.asked_size) + 1) / len(sizes)
            below = min(row[STDERR], 0.9 * row[KL])
            axes.errorbar(
                row[KL],
                y,
                xerr=[[below], [row[STDERR]]],
                color=color,
                marker=OTHER_SIZE if is_unmet(row.asked_size, row["size"]) else marker,
                markerfacecolor=_paler(color, fill),
                elinewidth=0.6,
                markersize=4,
            )
    _explain_markers(axes, sizes, any(map(is_unmet, points.asked_size, points["size"])))
    fronts = set(points[points.front.fillna("") != ""].label)
    own = set(points[points.own].label)
    axes.set_yticks(range(len(lines)), list(lines), fontsize=6)
    for tick in axes.get_yticklabels():
        label = tick.get_text()
        tick.set_fontweight("bold" if label in fronts else "normal")
        if label in own:
            tick.set_color(style.look(label).color)
    axes.set(xlabel=style.KL_AXIS, ylim=(-0.7, len(lines) - 0.3))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")


def _by_distance(points: pd.DataFrame, sizes: Sequence[float]) -> pd.Index:
    """The labels by their KL at the middle size, the largest first."""
    middle = sizes[len(sizes) // 2] if sizes else None
    at_middle = points[(points.asked_size == middle) | points.asked_size.isna()]
    kl = at_middle.groupby("label")[KL].min().reindex(points.label.unique())
    return kl.sort_values(ascending=False).index


def _explain_markers(axes: Axes, sizes: Sequence[float], has_other_sizes: bool) -> None:
    """Entries of the legend for the sizes, and for methods at another size than asked."""
    look: Any = {"color": style.GREY, "markersize": 4}
    for number, size in enumerate(sizes, start=1):
        face = _paler(style.GREY, number / len(sizes))
        words = f"size {100 * size:.0f} %"
        axes.plot([], [], "o", markerfacecolor=face, label=words, **look)
    if has_other_sizes:
        axes.plot([], [], OTHER_SIZE, label="not the size asked for", **look)


def _draw_cost(axes: Axes, panel: pd.DataFrame, cost: BoardMetric) -> None:
    """KL against one cost, and the front."""
    name = cost.column.name
    panel = panel[panel[name].notna()].assign(x=cost.column.factor * panel[name])
    points = panel[panel[KL] > LEAST_KL]
    for label, of_label in points.groupby(
        points.label.where(points.own, points.family), sort=False
    ):
        color, marker = _look(of_label)
        # The bytes over the link are never modelled.
        hollow = (of_label.step_source == "modelled") & (cost.column == STEP)
        for part, face in ((of_label[hollow], "none"), (of_label[~hollow], color)):
            look: Any = {"color": color, "markerfacecolor": face}
            axes.plot(part.x, part[KL], marker, label=label if len(part) else None, **look)
    words = AXES.get(cost.column, cost.column.heading)
    if cost.column == STEP:
        dashed: Any = {"color": style.BLACK, "linestyle": "--", "linewidth": 1}
        for x in panel[panel.family == ALL].x:
            axes.axvline(x, label=style.FULL, **dashed)
        sources = sorted({*panel.step_source.dropna()} - {"modelled"})
        if sources:
            words += f", {' and '.join(sources)}"
    front = points[points.front.fillna("").str.contains(cost.front)].sort_values("x")
    # Of those that cost alike and cannot be told apart, the line passes through the closest.
    is_lowest = []
    for x, kl in zip(front.x, front[KL], strict=True):
        closer = (front.x <= ALIKE * x) & (front[KL] < kl)
        is_lowest.append(not closer.any())
    lowest = front.loc[is_lowest]
    line: Any = {"color": style.GREY, "linewidth": 0.8, "zorder": 0}
    axes.plot(lowest.x, lowest[KL], label="front", **line)
    _name(axes, front)
    style.log_y(axes)
    style.log_x(axes, "{x:,.0f}")
    axes.set(xlabel=words, ylabel=style.KL_AXIS)
    axes.set_xlim(panel.x.min() / LEFT, 1.3 * panel.x.max())


def _look(rows: pd.DataFrame) -> tuple[str, str]:
    """Colour and marker of one label's rows: its family's, and of one's own runs the label's."""
    if rows.own.any():
        own = style.look(str(rows.label.iloc[0]))
        return own.color, own.marker or "o"
    family = FAMILIES.get(str(rows.family.iloc[0]), OTHER)
    return family["color"], family["marker"]


def _name(axes: Axes, front: pd.DataFrame) -> None:
    """Names left of the points, a list beside those that lie too close for names of their own."""
    ordered = front.sort_values(KL, ascending=False)
    far = ordered[KL].shift() / ordered[KL] > CLOSE
    far |= (ordered.x / ordered.x.shift()).map(np.log).abs() > NEAR
    for _, close in ordered.groupby(far.cumsum()):
        names = []
        for _, row in close.iterrows():
            size = "" if pd.isna(row.asked_size) else f" {100 * row['size']:.0f} %"
            names.append(row.label + size)
        text, place = "\n".join(names), (close.x.min(), close[KL].iloc[0])
        words = axes.annotate(text, place, (-4, -2), textcoords="offset points")
        words.set(fontsize=5.5, linespacing=1.0, ha="right", va="top")


def _paler(color: str, fill: float) -> tuple[float, ...]:
    """The colour mixed with white: the more `fill`, from 0 to 1, the less white."""
    return tuple(1 - fill * (1 - part) for part in to_rgba(color)[:3])
