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

from harness.results import columns
from plots import data, style

LINE_INCHES, WIDTH_INCHES = 0.14, 4.4
METHODS = "board-methods"
"""The table of both figures."""
APART = "x"
"""The marker of a method that is not compared."""
BUDGET_INCHES = (6.4, 3.6)
SPREAD = 0.08
"""How far the bars of one budget lie from it, as a logarithm."""
SHIFT = 0.18
"""Of the lines between a method's markers of two lengths."""
RATIO_AXIS = "KL / oracle's KL"
UNLISTED = style.Look(style.GREY, "o", "-")
"""Of methods without a colour of their own: more than there are colours, and named on the axis."""


def budget(tables: data.Tables, name: str) -> Figure | None:
    """KL against the budget, on the shortest windows; None without two budgets in
    `board-methods.csv`.

    A marker stands at its budget, its bar beside it: the 95 % interval of the ratio to the oracle's
    KL, times the oracle's KL.
    """
    rows = _first_board(tables.read(METHODS, columns.BOARD))
    rows = rows[rows.ratio.notna() & (rows.ratio > 0) & rows.apart.isna()]
    rows = rows[rows.num_models == rows.num_models.max()]
    rows = rows[rows.seq_len == rows.seq_len.min()]
    is_shown = rows.label.isin(style.REGISTRY["budget"]) | rows[data.OWN].fillna(False)
    rows = rows[is_shown]
    if rows.asked_budget.nunique() < 2:
        return None
    figure, (axes,) = style.new(1, panel_inches=BUDGET_INCHES)
    by_closeness = rows.groupby("label").ratio.min().sort_values()
    shift = np.linspace(-SPREAD, SPREAD, len(by_closeness))
    for place, label in enumerate(by_closeness.index):
        line = rows[rows.label == label].sort_values("asked_budget")
        oracles = line.kl_nats / line.ratio
        below = line.kl_nats - oracles * line.ratio_low
        above = oracles * line.ratio_high - line.kl_nats
        look, x = style.look(label), 100 * line.asked_budget
        style.error_line(axes, x, line.kl_nats, None, name=label, like=look)
        if line.ratio_low.notna().all():
            beside = x * np.exp(shift[place])  # where a bar hides no other
            bars = np.array([below, above])
            axes.errorbar(
                beside, line.kl_nats, bars, color=look.color, fmt="_", markersize=3, elinewidth=0.8
            )
    style.log_x(axes)
    style.log_y(axes)
    ticks = 100 * np.sort(rows.asked_budget.unique())
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set(xlabel=style.BUDGET_AXIS, ylabel=style.KL_AXIS)
    style.mark_own(axes, rows)
    many = "over models, as drawn from many" if rows.num_models.max() > 1 else "over places"
    counts = f"{rows.num_models.max():.0f} models, {rows.num_windows.max():.0f} windows"
    shown = f"{counts} of {rows.seq_len.max():,.0f} tokens: geometric mean"
    bars_are = f"bars: 95 % interval of the ratio to the oracle's KL, {many}"
    return style.finish(figure, f"{shown}; {bars_are}, beside its marker")


def _first_board(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows.over == rows.over.iloc[0]] if len(rows) else rows


def draw(tables: data.Tables, name: str) -> Figure | None:
    """The figure; None without `board-methods.csv`."""
    rows = _first_board(tables.read(METHODS, columns.BOARD))
    rows = rows[rows.ratio.notna() & (rows.ratio > 0)]
    if rows.empty:
        return None
    rows = rows.assign(is_apart=rows.apart.notna())
    budgets = sorted(rows.asked_budget.unique())
    num_lines = rows.groupby("asked_budget").label.nunique().max()
    height = LINE_INCHES * num_lines + 1.2
    figure = Figure(figsize=(WIDTH_INCHES * len(budgets), height), layout="constrained")
    lengths = sorted(rows.seq_len.unique())
    for number, budget in enumerate(budgets):
        axes = figure.add_subplot(1, len(budgets), number + 1)
        _draw_budget(axes, rows[rows.asked_budget == budget], lengths)
        axes.set_title(f"budget {100 * budget:.0f} %")
        style.mark_own(axes, rows)
        _explain(axes, lengths, bool(rows.is_apart.any()))
    most = rows[~rows.is_apart] if not rows.is_apart.all() else rows
    of_length = []
    for seq_len, windows in most.groupby("seq_len").num_windows:
        of_length.append(f"{windows.max():.0f} windows of {seq_len:,.0f} tokens")
    counts = f"{most.num_models.max():.0f} models, " + ", ".join(of_length)
    over = "models, as drawn from many" if most.num_models.max() > 1 else "places of the texts"
    return style.finish(figure, f"{counts}; bars: 95 % interval, over {over}")


def _draw_budget(axes: Axes, rows: pd.DataFrame, lengths: list[float]) -> None:
    """A line per method: those that are compared by their ratio, the others below."""
    lines = {label: line for line, label in enumerate(_by_ratio(rows))}
    axes.axvline(1, color=style.GREY, linewidth=0.8, zorder=0)
    for _, row in rows.iterrows():
        place = lengths.index(row.seq_len)
        y = lines[row.label] + SHIFT * ((len(lengths) - 1) / 2 - place)
        method = row.label.partition(" + ")[0]  # without its codec
        look = style.LOOKS.get(method, UNLISTED)
        marker = APART if row.is_apart else look.marker or "o"
        bar = None
        if not pd.isna(row.ratio_low):
            bar = [[row.ratio - row.ratio_low], [row.ratio_high - row.ratio]]
        axes.errorbar(
            row.ratio,
            y,
            xerr=bar,
            color=look.color,
            marker=marker,
            markerfacecolor="white" if place else look.color,
            elinewidth=0.8,
            markersize=4,
        )
    axes.set_yticks(range(len(lines)), list(lines), fontsize=6)
    axes.set(xlabel=RATIO_AXIS, ylim=(-0.7, len(lines) - 0.3))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")


def _by_ratio(rows: pd.DataFrame) -> list[str]:
    """The labels from below: those that are not compared, then the others, the closest on top."""
    keys = rows.groupby("label", sort=False).agg(
        is_apart=("is_apart", "min"), ratio=("ratio", "min")
    )
    return list(keys.sort_values(["is_apart", "ratio"], ascending=False).index)


def _explain(axes: Axes, lengths: list[float], has_apart: bool) -> None:
    look: Any = {"color": style.GREY, "markersize": 4}
    for place, length in enumerate(lengths):
        face = "white" if place else style.GREY
        words = f"windows of {length:,.0f} tokens"
        axes.plot([], [], "o", markerfacecolor=face, label=words, **look)
    if has_apart:
        axes.plot([], [], APART, label="not compared", **look)
