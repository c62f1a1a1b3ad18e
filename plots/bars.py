"""Groups of bars, one bar per label, told apart by colour and hatch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import data, style

FILLED = 0.84
"""Share of a group's width that its bars cover."""
PREFILL: Any = {"color": "#F2F2F2", "edgecolor": style.GREY, "linewidth": 0.5, "label": style.PREFILL}
HOLLOW: Any = {"linestyle": "", "markerfacecolor": "none", "markeredgecolor": style.BLACK}
MARKERS = {"quoted": "o", "derived": "D", "approximate": "s"}


class Slots(NamedTuple):
    """Where the bars of one label stand, and how wide they are."""

    x: np.ndarray
    width: float


Places = Mapping[str, Slots]


def slots(axes: Axes, labels: Sequence[str], groups: Sequence[str]) -> Places:
    """Place a bar per label into every group, and name the groups below the axis."""
    width = FILLED / len(labels)
    centres = np.arange(len(groups))
    axes.set_xticks(centres, groups)
    axes.grid(visible=False, axis="x")
    shift = {label: (index - (len(labels) - 1) / 2) * width for index, label in enumerate(labels)}
    return {label: Slots(centres + shift[label], width) for label in labels}


def grouped(axes: Axes, values: pd.DataFrame, *, errors: pd.DataFrame | None = None, groups: Sequence[str]) -> Places:
    """One bar per cell of `values` (a row per group, a column per label); NaN is a gap."""
    places = slots(axes, style.ordered(values.columns), groups)
    for label, (x, width) in places.items():
        look = style.look(label)
        stderr = None if errors is None else errors[label]
        axes.bar(
            x, values[label], width, yerr=stderr, capsize=2, label=label, color=look.color, hatch=look.hatch,
            edgecolor="white", linewidth=0.4, error_kw={"elinewidth": 0.8},
        )  # fmt: skip
    return places


def of_one(axes: Axes, rows: pd.DataFrame, *, name: str, groups: Sequence[str]) -> Places:
    """A bar with its standard error for each row, all in the look of the label `name`; `groups` names the bars."""
    values, errors = (rows[[column]].set_axis([name], axis=1) for column in ("value", "stderr"))
    return grouped(axes, values, errors=errors, groups=groups)


def timed(
    rows: pd.DataFrame, setup: Sequence[str], draw_panel: Callable[[Axes, pd.DataFrame], None], *, note: str = ""
) -> Figure | None:
    """A figure of a latency table: a panel per setup, and close-ups of what slow labels dwarf; None without rows."""
    if rows.empty:
        return None
    return style.draw_panels(data.with_close_ups(data.split(rows, setup)), draw_panel, note=note)


def stacked_times(
    axes: Axes,
    panel: pd.DataFrame,
    points: Iterable[data.PublishedPoint],
    *,
    group: str = "{:.0f}",
    in_legend: bool = True,
) -> Places:
    """Prefill seconds, light, below decode seconds, a group of bars per batch size, which `group` words; the paper's
    totals on the bars."""
    prefill, decode = (data.pivot(panel, "batch_size", part) for part in ("prefill_s", "decode_s"))
    batches = list(prefill.index)
    places = slots(axes, style.ordered(prefill.columns), [group.format(batch) for batch in batches])
    for label, (x, width) in places.items():
        look = style.look(label)
        axes.bar(x, prefill[label], width, **PREFILL)
        axes.bar(
            x, decode[label], width, bottom=prefill[label], label=label if in_legend else f"_{label}",
            color=look.color, hatch=look.hatch, edgecolor="white", linewidth=0,
        )  # fmt: skip
    axes.set_ylabel("prefill + decode (s)")
    published(axes, places, batches, points)
    return places


def published(axes: Axes, places: Places, groups: Sequence[float | str], points: Iterable[data.PublishedPoint]) -> None:
    """The paper's numbers as hollow markers on the bars of the same label and group (its x), by kind."""
    for point in points:
        if point.label in places and point.x in groups:
            x = places[point.label].x[groups.index(point.x)]
            axes.plot(x, point.value, label=f"{style.OF_PAPER}, {point.kind}", marker=MARKERS[point.kind], **HOLLOW)
