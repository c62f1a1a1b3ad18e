"""How all figures look: one colour, marker, line and hatch per label.

Black-and-white print tells them apart. The colours in `registry.yaml` are safe for the common kinds
of colour blindness.
"""

import re
import textwrap
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain, cycle
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
import yaml
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from plots.data import OWN, split

REGISTRY = yaml.safe_load(Path(__file__).with_name("registry.yaml").read_text(encoding="utf-8"))
BUDGET_AXIS = "budget: share of the cache read (%)"
KL_AXIS = "KL(full || method) (nats)"
PANEL_INCHES = (3.4, 2.5)  # one column of a two-column page
LEGEND_INCHES = 1.7
MARK_INCHES, LETTER_INCHES = 0.5, 0.05
"""Of an entry of a legend: what it takes without its name, and for each letter of it."""
ROOM_ROWS, ROW_INCHES = 4, 0.15
"""Rows of a legend that a figure has room for; what each further one adds to its height."""
WIDE = 10
NOTE_LETTERS_PER_INCH, TICK_LETTERS = 22, 24
OWN_MARK = " *"
OWN_NOTE = "* with runs of one's own; the others are shipped with the project"
FILLED = 0.84
"""Share of a group's width that its bars cover."""

RC: Any = {
    "font.size": 8, "axes.titlesize": 8, "legend.fontsize": 7, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.axisbelow": True, "grid.color": "#DDDDDD", "grid.linewidth": 0.5, "hatch.linewidth": 0.5,
    "lines.linewidth": 1.2, "lines.markersize": 4.5, "pdf.fonttype": 42,
    "svg.hashsalt": "kv-harness",  # equal names of parts on a rerun
    "text.parse_math": False,  # a dollar in a label is a dollar
}  # fmt: skip

DrawPanel = Callable[[Axes, pd.DataFrame], None]
Panel = tuple[str, pd.DataFrame, DrawPanel]
"""The title of a panel, its rows, and what draws them."""


class Look(NamedTuple):
    """A label's appearance."""

    color: str
    marker: str
    line: str
    hatch: str = ""


COLORS = REGISTRY["colors"]
BLACK, BLUE, GREEN, ORANGE = (COLORS[name] for name in ("black", "blue", "green", "orange"))
VERMILION, GREY, LIGHT_GREY = (COLORS[name] for name in ("vermilion", "grey", "light_grey"))

FULL, CHANCE, PREFILL = "Full cache", "chance", "prefill (light)"
OF_PAPER = "published (RTX A6000)"
QUANTIZED = "INT8/4/2/1"
WIDTH = re.compile(r"INT[1248]")
ASKED, NOT_ASKED = r"(?:^|, )budget=", "budget not set"
"""In the settings of a run that was asked for a budget, and the words for a run that was not."""
LOOKS = {label: Look(*look) for label, look in REGISTRY["looks"].items()}
SEQUENCE = [Look(*look) for look in REGISTRY["sequence"]]
OTHERS = [
    Look(COLORS[color], *shape)
    for shape in (("P", "-", "*"), ("X", "--", "O"), ("h", "-.", "|||"), ("8", ":", "---"))
    for color in ("wine", "teal", "indigo", "olive")
]
"""Of labels that are not listed."""
_given: dict[str, Look] = {}
"""The looks of `OTHERS` that labels have, while the figures of one folder are drawn."""

BAR: Any = {"edgecolor": "white", "linewidth": 0}
"""Of bars that stand on one another."""
PREFILL_BAR: Any = {"color": "#F2F2F2", "edgecolor": GREY, "linewidth": 0.5, "label": PREFILL}
HOLLOW: Any = {"linestyle": "", "markerfacecolor": "none", "markeredgecolor": BLACK}
PUBLISHED_MARKERS = {"quoted": "o", "derived": "D", "approximate": "s"}


