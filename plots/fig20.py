"""Figure 20, from `fig20.csv`: (a) share of the queries that attend to less than 1 % of the keys, by length; (b) the
attention weight of sampled keys over time, in one head. Nothing published is known.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import curves, data

SHARE, WEIGHT = "share_of_sparse_queries", "attention_weight"


def draw(tables: data.Tables, name: str) -> Figure | None:
    """The figure; None without `fig20.csv`."""
    rows = tables.analysis(name)
    note = "attends to: needs for 0.9 of its weight; bands: one standard error over heads"
    return curves.draw_metrics(rows, {SHARE: _draw_shares, WEIGHT: _draw_weights}, note=note)


def _draw_shares(axes: Axes, panel: pd.DataFrame, looks: curves.Looks) -> None:
    curves.draw(axes, panel, looks)
    lengths = sorted(panel.x.unique())
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,.0f}" for length in lengths])
    axes.set(xlabel="sequence length (tokens)", ylabel="queries that attend to\n< 1 % of the keys (%)", ylim=(0, None))


def _draw_weights(axes: Axes, panel: pd.DataFrame, looks: curves.Looks) -> None:
    curves.draw(axes, panel, looks)
    where = f"query token, layer {panel.layer.iloc[0]:.0f}"
    axes.set(xlabel=where, ylabel="attention weight of a key (%)", ylim=(0, None))
