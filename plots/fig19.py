"""Figure 19: perplexity (a) against the share of the cache that is read, one line per method, and (b) against the
length with a fixed number of tokens kept, from `fig19.csv`.

(b) is of the runs whose label ends in "with N tokens". The full cache comes from the runs themselves, each of which
scores it on the same windows. No published point is known.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.tables import columns
from plots import data, style
from plots.fig11 import KV_AXIS

SIZE_SETUP = ("model", "task", "seq_len", "num_samples", "source")
LENGTH_SETUP = ("model", "task", "kept", "source")


def draw(tables: data.Tables, name: str) -> Figure | None:
    """The figure; None without `fig19.csv`."""
    table = data.whole_texts(tables.accuracy(name))
    rows = table.join(table.label.str.extract(columns.KEPT_LABEL))
    rows = rows[rows.metric.isin(["perplexity", "perplexity_full"])]
    halves = (rows[rows.kept.isna()], SIZE_SETUP, _draw_sizes), (rows[rows.kept.notna()], LENGTH_SETUP, _draw_lengths)
    parts = [(data.split(half, setup), draw_panel) for half, setup, draw_panel in halves if len(half)]
    cells = [
        (*cell, draw_panel) for panels, draw_panel in parts for cell in zip(panels.titles, panels.frames, strict=True)
    ]
    if not cells:
        return None
    figure, all_axes = style.new(len(cells))
    for axes, (title, frame, draw_panel) in zip(all_axes, cells, strict=True):
        draw_panel(axes, frame)
        style.log_y_where_wide(axes, frame.value)
        axes.set(ylabel="perplexity", title=title)
    return style.finish(figure, "\n".join(panels.shared for panels, _ in parts) + f"; {style.error_note(rows)}")


def _draw_sizes(axes: Axes, panel: pd.DataFrame) -> None:
    own, full = (panel[panel.metric == metric] for metric in ("perplexity", "perplexity_full"))
    style.full_lines(axes, full)
    style.size_lines(axes, own)
    axes.set_xlabel(KV_AXIS)


def _draw_lengths(axes: Axes, panel: pd.DataFrame) -> None:
    full = panel[panel.metric == "perplexity_full"].assign(name=style.FULL).drop_duplicates("seq_len")
    lines = pd.concat([full, panel[panel.metric == "perplexity"]])
    for name in style.ordered(lines.name):
        line = lines[lines.name == name].sort_values("seq_len")
        style.error_line(axes, line.seq_len, line.value, line.stderr, name=name, like=name)
    lengths = sorted(set(panel.seq_len))
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,.0f}" for length in lengths])
    axes.minorticks_off()
    axes.margins(x=0.1)
    axes.set_xlabel("tokens of the text")
