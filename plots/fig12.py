"""Figure 12: perplexity by chunk of 256 tokens, one line per method and size, from `fig12.csv`."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import chunks, data, style


def draw(tables: data.Tables, name: str) -> Figure | None:
    """The figure; None without `fig12.csv`, or where it has no chunks."""
    rows = chunks.of(tables.accuracy(name))
    rows = rows[rows.metric == "perplexity"]
    return style.draw_rows(rows, chunks.SETUP, _draw_panel, note="%: KV cache read; bars: one standard error")


def _draw_panel(axes: Axes, panel: pd.DataFrame) -> None:
    chunks.draw(axes, panel)
    axes.set(xlabel="tokens in the cache, in chunks of 256", ylabel="perplexity")
