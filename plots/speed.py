"""Figures of latency tables: 14, 15, 16 and 18, steps from a disk, and tokens/s against the batch.
The paper's numbers (RTX A6000) are hollow markers on panels of its setup, measured, or modelled for
that machine."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.results import columns, metrics
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
DECODE = "decode (the system's colour)"
VALUE: Any = {"ha": "center", "va": "bottom", "fontsize": 6}
"""Of the number above a bar."""
MARKER_POINTS = 3.5
"""Of a number above the paper's marker."""
NEAR = 0.1
"""Share of the axis within which a published value hides the number above a bar."""
TEN = 10
"""Seconds below which a bar's number has a decimal."""
SEGMENTS = {
    "attention_s": (style.BLUE, ""),
    "ffn_s": (style.GREEN, "xx"),
    "prediction_s": (style.ORANGE, "///"),
    "transfer_s": (style.VERMILION, "\\\\\\"),
    "other_s": (style.LIGHT_GREY, ".."),
}
"""Colour and hatch of a segment."""


def fig14(tables: data.Tables, name: str) -> Figure | None:
    """Prefill and decode seconds, stacked, one bar per label."""

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        points = data.published("fig14", "total_latency", panel, PAPER["fig14"])
        found = _stacked_times(axes, panel, points, in_legend=False)
        style.name_bars(axes, (x[0] for x in found.values()), found)
        axes.bar([], [], label=DECODE, color=style.GREY, **style.BAR)
        totals = data.pivot(panel, "batch_size", "total_s")
        marked = points[points.series.isin(found)].set_index("series").value
        near = NEAR * max([totals.max(axis=None), *marked])
        for label, x in found.items():
            seconds = totals[label].iloc[0]
            if not pd.isna(seconds):
                words = f"{seconds:,.1f}" if seconds < TEN else f"{seconds:,.0f}"
                top, rise = seconds, 1.5
                if abs(marked.get(label, math.inf) - seconds) < near:  # it would hide the number
                    top, rise = max(seconds, marked[label]), MARKER_POINTS
                axes.annotate(words, (x[0], top), (0, rise), textcoords="offset points", **VALUE)

    return _draw_timed(_timed(tables, name), data.TIMED_SETUP, draw)


def fig15(tables: data.Tables, name: str) -> Figure | None:
    """Prefill and decode seconds, stacked, by batch size.

    The paper's rates are drawn as the total that they stand for, batch * 128 / (tokens/s).
    """

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        rates = data.published("fig15", "tokens_per_s", panel, PAPER["fig15"])
        _stacked_times(axes, panel, rates.assign(value=rates.x * 128 / rates.value))
        axes.set_xlabel("batch size (sequences)")

    setup = ("model", "platform", "source", "prompt_len", "gen_len")
    return _draw_timed(_timed(tables, name), setup, draw)


def fig16a(tables: data.Tables, name: str) -> Figure | None:
    """Speedup over offload by total length."""
    table = _timed(tables, name).sort_values("total_len", kind="stable")
    setup = ("model", "platform", "source", "batch_size", "gen_len")
    words = "prompt + generated tokens"
    return _draw_speedups("fig16a", table, setup, index="total_len", words=words, group="{:,.0f}")


def fig16b(tables: data.Tables, name: str) -> Figure | None:
    """Speedup over offload by model.

    In the paper 30 % of OPT-30B's weights are in host memory, which the cost model takes and a
    timed run must have been given.
    """
    table = _timed(tables, name)
    billions = table.model.str.extract(r"([\d.]+)b\b", expand=False).astype(float)
    setup = ("platform", "source", "batch_size", "prompt_len", "gen_len")
    table = table.iloc[billions.argsort(kind="stable")]
    return _draw_speedups("fig16b", table, setup, index="model", words="model", group="{}")


def fig18(tables: data.Tables, name: str) -> Figure | None:
    """Milliseconds of one transformer block in one decode step, by segment.

    Transfer is the wait for the link that no compute hides, so the segments sum to the block.
    """

    def draw(axes: Axes, panel: pd.DataFrame) -> None:
        data.refuse_repeats(panel, ["label"])
        rows = panel.set_index("label").loc[style.ordered(panel.label)]
        bottom = pd.Series(0.0, rows.index)
        for segment in metrics.SEGMENTS:
            seconds = rows[segment.name].fillna(0)  # of a segment that a method lacks
            height = segment.factor * seconds
            color, hatch = SEGMENTS[segment.name]
            look: Any = {"color": color, "hatch": hatch, **style.BAR}
            words = segment.words
            axes.bar(range(len(rows)), height, 0.7, bottom=bottom, label=words, **look)
            bottom += height
        style.name_bars(axes, range(len(rows)), rows.index)
        axes.grid(visible=False, axis="x")
        axes.set_ylabel("time per block and step (ms)")
        found = {label: np.array([index]) for index, label in enumerate(rows.index)}
        points = data.published("fig18", "block_latency", panel, PAPER["fig18"])
        style.mark_published(axes, found, [PAPER["fig18"]["batch_size"]], points)
        # An empty segment on top of the tallest stack would end the axis there.
        axes.use_sticky_edges = False
        axes.set_ylim(bottom=0)

    note = "transfer: the wait that compute does not hide"
    return _draw_timed(_timed(tables, name), data.TIMED_SETUP, draw, note=note)


