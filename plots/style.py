"""How all figures look: one colour, marker, line and hatch per label, so that black-and-white print still tells
them apart.

Colours: Okabe and Ito's palette, and for labels that are not listed four of Paul Tol's; both are safe for the common
kinds of colour blindness.
"""

import re
import textwrap
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import matplotlib as mpl
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from plots.data import Panels, split

PANEL_INCHES = (3.4, 2.5)  # one column of a two-column page
LEGEND_INCHES = 1.7
MARK_INCHES, LETTER_INCHES = 0.5, 0.05
"""Of an entry of a legend: what it takes without its name, and for each letter of it."""
ROOM_ROWS, ROW_INCHES = 4, 0.15
"""Rows of a legend that a figure has room for; what each further one adds to its height."""
WIDE = 10
NOTE_LETTERS_PER_INCH, TICK_LETTERS = 22, 24

RC: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 4.5,
    "hatch.linewidth": 0.5,
    "pdf.fonttype": 42,
    "text.parse_math": False,  # a dollar in a label is a dollar
}


class Look(NamedTuple):
    """A label's fixed appearance."""

    color: str
    marker: str
    line: str
    hatch: str


BLACK, BLUE, SKY, GREEN = "#000000", "#0072B2", "#56B4E9", "#009E73"
VERMILION, PURPLE, ORANGE, YELLOW = "#D55E00", "#CC79A7", "#E69F00", "#F0E442"
GREY, LIGHT_GREY = "#777777", "#BBBBBB"
WINE, INDIGO, TEAL, OLIVE = "#882255", "#332288", "#44AA99", "#999933"

FULL, QUANTIZED, CHANCE, PREFILL = "Full cache", "INT8/4/2/1", "chance", "prefill (light)"
OF_PAPER = "published (RTX A6000)"
LOOKS = {
    FULL: Look(BLACK, "", "--", ""),
    "Oracle": Look(GREEN, "D", "-.", "xx"),
    "InfiniGen": Look(BLUE, "o", "-", ""),
    "InfiniGen without skewing": Look(SKY, "p", ":", "///"),
    "H2O": Look(VERMILION, "s", "--", "\\\\\\"),
    "Streaming": Look(PURPLE, "^", ":", ".."),
    QUANTIZED: Look(ORANGE, "v", "-", "--"),
    "INT8": Look(ORANGE, "v", "-", "--"),
    "INT4": Look(ORANGE, "<", "-.", "||"),
    "INT2": Look(ORANGE, ">", ":", "++"),
    "INT1": Look(ORANGE, "d", "--", "oo"),
    "ideal": Look(GREEN, "*", "-.", "xx"),
    "uvm": Look(BLACK, "1", ":", "oo"),
    "uvm+h2o": Look(PURPLE, "^", "-", "++"),
    "offload": Look(GREY, "X", "--", ".."),
    "offload-pageable": Look(LIGHT_GREY, "P", ":", "oo"),
    "offload+int4": Look(ORANGE, "v", "-", "--"),
    "offload+h2o": Look(VERMILION, "s", "--", "\\\\\\"),
    "infinigen": Look(BLUE, "o", "-", ""),
    "infinigen+reuse": Look(SKY, "p", ":", "///"),
    "infinigen+int4": Look(YELLOW, "h", "-.", "++"),
    "accuracy": Look(BLUE, "o", "-", ""),
    "latency": Look(VERMILION, "s", "--", "\\\\\\"),
}
OTHERS = [
    Look(color, marker, line, hatch)
    for marker, line, hatch in (("P", "-", "*"), ("X", "--", "O"), ("h", "-.", "|||"), ("8", ":", "---"))
    for color in (WINE, TEAL, INDIGO, OLIVE)
]
_given: dict[str, Look] = {}
"""Those of `OTHERS` that labels have, for as long as the figures of one folder are drawn."""


def look(label: str) -> Look:
    """The label's appearance, the same in all figures that are drawn together. One that is not listed has one by its
    spelling, or the next that no other label has."""
    if label in LOOKS:
        return LOOKS[label]
    if label not in _given:
        first = zlib.crc32(label.encode()) % len(OTHERS)
        in_turn = [*OTHERS[first:], *OTHERS[:first]]
        _given[label] = next((each for each in in_turn if each not in _given.values()), in_turn[0])
    return _given[label]


def ordered(labels: Iterable[str]) -> list[str]:
    """Distinct labels in the order of legends: listed ones first, then the others as they come, markers last.

    What follows a comma, a size for example, plays no part.
    """
    known = [*LOOKS, "", PREFILL, CHANCE, OF_PAPER]
    rank = {label: index for index, label in enumerate(known)}
    return sorted(dict.fromkeys(labels), key=lambda label: rank.get(label.partition(",")[0], rank[""]))


def line_of(label: str) -> str:
    """The line a label belongs to where size is an axis: the bit widths form one, any other label its own."""
    return QUANTIZED if re.fullmatch(r"INT[1248]", label) else label


def wrapped(labels: Iterable[str]) -> list[str]:
    """Labels that stand below an axis, the long ones in several lines."""
    return [textwrap.fill(label, TICK_LETTERS) for label in labels]


