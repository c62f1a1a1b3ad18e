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

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from harness.results import columns
from harness.settings.schema import is_unmet
from plots import data, style

KL = columns.KL.name
FAMILIES: Mapping[str, Mapping[str, str]] = style.REGISTRY["families"]
OTHER = {"color": style.BLACK, "marker": "P"}
"""The look of a family that the registry does not list."""
COSTS = {
    "size": (columns.SIZE.name, 100, style.SIZE_AXIS),
    "step time": (columns.STEP.name, 1e3, "decode step (ms)"),
}
"""By what `front` names: the column of the costs, its factor, and the axis."""
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
    is_shipped = rows.shipped.fillna("") != ""
    rows["own"] = (~is_shipped) & bool(is_shipped.any())
    rows = rows[rows[KL].notna() & rows.family.notna() & rows.exempt_choice.isin(["best", "both"])]
    points = rows[rows[KL] > LEAST_KL]
    if points.empty:
        return None
    shared, panels = data.split(rows, ["model", "source"])
    costs = [
        [cost for cost, (column, *_) in COSTS.items() if frame[column].notna().any()]
        for _, frame in panels
    ]
    heights = [
        max(LINE_INCHES * frame.label.nunique() + 0.8, COST_INCHES * len(own))
        for (_, frame), own in zip(panels, costs, strict=True)
    ]
    figure = Figure(figsize=(sum(WIDTHS), sum(heights) + 0.6), layout="constrained")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, (title, frame), own in zip(parts, panels, costs, strict=True):
        cells = [["names", cost] for cost in own] or [["names"]]
        axes = part.subplot_mosaic(cells, width_ratios=WIDTHS[: len(cells[0])])
        _draw_names(axes["names"], frame)
        axes["names"].set_title(title)
        for cost in own:
            _draw_cost(axes[cost], frame, cost)
    notes = [
        shared,
        "each with the best number of exempt layers that ran",
        "left: bold on a front, bars one standard error",
    ]
    if (rows.step_source == "modelled").any():
        notes.append("right, hollow: modelled from a step timed at another size")
    return style.finish(figure, "; ".join(notes))


def _draw_names(axes: Axes, panel: pd.DataFrame) -> None:
    """A line per method, its points by size."""
    points = panel[panel[KL] > LEAST_KL]
    sizes = sorted(points.asked_size.dropna().unique())
    middle = sizes[len(sizes) // 2] if sizes else None
    at_middle = points[(points.asked_size == middle) | points.asked_size.isna()]
    order = (
        at_middle.groupby("label")[KL]
        .min()
        .reindex(points.label.unique())
        .sort_values(ascending=False)
    )
    lines = {label: line for line, label in enumerate(order.index)}
    for label, own in points.groupby("label", sort=False):
        own = own.sort_values("size")
        color, marker = _look(own)
        axes.plot(own[KL], [lines[label]] * len(own), color=color, linewidth=0.6, alpha=0.5)
        for _, row in own.iterrows():
            fill = 1 if pd.isna(row.asked_size) else (sizes.index(row.asked_size) + 1) / len(sizes)
            has_other_size = is_unmet(row.asked_size, row["size"])
            axes.errorbar(
                row[KL], lines[label], xerr=[[min(row[f"{KL}_stderr"], 0.9 * row[KL])], [row[f"{KL}_stderr"]]],
                color=color, marker=OTHER_SIZE if has_other_size else marker, markerfacecolor=_paler(color, fill),
                elinewidth=0.6, markersize=4,
            )  # fmt: skip
    for index, size in enumerate(sizes):
        face = _paler(style.GREY, (index + 1) / len(sizes))
        words = f"size {100 * size:.0f} %"
        axes.plot([], [], "o", color=style.GREY, markerfacecolor=face, markersize=4, label=words)
    if any(map(is_unmet, points.asked_size, points["size"])):
        axes.plot(
            [], [], OTHER_SIZE, color=style.GREY, markersize=4, label="not the size asked for"
        )
    fronts = set(points[points.front.fillna("") != ""].label)
    axes.set_yticks(range(len(lines)), list(lines), fontsize=6)
    for tick in axes.get_yticklabels():
        tick.set_fontweight("bold" if tick.get_text() in fronts else "normal")
        if tick.get_text() in set(points[points.own].label):
            tick.set_color(style.look(tick.get_text()).color)
    axes.set(xlabel="KL(full || method) (nats)", ylim=(-0.7, len(lines) - 0.3))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")


def _draw_cost(axes: Axes, panel: pd.DataFrame, cost: str) -> None:
    """KL against one cost, and the front."""
    column, factor, words = COSTS[cost]
    panel = panel[panel[column].notna()].assign(x=factor * panel[column])
    points = panel[panel[KL] > LEAST_KL]
    for name, own in points.groupby(points.label.where(points.own, points.family), sort=False):
        color, marker = _look(own)
        hollow = (own.step_source == "modelled") & (
            cost == "step time"
        )  # bytes over the link are never modelled
        for part, face in ((own[hollow], "none"), (own[~hollow], color)):
            axes.plot(
                part.x,
                part[KL],
                marker,
                color=color,
                markerfacecolor=face,
                label=name if len(part) else None,
            )
    if cost == "step time":
        for x in panel[panel.family == ALL].x:
            axes.axvline(x, color=style.BLACK, linestyle="--", linewidth=1, label=style.FULL)
        sources = sorted({*panel.step_source.dropna()} - {"modelled"})
        words = f"{words}, {' and '.join(sources)}" if sources else words
    front = points[points.front.fillna("").str.contains(cost)].sort_values("x")
    # Of those that cost alike and cannot be told apart, the line passes through the closest.
    is_lowest = []
    for x, kl in zip(front.x, front[KL], strict=True):
        closer = (front.x <= ALIKE * x) & (front[KL] < kl)
        is_lowest.append(not closer.any())
    lowest = front.loc[is_lowest]
    axes.plot(lowest.x, lowest[KL], color=style.GREY, linewidth=0.8, label="front", zorder=0)
    _name(axes, front)
    style.log_y(axes)
    style.log_x(axes, "{x:,.0f}")
    axes.set(xlabel=words, ylabel="KL(full || method) (nats)")
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
    apart = (ordered[KL].shift() / ordered[KL] > CLOSE) | (
        (ordered.x / ordered.x.shift()).map(np.log).abs() > NEAR
    )
    for _, close in ordered.groupby(apart.cumsum()):
        sizes = [
            "" if pd.isna(row.asked_size) else f" {100 * row['size']:.0f} %"
            for _, row in close.iterrows()
        ]
        names = "\n".join(map("".join, zip(close.label, sizes, strict=True)))
        words = axes.annotate(
            names, (close.x.min(), close[KL].iloc[0]), (-4, -2), textcoords="offset points"
        )
        words.set(fontsize=5.5, linespacing=1.0, ha="right", va="top")


def _paler(color: str, fill: float) -> tuple[float, ...]:
    """The colour mixed with white: the more `fill`, from 0 to 1, the less white."""
    return tuple(1 - fill * (1 - part) for part in to_rgba(color)[:3])
