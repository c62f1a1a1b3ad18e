"""Figures of accuracy tables: 11, 12, 13, 17, 19, Table 2, InfiniGen's choices, its index, and long decoding."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.tables import columns
from plots import data, style
from plots.analysis import looks

AXES = {
    "acc": "accuracy (%)",
    "kl_nats": "KL(full || method) (nats)",
    "top1_agreement": "top-1 agreement (%)",
    "perplexity": "perplexity",
    "text_perplexity": "full cache's perplexity of the text",
}
CHANCE = {"kv_recall": 0.25, "passkey": 0.25, "openbookqa": 0.25, "hellaswag": 0.25} | dict.fromkeys(
    ("copa", "winogrande", "piqa", "rte", "boolq"), 0.5
)
TEXTS = ("model", "task", "seq_len", "num_samples", "source")
"""The setup of a number on texts."""
OF_CHUNKS = ("model", "corpus", "seq_len", "num_samples", "source")
ASKED = ("num_samples", "num_fewshot", "seq_len")
"""Beside model and task, the conditions that runs share which were asked the same questions."""
NAME = "InfiniGen"
UNSKEWED = columns.WITHOUT_SKEWING
MAX_TICKS = 6
LATENCY_SETUP = ("model", "platform", "source", "batch_size", "prompt_len", "gen_len")
POOLS = {"full_pool": "100 %", "fifo": "80 % fifo", "lru": "80 % lru", "counter": "80 % counter"}
"""Table 2: the paper's pools, and how a label names them."""


def fig11(tables: data.Tables, name: str) -> Figure | None:
    """Accuracy by size, one line per method, a panel per model, task and number of questions; then KL to the full cache
    and top-1 agreement on texts, from the same table and from `perplexity.csv`."""
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


def fig12(tables: data.Tables, name: str) -> Figure | None:
    """Perplexity by chunk of 256 tokens, one line per method and size."""
    rows = _chunks(tables.accuracy(name))
    rows = rows[rows.metric == "perplexity"]

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        _draw_chunks(axes, panel)
        axes.set(xlabel="tokens in the cache, in chunks of 256", ylabel="perplexity")

    return style.draw_rows(rows, OF_CHUNKS, draw, note=f"percentages: sizes; {style.error_note(rows)}")


def long_decode(tables: data.Tables, name: str) -> Figure | None:
    """Over the tokens decoded: KL(full || method) along the method's own text, and the full cache's perplexity of that
    text, a line per method and size. The full cache has no distance from itself."""
    rows = data.of_metrics(_chunks(tables.accuracy(name)), ["kl_nats", "text_perplexity"])
    rows = rows[(rows.label != style.FULL) | (rows.metric != "kl_nats")]

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        _draw_chunks(axes, panel)
        axes.set(xlabel="decoded token", ylabel=AXES[panel.metric.iloc[0]])

    note = "percentages: sizes; bars: one standard error over prompts"
    return style.draw_rows(rows, (*OF_CHUNKS, "metric"), draw, note=note)


