"""Figures of accuracy tables: by budget, by position in the text, by length."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from harness.results import columns
from harness.results.metrics import BUDGET, METRICS, RESIDENT_FRAC
from plots import data, style

AXES = {
    "acc": "accuracy (%)",
    "kl_nats": style.KL_AXIS,
    "text_perplexity": "full cache's perplexity of the text",
}
"""Words for an axis that differ from a table's heading."""
CHANCE = {"kv_recall": 0.25, "passkey": 0.25, "openbookqa": 0.25, "hellaswag": 0.25}
CHANCE |= dict.fromkeys(("copa", "winogrande", "piqa", "rte", "boolq"), 0.5)
TEXTS = ("model", "task", "seq_len", data.PREFILL, "num_samples", "source")
"""The setup of a number on texts."""
OF_CHUNKS = ("model", "corpus", "seq_len", data.PREFILL, "num_samples", "source")
ASKED = ("num_samples", "num_fewshot", "seq_len", data.PREFILL)
"""Beside model and task, the conditions that runs share which were asked the same questions."""
KEPT = r"^(?P<name>.+) with (?P<kept>\d+) tokens$"
CHUNK = r"^(?P<corpus>.*)\[(?P<start>\d+):(?P<end>\d+)\]$"
"""In labels and tasks: the tokens kept, and the range of tokens of a text."""
WITH_PERCENT = r"^(?P<label>.+), (?P<percent>\d+) %(?:, .+)?$"
BY_LAYER = "layer, "
"""In the table of errors by layer: a label with its budget, and what stands before a text's
name."""
SHOWN_PERCENT = 10
"""Of its budgets, a method is shown by layer at the nearest to this one."""
SHARES = {
    "index": (RESIDENT_FRAC.name, "index on the device (% of full cache)"),
    "ablation": (BUDGET.name, style.BUDGET_AXIS),
}
"""Of figures by a share of the full cache: the column, and the words of the axis."""
CHUNKED = {
    "fig12": (["perplexity"], "tokens in the cache, in chunks of 256", ""),
    "long_decode": (
        ["kl_nats", "text_perplexity"],
        "decoded token",
        "bars: one standard error over prompts",
    ),
}
"""Of figures by chunk: the quantities, the words of the axis, and those on the bars."""
MAX_TICKS = 6
LENGTH_MARKERS = "osD^"


def axis(metric: str) -> str:
    """The words for the axis of a metric."""
    return AXES.get(metric, METRICS[metric].heading)


# By budget


def fig11(tables: data.Tables, name: str) -> Figure | None:
    """Accuracy by budget, one line per method, a panel per model, task and number of questions.

    Then KL to the full cache and top-1 agreement on texts, from the same table and from
    `perplexity.csv`, where a method has several budgets there.
    """
    own, texts = tables.accuracy(name), tables.accuracy("perplexity")
    if own.empty:
        return None
    fidelity = ["kl_nats", "top1_agreement"]
    texts = texts[texts.metric.isin(fidelity) & _has_a_line(texts)]
    both = pd.concat([own, texts])
    rows = data.of_metrics(both, ["acc", *fidelity])
    codecs = style.joined(rows.label)

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        metric, task = panel.metric.iloc[0], panel.task.iloc[0]
        factor = METRICS[metric].factor
        axes.set(xlabel=style.BUDGET_AXIS, ylabel=axis(metric))
        if metric == "kl_nats":  # the full cache's is 0
            style.log_y(axes)
        else:
            style.full_lines(axes, panel[panel.label == style.FULL], factor)
        if task in CHANCE:
            style.chance_line(axes, factor * CHANCE[task])
        style.budget_lines(axes, panel, factor, codecs=codecs)

    setup = ("model", "task", "metric", *ASKED, "source")
    return style.draw_rows(rows, setup, draw, note=style.error_note(rows))


