"""Figures of the capacity table: tokens/s against the batch, and where memory ends."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.results import columns
from harness.results.metrics import GIB
from plots import data, style

BASE = "ideal"
"""The full cache on the device."""
WALL: Any = {"marker": "|", "markersize": 13, "markeredgewidth": 2.0}
NOTE = (
    "vertical bar: memory ends here; ring: first batch above the best rate of the full cache on "
    "the device (ideal, dotted line); cross: not one sequence fits"
)
POWERS = tuple(4**power for power in range(8))
"""Batches with a tick."""
SETUP = ("model", "platform", "source", "memory_bytes", "context")
MODELLED_PANELS = (
    ("rtx4090-pcie4", "llama3.1-8b", 8192),
    ("rtx4090-pcie4", "llama3.1-8b", 32768),
    ("a6000-pcie3", "llama3.1-8b", 32768),
    ("h100-pcie5", "llama3.1-8b", 32768),
    ("h100-pcie5", "llama3.1-8b", 131072),
    ("a6000-pcie3", "llama2-7b-32k", 32768),
)
"""Platform, model and context of the modelled panels; the table has more."""


def capacity(tables: data.Tables, name: str) -> Figure | None:
    """Tokens/s against the batch on a device that ran, a panel a context; of modelled machines,
    some machines and contexts."""
    table = tables.read(name, columns.CAPACITY)
    if not name.endswith("-modelled"):
        return _draw(table)
    parts = []
    for platform, model, context in MODELLED_PANELS:
        of_panel = (table.platform == platform) & (table.model == model)
        parts.append(table[of_panel & (table.context == context)])
    return _draw(pd.concat(parts))


def _draw(table: pd.DataFrame) -> Figure | None:
    if table.empty:
        return None
    shared, parts = data.split(table, SETUP)
    panels: list[style.Panel] = [(title, frame, _draw_panel) for title, frame in parts]
    sizes = sorted({memory / GIB for memory in table.memory_bytes})
    memory = "device memory " + ", ".join(f"{gib:.4g}" for gib in sizes) + " GiB"
    return style.draw_panels(panels, "; ".join(filter(None, [shared, memory, NOTE])))


def _draw_panel(axes: Axes, panel: pd.DataFrame) -> None:
    base = panel[(panel.label == BASE) & (panel.batch_size > 0)]
    best_of_base = base.decode_tokens_per_s.max() if len(base) else 0.0
    for label in style.ordered(panel.label):
        rows = panel[panel.label == label].sort_values("batch_size")
        color, marker, line, _ = style.look(label)
        fitting = rows[rows.batch_size > 0]
        if fitting.empty:
            look: Any = {"color": color, "marker": "x", "linestyle": line, "markersize": 7}
            axes.plot([1], [best_of_base or 1], label=label, **look)
            continue
        x, y = fitting.batch_size, fitting.decode_tokens_per_s
        axes.plot(x, y, label=label, color=color, marker=marker, linestyle=line)
        if fitting.iloc[-1].wall != "max_batch":
            axes.plot([x.iloc[-1]], [y.iloc[-1]], color=color, **WALL)
        winning = fitting[y > best_of_base]
        if label != BASE and len(winning) and best_of_base:
            first = winning.iloc[0]
            ring = Line2D(
                [first.batch_size],
                [first.decode_tokens_per_s],
                color=color,
                marker="o",
                markersize=11,
                fillstyle="none",
            )
            axes.add_line(ring)
    if best_of_base:
        axes.axhline(best_of_base, color=style.GREY, linewidth=0.8, linestyle=":")
    style.log2_x(axes, [power for power in POWERS if power <= 2 * panel.batch_size.max()])
    style.log_y(axes)
    axes.set(xlabel="batch size (sequences)", ylabel="decode tokens/s of the batch")
