"""Figures of accuracy tables: by size, by position in the text, InfiniGen's parts, and needles in a
haystack."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from harness.results import columns
from plots import data, style

AXES = {
    "acc": "accuracy (%)",
    "kl_nats": "KL(full || method) (nats)",
    "top1_agreement": "top-1 agreement (%)",
    "perplexity": "perplexity",
    "text_perplexity": "full cache's perplexity of the text",
}
CHANCE = {
    "kv_recall": 0.25,
    "passkey": 0.25,
    "openbookqa": 0.25,
    "hellaswag": 0.25,
} | dict.fromkeys(("copa", "winogrande", "piqa", "rte", "boolq"), 0.5)
TEXTS = ("model", "task", "seq_len", "num_samples", "source")
"""The setup of a number on texts."""
OF_CHUNKS = ("model", "corpus", "seq_len", "num_samples", "source")
ASKED = ("num_samples", "num_fewshot", "seq_len")
"""Beside model and task, the conditions that runs share which were asked the same questions."""
NAME = "InfiniGen"
UNSKEWED = " without skewing"
SETTING = r"^(?P<setting>\w+)=(?P<x>[\d.]+)$"
KEPT = r"^(?P<name>.+) with (?P<kept>\d+) tokens$"
CHUNK = r"^(?P<corpus>.*)\[(?P<start>\d+):(?P<end>\d+)\]$"
NEEDLE = r"^(?P<needle>.+)\[(?P<length>\d+), (?P<begin>\d+)-(?P<end>\d+) %\]$"
"""In labels and tasks: the varied setting, the tokens kept, the range of tokens of a text, the
depths of a needle."""
SWEPT = {"alpha": "alpha (scaled logits)", "partial_weight_ratio": "partial weight ratio"}
"""Axis labels of the varied settings."""
MAX_TICKS = 6
LENGTH_MARKERS = "osD^"
POOLS = {"full_pool": "100 %", "fifo": "80 % fifo", "lru": "80 % lru", "counter": "80 % counter"}
"""Table 2: the paper's pools, and how a label names them."""

BAND = ["model", "setup", "needle"]
SHOWN_BY_CELLS = r"(num_samples|metadata\.max_seq_lengths)=(\[[^\]]*\]|[^,]*)(, )?"
"""Settings that the cells of `ruler` show by themselves."""
COLOURS, PERCENT = colormaps["cividis"], Normalize(0, 100)
LUMINANCE, LIGHT = np.array([0.21, 0.72, 0.07]), 0.45
"""Weights of red, green and blue, and the luminance from which a cell's text is black."""
CELL_INCHES = (0.52, 0.24)


# By size


def fig11(tables: data.Tables, name: str) -> Figure | None:
    """Accuracy by size, one line per method, a panel per model, task and number of questions; then
    KL to the full cache and top-1 agreement on texts, from the same table and from
    `perplexity.csv`."""
    own, texts = tables.accuracy(name), tables.accuracy("perplexity")
    if own.empty:
        return None
    metrics = ["acc", "kl_nats", "top1_agreement"]
    rows = data.of_metrics(pd.concat([own, texts[texts.metric.isin(metrics[1:])]]), metrics)
    codecs = style.joined(rows.label)

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        metric, task = panel.metric.iloc[0], panel.task.iloc[0]
        factor = columns.METRICS[metric].factor
        axes.set(xlabel=style.SIZE_AXIS, ylabel=AXES[metric])
        if metric == "kl_nats":
            style.log_y(axes)  # without the full cache, whose divergence from itself is 0
        else:
            style.full_lines(axes, panel[panel.label == style.FULL], factor)
        if task in CHANCE:
            style.chance_line(axes, factor * CHANCE[task])
        style.size_lines(axes, panel, factor, codecs=codecs)

    setup = ("model", "task", "metric", *ASKED, "source")
    return style.draw_rows(rows, setup, draw, note=style.error_note(rows))


