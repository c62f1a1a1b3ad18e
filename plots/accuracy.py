"""Figures of accuracy tables: by size, by position in the text, by length."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.results import columns
from harness.results.metrics import METRICS, RESIDENT_FRAC, SIZE
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
SIZED = r"^(?P<label>.+), (?P<percent>\d+) %$"
BY_LAYER = "layer, "
"""In the table of errors by layer: a label with its size, and what stands before a text's name."""
SHOWN_PERCENT = 10
"""Of its sizes, a method is shown by layer at the nearest to this one."""
MAX_TICKS = 6
LENGTH_MARKERS = "osD^"


def axis(metric: str) -> str:
    """The words for the axis of a metric."""
    return AXES.get(metric, METRICS[metric].heading)


# By size


def fig11(tables: data.Tables, name: str) -> Figure | None:
    """Accuracy by size, one line per method, a panel per model, task and number of questions.

    Then KL to the full cache and top-1 agreement on texts, from the same table and from
    `perplexity.csv`, where a method has several sizes there.
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
        axes.set(xlabel=style.SIZE_AXIS, ylabel=axis(metric))
        if metric == "kl_nats":  # the full cache's is 0
            style.log_y(axes)
        else:
            style.full_lines(axes, panel[panel.label == style.FULL], factor)
        if task in CHANCE:
            style.chance_line(axes, factor * CHANCE[task])
        style.size_lines(axes, panel, factor, codecs=codecs)

    setup = ("model", "task", "metric", *ASKED, "source")
    return style.draw_rows(rows, setup, draw, note=style.error_note(rows))


def _has_a_line(rows: pd.DataFrame) -> pd.Series:
    """Whether a method has several sizes in a row's setup, which make a line against the size."""
    setup = [rows[name] for name in TEXTS]
    of_label = rows.groupby([*setup, rows.label], dropna=False)["size"].transform("nunique")
    return of_label.groupby(setup, dropna=False).transform("max") > 1


def fig19(tables: data.Tables, name: str) -> Figure | None:
    """Perplexity by size, one line per method, and by length with a fixed number of tokens kept.

    The latter are the runs whose label ends in "with N tokens". The full cache is that of the runs
    themselves, on the same windows.
    """
    table = data.whole_texts(tables.accuracy(name))
    rows = table.join(table.label.str.extract(KEPT))
    rows = rows[rows.metric.isin(["perplexity", "perplexity_full"])]
    by_size, by_length = rows[rows.kept.isna()], rows[rows.kept.notna()]
    codecs = style.joined(by_size.label)

    def draw_sizes(axes: Axes, panel: pd.DataFrame) -> None:
        style.full_lines(axes, panel[panel.metric == "perplexity_full"])
        style.size_lines(axes, panel[panel.metric == "perplexity"], codecs=codecs)
        style.log_y(axes, panel.value)
        axes.set(xlabel=style.SIZE_AXIS, ylabel="perplexity")

    panels: list[style.Panel] = []
    notes = []
    for half, setup, draw in (
        (by_size, TEXTS, draw_sizes),
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
    """Perplexity by length; a tick names the number of windows."""
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


def index(tables: data.Tables, name: str) -> Figure | None:
    """What an index on the device costs and gives, by the share that the method keeps there."""
    words = "index on the device (% of full cache)"
    return _by_share(tables, name, RESIDENT_FRAC.name, words)


def ablation(tables: data.Tables, name: str) -> Figure | None:
    """What each change from InfiniGen to InfiniGen2 gives, by the share that is read."""
    words = "read (% of full cache)"
    return _by_share(tables, name, SIZE.name, words, log_kl=True)


def _by_share(
    tables: data.Tables, name: str, share: str, words: str, *, log_kl: bool = False
) -> Figure | None:
    """KL, and accuracy as the mean over the tasks, by a share of the full cache; a line per label.

    share: a column of the table. The error takes tasks as independent.
    """
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
        if log_kl and metric == "kl_nats":
            style.log_y(axes)

    tasks = ", ".join(sorted(set(rows[rows.metric == "acc"].task)))
    note = f"accuracy: mean of {tasks}; {style.error_note(rows)}"
    return style.draw_rows(rows, ("model", "source", "metric"), draw, note=note)


# By position in the text


def fig12(tables: data.Tables, name: str) -> Figure | None:
    """Perplexity by chunk of 256 tokens, one line per method and size."""
    rows = _chunks(tables.accuracy(name))
    rows = rows[rows.metric == "perplexity"]

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        _draw_chunks(axes, panel)
        axes.set(xlabel="tokens in the cache, in chunks of 256", ylabel="perplexity")

    note = f"percentages: sizes; {style.error_note(rows)}"
    return style.draw_rows(rows, OF_CHUNKS, draw, note=note)


def long_decode(tables: data.Tables, name: str) -> Figure | None:
    """Over the tokens decoded: KL(full || method) along the method's own text, and the full cache's
    perplexity of that text, a line per method and size.

    The full cache has no distance from itself.
    """
    table = _chunks(tables.accuracy(name))
    rows = data.of_metrics(table, ["kl_nats", "text_perplexity"])
    rows = rows[(rows.label != style.FULL) | (rows.metric != "kl_nats")]

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        _draw_chunks(axes, panel)
        axes.set(xlabel="decoded token", ylabel=axis(panel.metric.iloc[0]))

    note = "percentages: sizes; bars: one standard error over prompts"
    return style.draw_rows(rows, (*OF_CHUNKS, "metric"), draw, note=note)


def _chunks(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of ranges of a text, such as `offline[256:512]`, as corpus, start, end."""
    chunks = table.task.str.extract(CHUNK)
    start, end = chunks.start.astype(float), chunks.end.astype(float)
    rows = table.assign(corpus=chunks.corpus, start=start, end=end)
    return rows[rows.start.notna()]


def _draw_chunks(axes: Axes, panel: pd.DataFrame) -> None:
    """A line per method and size, each range of tokens at its middle, a missing range a gap."""
    edges = sorted({*panel.start, *panel.end})
    middles = pd.Index(sorted({*((panel.start + panel.end) / 2)}))
    data.refuse_repeats(panel, ["label", "size", "start"])
    for label in style.ordered(panel.label):
        for _, line in panel[panel.label == label].groupby("size", dropna=False):
            ranges = line.set_index((line.start + line.end) / 2).reindex(middles)
            name = label
            if label != style.FULL:
                name += f", {100 * line['size'].iloc[0]:.0f} %"
            x, look = middles.to_series(), style.look(label)
            style.error_line(axes, x, ranges.value, ranges.stderr, name=name, like=look)
    every = -(-len(edges) // MAX_TICKS)
    axes.set(xticks=edges[::every], xlim=(edges[0], edges[-1]))
    style.log_y(axes, panel.value)


# By layer


def attention_error(tables: data.Tables, name: str) -> Figure | None:
    """Relative error of attention outputs by layer, its mean and its 95th percentile, a line per
    method at one size.

    The full cache's is 0, and so is that of exempt layers: they have no point on this axis.
    """
    table = tables.read(name, columns.ANALYSIS)
    parts = table.series.str.extract(SIZED)
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
    note = "percentages: sizes; bars: one standard error over windows"
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
