"""Figures of InfiniGen's parts: skewing, alpha and the partial weights, eviction, its choices."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.results import columns
from harness.results.metrics import METRICS
from plots import data, style
from plots.accuracy import ASKED, CHANCE, TEXTS, axis

NAME = "InfiniGen"
UNSKEWED = " without skewing"
SETTING = r"^(?P<setting>\w+)=(?P<x>[\d.]+)$"
"""In labels: the varied setting."""
SWEPT = {"alpha": "alpha (scaled logits)", "partial_weight_ratio": "partial weight ratio"}
"""Axis labels of the varied settings."""
POOLS = {
    "full_pool": "100 %",
    "fifo": "80 % fifo",
    "lru": "80 % lru",
    "counter": "80 % counter",
}
"""Table 2: the paper's pools, and how a label names them."""


def fig13(tables: data.Tables, name: str) -> Figure | None:
    """With and without skewing, as pairs of bars: accuracy by task, then KL on texts.

    A pair is a run without skewing and the skewed run of the same model and task nearest in budget;
    the budgets stand below the bars. The full cache, a dashed line over its group, comes from the
    same table or from `fig11.csv`.
    """
    own, full = tables.accuracy(name), tables.accuracy("fig11")
    setup = ["model", "metric", "source"]
    both = pd.concat([own, full[full.label == style.FULL]])
    rows = data.of_metrics(both, ["acc", "kl_nats"])
    is_unskewed = rows.label.str.endswith(UNSKEWED)
    has_unskewed = is_unskewed.groupby([rows[name] for name in setup]).transform("any")
    rows = rows[has_unskewed.astype(bool)]
    return style.draw_rows(rows, setup, _draw_pairs, note=style.error_note(rows))


def _draw_pairs(axes: Axes, panel: pd.DataFrame) -> None:
    metric = panel.metric.iloc[0]
    factor = METRICS[metric].factor
    pairs = _pairs(panel)
    values = factor * data.pivot(pairs, "pair", "value")
    errors = factor * data.pivot(pairs, "pair", "stderr")
    groups = []
    for _, pair in pairs.groupby("pair"):
        budgets = sorted({f"{100 * budget:.0f}" for budget in pair["budget"]}, key=int)
        samples = data.describe(pair.iloc[0], ["num_samples"])
        groups.append(f"{pair.task.iloc[0]}\nread {' / '.join(budgets)} %\n{samples}")
    style.grouped(axes, values, errors=errors, groups=groups)
    # The full cache's KL to itself is 0.
    full = panel[(panel.label == style.FULL) & (panel.metric == "acc")]
    for index, (_, pair) in enumerate(pairs.groupby("pair")):
        ends = [index - 0.45, index + 0.45]
        for value in _with_same(full, pair.iloc[0]).value.unique():
            y = 2 * [factor * value]
            axes.plot(ends, y, "--", color=style.BLACK, linewidth=1, label=style.FULL)
    axes.set(ylabel=axis(metric))


def _pairs(panel: pd.DataFrame) -> pd.DataFrame:
    """The rows that form pairs, numbered in `pair`; an unskewed run without partner is a pair of
    one."""
    found = []
    unskewed = panel[panel.label.str.endswith(UNSKEWED)]
    for number, (_, row) in enumerate(unskewed.iterrows()):
        skewed = _with_same(panel[panel.label == row.label.removesuffix(UNSKEWED)], row)
        distance = (skewed["budget"] - row["budget"]).abs()
        nearest = distance.sort_values(kind="stable").index[:1]
        pair = pd.concat([row.to_frame().T.infer_objects(), skewed.loc[nearest]])
        found.append(pair.assign(pair=number))
    return pd.concat(found)


def _with_same(
    rows: pd.DataFrame, row: pd.Series, names: Sequence[str] = ("task", *ASKED)
) -> pd.DataFrame:
    same = pd.Series(True, rows.index)
    for name in names:
        same &= (rows[name] == row[name]) | (rows[name].isna() & pd.isna(row[name]))
    return rows[same]


def fig17(tables: data.Tables, name: str) -> Figure | None:
    """Accuracy, and seconds of decode from `fig17-latency.csv`, on two axes against alpha and
    against the partial weight ratio.

    Either table may be absent. A run's label says what it varies, such as `alpha=4`.
    """
    table = tables.accuracy(name)
    table = table[table.metric == "acc"]
    accuracy = _with_setting(table)
    latency = _with_setting(tables.read(f"{name}-latency", columns.LATENCY))
    varied = {*accuracy.setting, *latency.setting}
    swept = [setting for setting in SWEPT if setting in varied]
    if not swept:
        return None
    of_accuracy = ("model", "task", *ASKED[:2], "source")
    # The panels have room for the second axis.
    figure, all_axes = style.new(len(swept), panel_inches=(4.2, 2.5))
    for axes, setting in zip(all_axes, swept, strict=True):
        axes.set(xlabel=SWEPT[setting], ylabel="accuracy (%)")
        style.full_lines(axes, table[table.label == style.FULL], 100)
        for task in sorted(set(table.task) & set(CHANCE)):
            style.chance_line(axes, 100 * CHANCE[task])
        rows = accuracy[accuracy.setting == setting]
        if len(rows):
            percent = rows.assign(y=100 * rows.value, stderr=100 * rows.stderr)
            _draw_swept(axes, percent, of_accuracy, "accuracy")
        rows = latency[latency.setting == setting]
        if len(rows):
            second = axes.twinx()
            second.set_ylabel("latency, decode (s)")
            second.spines["right"].set_visible(True)
            second.grid(visible=False)
            _draw_swept(second, rows.assign(y=rows.decode_s), data.TIMED_SETUP, "latency")
    setups = []
    if len(accuracy):
        setups.append(f"accuracy: {data.split(accuracy, of_accuracy)[0]}")
    if len(latency):
        setups.append(f"latency: {data.split(latency, data.TIMED_SETUP)[0]}")
    return style.finish(figure, "\n".join(setups) + f"; {style.error_note(accuracy)}")


