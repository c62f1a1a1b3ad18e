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

Looks = Mapping[str, style.Look]


def fig2(table: pd.DataFrame) -> Figure | None:
    """GiB of KV cache and weights in fp16, by sequence length at batch 16, by batch size at 2,048
    tokens."""
    memory = {"ylabel": "memory (GiB)"}
    words = {
        "seq_len": memory | {"xlabel": "sequence length (tokens), batch 16"},
        "batch_size": memory | {"xlabel": "batch size (sequences), 2,048 tokens each"},
    }
    return _draw(table, (*SETUP, "x_name"), words, by="x_name", note="fp16")


def fig4(table: pd.DataFrame) -> Figure | None:
    """Cosine similarity of attention weights to the full cache's, by token, a panel per layer.

    The oracle, which picks as many tokens anew at every step, is the paper's "Optimal".
    """
    similarity = {"xlabel": "token", "ylabel": "cosine similarity", "ylim": (None, 1.02)}
    note = "oracle: the paper's Optimal; bands: one standard error over heads"
    return _draw(table, (*SETUP, "layer"), {"cosine_similarity": similarity}, note=note)


def fig7(table: pd.DataFrame) -> Figure | None:
    """Mean magnitude of the columns of Q and K before and after skewing, most important first.

    Partial columns are the leftmost.
    """
    columns = {"xlabel": "column of a head, by importance"}
    words = {
        "query_magnitude": columns | {"ylabel": "mean |Q| of the column"},
        "key_magnitude": columns | {"ylabel": "mean |K| of the column"},
    }
    note = "columns in order of |Q| + |K|; bands: one standard error over KV heads"
    return _draw(table, (*SETUP, "layer", "metric"), words, note=note)


def fig20(table: pd.DataFrame) -> Figure | None:
    """Share of the queries that attend to less than 1 % of the keys, by length, and the attention
    weight of sampled keys over time, in one head."""
    layer = table[table.metric == "attention_weight"].layer.max()
    words = {
        "share_of_sparse_queries": {
            "xlabel": "sequence length (tokens)",
            "ylabel": "queries that attend to\n< 1 % of the keys (%)",
        },
        "attention_weight": {
            "xlabel": f"query token, layer {layer:.0f}",
            "ylabel": "attention weight of a key (%)",
        },
    }
    note = "attends to: needs for 0.9 of its weight; bands: one standard error over heads"
    return _draw(table, (*SETUP, "metric"), words, note=note)


def fig5(table: pd.DataFrame) -> Figure | None:
    """Key tokens that hold 0.9 of the attention weight.

    A histogram over queries and heads by layer, and the mean over heads at single queries. The
    paper's counts (OPT-6.7B, layer 18, PG-19) are hollow, on that layer of that model.
    """
    looks = _looks(table)

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        if panel.metric.iloc[0] == "share_of_queries":
            _draw_histogram(axes, panel, looks)
        else:
            _draw_counts(axes, panel, looks)

    note = "bands: one standard error over heads"
    return style.draw_rows(table, (*SETUP, "metric"), draw, note=note)


def _draw_histogram(axes: Axes, panel: pd.DataFrame, looks: Looks) -> None:
    for name in style.ordered(panel.series):
        bins = panel[panel.series == name].sort_values("x")
        if len(bins) > 1:
            edges = [*bins.x, bins.x.iloc[-1] + bins.x.diff().iloc[-1]]
            line: Any = {"color": looks[name].color, "linestyle": looks[name].line}
            axes.stairs(bins.value, edges, label=name, linewidth=1.2, **line)
    axes.set_xlabel("key tokens for 0.9 of the weight (tokens)")
    axes.set_ylabel("queries and heads (%)")
    # Most queries of a late layer need few tokens; the others would not be seen.
    style.log_y(axes)


def _draw_counts(axes: Axes, panel: pd.DataFrame, looks: Looks) -> None:
    _draw_curves(axes, panel, looks)
    points = data.published("fig5", "key_tokens_for_0.9", panel, {"model": "opt-6.7b"})
    for _, point in points[points.series.isin(panel.series)].iterrows():
        words = f"{OF_PG19}, {point.kind}"
        axes.plot(point.x, point.value, marker="o", label=words, **style.HOLLOW)
    words = "key tokens for 0.9\nof the weight (tokens)"
    axes.set(xlabel="query token", ylabel=words, ylim=(0, None))


def _draw(
    table: pd.DataFrame,
    setup: tuple[str, ...],
    words: Mapping[str, Mapping[str, Any]],
    *,
    note: str,
    by: str = "metric",
) -> Figure | None:
    """A panel of curves per setup. words: settings of the axes for each value of the column `by`;
    y begins at 0 where they do not say."""
    looks = _looks(table)

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        _draw_curves(axes, panel, looks)
        axes.set(**{"ylim": (0, None), **words[panel[by].iloc[0]]})
        if panel.x_name.iloc[0] in IN_POWERS:
            style.log2_x(axes, panel.x)

    return style.draw_rows(table, setup, draw, note=note)


def _looks(table: pd.DataFrame) -> Looks:
    """A look for each series, the same in all panels, in the order of metrics and layers."""
    of_metric = table.groupby("metric", sort=False).ngroup()
    return style.in_sequence(table.assign(place=of_metric).sort_values(["place", "layer"]).series)


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
