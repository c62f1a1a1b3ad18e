"""Ranges of the tokens of a text along x: a line per method and size, each range at its middle, a missing one a gap."""

import pandas as pd
from matplotlib.axes import Axes

from harness.tables import columns
from plots import data, style

SETUP = ("model", "corpus", "seq_len", "num_samples", "source")
MAX_TICKS = 6


def of(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of an accuracy table that are of ranges, such as `offline[256:512]`, as corpus, start and end."""
    chunks = table.task.str.extract(columns.CHUNK_TASK)
    rows = table.assign(corpus=chunks.corpus, start=chunks.start.astype(float), end=chunks.end.astype(float))
    return rows[rows.start.notna()]


def draw(axes: Axes, panel: pd.DataFrame) -> None:
    """The lines of one metric with error bars of one standard error; y logarithmic where wide."""
    edges = sorted({*panel.start, *panel.end})
    middles = pd.Index(sorted({*((panel.start + panel.end) / 2)}))
    data.refuse_repeats(panel, ["label", "size", "start"])
    for label in style.ordered(panel.label):
        for _, line in panel[panel.label == label].groupby("size", dropna=False):
            ranges = line.set_index((line.start + line.end) / 2).reindex(middles)
            name = label if label == style.FULL else f"{label}, {100 * line['size'].iloc[0]:.0f} %"
            style.error_line(axes, middles.to_series(), ranges.value, ranges.stderr, name=name, like=label)
    every = -(-len(edges) // MAX_TICKS)
    axes.set(xticks=edges[::every], xlim=(edges[0], edges[-1]))
    style.log_y_where_wide(axes, panel.value)
