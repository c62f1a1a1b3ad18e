"""Figure 15: prefill and decode seconds, stacked, against the batch size.

Published rates (OPT-13B, 1,920 + 128 tokens, RTX A6000) are drawn as the total they stand for, batch * 128 /
(tokens/s), as hollow markers on panels of that shape, measured, or modelled for that machine.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import bars, data, style

SETUP = ("model", "platform", "source", "prompt_len", "gen_len")
GEN_LEN = 128
PAPER = {"model": "opt-13b", "prompt_len": 1920, "gen_len": GEN_LEN}


def draw(table: pd.DataFrame) -> Figure | None:
    """The figure from rows of a latency table; None without any."""
    if table.empty:
        return None
    return style.draw_panels(data.with_close_ups(data.split(table, SETUP)), _draw_panel)


def _draw_panel(axes: Axes, panel: pd.DataFrame) -> None:
    prefill, decode = (data.pivot(panel, "batch_size", part) for part in ("prefill_s", "decode_s"))
    places = bars.stacked_times(axes, prefill, decode, groups=[f"{batch:.0f}" for batch in prefill.index])
    axes.set_xlabel("batch size (sequences)")
    for point in data.published("fig15", "tokens_per_s", panel, PAPER):
        total_s = float(point.x) * GEN_LEN / point.value
        bars.published(axes, places, list(prefill.index), [point._replace(value=total_s)])
