"""Figures of InfiniGen's parts: skewing, alpha and the partial weights, eviction, its choices."""

from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.results.columns import whole_tasks
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


def fig13(table: pd.DataFrame, with_full: pd.DataFrame) -> Figure | None:
    """With and without skewing, as pairs of bars: accuracy by task, then KL on texts.

    A pair is a run without skewing and the skewed run of the same model and task nearest in budget;
    the budgets stand below the bars. The full cache, a dashed line over its group, comes from the
    same table or from `fig11.csv`.
    """
    both = pd.concat([table, with_full[with_full.label == style.FULL]])
    rows = data.of_metrics(both, ["acc", "kl_nats"])
    setup = ["model", "metric", "source"]
    rows = rows.groupby(setup).filter(lambda panel: panel.label.str.endswith(UNSKEWED).any())
    return style.draw_rows(rows, setup, _draw_pairs, note=style.error_note(rows))


def _draw_pairs(axes: Axes, panel: pd.DataFrame) -> None:
    asked = ["task", *ASKED]
    unskewed = panel[panel.label.str.endswith(UNSKEWED)]
    unskewed = unskewed.assign(pair=range(len(unskewed)))
    names = unskewed.label.str.removesuffix(UNSKEWED)
    wanted = unskewed[[*asked, "pair", "budget"]].assign(label=names)
    skewed = panel.merge(wanted, on=["label", *asked], suffixes=("", "_wanted"))
    distance = (skewed["budget"] - skewed.budget_wanted).abs()
    nearest = skewed.loc[distance.sort_values(kind="stable").index].drop_duplicates("pair")
    pairs = pd.concat([unskewed, nearest])
    ticks = {}
    for number, pair in pairs.groupby("pair"):
        budgets = sorted({f"{100 * budget:.0f}" for budget in pair["budget"]}, key=int)
        samples = data.describe(pair.iloc[0], ["num_samples"])
        ticks[number] = f"{pair.task.iloc[0]}\nread {' / '.join(budgets)} %\n{samples}"
    style.bars(axes, pairs.assign(group=pairs.pair), tick=ticks.__getitem__)
    # The full cache's KL to itself is 0.
    full = panel[(panel.label == style.FULL) & (panel.metric == "acc")]
    full = full[[*asked, "value"]].merge(unskewed[[*asked, "pair"]], on=asked)
    for _, level in full.drop_duplicates(["pair", "value"]).iterrows():
        ends, y = [level.pair - 0.45, level.pair + 0.45], 2 * [level.value]
        axes.plot(ends, y, "--", color=style.BLACK, linewidth=1, label=style.FULL)
    axes.set(ylabel=axis(panel))


def fig17(scores: pd.DataFrame, times: pd.DataFrame) -> Figure | None:
    """Accuracy, and seconds of decode, on two axes against alpha and against the partial weight
    ratio.

    A run's label says what it varies, such as `alpha=4`.
    """
    scores = scores[scores.metric == "acc"]
    setups = {"accuracy": ("model", "task", *ASKED[:2], "source"), "latency": data.TIMED_SETUP}
    halves = {}
    for half, rows, column in ("accuracy", scores, "value"), ("latency", times, "decode_s"):
        swept = rows.join(rows.label.str.extract(SETTING)).dropna(subset="x")
        halves[half] = swept.assign(x=swept.x.astype(float), y=swept.get(column), half=half)

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        setting = panel.setting.iloc[0]
        axes.set(xlabel=SWEPT[setting], ylabel="accuracy (%)")
        style.full_lines(axes, scores[scores.label == style.FULL])
        for task in sorted(set(scores.task) & set(CHANCE)):
            style.chance_line(axes, CHANCE[task])
        for half, setup in setups.items():
            swept = panel[panel.half == half]
            if half == "latency" and len(swept):
                axes = axes.twinx()
                axes.set_ylabel("latency, decode (s)")
                axes.spines["right"].set_visible(True)
                axes.grid(visible=False)
            for title, line in data.split(swept, setup)[1]:
                name = ", ".join(filter(None, [half, title]))
                style.draw_lines(axes, line.assign(name=name), {name: style.look(half)})

    runs = pd.concat(halves.values(), ignore_index=True)
    panels: list[style.Panel] = [("", panel, draw) for _, panel in runs.groupby("setting")]
    shared = []
    for half, rows in halves.items():
        shared += [f"{half}: {data.split(rows, setups[half])[0]}"] if len(rows) else []
    note = "\n".join(shared) + f"; {style.error_note(halves['accuracy'])}"
    # The panels have room for the second axis.
    return style.draw_panels(panels, note, panel_inches=(4.2, 2.5))


