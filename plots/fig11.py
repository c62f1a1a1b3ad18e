"""Figure 11: accuracy against the share of the cache that is read, one line per method.

A panel per model, task and number of questions, from `fig11.csv`; then KL to the full cache and top-1
agreement on texts, from the same table and from `perplexity.csv`. Nothing published is known.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.tables import columns
from plots import data, style

SETUP = ("model", "task", "metric", "num_samples", "num_fewshot", "seq_len", "source")
AXES = {"acc": "accuracy (%)", "kl_nats": "KL(full || method) (nats)", "top1_agreement": "top-1 agreement (%)"}
CHANCE = {"kv_recall": 0.25, "passkey": 0.25, "openbookqa": 0.25, "hellaswag": 0.25} | dict.fromkeys(
    ("copa", "winogrande", "piqa", "rte", "boolq"), 0.5
)
KV_AXIS = "KV cache read (% of full cache)"


def draw(tables: data.Tables, name: str) -> Figure | None:
    """The figure; None without `fig11.csv`."""
    own, texts = tables.accuracy(name), tables.accuracy("perplexity")
    if own.empty:
        return None
    rows = data.of_metrics([own, texts[texts.metric.isin(["kl_nats", "top1_agreement"])]], AXES)
    return style.draw_rows(rows, SETUP, _draw_panel, note=style.error_note(rows))


def _draw_panel(axes: Axes, panel: pd.DataFrame) -> None:
    metric = panel.metric.iloc[0]
    factor = columns.METRICS[metric].factor
    axes.set(xlabel=KV_AXIS, ylabel=AXES[metric])
    if metric == "kl_nats":
        style.log_y(axes)  # without the full cache, whose divergence from itself is 0
    else:
        style.full_lines(axes, panel[panel.label == style.FULL], factor)
    chance = CHANCE.get(panel.task.iloc[0])
    if chance is not None:
        style.chance_line(axes, factor * chance)
    style.size_lines(axes, panel, factor)
