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


def draw(table: pd.DataFrame) -> Figure | None:
    """The figure from rows of a latency table; None without any."""
    if table.empty:
        return None
    return style.draw_panels(data.with_close_ups(data.split(table, SETUP)), _draw_panel)


def _draw_panel(axes: Axes, panel: pd.DataFrame) -> None:
    prefill, decode = (data.pivot(panel, "batch_size", part) for part in ("prefill_s", "decode_s"))
    places = bars.stacked_times(axes, prefill, decode, groups=[""], in_legend=False)
    points = data.published("fig14", "total_latency", panel, PAPER)
    bars.published(axes, places, list(prefill.index), points)
    axes.set_xticks([slot.x[0] for slot in places.values()], list(places), rotation=35, ha="right")
