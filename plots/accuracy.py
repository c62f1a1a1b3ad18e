"""Figures of accuracy tables: by budget, by position in the text, by length; and of the board."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.results.columns import whole_tasks
from harness.results.metrics import METRICS
from plots import data, style

AXES = {
    "acc": "accuracy (%)",
    "kl_nats": style.KL_AXIS,
    "text_perplexity": "full cache's perplexity of the text",
}
"""Words for an axis that differ from a table's heading."""
CHANCE = {"kv_recall": 25, "passkey": 25, "openbookqa": 25, "hellaswag": 25}
CHANCE |= dict.fromkeys(("copa", "winogrande", "piqa", "rte", "boolq"), 50)
"""Percent of the answers of each task that guessing has right."""
TEXTS = ("model", "task", "seq_len", data.PREFILL, "num_samples", "source")
"""The setup of a number on texts."""
ASKED = ("num_samples", "num_fewshot", "seq_len", data.PREFILL)
"""Beside model and task, the conditions that runs share which were asked the same questions."""
KEPT = r"^(?P<name>.+) with (?P<kept>\d+) tokens$"
"""In labels: the tokens kept."""
WITH_PERCENT = r"^(?P<label>.+), (?P<percent>\d+) %(?:, .+)?$"
BY_LAYER = "layer, "
"""In the table of errors by layer: a label with its budget, and what stands before a text's
name."""
SHOWN_PERCENT = 10
"""Of its budgets, a method is shown by layer at the nearest to this one."""
MAX_TICKS = 6


def axis(panel: pd.DataFrame) -> str:
    """The words for the axis of a panel of one metric."""
    metric: str = panel.metric.iloc[0]
    return AXES.get(metric, METRICS[metric].heading)


# By budget


def fig11(tasks: pd.DataFrame, texts: pd.DataFrame) -> Figure | None:
    """Accuracy by budget, one line per method, a panel per model, task and number of questions.

    Then KL to the full cache and top-1 agreement on texts, from the same table and from
    `perplexity.csv`, where a method has several budgets there, which make a line.
    """
    setups = texts[texts.metric != "acc"].groupby(list(TEXTS), dropna=False)
    texts = setups.filter(lambda rows: rows.groupby("label")["budget"].nunique().max() > 1)
    rows = data.of_metrics(pd.concat([tasks, texts]), ["acc", "kl_nats", "top1_agreement"])
    codecs = style.joined(rows.label)

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        metric, task = panel.metric.iloc[0], panel.task.iloc[0]
        axes.set(xlabel=style.BUDGET_AXIS, ylabel=axis(panel))
        if metric == "kl_nats":  # the full cache's is 0
            style.log(axes, "y")
        else:
            style.full_lines(axes, panel[panel.label == style.FULL])
        if task in CHANCE:
            style.chance_line(axes, CHANCE[task])
        style.budget_lines(axes, panel, codecs=codecs)

    setup = ("model", "task", "metric", *ASKED, "source")
    return style.draw_rows(rows, setup, draw, note=style.error_note(rows))


def fig19(table: pd.DataFrame) -> Figure | None:
    """Perplexity by budget, one line per method, and by length with a fixed number of tokens kept.

    The latter are the runs whose label ends in "with N tokens". The full cache is that of the runs
    themselves, on the same windows.
    """
    rows = whole_tasks(table)
    rows = rows.join(rows.label.str.extract(KEPT))
    rows = rows[rows.metric.isin(["perplexity", "perplexity_full"])]
    rows = rows.assign(length=rows.seq_len, windows=rows.num_samples)
    by_length = rows.kept.notna()
    differing = ["seq_len", "num_samples"]  # within a panel of lengths
    rows[differing] = rows[differing].mask(by_length)
    rows = rows.assign(prefill_len=rows.prefill_len.mask(by_length, ""))
    codecs = style.joined(rows.label[~by_length])

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        full, under = (panel[panel.metric == f"perplexity{end}"] for end in ("_full", ""))
        if panel.kept.notna().all():
            _draw_lengths(axes, full, under)
        else:
            style.full_lines(axes, full)
            style.budget_lines(axes, under, codecs=codecs)
            axes.set_xlabel(style.BUDGET_AXIS)
        style.log(axes, "y", panel.value)
        axes.set_ylabel("perplexity")

    note = style.error_note(rows)
    if rows.windows[by_length].eq(1).any():
        note += " (n = 1: a single window has none)"
    in_order = rows.sort_values("kept", key=pd.Series.notna, kind="stable")
    return style.draw_rows(in_order, (*TEXTS, "kept"), draw, note=note)