def look(label: str) -> Look:
    """The label's appearance, the same in all figures that are drawn together.

    A label that is not listed gets a look by its spelling, or the next that no other label has.
    """
    if _listed(label) in LOOKS:
        return LOOKS[_listed(label)]
    if label not in _given:
        first = zlib.crc32(label.encode()) % len(OTHERS)
        in_turn = [*OTHERS[first:], *OTHERS[:first]]
        taken = set(_given.values())
        colors = {other.color for other in taken}
        free = [other for other in in_turn if other not in taken]
        in_new_color = [other for other in free if other.color not in colors]
        _given[label] = (in_new_color or free or in_turn)[0]
    return _given[label]


def ordered(labels: Iterable[str]) -> list[str]:
    """Distinct labels in the order of legends: listed ones, the others as they come, markers.

    The part after a comma, a budget for example, does not count.
    """
    return sorted(dict.fromkeys(labels), key=_rank)


def _rank(label: str) -> int:
    known = [*LOOKS, "", PREFILL, CHANCE, OF_PAPER]
    name = _listed(label.partition(",")[0])
    return known.index(name if name in known else "")


def _listed(label: str) -> str:
    """The label of `LOOKS` that stands for this one.

    Several bit widths, such as INT8/4, look like all four.
    """
    label = label.removesuffix(OWN_MARK)
    return QUANTIZED if re.fullmatch(r"INT\d(/\d)+", label) else label


def in_sequence(series: Iterable[str]) -> dict[str, Look]:
    """A look for each series of a figure, the same in all its panels.

    A method has its own, another series the next of `SEQUENCE` in a colour that none of these
    methods has.
    """
    names = dict.fromkeys(series)
    taken = {LOOKS[name].color for name in names if name in LOOKS}
    free = cycle(look for look in SEQUENCE if look.color not in taken)
    return {name: LOOKS[name] if name in LOOKS else next(free) for name in names}


def applied() -> AbstractContextManager[None]:
    """The settings above, while the figures of one folder are drawn and saved."""
    _given.clear()
    return mpl.rc_context(RC)


# Panels


def new(
    num_panels: int, *, panel_inches: tuple[float, float] = PANEL_INCHES
) -> tuple[Figure, list[Axes]]:
    """A figure of at least one panel, at most three a row, with room above for the legend. One
    panel is as wide as two."""
    columns = 2 if num_panels == 4 else min(num_panels, 3)
    rows = -(-num_panels // columns)
    width, height = panel_inches
    if num_panels == 1 and panel_inches == PANEL_INCHES:
        width *= 2
    figure = Figure(figsize=(columns * width, rows * height + 0.6), layout="constrained")
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(num_panels)]
    return figure, axes


def draw_rows(
    rows: pd.DataFrame, setup: Sequence[str], draw: DrawPanel, *, note: str = ""
) -> Figure | None:
    """A figure with a titled panel per setup; None without rows.

    Below the panels stands what they share, then `note`.
    """
    return draw_parts(rows, setup, lambda title, frame: [(title, frame, draw)], note=note)


def draw_parts(
    rows: pd.DataFrame,
    setup: Sequence[str],
    panels_of: Callable[[str, pd.DataFrame], Iterable[Panel]],
    *,
    note: str = "",
) -> Figure | None:
    """As `draw_rows`, with the panels that `panels_of` makes of the title and rows of a setup."""
    if rows.empty:
        return None
    shared, parts = split(rows, setup)
    panels = list(chain.from_iterable(panels_of(title, frame) for title, frame in parts))
    return draw_panels(panels, "; ".join(filter(None, [shared, note])))


def draw_panels(panels: Sequence[Panel], note: str) -> Figure | None:
    """A figure of these panels; None without any."""
    if not panels:
        return None
    figure, all_axes = new(len(panels))
    for axes, (title, frame, draw) in zip(all_axes, panels, strict=True):
        draw(axes, frame)
        axes.set_title(title)
        mark_own(axes, frame)
    return finish(figure, note)


