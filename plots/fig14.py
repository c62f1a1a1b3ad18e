"""Figure 14: prefill and decode seconds, stacked, one bar per label.

Published totals (OPT-13B, batch 20, 1,920 + 128 tokens, RTX A6000) are hollow markers on panels of that shape,
measured, or modelled for that machine.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import bars, data, style

SETUP = ("model", "platform", "source", "batch_size", "prompt_len", "gen_len")
PAPER = {"model": "opt-13b", "batch_size": 20, "prompt_len": 1920, "gen_len": 128}


def draw(tables: data.Tables, name: str) -> Figure | None:
    """The figure from a latency table; None without rows."""
    return bars.timed(tables.latency(name), SETUP, _draw_panel)


def _draw_panel(axes: Axes, panel: pd.DataFrame) -> None:
    points = data.published("fig14", "total_latency", panel, PAPER)
    places = bars.stacked_times(axes, panel, points, group="", in_legend=False)
    axes.set_xticks([slot.x[0] for slot in places.values()], style.wrapped(places), rotation=35, ha="right")