def _draw_lengths(axes: Axes, full: pd.DataFrame, under: pd.DataFrame) -> None:
    lines = pd.concat([full.assign(name=style.FULL).drop_duplicates("length"), under])
    style.draw_lines(axes, lines.assign(label=lines.name, x=lines.length, y=lines.value))
    windows = pd.concat([full, under]).groupby("length").windows.max()
    style.log2_x(axes, windows.index)
    ticks = [f"{length:,.0f}\nn = {count:.0f}" for length, count in windows.items()]
    axes.set_xticks(list(windows.index), ticks)
    axes.minorticks_off()
    axes.margins(x=0.1)
    axes.set_xlabel("tokens of the text")


# By a share of the full cache


def index(table: pd.DataFrame) -> Figure | None:
    """What an index on the device costs and gives, by the share that the method keeps there."""
    return _by_share(table, "resident_frac", "index on the device (% of full cache)")


def ablation(table: pd.DataFrame) -> Figure | None:
    """What each change from InfiniGen to InfiniGen2 gives, by the share that is read."""
    return _by_share(table, "budget", style.BUDGET_AXIS, kl_of_any_size=True)


def _by_share(
    table: pd.DataFrame, share: str, words: str, *, kl_of_any_size: bool = False
) -> Figure | None:
    """KL, and accuracy as the mean over the tasks, by a share of the full cache; a line per label.

    The error takes tasks as independent. kl_of_any_size: KL on a logarithmic axis.
    """
    rows = data.of_metrics(whole_tasks(table), ["kl_nats", "acc"])
    points = _means(rows, "run_id")
    points = points.assign(name=points.label, x=100 * points[share], y=points.value)
    looks = style.in_sequence(points.label)

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        style.draw_lines(axes, panel, looks)
        axes.set(ylabel=axis(panel), xlabel=words)
        if kl_of_any_size and panel.metric.iloc[0] == "kl_nats":
            style.log(axes, "y")

    tasks = ", ".join(sorted(set(rows[rows.metric == "acc"].task)))
    note = f"accuracy: mean of {tasks}; {style.error_note(rows)}"
    return style.draw_rows(points, ("model", "source", "metric"), draw, note=note)


def _means(rows: pd.DataFrame, by: str) -> pd.DataFrame:
    """The means over tasks, whose errors are taken as independent, beside what rows share."""

    def stderr(errors: pd.Series) -> float:
        return float((errors**2).sum() ** 0.5 / len(errors))

    keys = ["model", "source", "metric", "label", by]
    mean = {name: (name, "mean") for name in ("value", "budget", "resident_frac")}
    means = rows.groupby(keys, sort=False, as_index=False)
    return means.agg(stderr=("stderr", stderr), own=("own", "any"), **mean)


# By position in the text


def fig12(table: pd.DataFrame) -> Figure | None:
    """Perplexity by chunk of 256 tokens, a line per method and budget."""
    words = "tokens in the cache, in chunks of 256"
    return _by_chunk(table, ["perplexity"], words)


def long_decode(table: pd.DataFrame) -> Figure | None:
    """KL(full || method) along the method's own text, and the full cache's perplexity of that text,
    over the tokens decoded.

    The full cache has no distance from itself.
    """
    table = table[(table.label != style.FULL) | (table.metric != "kl_nats")]
    bars = "bars: one standard error over prompts"
    return _by_chunk(table, ["kl_nats", "text_perplexity"], "decoded token", bars)


