"""Figure 7: mean magnitude of the columns of Q and K before and after skewing, most important column first, from
`fig7.csv`. Partial columns are the leftmost. Nothing published is known.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import curves, data, style

AXES = {"query_magnitude": "mean |Q| of the column", "key_magnitude": "mean |K| of the column"}


def draw(tables: data.Tables, name: str) -> Figure | None:
    """The figure; None without `fig7.csv`."""
    rows = tables.analysis(name)
    note = "columns in order of |Q| + |K|; bands: one standard error over KV heads"
    return style.draw_rows(rows, (*curves.SETUP, "layer", "metric"), _draw_panel, note=note)


def _draw_panel(axes: Axes, panel: pd.DataFrame) -> None:
    curves.draw(axes, panel, curves.looks(["before skewing", "after skewing"]))
    axes.set(xlabel="column of a head, by importance", ylabel=AXES[panel.metric.iloc[0]], ylim=(0, None))
