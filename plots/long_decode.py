"""Long decoding: over the tokens decoded, KL(full || method) along the method's own text, and the full cache's
perplexity of that text, a line per method and size, from `long_decode.csv`.

The full cache is at no distance from itself, so its line stands in the second panel alone.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import chunks, data, style

AXES = {"kl_nats": "KL(full || method) (nats)", "text_perplexity": "full cache's perplexity of the text"}
NOTE = "%: KV cache read; bars: one standard error over prompts"


def draw(tables: data.Tables, name: str) -> Figure | None:
    """The figure; None without rows of ranges."""
    rows = data.of_metrics([chunks.of(tables.accuracy(name))], AXES)
    rows = rows[(rows.label != style.FULL) | (rows.metric != "kl_nats")]
    return style.draw_rows(rows, (*chunks.SETUP, "metric"), _draw_panel, note=NOTE)


def _draw_panel(axes: Axes, panel: pd.DataFrame) -> None:
    chunks.draw(axes, panel)
    axes.set(xlabel="decoded token", ylabel=AXES[panel.metric.iloc[0]])
