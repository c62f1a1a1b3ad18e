"""Figure 5: key tokens that hold 0.9 of the attention weight, from `fig5.csv`: a histogram over queries and heads by
layer, and the mean over heads at single queries.

Published counts (OPT-6.7B, layer 18, PG-19) are hollow markers where that layer of that model was measured.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import curves, data, style

SHARES, COUNTS = "share_of_queries", "key_tokens_for_0.9"
OF_PG19 = "published (PG-19)"
PAPER = {"model": "opt-6.7b"}


def draw(tables: data.Tables, name: str) -> Figure | None:
    """The figure; None without `fig5.csv`."""
    draws = {SHARES: _draw_histogram, COUNTS: _draw_counts}
    return curves.draw_metrics(tables.analysis(name), draws, note="bands: one standard error over heads")


def _draw_histogram(axes: Axes, panel: pd.DataFrame, looks: curves.Looks) -> None:
    for name, (color, _, line, _) in looks.items():
        own = panel[panel.series == name].sort_values("x")
        if len(own) > 1:
            width = own.x.diff().iloc[-1]
            edges = [*own.x, own.x.iloc[-1] + width]
            axes.stairs(100 * own.value.to_numpy(), edges, label=name, color=color, linestyle=line, linewidth=1.2)
    axes.set(xlabel="key tokens for 0.9 of the weight (tokens)", ylabel="queries and heads (%)")
    style.log_y(axes)  # most queries of a late layer need few tokens, the rest would not be seen


def _draw_counts(axes: Axes, panel: pd.DataFrame, looks: curves.Looks) -> None:
    curves.draw(axes, panel, looks)
    measured = {f"layer{layer:.0f}" for layer in panel.layer}
    for point in data.published("fig5", COUNTS, panel, PAPER):
        if point.label in measured:
            axes.plot(
                point.x, point.value, "o", markerfacecolor="none", markeredgecolor=style.BLACK,
                label=f"{OF_PG19}, {point.kind}",
            )  # fmt: skip
    axes.set(xlabel="query token", ylabel="key tokens for 0.9\nof the weight (tokens)", ylim=(0, None))