def fig13(tables: data.Tables, name: str) -> Figure | None:
    """With and without skewing, as pairs of bars: accuracy by task, then KL on texts. A pair is a run without skewing
    and the skewed run of the same model and task nearest in size; the sizes stand below the bars. The full cache, a
    dashed line over its group, comes from the same table or from `fig11.csv`."""
    own, full = tables.accuracy(name), tables.accuracy("fig11")
    setup = ("model", "metric", "source")
    rows = data.of_metrics(pd.concat([own, full[full.label == style.FULL]]), ["acc", "kl_nats"])
    unskewed = rows.label.str.endswith(UNSKEWED)
    rows = rows[unskewed.groupby([rows[name] for name in setup]).transform("any").astype(bool)]

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        metric = panel.metric.iloc[0]
        factor = columns.METRICS[metric].factor
        pairs = _pairs(panel)
        values, errors = (factor * data.pivot(pairs, "pair", column) for column in ("value", "stderr"))
        groups = []
        for _, pair in pairs.groupby("pair"):
            sizes = sorted({f"{100 * size:.0f}" for size in pair["size"]}, key=int)
            samples = data.describe(pair.iloc[0], ["num_samples"])
            groups.append(f"{pair.task.iloc[0]}\nsize {' / '.join(sizes)} %\n{samples}")
        style.grouped(axes, values, errors=errors, groups=groups)
        for index, (_, pair) in enumerate(pairs.groupby("pair")):
            full = _with_same(panel[panel.label == style.FULL], pair.iloc[0])
            for value in full.value[full.metric == "acc"].unique():  # its divergence from itself is 0
                ends = [index - 0.45, index + 0.45]
                axes.plot(ends, 2 * [factor * value], "--", color=style.BLACK, linewidth=1, label=style.FULL)
        axes.set(ylabel=AXES[metric])

    return style.draw_rows(rows, setup, draw, note=style.error_note(rows))


def fig17(tables: data.Tables, name: str) -> Figure | None:
    """Accuracy, and seconds of decode from `fig17-latency.csv`, on two axes against alpha and against the partial
    weight ratio. Either table may be absent. A run's label says what it varies, such as `alpha=4`."""
    table = tables.accuracy(name)
    table = table[table.metric == "acc"]
    accuracy, latency = _with_setting(table), _with_setting(tables.latency(f"{name}-latency"))
    named = [setting for setting in columns.SWEPT if setting in {*accuracy.setting, *latency.setting}]
    if not named:
        return None
    kinds = (("accuracy", accuracy, ("model", "task", *ASKED[:2], "source")), ("latency", latency, LATENCY_SETUP))
    figure, all_axes = style.new(len(named), panel_inches=(4.2, 2.5))  # room for the second axis
    for axes, setting in zip(all_axes, named, strict=True):
        axes.set(xlabel=columns.SWEPT[setting], ylabel="accuracy (%)")
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
            panels = data.split(rows, setup)
            for title, group in zip(panels.titles, panels.frames, strict=True):
                line = group.sort_values("x")
                y, stderr = (100 * line.value, 100 * line.stderr) if word == "accuracy" else (line.decode_s, None)
                style.error_line(axes, line.x, y, stderr, name=f"{word}, {title}" if title else word, like=word)
    setups = [f"{word}: {data.split(rows, setup).shared}" for word, rows, setup in kinds if len(rows)]
    return style.finish(figure, "\n".join(setups) + f"; {style.error_note(accuracy)}")


def fig19(tables: data.Tables, name: str) -> Figure | None:
    """Perplexity by size, one line per method, and by length with a fixed number of tokens kept, of the runs whose
    label ends in "with N tokens". The full cache is that of the runs themselves, on the same windows."""
    table = data.whole_texts(tables.accuracy(name))
    rows = table.join(table.label.str.extract(columns.KEPT_LABEL))
    rows = rows[rows.metric.isin(["perplexity", "perplexity_full"])]

    def draw_sizes(axes: Axes, panel: pd.DataFrame) -> None:
        style.full_lines(axes, panel[panel.metric == "perplexity_full"])
        style.size_lines(axes, panel[panel.metric == "perplexity"], codecs=style.joined(by_size.label))
        style.log_y(axes, panel.value)
        axes.set(xlabel=style.SIZE_AXIS, ylabel="perplexity")

    def draw_lengths(axes: Axes, panel: pd.DataFrame) -> None:
        full = panel[panel.metric == "perplexity_full"].assign(name=style.FULL).drop_duplicates("seq_len")
        lines = pd.concat([full, panel[panel.metric == "perplexity"]])
        for name in style.ordered(lines.name):
            line = lines[lines.name == name].sort_values("seq_len")
            style.error_line(axes, line.seq_len, line.value, line.stderr, name=name, like=name)
        windows = panel.groupby("seq_len").num_samples.max()
        style.log2_x(axes, windows.index)
        axes.set_xticks(list(windows.index), [f"{length:,.0f}\nn = {count:.0f}" for length, count in windows.items()])
        axes.minorticks_off()
        axes.margins(x=0.1)
        style.log_y(axes, panel.value)
        axes.set(xlabel="tokens of the text", ylabel="perplexity")

    by_size, by_length = rows[rows.kept.isna()], rows[rows.kept.notna()]
    halves = (by_size, TEXTS, draw_sizes), (by_length, ("model", "task", "kept", "source"), draw_lengths)
    parts = [(data.split(half, setup), draw) for half, setup, draw in halves if len(half)]
    cells = [(*cell, draw) for panels, draw in parts for cell in panels.cells]
    single = " (n = 1: a single window has none)" if by_length.num_samples.eq(1).any() else ""
    note = f"; {style.error_note(rows)}{single}"
    return style.draw_cells(cells, "\n".join(panels.shared for panels, _ in parts) + note)