def _timed(tables: data.Tables, name: str) -> pd.DataFrame:
    table = tables.read(name, columns.LATENCY)
    return table.assign(total_len=table.prompt_len + table.gen_len)


def _draw_timed(
    rows: pd.DataFrame, setup: Sequence[str], draw: style.DrawPanel, *, note: str = ""
) -> Figure | None:
    """A panel per setup.

    Where a label takes over `FAR` times as long as offload, a second panel shows offload and the
    labels that are never slower, whose bars the first shows too small.
    """

    def panels_of(title: str, frame: pd.DataFrame) -> Iterator[style.Panel]:
        longest = frame.groupby("label").total_s.max()
        yield title, frame, draw
        if longest.max() > FAR * longest.get(BASE, float("nan")):
            near = frame[frame.label.map(longest) <= longest[BASE]]
            words = f"{title}, offload and faster" if title else "offload and faster"
            yield words, near, draw

    return style.draw_parts(rows, setup, panels_of, note=note)


def _stacked_times(
    axes: Axes, panel: pd.DataFrame, points: pd.DataFrame, *, in_legend: bool = True
) -> style.BarCentres:
    """Prefill seconds, light, below decode seconds, a group of bars per batch size.

    The paper's totals stand on the bars.
    """
    prefill = data.pivot(panel, "batch_size", "ttft_s")
    decode = data.pivot(panel, "batch_size", "decode_s")
    batches = list(prefill.index)
    groups = [f"{batch:.0f}" for batch in batches]
    found, width = style.place_bars(axes, style.ordered(prefill.columns), groups)
    for label, x in found.items():
        color, _, _, hatch = style.look(label)
        look: Any = {"color": color, "hatch": hatch, **style.BAR}
        words = label if in_legend else f"_{label}"
        axes.bar(x, prefill[label], width, **style.PREFILL_BAR)
        axes.bar(x, decode[label], width, bottom=prefill[label], label=words, **look)
    axes.set_ylabel("prefill + decode (s)")
    style.mark_published(axes, found, batches, points)
    return found


def _draw_speedups(
    figure: str, table: pd.DataFrame, setup: Sequence[str], *, index: str, words: str, group: str
) -> Figure | None:
    """Offload's seconds over the label's in the same setup; None without rows but offload's.

    Of prefill and decode together, as in the paper, and of decode alone. Without offload's row
    there is no speedup.
    """

    def draw(axes: Axes, panel: pd.DataFrame, time: str) -> None:
        seconds = data.pivot(panel, index, time).loc[panel[index].unique()]
        offload = seconds.get(BASE, pd.Series(float("nan"), seconds.index))
        speedup = seconds.rdiv(offload, axis=0).drop(columns=BASE, errors="ignore")
        groups = list(map(group.format, speedup.index))
        found = style.grouped(axes, speedup, groups=groups)
        axes.axhline(1, color=style.GREY, linewidth=0.8)
        axes.set(xlabel=words, ylabel=TIMES[time])
        timed = panel[(panel.model == "opt-30b") & (panel.source != "modelled")]
        has_papers_share = (timed.weights_on_device - 0.7).abs() < 0.01
        as_there = figure == "fig16a" or has_papers_share.all()
        if time == "total_s" and as_there:
            points = data.published(figure, "speedup_over_offload", panel, PAPER[figure])
            style.mark_published(axes, found, list(speedup.index), points)

    def panels_of(title: str, frame: pd.DataFrame) -> Iterator[style.Panel]:
        for time in TIMES if (frame.label != BASE).any() else ():
            yield title, frame, partial(draw, time=time)

    return style.draw_parts(table, setup, panels_of)


# From a disk, by the context

LIKE = {
    "disk": "offload",
    "h2o": "offload+h2o",
    "int4": "offload+int4",
    "quest": "Quest",
    "retroinfer": "RetroInfer",
}
"""By what follows `disk+`, the label of other figures that has the look; else it is the same."""


