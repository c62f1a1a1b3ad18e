"""The board, from `board-methods.csv`: each method's KL beside the oracle's, by budget.

`budget`: eleven methods, a line each, over all models.

`draw`: a panel a budget, a line a method, the closest to the full cache first. A marker is the
ratio of its KL to the oracle's, its bar the 95 % interval. Full markers are of the shortest
windows, hollow ones of longer windows. A cross is a method that is not compared, such as one that
cannot have the budget; these stand below the others.
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import style

WIDTH_INCHES = 4.4
BUDGET_INCHES = (6.4, 3.6)
SPREAD = 0.08
"""How far the bars of one budget lie from it, as a logarithm."""


def budget(methods: pd.DataFrame) -> Figure | None:
    """KL against the budget, on the shortest windows; None without two budgets.

    A marker stands at its budget, its bar beside it: the 95 % interval of the ratio to the oracle's
    KL, times the oracle's KL.
    """
    rows = _first_board(methods)
    rows = rows[rows.apart == ""]
    rows = rows[rows.num_models == rows.num_models.max()]
    rows = rows[rows.seq_len == rows.seq_len.min()]
    rows = rows[rows.label.isin(style.REGISTRY["budget"]) | rows.own]
    if rows.asked_budget.nunique() < 2:
        return None
    rows = rows.assign(name=rows.label, x=100 * rows.asked_budget, y=rows.kl_nats, stderr=np.nan)
    rows = rows.sort_values("x")
    labels = rows.groupby("label").ratio.min().sort_values().index
    shifts = pd.Series(np.linspace(-SPREAD, SPREAD, len(labels)), labels)

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        style.draw_lines(axes, panel)
        for label, line in panel[panel.ratio_low.notna()].groupby("label"):
            oracles = line.kl_nats / line.ratio
            below = line.kl_nats - oracles * line.ratio_low
            above = oracles * line.ratio_high - line.kl_nats
            beside = line.x * np.exp(shifts[label])  # where a bar hides no other
            like: Any = {"color": style.look(str(label)).color, "fmt": "_", "markersize": 3}
            axes.errorbar(beside, line.y, [below, above], elinewidth=0.8, **like)
        style.log(axes, "x")
        style.log(axes, "y")
        ticks = sorted(set(panel.x))
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set(xlabel=style.BUDGET_AXIS, ylabel=style.KL_AXIS)

    many = "over models, as drawn from many" if rows.num_models.max() > 1 else "over places"
    counts = f"{rows.num_models.max():.0f} models, {rows.num_windows.max():.0f} windows"
    shown = f"{counts} of {rows.seq_len.max():,.0f} tokens: geometric mean"
    bars = f"bars: 95 % interval of the ratio to the oracle's KL, {many}, beside its marker"
    return style.draw_panels([("", rows, draw)], f"{shown}; {bars}", panel_inches=BUDGET_INCHES)


def _first_board(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the first board of the table that have a ratio."""
    return rows[rows.over.isin(rows.over.head(1)) & (rows.ratio > 0)]


def draw(methods: pd.DataFrame) -> Figure | None:
    """The figure; None without `board-methods.csv`."""
    rows = _first_board(methods)
    if rows.empty:
        return None
    points = rows.assign(
        x=rows.ratio,
        bar_low=rows.ratio - rows.ratio_low,
        bar_high=rows.ratio_high - rows.ratio,
        length=rows.seq_len,
        is_apart=rows.apart != "",
    )
    lengths = sorted(set(points.length))

    def draw_budget(axes: Axes, panel: pd.DataFrame) -> None:
        by_label = panel.groupby("label", sort=False)[["is_apart", "ratio"]].min()
        names = by_label.sort_values(["is_apart", "ratio"], ascending=False).index
        axes.axvline(1, color=style.GREY, linewidth=0.8, zorder=0)
        style.draw_names(axes, panel, list(names), lengths)
        axes.set(xlabel="KL / oracle's KL", xscale="log")
        axes.xaxis.set_major_formatter("{x:g}")

    by_budget = points.groupby("asked_budget")
    panels: list[style.Panel] = []
    for _, panel in by_budget:
        panels.append((f"budget {100 * panel.asked_budget.iloc[0]:.0f} %", panel, draw_budget))
    most = points[~points.is_apart] if not points.is_apart.all() else points
    counts = [f"{most.num_models.max():.0f} models"]
    for length, number in most.groupby("length").num_windows.max().items():
        counts.append(f"{number:.0f} windows of {length:,.0f} tokens")
    over = "models, as drawn from many" if most.num_models.max() > 1 else "places of the texts"
    panel_inches = (WIDTH_INCHES, style.NAME_INCHES * by_budget.label.nunique().max() + 0.6)
    note = f"{', '.join(counts)}; bars: 95 % interval, over {over}"
    return style.draw_panels(panels, note, panel_inches=panel_inches)
