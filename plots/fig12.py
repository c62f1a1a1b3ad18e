"""Figure 12: perplexity by chunk of 256 tokens, one line per method and size, from `fig12.csv`.

The x of a chunk is its middle; a chunk the table lacks breaks the line.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import data, style

SETUP = ("model", "corpus", "seq_len", "num_samples", "source")
MAX_TICKS = 6


def draw(tables: data.Tables, name: str) -> Figure | None:
    """The figure; None without `fig12.csv`, or where it has no chunks."""
    table = tables.accuracy(name)
    chunks = table.task.str.extract(r"^(?P<corpus>.*)\[(?P<start>\d+):(?P<end>\d+)\]$")
    rows = table.assign(corpus=chunks.corpus, start=chunks.start.astype(float), end=chunks.end.astype(float))
    rows = rows[rows.start.notna() & (rows.metric == "perplexity")]
    return style.draw_rows(rows, SETUP, _draw_panel, note=f"%: KV cache read; {style.error_note(rows)}")


def _draw_panel(axes: Axes, panel: pd.DataFrame) -> None:
    edges = sorted({*panel.start, *panel.end})
    middles = pd.Index(sorted({*((panel.start + panel.end) / 2)}))
    data.refuse_repeats(panel, ["label", "kv_frac", "start"])
    for label in style.ordered(panel.label):
        for _, line in panel[panel.label == label].groupby("kv_frac", dropna=False):
            chunks = line.set_index((line.start + line.end) / 2).reindex(middles)
            name = label if label == style.FULL else f"{label}, {100 * line.kv_frac.iloc[0]:.0f} %"
            style.error_line(axes, middles.to_series(), chunks.value, chunks.stderr, name=name, like=label)
    every = 1 if len(edges) <= MAX_TICKS else 2
    axes.set(
        xlabel="tokens in the cache, in chunks of 256",
        ylabel="perplexity",
        xticks=edges[::every],
        xlim=(edges[0], edges[-1]),
    )
    style.log_y_where_wide(axes, panel.value)
