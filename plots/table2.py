"""Table 2: perplexity with the KV pool at 100 % and at 80 % of the sequence, by eviction policy, from `table2.csv`.

A panel per model and text: a bar per pool with its error over windows, and dashed the full cache on the same windows.
The paper's numbers (WikiText-2, 2,048 tokens) are hollow: on the bars of the paper's model, each other model of the
paper in a panel of its own.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import bars, data, style

NAME = "InfiniGen"
LABEL = rf"^{NAME}, pool (\d+ %.*)$"
SERIES = {"full_pool": "100 %", "fifo": "80 % fifo", "lru": "80 % lru", "counter": "80 % counter"}
"""The paper's pools, and how a label names them."""
SETUP = ("model", "task", "num_samples", "seq_len", "source")
PAPER = {"task": "wikitext2", "seq_len": 2048}


def draw(tables: data.Tables, name: str) -> Figure | None:
    """The figure; None without `table2.csv`, or where no label names a pool."""
    table = data.whole_texts(tables.accuracy(name))
    rows = table.assign(pool=table.label.str.extract(LABEL, expand=False))
    rows = rows[rows.pool.notna() & rows.metric.isin(["perplexity", "perplexity_full"])]
    if rows.empty:
        return None
    published = _published()
    panels = data.split(rows, SETUP)
    others = [model for model in published.model.unique() if model not in set(rows.model)]
    figure, all_axes = style.new(len(panels.frames) + len(others))
    for axes, title, frame in zip(all_axes, panels.titles, panels.frames, strict=False):
        _draw_ours(axes, frame, published)
        axes.set_title(title or frame.model.iloc[0])
    for axes, model in zip(all_axes[len(panels.frames) :], others, strict=True):
        pools = list(SERIES.values())
        _mark(axes, bars.slots(axes, [NAME], _ticks(pools)), pools, published[published.model == model])
        axes.set_title(f"{model}, published")
    for axes in all_axes:
        axes.margins(y=0.1)
        axes.tick_params(axis="x", labelsize=5.5)  # with the artifact's evictions there are seven
        axes.set(xlabel="KV pool, of the sequence", ylabel="perplexity", ylim=(0, None))
    return style.finish(figure, f"{panels.shared}; {style.error_note(rows)}. Published: WikiText-2, 2,048 tokens")


def _draw_ours(axes: Axes, panel: pd.DataFrame, published: pd.DataFrame) -> None:
    own, full = (panel[panel.metric == metric] for metric in ("perplexity", "perplexity_full"))
    data.refuse_repeats(own, ["label"])
    pools = [pool for pool in dict.fromkeys([*SERIES.values(), *own.pool]) if pool in set(own.pool)]
    places = bars.of_one(axes, own.set_index("pool").loc[pools], name=NAME, groups=_ticks(pools))
    style.full_lines(axes, full)
    if all((panel[name] == value).all() for name, value in PAPER.items()):
        _mark(axes, places, pools, published[published.model.isin(panel.model)])


def _mark(axes: Axes, places: bars.Places, pools: list[str], published: pd.DataFrame) -> None:
    """The paper's numbers on the bars of the same pool."""
    columns = zip(published.series.map(SERIES), published.value, published.kind, strict=True)
    bars.published(axes, places, pools, [data.PublishedPoint(NAME, *cells) for cells in columns])


def _ticks(pools: list[str]) -> list[str]:
    return [pool.replace(" % ", " %\n").replace(" (", "\n(") for pool in pools]


def _published() -> pd.DataFrame:
    rows = data.of_paper("table2")
    return rows[rows.x == PAPER["task"]]
