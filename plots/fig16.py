"""Figure 16: speedup over offload, (a) by total length, (b) by model, from `latency.csv`: the batch sizes that were
timed with the most lengths, and the shapes timed with the most models.

A speedup is offload's seconds over the label's in the same setup: of prefill and decode together, as in the
paper, and of decode alone. Without offload's row there is none. Published points (OPT-13B, batch 8, RTX
A6000) stand in (a), on measured panels of that setup; those of (b) had 30 % of the weights in host memory,
which no run here has.
"""

from collections.abc import Callable

import pandas as pd
from matplotlib.figure import Figure

from plots import bars, data, style

BASE = "offload"
TIMES = {
    "total_s": "speedup over offload,\nprefill + decode (x)",
    "decode_s": "speedup over offload,\ndecode alone (x)",
}
LENGTH_SETUP = ("model", "platform", "source", "batch_size", "gen_len")
MODEL_SETUP = ("platform", "source", "batch_size", "prompt_len", "gen_len")
PAPER = {"model": "opt-13b", "batch_size": 8, "gen_len": 128}


def draw_length(tables: data.Tables) -> Figure | None:
    """Figure 16a; None without `latency.csv`."""
    table = data.sweep(tables.latency("latency"), "prompt_len", LENGTH_SETUP)
    table = table.assign(total_len=table.prompt_len + table.gen_len).sort_values("total_len", kind="stable")
    return _draw(table, LENGTH_SETUP, index="total_len", words="prompt + generated tokens", name="{:,.0f}".format)


def draw_model(tables: data.Tables) -> Figure | None:
    """Figure 16b; None without two models in `latency.csv`."""
    table = data.sweep(tables.latency("latency"), "model", MODEL_SETUP)
    if table.model.nunique() < 2:
        return None
    billions = table.model.str.extract(r"([\d.]+)b\b", expand=False).astype(float)
    table = table.iloc[billions.argsort(kind="stable")]
    return _draw(table, MODEL_SETUP, index="model", words="model", name=str)


def _draw(
    table: pd.DataFrame, setup: tuple[str, ...], *, index: str, words: str, name: Callable[..., str]
) -> Figure | None:
    if table.empty:
        return None
    panels = data.split(table, setup)
    cells = [(time, *panel) for panel in zip(panels.titles, panels.frames, strict=True) for time in TIMES]
    figure, all_axes = style.new(len(cells))
    for axes, (time, title, panel) in zip(all_axes, cells, strict=True):
        seconds = data.pivot(panel, index, time).loc[panel[index].unique()]
        offload = seconds.get(BASE, pd.Series(float("nan"), seconds.index))
        speedup = seconds.rdiv(offload, axis=0).drop(columns=BASE, errors="ignore")
        places = bars.grouped(axes, speedup, groups=[name(value) for value in speedup.index])
        axes.axhline(1, color=style.GREY, linewidth=0.8)
        axes.set(xlabel=words, ylabel=TIMES[time], title=title)
        if (index, time) == ("total_len", "total_s"):
            points = data.published("fig16a", "speedup_over_offload", panel, PAPER)
            bars.published(axes, places, list(speedup.index), points)
    return style.finish(figure, panels.shared)
