"""Needles in a haystack, from `ruler.csv`: the share of right answers by the prompt's length and the needle's depth.

A column per method, a row per task of needles and, where a method's runs differ in further settings, such as `prefill`,
per these. A cell holds the percentage and the number of questions: the fewer, the paler; without any it is hatched.
Colours: cividis, which colour-blind readers see as well, and which grows lighter in grey too.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from harness.tables import columns
from plots import data, style

BAND = ["model", "setup", "needle"]
SEEN = r"(num_samples|metadata\.max_seq_lengths)=(\[[^\]]*\]|[^,]*)(, )?"
"""Settings that the cells show by themselves."""
COLOURS, PERCENT = colormaps["cividis"], Normalize(0, 100)
LUMINANCE, LIGHT = np.array([0.21, 0.72, 0.07]), 0.45
"""Weights of red, green and blue, and the luminance from which a cell's text is black."""
CELL_INCHES = (0.52, 0.24)


def draw(tables: data.Tables, name: str) -> Figure | None:
    """The figure; None without rows of needles in `ruler.csv`."""
    table = tables.accuracy(name)
    rows = table.join(table.task.str.extract(columns.NEEDLE_TASK)).dropna(subset="needle")
    if rows.empty:
        return None
    rows = rows.astype({"length": int, "begin": int, "end": int}).assign(setup=_setups(rows))
    data.refuse_repeats(rows, ["label", "model", "setup", "task"])
    distinct = rows[BAND].drop_duplicates().itertuples(index=False, name=None)
    bands = sorted(distinct, key=lambda band: band[:2])
    labels, lengths = style.ordered(rows.label), sorted(set(rows.length))
    parts = 100 // int((rows.end - rows.begin).min())
    width, height = (size * count for size, count in zip(CELL_INCHES, (len(lengths), parts), strict=True))
    size = (len(labels) * (width + 0.12) + 1.6, len(bands) * (height + 0.2) + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(bands), len(labels), squeeze=False, sharex=True, sharey=True)
    for band, line in zip(bands, panels, strict=True):
        own = rows[(rows[BAND] == band).all(axis=1)]
        for label, axes in zip(labels, line, strict=True):
            _draw_panel(axes, own[own.label == label], lengths, parts)
        varying = [words for words, others in zip(band, zip(*bands, strict=True), strict=True) if len({*others}) > 1]
        line[0].set_ylabel("\n".join([*filter(None, varying), "depth (%)"]), fontsize=6)
    for label, axes in zip(labels, panels[0], strict=True):
        axes.set_title(_title(label, rows[rows.label == label]), fontsize=6.5)
    for axes in panels[-1]:
        axes.set_xlabel("tokens", fontsize=6)
    figure.colorbar(
        ScalarMappable(PERCENT, COLOURS), ax=panels, label="right answers (%)", shrink=min(1.0, 2 / size[1]), aspect=12
    )
    return style.finish(figure, _note(rows, bands))


def _setups(rows: pd.DataFrame) -> pd.Series:
    """By row, in words, the settings in which the runs of its label differ."""
    words = rows.settings.fillna("").str.replace(SEEN, "", regex=True).str.split(", ").map(tuple)
    shared = {label: set.intersection(*map(set, own)) for label, own in words.groupby(rows.label)}
    cells = zip(words, rows.label, strict=True)
    return pd.Series([", ".join(word for word in own if word not in shared[label]) for own, label in cells], rows.index)


def _draw_panel(axes: Axes, panel: pd.DataFrame, lengths: Sequence[int], parts: int) -> None:
    cells = np.zeros((parts, len(lengths), 4))  # without a question a cell stays empty, and shows the hatch
    for _, row in panel.iterrows():
        part, column = parts * row.begin // 100, lengths.index(row.length)
        weight = row.num_samples / (row.num_samples + 2)
        color = 1 - weight * (1 - np.array(COLOURS(PERCENT(100 * row.value))[:3]))
        cells[part, column] = (*color, 1)
        black = color @ LUMINANCE > LIGHT
        words: Any = {"ha": "center", "va": "center", "color": style.BLACK if black else "white"}
        axes.text(column, part - 0.12, f"{100 * row.value:.0f}", fontsize=6.5, **words)
        axes.text(column, part + 0.27, f"n = {row.num_samples:.0f}", fontsize=4.5, **words)
    axes.imshow(cells, aspect="auto")
    axes.patch.set(hatch="////", edgecolor=style.LIGHT_GREY, linewidth=0)
    axes.grid(visible=False)
    axes.hlines(np.arange(1, parts) - 0.5, -0.5, len(lengths) - 0.5, color="white", linewidth=0.8)
    axes.vlines(np.arange(1, len(lengths)) - 0.5, -0.5, parts - 0.5, color="white", linewidth=0.8)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=5.5)
    axes.set_yticks(np.arange(parts + 1) - 0.5, [f"{100 * edge // parts}" for edge in range(parts + 1)], fontsize=5.5)
    axes.tick_params(length=2, pad=1.5)


def _title(label: str, rows: pd.DataFrame) -> str:
    """With the size, or the least and the largest."""
    sizes = dict.fromkeys(f"{columns.SIZE.factor * size:.0f}" for size in (rows["size"].min(), rows["size"].max()))
    return f"{label}\nsize {' to '.join(sizes)} %"


def _note(rows: pd.DataFrame, bands: Sequence[tuple[str, ...]]) -> str:
    models, _, needles = (list(dict.fromkeys(each)) for each in zip(*bands, strict=True))
    shared = [names[0] for names in (models, needles) if len(names) == 1]
    notes = ["depth: where in the prompt the answer stands", "n: questions (the fewer, the paler; hatched: none)"]
    return "; ".join([*shared, *notes])
