"""Figures of latency tables: 14, 15, 16 and 18, steps from a disk, and tokens/s against the batch.
The paper's numbers (RTX A6000) are hollow markers on panels of its setup, measured, or modelled for
that machine."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.results import metrics
from plots import data, style

BASE = "offload"
IDEAL = "ideal"
"""The full cache on the device."""
FAR = 2
"""A label that takes so many times as long as offload hides what is fast."""
PAPER: Mapping[str, Mapping[str, Any]] = {
    "fig14": {"model": "opt-13b", "batch_size": 20, "prompt_len": 1920, "gen_len": 128},
    "fig15": {"model": "opt-13b", "prompt_len": 1920, "gen_len": 128},
    "fig16a": {"model": "opt-13b", "batch_size": 8, "gen_len": 128},
    "fig16b": {"batch_size": 4, "prompt_len": 1920, "gen_len": 128},
    "fig18": {"model": "opt-13b", "batch_size": 8, "total_len": 2048},
}
"""The paper's setup of each figure."""
TIMES = {
    "total_s": "speedup over offload,\nprefill + decode (x)",
    "decode_s": "speedup over offload,\ndecode alone (x)",
}
NEAR = 0.1
"""Share of the axis within which a published value hides the number above a bar."""
SEGMENTS = {
    "attention_s": (style.BLUE, ""),
    "ffn_s": (style.GREEN, "xx"),
    "prediction_s": (style.ORANGE, "///"),
    "transfer_s": (style.VERMILION, "\\\\\\"),
    "other_s": (style.LIGHT_GREY, ".."),
}
"""Colour and hatch of a segment."""


def fig14(table: pd.DataFrame) -> Figure | None:
    """Prefill and decode seconds, stacked, one bar per label."""

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        points = data.published("fig14", "total_latency", panel, PAPER["fig14"])
        centres = _stacked_times(axes, panel, label="_decode")
        style.mark_published(axes, centres, points)
        tops = centres.iloc[0]
        style.name_bars(axes, tops, tops.index)
        axes.bar(0, 0, 0, label="decode (the system's colour)", color=style.GREY)
        marked = points[points.series.isin(tops.index)].set_index("series").value
        near = NEAR * max([panel.total_s.max(), *marked])
        for _, row in panel.dropna(subset="total_s").iterrows():
            words = f"{row.total_s:,.1f}" if row.total_s < 10 else f"{row.total_s:,.0f}"
            top, above = row.total_s, (0, 1.5)
            if abs(marked.get(row.label, math.inf) - top) < near:  # it would hide the number
                top, above = max(top, marked[row.label]), (0, 3.5)
            place: Any = {"xytext": above, "textcoords": "offset points", "fontsize": 6}
            axes.annotate(words, (tops[row.label], top), **place, ha="center", va="bottom")

    return _draw_timed(table, data.TIMED_SETUP, draw)


def fig15(table: pd.DataFrame) -> Figure | None:
    """Prefill and decode seconds, stacked, by batch size.

    The paper's rates are drawn as the total that they stand for, batch * 128 / (tokens/s).
    """

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        rates = data.published("fig15", "tokens_per_s", panel, PAPER["fig15"])
        seconds = rates.assign(value=rates.x * 128 / rates.value)
        style.mark_published(axes, _stacked_times(axes, panel), seconds)
        axes.set_xlabel("batch size (sequences)")

    return _draw_timed(table, ("model", "platform", "source", "prompt_len", "gen_len"), draw)


def fig16a(table: pd.DataFrame) -> Figure | None:
    """Speedup over offload by total length."""
    table = table.assign(group=table.prompt_len + table.gen_len)
    table = table.sort_values("group", kind="stable")
    setup = ("model", "platform", "source", "batch_size", "gen_len")
    return _draw_speedups("fig16a", table, setup, "prompt + generated tokens", "{:,.0f}")


def fig16b(table: pd.DataFrame) -> Figure | None:
    """Speedup over offload by model.

    In the paper 30 % of OPT-30B's weights are in host memory, which the cost model takes and a
    timed run must have been given.
    """
    billions = table.model.str.extract(r"([\d.]+)b\b", expand=False).astype(float)
    table = table.iloc[billions.argsort(kind="stable")]
    setup = ("platform", "source", "batch_size", "prompt_len", "gen_len")
    return _draw_speedups("fig16b", table.assign(group=table.model), setup, "model", "{}")


