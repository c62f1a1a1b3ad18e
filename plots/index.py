"""What an index on the device costs and gives, from `index.csv`: KL, and accuracy on tasks, by the index' size.

A line per kind of index, by its runs' label. The size is what the method keeps on the device as a share of the full
cache. Accuracy is the mean over the tasks; its error takes tasks as
independent.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.tables import columns
from plots import data, style
from plots.curves import Looks, looks

SETUP = ("model", "source")


def draw(tables: data.Tables, name: str) -> Figure | None:
    """The figure; None without `index.csv`."""
    rows = data.whole_texts(tables.accuracy(name))
    rows = rows[rows.metric.isin([columns.KL.name, "acc"])]
    if rows.empty:
        return None
    chosen = looks(rows.label)
    panels = data.split(rows, SETUP)
    halves = {columns.KL.name: ("KL(full || method) (nats)", 1), "acc": ("accuracy (%)", 100)}
    cells = [
        (title, frame[frame.metric == metric], *shown)
        for title, frame in zip(panels.titles, panels.frames, strict=True)
        for metric, shown in halves.items()
        if (frame.metric == metric).any()
    ]
    figure, all_axes = style.new(len(cells))
    for axes, (title, frame, words, factor) in zip(all_axes, cells, strict=True):
        _draw_panel(axes, frame, factor, chosen)
        axes.set(title=title, ylabel=words, xlabel="index on the device (% of full cache)")
    tasks = ", ".join(sorted(set(rows[rows.metric == "acc"].task)))
    return style.finish(figure, f"{panels.shared}; accuracy: mean of {tasks}; {style.error_note(rows)}")


def _draw_panel(axes: Axes, panel: pd.DataFrame, factor: float, chosen: Looks) -> None:
    runs = panel.groupby(["label", "run_id"], sort=False)
    points = runs.agg(
        x=(columns.RESIDENT_FRAC.name, "mean"),
        y=("value", "mean"),
        stderr=("stderr", lambda errors: (errors**2).sum() ** 0.5 / len(errors)),
    ).reset_index()
    for label, (color, marker, line, _) in chosen.items():
        own = points[points.label == label].sort_values("x")
        axes.errorbar(
            100 * own.x, factor * own.y, yerr=factor * own.stderr, label=label if len(own) else None,
            color=color, marker=marker, linestyle=line, capsize=2, elinewidth=0.8,
        )  # fmt: skip
