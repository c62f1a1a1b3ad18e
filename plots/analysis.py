"""Figures of the analyses, from tables of (series, x, value): 2, 4, 5, 7 and 20."""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import data, style

SETUP = ("model", "source", "run_id")
"""Runs of one model over different texts share no panel."""
MAX_MARKERS = 12
OF_PG19 = "published (PG-19)"

Looks = Mapping[str, style.Look]


def draw_curves(axes: Axes, rows: pd.DataFrame, looks: Looks, **settings: object) -> None:
    """A line per series of one metric, with a band of one standard error.

    Many points carry few markers. settings: of the axes; y then begins at 0. They end its
    scaling, so they are left out where points follow.
    """
    for name, like in looks.items():
        line = rows[rows.series == name].sort_values("x")
        if line.empty:
            continue
        every = max(1, len(line) // MAX_MARKERS)
        axes.plot(line.x, line.value, label=name, markevery=every, **like.of_line)
        stderr = line.stderr.fillna(0)
        low, high = line.value - stderr, line.value + stderr
        axes.fill_between(line.x, low, high, color=like.color, alpha=0.15, linewidth=0)
    if settings:
        axes.set(**{"ylim": (0, None)} | settings)


def fig2(table: pd.DataFrame) -> Figure | None:
    """GiB of KV cache and weights in fp16, by sequence length at batch 16, by batch size at 2,048
    tokens."""
    axis = {
        "seq_len": "sequence length (tokens), batch 16",
        "batch_size": "batch size (sequences), 2,048 tokens each",
    }

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        looks = style.in_sequence(["KV cache", "weights"])
        words = axis[panel.x_name.iloc[0]]
        draw_curves(axes, panel, looks, xlabel=words, ylabel="memory (GiB)")
        style.log2_x(axes, panel.x)

    return style.draw_rows(table, (*SETUP, "x_name"), draw, note="fp16")


def fig4(table: pd.DataFrame) -> Figure | None:
    """Cosine similarity of attention weights to the full cache's, by token, a panel per layer.

    The oracle, which picks as many tokens anew at every step, is the paper's "Optimal".
    """

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        looks = {name: style.look(name) for name in style.ordered(panel.series)}
        words = "cosine similarity"
        draw_curves(axes, panel, looks, xlabel="token", ylabel=words, ylim=(None, 1.02))

    note = "oracle: the paper's Optimal; bands: one standard error over heads"
    return style.draw_rows(table, (*SETUP, "layer"), draw, note=note)


def fig5(table: pd.DataFrame) -> Figure | None:
    """Key tokens that hold 0.9 of the attention weight.

    A histogram over queries and heads by layer, and the mean over heads at single queries. The
    paper's counts (OPT-6.7B, layer 18, PG-19) are hollow, on that layer of that model.
    """

    def draw_histogram(axes: Axes, panel: pd.DataFrame, looks: Looks) -> None:
        for name, like in looks.items():
            bins = panel[panel.series == name].sort_values("x")
            if len(bins) > 1:
                edges = [*bins.x, bins.x.iloc[-1] + bins.x.diff().iloc[-1]]
                line: Any = {"color": like.color, "linestyle": like.line, "linewidth": 1.2}
                axes.stairs(bins.value, edges, label=name, **line)
        axes.set_xlabel("key tokens for 0.9 of the weight (tokens)")
        axes.set_ylabel("queries and heads (%)")
        # Most queries of a late layer need few tokens; the others would not be seen.
        style.log_y(axes)

    def draw_counts(axes: Axes, panel: pd.DataFrame, looks: Looks) -> None:
        draw_curves(axes, panel, looks)
        setup = {"model": "opt-6.7b"}
        points = data.published("fig5", "key_tokens_for_0.9", panel, setup)
        for point in points[points.series.isin(panel.series)].itertuples():
            words = f"{OF_PG19}, {point.kind}"
            axes.plot(point.x, point.value, marker="o", label=words, **style.HOLLOW)
        words = "key tokens for 0.9\nof the weight (tokens)"
        axes.set(xlabel="query token", ylabel=words, ylim=(0, None))

    draws = {"share_of_queries": draw_histogram, "key_tokens_for_0.9": draw_counts}
    note = "bands: one standard error over heads"
    return _draw_metrics(table, draws, note=note)


def fig7(table: pd.DataFrame) -> Figure | None:
    """Mean magnitude of the columns of Q and K before and after skewing, most important first.

    Partial columns are the leftmost.
    """

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        looks = style.in_sequence(["before skewing", "after skewing"])
        matrix = {"query_magnitude": "Q", "key_magnitude": "K"}[panel.metric.iloc[0]]
        x_words = "column of a head, by importance"
        y_words = f"mean |{matrix}| of the column"
        draw_curves(axes, panel, looks, xlabel=x_words, ylabel=y_words)

    note = "columns in order of |Q| + |K|; bands: one standard error over KV heads"
    return style.draw_rows(table, (*SETUP, "layer", "metric"), draw, note=note)


def fig20(table: pd.DataFrame) -> Figure | None:
    """Share of the queries that attend to less than 1 % of the keys, by length, and the attention
    weight of sampled keys over time, in one head."""

    def draw_shares(axes: Axes, panel: pd.DataFrame, looks: Looks) -> None:
        words = "queries that attend to\n< 1 % of the keys (%)"
        draw_curves(axes, panel, looks, xlabel="sequence length (tokens)", ylabel=words)
        style.log2_x(axes, panel.x)

    def draw_weights(axes: Axes, panel: pd.DataFrame, looks: Looks) -> None:
        where = f"query token, layer {panel.layer.iloc[0]:.0f}"
        words = "attention weight of a key (%)"
        draw_curves(axes, panel, looks, xlabel=where, ylabel=words)

    draws = {"share_of_sparse_queries": draw_shares, "attention_weight": draw_weights}
    note = "attends to: needs for 0.9 of its weight; bands: one standard error over heads"
    return _draw_metrics(table, draws, note=note)


def _draw_metrics(
    table: pd.DataFrame,
    draws: Mapping[str, Callable[[Axes, pd.DataFrame, Looks], None]],
    *,
    note: str,
) -> Figure | None:
    """A panel per run and metric, drawn as `draws` says; a series looks the same in all panels."""
    of_metric = table.groupby("metric", sort=False).ngroup()
    in_order = table.assign(place=of_metric).sort_values(["place", "layer"])
    looks = style.in_sequence(in_order.series)

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        draws[panel.metric.iloc[0]](axes, panel, looks)

    return style.draw_rows(table, (*SETUP, "metric"), draw, note=note)