def _has_a_line(rows: pd.DataFrame) -> pd.Series:
    """Whether a method has several budgets in a row's setup, which make a line against the
    budget."""
    setup = [rows[name] for name in TEXTS]
    of_label = rows.groupby([*setup, rows.label], dropna=False)["budget"].transform("nunique")
    return of_label.groupby(setup, dropna=False).transform("max") > 1


def fig19(tables: data.Tables, name: str) -> Figure | None:
    """Perplexity by budget, one line per method, and by length with a fixed number of tokens kept.

    The latter are the runs whose label ends in "with N tokens". The full cache is that of the runs
    themselves, on the same windows.
    """
    table = data.whole_texts(tables.accuracy(name))
    rows = table.join(table.label.str.extract(KEPT))
    rows = rows[rows.metric.isin(["perplexity", "perplexity_full"])]
    by_budget, by_length = rows[rows.kept.isna()], rows[rows.kept.notna()]
    codecs = style.joined(by_budget.label)

    def draw_budgets(axes: Axes, panel: pd.DataFrame) -> None:
        style.full_lines(axes, panel[panel.metric == "perplexity_full"])
        style.budget_lines(axes, panel[panel.metric == "perplexity"], codecs=codecs)
        style.log_y(axes, panel.value)
        axes.set(xlabel=style.BUDGET_AXIS, ylabel="perplexity")

    panels: list[style.Panel] = []
    notes = []
    for half, setup, draw in (
        (by_budget, TEXTS, draw_budgets),
        (by_length, ("model", "task", "kept", "source"), _draw_lengths),
    ):
        if len(half):
            shared, of_half = data.split(half, setup)
            notes.append(shared)
            for title, panel in of_half:
                panels.append((title, panel, draw))
    note = "\n".join(notes) + f"; {style.error_note(rows)}"
    if by_length.num_samples.eq(1).any():
        note += " (n = 1: a single window has none)"
    return style.draw_panels(panels, note)


def _draw_lengths(axes: Axes, panel: pd.DataFrame) -> None:
    full = panel[panel.metric == "perplexity_full"]
    full = full.assign(name=style.FULL).drop_duplicates("seq_len")
    lines = pd.concat([full, panel[panel.metric == "perplexity"]])
    for name in style.ordered(lines.name):
        line = lines[lines.name == name].sort_values("seq_len")
        x, look = line.seq_len, style.look(name)
        style.error_line(axes, x, line.value, line.stderr, name=name, like=look)
    windows = panel.groupby("seq_len").num_samples.max()
    style.log2_x(axes, windows.index)
    ticks = []
    for length, count in windows.items():
        ticks.append(f"{length:,.0f}\nn = {count:.0f}")
    axes.set_xticks(list(windows.index), ticks)
    axes.minorticks_off()
    axes.margins(x=0.1)
    style.log_y(axes, panel.value)
    axes.set(xlabel="tokens of the text", ylabel="perplexity")


# By a share of the full cache


def by_share(tables: data.Tables, name: str) -> Figure | None:
    """KL, and accuracy as the mean over the tasks, by a share of the full cache; a line per label.

    `index`: what an index on the device costs and gives, by the share that the method keeps there.
    `ablation`: what each change from InfiniGen to InfiniGen2 gives, by the share that is read. The
    error takes tasks as independent.
    """
    share, words = SHARES[name]
    table = data.whole_texts(tables.accuracy(name))
    rows = data.of_metrics(table, ["kl_nats", "acc"])
    looks = style.in_sequence(rows.label)

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        metric = panel.metric.iloc[0]
        factor = METRICS[metric].factor
        runs = panel.groupby(["label", "run_id"], sort=False, as_index=False)
        points = runs.agg(
            x=(share, "mean"),
            y=("value", "mean"),
            stderr=("stderr", data.stderr_of_mean),
        )
        for label, look in looks.items():
            line = points[points.label == label].sort_values("x")
            if len(line):
                x, y, stderr = 100 * line.x, factor * line.y, factor * line.stderr
                style.error_line(axes, x, y, stderr, name=label, like=look)
        axes.set(ylabel=axis(metric), xlabel=words)
        if name == "ablation" and metric == "kl_nats":
            style.log_y(axes)

    tasks = ", ".join(sorted(set(rows[rows.metric == "acc"].task)))
    note = f"accuracy: mean of {tasks}; {style.error_note(rows)}"
    return style.draw_rows(rows, ("model", "source", "metric"), draw, note=note)