def fig19(tables: data.Tables, name: str) -> Figure | None:
    """Perplexity by size, one line per method, and by length with a fixed number of tokens kept, of
    the runs whose label ends in "with N tokens". The full cache is that of the runs themselves, on
    the same windows."""
    table = data.whole_texts(tables.accuracy(name))
    rows = table.join(table.label.str.extract(KEPT))
    rows = rows[rows.metric.isin(["perplexity", "perplexity_full"])]

    def draw_sizes(axes: Axes, panel: pd.DataFrame) -> None:
        style.full_lines(axes, panel[panel.metric == "perplexity_full"])
        style.size_lines(
            axes, panel[panel.metric == "perplexity"], codecs=style.joined(by_size.label)
        )
        style.log_y(axes, panel.value)
        axes.set(xlabel=style.SIZE_AXIS, ylabel="perplexity")

    def draw_lengths(axes: Axes, panel: pd.DataFrame) -> None:
        full = (
            panel[panel.metric == "perplexity_full"]
            .assign(name=style.FULL)
            .drop_duplicates("seq_len")
        )
        lines = pd.concat([full, panel[panel.metric == "perplexity"]])
        for name in style.ordered(lines.name):
            line = lines[lines.name == name].sort_values("seq_len")
            style.error_line(
                axes, line.seq_len, line.value, line.stderr, name=name, like=style.look(name)
            )
        windows = panel.groupby("seq_len").num_samples.max()
        style.log2_x(axes, windows.index)
        axes.set_xticks(
            list(windows.index),
            [f"{length:,.0f}\nn = {count:.0f}" for length, count in windows.items()],
        )
        axes.minorticks_off()
        axes.margins(x=0.1)
        style.log_y(axes, panel.value)
        axes.set(xlabel="tokens of the text", ylabel="perplexity")

    by_size, by_length = rows[rows.kept.isna()], rows[rows.kept.notna()]
    halves = (
        (by_size, TEXTS, draw_sizes),
        (by_length, ("model", "task", "kept", "source"), draw_lengths),
    )
    parts = [(*data.split(half, setup), draw) for half, setup, draw in halves if len(half)]
    panels = [(*panel, draw) for _, panels, draw in parts for panel in panels]
    single = " (n = 1: a single window has none)" if by_length.num_samples.eq(1).any() else ""
    return style.draw_cells(
        panels, "\n".join(shared for shared, *_ in parts) + f"; {style.error_note(rows)}{single}"
    )


# By position in the text


def fig12(tables: data.Tables, name: str) -> Figure | None:
    """Perplexity by chunk of 256 tokens, one line per method and size."""
    rows = _chunks(tables.accuracy(name))
    rows = rows[rows.metric == "perplexity"]

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        _draw_chunks(axes, panel)
        axes.set(xlabel="tokens in the cache, in chunks of 256", ylabel="perplexity")

    return style.draw_rows(
        rows, OF_CHUNKS, draw, note=f"percentages: sizes; {style.error_note(rows)}"
    )


def long_decode(tables: data.Tables, name: str) -> Figure | None:
    """Over the tokens decoded: KL(full || method) along the method's own text, and the full cache's
    perplexity of that text, a line per method and size. The full cache has no distance from
    itself."""
    rows = data.of_metrics(_chunks(tables.accuracy(name)), ["kl_nats", "text_perplexity"])
    rows = rows[(rows.label != style.FULL) | (rows.metric != "kl_nats")]

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        _draw_chunks(axes, panel)
        axes.set(xlabel="decoded token", ylabel=AXES[panel.metric.iloc[0]])

    note = "percentages: sizes; bars: one standard error over prompts"
    return style.draw_rows(rows, (*OF_CHUNKS, "metric"), draw, note=note)