def _draw_swept(axes: Axes, rows: pd.DataFrame, setup: Sequence[str], word: str) -> None:
    """A line per setup of `y` by the varied setting; seconds have no error."""
    for title, group in data.split(rows, setup)[1]:
        line = group.sort_values("x")
        name = f"{word}, {title}" if title else word
        if line[data.OWN].any():
            name += style.OWN_MARK
        stderr = line.stderr if word == "accuracy" else None
        style.error_line(axes, line.x, line.y, stderr, name=name, like=style.look(word))


def _with_setting(table: pd.DataFrame) -> pd.DataFrame:
    parts = table.label.str.extract(SETTING)
    return table.assign(setting=parts.setting, x=parts.x.astype(float))[parts.x.notna()]


def table2(tables: data.Tables, name: str) -> Figure | None:
    """Perplexity with the KV pool at 100 % and at 80 % of the sequence, by eviction policy.

    A bar per pool, and dashed the full cache on the same windows. The paper's numbers (WikiText-2,
    2,048 tokens) are hollow, on the bars of the paper's model; each other model of the paper has a
    panel.
    """
    table = data.whole_texts(tables.accuracy(name))
    pool = table.label.str.extract(rf"^{NAME}, pool (\d+ %.*)$", expand=False)
    rows = table.assign(pool=pool)
    rows = rows[rows.pool.notna() & rows.metric.isin(["perplexity", "perplexity_full"])]
    if rows.empty:
        return None
    published = data.of_paper("table2")
    published = published[published.x == "wikitext2"]
    published = published.assign(series=NAME, x=published.series.map(POOLS))
    others = published[~published.model.isin(rows.model)]
    setup = ("model", "task", "num_samples", "seq_len", "source")
    shared, panels = data.split(rows, setup)
    figure, all_axes = style.new(len(panels) + others.model.nunique())
    for axes, (title, panel) in zip(all_axes, panels, strict=False):
        _draw_pools(axes, panel, published)
        axes.set_title(title or panel.model.iloc[0])
    of_models = others.groupby("model", sort=False)
    for axes, (model, points) in zip(all_axes[len(panels) :], of_models, strict=True):
        pools = list(POOLS.values())
        found, _ = style.place_bars(axes, [NAME], _ticks(pools))
        style.mark_published(axes, found, pools, points)
        axes.set_title(f"{model}, published")
    for axes in all_axes:
        axes.margins(y=0.1)
        # With the artifact's evictions there are seven ticks.
        axes.tick_params(axis="x", labelsize=5.5)
        axes.set(xlabel="KV pool, of the sequence", ylabel="perplexity", ylim=(0, None))
    note = f"{shared}; {style.error_note(rows)}. Published: WikiText-2, 2,048 tokens"
    return style.finish(figure, note)


def _draw_pools(axes: Axes, panel: pd.DataFrame, published: pd.DataFrame) -> None:
    """A bar per pool, the full cache, and the paper's numbers where the setup is the paper's."""
    own = panel[panel.metric == "perplexity"]
    data.refuse_repeats(own, ["label"])
    own = own.set_index("pool")
    in_order = dict.fromkeys([*POOLS.values(), *own.index])
    pools = [pool for pool in in_order if pool in own.index]
    found = style.bars_of_one(axes, own.loc[pools], name=NAME, groups=_ticks(pools))
    style.full_lines(axes, panel[panel.metric == "perplexity_full"])
    if (panel.task == "wikitext2").all() and (panel.seq_len == 2048).all():
        points = published[published.model.isin(panel.model)]
        style.mark_published(axes, found, pools, points)


def _ticks(pools: list[str]) -> list[str]:
    return [pool.replace(" % ", " %\n").replace(" (", "\n(") for pool in pools]


def choices(tables: data.Tables, name: str) -> Figure | None:
    """InfiniGen's own choices, one changed at a time: KL and perplexity, a bar per run.

    Dashed, the full cache's perplexity on the same windows. A label names what it changes, such as
    `InfiniGen, columns=query`.
    """
    table = data.whole_texts(tables.accuracy(name))
    full = table[table.metric == "perplexity_full"]
    rows = data.of_metrics(table, ["kl_nats", "perplexity"])

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        data.refuse_repeats(panel, ["label"])
        changed = panel.label.str.removeprefix(NAME).str.removeprefix(", ")
        groups = changed.replace("", "default").str.replace(", ", ",\n")
        style.bars_of_one(axes, panel, name=NAME, groups=list(groups))
        for text in axes.get_xticklabels():
            text.set(rotation=40, ha="right", rotation_mode="anchor")
        if panel.metric.iloc[0] == "perplexity":
            style.full_lines(axes, _with_same(full, panel.iloc[0], TEXTS))
        axes.set_ylabel(axis(panel.metric.iloc[0]))

    note = f"budget {data.budget_range(table)} %; {style.error_note(rows)}"
    return style.draw_rows(rows, (*TEXTS, "metric"), draw, note=note)
