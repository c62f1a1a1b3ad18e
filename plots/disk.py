"""The figure of steps from a local disk: how long they take and what they read, by the context."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.results import columns
from plots import data, style

ON_DEVICE = "ideal"
LIKE = {
    "disk": "offload",
    "h2o": "offload+h2o",
    "int4": "offload+int4",
    "quest": "Quest",
    "retroinfer": "RetroInfer",
}
"""By what follows `disk+`, the label of other figures that has the look; else it is the same."""
SETUP = ("model", "batch_size")


def draw(tables: data.Tables, name: str) -> Figure | None:
    """Two panels a model and batch: the median step by the context, with the step in memory as a
    line, and the bytes that a step reads."""
    table = tables.read(name, columns.LATENCY)
    if table.empty:
        return None
    shared, parts = data.split(table, SETUP)
    panels: list[style.Panel] = []
    for title, rows in parts:
        panels.append((title, rows, _times))
        panels.append((title, rows[rows.label != ON_DEVICE], _bytes))
    note = (
        "median of the timed steps; ideal: the cache in memory; a disk reads whole blocks of 4 KiB"
    )
    return style.draw_panels(panels, "; ".join(filter(None, [shared, note])))


def _times(axes: Axes, panel: pd.DataFrame) -> None:
    """Median milliseconds of a step, a group of bars a context."""
    milliseconds = 1e3 * data.pivot(panel, "prompt_len", "tpot_p50_s")
    in_memory = milliseconds.pop(ON_DEVICE) if ON_DEVICE in milliseconds else None
    _bars(axes, milliseconds)
    if in_memory is not None:
        line: Any = {"color": style.BLACK, "linestyle": "--", "linewidth": 1.4}
        for place, value in enumerate(in_memory):
            half = style.FILLED / 2
            axes.hlines(value, place - half, place + half, label=ON_DEVICE, **line)
    axes.set_ylabel("time of a step, median (ms)")


def _bytes(axes: Axes, panel: pd.DataFrame) -> None:
    """Megabytes that a step reads from the disk."""
    a_step = panel.assign(mb=panel.disk_read_bytes / (panel.gen_len - 1) / 1e6)
    _bars(axes, data.pivot(a_step, "prompt_len", "mb"))
    axes.set_ylabel("read from the disk in a step (MB)")


def _bars(axes: Axes, values: pd.DataFrame) -> None:
    groups = [f"{length:,.0f}" for length in values.index]
    found, width = style.place_bars(axes, style.ordered(values.columns), groups)
    for label, x in found.items():
        like = _look(label)
        looks: Any = {"color": like.color, "hatch": like.hatch, **style.BAR}
        axes.bar(x, values[label], width, label=label, **looks)
    axes.set_xlabel("tokens of the prompt")


def _look(label: str) -> style.Look:
    name = label.removeprefix("disk+")
    return style.look(LIKE.get(name, name))