def table2(tables: data.Tables, name: str) -> Figure | None:
    """Perplexity with the KV pool at 100 % and at 80 % of the sequence, by eviction policy: a bar per pool, and dashed
    the full cache on the same windows. The paper's numbers (WikiText-2, 2,048 tokens) are hollow, on the bars of the
    paper's model; each other model of the paper has a panel."""
    table = data.whole_texts(tables.accuracy(name))
    rows = table.assign(pool=table.label.str.extract(rf"^{NAME}, pool (\d+ %.*)$", expand=False))
    rows = rows[rows.pool.notna() & rows.metric.isin(["perplexity", "perplexity_full"])]
    if rows.empty:
        return None
    published = data.of_paper("table2")
    published = published[published.x == "wikitext2"]
    panels = data.split(rows, ("model", "task", "num_samples", "seq_len", "source"))
    others = [model for model in published.model.unique() if model not in set(rows.model)]
    figure, all_axes = style.new(len(panels.frames) + len(others))

    def mark(axes: Axes, found: dict[str, style.Slots], pools: list[str], models: set[str]) -> None:
        own = published[published.model.isin(models)]
        cells = zip(own.series.map(POOLS), own.value, own.kind, strict=True)
        style.mark_published(axes, found, pools, [data.PublishedPoint(NAME, *cell) for cell in cells])

    for axes, title, frame in zip(all_axes, panels.titles, panels.frames, strict=False):
        own, full = (frame[frame.metric == metric] for metric in ("perplexity", "perplexity_full"))
        data.refuse_repeats(own, ["label"])
        pools = [pool for pool in dict.fromkeys([*POOLS.values(), *own.pool]) if pool in set(own.pool)]
        found = style.bars_of_one(axes, own.set_index("pool").loc[pools], name=NAME, groups=_ticks(pools))
        style.full_lines(axes, full)
        if (frame.task == "wikitext2").all() and (frame.seq_len == 2048).all():
            mark(axes, found, pools, set(frame.model))
        axes.set_title(title or frame.model.iloc[0])
    for axes, model in zip(all_axes[len(panels.frames) :], others, strict=True):
        pools = list(POOLS.values())
        mark(axes, style.slots(axes, [NAME], _ticks(pools)), pools, {model})
        axes.set_title(f"{model}, published")
    for axes in all_axes:
        axes.margins(y=0.1)
        axes.tick_params(axis="x", labelsize=5.5)  # with the artifact's evictions there are seven
        axes.set(xlabel="KV pool, of the sequence", ylabel="perplexity", ylim=(0, None))
    return style.finish(figure, f"{panels.shared}; {style.error_note(rows)}. Published: WikiText-2, 2,048 tokens")