def table2(table: pd.DataFrame) -> Figure | None:
    """Perplexity with the KV pool at 100 % and at 80 % of the sequence, by eviction policy.

    A bar per pool, and dashed the full cache on the same windows. The paper's numbers (WikiText-2,
    2,048 tokens) are hollow, on the bars of the paper's model; each other model of the paper has a
    panel.
    """
    rows = whole_tasks(table)
    pool = rows.label.str.extract(rf"^{NAME}, pool (\d+ %.*)$", expand=False)
    rows = rows.assign(pool=pool).dropna(subset="pool")
    rows = rows[rows.metric.isin(["perplexity", "perplexity_full"])]
    if rows.empty:
        return None
    paper = data.of_paper("table2")
    paper = paper[paper.x == "wikitext2"].assign(series=NAME, x=paper.series.map(POOLS))
    setup = ("model", "task", "num_samples", "seq_len", "source")
    shared, parts = data.split(rows, setup)
    panels: list[style.Panel] = []
    for title, panel in parts:
        draw = partial(_draw_pools, published=paper[paper.model.isin(panel.model)])
        panels.append((title or panel.model.iloc[0], panel, draw))
    others = paper[~paper.model.isin(rows.model)]  # without bars
    for model, points in others.groupby("model", sort=False):
        panels.append((f"{model}, published", rows.head(0), partial(_draw_pools, published=points)))
    note = f"{shared}; {style.error_note(rows)}. Published: WikiText-2, 2,048 tokens"
    return style.draw_panels(panels, note)


def _draw_pools(axes: Axes, panel: pd.DataFrame, published: pd.DataFrame) -> None:
    """A bar per pool, the full cache, and the paper's numbers where the setup is the paper's."""
    own = panel[panel.metric == "perplexity"]
    data.refuse_repeats(own, ["label"])
    rows = own if len(own) else published.assign(pool=published.x, value=np.nan)
    in_order = [*POOLS.values(), *rows.pool]
    rows = rows.sort_values("pool", key=lambda pools: pools.map(in_order.index))
    centres = style.bars(axes, rows.assign(group=rows.pool, label=NAME), tick=_in_lines)
    style.full_lines(axes, panel[panel.metric == "perplexity_full"])
    if ((panel.task == "wikitext2") & (panel.seq_len == 2048)).all():
        style.mark_published(axes, centres, published)
    axes.margins(y=0.1)
    # With the artifact's evictions there are seven ticks.
    axes.tick_params(axis="x", labelsize=5.5)
    axes.set(xlabel="KV pool, of the sequence", ylabel="perplexity", ylim=(0, None))


def _in_lines(pool: str) -> str:
    return pool.replace(" % ", " %\n").replace(" (", "\n(")


def choices(table: pd.DataFrame) -> Figure | None:
    """InfiniGen's own choices, one changed at a time: KL and perplexity, a bar per run.

    Dashed, the full cache's perplexity on the same windows. A label names what it changes, such as
    `InfiniGen, columns=query`.
    """
    table = whole_tasks(table)
    full = table[table.metric == "perplexity_full"]
    rows = data.of_metrics(table, ["kl_nats", "perplexity"])

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        data.refuse_repeats(panel, ["label"])
        changed = panel.label.str.removeprefix(NAME).str.removeprefix(", ")
        groups = changed.replace("", "default").str.replace(", ", ",\n")
        style.bars(axes, panel.assign(group=groups, label=NAME))
        for text in axes.get_xticklabels():
            text.set(rotation=40, ha="right", rotation_mode="anchor")
        if panel.metric.iloc[0] == "perplexity":
            style.full_lines(axes, full.merge(panel[list(TEXTS)].drop_duplicates()))
        axes.set_ylabel(axis(panel))

    note = f"budget {data.budget_range(table)} %; {style.error_note(rows)}"
    return style.draw_rows(rows, (*TEXTS, "metric"), draw, note=note)
