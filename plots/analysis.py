"""Figures of the analyses, from tables of (series, x, value): 2, 4, 5, 7 and 20."""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.results import columns
from harness.results.metrics import quantity
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
    factor = quantity(rows.metric.iloc[0]).factor
    for name, (color, marker, line, _) in looks.items():
        own = rows[rows.series == name].sort_values("x")
        if own.empty:
            continue
        y, stderr = factor * own.value, factor * own.stderr.fillna(0)
        every = max(1, len(own) // MAX_MARKERS)
        look: Any = {"color": color, "marker": marker, "linestyle": line}
        axes.plot(own.x, y, label=name, markevery=every, **look)
        low, high = y - stderr, y + stderr
        axes.fill_between(own.x, low, high, color=color, alpha=0.15, linewidth=0)
    if settings:
        axes.set(**{"ylim": (0, None)} | settings)


def fig2(tables: data.Tables, name: str) -> Figure | None:
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

    rows = tables.read(name, columns.ANALYSIS)
    return style.draw_rows(rows, (*SETUP, "x_name"), draw, note="fp16")


def fig4(tables: data.Tables, name: str) -> Figure | None:
    """Cosine similarity of attention weights to the full cache's, by token, a panel per layer.

    The oracle, which picks as many tokens anew at every step, is the paper's "Optimal".
    """

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        looks = {name: style.look(name) for name in style.ordered(panel.series)}
        words = "cosine similarity"
        draw_curves(axes, panel, looks, xlabel="token", ylabel=words, ylim=(None, 1.02))

    rows = tables.read(name, columns.ANALYSIS)
    note = "oracle: the paper's Optimal; bands: one standard error over heads"
    return style.draw_rows(rows, (*SETUP, "layer"), draw, note=note)


def fig5(tables: data.Tables, name: str) -> Figure | None:
    """Key tokens that hold 0.9 of the attention weight.

    A histogram over queries and heads by layer, and the mean over heads at single queries. The
    paper's counts (OPT-6.7B, layer 18, PG-19) are hollow, on that layer of that model.
    """

    def draw_histogram(axes: Axes, panel: pd.DataFrame, looks: Looks) -> None:
        for name, (color, _, line, _) in looks.items():
            own = panel[panel.series == name].sort_values("x")
            if len(own) > 1:
                edges = [*own.x, own.x.iloc[-1] + own.x.diff().iloc[-1]]
                percent = 100 * own.value.to_numpy()
                look: Any = {"color": color, "linestyle": line, "linewidth": 1.2}
                axes.stairs(percent, edges, label=name, **look)
        axes.set_xlabel("key tokens for 0.9 of the weight (tokens)")
        axes.set_ylabel("queries and heads (%)")
        # Most queries of a late layer need few tokens; the others would not be seen.
        style.log_y(axes)

    def draw_counts(axes: Axes, panel: pd.DataFrame, looks: Looks) -> None:
        draw_curves(axes, panel, looks)
        setup = {"model": "opt-6.7b"}
        points = data.published("fig5", "key_tokens_for_0.9", panel, setup)
        for _, point in points.iterrows():
            if point.series in {*panel.series}:
                words = f"{OF_PG19}, {point.kind}"
                axes.plot(point.x, point.value, marker="o", label=words, **style.HOLLOW)
        words = "key tokens for 0.9\nof the weight (tokens)"
        axes.set(xlabel="query token", ylabel=words, ylim=(0, None))

    draws = {"share_of_queries": draw_histogram, "key_tokens_for_0.9": draw_counts}
    note = "bands: one standard error over heads"
    return _draw_metrics(tables, name, draws, note=note)


def fig7(tables: data.Tables, name: str) -> Figure | None:
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
    rows = tables.read(name, columns.ANALYSIS)
    return style.draw_rows(rows, (*SETUP, "layer", "metric"), draw, note=note)


def fig20(tables: data.Tables, name: str) -> Figure | None:
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
    return _draw_metrics(tables, name, draws, note=note)


def _draw_metrics(
    tables: data.Tables,
    name: str,
    draws: Mapping[str, Callable[[Axes, pd.DataFrame, Looks], None]],
    *,
    note: str,
) -> Figure | None:
    """A panel per run and metric, drawn as `draws` says; a series looks the same in all panels."""
    rows = tables.read(name, columns.ANALYSIS)
    series: list[str] = []
    for _, of_metric in rows.groupby("metric", sort=False):
        series += list(of_metric.sort_values("layer", kind="stable").series)
    looks = style.in_sequence(series)

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        draws[panel.metric.iloc[0]](axes, panel, looks)

    return style.draw_rows(rows, (*SETUP, "metric"), draw, note=note)