def applied() -> AbstractContextManager[None]:
    """The settings above, for the time of drawing and saving the figures of one folder."""
    _given.clear()
    return mpl.rc_context(RC)


def new(num_panels: int, *, panel_inches: tuple[float, float] = PANEL_INCHES) -> tuple[Figure, list[Axes]]:
    """A figure of at least one panel, at most three a row, with room above for the legend."""
    columns = 2 if num_panels == 4 else min(num_panels, 3)
    rows = -(-num_panels // columns)
    width, height = panel_inches
    figure = Figure(figsize=(columns * width, rows * height + 0.6), layout="constrained")
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(num_panels)]
    return figure, axes


def draw_rows(
    rows: pd.DataFrame, setup: Sequence[str], draw: Callable[[Axes, pd.DataFrame], None], *, note: str = ""
) -> Figure | None:
    """A figure with a panel per setup of the rows; None without rows."""
    return None if rows.empty else draw_panels(split(rows, setup), draw, note=note)


def draw_panels(panels: Panels, draw: Callable[[Axes, pd.DataFrame], None], *, note: str = "") -> Figure:
    """A figure with each panel drawn and titled; below it what the panels share, then `note`."""
    figure, all_axes = new(len(panels.frames))
    for axes, title, frame in zip(all_axes, panels.titles, panels.frames, strict=True):
        draw(axes, frame)
        axes.set_title(title)
    return finish(figure, "; ".join(filter(None, [panels.shared, note])))


def error_line(axes: Axes, x: pd.Series, y: pd.Series, stderr: pd.Series | None, *, name: str, like: str) -> None:
    """A line with markers and error bars of one standard error, broken where `y` is NaN."""
    color, marker, line, _ = look(like)
    axes.errorbar(x, y, yerr=stderr, label=name, color=color, marker=marker, linestyle=line, capsize=2, elinewidth=0.8)


def size_lines(axes: Axes, rows: pd.DataFrame, factor: float = 1) -> None:
    """A line per method, `factor` times the value by the percentage of the full cache that it reads; the full cache,
    which has no size to vary, is left out."""
    methods = rows[rows.label != FULL]
    names = methods.label.map(line_of)
    for name in ordered(names):
        line = methods[names == name].sort_values("size")
        error_line(axes, 100 * line["size"], factor * line.value, factor * line.stderr, name=name, like=name)
    axes.set_xlim(left=0)


def log_y_where_wide(axes: Axes, values: pd.Series) -> None:
    """A logarithmic y axis for values of which the largest is over `WIDE` times the smallest."""
    if values.max() > WIDE * values.min():
        log_y(axes)


def log_y(axes: Axes) -> None:
    """A logarithmic y axis with plain numbers at 1, 2 and 5."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def full_line(axes: Axes, value: float, stderr: float) -> None:
    """The full cache: a dashed line over the whole width, in a band of one standard error where it has one."""
    color, _, line, _ = look(FULL)
    axes.axhline(value, color=color, linestyle=line, linewidth=1, label=FULL)
    if not pd.isna(stderr):
        axes.axhspan(value - stderr, value + stderr, color=color, alpha=0.08, linewidth=0)


def full_lines(axes: Axes, rows: pd.DataFrame, factor: float = 1) -> None:
    """A `full_line` for each distinct value of `rows`, `factor` times it."""
    for value, stderr in rows[["value", "stderr"]].drop_duplicates().to_numpy():
        full_line(axes, factor * value, factor * stderr)


def error_note(rows: pd.DataFrame) -> str:
    """What the error bars of `rows` are. KL and agreement compare with the full cache by themselves."""
    values = rows[(rows.label != FULL) & ~rows.metric.isin(["perplexity_full", "kl_nats", "top1_agreement"])]
    paired = values.difference.notna()
    if not paired.any():
        return "bars: one standard error"
    return "bars: standard error of the difference to the full cache" + ("" if paired.all() else ", else of the value")


def chance_line(axes: Axes, value: float) -> None:
    """What guessing scores: a dotted line over the whole width."""
    axes.axhline(value, color=GREY, linestyle=":", linewidth=1, label=CHANCE)


def finish(figure: Figure, note: str) -> Figure:
    """Put one legend of all panels above them, and the note below: what holds for every panel."""
    handles: dict[str, Artist] = {}
    for axes in figure.axes:
        artists, texts = axes.get_legend_handles_labels()
        handles |= dict(zip(texts, artists, strict=True))
    names = ordered(handles)
    if names:
        width, longest = figure.get_figwidth(), MARK_INCHES + LETTER_INCHES * max(map(len, names))
        fitting = max(1, min(round(width / LEGEND_INCHES), int(width / longest)))
        rows = -(-len(names) // fitting)
        shown = [handles[name] for name in names]
        figure.legend(shown, names, loc="outside upper center", ncols=-(-len(names) // rows))
        figure.set_figheight(figure.get_figheight() + max(0, rows - ROOM_ROWS) * ROW_INCHES)
    letters = int(figure.get_figwidth() * NOTE_LETTERS_PER_INCH)
    wrapped = "\n".join(line for paragraph in note.split("\n") for line in textwrap.wrap(paragraph, letters))
    figure.supxlabel(wrapped, x=0.01, ha="left", fontsize=6, color="#444444")
    return figure