def choices(tables: data.Tables, name: str) -> Figure | None:
    """InfiniGen's own choices, one changed at a time: KL and perplexity, a bar per run; dashed, the full cache's
    perplexity on the same windows. A label names what it changes, such as `InfiniGen, columns=query`."""
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

    sizes = " to ".join(dict.fromkeys(f"{100 * size:.0f}" for size in (table["size"].min(), table["size"].max())))
    return style.draw_rows(rows, (*TEXTS, "metric"), draw, note=f"size {sizes} %; {style.error_note(rows)}")


def index(tables: data.Tables, name: str) -> Figure | None:
    """What an index on the device costs and gives: KL, and accuracy as the mean over the tasks, by the share of the
    full cache that the method keeps on the device; a line per label. The error takes tasks as independent."""
    rows = data.of_metrics(data.whole_texts(tables.accuracy(name)), ["kl_nats", "acc"])
    chosen = looks(rows.label)

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        metric = panel.metric.iloc[0]
        factor = columns.METRICS[metric].factor
        points = panel.groupby(["label", "run_id"], sort=False).agg(
            x=(columns.RESIDENT_FRAC.name, "mean"),
            y=("value", "mean"),
            stderr=("stderr", lambda errors: (errors**2).sum() ** 0.5 / len(errors)),
        )
        for label, (color, marker, line, _) in chosen.items():
            own = points[points.index.get_level_values("label") == label].sort_values("x")
            axes.errorbar(
                100 * own.x, factor * own.y, yerr=factor * own.stderr, label=label if len(own) else None,
                color=color, marker=marker, linestyle=line, capsize=2, elinewidth=0.8,
            )  # fmt: skip
        axes.set(ylabel=AXES[metric], xlabel="index on the device (% of full cache)")

    tasks = ", ".join(sorted(set(rows[rows.metric == "acc"].task)))
    note = f"accuracy: mean of {tasks}; {style.error_note(rows)}"
    return style.draw_rows(rows, ("model", "source", "metric"), draw, note=note)


def _chunks(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of an accuracy table that are of ranges of a text, such as `offline[256:512]`, as corpus, start, end."""
    chunks = table.task.str.extract(columns.CHUNK_TASK)
    rows = table.assign(corpus=chunks.corpus, start=chunks.start.astype(float), end=chunks.end.astype(float))
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
            style.error_line(axes, middles.to_series(), ranges.value, ranges.stderr, name=name, like=label)
    every = -(-len(edges) // MAX_TICKS)
    axes.set(xticks=edges[::every], xlim=(edges[0], edges[-1]))
    style.log_y(axes, panel.value)


def _pairs(panel: pd.DataFrame) -> pd.DataFrame:
    """The rows that form pairs, numbered in `pair`; an unskewed run without partner is a pair of one."""
    chosen = []
    unskewed = panel[panel.label.str.endswith(UNSKEWED)]
    for number, (_, row) in enumerate(unskewed.iterrows()):
        skewed = _with_same(panel[panel.label == row.label.removesuffix(UNSKEWED)], row)
        nearest = (skewed["size"] - row["size"]).abs().sort_values(kind="stable").index[:1]
        chosen.append(pd.concat([row.to_frame().T.infer_objects(), skewed.loc[nearest]]).assign(pair=number))
    return pd.concat(chosen)


def _with_same(rows: pd.DataFrame, row: pd.Series, names: tuple[str, ...] = ("task", *ASKED)) -> pd.DataFrame:
    """The rows with the same values as `row` in these columns; an empty cell equals an empty cell."""
    same = pd.Series(True, rows.index)
    for name in names:
        same &= (rows[name] == row[name]) | (rows[name].isna() & pd.isna(row[name]))
    return rows[same]


def _with_setting(table: pd.DataFrame) -> pd.DataFrame:
    """The rows whose label names a setting and a finite number, those in `setting` and `x`."""
    parts = table.label.str.extract(columns.SETTING_LABEL)
    return table.assign(setting=parts.setting, x=parts.x.astype(float))[parts.x.notna()]


def _ticks(pools: list[str]) -> list[str]:
    return [pool.replace(" % ", " %\n").replace(" (", "\n(") for pool in pools]
