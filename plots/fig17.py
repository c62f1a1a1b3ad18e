"""Figure 17: accuracy and latency on two axes, against alpha and against the partial weight ratio.

Accuracy comes from `fig17.csv`, the full cache's and chance beside it; seconds of decode from `fig17-latency.csv`, as
the settings change no prefill. Either may be absent. A run's label says which setting it varies: `alpha=4` or
`partial_weight_ratio=0.3`. No published point is known.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.tables import columns
from plots import data, style
from plots.fig11 import CHANCE

ACCURACY_SETUP = ("model", "task", "num_samples", "num_fewshot", "source")
LATENCY_SETUP = ("model", "platform", "source", "batch_size", "prompt_len", "gen_len")
PANEL_INCHES = (4.2, 2.5)  # room for the second axis


def draw(tables: data.Tables, name: str) -> Figure | None:
    """The figure; None without both tables, or where no label names a setting."""
    table = tables.accuracy(name)
    table = table[table.metric == "acc"]
    accuracy, latency = _with_setting(table), _with_setting(tables.latency(f"{name}-latency"))
    named = [setting for setting in columns.SWEPT if setting in {*accuracy.setting, *latency.setting}]
    if not named:
        return None
    figure, all_axes = style.new(len(named), panel_inches=PANEL_INCHES)
    for axes, setting in zip(all_axes, named, strict=True):
        axes.set(xlabel=columns.SWEPT[setting], ylabel="accuracy (%)")
        _draw_references(axes, table)
        _draw_lines(axes, accuracy[accuracy.setting == setting], ACCURACY_SETUP, "accuracy")
        timed = latency[latency.setting == setting]
        if len(timed):
            _draw_lines(_second_axis(axes), timed, LATENCY_SETUP, "latency")
    kinds = (("accuracy", accuracy, ACCURACY_SETUP), ("latency", latency, LATENCY_SETUP))
    setups = [f"{word}: {data.split(rows, setup).shared}" for word, rows, setup in kinds if len(rows)]
    return style.finish(figure, "\n".join(setups) + f"; {style.error_note(accuracy)}")


def _with_setting(table: pd.DataFrame) -> pd.DataFrame:
    """The rows whose label names a setting and a finite number, those in `setting` and `x`."""
    parts = table.label.str.extract(columns.SETTING_LABEL)
    return table.assign(setting=parts.setting, x=parts.x.astype(float))[parts.x.notna()]


def _second_axis(axes: Axes) -> Axes:
    """An axis on the right, for seconds."""
    right = axes.twinx()
    right.set_ylabel("latency, decode (s)")
    right.spines["right"].set_visible(True)
    right.grid(visible=False)
    return right


def _draw_references(axes: Axes, table: pd.DataFrame) -> None:
    """The full cache's accuracy, and chance."""
    style.full_lines(axes, table[table.label == style.FULL], 100)
    for task in sorted(set(table.task) & set(CHANCE)):
        style.chance_line(axes, 100 * CHANCE[task])


def _draw_lines(axes: Axes, rows: pd.DataFrame, setup: tuple[str, ...], word: str) -> None:
    """A line per setup: of accuracy in percent with its standard error, of latency in seconds."""
    if rows.empty:
        return
    panels = data.split(rows, setup)
    for title, group in zip(panels.titles, panels.frames, strict=True):
        line = group.sort_values("x")
        name = f"{word}, {title}" if title else word
        if word == "accuracy":
            y, stderr = 100 * line.value, 100 * line.stderr
        else:
            y, stderr = line.decode_s, None
        style.error_line(axes, line.x, y, stderr, name=name, like=name)
