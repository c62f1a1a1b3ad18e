"""Figure 18: milliseconds of one transformer block in one decode step, by segment.

Transfer is the wait for the link that no compute hides, so the segments sum to the block. Published sums
(OPT-13B, batch 8, 2,048 tokens, RTX A6000) are hollow markers on panels of that shape, measured, or
modelled for that machine.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.tables import columns
from plots import bars, data, style

SETUP = ("model", "platform", "source", "batch_size", "prompt_len", "gen_len")
BATCH_SIZE = 8
PAPER = {"model": "opt-13b", "batch_size": BATCH_SIZE}
PAPER_LEN = 2048
WIDTH = 0.7
LOOKS = {
    "attention_s": (style.BLUE, ""),
    "ffn_s": (style.GREEN, "xx"),
    "prediction_s": (style.ORANGE, "///"),
    "transfer_s": (style.VERMILION, "\\\\\\"),
    "other_s": (style.LIGHT_GREY, ".."),
}
"""Colour and hatch of a segment."""


def draw(tables: data.Tables, name: str) -> Figure | None:
    """The figure from a latency table; None without rows."""
    note = "transfer: the wait that compute does not hide"
    return bars.timed(tables.latency(name), SETUP, _draw_panel, note=note)


def _draw_panel(axes: Axes, panel: pd.DataFrame) -> None:
    data.refuse_repeats(panel, ["label"])
    rows = panel.set_index("label").loc[style.ordered(panel.label)]
    places = np.arange(len(rows))
    bottom = pd.Series(0.0, rows.index)
    for segment in columns.SEGMENTS:
        height = segment.factor * rows[segment.name].fillna(0)  # a segment that a method lacks
        color, hatch = LOOKS[segment.name]
        axes.bar(
            places, height, WIDTH, bottom=bottom, label=segment.words, color=color, hatch=hatch, edgecolor="white",
            linewidth=0,
        )  # fmt: skip
        bottom += height
    axes.set_xticks(places, style.wrapped(rows.index), rotation=35, ha="right")
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("time per block and step (ms)")
    if (panel.prompt_len + panel.gen_len == PAPER_LEN).all():
        slots = {label: bars.Slots(places[[index]], WIDTH) for index, label in enumerate(rows.index)}
        points = data.published("fig18", "block_latency", panel, PAPER)
        bars.published(axes, slots, [BATCH_SIZE], points)
    axes.use_sticky_edges = False  # an empty segment on top of the tallest stack would end the axis there
    axes.set_ylim(bottom=0)