def _by_chunk(
    table: pd.DataFrame, metrics: Sequence[str], words: str, bars: str = ""
) -> Figure | None:
    """Metrics of ranges of a text's tokens, each at its middle."""
    rows = data.of_metrics(table.dropna(subset="first"), metrics)
    percent = (100 * rows["budget"]).map(", {:.0f} %".format).astype(str)
    name = rows.label.where(rows.label == style.FULL, rows.label + percent)
    rows = rows.assign(name=name, x=(rows["first"] + rows.stop) / 2, y=rows.value)

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        data.refuse_repeats(panel, ["label", "budget", "first"])
        edges, middles = sorted({*panel["first"], *panel.stop}), sorted(set(panel.x))
        for _, line in panel.groupby(["label", "budget"], dropna=False):
            style.draw_lines(axes, line, at=middles)  # a missing range is a gap
        every = -(-len(edges) // MAX_TICKS)
        axes.set(xticks=edges[::every], xlim=(edges[0], edges[-1]))
        style.log(axes, "y", panel.value)
        axes.set(xlabel=words, ylabel=axis(panel))

    note = f"percentages: budgets; {bars or style.error_note(rows)}"
    return style.draw_rows(rows, (*TEXTS, "metric"), draw, note=note)


# By layer


def attention_error(table: pd.DataFrame) -> Figure | None:
    """Relative error of attention outputs by layer, its mean and its 95th percentile, a line per
    method at one budget.

    The full cache's is 0, and so is that of dense layers: they have no point on this axis.
    """
    parts = table.series.str.extract(WITH_PERCENT)
    text = table.x_name.str.removeprefix(BY_LAYER)
    rows = table.assign(label=parts.label, task=text, name=table.series, y=table.value)
    rows = rows[rows.label.notna() & (rows.value > 0)]
    distance = (parts.percent.astype(float) - SHOWN_PERCENT).abs()[rows.index]
    of_line = [rows[name] for name in ("model", "task", "num_samples", "label")]
    rows = rows[distance == distance.groupby(of_line).transform("min")]

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        style.draw_lines(axes, panel)
        axes.set(xlabel="layer", ylabel=axis(panel))
        style.log(axes, "y")

    setup = ("model", "task", "metric", "num_samples", "source")
    note = "percentages: budgets; bars: one standard error over windows"
    return style.draw_rows(rows, setup, draw, note=note)


# The board, from `board-methods.csv`

BOARD_INCHES = 4.4
"""The width of a panel of the board."""
BUDGET_INCHES = (6.4, 3.6)
SPREAD = 0.08
"""How far the bars of one budget lie from it, as a logarithm."""


def budget(methods: pd.DataFrame) -> Figure | None:
    """KL against the budget, on the shortest windows; None without two budgets.

    A marker stands at its budget, its bar beside it: the 95 % interval of the ratio to the oracle's
    KL, times the oracle's KL.
    """
    rows = _first_board(methods)
    rows = rows[rows.apart == ""]
    rows = rows[rows.num_models == rows.num_models.max()]
    rows = rows[rows.seq_len == rows.seq_len.min()]
    rows = rows[rows.label.isin(style.REGISTRY["budget"]) | rows.own]
    if rows.asked_budget.nunique() < 2:
        return None
    rows = rows.assign(name=rows.label, x=100 * rows.asked_budget, y=rows.kl_nats, stderr=np.nan)
    rows = rows.sort_values("x")
    labels = rows.groupby("label").ratio.min().sort_values().index
    shifts = pd.Series(np.linspace(-SPREAD, SPREAD, len(labels)), labels)

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        style.draw_lines(axes, panel)
        for label, line in panel[panel.ratio_low.notna()].groupby("label"):
            oracles = line.kl_nats / line.ratio
            below = line.kl_nats - oracles * line.ratio_low
            above = oracles * line.ratio_high - line.kl_nats
            beside = line.x * np.exp(shifts[label])  # where a bar hides no other
            like: Any = {"color": style.look(str(label)).color, "fmt": "_", "markersize": 3}
            axes.errorbar(beside, line.y, [below, above], elinewidth=0.8, **like)
        style.log(axes, "x")
        style.log(axes, "y")
        ticks = sorted(set(panel.x))
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set(xlabel=style.BUDGET_AXIS, ylabel=style.KL_AXIS)

    many = "over models, as drawn from many" if rows.num_models.max() > 1 else "over places"
    counts = f"{rows.num_models.max():.0f} models, {rows.num_windows.max():.0f} windows"
    shown = f"{counts} of {rows.seq_len.max():,.0f} tokens: geometric mean"
    bars = f"bars: 95 % interval of the ratio to the oracle's KL, {many}, beside its marker"
    return style.draw_panels([("", rows, draw)], f"{shown}; {bars}", panel_inches=BUDGET_INCHES)


def _first_board(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the first board of the table that have a ratio."""
    return rows[rows.over.isin(rows.over.head(1)) & (rows.ratio > 0)]


def board(methods: pd.DataFrame) -> Figure | None:
    """Each method's KL beside the oracle's: a panel a budget, a line a method, the closest to the
    full cache first.

    A marker is the ratio of its KL to the oracle's, its bar the 95 % interval. Full markers are of
    the shortest windows, hollow ones of longer windows. A cross is a method that is not compared,
    such as one that cannot have the budget; these stand below the others.
    """
    rows = _first_board(methods)
    if rows.empty:
        return None
    points = rows.assign(
        x=rows.ratio,
        bar_low=rows.ratio - rows.ratio_low,
        bar_high=rows.ratio_high - rows.ratio,
        length=rows.seq_len,
        is_apart=rows.apart != "",
    )
    lengths = sorted(set(points.length))

    def draw_budget(axes: Axes, panel: pd.DataFrame) -> None:
        by_label = panel.groupby("label", sort=False)[["is_apart", "ratio"]].min()
        names = by_label.sort_values(["is_apart", "ratio"], ascending=False).index
        axes.axvline(1, color=style.GREY, linewidth=0.8, zorder=0)
        style.draw_names(axes, panel, list(names), lengths)
        axes.set(xlabel="KL / oracle's KL", xscale="log")
        axes.xaxis.set_major_formatter("{x:g}")

    by_budget = points.groupby("asked_budget")
    panels: list[style.Panel] = []
    for _, panel in by_budget:
        panels.append((f"budget {100 * panel.asked_budget.iloc[0]:.0f} %", panel, draw_budget))
    most = points[~points.is_apart] if not points.is_apart.all() else points
    counts = [f"{most.num_models.max():.0f} models"]
    for length, number in most.groupby("length").num_windows.max().items():
        counts.append(f"{number:.0f} windows of {length:,.0f} tokens")
    over = "models, as drawn from many" if most.num_models.max() > 1 else "places of the texts"
    panel_inches = (BOARD_INCHES, style.NAME_INCHES * by_budget.label.nunique().max() + 0.6)
    note = f"{', '.join(counts)}; bars: 95 % interval, over {over}"
    return style.draw_panels(panels, note, panel_inches=panel_inches)


# Long contexts


def long(table: pd.DataFrame) -> Figure | None:
    """KL on texts and right answers on needles at each length, a line per method, the closest on
    top.

    Right answers are the mean over the tasks, whose errors are taken as independent.
    """
    table = whole_tasks(table)
    needles = table[table.metric.str.isdecimal()]
    needles = needles.assign(length=needles.metric.astype(float), metric="acc")
    texts = table[(table.metric == "kl_nats") & (table.value > 0)]
    rows = pd.concat([texts.assign(length=texts.seq_len), _means(needles, "length")])
    data.refuse_repeats(rows, ["model", "source", "metric", "label", "length"])
    rows = rows.assign(x=rows.value, bar_low=rows.stderr, bar_high=rows.stderr, is_apart=False)
    at_longest = rows[rows.metric == "kl_nats"].sort_values("length").groupby("label").x.last()
    by_kl = at_longest.sort_values(ascending=False).index
    labels = list(dict.fromkeys([*by_kl, *rows.label]))
    lengths = sorted(set(rows.length))

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        is_kl = panel.metric.iloc[0] == "kl_nats"
        style.draw_names(axes, panel, labels, lengths)
        axes.set_xlabel(axis(panel) if is_kl else "right answers (%)")
        if is_kl:
            style.log(axes, "x")

    tasks = ", ".join(sorted(set(needles.task)))
    note = f"right answers: mean of {tasks}; bars one standard error"
    return style.draw_rows(rows, ("model", "source", "metric"), draw, note=note)


# RULER


def ruler(table: pd.DataFrame) -> Figure | None:
    """The share of right answers by the prompt's length, a panel per task, and per `prefill` where
    runs differ in it."""
    rows = whole_tasks(table)
    rows = rows[rows.metric.str.isdecimal()]
    prefill = rows.settings.str.extract(r"(?:^|, )prefill=(\w+)", expand=False).fillna("")
    rows = rows.assign(prefill=prefill, group=rows.metric.astype(int))

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        style.bars(axes, panel.sort_values("group"), tick="{:,}".format)
        axes.set(xlabel="tokens of the prompt", ylabel="right answers (%)", ylim=(0, None))

    note = style.error_note(rows)
    methods = rows[rows.label != style.FULL]
    if len(methods):
        note = f"budget {data.budget_range(methods)} %; {note}"
    return style.draw_rows(rows, ("model", "task", "prefill", "source"), draw, note=note)
