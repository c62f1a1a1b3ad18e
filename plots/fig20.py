"""Figure 20, from `fig20.csv`: (a) share of the queries that attend to less than 1 % of the keys, by length; (b) the
attention weight of sampled keys over time, in one head. Nothing published is known.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import curves, data, style

SHARE = "share_of_sparse_queries"


def draw(tables: data.Tables) -> Figure | None:
    """The figure; None without `fig20.csv`."""
    rows = tables.analysis("fig20")
    if rows.empty:
        return None
    shares, weights = rows[rows.metric == SHARE], rows[rows.metric != SHARE]
    layers = curves.looks(f"layer {layer:.0f}" for layer in sorted(shares.layer.unique()))
    keys = curves.looks(weights.series)

    def draw_panel(axes: Axes, panel: pd.DataFrame) -> None:
        if panel.metric.iloc[0] == SHARE:
            _draw_shares(axes, panel, layers)
        else:
            _draw_weights(axes, panel, keys)

    panels = data.split(rows, (*curves.SETUP, "metric"))
    note = "attends to: needs for 0.9 of its weight; bands: one standard error over heads"
    return style.draw_panels(panels, draw_panel, note=note)


def _draw_shares(axes: Axes, panel: pd.DataFrame, looks: curves.Looks) -> None:
    curves.draw(axes, panel, looks, factor=100)
    lengths = sorted(panel.x.unique())
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,.0f}" for length in lengths])
    axes.set(xlabel="sequence length (tokens)", ylabel="queries that attend to\n< 1 % of the keys (%)", ylim=(0, None))


def _draw_weights(axes: Axes, panel: pd.DataFrame, looks: curves.Looks) -> None:
    curves.draw(axes, panel, looks, factor=100)
    where = f"query token, layer {panel.layer.iloc[0]:.0f}"
    axes.set(xlabel=where, ylabel="attention weight of a key (%)", ylim=(0, None))