# By position in the text


def by_chunk(tables: data.Tables, name: str) -> Figure | None:
    """A quantity by ranges of a text's tokens, a line per method and budget.

    `fig12`: perplexity by chunk of 256 tokens. `long_decode`: over the tokens decoded,
    KL(full || method) along the method's own text, and the full cache's perplexity of that text.
    The full cache has no distance from itself.
    """
    of_figure, words, bars = CHUNKED[name]
    rows = data.of_metrics(_chunks(tables.accuracy(name)), of_figure)
    rows = rows[(rows.label != style.FULL) | (rows.metric != "kl_nats")]

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        _draw_chunks(axes, panel)
        axes.set(xlabel=words, ylabel=axis(panel.metric.iloc[0]))

    note = f"percentages: budgets; {bars or style.error_note(rows)}"
    return style.draw_rows(rows, (*OF_CHUNKS, "metric"), draw, note=note)


def _chunks(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of ranges of a text, such as `offline[256:512]`, as corpus, start, end."""
    chunks = table.task.str.extract(CHUNK)
    start, end = chunks.start.astype(float), chunks.end.astype(float)
    rows = table.assign(corpus=chunks.corpus, start=start, end=end)
    return rows[rows.start.notna()]


def _draw_chunks(axes: Axes, panel: pd.DataFrame) -> None:
    """A line per method and budget, each range of tokens at its middle, a missing range a gap."""
    edges = sorted({*panel.start, *panel.end})
    middles = pd.Index(sorted({*((panel.start + panel.end) / 2)}))
    data.refuse_repeats(panel, ["label", "budget", "start"])
    for label in style.ordered(panel.label):
        for _, line in panel[panel.label == label].groupby("budget", dropna=False):
            ranges = line.set_index((line.start + line.end) / 2).reindex(middles)
            name = label
            if label != style.FULL:
                name += f", {100 * line['budget'].iloc[0]:.0f} %"
            x, look = middles.to_series(), style.look(label)
            style.error_line(axes, x, ranges.value, ranges.stderr, name=name, like=look)
    every = -(-len(edges) // MAX_TICKS)
    axes.set(xticks=edges[::every], xlim=(edges[0], edges[-1]))
    style.log_y(axes, panel.value)


# By layer


def attention_error(tables: data.Tables, name: str) -> Figure | None:
    """Relative error of attention outputs by layer, its mean and its 95th percentile, a line per
    method at one budget.

    The full cache's is 0, and so is that of dense layers: they have no point on this axis.
    """
    table = tables.read(name, columns.ANALYSIS)
    parts = table.series.str.extract(WITH_PERCENT)
    percent, text = parts.percent.astype(float), table.x_name.str.removeprefix(BY_LAYER)
    rows = table.assign(label=parts.label, percent=percent, task=text)
    rows = rows[rows.label.notna() & (rows.value > 0)]
    distance = (rows.percent - SHOWN_PERCENT).abs()
    of_line = [rows.model, rows.task, rows.num_samples, rows.label]
    nearest = distance.groupby(of_line).transform("min")
    rows = rows[distance == nearest]

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        factor = METRICS[panel.metric.iloc[0]].factor
        for series in style.ordered(panel.series):
            line = panel[panel.series == series].sort_values("x")
            like, y = style.look(str(line.label.iloc[0])), factor * line.value
            style.error_line(axes, line.x, y, factor * line.stderr, name=series, like=like)
        axes.set(xlabel="layer", ylabel=METRICS[panel.metric.iloc[0]].heading)
        style.log_y(axes)

    setup = ("model", "task", "metric", "num_samples", "source")
    note = "percentages: budgets; bars: one standard error over windows"
    return style.draw_rows(rows, setup, draw, note=note)


# Long contexts


def long(tables: data.Tables, name: str) -> Figure | None:
    """KL on texts and right answers on needles at each length, a line per method, the closest on
    top.

    Right answers are the mean over the tasks, whose errors are taken as independent.
    """
    table = data.whole_texts(tables.accuracy(name))
    needles = table[table.metric.astype(str).str.isdecimal()]
    needles = needles.assign(length=needles.metric.astype(float))
    keys = ["model", "source", "label", "length"]
    by_length = needles.groupby(keys, sort=False, as_index=False)
    asked = by_length.agg(value=("value", "mean"), stderr=("stderr", data.stderr_of_mean))
    texts = table[(table.metric == "kl_nats") & (table.value > 0)]
    rows = pd.concat([texts.assign(length=texts.seq_len), asked.assign(metric="acc")])
    data.refuse_repeats(rows, ["model", "source", "metric", "label", "length"])
    labels = _by_distance(rows)
    lengths = sorted(set(rows.length))
    markers, above = {}, {}
    for number, length in enumerate(lengths):
        markers[length] = LENGTH_MARKERS[number % len(LENGTH_MARKERS)]
        above[length] = 0.3 * (number + 0.5) / len(lengths) - 0.15

    def look(length: float, color: str) -> dict[str, Any]:
        """Of a length's points; those of the shortest are hollow."""
        face = "none" if length == lengths[0] else color
        shape = {"marker": markers[length], "markersize": 4}
        return {"color": color, "markerfacecolor": face, **shape}

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        metric = panel.metric.iloc[0]
        factor = METRICS[metric].factor
        for _, row in panel.iterrows():
            x, stderr = factor * row.value, factor * row.stderr
            y = labels.index(row.label) + above[row.length]
            of_point = look(row.length, style.look(str(row.label)).color)
            axes.errorbar(x, y, xerr=stderr, elinewidth=0.6, **of_point)
        for length in lengths:
            words = f"{length:,.0f} tokens"
            axes.plot([], [], linestyle="", label=words, **look(length, style.GREY))
        axes.set_yticks(range(len(labels)), labels, fontsize=6)
        axes.set_xlabel("right answers (%)" if metric == "acc" else axis(metric))
        axes.set_ylim(-0.7, len(labels) - 0.3)
        if metric == "kl_nats":
            style.log_x(axes)

    tasks = ", ".join(sorted(set(needles.task)))
    note = f"right answers: mean of {tasks}; bars one standard error"
    return style.draw_rows(rows, ("model", "source", "metric"), draw, note=note)


def _by_distance(rows: pd.DataFrame) -> list[str]:
    """The labels by KL at the longest text, the largest first, then those without."""
    kl = rows[rows.metric == "kl_nats"].sort_values("length")
    at_longest = kl.groupby("label").value.last()
    by_kl = at_longest.sort_values(ascending=False).index
    return list(dict.fromkeys([*by_kl, *rows.label]))


# Needles in a haystack: right answers by the prompt's length and their depth

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
        # The rows of one tile are too short for words along them.
        upright = {} if num_depths > 1 else {"rotation": 0, "ha": "right", "va": "center"}
        line[0].set_ylabel("\n".join(words), fontsize=6, **upright)
    for label, axes in zip(labels, panels[0], strict=True):
        of_label = rows[rows.label == label]
        mark = style.OWN_MARK if of_label[data.OWN].any() else ""
        axes.set_title(f"{label}{mark}\nbudget {data.budget_range(of_label)} %", fontsize=6.5)
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
    rows = rows.assign(value=rows.value * rows.num_samples, begin=0, end=100)
    by_length = rows.groupby(["label", *BAND, "length"], sort=False)
    sums = by_length[["value", "num_samples"]].transform("sum")
    means = sums.assign(value=sums.value / sums.num_samples)
    return rows.assign(**means).loc[by_length.head(1).index].reset_index(drop=True)


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
