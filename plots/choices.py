"""What InfiniGen's own choices do, one changed at a time, from `choices.csv`: KL to the full cache, and perplexity.

A bar per run with its error over windows; dashed, the full cache's perplexity on the same windows. A run's
label names what it changes, such as `InfiniGen, columns=query`.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import bars, data, style

NAME = "InfiniGen"
AXES = {"kl_nats": "KL(full || method) (nats)", "perplexity": "perplexity"}
SETUP = ("model", "task", "seq_len", "num_samples", "source")


def draw(tables: data.Tables, name: str) -> Figure | None:
    """The figure; None without `choices.csv`."""
    rows = data.whole_texts(tables.accuracy(name))
    if rows.empty:
        return None
    panels = data.split(rows, SETUP)
    cells = [(cell, metric) for cell in zip(panels.titles, panels.frames, strict=True) for metric in AXES]
    figure, all_axes = style.new(len(cells))
    for axes, ((title, panel), metric) in zip(all_axes, cells, strict=True):
        _draw_panel(axes, panel, metric)
        axes.set(title=title, ylabel=AXES[metric])
    return style.finish(
        figure, f"{panels.shared}; KV read {_sizes(rows)} %; {style.error_note(rows[rows.metric.isin(AXES)])}"
    )


def _draw_panel(axes: Axes, panel: pd.DataFrame, metric: str) -> None:
    own = panel[panel.metric == metric]
    data.refuse_repeats(own, ["label"])
    changed = own.label.str.removeprefix(NAME).str.removeprefix(", ").replace("", "default")
    bars.of_one(axes, own, name=NAME, groups=list(changed.str.replace(", ", ",\n")))
    for text in axes.get_xticklabels():
        text.set(rotation=40, ha="right", rotation_mode="anchor")
    if metric == "perplexity":
        style.full_lines(axes, panel[panel.metric == "perplexity_full"])


def _sizes(rows: pd.DataFrame) -> str:
    """The smallest and the largest share that a run reads, once where they are the same."""
    return " to ".join(dict.fromkeys(f"{100 * size:.0f}" for size in (rows["size"].min(), rows["size"].max())))