def mark_own(axes: Axes, rows: pd.DataFrame) -> None:
    """Mark the names of one's own runs among shipped ones, in the legend and on the axes.

    A name is a label or a series, whatever follows its first comma.
    """
    if OWN not in rows or not rows[OWN].any():
        return
    own: set[str] = set()
    for column in ("label", "series"):
        if column in rows:
            own |= {_name(text) for text in rows[column][rows[OWN].fillna(False)]}
    for artist, text in zip(*axes.get_legend_handles_labels(), strict=True):
        if _name(text) in own:
            artist.set_label(text + OWN_MARK)
    for axis in (axes.xaxis, axes.yaxis):
        texts = [label.get_text() for label in axis.get_ticklabels()]
        marked = [text + OWN_MARK if _name(text) in own else text for text in texts]
        if marked != texts:
            axis.set_ticklabels(marked)


def _name(text: str) -> str:
    """The name of a method in a legend or below a bar; one for all widths of an integer codec."""
    name = " ".join(text.split()).partition(", ")[0]
    return QUANTIZED if WIDTH.fullmatch(name) else _listed(name)


def finish(figure: Figure, note: str) -> Figure:
    """Put one legend of all panels above them, and the note below."""
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
    shown_words = list(names)
    for axes in figure.axes:
        ticks = (*axes.get_yticklabels(), *axes.get_xticklabels())
        shown_words += [tick.get_text() for tick in ticks]
    if any(text.endswith(OWN_MARK) for text in shown_words):
        note = f"{note}\n{OWN_NOTE}"
    letters = int(figure.get_figwidth() * NOTE_LETTERS_PER_INCH)
    lines: list[str] = []
    for paragraph in note.split("\n"):
        lines += textwrap.wrap(paragraph, letters)
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=6, color="#444444")
    return figure


def error_note(rows: pd.DataFrame) -> str:
    """What the error bars of `rows` are.

    KL and agreement compare with the full cache by themselves.
    """
    by_themselves = rows.metric.isin(["perplexity_full", "kl_nats", "top1_agreement"])
    paired = rows[(rows.label != FULL) & ~by_themselves].difference.notna()
    if not paired.any():
        return "bars: one standard error"
    note = "bars: standard error of the difference to the full cache"
    return note if paired.all() else f"{note}, else of the value"


# Lines


def error_line(
    axes: Axes,
    x: pd.Series,
    y: pd.Series,
    stderr: pd.Series | np.ndarray | None,
    *,
    name: str,
    like: Look,
    **other: Any,
) -> None:
    """A line with markers and error bars of one standard error, broken where `y` is NaN.

    other: settings that change its look.
    """
    looks: Any = {"color": like.color, "marker": like.marker, "linestyle": like.line, **other}
    axes.errorbar(x, y, yerr=stderr, label=name, capsize=2, elinewidth=0.8, **looks)


def joined(labels: Iterable[str]) -> str:
    """The name of the line through the codecs of a figure: INT8/4 where it has these bit widths."""
    widths = {label.removeprefix("INT") for label in labels if WIDTH.fullmatch(label)}
    return "INT" + "/".join(sorted(widths, reverse=True))


def budget_lines(axes: Axes, rows: pd.DataFrame, factor: float = 1, *, codecs: str) -> None:
    """A line per method, `factor` times the value by budget, without the full cache.

    codecs: the name of the line through all bit widths. A line joins runs of one kind: where only
    some of a method's runs were asked for a budget, the others, whose budget follows from a
    setting, are a second line of hollow markers.
    """
    methods = rows[rows.label != FULL]
    names = methods.label.where(~methods.label.str.fullmatch(WIDTH), codecs)
    asked = methods.settings.fillna("").str.contains(ASKED)
    for name in ordered(names):
        of_name = asked[names == name]
        for kind in of_name.unique():
            second = not kind and of_name.any()
            line = methods[(names == name) & (asked == kind)].sort_values("budget")
            words = f"{name}, {NOT_ASKED}" if second else name
            look_of_second: Any = {"markerfacecolor": "white", "linestyle": ":"} if second else {}
            x, y, stderr = 100 * line["budget"], factor * line.value, factor * line.stderr
            error_line(axes, x, y, stderr, name=words, like=look(name), **look_of_second)
    axes.set_xlim(left=0)


