"""Closeness to the full cache against what it costs, from `leaderboard.csv`: KL by link bytes, and by step time.

A point per method and size, its look by how the method reads less; hollow where the step is modelled. The line is the
front, of points that no other beats in both; the upper bound, which no link allows, is on none. Their names stand to
the left and below, where by its meaning nothing else lies. Both axes are logarithmic, as the full cache costs so much.
The full cache, whose KL is 0, is a line at its step time.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from harness.tables import columns
from plots import data, style
from plots.style import Look

TABLE, KL = "leaderboard", columns.KL.name
PANELS = {
    "link bytes": (columns.SIZE.name, 100, "link (% of full cache's bytes)"),
    "step time": (columns.STEP.name, 1e3, "decode step (ms)"),
}
"""By what `front` names: the column of the costs, its factor, and the axis."""
FAMILIES = {
    "retrieves": Look(style.BLUE, "o", "", ""),
    "evicts": Look(style.VERMILION, "s", "", ""),
    "codes": Look(style.ORANGE, "v", "", ""),
    "bound": Look(style.GREEN, "D", "", ""),
}
ALL = "reads all"
CLOSE = 2
"""Points of one size whose KL differs by a smaller factor share their names' place."""
LEFT = 5
"""The x axis begins at the least cost over this, which leaves the names room."""
LEAST_KL = 1e-6
"""Nats: what is nearer to the full cache is the full cache, and off a logarithmic axis."""


def draw(tables: data.Tables, name: str) -> Figure | None:
    """The figure; None without `leaderboard.csv`."""
    rows = tables.read(TABLE, columns.BOARD)
    rows = rows[rows[KL].notna()]
    if rows.empty:
        return None
    panels = data.split(rows, ["model", "source"])
    cells = [
        (title, frame, cost)
        for title, frame in zip(panels.titles, panels.frames, strict=True)
        for cost, (column, *_) in PANELS.items()
        if frame[column].notna().any()
    ]
    figure, all_axes = style.new(len(cells), panel_inches=(4.2, 3.4))
    for axes, (title, frame, cost) in zip(all_axes, cells, strict=True):
        _draw_panel(axes, frame, cost)
        axes.set_title(title)
    hollow = any(_is_modelled(frame, cost).any() for _, frame, cost in cells)
    note = "; hollow: modelled from a step timed at another size" if hollow else ""
    return style.finish(figure, panels.shared + note)


def _is_modelled(rows: pd.DataFrame, cost: str) -> pd.Series:
    """Whether a point's cost was modelled: bytes over the link never are."""
    return (rows.step_source == "modelled") & (cost == "step time")


def _name(axes: Axes, front: pd.DataFrame) -> None:
    """Names left of the points, a list beside those that lie too close for names of their own."""
    ordered = front.sort_values(KL, ascending=False)
    apart = (ordered[KL].shift() / ordered[KL] > CLOSE) | (ordered["asked_size"] != ordered["asked_size"].shift())
    for _, close in ordered.groupby(apart.cumsum()):
        sizes = ["" if pd.isna(row["asked_size"]) else f" {100 * row['size']:.0f} %" for _, row in close.iterrows()]
        names = "\n".join(map("".join, zip(close.label, sizes, strict=True)))
        words = axes.annotate(names, (close.x.min(), close[KL].iloc[0]), (-4, -2), textcoords="offset points")
        words.set(fontsize=5.5, linespacing=1.0, ha="right", va="top")


def _draw_panel(axes: Axes, panel: pd.DataFrame, cost: str) -> None:
    column, factor, words = PANELS[cost]
    panel = panel[panel[column].notna()].assign(x=factor * panel[column])
    points = panel[panel[KL] > LEAST_KL]
    for family, (color, marker, *_) in FAMILIES.items():
        own = points[points.family == family]
        hollow = _is_modelled(own, cost)
        for part, face in ((own[~hollow], color), (own[hollow], "none")):
            label = family if face == color or hollow.all() else None
            axes.plot(part.x, part[KL], marker, color=color, markerfacecolor=face, label=label if len(own) else None)
    if cost == "step time":
        for x in panel[panel.family == ALL].x:
            axes.axvline(x, color=style.BLACK, linestyle="--", linewidth=1, label=style.FULL)
    front = points[points.front.fillna("").str.contains(cost)].sort_values("x")
    axes.plot(front.x, front[KL], color=style.GREY, linewidth=0.8, label="front", zorder=0)
    _name(axes, front)
    style.log_y(axes)
    if cost == "step time":
        sources = sorted({*panel.step_source.dropna()} - {"modelled"})
        words = f"{words}, {' and '.join(sources)}" if sources else words
    axes.set(xlabel=words, ylabel="KL(full || method) (nats)")
    axes.set_xscale("log")
    axes.set_xlim(panel.x.min() / LEFT, 1.3 * panel.x.max())
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter(NullFormatter())