def disk(tables: data.Tables, name: str) -> Figure | None:
    """Two panels a model and batch: the median step by the context, with the step in memory as a
    line, and the bytes that a step reads."""

    def panels_of(title: str, rows: pd.DataFrame) -> list[style.Panel]:
        return [(title, rows, _times), (title, rows[rows.label != IDEAL], _bytes)]

    words = "median of the timed steps; ideal: the cache in memory"
    note = f"{words}; a disk reads whole blocks of 4 KiB"
    table = tables.read(name, columns.LATENCY)
    return style.draw_parts(table, ("model", "batch_size"), panels_of, note=note)


def _times(axes: Axes, panel: pd.DataFrame) -> None:
    milliseconds = 1e3 * data.pivot(panel, "prompt_len", "tpot_p50_s")
    in_memory = milliseconds.pop(IDEAL) if IDEAL in milliseconds else None
    _bars(axes, milliseconds)
    if in_memory is not None:
        line: Any = {"color": style.BLACK, "linestyle": "--", "linewidth": 1.4}
        for place, value in enumerate(in_memory):
            half = style.FILLED / 2
            axes.hlines(value, place - half, place + half, label=IDEAL, **line)
    axes.set_ylabel("time of a step, median (ms)")


def _bytes(axes: Axes, panel: pd.DataFrame) -> None:
    a_step = panel.assign(mb=panel.disk_read_bytes / (panel.gen_len - 1) / 1e6)
    _bars(axes, data.pivot(a_step, "prompt_len", "mb"))
    axes.set_ylabel("read from the disk in a step (MB)")


def _bars(axes: Axes, values: pd.DataFrame) -> None:
    groups = [f"{length:,.0f}" for length in values.index]
    found, width = style.place_bars(axes, style.ordered(values.columns), groups)
    for label, x in found.items():
        name = label.removeprefix("disk+")
        like = style.look(LIKE.get(name, name))
        looks: Any = {"color": like.color, "hatch": like.hatch, **style.BAR}
        axes.bar(x, values[label], width, label=label, **looks)
    axes.set_xlabel("tokens of the prompt")


# Against the batch, and where memory ends

WALL: Any = {"marker": "|", "markersize": 13, "markeredgewidth": 2.0, "clip_on": False}
MEMORY_NOTE = (
    "vertical bar: memory ends here; ring: first batch above the best rate of the full cache on "
    "the device (ideal, dotted line); cross: not one sequence fits"
)
POWERS = tuple(4**power for power in range(8))
"""Batches with a tick."""
MACHINE = ("model", "platform", "source", "memory_bytes", "context")


def capacity(tables: data.Tables, name: str) -> Figure | None:
    """Tokens/s against the batch, a panel a context."""
    return _draw_capacity(tables.read(name, columns.CAPACITY))


def _draw_capacity(table: pd.DataFrame) -> Figure | None:
    sizes = sorted({memory / metrics.GIB for memory in table.memory_bytes})
    memory = "device memory " + ", ".join(f"{gib:.4g}" for gib in sizes) + " GiB"
    return style.draw_rows(table, MACHINE, _draw_batches, note=f"{memory}; {MEMORY_NOTE}")


def _draw_batches(axes: Axes, panel: pd.DataFrame) -> None:
    base = panel[(panel.label == IDEAL) & (panel.batch_size > 0)]
    best_of_base = base.decode_tokens_per_s.max() if len(base) else 0.0
    for label in style.ordered(panel.label):
        rows = panel[panel.label == label].sort_values("batch_size")
        color, marker, line, _ = style.look(label)
        fitting = rows[rows.batch_size > 0]
        if fitting.empty:
            look: Any = {"color": color, "marker": "x", "linestyle": line, "markersize": 7}
            axes.plot([1], [best_of_base or 1], label=label, **look)
            continue
        x, y = fitting.batch_size, fitting.decode_tokens_per_s
        axes.plot(x, y, label=label, color=color, marker=marker, linestyle=line)
        if fitting.iloc[-1].wall != "max_batch":
            axes.plot([x.iloc[-1]], [y.iloc[-1]], color=color, **WALL)
        winning = fitting[y > best_of_base]
        if label != IDEAL and len(winning) and best_of_base:
            first = winning.iloc[0]
            ring = Line2D(
                [first.batch_size],
                [first.decode_tokens_per_s],
                color=color,
                marker="o",
                markersize=11,
                fillstyle="none",
            )
            axes.add_line(ring)
    if best_of_base:
        axes.axhline(best_of_base, color=style.GREY, linewidth=0.8, linestyle=":")
    style.log2_x(axes, [power for power in POWERS if power <= 2 * panel.batch_size.max()])
    style.log_y(axes)
    axes.set(xlabel="batch size (sequences)", ylabel="decode tokens/s of the batch")
