"""Figure 4: cosine similarity of attention weights to the full cache's, by token, a panel per layer, from `fig4.csv`.

The oracle, which picks as many tokens anew at every step, is the paper's "Optimal". Nothing published is known.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import curves, data, style


def draw(tables: data.Tables, name: str) -> Figure | None:
    """The figure; None without `fig4.csv`."""
    rows = tables.analysis(name)
    note = "oracle: the paper's Optimal; bands: one standard error over heads"
    return style.draw_rows(rows, (*curves.SETUP, "layer"), _draw_panel, note=note)


def _draw_panel(axes: Axes, panel: pd.DataFrame) -> None:
    curves.draw(axes, panel, {name: style.look(name) for name in style.ordered(panel.series)})
    axes.set(xlabel="token", ylabel="cosine similarity", ylim=(None, 1.02))