def fig18(table: pd.DataFrame) -> Figure | None:
    """Milliseconds of one transformer block in one decode step, by segment.

    Transfer is the wait for the link that no compute hides, so the segments sum to the block.
    """

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        data.refuse_repeats(panel, ["label"])
        rows = panel.set_index("label").loc[style.ordered(panel.label)]
        bottom = pd.Series(0.0, rows.index)
        for segment in metrics.SEGMENTS:
            height = segment.factor * rows[segment.name].fillna(0)  # of one that a method lacks
            color, hatch = SEGMENTS[segment.name]
            look: Any = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
            axes.bar(range(len(rows)), height, 0.7, bottom=bottom, label=segment.words, **look)
            bottom += height
        style.name_bars(axes, range(len(rows)), rows.index)
        axes.grid(visible=False, axis="x")
        axes.set_ylabel("time per block and step (ms)")
        centres = pd.DataFrame(dict(zip(rows.index, range(len(rows)), strict=True)), [8])
        points = data.published("fig18", "block_latency", panel, PAPER["fig18"])
        style.mark_published(axes, centres, points)
        # An empty segment on top of the tallest stack would end the axis there.
        axes.use_sticky_edges = False
        axes.set_ylim(bottom=0)

    table = table.assign(total_len=table.prompt_len + table.gen_len)
    note = "transfer: the wait that compute does not hide"
    return _draw_timed(table, data.TIMED_SETUP, draw, note=note)


def _draw_timed(
    rows: pd.DataFrame, setup: Sequence[str], draw: style.DrawPanel, *, note: str = ""
) -> Figure | None:
    """A panel per setup.

    Where a label takes over `FAR` times as long as offload, a second panel shows offload and the
    labels that are never slower, whose bars the first shows too small.
    """
    panels = []
    for _, panel in rows.groupby(list(setup), sort=False, dropna=False):
        panels.append(panel.assign(zoom=""))
        longest = panel.groupby("label").total_s.max()
        if longest.max() > FAR * longest.get(BASE, math.nan):
            near = panel[panel.label.map(longest) <= longest[BASE]]
            panels.append(near.assign(zoom="offload and faster"))
    return style.draw_rows(pd.concat(panels), (*setup, "zoom"), draw, note=note)


def _stacked_times(axes: Axes, panel: pd.DataFrame, **other: Any) -> pd.DataFrame:
    """Prefill seconds, light, below decode seconds, a group of bars per batch size.

    other: settings of the upper bars. Returns the centres of the bars.
    """
    rows = panel.sort_values("batch_size").assign(group=panel.batch_size)
    upper = rows.assign(value=rows.decode_s, bottom=rows.ttft_s)
    style.bars(axes, rows.assign(value=rows.ttft_s), **style.PREFILL_BAR)
    axes.set_ylabel("prefill + decode (s)")
    return style.bars(axes, upper, tick="{:.0f}".format, linewidth=0, **other)


def _draw_speedups(
    figure: str, table: pd.DataFrame, setup: Sequence[str], words: str, tick: str
) -> Figure | None:
    """Offload's seconds over the label's in the same setup and group, of prefill and decode
    together, as in the paper, and of decode alone; None without rows but offload's."""

    def draw(axes: Axes, panel: pd.DataFrame, time: str) -> None:
        data.refuse_repeats(panel, ["group", "label"])
        base = panel.group.map(panel[panel.label == BASE].set_index("group")[time])
        speedups = panel.assign(value=base / panel[time])
        centres = style.bars(axes, speedups[speedups.label != BASE], tick=tick.format)
        axes.axhline(1, color=style.GREY, linewidth=0.8)
        axes.set(xlabel=words, ylabel=TIMES[time])
        timed = panel[(panel.model == "opt-30b") & (panel.source != "modelled")]
        has_papers_share = (timed.weights_on_device - 0.7).abs() < 0.01
        as_there = figure == "fig16a" or has_papers_share.all()
        if time == "total_s" and as_there:
            points = data.published(figure, "speedup_over_offload", panel, PAPER[figure])
            style.mark_published(axes, centres, points)

    table = table.groupby(list(setup)).filter(lambda rows: (rows.label != BASE).any())
    return style.draw_rows(table, setup, *(partial(draw, time=time) for time in TIMES))


