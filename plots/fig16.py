"""Figure 16: speedup over offload, (a) by total length, (b) by model.

A speedup is offload's seconds over the label's in the same setup: of prefill and decode together, as in the
paper, and of decode alone. Without offload's row there is none. Published points (RTX A6000) stand on
panels of their setup, measured, or modelled for that machine: (a) OPT-13B, batch 8; (b) OPT-30B, batch 4, with 30 % of
its weights in host memory, which the model takes and a timed run must have been given.
"""

from collections.abc import Callable
from functools import partial

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
PAPER_LENGTH = {"model": "opt-13b", "batch_size": 8, "gen_len": 128}
PAPER_MODEL = {"batch_size": 4, "prompt_len": 1920, "gen_len": 128}


def draw_length(tables: data.Tables, name: str) -> Figure | None:
    """Figure 16a from a latency table; None without rows but offload's."""
    table = tables.latency(name)
    table = table.assign(total_len=table.prompt_len + table.gen_len).sort_values("total_len", kind="stable")
    published = partial(data.published, "fig16a", setup=PAPER_LENGTH)
    words = "prompt + generated tokens"
    return _draw(table, LENGTH_SETUP, published, index="total_len", words=words, group="{:,.0f}")


def draw_model(tables: data.Tables, name: str) -> Figure | None:
    """Figure 16b from a latency table; None without rows but offload's."""
    table = tables.latency(name)
    billions = table.model.str.extract(r"([\d.]+)b\b", expand=False).astype(float)
    table = table.iloc[billions.argsort(kind="stable")]
    return _draw(table, MODEL_SETUP, _published_by_model, index="model", words="model", group="{}")


def _published_by_model(metric: str, panel: pd.DataFrame) -> list[data.PublishedPoint]:
    timed = panel[(panel.model == "opt-30b") & (panel.source != "modelled")]
    as_there = (timed.weights_on_device - 0.7).abs() < 0.01
    return data.published("fig16b", metric, panel, PAPER_MODEL) if as_there.all() else []


def _draw(
    table: pd.DataFrame,
    setup: tuple[str, ...],
    published: Callable[..., list[data.PublishedPoint]],
    *,
    index: str,
    words: str,
    group: str,
) -> Figure | None:
    if table.empty:
        return None
    panels = data.split(table, setup)
    several = [panel for panel in zip(panels.titles, panels.frames, strict=True) if (panel[1].label != BASE).any()]
    cells = [(time, *panel) for panel in several for time in TIMES]
    if not cells:
        return None
    figure, all_axes = style.new(len(cells))
    for axes, (time, title, panel) in zip(all_axes, cells, strict=True):
        seconds = data.pivot(panel, index, time).loc[panel[index].unique()]
        offload = seconds.get(BASE, pd.Series(float("nan"), seconds.index))
        speedup = seconds.rdiv(offload, axis=0).drop(columns=BASE, errors="ignore")
        places = bars.grouped(axes, speedup, groups=[group.format(value) for value in speedup.index])
        axes.axhline(1, color=style.GREY, linewidth=0.8)
        axes.set(xlabel=words, ylabel=TIMES[time], title=title)
        if time == "total_s":
            points = published(metric="speedup_over_offload", panel=panel)
            bars.published(axes, places, list(speedup.index), points)
    return style.finish(figure, panels.shared)