def log_y(axes: Axes, values: pd.Series | None = None) -> None:
    """A logarithmic y axis with plain numbers at 1, 2 and 5.

    Given `values`, only where the largest is over `WIDE` times the smallest.
    """
    if values is not None and not values.max() > WIDE * values.min():
        return
    axes.set_yscale("log")
    _plain_numbers(axes.yaxis)


def log_x(axes: Axes) -> None:
    """A logarithmic x axis with plain numbers at 1, 2 and 5."""
    axes.set_xscale("log")
    _plain_numbers(axes.xaxis)


def _plain_numbers(axis: Axis) -> None:
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def log2_x(axes: Axes, values: Iterable[float]) -> None:
    """A logarithmic x axis with a tick at each of the values."""
    ticks = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{x:,.0f}" for x in ticks])


def full_lines(axes: Axes, rows: pd.DataFrame, factor: float = 1) -> None:
    """The full cache: for each distinct value of `rows` a dashed line over the whole width.

    It has a band of one standard error where that is known.
    """
    color, _, line, _ = LOOKS[FULL]
    for value, stderr in factor * rows[["value", "stderr"]].drop_duplicates().to_numpy():
        axes.axhline(value, color=color, linestyle=line, linewidth=1, label=FULL)
        if not pd.isna(stderr):
            axes.axhspan(value - stderr, value + stderr, color=color, alpha=0.08, linewidth=0)


def chance_line(axes: Axes, value: float) -> None:
    """What guessing scores: a dotted line over the whole width."""
    axes.axhline(value, color=GREY, linestyle=":", linewidth=1, label=CHANCE)


# Bars

BarCentres = dict[str, np.ndarray]
"""By label, the x of its bar in each group."""


def place_bars(
    axes: Axes, labels: Sequence[str], groups: Sequence[str]
) -> tuple[BarCentres, float]:
    """Place a bar per label into every group, and name the groups below the axis.

    Returns the centres of the bars, and their width.
    """
    width = FILLED / len(labels)
    centres = np.arange(len(groups))
    axes.set_xticks(centres, groups)
    axes.grid(visible=False, axis="x")
    found = {}
    for number, label in enumerate(labels):
        found[label] = centres + (number - (len(labels) - 1) / 2) * width
    return found, width


def grouped(
    axes: Axes, values: pd.DataFrame, *, errors: pd.DataFrame | None = None, groups: Sequence[str]
) -> BarCentres:
    """One bar per number of `values` (a row per group, a column per label); NaN is a gap."""
    found, width = place_bars(axes, ordered(values.columns), groups)
    for label, x in found.items():
        color, _, _, hatch = look(label)
        axes.bar(
            x,
            values[label],
            width,
            yerr=None if errors is None else errors[label],
            capsize=2,
            label=label,
            color=color,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.4,
            error_kw={"elinewidth": 0.8},
        )
    return found


def bars_of_one(axes: Axes, rows: pd.DataFrame, *, name: str, groups: Sequence[str]) -> BarCentres:
    """A bar with its standard error for each row, all in the look of the label `name`.

    groups: the names of the bars.
    """
    values = rows[["value"]].set_axis([name], axis=1)
    errors = rows[["stderr"]].set_axis([name], axis=1)
    return grouped(axes, values, errors=errors, groups=groups)


def name_bars(axes: Axes, x: Iterable[float], labels: Iterable[str]) -> None:
    """Slanted labels below single bars, long ones in several lines."""
    names = [textwrap.fill(label, TICK_LETTERS) for label in labels]
    axes.set_xticks([*x], names, rotation=35, ha="right")


def mark_published(
    axes: Axes, found: Mapping[str, np.ndarray], groups: Sequence[float | str], points: pd.DataFrame
) -> None:
    """The paper's numbers as hollow markers on the bars of their series and group, by kind."""
    for _, point in points.iterrows():
        if point.series in found and point.x in groups:
            x = found[point.series][groups.index(point.x)]
            words, marker = f"{OF_PAPER}, {point.kind}", PUBLISHED_MARKERS[point.kind]
            axes.plot(x, point.value, label=words, marker=marker, **HOLLOW)
