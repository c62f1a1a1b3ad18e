"""Series of an analysis as lines, told apart by colour, marker and line, with a band of one standard error."""

from collections.abc import Callable, Iterable, Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.tables import columns
from plots import style
from plots.style import Look

SETUP = ("model", "source", "run_id")
"""What every panel of an analysis is of: runs of one model over different texts share no panel."""
SEQUENCE = (
    Look(style.BLUE, "o", "-", ""),
    Look(style.VERMILION, "s", "--", "\\\\\\"),
    Look(style.GREEN, "D", "-.", "xx"),
    Look(style.ORANGE, "v", ":", "///"),
    Look(style.PURPLE, "^", "-", ".."),
    Look(style.SKY, "p", "--", "||"),
    Look(style.BLACK, "X", "-.", "++"),
    Look(style.GREY, "P", ":", "oo"),
)
MAX_MARKERS = 12

Looks = Mapping[str, Look]
DrawMetric = Callable[[Axes, pd.DataFrame, Looks], None]


def looks(series: Iterable[str]) -> Looks:
    """A look for each series of a figure, the same in all its panels."""
    return {name: SEQUENCE[index % len(SEQUENCE)] for index, name in enumerate(dict.fromkeys(series))}


def draw_metrics(rows: pd.DataFrame, draws: Mapping[str, DrawMetric], *, note: str) -> Figure | None:
    """A panel per run and metric, drawn as `draws` says, the looks of a metric's series the same in all its panels;
    None without rows."""
    chosen = {metric: looks(own.sort_values("layer", kind="stable").series) for metric, own in rows.groupby("metric")}

    def draw_panel(axes: Axes, panel: pd.DataFrame) -> None:
        metric = panel.metric.iloc[0]
        draws[metric](axes, panel, chosen[metric])

    return style.draw_rows(rows, (*SETUP, "metric"), draw_panel, note=note)


def draw(axes: Axes, rows: pd.DataFrame, chosen: Looks) -> None:
    """A line per series of `rows`, of one metric, in order of x; many points carry few markers."""
    factor = columns.quantity(rows.metric.iloc[0]).factor
    for name, (color, marker, line, _) in chosen.items():
        own = rows[rows.series == name].sort_values("x")
        if own.empty:
            continue
        y, stderr = factor * own.value, factor * own.stderr.fillna(0)
        every = max(1, len(own) // MAX_MARKERS)
        axes.plot(own.x, y, label=name, color=color, marker=marker, linestyle=line, markevery=every)
        axes.fill_between(own.x, y - stderr, y + stderr, color=color, alpha=0.15, linewidth=0)
