"""Figure 15: prefill and decode seconds, stacked, against the batch size.

Published rates (OPT-13B, 1,920 + 128 tokens, RTX A6000) are drawn as the total they stand for, batch * 128 /
(tokens/s), as hollow markers on panels of that shape, measured, or modelled for that machine.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import bars, data

SETUP = ("model", "platform", "source", "prompt_len", "gen_len")
GEN_LEN = 128
PAPER = {"model": "opt-13b", "prompt_len": 1920, "gen_len": GEN_LEN}


def draw(tables: data.Tables, name: str) -> Figure | None:
    """The figure from a latency table; None without rows."""
    return bars.timed(tables.latency(name), SETUP, _draw_panel)


def _draw_panel(axes: Axes, panel: pd.DataFrame) -> None:
    rates = data.published("fig15", "tokens_per_s", panel, PAPER)
    points = [rate._replace(value=float(rate.x) * GEN_LEN / rate.value) for rate in rates]
    bars.stacked_times(axes, panel, points)
    axes.set_xlabel("batch size (sequences)")
