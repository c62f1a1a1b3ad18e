"""Figure 2: GiB of KV cache and weights in fp16, (a) by sequence length at batch 16, (b) by batch size at 2,048 tokens.

From `fig2.csv`. Nothing published is known.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import curves, data, style

AXES = {
    "seq_len": "sequence length (tokens), batch 16",
    "batch_size": "batch size (sequences), 2,048 tokens each",
}


def draw(tables: data.Tables, name: str) -> Figure | None:
    """The figure; None without `fig2.csv`."""
    rows = tables.analysis(name)
    return style.draw_rows(rows, (*curves.SETUP, "x_name"), _draw_panel, note="fp16")


def _draw_panel(axes: Axes, panel: pd.DataFrame) -> None:
    curves.draw(axes, panel, curves.looks(["KV cache", "weights"]))
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(panel.x.unique()), [f"{x:,.0f}" for x in sorted(panel.x.unique())])
    axes.set(xlabel=AXES[panel.x_name.iloc[0]], ylabel="memory (GiB)", ylim=(0, None))
