"""Figures of the analyses, from tables of (series, x, value): 2, 4, 5, 7 and 20."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import data, style

SETUP = ("model", "source", "run_id")
"""Runs of one model over different texts share no panel."""
MAX_MARKERS = 12
IN_POWERS = ("seq_len", "batch_size")
"""What stands on a logarithmic x axis."""
OF_PG19 = "published (PG-19)"
WORDS = {
    "seq_len": ("sequence length (tokens), batch 16", "memory (GiB)"),
    "batch_size": ("batch size (sequences), 2,048 tokens each", "memory (GiB)"),
    "cosine_similarity": ("token", "cosine similarity"),
    "key_tokens_for_0.9": ("query token", "key tokens for 0.9\nof the weight (tokens)"),
    "query_magnitude": ("column of a head, by importance", "mean |Q| of the column"),
    "key_magnitude": ("column of a head, by importance", "mean |K| of the column"),
    "share_of_sparse_queries": (
        "sequence length (tokens)",
        "queries that attend to\n< 1 % of the keys (%)",
    ),
    "attention_weight": ("query token, layer {:.0f}", "attention weight of a key (%)"),
}
"""The axes of a metric, of Figure 2 those of what x is."""

Looks = Mapping[str, style.Look]


def fig2(table: pd.DataFrame) -> Figure | None:
    """GiB of KV cache and weights in fp16, by sequence length at batch 16, by batch size at 2,048
    tokens."""
    return _draw(table, "x_name", note="fp16")


def fig4(table: pd.DataFrame) -> Figure | None:
    """Cosine similarity of attention weights to the full cache's, by token, a panel per layer.

    The oracle, which picks as many tokens anew at every step, is the paper's "Optimal".
    """
    note = "oracle: the paper's Optimal; bands: one standard error over heads"
    return _draw(table, "layer", note=note)


def fig5(table: pd.DataFrame) -> Figure | None:
    """Key tokens that hold 0.9 of the attention weight.

    A histogram over queries and heads by layer, and the mean over heads at single queries. The
    paper's counts (OPT-6.7B, layer 18, PG-19) are hollow, on that layer of that model.
    """
    return _draw(table, "metric", note="bands: one standard error over heads")


def fig7(table: pd.DataFrame) -> Figure | None:
    """Mean magnitude of the columns of Q and K before and after skewing, most important first.

    Partial columns are the leftmost.
    """
    note = "columns in order of |Q| + |K|; bands: one standard error over KV heads"
    return _draw(table, "layer", "metric", note=note)


def fig20(table: pd.DataFrame) -> Figure | None:
    """Share of the queries that attend to less than 1 % of the keys, by length, and the attention
    weight of sampled keys over time, in one head."""
    note = "attends to: needs for 0.9 of its weight; bands: one standard error over heads"
    return _draw(table, "metric", note=note)


def _draw(table: pd.DataFrame, *parts: str, note: str) -> Figure | None:
    """A panel for each setup and each value of the columns `parts`. A series looks alike in all of
    them, in the order of metrics and layers."""
    of_metric = table.groupby("metric", sort=False).ngroup()
    in_order = table.assign(place=of_metric).sort_values(["place", "layer"])
    looks = style.in_sequence(in_order.series)

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        metric, x_name = panel.metric.iloc[0], panel.x_name.iloc[0]
        if metric == "share_of_queries":
            _draw_histogram(axes, panel, looks)
            return
        _draw_curves(axes, panel, looks)
        xlabel, ylabel = WORDS[metric if metric in WORDS else x_name]
        axes.set(xlabel=xlabel.format(panel.layer.iloc[0]), ylabel=ylabel)
        if metric == "key_tokens_for_0.9":
            points = data.published("fig5", metric, panel, {"model": "opt-6.7b"})
            for _, point in points[points.series.isin(panel.series)].iterrows():
                words: Any = {"label": f"{OF_PG19}, {point.kind}"} | style.HOLLOW
                axes.plot(point.x, point.value, marker="o", **words)
        axes.set(ylim=(None, 1.02) if metric == "cosine_similarity" else (0, None))
        if x_name in IN_POWERS:
            style.log2_x(axes, panel.x)

    return style.draw_rows(table, (*SETUP, *parts), draw, note=note)


def _draw_histogram(axes: Axes, panel: pd.DataFrame, looks: Looks) -> None:
    for name in style.ordered(panel.series):
        bins = panel[panel.series == name].sort_values("x")
        if len(bins) > 1:
            edges = [*bins.x, bins.x.iloc[-1] + bins.x.diff().iloc[-1]]
            line: Any = {"color": looks[name].color, "linestyle": looks[name].line}
            axes.stairs(bins.value, edges, label=name, linewidth=1.2, **line)
    axes.set(xlabel="key tokens for 0.9 of the weight (tokens)", ylabel="queries and heads (%)")
    # Most queries of a late layer need few tokens; the others would not be seen.
    style.log(axes, "y")


def _draw_curves(axes: Axes, rows: pd.DataFrame, looks: Looks) -> None:
    """A line per series of one metric, with a band of one standard error; many points carry few
    markers."""
    for name in style.ordered(rows.series):
        line = rows[rows.series == name].sort_values("x")
        every = max(1, len(line) // MAX_MARKERS)
        axes.plot(line.x, line.value, label=name, markevery=every, **looks[name].of_line)
        stderr = line.stderr.fillna(0)
        low, high = line.value - stderr, line.value + stderr
        axes.fill_between(line.x, low, high, color=looks[name].color, alpha=0.15, linewidth=0)