def _chunks(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of an accuracy table that are of ranges of a text, such as `offline[256:512]`, as
    corpus, start, end."""
    chunks = table.task.str.extract(CHUNK)
    rows = table.assign(
        corpus=chunks.corpus, start=chunks.start.astype(float), end=chunks.end.astype(float)
    )
    return rows[rows.start.notna()]


def _draw_chunks(axes: Axes, panel: pd.DataFrame) -> None:
    """A line per method and size, each range of tokens at its middle, a missing range a gap."""
    edges = sorted({*panel.start, *panel.end})
    middles = pd.Index(sorted({*((panel.start + panel.end) / 2)}))
    data.refuse_repeats(panel, ["label", "size", "start"])
    for label in style.ordered(panel.label):
        for _, line in panel[panel.label == label].groupby("size", dropna=False):
            ranges = line.set_index((line.start + line.end) / 2).reindex(middles)
            name = label if label == style.FULL else f"{label}, {100 * line['size'].iloc[0]:.0f} %"
            look = style.look(label)
            style.error_line(
                axes, middles.to_series(), ranges.value, ranges.stderr, name=name, like=look
            )
    every = -(-len(edges) // MAX_TICKS)
    axes.set(xticks=edges[::every], xlim=(edges[0], edges[-1]))
    style.log_y(axes, panel.value)


# InfiniGen's parts


def fig13(tables: data.Tables, name: str) -> Figure | None:
    """With and without skewing, as pairs of bars: accuracy by task, then KL on texts. A pair is a
    run without skewing and the skewed run of the same model and task nearest in size; the sizes
    stand below the bars. The full cache, a dashed line over its group, comes from the same table or
    from `fig11.csv`."""
    own, full = tables.accuracy(name), tables.accuracy("fig11")
    setup = ("model", "metric", "source")
    rows = data.of_metrics(pd.concat([own, full[full.label == style.FULL]]), ["acc", "kl_nats"])
    unskewed = rows.label.str.endswith(UNSKEWED)
    rows = rows[unskewed.groupby([rows[name] for name in setup]).transform("any").astype(bool)]

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        metric = panel.metric.iloc[0]
        factor = columns.METRICS[metric].factor
        pairs = _pairs(panel)
        values, errors = (
            factor * data.pivot(pairs, "pair", column) for column in ("value", "stderr")
        )
        groups = []
        for _, pair in pairs.groupby("pair"):
            sizes = sorted({f"{100 * size:.0f}" for size in pair["size"]}, key=int)
            samples = data.describe(pair.iloc[0], ["num_samples"])
            groups.append(f"{pair.task.iloc[0]}\nsize {' / '.join(sizes)} %\n{samples}")
        style.grouped(axes, values, errors=errors, groups=groups)
        for index, (_, pair) in enumerate(pairs.groupby("pair")):
            full = _with_same(panel[panel.label == style.FULL], pair.iloc[0])
            for value in full.value[
                full.metric == "acc"
            ].unique():  # its divergence from itself is 0
                ends = [index - 0.45, index + 0.45]
                axes.plot(
                    ends,
                    2 * [factor * value],
                    "--",
                    color=style.BLACK,
                    linewidth=1,
                    label=style.FULL,
                )
        axes.set(ylabel=AXES[metric])

    return style.draw_rows(rows, setup, draw, note=style.error_note(rows))


def _pairs(panel: pd.DataFrame) -> pd.DataFrame:
    """The rows that form pairs, numbered in `pair`; an unskewed run without partner is a pair of
    one."""
    chosen = []
    unskewed = panel[panel.label.str.endswith(UNSKEWED)]
    for number, (_, row) in enumerate(unskewed.iterrows()):
        skewed = _with_same(panel[panel.label == row.label.removesuffix(UNSKEWED)], row)
        nearest = (skewed["size"] - row["size"]).abs().sort_values(kind="stable").index[:1]
        chosen.append(
            pd.concat([row.to_frame().T.infer_objects(), skewed.loc[nearest]]).assign(pair=number)
        )
    return pd.concat(chosen)


def _with_same(
    rows: pd.DataFrame, row: pd.Series, names: Sequence[str] = ("task", *ASKED)
) -> pd.DataFrame:
    """The rows with the same values as `row` in these columns; an empty cell equals an empty
    cell."""
    same = pd.Series(True, rows.index)
    for name in names:
        same &= (rows[name] == row[name]) | (rows[name].isna() & pd.isna(row[name]))
    return rows[same]


def fig17(tables: data.Tables, name: str) -> Figure | None:
    """Accuracy, and seconds of decode from `fig17-latency.csv`, on two axes against alpha and
    against the partial weight ratio. Either table may be absent. A run's label says what it varies,
    such as `alpha=4`."""
    table = tables.accuracy(name)
    table = table[table.metric == "acc"]
    accuracy, latency = map(_with_setting, (table, tables.read(f"{name}-latency", columns.LATENCY)))
    swept = [setting for setting in SWEPT if setting in {*accuracy.setting, *latency.setting}]
    if not swept:
        return None
    kinds = (
        ("accuracy", accuracy, ("model", "task", *ASKED[:2], "source")),
        ("latency", latency, data.TIMED_SETUP),
    )
    figure, all_axes = style.new(len(swept), panel_inches=(4.2, 2.5))  # room for the second axis
    for axes, setting in zip(all_axes, swept, strict=True):
        axes.set(xlabel=SWEPT[setting], ylabel="accuracy (%)")
        style.full_lines(axes, table[table.label == style.FULL], 100)
        for task in sorted(set(table.task) & set(CHANCE)):
            style.chance_line(axes, 100 * CHANCE[task])
        for word, rows, setup in kinds:
            rows = rows[rows.setting == setting]
            if rows.empty:
                continue
            if word == "latency":
                axes = axes.twinx()
                axes.set_ylabel("latency, decode (s)")
                axes.spines["right"].set_visible(True)
                axes.grid(visible=False)
            for title, group in data.split(rows, setup)[1]:
                line = group.sort_values("x")
                y, stderr = (
                    (100 * line.value, 100 * line.stderr)
                    if word == "accuracy"
                    else (line.decode_s, None)
                )
                name = f"{word}, {title}" if title else word
                style.error_line(axes, line.x, y, stderr, name=name, like=style.look(word))
    setups = [f"{word}: {data.split(rows, setup)[0]}" for word, rows, setup in kinds if len(rows)]
    return style.finish(figure, "\n".join(setups) + f"; {style.error_note(accuracy)}")


def _with_setting(table: pd.DataFrame) -> pd.DataFrame:
    """The rows whose label names a setting and a finite number, those in `setting` and `x`."""
    parts = table.label.str.extract(SETTING)
    return table.assign(setting=parts.setting, x=parts.x.astype(float))[parts.x.notna()]


def table2(tables: data.Tables, name: str) -> Figure | None:
    """Perplexity with the KV pool at 100 % and at 80 % of the sequence, by eviction policy: a bar
    per pool, and dashed the full cache on the same windows. The paper's numbers (WikiText-2, 2,048
    tokens) are hollow, on the bars of the paper's model; each other model of the paper has a
    panel."""
    table = data.whole_texts(tables.accuracy(name))
    rows = table.assign(pool=table.label.str.extract(rf"^{NAME}, pool (\d+ %.*)$", expand=False))
    rows = rows[rows.pool.notna() & rows.metric.isin(["perplexity", "perplexity_full"])]
    if rows.empty:
        return None
    published = data.of_paper("table2")
    published = published[published.x == "wikitext2"]
    published = published.assign(series=NAME, x=published.series.map(POOLS))
    others = [model for model in published.model.unique() if model not in set(rows.model)]
    shared, panels = data.split(rows, ("model", "task", "num_samples", "seq_len", "source"))
    figure, all_axes = style.new(len(panels) + len(others))
    for axes, (title, frame) in zip(all_axes, panels, strict=False):
        own, full = (frame[frame.metric == metric] for metric in ("perplexity", "perplexity_full"))
        data.refuse_repeats(own, ["label"])
        pools = [
            pool for pool in dict.fromkeys([*POOLS.values(), *own.pool]) if pool in set(own.pool)
        ]
        found = style.bars_of_one(
            axes, own.set_index("pool").loc[pools], name=NAME, groups=_ticks(pools)
        )
        style.full_lines(axes, full)
        if (frame.task == "wikitext2").all() and (frame.seq_len == 2048).all():
            style.mark_published(axes, found, pools, published[published.model.isin(frame.model)])
        axes.set_title(title or frame.model.iloc[0])
    for axes, model in zip(all_axes[len(panels) :], others, strict=True):
        pools = list(POOLS.values())
        found, _ = style.places(axes, [NAME], _ticks(pools))
        style.mark_published(axes, found, pools, published[published.model == model])
        axes.set_title(f"{model}, published")
    for axes in all_axes:
        axes.margins(y=0.1)
        axes.tick_params(axis="x", labelsize=5.5)  # with the artifact's evictions there are seven
        axes.set(xlabel="KV pool, of the sequence", ylabel="perplexity", ylim=(0, None))
    return style.finish(
        figure, f"{shared}; {style.error_note(rows)}. Published: WikiText-2, 2,048 tokens"
    )


def _ticks(pools: list[str]) -> list[str]:
    return [pool.replace(" % ", " %\n").replace(" (", "\n(") for pool in pools]


def choices(tables: data.Tables, name: str) -> Figure | None:
    """InfiniGen's own choices, one changed at a time: KL and perplexity, a bar per run; dashed, the
    full cache's perplexity on the same windows. A label names what it changes, such as `InfiniGen,
    columns=query`."""
    table = data.whole_texts(tables.accuracy(name))
    full = table[table.metric == "perplexity_full"]
    rows = data.of_metrics(table, ["kl_nats", "perplexity"])

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        data.refuse_repeats(panel, ["label"])
        changed = panel.label.str.removeprefix(NAME).str.removeprefix(", ").replace("", "default")
        style.bars_of_one(axes, panel, name=NAME, groups=list(changed.str.replace(", ", ",\n")))
        for text in axes.get_xticklabels():
            text.set(rotation=40, ha="right", rotation_mode="anchor")
        if panel.metric.iloc[0] == "perplexity":
            style.full_lines(axes, _with_same(full, panel.iloc[0], TEXTS))
        axes.set_ylabel(AXES[panel.metric.iloc[0]])

    note = f"size {_sizes(table)} %; {style.error_note(rows)}"
    return style.draw_rows(rows, (*TEXTS, "metric"), draw, note=note)


def index(tables: data.Tables, name: str) -> Figure | None:
    """What an index on the device costs and gives, by the share of the full cache that the method
    keeps there."""
    return _by_share(
        tables, name, columns.RESIDENT_FRAC.name, "index on the device (% of full cache)"
    )


def ablation(tables: data.Tables, name: str) -> Figure | None:
    """What each change from InfiniGen to InfiniGen2 gives, by the share of the full cache that is
    read."""
    return _by_share(tables, name, columns.SIZE.name, "read (% of full cache)", log_kl=True)


def _by_share(
    tables: data.Tables, name: str, share: str, words: str, *, log_kl: bool = False
) -> Figure | None:
    """KL, and accuracy as the mean over the tasks, by a share of the full cache, a column of the
    table; a line per label. The error takes tasks as independent."""
    rows = data.of_metrics(data.whole_texts(tables.accuracy(name)), ["kl_nats", "acc"])
    looks = style.in_sequence(rows.label)

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        metric = panel.metric.iloc[0]
        factor = columns.METRICS[metric].factor
        points = panel.groupby(["label", "run_id"], sort=False, as_index=False).agg(
            x=(share, "mean"),
            y=("value", "mean"),
            stderr=("stderr", _of_mean),
        )
        for label in (label for label in looks if label in set(points.label)):
            own = points[points.label == label].sort_values("x")
            style.error_line(
                axes,
                100 * own.x,
                factor * own.y,
                factor * own.stderr,
                name=label,
                like=looks[label],
            )
        axes.set(ylabel=AXES[metric], xlabel=words)
        if log_kl and metric == "kl_nats":
            style.log_y(axes)

    tasks = ", ".join(sorted(set(rows[rows.metric == "acc"].task)))
    note = f"accuracy: mean of {tasks}; {style.error_note(rows)}"
    return style.draw_rows(rows, ("model", "source", "metric"), draw, note=note)


def _of_mean(errors: pd.Series) -> float:
    """The standard error of a mean of independent values with these."""
    return float((errors**2).sum() ** 0.5 / len(errors))


def _sizes(rows: pd.DataFrame) -> str:
    """The least and the largest size in percent, once where they are equal."""
    return " to ".join(
        dict.fromkeys(f"{100 * size:.0f}" for size in (rows["size"].min(), rows["size"].max()))
    )


# Long contexts


def long(tables: data.Tables, name: str) -> Figure | None:
    """KL on texts and right answers on needles at each length, a line per method, the closest on
    top. Right answers are the mean over the tasks, whose errors are taken as independent."""
    table = data.whole_texts(tables.accuracy(name))
    needles = table[table.metric.astype(str).str.isdecimal()]
    needles = needles.assign(length=needles.metric.astype(float))
    asked = needles.groupby(["model", "source", "label", "length"], sort=False, as_index=False).agg(
        value=("value", "mean"), stderr=("stderr", _of_mean)
    )
    texts = table[(table.metric == "kl_nats") & (table.value > 0)]
    rows = pd.concat([texts.assign(length=texts.seq_len), asked.assign(metric="acc")])
    data.refuse_repeats(rows, ["model", "source", "metric", "label", "length"])
    at_longest = rows[rows.metric == "kl_nats"].sort_values("length").groupby("label").value.last()
    labels = [*at_longest.sort_values(ascending=False).index]
    labels += [label for label in dict.fromkeys(rows.label) if label not in labels]
    lengths = sorted(set(rows.length))
    above = {
        length: 0.3 * (place + 0.5) / len(lengths) - 0.15 for place, length in enumerate(lengths)
    }
    markers = dict(zip(lengths, cycle(LENGTH_MARKERS)))

    def looks(length: float, color: str) -> dict[str, Any]:
        """Of a length's points; those of the shortest are hollow."""
        face = "none" if length == lengths[0] else color
        return {"color": color, "marker": markers[length], "markerfacecolor": face, "markersize": 4}

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        metric = panel.metric.iloc[0]
        factor = columns.METRICS[metric].factor
        for _, row in panel.iterrows():
            y, color = labels.index(row.label) + above[row.length], style.look(str(row.label)).color
            axes.errorbar(
                factor * row.value,
                y,
                xerr=factor * row.stderr,
                elinewidth=0.6,
                **looks(row.length, color),
            )
        for length in lengths:
            axes.plot(
                [], [], linestyle="", label=f"{length:,.0f} tokens", **looks(length, style.GREY)
            )
        axes.set_yticks(range(len(labels)), labels, fontsize=6)
        axes.set(
            xlabel="right answers (%)" if metric == "acc" else AXES[metric],
            ylim=(-0.7, len(labels) - 0.3),
        )
        if metric == "kl_nats":
            style.log_x(axes)

    note = f"right answers: mean of {', '.join(sorted(set(needles.task)))}; bars one standard error"
    return style.draw_rows(rows, ("model", "source", "metric"), draw, note=note)


# Needles in a haystack


def ruler(tables: data.Tables, name: str) -> Figure | None:
    """The share of right answers by the prompt's length and the needle's depth.

    A column per method, a row per task of needles and, where a method's runs differ in further
    settings, such as `prefill`, per these. A cell holds the percentage and the number of questions:
    the fewer, the paler; without any it is hatched. Colours: cividis, which colour-blind readers
    see as well, and which grows lighter in grey too.
    """
    table = tables.accuracy(name)
    rows = table.join(table.task.str.extract(NEEDLE)).dropna(subset="needle")
    if rows.empty:
        return None
    rows = rows.astype({"length": int, "begin": int, "end": int}).assign(setup=_setups(rows))
    data.refuse_repeats(rows, ["label", "model", "setup", "task"])
    distinct = rows[BAND].drop_duplicates().itertuples(index=False, name=None)
    bands = sorted(distinct, key=lambda band: band[:2])
    labels, lengths = style.ordered(rows.label), sorted(set(rows.length))
    parts = 100 // int((rows.end - rows.begin).min())
    width, height = (
        size * count for size, count in zip(CELL_INCHES, (len(lengths), parts), strict=True)
    )
    size = (len(labels) * (width + 0.12) + 1.6, len(bands) * (height + 0.2) + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(bands), len(labels), squeeze=False, sharex=True, sharey=True)
    by_kind = list(zip(*bands, strict=True))
    for band, line in zip(bands, panels, strict=True):
        own = rows[(rows[BAND] == band).all(axis=1)]
        for label, axes in zip(labels, line, strict=True):
            _draw_needles(axes, own[own.label == label], lengths, parts)
        varying = [words for words, others in zip(band, by_kind, strict=True) if len({*others}) > 1]
        line[0].set_ylabel("\n".join([*filter(None, varying), "depth (%)"]), fontsize=6)
    for label, axes in zip(labels, panels[0], strict=True):
        axes.set_title(f"{label}\nsize {_sizes(rows[rows.label == label])} %", fontsize=6.5)
    for axes in panels[-1]:
        axes.set_xlabel("tokens", fontsize=6)
    colours = ScalarMappable(PERCENT, COLOURS)
    figure.colorbar(
        colours, ax=panels, label="right answers (%)", shrink=min(1.0, 2 / size[1]), aspect=12
    )
    shared = [names[0] for names in (by_kind[0], by_kind[2]) if len({*names}) == 1]
    notes = [
        "depth: where in the prompt the answer stands",
        "n: questions (the fewer, the paler; hatched: none)",
    ]
    return style.finish(figure, "; ".join([*shared, *notes]))


def _setups(rows: pd.DataFrame) -> pd.Series:
    """By row, in words, the settings in which the runs of its label differ."""
    words = (
        rows.settings.fillna("")
        .str.replace(SHOWN_BY_CELLS, "", regex=True)
        .str.split(", ")
        .map(tuple)
    )
    shared = {label: set.intersection(*map(set, own)) for label, own in words.groupby(rows.label)}
    cells = zip(words, rows.label, strict=True)
    return pd.Series(
        [", ".join(word for word in own if word not in shared[label]) for own, label in cells],
        rows.index,
    )


def _draw_needles(axes: Axes, panel: pd.DataFrame, lengths: Sequence[int], parts: int) -> None:
    cells = np.zeros(
        (parts, len(lengths), 4)
    )  # without a question a cell stays empty, and shows the hatch
    for _, row in panel.iterrows():
        part, column = parts * row.begin // 100, lengths.index(row.length)
        weight = row.num_samples / (row.num_samples + 2)
        color = 1 - weight * (1 - np.array(COLOURS(PERCENT(100 * row.value))[:3]))
        cells[part, column] = (*color, 1)
        black = color @ LUMINANCE > LIGHT
        words: Mapping[str, Any] = {
            "ha": "center",
            "va": "center",
            "color": style.BLACK if black else "white",
        }
        axes.text(column, part - 0.12, f"{100 * row.value:.0f}", fontsize=6.5, **words)
        axes.text(column, part + 0.27, f"n = {row.num_samples:.0f}", fontsize=4.5, **words)
    axes.imshow(cells, aspect="auto")
    axes.patch.set(hatch="////", edgecolor=style.LIGHT_GREY, linewidth=0)
    axes.grid(visible=False)
    axes.hlines(np.arange(1, parts) - 0.5, -0.5, len(lengths) - 0.5, color="white", linewidth=0.8)
    axes.vlines(np.arange(1, len(lengths)) - 0.5, -0.5, parts - 0.5, color="white", linewidth=0.8)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=5.5)
    axes.set_yticks(
        np.arange(parts + 1) - 0.5,
        [f"{100 * edge // parts}" for edge in range(parts + 1)],
        fontsize=5.5,
    )
    axes.tick_params(length=2, pad=1.5)
