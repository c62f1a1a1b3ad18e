"""The figure of needles in a haystack: right answers by the prompt's length and their depth."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from plots import data, style

NEEDLE = r"^(?P<needle>.+)\[(?P<length>\d+), (?P<begin>\d+)-(?P<end>\d+) %\]$"
"""In tasks: the length and the depths of a needle."""
BAND = ["model", "setup", "needle"]
"""What tells the figure's rows of panels apart."""
SHOWN_BY_TILES = r"(num_samples|metadata\.max_seq_lengths)=(\[[^\]]*\]|[^,]*)(, )?"
"""Settings that the tiles show by themselves."""
COLOURS, PERCENT = colormaps["cividis"], Normalize(0, 100)
LUMINANCE, LIGHT = np.array([0.21, 0.72, 0.07]), 0.45
"""Weights of red, green and blue, and the luminance from which a tile's text is black."""
TILE_INCHES = (0.52, 0.24)
FEWEST = 8
"""Questions that a tile of one depth must have; with fewer, a tile is of all depths together."""


def ruler(tables: data.Tables, name: str) -> Figure | None:
    """The share of right answers by the prompt's length and, where each depth of a needle has
    questions enough, the depth.

    A column per method, a row per task of needles and, where a method's runs differ in further
    settings, such as `prefill`, per these. A tile holds the percentage and the number of questions:
    the fewer, the paler; without any it is hatched. Colours: cividis, which colour-blind readers
    see as well, and which grows lighter in grey too.
    """
    table = tables.accuracy(name)
    rows = table.join(table.task.str.extract(NEEDLE)).dropna(subset="needle")
    if rows.empty:
        return None
    rows = rows.astype({"length": int, "begin": int, "end": int})
    rows = rows.assign(setup=_setups(rows))
    data.refuse_repeats(rows, ["label", "model", "setup", "task"])
    distinct = rows[BAND].drop_duplicates().itertuples(index=False, name=None)
    bands = sorted(distinct, key=lambda band: band[:2])
    labels, lengths = style.ordered(rows.label), sorted(set(rows.length))
    if rows.num_samples.median() < FEWEST:
        rows = _over_depths(rows)
    num_depths = 100 // int((rows.end - rows.begin).min())
    width = len(labels) * (len(lengths) * TILE_INCHES[0] + 0.12) + 1.6
    height = len(bands) * (num_depths * TILE_INCHES[1] + 0.2) + 0.9
    figure = Figure(figsize=(width, height), layout="constrained")
    shape = len(bands), len(labels)
    panels = figure.subplots(*shape, squeeze=False, sharex=True, sharey=True)
    models, setups, needles = (set(names) for names in zip(*bands, strict=True))
    for (model, setup, needle), line in zip(bands, panels, strict=True):
        of_band = rows[(rows[BAND] == (model, setup, needle)).all(axis=1)]
        for label, axes in zip(labels, line, strict=True):
            _draw_needles(axes, of_band[of_band.label == label], lengths, num_depths)
        words = ["depth (%)" if num_depths > 1 else "all depths"]
        parts = ((needle, needles), (setup, setups), (model, models))
        for part, others in parts:
            if part and len(others) > 1:
                words.insert(0, part)
        line[0].set_ylabel("\n".join(words), fontsize=6)
    for label, axes in zip(labels, panels[0], strict=True):
        of_label = rows[rows.label == label]
        mark = style.OWN_MARK if of_label[data.OWN].any() else ""
        axes.set_title(f"{label}{mark}\nsize {data.size_range(of_label)} %", fontsize=6.5)
    for axes in panels[-1]:
        axes.set_xlabel("tokens", fontsize=6)
    colours = ScalarMappable(PERCENT, COLOURS)
    figure.colorbar(
        colours,
        ax=panels,
        label="right answers (%)",
        shrink=min(1.0, 2 / height),
        aspect=12,
    )
    notes = ["n: questions (the fewer, the paler; hatched: none)"]
    if num_depths > 1:
        notes.insert(0, "depth: where in the prompt the answer stands")
    for others in (needles, models):
        if len(others) == 1:
            notes.insert(0, *others)
    if rows[data.OWN].any():
        notes.append(style.OWN_NOTE)
    return style.finish(figure, "; ".join(notes))


def _over_depths(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each length in place of its depths, each question weighing alike."""
    found = []
    for _, of_length in rows.groupby(["label", *BAND, "length"], sort=False):
        questions = of_length.num_samples
        together = of_length.iloc[[0]].assign(
            value=(of_length.value * questions).sum() / questions.sum(),
            num_samples=questions.sum(),
            begin=0,
            end=100,
        )
        found.append(together)
    return pd.concat(found, ignore_index=True)


def _setups(rows: pd.DataFrame) -> pd.Series:
    """By row, in words, the settings in which the runs of its label differ."""
    settings = rows.settings.fillna("").str.replace(SHOWN_BY_TILES, "", regex=True)
    words = settings.str.split(", ")
    shared = {}
    for label, of_label in words.groupby(rows.label):
        shared[label] = set.intersection(*map(set, of_label))
    setups = []
    for words_of_row, label in zip(words, rows.label, strict=True):
        different = [word for word in words_of_row if word not in shared[label]]
        setups.append(", ".join(different))
    return pd.Series(setups, rows.index)


def _draw_needles(axes: Axes, panel: pd.DataFrame, lengths: Sequence[int], num_depths: int) -> None:
    """A tile for each length and depth; one without a question shows the hatch."""
    tiles = np.zeros((num_depths, len(lengths), 4))
    for _, row in panel.iterrows():
        depth, column = num_depths * row.begin // 100, lengths.index(row.length)
        weight = row.num_samples / (row.num_samples + 2)
        color = 1 - weight * (1 - np.array(COLOURS(PERCENT(100 * row.value))[:3]))
        tiles[depth, column] = (*color, 1)
        ink = style.BLACK if color @ LUMINANCE > LIGHT else "white"
        words: Mapping[str, Any] = {"ha": "center", "va": "center", "color": ink}
        percent, count = f"{100 * row.value:.0f}", f"n = {row.num_samples:.0f}"
        axes.text(column, depth - 0.12, percent, fontsize=6.5, **words)
        axes.text(column, depth + 0.27, count, fontsize=4.5, **words)
    axes.imshow(tiles, aspect="auto")
    axes.patch.set(hatch="////", edgecolor=style.LIGHT_GREY, linewidth=0)
    axes.grid(visible=False)
    right, bottom = len(lengths) - 0.5, num_depths - 0.5
    line: Any = {"color": "white", "linewidth": 0.8}
    axes.hlines(np.arange(1, num_depths) - 0.5, -0.5, right, **line)
    axes.vlines(np.arange(1, len(lengths)) - 0.5, -0.5, bottom, **line)
    words_of_lengths = [f"{length:,}" for length in lengths]
    axes.set_xticks(range(len(lengths)), words_of_lengths, fontsize=5.5)
    depths = [f"{100 * edge // num_depths}" for edge in range(num_depths + 1)]
    if num_depths > 1:
        axes.set_yticks(np.arange(num_depths + 1) - 0.5, depths, fontsize=5.5)
    else:
        axes.set_yticks([])
    axes.tick_params(length=2, pad=1.5)