# From a disk, by the context


def disk(table: pd.DataFrame) -> Figure | None:
    """Two panels a model and batch: the median step by the context, with the step in memory as a
    line, and the bytes that a step reads."""
    table = table.sort_values("prompt_len").assign(
        group=table.prompt_len,
        step_ms=1e3 * table.tpot_p50_s,
        read_mb=table.disk_read_bytes / (table.gen_len - 1) / 1e6,
    )

    def draw(axes: Axes, panel: pd.DataFrame, column: str, words: str) -> None:
        rows = panel.assign(value=panel[column]).dropna(subset="value")
        centres = style.bars(axes, rows[rows.label != IDEAL], tick="{:,.0f}".format)
        ideal = rows[rows.label == IDEAL]
        if len(ideal):
            places, half = centres.index.get_indexer(pd.Index(ideal.group)), style.FILLED / 2
            line: Any = {"color": style.BLACK, "linestyle": "--", "linewidth": 1.4}
            axes.hlines(ideal.value, places - half, places + half, label=IDEAL, **line)
        axes.set(xlabel="tokens of the prompt", ylabel=words)

    times = partial(draw, column="step_ms", words="time of a step, median (ms)")
    reads = partial(draw, column="read_mb", words="read from the disk in a step (MB)")
    words = "median of the timed steps; ideal: the cache in memory"
    note = f"{words}; a disk reads whole blocks of 4 KiB"
    return style.draw_rows(table, ("model", "batch_size"), times, reads, note=note)


# Against the batch, and where memory ends

WALL: Any = {"marker": "|", "markersize": 13, "markeredgewidth": 2.0, "clip_on": False}
RING: Any = {"marker": "o", "markersize": 11, "fillstyle": "none"}
MEMORY_NOTE = (
    "vertical bar: memory ends here; ring: first batch above the best rate of the full cache on "
    "the device (ideal, dotted line); cross: not one sequence fits"
)
POWERS = tuple(4**power for power in range(8))
"""Batches with a tick."""
MACHINE = ("model", "platform", "source", "memory_bytes", "context")


def capacity(table: pd.DataFrame) -> Figure | None:
    """Tokens/s against the batch, a panel a context."""
    sizes = sorted(set(table.memory_bytes / metrics.GIB))
    memory = "device memory " + ", ".join(f"{gib:.4g}" for gib in sizes) + " GiB"
    return style.draw_rows(table, MACHINE, _draw_batches, note=f"{memory}; {MEMORY_NOTE}")


def _draw_batches(axes: Axes, panel: pd.DataFrame) -> None:
    fitting = panel[panel.batch_size > 0]
    best_of_base = fitting[fitting.label == IDEAL].decode_tokens_per_s.max()  # NaN for none
    for label in style.ordered(panel.label):
        rows = fitting[fitting.label == label].sort_values("batch_size")
        look = style.look(label)
        if rows.empty:
            cross = look.of_line | {"marker": "x", "markersize": 7, "label": label}
            axes.plot([1], [1 if math.isnan(best_of_base) else best_of_base], **cross)
            continue
        rates = rows.set_index("batch_size").decode_tokens_per_s
        axes.plot(rates, label=label, **look.of_line)
        if rows.wall.iloc[-1] != "max_batch":
            axes.plot(rates.tail(1), color=look.color, **WALL)
        if label != IDEAL:
            axes.plot(rates[rates > best_of_base].head(1), color=look.color, **RING)
    if not math.isnan(best_of_base):
        axes.axhline(best_of_base, color=style.GREY, linewidth=0.8, linestyle=":")
    style.log2_x(axes, [power for power in POWERS if power <= 2 * panel.batch_size.max()])
    style.log(axes, "y")
    axes.set(xlabel="batch size (sequences)", ylabel="decode tokens/s of the batch")
